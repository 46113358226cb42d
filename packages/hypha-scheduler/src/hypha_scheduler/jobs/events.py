"""Events of a job: ``metrics.jsonl`` and the log, records of the runner in the journal, metrics for the status bridge.

Programs such as `hypha-local` and `export-metrics` read the events. Secret parts of URLs are hidden in them. While the
files of a job cannot be written, `EndRecorder` tries again to write its end, so that the submitter hears of it at once.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

import anyio

from hypha_net.peer_names import name_peers
from hypha_net.redaction import redact_urls
from hypha_proto.ids import PeerId, printable_name
from hypha_proto.record_file import EVENTS, RecordFile
from hypha_proto.texts import shorten
from hypha_scheduler.allocation.shortage import Shortage
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.journal import JOURNAL, Journal
from hypha_scheduler.metrics.status_bridge import StatusBridge
from hypha_scheduler.strategies.base import Lease, PostMetric, TaskEnded, TaskRef

_log = logging.getLogger(__name__)

_LONGEST: Final = 1 << 16
"""Characters of a text: the error of a job may have the last lines of several executors."""
_DEBUG_EVENTS: Final = frozenset({"metric", "task_started"})
RETRY_INTERVAL: Final = 2.0
"""Seconds between two attempts to record an end."""
RETRY_LIMIT: Final = 3600.0
"""Seconds after which the end of a job stays unrecorded."""


Record = tuple[str, Mapping[str, object]]
"""Kind and fields of a record for the journal."""


class EventFile:
    """Appends events to a file as JSON lines; each line is written at once."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending."""
        self._file = RecordFile(path)

    def __enter__(self) -> EventFile:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    def write(self, event: str, at: float | None = None, /, **fields: object) -> None:
        """Write an event with its time, by default now, and log it; numbers that are not finite become null.

        Raises:
            OSError: it could not be written; the file ends with the event before.
        """
        line = {"event": event, "time": at or round(time.time(), 3)} | {
            key: _plain(value) for key, value in fields.items()
        }
        self._file.append(line)
        level = logging.DEBUG if event in _DEBUG_EVENTS else logging.INFO
        _log.log(level, "%s", _readable(event, fields), extra={"event": event, "fields": line})


@dataclass(slots=True)
class EndRecord:
    """How a job ended, and which of its files do not say so yet."""

    directory: Path
    kind: str
    """``finished``, ``failed`` or ``interrupted``."""
    record: Mapping[str, object]
    """Fields of the journal's record."""
    event: Mapping[str, object]
    """Fields of the event."""
    time: float = field(default_factory=lambda: round(time.time(), 3))
    """Seconds since the Unix epoch."""
    _in_journal: bool = False
    _in_events: bool = False

    def write(self) -> None:
        """Write the record and the event, each once.

        Raises:
            OSError: one of them could not be written; a further call writes what is missing.
        """
        if not self._in_events:
            with EventFile(self.directory / EVENTS) as events:
                events.write(self.kind, self.time, **self.event)
            self._in_events = True
        if not self._in_journal:
            with Journal(self.directory / JOURNAL) as journal:
                journal.record(self.kind, **{**self.record, "time": self.time})
            self._in_journal = True


@dataclass(slots=True)
class EndRecorder:
    """Ends of jobs that could not be written yet."""

    limit: float = RETRY_LIMIT
    """Seconds after which an end is given up."""
    _pending: dict[Path, tuple[EndRecord, float]] = field(default_factory=dict)
    """Ends by directory, with the time at which each is given up."""
    _added: anyio.Event = field(default_factory=anyio.Event)

    def record(self, end: EndRecord) -> None:
        """Write an end, now or, if that fails, in the background."""
        try:
            end.write()
        except OSError as error:
            _log.error("the end of a job is not recorded: %s; trying again for %g s", error, self.limit)
            self._pending[end.directory] = (end, anyio.current_time() + self.limit)
            self._added.set()

    async def run(self) -> None:
        """Write what could not be written, until cancelled."""
        try:
            while True:
                await self.drain(float("inf"))
                self._added = anyio.Event()
                await self._added.wait()
        finally:
            self._try_all()
            for directory in self._pending:
                _log.error("the end of the job in %s stays unrecorded: the scheduler ends", directory)

    async def drain(self, seconds: float) -> None:
        """Try until every end is written or given up, for at most `seconds`."""
        with anyio.move_on_after(seconds):
            while self._pending:
                await anyio.sleep(RETRY_INTERVAL)
                self._try_all()

    def _try_all(self) -> None:
        for end, until in list(self._pending.values()):
            try:
                end.write()
            except OSError as error:
                if anyio.current_time() < until:
                    continue
                _log.error("the end of a job stays unrecorded after %g s: %s", self.limit, error)
            else:
                _log.info("the end of the job in %s is recorded", end.directory)
            del self._pending[end.directory]


