"""What can end a training run before its time. Each is shown to a person as one line."""

from __future__ import annotations


class ExecutorError(Exception):
    """Base of the errors this package raises; the process ends with code 1 and its text."""


class JobError(ExecutorError):
    """The job asks for something that this executor cannot do (the process ends with code 2)."""


class ModelError(ExecutorError):
    """The model's files do not hold a whole model of the asked kind, or an update does not fit it."""


class DataError(ExecutorError):
    """A slice does not hold the tensors that the model needs."""


class BridgeClosed(ExecutorError):
    """The worker's end of the socket is gone: the worker ended, or it ended this job."""


class BridgeTimeout(ExecutorError):
    """The worker did not answer, or an outer update did not come, within the time allowed."""


class BridgeRefused(ExecutorError):
    """The worker answered with an error.

    Attributes:
        status: the HTTP status.
        kind: kind of the error, for programs.
    """

    def __init__(self, what: str, status: int, kind: str, detail: str) -> None:
        super().__init__(f"{what}: the worker answered {status} {kind}: {detail}")
        self.status = status
        self.kind = kind


class NoMoreData(ExecutorError):
    """The scheduler hands out no further slice: training is over."""


class SchedulerRefused(ExecutorError):
    """The scheduler answered a report with an error."""


class TeamBroken(ExecutorError):
    """Another process that computes for the same job has ended, or says nothing any more."""
