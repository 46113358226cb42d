"""Events of a job: ``metrics.jsonl`` and the log, records of the runner in the journal, metrics for the status bridge.

Called by `runner` for what happens to every job and for what its operator asks for. Programs such as `hypha-local` and
`export-metrics` read the events.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from hypha_scheduler.allocation.shortage import Shortage
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.end_record import EndRecord
from hypha_scheduler.jobs.event_file import EVENTS, EventFile
from hypha_scheduler.jobs.journal import JOURNAL, Journal
from hypha_scheduler.metrics.status_bridge import StatusBridge
from hypha_scheduler.strategies.base import Lease, PostMetric, TaskEnded, TaskRef


class JobEvents:
    """Event file, journal and metrics of one job; a context manager that opens and closes the files."""

    def __init__(
        self, job_id: uuid.UUID, directory: Path, bridge: StatusBridge | None = None, *, resume: bool = False
    ) -> None:
        """Write to files in `directory`, which must exist, and to `bridge` if there is one.

        `resume` continues the files of an interrupted job; entering fails while another scheduler runs it.
        """
        self._resume = resume
        self._job_id = str(job_id)
        self._directory = directory
        self._bridge = bridge
        self._resources = ExitStack()
        self._events: EventFile
        self.journal: Journal

    def __enter__(self) -> JobEvents:
        self._events = self._resources.enter_context(EventFile(self._directory / EVENTS))
        self.journal = self._resources.enter_context(Journal(self._directory / JOURNAL))
        if not self.journal.lock() and self._resume:
            self._resources.close()
            raise JobFailedError(f"{self._directory}: another scheduler runs this job; stop it first")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._resources.close()

    def emit(self, event: str, /, **fields: object) -> None:
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

    def resumed(self) -> None:
        """Report that the job is continued."""
        self.journal.record("resumed", job_id=self._job_id)
        self.emit("resumed", job_id=self._job_id, directory=str(self._directory))

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

    def draining(self, lease: Lease, seconds: float, reason: str) -> None:
        """Report that the worker of a lease ends when its task has ended, after `seconds` in any case."""
        self.emit("lease_draining", peer=str(lease.peer), role=lease.role, seconds=seconds, reason=reason)

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

    def task_started(self, task: TaskRef) -> None:
        """Report that a worker has confirmed an attempt at a task."""
        self.emit("task_started", task=task.name, attempt=task.attempt, worker=str(task.lease.peer))

    def task_ended(self, task: TaskRef, end: TaskEnded) -> None:
        """Record the end of a task."""
        self.journal.record_async("ended", task=task.name, outcome=end.state.value, exit_code=end.exit_code)

    def attempt_ended(self, task: TaskRef, end: TaskEnded) -> None:
        """Report the end of an attempt at one of many tasks; its operator records what it needs."""
        fields = {"task": task.name, "attempt": task.attempt, "outcome": end.state.value}
        self.journal.record_lazily("ended", **fields, exit_code=end.exit_code)
        self.emit("task_ended", **fields, worker=str(task.lease.peer), **_details(end))

    def failed(self, error: str) -> EndRecord:
        """Return the record of the job's failure."""
        return EndRecord(self._directory, "failed", {"error": error}, {"error": error})

    def finished(self, summary: Mapping[str, object]) -> EndRecord:
        """Return the record of the job's success; the journal gets the plain values of its summary."""
        plain = {key: value for key, value in summary.items() if isinstance(value, int | float | str | None)}
        return EndRecord(self._directory, "finished", plain, summary)


def _details(end: TaskEnded) -> dict[str, object]:
    """Return what an event says of an end beside its outcome."""
    found = {"reason": end.reason, "exit_code": end.exit_code, "resource": end.resource}
    return {key: value for key, value in found.items() if value not in ("", None)}


def _recorded(leases: Sequence[Lease]) -> list[dict[str, str]]:
    return [{"peer": str(lease.peer), "role": lease.role, "lease": str(lease.id)} for lease in leases]
