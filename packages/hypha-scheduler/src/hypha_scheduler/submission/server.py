"""Submission server: takes jobs and commands about them over a Unix socket that only its owner can open.

Each connection carries one request, a JSON object, which is answered by JSON lines:

- ``{"job": {…}, "wait": true}`` submits a job: ``{"accepted": true, …}`` with its id, directory and warnings, then how
  it ended. Without ``wait`` it fails if workers are missing.
- ``{"resume": directory, "job": {…}}`` continues an interrupted one; the answers are the same.
- ``{"command": "jobs", "all": true}``, and ``status``, ``attach``, ``cancel`` and ``logs`` with the ``id`` of a job:
  its name, or the beginning of its name or id.
- ``{"command": "nodes"}`` lists the workers that the scheduler knows, and the datasets that data nodes announce.

Closing the connection does not stop a job.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from hypha_net.local_socket import accept_clients, listen, send_answer
from hypha_net.peer_names import name_peers
from hypha_proto.codec import parse_json
from hypha_proto.texts import quote
from hypha_scheduler.errors import JobFailedError, JobInterruptedError, JobRefusedError
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.jobs.unfinished import QUEUED
from hypha_scheduler.submission.active_jobs import ActiveJob, ActiveJobs
from hypha_scheduler.submission.catalog import ACTIVE, JobEntry, find_jobs, list_jobs, read_entry
from hypha_scheduler.submission.client import socket_path
from hypha_scheduler.submission.dataset_check import check_datasets
from hypha_scheduler.submission.node_directory import NodeDirectory
from hypha_scheduler.submission.queue_files import QueuedJob, end_queued, read_queue, remove_queued, write_queued
from hypha_scheduler.submission.resumption import ResumableJob, find_resumable
from hypha_scheduler.submission.validation import validate_job

_log = logging.getLogger(__name__)

_MAX_JOB_BYTES: Final = 16 << 20
"""Enough for 10,000 tasks."""
_MAX_READ_BYTES: Final = 64 << 20
"""Bytes of all requests that are being read."""
MAX_CONNECTIONS: Final = 512
"""Further ones are told so and closed. A client that follows a job holds one."""
_READ_TIMEOUT: Final = 10.0
_CANCEL_TIMEOUT: Final = 10.0
"""Seconds for a cancelled job to end."""
_MAX_WARNINGS: Final = 10
_MAX_MATCHES: Final = 20
"""Jobs that the answer to an ambiguous name lists."""
RunJob = Callable[[JobTable, uuid.UUID], Awaitable[Path]]
_REFUSALS: Final = (ValueError, JobRefusedError, JobFailedError)
"""Reasons for which a request is not taken."""


class JobCommand(msgspec.Struct, frozen=True, tag_field="command"):
    """Base class of the commands about jobs that were submitted before."""


class ListJobs(JobCommand, frozen=True, tag="jobs"):
    """List the jobs that wait or run, or all."""

    all: bool = False


class ShowJob(JobCommand, frozen=True, tag="status"):
    """Describe a job."""

    id: str


class AttachJob(JobCommand, frozen=True, tag="attach"):
    """Describe a job, then say how it ended."""

    id: str


class CancelJob(JobCommand, frozen=True, tag="cancel"):
    """End a job."""

    id: str


class ReadLogs(JobCommand, frozen=True, tag="logs"):
    """List the logs of a job at a worker, or read one from a position."""

    id: str
    worker: str
    """Peer id."""
    run: str | None = None
    position: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0


class ListNodes(JobCommand, frozen=True, tag="nodes"):
    """List workers and datasets."""


_COMMANDS: Final = msgspec.json.Decoder(ListJobs | ShowJob | AttachJob | CancelJob | ReadLogs | ListNodes)


class JobLookupError(Exception):
    """A command names no job, or several."""

    def __init__(self, text: str, matches: Sequence[JobEntry] = ()) -> None:
        """Describe what was found."""
        super().__init__(text)
        self.matches = matches


@dataclass(frozen=True, slots=True)
class _Submission:
    """A job that a client hands in."""

    job: JobTable
    waits: bool


@dataclass(slots=True)
class SubmissionServer:
    """Accepts jobs and runs them concurrently, each under an id that is sent to the client."""

    runs: Path
    """Directory of the jobs."""
    run_job: RunJob
    resume_job: RunJob
    """Continues an interrupted job."""
    strategies: Collection[str] | None = None
    """Types of jobs that are accepted; all that are installed if None."""
    jobs: ActiveJobs = field(default_factory=ActiveJobs)
    """All jobs of the scheduler that have not ended."""
    nodes: NodeDirectory | None = None
    """Asks other nodes; without it datasets are not looked for, and no workers and logs are known."""
    _connections: int = 0
    _submitted: int = 0
    """Jobs that were submitted, or that clients are handing in, and have not ended."""
    _number: int = 0
    """Jobs that were made to wait since the start."""
    _read_bytes: int = 0
    _stopping: bool = False
    _accepting: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _tasks: anyio.abc.TaskGroup = field(init=False)

    async def serve(self) -> None:
        """Accept jobs until cancelled or stopped; first those that waited before a restart.

        Raises:
            OSError: the socket cannot be created, or another scheduler accepts jobs at it.
        """
        path = socket_path(self.runs)
        await anyio.Path(path.parent).mkdir(parents=True, exist_ok=True)
        remedy = "another scheduler accepts jobs there; give each scheduler an output_dir of its own"
        async with listen(path, remedy) as listener, anyio.create_task_group() as self._tasks:
            for queued in await anyio.to_thread.run_sync(read_queue, self.runs):
                await self._take_up_queued(queued)
            _log.info("waiting for jobs: hypha-scheduler submit JOB.toml --socket %s", path)
            with self._accepting:
                async with anyio.create_task_group() as clients:
                    await accept_clients(listener, lambda client: clients.start_soon(self._handle, client))

    def stop_when_idle(self) -> None:
        """Accept no more jobs once all that were submitted have ended; then `serve` returns."""
        self._stopping = True
        self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        if self._stopping and not self._submitted:
            self._accepting.cancel()

    @contextmanager
    def _keeping_open(self) -> Iterator[None]:
        """Keep `serve` from returning for lack of jobs."""
        self._submitted += 1
        try:
            yield
        finally:
            self._submitted -= 1
            self._stop_if_idle()

    # ----------------------------------------------------------------------------------------------------- connections

    async def _handle(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            if self._connections >= MAX_CONNECTIONS:
                await _answer(stream, {"error": f"{MAX_CONNECTIONS} clients are connected; try again", "code": "busy"})
                return
            self._connections += 1
            try:
                await self._handle_request(stream)
            finally:
                self._connections -= 1

    async def _handle_request(self, stream: anyio.abc.SocketStream) -> None:
        with self._keeping_open():
            try:
                with anyio.fail_after(_READ_TIMEOUT):
                    data = await self._read(stream)
                    request = await anyio.to_thread.run_sync(self._parse, data)  # looks at files
            except (*_REFUSALS, TimeoutError, anyio.BrokenResourceError) as error:
                await _answer(stream, {"error": str(error) or "the job was not received in time"})
                return
            del data
            if isinstance(request, JobCommand):
                await self._handle_command(stream, request)
            else:
                await self._take_job(stream, request)

    async def _read(self, stream: anyio.abc.SocketStream) -> bytes:
        data = bytearray()
        try:
            while len(data) <= _MAX_JOB_BYTES:
                if self._read_bytes > _MAX_READ_BYTES:
                    raise ValueError("too many large requests at a time; try again")
                try:
                    part = await stream.receive()
                except anyio.EndOfStream:
                    return bytes(data)
                data += part
                self._read_bytes += len(part)
        finally:
            self._read_bytes -= len(data)
        raise ValueError(f"the job is larger than {_MAX_JOB_BYTES} bytes")

    def _parse(self, data: bytes) -> _Submission | ResumableJob | JobCommand:
        found = parse_json(data)
        if isinstance(found, dict) and "command" in found:
            return _parse_command(data)
        if isinstance(found, dict) and "resume" in found:
            return self._parse_resumed(found)
        waits = isinstance(found, dict) and found.get("wait") is True
        return _Submission(parse_job(data, self.strategies), waits)

    def _parse_resumed(self, found: dict[str, Any]) -> ResumableJob:
        """Parse a request to resume a job.

        Raises:
            ValueError: it is malformed.
            JobRefusedError: the job cannot be resumed.
        """
        if not isinstance(found["resume"], str):
            raise ValueError("resume: expected the path of a job's directory")
        job = found.get("job")
        configured = [] if job is None else [validate_job(job, self.strategies)]
        return find_resumable(Path(found["resume"]), self.runs, configured, self.strategies)

    # ------------------------------------------------------------------------------------------------------------ jobs

    async def _take_job(self, stream: anyio.abc.SocketStream, request: _Submission | ResumableJob) -> None:
        """Run a job, and tell the client how it ended."""
        try:
            job = await self._add_job(request)
        except (*_REFUSALS, OSError) as error:
            await _answer(stream, {"error": str(error)})
            return
        accepted: dict[str, Any] = {"accepted": True, "job_id": str(job.job_id), "directory": str(job.directory)}
        if isinstance(request, _Submission) and (warnings := request.job.warnings()[:_MAX_WARNINGS]):
            _log.warning("job %s: %s", job.job_id, "; ".join(warnings))
            accepted["warnings"] = warnings
        await _answer(stream, accepted)
        await job.ended.wait()
        await _answer(stream, job.outcome)

    async def _add_job(self, request: _Submission | ResumableJob) -> ActiveJob:
        if isinstance(request, ResumableJob):
            job = ActiveJob(
                request.job_id, request.job, self._directory(request.job_id), submitted_at=request.submitted_at
            )
            self.jobs.add(job)
            self._start(job, self.resume_job)
            return job
        self.jobs.check_room(waits=request.waits)
        if self.nodes is not None:
            await check_datasets(self.nodes.endpoint, request.job)
        self.jobs.check_room(waits=request.waits)  # others were added meanwhile
        job_id = uuid.uuid4()
        job = ActiveJob(job_id, request.job, self._directory(job_id), waits=request.waits, submitted_at=time.time())
        if request.waits:
            self._number += 1
            write_queued(job.directory, job.job, job.submitted_at, self._number)
        self._start(self.jobs.add(job), self.run_job)
        return job

    def _directory(self, job_id: uuid.UUID) -> Path:
        return (self.runs / str(job_id)).absolute()

    def _start(self, job: ActiveJob, run_job: RunJob) -> None:
        self._tasks.start_soon(self._run, job, run_job)

    async def _run(self, job: ActiveJob, run_job: RunJob) -> None:
        with self._keeping_open():
            try:
                await self.jobs.run(job, partial(run_job, job.job, job.job_id))
            except JobFailedError as error:
                _log.error("job failed: %s", error)
                if not job.is_started:
                    end_queued(job.directory, str(error), is_cancelled=job.is_cancelled)
            except JobInterruptedError as error:
                _log.warning("job %s was interrupted: %s", job.job_id, error)
                return  # one that waits has its file still
            if job.waits and job.is_started:
                _forget_queued(job.directory)

    async def _take_up_queued(self, queued: QueuedJob) -> None:
        """Let a job wait again that waited before a restart."""
        directory = self._directory(queued.job_id)
        try:
            table = await anyio.to_thread.run_sync(validate_job, queued.table, self.strategies)
        except ValueError as error:
            _log.error("job %s does not wait any longer: %s", queued.job_id, error)
            end_queued(directory, str(error))
            return
        self._number += 1
        job = ActiveJob(queued.job_id, table, directory, waits=True, submitted_at=queued.submitted_at)
        try:
            write_queued(directory, table, queued.submitted_at, self._number)
        except OSError as error:
            _log.error("that job %s waits is not recorded, but was before: %s", queued.job_id, error)
        self._start(self.jobs.add(job), self.run_job)

    # -------------------------------------------------------------------------------------------------------- commands

    async def _handle_command(self, stream: anyio.abc.SocketStream, command: JobCommand) -> None:
        try:
            await self._carry_out(stream, command)
        except JobLookupError as error:
            matches = [msgspec.to_builtins(entry) for entry in error.matches[:_MAX_MATCHES]]
            code = "ambiguous" if matches else "unknown"
            await _answer(stream, {"error": str(error), "code": code, "matches": matches})
        except OSError as error:
            _log.error("a command of a client cannot be carried out: %s", error)
            await _answer(stream, {"error": f"the scheduler cannot carry it out: {error}", "code": "failed"})

    async def _carry_out(self, stream: anyio.abc.SocketStream, command: JobCommand) -> None:
        match command:
            case ListJobs(all=every):
                listed = partial(list_jobs, self.runs.absolute(), self._active_entries(), ended=every)
                found = await anyio.to_thread.run_sync(listed)
                await _answer(stream, {"jobs": msgspec.to_builtins(found)})
            case ShowJob(id=wanted):
                await _answer(stream, {"job": msgspec.to_builtins(await self._find(wanted))})
            case AttachJob(id=wanted):
                await self._attach(stream, await self._find(wanted))
            case CancelJob(id=wanted):
                await self._cancel(stream, await self._find(wanted))
            case ReadLogs(id=wanted) if self.nodes is not None:
                job_id = uuid.UUID((await self._find(wanted)).job_id)
                await _answer(stream, await self.nodes.ask_logs(job_id, command.worker, command.run, command.position))
            case ListNodes() if self.nodes is not None:
                await _answer(stream, await self.nodes.describe())
            case _:
                await _answer(stream, {"error": "this scheduler does not speak with other nodes", "code": "failed"})

    async def _attach(self, stream: anyio.abc.SocketStream, entry: JobEntry) -> None:
        job = self.jobs.get(uuid.UUID(entry.job_id))
        await _answer(stream, {"job": msgspec.to_builtins(entry)})
        if job is not None:
            await job.ended.wait()
            await _answer(stream, job.outcome)

    async def _cancel(self, stream: anyio.abc.SocketStream, entry: JobEntry) -> None:
        job = self.jobs.get(uuid.UUID(entry.job_id))
        if job is None:
            await _answer(stream, {"error": f"job {entry.job_id} has ended: {entry.state}", "code": "ended"})
            return
        job.cancel()
        with anyio.move_on_after(_CANCEL_TIMEOUT) as waited:
            await job.ended.wait()
        if waited.cancelled_caught:
            text = f"job {entry.job_id} has not ended within {_CANCEL_TIMEOUT:g} s; it ends as soon as it can"
            await _answer(stream, {"error": text, "code": "late"})
        elif "result" in job.outcome:
            await _answer(stream, {"error": f"job {entry.job_id} has ended: finished", "code": "ended"})
        else:
            await _answer(stream, {"cancelled": entry.job_id, "directory": entry.directory})

    def _active_entries(self) -> dict[str, JobEntry]:
        return {str(job.job_id): self._describe(job) for job in self.jobs}

    def _describe(self, job: ActiveJob) -> JobEntry:
        reason = self.jobs.waits_because(job)
        return JobEntry(
            str(job.job_id),
            "running" if reason is None else "waiting",
            str(job.directory),
            name=job.job.name,
            type=job.job.type,
            submitted=job.submitted_at or None,
            reason=reason,
        )

    async def _find(self, wanted: str) -> JobEntry:
        """Return the job that a command names.

        Raises:
            JobLookupError: there is none, or there are several.
        """
        if not wanted:
            raise JobLookupError("id: give the name of a job, or the beginning of its name or id")
        find = partial(find_jobs, self.runs.absolute(), self._active_entries(), wanted)
        found = await anyio.to_thread.run_sync(find)
        if not found:
            raise JobLookupError(f"no job has a name or an id that begins with {quote(wanted)}; `jobs --all` lists all")
        if len(found) > 1:
            raise JobLookupError(f"{len(found)} jobs have a name or an id that begins with {quote(wanted)}", found)
        [entry] = found
        if entry.state in ACTIVE and self.jobs.get(uuid.UUID(entry.job_id)) is None:  # it has ended meanwhile
            return await anyio.to_thread.run_sync(read_entry, Path(entry.directory)) or entry
        return entry


def _forget_queued(directory: Path) -> None:
    """Let a job that has ended not wait again after a restart; log it if that is not possible."""
    try:
        remove_queued(directory)
    except OSError as error:
        _log.error("%s is begun again after a restart, remove %s: %s", directory.name, directory / QUEUED, error)


def _parse_command(data: bytes) -> JobCommand:
    try:
        command: JobCommand = _COMMANDS.decode(data)
    except msgspec.ValidationError as error:
        raise ValueError(f"command: {error}") from None
    return command


async def _answer(stream: anyio.abc.SocketStream, answer: Mapping[str, Any]) -> None:
    named = {key: name_peers(value) if isinstance(value, str) else value for key, value in answer.items()}
    await send_answer(stream, named)


def parse_job(data: bytes, strategies: Collection[str] | None = None) -> JobTable:
    """Parse and validate ``{"job": {…}}``; the local files that the job names must exist.

    Raises:
        ValueError: `data` is not strict JSON or not a valid job; the message names every invalid key.
    """
    found = parse_json(data)
    if not isinstance(found, dict) or not isinstance(found.get("job"), dict):
        raise ValueError('expected {"job": {…}}')
    return validate_job(found["job"], strategies)
