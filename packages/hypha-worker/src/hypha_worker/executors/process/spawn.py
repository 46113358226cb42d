"""Starts an executor's process from the calling thread, and waits for its end by a pidfd.

Called by `process_runner`. anyio and trio start processes in a worker thread, and the kernel sends the signal that a
process asks for by PR_SET_PDEATHSIG, as ``bwrap --die-with-parent`` does, when the *thread* that started it ends: after
10 s without work. So the process is started in the thread of the event loop, which lives as long as the worker.
"""

from __future__ import annotations

import os
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


class _OutputPipe(anyio.abc.ByteReceiveStream):
    """The read end of a pipe."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor: int | None = descriptor

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
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            anyio.notify_closing(descriptor)
            os.close(descriptor)


class SpawnedProcess(anyio.abc.Process):
    """A process that was started by `spawn`: the leader of its own session, without standard input."""

    def __init__(self, popen: subprocess.Popen[bytes], output: int, exit_code: Callable[[int], int]) -> None:
        self._popen = popen
        self._exit_code = exit_code
        self._pidfd = _open_pidfd(popen.pid)
        self._stdout = _OutputPipe(output)

    async def wait(self) -> int:
        """Wait for the end, and return `returncode`."""
        while self._popen.poll() is None:
            if self._pidfd is None:
                await anyio.to_thread.run_sync(
                    self._popen.wait, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1)
                )
            else:
                await anyio.wait_readable(self._pidfd)
        await anyio.lowlevel.checkpoint()
        return self._exit_code(self._popen.returncode)

    @property
    def pid(self) -> int:
        """Process id; also the id of its process group."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal, or None while nobody has seen it end."""
        return None if self._popen.returncode is None else self._exit_code(self._popen.returncode)

    @property
    def stdin(self) -> None:
        """There is none."""
        return

    @property
    def stdout(self) -> anyio.abc.ByteReceiveStream:
        """Standard output and error."""
        return self._stdout

    @property
    def stderr(self) -> None:
        """There is none; see `stdout`."""
        return

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._popen.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._popen.kill()

    def send_signal(self, signal: int) -> None:
        """Send a signal to this process alone."""
        self._popen.send_signal(signal)

    async def aclose(self) -> None:
        """Release the descriptors, after the process has ended."""
        await self._stdout.aclose()
        if self._pidfd is not None:
            descriptor, self._pidfd = self._pidfd, None
            anyio.notify_closing(descriptor)
            os.close(descriptor)


_SIGNAL_BASE: Final = 128


def spawn(launch: Launch, cwd: Path) -> SpawnedProcess:
    """Start a process as `launch` says, with `launcher` in front.

    Raises:
        OSError: it cannot be started.
    """
    reader, writer = os.pipe()  # before the start: a process whose output cannot be read would run unwatched
    try:
        popen = subprocess.Popen(
            [*launcher.launcher_command(launch.steps), *launch.command],
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=launch.env,
            start_new_session=True,
            pass_fds=launch.descriptors,
        )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return SpawnedProcess(popen, reader, _signal_status if launch.reports_signals_as_status else int)


def _signal_status(code: int) -> int:
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