@dataclass(slots=True)
class JobEvents:
    """Event file, journal and metrics of one job; a context manager that opens and closes the files."""

    job_id: uuid.UUID
    directory: Path
    """Of the files; it must exist."""
    bridge: StatusBridge | None = None
    resume: bool = False
    """Whether the files of an interrupted job are continued; entering fails while another scheduler runs it."""
    certificate_names: Callable[[], Mapping[PeerId, str]] = dict
    """Returns those of the peers that are connected."""
    journal: Journal = field(init=False)
    _names: dict[str, str] = field(default_factory=dict)
    """Names in the certificates of peers that are or were connected."""
    _resources: ExitStack = field(default_factory=ExitStack)
    _events: EventFile = field(init=False)

    def __enter__(self) -> JobEvents:
        self._events = self._resources.enter_context(EventFile(self.directory / EVENTS))
        self.journal = self._resources.enter_context(Journal(self.directory / JOURNAL))
        if not self.journal.lock() and self.resume:
            self._resources.close()
            raise JobFailedError(f"{self.directory}: another scheduler runs this job; stop it first")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._resources.close()

    def emit(self, event: str, /, **fields: object) -> None:
        """Write an event to ``metrics.jsonl`` and the log; one of a worker gets the name in its certificate, too."""
        name = self.name_of(str(fields.get("worker", fields.get("peer", ""))))
        if "name" not in fields and name is not None:  # a metric and a new lease have one
            fields["worker_name"] = name
        self._events.write(event, **fields)

    def post(self, metric: PostMetric) -> None:
        """Queue a metric for the status bridge."""
        if self.bridge is not None:
            self.bridge.put(str(metric.worker), metric.step, metric.name, metric.value, job_id=str(self.job_id))

    def accepted(self, job: Mapping[str, object], steps: int | None = None) -> None:
        """Report the start of the job, which plans so many steps; secrets in `job` must be masked already."""
        self.journal.record("accepted", job_id=str(self.job_id), job=job)
        about = {"name": job.get("name"), "type": job.get("type"), "rounds": steps}
        known = {key: value for key, value in about.items() if value is not None}
        self.emit("accepted", job_id=str(self.job_id), directory=str(self.directory), **known)

    def resumed(self, adopted: Sequence[TaskRef] = ()) -> None:
        """Report that the job is continued, with these tasks of its earlier run."""
        tasks = [_recorded_task(task) for task in adopted]
        fields = {"leases": _recorded([task.lease for task in adopted]), "tasks": tasks} if tasks else {}
        self.journal.record("resumed", job_id=str(self.job_id), **fields)
        about = {"adopted": len(tasks)} if tasks else {}
        self.emit("resumed", job_id=str(self.job_id), directory=str(self.directory), **about)

    def placed(self, leases: Sequence[Lease], seconds: float) -> None:
        """Report the leases with which the job begins, all held `seconds` after the first request."""
        workers = self._describe_workers(leases)
        self.emit("placement", seconds=round(seconds, 4), workers=workers)
        self.journal.record("placed", leases=_recorded(leases))

    def leased(self, leases: Sequence[Lease], seconds: float) -> Record:
        """Report leases that were added to a running job, `seconds` after the first request for them.

        Returns the record of them, for the journal.
        """
        for fields in self._describe_workers(leases):
            self.emit("lease_added", seconds=round(seconds, 4), **fields)
        return "leased", {"leases": _recorded(leases)}

    def name_peers_in(self, value: object) -> object:
        """Return plain values in which each mapping with a `peer` has the name in its certificate, if it is known."""
        if isinstance(value, Mapping):
            name = self.name_of(str(value.get("peer", "")))
            named = {key: self.name_peers_in(each) for key, each in value.items()}
            return named if name is None else {"name": name, **named}
        return [self.name_peers_in(each) for each in value] if isinstance(value, list | tuple) else value

    def name_of(self, peer: str) -> str | None:
        """Return the name in the certificate of a peer that is or was connected."""
        if peer and peer not in self._names:
            self._names |= {str(known): printable_name(name) for known, name in self.certificate_names().items()}
        return self._names.get(peer)

    def _describe_workers(self, leases: Sequence[Lease]) -> list[dict[str, object]]:
        return [
            {"peer": str(lease.peer), "role": lease.role, "price": lease.price}
            | ({"name": name} if (name := self.name_of(str(lease.peer))) else {})
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

    def task_started(self, task: TaskRef) -> Record:
        """Report that a worker has confirmed an attempt at a task; return the record of it, for the journal."""
        self.emit("task_started", task=task.name, attempt=task.attempt, worker=str(task.lease.peer))
        return "started", _recorded_task(task)

    def task_ended(self, task: TaskRef, end: TaskEnded) -> Record:
        """Report the end of an attempt at a task; return the record of it, for the journal."""
        fields = {"task": task.name, "attempt": task.attempt, "outcome": end.state.value}
        self.emit("task_ended", **fields, worker=str(task.lease.peer), **_details(end))
        return "ended", {**fields, "lease": str(task.lease.id), "exit_code": end.exit_code}

    def failed(self, error: str, *, is_cancelled: bool = False) -> EndRecord:
        """Return the record of the job's failure, or that its owner has cancelled it."""
        fields: dict[str, object] = {"error": error} | ({"cancelled": True} if is_cancelled else {})
        return EndRecord(self.directory, "failed", fields, fields)

    def interrupted(self, reason: str, *, tasks_run_on: bool) -> EndRecord:
        """Return the record that the scheduler ended before the job, and whether the job's tasks run on."""
        fields = {"reason": reason, "tasks_run_on": tasks_run_on}
        return EndRecord(self.directory, "interrupted", fields, fields)

    def finished(self, summary: Mapping[str, object]) -> EndRecord:
        """Return the record of the job's success; the journal gets the plain values of its summary."""
        plain = {key: value for key, value in summary.items() if isinstance(value, int | float | str | None)}
        return EndRecord(self.directory, "finished", plain, summary)


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


def _readable(event: str, fields: Mapping[str, object]) -> str:
    """Format an event's scalar fields as a log line."""
    short = [f"{key}={_short(value)}" for key, value in fields.items() if isinstance(value, int | float | str)]
    return " ".join([event, *short])


def _short(value: int | float | str) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return redact_urls(str(value)).partition("\n")[0]


def _plain(value: object) -> object:
    if isinstance(value, str):
        return name_peers(shorten(redact_urls(value), _LONGEST))  # workers' reasons
    return None if isinstance(value, float) and not math.isfinite(value) else value
