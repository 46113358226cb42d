"""Events of a job: ``metrics.jsonl`` and the log, records of the runner in the journal, metrics for the status bridge.

Called by `runner` for what happens to every job and for what its operator asks for. Programs such as `hypha-local` and
`export-metrics` read the events.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from hypha_scheduler.allocation.shortage import Shortage
from hypha_scheduler.jobs.journal import Journal
from hypha_scheduler.metrics.status_bridge import StatusBridge
from hypha_scheduler.strategies.base import Lease, PostMetric, TaskEnded, TaskRef

_log = logging.getLogger(__name__)

_MAX_TEXT: Final = 300
_DEBUG_EVENTS: Final = frozenset({"metric"})


class EventFile:
    """Appends events to a file as JSON lines; each line is written at once."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending."""
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def __enter__(self) -> EventFile:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    def write(self, event: str, **fields: object) -> None:
        """Write an event with the current time, and log it; numbers that are not finite become null."""
        line = {"event": event, "time": round(time.time(), 3)} | {key: _plain(value) for key, value in fields.items()}
        self._file.write(json.dumps(line).encode() + b"\n")
        level = logging.DEBUG if event in _DEBUG_EVENTS else logging.INFO
        _log.log(level, "%s", _readable(event, fields), extra={"event": event, "fields": line})


def _readable(event: str, fields: Mapping[str, object]) -> str:
    """Format an event's scalar fields as a log line."""
    short = [f"{key}={_short(value)}" for key, value in fields.items() if isinstance(value, int | float | str)]
    return " ".join([event, *short])


def _short(value: int | float | str) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).partition("\n")[0][:_MAX_TEXT]


def _plain(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JobEvents:
    """Event file, journal and metrics of one job; a context manager that opens and closes the files."""

    def __init__(self, job_id: uuid.UUID, directory: Path, bridge: StatusBridge | None = None) -> None:
        """Write to files in `directory`, which must exist, and to `bridge` if there is one."""
        self._job_id = str(job_id)
        self._directory = directory
        self._bridge = bridge
        self._resources = ExitStack()
        self._events: EventFile
        self.journal: Journal

    def __enter__(self) -> JobEvents:
        self._events = self._resources.enter_context(EventFile(self._directory / "metrics.jsonl"))
        self.journal = self._resources.enter_context(Journal(self._directory / "journal.jsonl"))
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._resources.close()

    def emit(self, event: str, **fields: object) -> None:
        """Write an event to ``metrics.jsonl`` and the log."""
        self._events.write(event, **fields)

    def post(self, metric: PostMetric) -> None:
        """Queue a metric for the status bridge."""
        if self._bridge is not None:
            self._bridge.put(str(metric.worker), metric.step, metric.name, metric.value, job_id=self._job_id)

    def accepted(self, job: Mapping[str, object]) -> None:
        """Report the start of the job; secrets in `job` must be masked already."""
        self.journal.record("accepted", job_id=self._job_id, job=job)
        self.emit("accepted", job_id=self._job_id, directory=str(self._directory))

    def placed(self, leases: Sequence[Lease], seconds: float) -> None:
        """Report the leases with which the job begins, all held `seconds` after the first request."""
        workers = [{"peer": str(lease.peer), "role": lease.role, "price": lease.price} for lease in leases]
        self.emit("placement", seconds=round(seconds, 4), workers=workers)
        self.journal.record("placed", leases=_recorded(leases))

    def leased(self, leases: Sequence[Lease], seconds: float) -> None:
        """Report leases that were added to a running job, `seconds` after the first request for them."""
        for lease in leases:
            fields = {"peer": str(lease.peer), "role": lease.role, "price": lease.price}
            self.emit("lease_added", seconds=round(seconds, 4), **fields)
        self.journal.record_async("leased", leases=_recorded(leases))

    def shortage(self, shortage: Shortage) -> None:
        """Report why workers are missing."""
        self.emit(
            "shortage",
            role=shortage.role,
            suitable=shortage.suitable,
            known=shortage.known,
            rejections=dict(shortage.counts),
            text=str(shortage),
        )

    def task_ended(self, task: TaskRef, end: TaskEnded) -> None:
        """Record the end of a task."""
        self.journal.record_async("ended", task=task.name, outcome=end.state.value, exit_code=end.exit_code)

    def failed(self, error: str) -> None:
        """Report that the job failed."""
        self.journal.record("failed", error=error)
        self.emit("failed", error=error)

    def finished(self, summary: Mapping[str, object]) -> None:
        """Report that the job finished; the journal gets the plain values of its summary."""
        plain = {key: value for key, value in summary.items() if isinstance(value, int | float | str | None)}
        self.journal.record("finished", **plain)
        self.emit("finished", **summary)


def _recorded(leases: Sequence[Lease]) -> list[dict[str, str]]:
    return [{"peer": str(lease.peer), "role": lease.role, "lease": str(lease.id)} for lease in leases]
