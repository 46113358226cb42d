"""Errors that end a run, each logged as one line; and those of single rows, recorded in the results instead."""

from __future__ import annotations

import errno
from typing import Final

from hypha_proto.texts import one_line

_WORDS: Final = ("out of memory", "not enough memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory is exhausted."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return any(words in str(error).lower() for words in _WORDS)


def reason_of(error: BaseException) -> str:
    """Return the text of a library's error in one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


class ExecutorError(Exception):
    """Base of all errors of this package; the process exits with code 1."""


class JobError(ExecutorError):
    """The job is invalid or not supported; the process exits with code 2."""


class ModelError(ExecutorError):
    """The model's files are not a complete model for the task, or an update does not match the model."""


class DeliveryError(ExecutorError):
    """The model that the job would deliver does not load with the trained weights; the process exits with code 65."""


class DataError(ExecutorError):
    """A slice lacks tensors that the model needs, or a batch does not fit the model."""


class BridgeClosed(ExecutorError):
    """The worker closed the socket: it has exited, or it has ended this job."""


class BridgeTimeout(ExecutorError):
    """The worker did not answer, or no outer update arrived, within the timeout."""


class BridgeRefused(ExecutorError):
    """The worker answered with an error.

    Attributes:
        status: the HTTP status.
        kind: machine-readable kind of the error.
        detail: what happened, for people.
    """

    def __init__(self, what: str, status: int, kind: str, detail: str) -> None:
        super().__init__(f"{what}: the worker answered {status} {kind}: {detail}")
        self.status = status
        self.kind = kind
        self.detail = detail


class ContributionRefused(ExecutorError):
    """The scheduler does not accept what an update was computed from: the update does not count."""


class RoundWentOn(ExecutorError):
    """The round goes on without the update; the process begins anew with the round that the scheduler names."""


class NotTakingPart(ExecutorError):
    """The scheduler names no round to begin with, now or later: the process exits with code 0."""


class NoMoreData(ExecutorError):
    """The scheduler assigns no further slice: training is over."""


class SchedulerRefused(ExecutorError):
    """The scheduler answered a progress report with an error."""


class ProcessGroupError(ExecutorError):
    """Another process of the group has exited or does not respond."""


DETAIL_LIMIT: Final = 300
"""Largest number of characters of a recorded detail."""


class RowError(Exception):
    """A row cannot be computed.

    Attributes:
        kind: one of missing-column, wrong-type, wrong-value, not-json, too-long, not-finite, out-of-memory, failed.
        detail: what is wrong, in one line.
    """

    def __init__(self, kind: str, detail: str) -> None:
        self.kind = kind
        self.detail = one_line(detail, DETAIL_LIMIT)
        super().__init__(f"{kind}: {self.detail}")


def row_error_of(error: Exception) -> RowError:
    """Return the error to record for a row whose computation raised `error`."""
    if isinstance(error, RowError):
        return error
    return RowError("failed", f"{type(error).__name__}: {error}")
