"""Python API for the jobs of a running scheduler: submit, follow, list and cancel them, and read their logs.

`Client` blocks, `AsyncClient` runs under anyio. Both speak to the scheduler's Unix socket, and read the events of a job
from its directory, so that they run on the scheduler's machine and as its user::

    client = Client(Path("runs/scheduler.sock"))
    job = client.submit(Path("job.toml"))
    for event in client.follow(job.job_id):
        if event["event"] == "round":
            print(event["round"], event["loss"])
"""

from __future__ import annotations

import socket as sockets
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio.to_thread
import msgspec

from hypha_proto.codec import parse_json
from hypha_scheduler.errors import JobFailedError, JobInterruptedError
from hypha_scheduler.jobs.record_file import EVENTS, RecordReader
from hypha_scheduler.submission.catalog import ACTIVE, JobEntry
from hypha_scheduler.submission.client import (
    JobCommandError,
    JobFileError,
    NoSchedulerError,
    connect,
    read_job,
    send_command,
    submit_job,
)
from hypha_scheduler.submission.event_follower import INTERVAL
from hypha_scheduler.submission.log_client import JobLogs, LogLine, last_lines

__all__ = [
    "AsyncClient",
    "Client",
    "Event",
    "JobCommandError",
    "JobEntry",
    "JobFailedError",
    "JobFileError",
    "JobInterruptedError",
    "LogLine",
    "NoSchedulerError",
    "PrintedLines",
    "SubmittedJob",
]

Event = Mapping[str, Any]
"""An event of a job: its kind in ``event``, its time in ``time``, and fields by kind."""
T = TypeVar("T")
_PART: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job that a scheduler has accepted."""

    job_id: str
    directory: Path
    """Where its events, checkpoints and results are."""
    warnings: tuple[str, ...] = ()
    """What its owner should know before it runs."""


@dataclass(frozen=True, slots=True)
class PrintedLines:
    """What the executors of a job have printed."""

    lines: tuple[LogLine, ...]
    """Worker by worker; of each at most the last MiB."""
    failures: Mapping[str, str]
    """By name of a worker, why its lines could not be read."""


@dataclass(frozen=True, slots=True)
class Client:
    """Jobs of a scheduler, for programs without an event loop."""

    socket: Path
    """``scheduler.sock`` in the scheduler's output_dir."""

    def submit(self, job: Path | Mapping[str, Any], *, wait: bool = True) -> SubmittedJob:
        """Submit a job, from a file or as its table; return when it is accepted.

        Args:
            job: the job; relative paths in a table are those of the scheduler.
            wait: whether it waits for its turn and for workers, instead of failing.

        Raises:
            JobFileError: the file cannot be read.
            JobCommandError: the job is invalid, or no further job may wait.
            NoSchedulerError: no scheduler runs.
        """
        table = read_job(job) if isinstance(job, Path) else dict(job)
        answer = next(submit_job(self.socket, table, detach=True, wait=wait))
        if "error" in answer:
            raise JobCommandError(answer)
        return SubmittedJob(answer["job_id"], Path(answer["directory"]), tuple(answer.get("warnings", ())))

    def follow(self, job: str) -> Iterator[Event]:
        """Yield the events of a job, first those so far, until it has ended.

        Args:
            job: its name, or the beginning of its name or id.

        Raises:
            JobFailedError: it failed or was cancelled.
            JobInterruptedError: its scheduler ended before it.
            JobCommandError: there is no such job, or several.
            NoSchedulerError: no scheduler runs.
        """
        for events in self._batches(job):
            yield from events

    def _batches(self, job: str) -> Generator[list[dict[str, Any]]]:
        """Yield the events of a job as they are added; an empty list every `INTERVAL` seconds without any."""
        with connect(self.socket, {"command": "attach", "id": job}) as connection:
            connection.settimeout(INTERVAL)
            followed = _Followed()
            while not followed.is_over:
                with suppress(TimeoutError):
                    followed.add(_receive(connection))
                yield from iter(followed.read, [])
                yield []
            followed.check_outcome()

    def jobs(self, *, ended: bool = False) -> list[JobEntry]:
        """Return the jobs that wait or run, in their order; with `ended` also the others, the newest first.

        Raises:
            NoSchedulerError: no scheduler runs.
        """
        answer = send_command(self.socket, {"command": "jobs", "all": ended})
        return msgspec.convert(answer["jobs"], list[JobEntry])

    def status(self, job: str) -> JobEntry:
        """Return a job; see `follow` for what names it, and for the errors."""
        return msgspec.convert(send_command(self.socket, {"command": "status", "id": job})["job"], JobEntry)

    def cancel(self, job: str) -> None:
        """End a job; return when its leases are free. See `follow` for what names it.

        Raises:
            JobCommandError: there is no such job, or several; or it had ended before, or does not end in time.
            NoSchedulerError: no scheduler runs.
        """
        send_command(self.socket, {"command": "cancel", "id": job})

    def logs(self, job: str, *, worker: str | None = None, tail: int | None = None) -> PrintedLines:
        """Return what the executors of a job have printed, without secrets. See `follow` for what names it.

        Args:
            job: the job; it may have ended, as long as its workers keep the logs.
            worker: the only one that is asked: its name, its peer id or the end of that; no lines if there is none.
            tail: the number of last lines of each worker, all if it is None.

        Raises:
            ValueError: `tail` is negative.
            JobCommandError: there is no such job, or several.
            NoSchedulerError: no scheduler runs.
        """
        if tail is not None and tail < 0:
            raise ValueError(f"tail: {tail} is negative; give the number of last lines, or None for all")
        entry = self.status(job)
        found = JobLogs(self.socket, entry.job_id, RecordReader(Path(entry.directory) / EVENTS), worker)
        return PrintedLines(tuple(last_lines(found.read(), tail)), dict(found.failures))


