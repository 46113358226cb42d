"""Starts an executor's process, and waits for its end without a thread.

anyio and trio start processes in a worker thread, and the kernel sends the signal that a process asks for by
PR_SET_PDEATHSIG, as ``bwrap --die-with-parent`` does, when the *thread* that started it ends: after 10 s without work.
So the process is started in the thread of the event loop, which lives as long as the worker, or by
`isolation.fork_server`, which was started there and has one thread.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread

from hypha_worker.executors.isolation import launcher
from hypha_worker.executors.isolation.layers import Launch
from hypha_worker.executors.process.fork_server_client import ForkServer

_log = logging.getLogger(__name__)


class _Descriptor:
    """Something that is readable when there is news of a process."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            anyio.notify_closing(descriptor)
            os.close(descriptor)


class _OutputPipe(_Descriptor, anyio.abc.ByteReceiveStream):
    """The read end of a pipe."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        super().__init__(descriptor)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while self._descriptor is not None:
            try:
                data = os.read(self._descriptor, max_bytes)
            except BlockingIOError:
                await anyio.wait_readable(self._descriptor)
                continue
            await anyio.lowlevel.checkpoint()
            if not data:
                raise anyio.EndOfStream
            return data
        raise anyio.ClosedResourceError

    async def aclose(self) -> None:
        self.close()


class _DirectChild(_Descriptor):
    """A child of this process."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        super().__init__(_open_pidfd(popen.pid))
        self.pid = popen.pid
        self._popen = popen

    def poll(self) -> int | None:
        return self._popen.poll()

    async def changed(self) -> None:
        if self._descriptor is None:
            limiter = anyio.CapacityLimiter(1)
            await anyio.to_thread.run_sync(self._popen.wait, abandon_on_cancel=True, limiter=limiter)
        else:
            await anyio.wait_readable(self._descriptor)


class _ForkedChild(_Descriptor):
    """A child of the fork server."""

    def __init__(self, server: ForkServer, pid: int, status: int) -> None:
        os.set_blocking(status, False)
        super().__init__(status)
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and self._descriptor is not None:
            try:
                text = os.read(self._descriptor, 16)
            except BlockingIOError:
                return None
            if text:
                self._server.reap(self.pid)
            else:  # the server was killed, and nobody else knows
                _log.error("how process %d has ended is not known: what had started it has ended", self.pid)
            self._code = int(text) if text else -signal.SIGKILL
        return self._code

    async def changed(self) -> None:
        if self._descriptor is not None:
            await anyio.wait_readable(self._descriptor)


class SpawnedProcess:
    """A process that was started by `spawn`: the leader of its own session, without standard input."""

    def __init__(self, child: _DirectChild | _ForkedChild, output: int, exit_code: Callable[[int], int]) -> None:
        self._child = child
        self._exit_code = exit_code
        self.pid = child.pid
        """Process id, not used again before `wait` has returned; also the id of its process group."""
        self.returncode: int | None = None
        """Exit code, negative for a signal, or None while nobody has seen it end."""
        self.stdout = _OutputPipe(output)
        """Standard output and error."""

    async def wait(self) -> int:
        """Wait for the end, and return `returncode`."""
        while (code := self._child.poll()) is None:
            await self._child.changed()
        self.returncode = self._exit_code(code)
        await anyio.lowlevel.checkpoint()
        return self.returncode

    def close(self) -> None:
        """Release the descriptors, after the process has ended."""
        self.stdout.close()
        self._child.close()


_SIGNAL_BASE: Final = 128


async def spawn(launch: Launch, cwd: Path, server: ForkServer | None = None) -> SpawnedProcess:
    """Start a process as `launch` says, with `launcher` in front.

    Args:
        launch: what it becomes.
        cwd: its working directory.
        server: starts it sooner; without one, or where it does not work, the process is a child of this one.

    Raises:
        OSError: it cannot be started.
    """
    reader, writer = os.pipe()  # before the start: a process whose output cannot be read would run unwatched
    try:
        child = await _start(launch, cwd, writer, server)
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return SpawnedProcess(child, reader, signal_status if launch.reports_signals_as_status else int)


async def _start(launch: Launch, cwd: Path, output: int, server: ForkServer | None) -> _DirectChild | _ForkedChild:
    if server is not None and sys.platform == "linux":
        try:
            return _ForkedChild(server, *(await server.start(launch, cwd, output)))
        except OSError as error:
            _log.warning("executors start more slowly: the process that starts them does not work: %s", error)
    return _start_directly(launch, cwd, output)


def _start_directly(launch: Launch, cwd: Path, output: int) -> _DirectChild:
    return _DirectChild(
        subprocess.Popen(
            [*launcher.launcher_command(launch.steps), *launch.command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=launch.env,
            start_new_session=True,
            pass_fds=launch.descriptors,
        )
    )


def signal_status(code: int) -> int:
    """Return the exit code of a command whose parent reports a signal as 128 plus its number, as a shell does."""
    return _SIGNAL_BASE - code if _SIGNAL_BASE < code < _SIGNAL_BASE + 65 else code


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable when the process has ended; None where the system has none."""
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # an older kernel, or a container that forbids it
        return None
