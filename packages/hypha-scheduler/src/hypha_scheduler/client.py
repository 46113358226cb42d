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

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
import msgspec

from hypha_proto.record_file import EVENTS, RecordReader
from hypha_scheduler.errors import JobFailedError, JobInterruptedError
from hypha_scheduler.submission.catalog import JobEntry
from hypha_scheduler.submission.client import (
    JobCommandError,
    JobFileError,
    NoSchedulerError,
    SchedulerEndedError,
    attach_job,
    read_job,
    send_command,
    submit_job,
)
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
        answer = next(submit_job(self.socket, table, detach=True, wait=wait)).answer or {}
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
        """Yield the events of a job as they are added; at least an empty list whenever none comes for a while."""
        answer: Mapping[str, Any] = {}
        try:
            for heard in attach_job(self.socket, job):
                answer = heard.answer or answer
                yield heard.events
        except SchedulerEndedError as error:
            raise JobInterruptedError(str(error)) from None
        _check_outcome(answer)

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


def _check_outcome(answer: Mapping[str, Any]) -> None:
    """Check that a job has succeeded: by its entry if it had ended before, or else by the scheduler's last answer.

    Raises:
        JobFailedError: it failed or was cancelled.
        JobInterruptedError: a scheduler ended before it.
    """
    if "error" in answer:
        raise JobFailedError(answer["error"])
    entry = answer.get("job", {})
    state = entry.get("state", "finished")
    if state == "interrupted":
        raise JobInterruptedError("the scheduler ended before the job did")
    if state != "finished":
        raise JobFailedError(entry.get("reason") or state)
