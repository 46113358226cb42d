"""Status updates of workers about tasks, checked: each becomes the `TaskUpdate` that the operator hears of. Pure.

A worker may send anything that decodes. What contradicts the task's specification ends the attempt as failed.
"""

from __future__ import annotations

import math
from typing import Final

from hypha_net.redaction import redact_urls
from hypha_proto.ids import find_path_fault
from hypha_proto.tasks import (
    MAX_OUTPUT_FILES,
    StatusUpdate,
    StoredOutput,
    TaskFailed,
    TaskFinished,
    TaskProgress,
    TaskSpec,
)
from hypha_proto.texts import one_line, quote, shorten
from hypha_scheduler.strategies.base import (
    TaskDraining,
    TaskEnded,
    TaskProgressed,
    TaskReady,
    TaskStarted,
    TaskState,
    TaskUpdate,
    TrafficCounts,
)

_MAX_OUTPUT_BYTES: Final = 1 << 40
"""Largest size in bytes of all outputs of one attempt."""
_MAX_REASON: Final = 1000
_MAX_LINE: Final = 500
_MAX_LINES: Final = 50
_MAX_MESSAGE: Final = 400
_MAX_DATASET: Final = 200
_MAX_METRICS: Final = 100


class InvalidUpdateError(Exception):
    """A status update contradicts the task's specification; the message continues ``its worker reported``."""


def read_update(update: StatusUpdate, spec: TaskSpec | None) -> TaskUpdate | None:
    """Return what a status update about an attempt at `spec` says, with its texts cut; None if nothing known.

    Without a specification the attempt has neither resources nor outputs.

    Raises:
        InvalidUpdateError: it contradicts the specification.
    """
    kinds = (update.started, update.ready, update.progress, update.draining, update.answered)
    ends = (update.finished, update.failed, update.cancelled)
    if sum(kind is not None for kind in (*kinds, *ends)) > 1:
        raise InvalidUpdateError("several things in one message")
    if update.started is not None:
        return TaskStarted()
    if update.ready is not None:
        return TaskReady()
    if update.progress is not None:
        return TaskProgressed(_checked_progress(update.progress))
    if update.draining is not None:
        return TaskDraining(update.draining.left_ms / 1000)
    return _read_end(update, spec)


def _read_end(update: StatusUpdate, spec: TaskSpec | None) -> TaskEnded | None:
    if update.finished is not None:
        return TaskEnded(TaskState.FINISHED, exit_code=0, outputs=_checked_outputs(update.finished, spec))
    if update.failed is not None:
        return _failed(update.failed, spec)
    if update.cancelled is not None:
        return TaskEnded(TaskState.CANCELLED, _shorten(update.cancelled.reason, _MAX_REASON))
    return None


def _failed(failed: TaskFailed, spec: TaskSpec | None) -> TaskEnded:
    known = () if spec is None else spec.resources
    if failed.resource is not None and all(failed.resource != resource.name for resource in known):
        raise InvalidUpdateError(f"that it lacks the resource {quote(failed.resource)}, which the task does not have")
    lines = tuple(_shorten(line, _MAX_LINE) for line in failed.last_lines[-_MAX_LINES:])
    reason = _shorten(failed.reason, _MAX_REASON)
    return TaskEnded(TaskState.FAILED, reason, failed.exit_code, lines, resource=failed.resource)


def _shorten(text: str, limit: int) -> str:
    return shorten(redact_urls(text), limit)


def traffic_of(update: StatusUpdate) -> TrafficCounts | None:
    """Return the bytes that the end of an attempt states; None if it is no end."""
    end = update.finished or update.failed or update.cancelled
    return None if end is None else TrafficCounts(end.bytes_sent, end.bytes_received)


def _checked_progress(progress: TaskProgress) -> TaskProgress:
    """Return progress with its texts cut; numbers of executors may be infinite, their share of the work may not."""
    if progress.fraction is not None and not (math.isfinite(progress.fraction) and 0 <= progress.fraction <= 1):
        raise InvalidUpdateError(f"progress of {progress.fraction:g}, which is not from 0 to 1")
    metrics = progress.metrics
    if metrics is not None and (len(metrics) > _MAX_METRICS or any(len(name) > _MAX_LINE for name in metrics)):
        raise InvalidUpdateError(f"more than {_MAX_METRICS} metrics, or a name of over {_MAX_LINE} characters")
    message = None if progress.message is None else one_line(redact_urls(progress.message), _MAX_MESSAGE)
    return TaskProgress(fraction=progress.fraction, message=message, metrics=metrics)


# ------------------------------------------------------------------------------------------------------------- outputs


def _checked_outputs(finished: TaskFinished, spec: TaskSpec | None) -> tuple[StoredOutput, ...]:
    """Return the outputs in the order of the specification."""
    made = {output.name: output for output in finished.outputs}
    wanted = [] if spec is None else [output.name for output in spec.outputs]
    if len(made) < len(finished.outputs):
        raise InvalidUpdateError("an output twice")
    if unwanted := made.keys() - set(wanted):
        raise InvalidUpdateError(f"the output {quote(min(unwanted))}, which it was not asked for")
    if lacking := set(wanted) - made.keys():
        raise InvalidUpdateError(f"an end without the output {min(lacking)!r}")
    if sum(len(output.files) for output in finished.outputs) > MAX_OUTPUT_FILES:
        raise InvalidUpdateError(f"more than {MAX_OUTPUT_FILES} files")
    if sum(output.size for output in finished.outputs) > _MAX_OUTPUT_BYTES:
        raise InvalidUpdateError(f"outputs of more than {_MAX_OUTPUT_BYTES} bytes")
    if len({output.dataset for output in finished.outputs}) < len(made):
        raise InvalidUpdateError("two outputs under one name of a dataset")
    for output in finished.outputs:
        _check_output(output)
    return tuple(made[name] for name in wanted)


def _check_output(output: StoredOutput) -> None:
    """Check that an output can be written as a file or folder."""
    what = f"the output {output.name!r}"
    if not 0 < len(output.dataset) <= _MAX_DATASET:
        raise InvalidUpdateError(f"{what} under a dataset's name of {len(output.dataset)} characters")
    if any(not file.digest.startswith("blake3:") for file in output.files):
        raise InvalidUpdateError(f"{what} with a digest which is not of blake3")
    if not output.is_file and (fault := find_path_fault(file.path for file in output.files)) is not None:
        raise InvalidUpdateError(f"{what} with {fault}")
