"""Submission server: accepts jobs from `hypha-scheduler submit` over a Unix socket that only its owner can open.

Each connection carries one job: a JSON object ``{"job": {…}}``, or ``{"resume": directory, "job": {…}}`` for one that
was interrupted, answered by JSON lines that say that it was accepted, with its id, directory and warnings, and how it
ended. Closing the connection does not stop the job. Called by `service`.
"""

from __future__ import annotations

import errno
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc
import anyio.to_thread

from hypha_proto.codec import parse_json
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.submission.resumption import ResumableJob, ResumeError, find_resumable
from hypha_scheduler.submission.validation import validate_job

_log = logging.getLogger(__name__)

SOCKET_NAME: Final = "scheduler.sock"
_MAX_JOB_BYTES: Final = 16 << 20
"""Enough for 10,000 tasks."""
_READ_TIMEOUT: Final = 10.0
_MAX_WARNINGS: Final = 10
RunJob = Callable[[JobTable, uuid.UUID], Awaitable[Path]]


def socket_path(runs: Path) -> Path:
    """Return the socket at which a scheduler that writes to `runs` accepts jobs."""
    return runs / SOCKET_NAME


@dataclass(slots=True)
class SubmissionServer:
    """Accepts jobs and runs them concurrently, each under an id that is sent to the client."""

    runs: Path
    """Directory of the jobs."""
    run_job: RunJob
    strategies: Collection[str] | None = None
    """Types of jobs that are accepted; all that are installed if None."""
    resume_job: RunJob | None = None
    """Continues an interrupted job; without it none is taken."""
    _active: int = 0
    """Connections whose jobs have not ended."""
    _stopping: bool = False
    _accepting: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    async def serve(self) -> None:
        """Accept jobs until cancelled or stopped.

        Raises:
            OSError: the socket cannot be created, or another scheduler accepts jobs at it.
        """
        path = anyio.Path(socket_path(self.runs))
        await _check_free(path)
        await path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        listener = await anyio.create_unix_listener(temporary, mode=0o600)
        await temporary.replace(path)  # renamed once it listens, so that clients which find it can connect
        _log.info("waiting for jobs: hypha-scheduler submit JOB.toml --socket %s", path)
        try:
            async with anyio.create_task_group() as tasks:
                with self._accepting:
                    await listener.serve(self._handle, tasks)
        finally:
            with anyio.CancelScope(shield=True):
                await path.unlink(missing_ok=True)

    def stop_when_idle(self) -> None:
        """Accept no more jobs once all that were submitted have ended; then `serve` returns."""
        self._stopping = True
        self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        if self._stopping and not self._active:
            self._accepting.cancel()

    async def _handle(self, stream: anyio.abc.SocketStream) -> None:
        self._active += 1
        try:
            await self._handle_submission(stream)
        finally:
            self._active -= 1
            self._stop_if_idle()

    async def _handle_submission(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            try:
                with anyio.fail_after(_READ_TIMEOUT):
                    data = await _read(stream)
                    job = await anyio.to_thread.run_sync(self._parse, data)  # looks at files
            except (ValueError, ResumeError, TimeoutError, anyio.BrokenResourceError) as error:
                await _answer(stream, {"error": str(error) or "the job was not received in time"})
                return
            if isinstance(job, ResumableJob):
                assert self.resume_job is not None  # `_parse_resumed` refuses it otherwise
                await self._run(stream, self.resume_job, job.job, job.job_id)
            else:
                await self._run(stream, self.run_job, job, uuid.uuid4(), job.warnings()[:_MAX_WARNINGS])

    async def _run(
        self,
        stream: anyio.abc.SocketStream,
        run_job: RunJob,
        job: JobTable,
        job_id: uuid.UUID,
        warnings: Sequence[str] = (),
    ) -> None:
        directory = str((self.runs / str(job_id)).absolute())
        accepted: dict[str, Any] = {"accepted": True, "job_id": str(job_id), "directory": directory}
        if warnings:
            _log.warning("job %s: %s", job_id, "; ".join(warnings))
            accepted["warnings"] = list(warnings)
        await _answer(stream, accepted)
        try:
            result = await run_job(job, job_id)
        except JobFailedError as error:
            _log.error("job failed: %s", error)
            await _answer(stream, {"error": str(error)})
        else:
            await _answer(stream, {"result": str(result)})

    def _parse(self, data: bytes) -> JobTable | ResumableJob:
        return self._parse_resumed(data) or parse_job(data, self.strategies)

    def _parse_resumed(self, data: bytes) -> ResumableJob | None:
        """Parse a request to resume a job; None if it is another request.

        Raises:
            ValueError: `data` is malformed.
            ResumeError: the job cannot be resumed.
        """
        found = parse_json(data)
        if not isinstance(found, dict) or "resume" not in found:
            return None
        if self.resume_job is None or not isinstance(found["resume"], str):
            raise ValueError("resume: expected the path of a job's directory")
        job = found.get("job")
        configured = [] if job is None else [validate_job(job, self.strategies)]
        return find_resumable(Path(found["resume"]), self.runs, configured, self.strategies)


async def _check_free(path: anyio.Path) -> None:
    """Raise `OSError` if a scheduler listens at a socket; one that was killed leaves its socket behind."""
    try:
        async with await anyio.connect_unix(path):
            pass
    except (FileNotFoundError, ConnectionRefusedError):
        return
    why = "another scheduler accepts jobs there; give each scheduler an output_dir of its own"
    raise OSError(errno.EADDRINUSE, why, str(path))


async def serve_submissions(runs: Path, run_job: RunJob) -> None:
    """Accept jobs until cancelled; see `SubmissionServer`."""
    await SubmissionServer(runs, run_job).serve()


async def _read(stream: anyio.abc.SocketStream) -> bytes:
    data = bytearray()
    while len(data) <= _MAX_JOB_BYTES:
        try:
            data += await stream.receive()
        except anyio.EndOfStream:
            return bytes(data)
    raise ValueError(f"the job is larger than {_MAX_JOB_BYTES} bytes")


async def _answer(stream: anyio.abc.SocketStream, answer: dict[str, Any]) -> None:
    try:
        await stream.send(json.dumps(answer).encode() + b"\n")
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        _log.info("the client that submitted the job has disconnected")


def parse_job(data: bytes, strategies: Collection[str] | None = None) -> JobTable:
    """Parse and validate ``{"job": {…}}``; the local files that the job names must exist.

    Raises:
        ValueError: `data` is not strict JSON or not a valid job; the message names every invalid key.
    """
    found = parse_json(data)
    if not isinstance(found, dict) or not isinstance(found.get("job"), dict):
        raise ValueError('expected {"job": {…}}')
    return validate_job(found["job"], strategies)