@dataclass(frozen=True, slots=True)
class AsyncClient:
    """Jobs of a scheduler, for programs that run under anyio; see `Client` for arguments and errors."""

    socket: Path

    async def submit(self, job: Path | Mapping[str, Any], *, wait: bool = True) -> SubmittedJob:
        """Submit a job, from a file or as its table; return when it is accepted."""
        return await _in_thread(lambda: Client(self.socket).submit(job, wait=wait))

    async def follow(self, job: str) -> AsyncIterator[Event]:
        """Yield the events of a job, first those so far, until it has ended."""
        batches = Client(self.socket)._batches(job)
        try:
            while (events := await anyio.to_thread.run_sync(next, batches, None)) is not None:
                for event in events:
                    yield event
        finally:
            batches.close()

    async def jobs(self, *, ended: bool = False) -> list[JobEntry]:
        """Return the jobs that wait or run; with `ended` also the others."""
        return await _in_thread(lambda: Client(self.socket).jobs(ended=ended))

    async def status(self, job: str) -> JobEntry:
        """Return a job."""
        return await _in_thread(lambda: Client(self.socket).status(job))

    async def cancel(self, job: str) -> None:
        """End a job; return when its leases are free."""
        await _in_thread(lambda: Client(self.socket).cancel(job))

    async def logs(self, job: str, *, worker: str | None = None, tail: int | None = None) -> PrintedLines:
        """Return what the executors of a job have printed."""
        return await _in_thread(lambda: Client(self.socket).logs(job, worker=worker, tail=tail))


async def _in_thread(function: Callable[[], T]) -> T:
    """Call a function that waits for the scheduler; cancelling does not wait for it."""
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=True)


@dataclass(slots=True)
class _Followed:
    """What a scheduler has answered about a job that is followed."""

    is_over: bool = False
    """Whether the scheduler has said all about the job; the events that are there then are the last."""
    _buffer: bytearray = field(default_factory=bytearray)
    _entry: JobEntry | None = None
    _outcome: Mapping[str, Any] = field(default_factory=dict)
    _reader: RecordReader | None = None

    def add(self, data: bytes) -> None:
        """Take what was received; nothing at the end of the connection.

        Raises:
            JobCommandError: there is no such job, or several.
        """
        self.is_over = not data
        *lines, rest = (bytes(self._buffer) + data).split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            self._take(parse_json(line))

    def _take(self, answer: dict[str, Any]) -> None:
        if self._entry is not None:
            self._outcome = answer
        elif "error" in answer:
            raise JobCommandError(answer)
        else:
            self._entry = msgspec.convert(answer["job"], JobEntry)
            self._reader = RecordReader(Path(self._entry.directory) / EVENTS)

    def read(self) -> list[dict[str, Any]]:
        """Return further events."""
        return [] if self._reader is None else self._reader.read()

    def check_outcome(self) -> None:
        """Check that the job has succeeded.

        Raises:
            JobFailedError: it failed or was cancelled.
            JobInterruptedError: the scheduler ended before it.
        """
        entry, outcome = self._entry, self._outcome
        if "result" in outcome or (entry is not None and entry.state == "finished"):
            return
        if "error" in outcome:
            raise JobFailedError(outcome["error"])
        if entry is not None and entry.state not in (*ACTIVE, "interrupted"):
            raise JobFailedError(entry.reason or entry.state)
        raise JobInterruptedError(str(outcome.get("interrupted", "the scheduler ended before the job did")))


def _receive(connection: sockets.socket) -> bytes:
    """Return what has arrived; nothing at the end, also if the scheduler was killed.

    Raises:
        TimeoutError: nothing has arrived in time.
    """
    try:
        return connection.recv(_PART)
    except ConnectionError:
        return b""
