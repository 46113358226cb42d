"""Control server: drains the worker for `hypha-worker drain`, over a Unix socket that only its owner can open.

A connection carries one JSON object ``{"drain": {"timeout": seconds or null}}``. It is answered by JSON lines: what is
drained, and, when the worker's jobs have ended and its leases are given back, what was cancelled. Closing the
connection does not stop the drain. Called by `service`.
"""

from __future__ import annotations

import errno
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc

from hypha_proto.codec import parse_json
from hypha_proto.job_spec import executor_class
from hypha_worker.draining import Draining, Work
from hypha_worker.leasing.terms import MAX_DRAIN
from hypha_worker.tasks.task_run import TaskRun

_log = logging.getLogger(__name__)

SOCKET_NAME: Final = "worker.sock"
_MAX_REQUEST: Final = 4096
"""Bytes of a request."""
_READ_TIMEOUT: Final = 10.0
_LAST_ANSWERS: Final = 1.0
"""Seconds in which clients must take the last answer."""


def socket_path(work_dir: Path) -> Path:
    """Return the control socket of a worker with this work directory."""
    return work_dir / SOCKET_NAME


@dataclass(slots=True)
class ControlServer:
    """Takes commands for one worker."""

    work_dir: Path
    draining: Draining
    drain_timeout: float
    """Seconds of a drain whose client names none."""
    _ended: anyio.Event = field(default_factory=anyio.Event)
    _cancelled: Sequence[Work] = ()
    """Jobs that the end of the drain cancelled."""
    _waiting: int = 0
    """Clients that wait for the end of the drain."""
    _answered: anyio.Event = field(default_factory=anyio.Event)

    async def serve(self) -> None:
        """Take commands until cancelled; return with a warning if there can be no socket."""
        path = anyio.Path(socket_path(self.work_dir))
        try:
            listener = await _listen(path)
        except OSError as error:
            _log.warning("hypha-worker drain cannot reach this worker, SIGTERM drains it: %s: %s", path, error)
            return
        try:
            async with listener:
                await listener.serve(self._handle)
        finally:
            with anyio.CancelScope(shield=True):
                await path.unlink(missing_ok=True)

    async def report_end(self, cancelled: Sequence[Work]) -> None:
        """Tell the clients that the drain is over.

        Args:
            cancelled: jobs and tasks that ran longer than the drain.
        """
        self._cancelled = cancelled
        self._ended.set()
        with anyio.move_on_after(_LAST_ANSWERS):
            while self._waiting:
                await self._answered.wait()

    async def _handle(self, stream: anyio.abc.SocketStream) -> None:
        async with stream:
            try:
                with anyio.fail_after(_READ_TIMEOUT):
                    timeout = parse_request(await _read(stream))
            except (ValueError, TimeoutError, anyio.BrokenResourceError) as error:
                await _answer(stream, {"error": str(error) or "no request was received in time"})
                return
            self._waiting += 1
            try:
                await self._drain(stream, self.drain_timeout if timeout is None else timeout)
            finally:
                self._waiting -= 1
                self._answered.set()
                self._answered = anyio.Event()

    async def _drain(self, stream: anyio.abc.SocketStream, timeout: float) -> None:
        self.draining.request(timeout, "its owner drains it")
        jobs = [_describe(job) for job in self.draining.running]
        await _answer(stream, {"draining": True, "seconds": round(self.draining.left, 3), "jobs": jobs})
        await self._ended.wait()
        await _answer(stream, {"drained": True, "cancelled": [_describe(job) for job in self._cancelled]})


async def _listen(path: anyio.Path) -> anyio.abc.SocketListener:
    """Listen at a socket; one that a killed worker has left is replaced.

    Raises:
        OSError: there can be no socket, or another worker listens at it.
    """
    try:
        async with await anyio.connect_unix(path):
            why = "another worker uses this work_dir; give each worker one of its own"
            raise OSError(errno.EADDRINUSE, why)
    except (FileNotFoundError, ConnectionRefusedError):
        pass
    temporary = path.with_suffix(".new")
    listener = await anyio.create_unix_listener(temporary, mode=0o600)
    await temporary.replace(path)  # renamed once it listens, so that clients which find it can connect
    return listener


async def _read(stream: anyio.abc.SocketStream) -> bytes:
    data = b""
    while len(data) <= _MAX_REQUEST:
        try:
            data += await stream.receive()
        except anyio.EndOfStream:
            return data
    raise ValueError(f"the request is larger than {_MAX_REQUEST} bytes")


def parse_request(data: bytes) -> float | None:
    """Return the seconds of a request to drain; None if it names none.

    Raises:
        ValueError: it is no such request.
    """
    found = parse_json(data)
    if not isinstance(found, dict) or not isinstance(found.get("drain"), dict):
        raise ValueError('expected {"drain": {"timeout": seconds or null}}')
    timeout = found["drain"].get("timeout")
    if timeout is None:
        return None
    if type(timeout) not in (int, float) or not math.isfinite(timeout) or not 0 <= timeout <= MAX_DRAIN:
        raise ValueError(f"drain.timeout: {str(timeout)[:40]} is not a number of seconds from 0 to {MAX_DRAIN:g}")
    return float(timeout)


def _describe(job: Work) -> dict[str, str]:
    if isinstance(job, TaskRun):
        return {
            "job_id": str(job.definition.job_id),
            "task": job.definition.task,
            "executor": job.spec.executor,
            "lease": str(job.lease.id),
            "scheduler": str(job.lease.scheduler),
        }
    return {
        "job_id": str(job.spec.job_id),
        "class": executor_class(job.spec),
        "lease": str(job.lease),
        "scheduler": str(job.scheduler),
    }


async def _answer(stream: anyio.abc.SocketStream, answer: dict[str, Any]) -> None:
    try:
        await stream.send(json.dumps(answer).encode() + b"\n")
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        _log.info("the client of the control socket has disconnected")
