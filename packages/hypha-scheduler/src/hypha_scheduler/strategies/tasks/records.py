"""Journal records of a job of tasks, and how they are read. Pure.

A record is of what cannot be found out again: that an instance has finished and with which outputs, that an attempt has
failed, that an output is lost, that one was brought to the scheduler. Written and replayed by `operator`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from hypha_proto.ids import PeerId
from hypha_proto.tasks import StoredFile, StoredOutput
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.strategies.base import WriteJournal

TASKS: Final = "tasks"
TASK_FINISHED: Final = "task_finished"
TASK_FAILED: Final = "task_failed"
OUTPUT_LOST: Final = "output_lost"
OUTPUT_FETCHED: Final = "output_fetched"
_OWN: Final = frozenset({TASKS, TASK_FINISHED, TASK_FAILED, OUTPUT_LOST, OUTPUT_FETCHED})


def read(journal: Iterable[Mapping[str, Any]], definition: str) -> Sequence[Mapping[str, Any]]:
    """Return what earlier runs of the job have recorded.

    Raises:
        JobFailedError: the journal is of another list of tasks.
    """
    own = [record for record in journal if record.get("record") in _OWN]
    runs = [record for record in own if record["record"] == TASKS]
    if any(record.get("definition") != definition for record in runs) or (own and not runs):
        raise JobFailedError("the journal is of another list of tasks; submit this one as a new job")
    return [record for record in own if record["record"] != TASKS]


def begun(definition: str) -> WriteJournal:
    """Record that a run of the job begins."""
    return WriteJournal(TASKS, {"definition": definition})


def finished(task: str, attempts: int, worker: PeerId, seconds: float, outputs: Iterable[StoredOutput]) -> WriteJournal:
    """Record that an instance has finished."""
    stored = [
        {"name": output.name, "dataset": output.dataset, "files": [[f.path, f.size, f.digest] for f in output.files]}
        for output in outputs
    ]
    fields = {"task": task, "attempts": attempts, "worker": str(worker), "seconds": round(seconds, 3)}
    return WriteJournal(TASK_FINISHED, {**fields, "outputs": stored})


def failed(task: str, reason: str) -> WriteJournal:
    """Record that an attempt counts as failed."""
    return WriteJournal(TASK_FAILED, {"task": task, "reason": reason})


def lost(task: str, output: str, reason: str) -> WriteJournal:
    """Record that an output is to be made again if it is needed."""
    return WriteJournal(OUTPUT_LOST, {"task": task, "output": output, "reason": reason})


def fetched(task: str, output: str, path: str) -> WriteJournal:
    """Record that an output was brought to the scheduler."""
    return WriteJournal(OUTPUT_FETCHED, {"task": task, "output": output, "path": path})


def outputs_of(record: Mapping[str, Any]) -> tuple[StoredOutput, ...]:
    """Return the outputs of a `TASK_FINISHED` record.

    Raises:
        KeyError: a field is missing.
        TypeError: a field is malformed.
    """
    return tuple(
        StoredOutput(
            name=output["name"],
            dataset=output["dataset"],
            files=tuple(StoredFile(path=path, size=size, digest=digest) for path, size, digest in output["files"]),
        )
        for output in record["outputs"]
    )
