"""Events of a job: ``metrics.jsonl`` and the log, records of the runner in the journal, metrics for the status bridge.

Called by `runner` for what happens to every job and for what its operator asks for. Programs such as `hypha-local` and
`export-metrics` read the events.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final

from hypha_proto.ids import PeerId
from hypha_scheduler.allocation.shortage import Shortage
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.end_record import EndRecord
from hypha_scheduler.jobs.event_file import EVENTS, EventFile
from hypha_scheduler.jobs.journal import JOURNAL, Journal
from hypha_scheduler.metrics.status_bridge import StatusBridge
from hypha_scheduler.strategies.base import Lease, PostMetric, TaskEnded, TaskRef

_MAX_NAME: Final = 64


class JobEvents:
    """Event file, journal and metrics of one job; a context manager that opens and closes the files."""

    def __init__(
        self,
        job_id: uuid.UUID,
        directory: Path,
        bridge: StatusBridge | None = None,
        *,
        resume: bool = False,
        certificate_names: Callable[[], Mapping[PeerId, str]] = dict,
    ) -> None:
        """Write to files in `directory`, which must exist, and to `bridge` if there is one.

        `resume` continues the files of an interrupted job; entering fails while another scheduler runs it.
        `certificate_names` are those of the peers that are connected.
        """
        self._resume = resume
        self._job_id = str(job_id)
        self._directory = directory
        self._bridge = bridge
        self._certificate_names = certificate_names
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

    def accepted(self, job: Mapping[str, object], steps: int | None = None) -> None:
        """Report the start of the job, which plans so many steps; secrets in `job` must be masked already."""
        self.journal.record("accepted", job_id=self._job_id, job=job)
        about = {"name": job.get("name"), "type": job.get("type"), "rounds": steps}
        known = {key: value for key, value in about.items() if value is not None}
        self.emit("accepted", job_id=self._job_id, directory=str(self._directory), **known)

    def resumed(self, adopted: Sequence[TaskRef] = ()) -> None:
        """Report that the job is continued, with these tasks of its earlier run."""
        tasks = [_recorded_task(task) for task in adopted]
        fields = {"leases": _recorded([task.lease for task in adopted]), "tasks": tasks} if tasks else {}
        self.journal.record("resumed", job_id=self._job_id, **fields)
        about = {"adopted": len(tasks)} if tasks else {}
        self.emit("resumed", job_id=self._job_id, directory=str(self._directory), **about)

    def placed(self, leases: Sequence[Lease], seconds: float) -> None:
        """Report the leases with which the job begins, all held `seconds` after the first request."""
        workers = self._describe_workers(leases)
        self.emit("placement", seconds=round(seconds, 4), workers=workers)
        self.journal.record("placed", leases=_recorded(leases))

    def leased(self, leases: Sequence[Lease], seconds: float) -> None:
        """Report leases that were added to a running job, `seconds` after the first request for them."""
        for fields in self._describe_workers(leases):
            self.emit("lease_added", seconds=round(seconds, 4), **fields)
        self.journal.record_async("leased", leases=_recorded(leases))

    def _describe_workers(self, leases: Sequence[Lease]) -> list[dict[str, object]]:
        names = self._certificate_names()
        return [
            {"peer": str(lease.peer), "role": lease.role, "price": lease.price}
            | ({"name": printable(name)} if (name := names.get(lease.peer)) else {})
            for lease in leases
        ]

    def draining(self, lease: Lease, seconds: float, reason: str) -> None:
        """Report that the worker of a lease ends when its task has ended, after `seconds` in any case."""
        self.emit("lease_draining", peer=str(lease.peer), role=lease.role, seconds=seconds, reason=reason)

    def shortage(self, shortage: Shortage) -> None:
        """Report how many workers are there, and why others are missing."""
        found = shortage.leases
        counts = {} if found is None else {"held": found.held, "wanted": found.wanted, "minimum": found.minimum}
        self.emit(
            "shortage",
            role=shortage.role,
            **counts,
            suitable=shortage.suitable,
            known=shortage.known,
            rejections=dict(shortage.counts),
            text=str(shortage),
        )

    @staticmethod
    def started(task: TaskRef) -> tuple[str, Mapping[str, object]]:
        """Return the record that a worker has confirmed a task, which the next scheduler may take up."""
        return "started", _recorded_task(task)

    def task_started(self, task: TaskRef) -> None:
        """Report that a worker has confirmed an attempt at a task."""
        self.emit("task_started", task=task.name, attempt=task.attempt, worker=str(task.lease.peer))

    def task_ended(self, task: TaskRef, end: TaskEnded, *, is_recorded: bool) -> None:
        """Report the end of an attempt at a task; `is_recorded`: the next scheduler would take it up otherwise."""
        fields = {"task": task.name, "attempt": task.attempt, "outcome": end.state.value}
        record = self.journal.record_async if is_recorded else self.journal.record_lazily
        record("ended", **fields, lease=str(task.lease.id), exit_code=end.exit_code)
        self.emit("task_ended", **fields, worker=str(task.lease.peer), **_details(end))

    def failed(self, error: str, *, is_cancelled: bool = False) -> EndRecord:
        """Return the record of the job's failure, or that its owner has cancelled it."""
        fields: dict[str, object] = {"error": error} | ({"cancelled": True} if is_cancelled else {})
        return EndRecord(self._directory, "failed", fields, fields)

    def interrupted(self, reason: str, *, tasks_run_on: bool) -> EndRecord:
        """Return the record that the scheduler ended before the job, and whether the job's tasks run on."""
        fields = {"reason": reason, "tasks_run_on": tasks_run_on}
        return EndRecord(self._directory, "interrupted", fields, fields)

    def finished(self, summary: Mapping[str, object]) -> EndRecord:
        """Return the record of the job's success; the journal gets the plain values of its summary."""
        plain = {key: value for key, value in summary.items() if isinstance(value, int | float | str | None)}
        return EndRecord(self._directory, "finished", plain, summary)


def printable(name: str) -> str:
    """Return a certificate's name for display: at most 64 characters, none of which controls a terminal."""
    return "".join(character if character.isprintable() else "?" for character in name[:_MAX_NAME])


def _details(end: TaskEnded) -> dict[str, object]:
    """Return what an event says of an end beside its outcome."""
    found = {"reason": end.reason, "exit_code": end.exit_code, "resource": end.resource}
    return {key: value for key, value in found.items() if value not in ("", None)}


def _recorded(leases: Sequence[Lease]) -> list[dict[str, object]]:
    return [
        {"peer": str(lease.peer), "role": lease.role, "lease": str(lease.id), "price": lease.price} for lease in leases
    ]


def _recorded_task(task: TaskRef) -> dict[str, object]:
    return {"task": task.name, "attempt": task.attempt, "lease": str(task.lease.id)}
