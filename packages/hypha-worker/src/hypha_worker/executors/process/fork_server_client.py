"""The worker's side of `isolation.fork_server`, which starts processes without the start of an interpreter for each.

One server for each worker, started by the first process and again after it has failed.
"""

from __future__ import annotations

import contextlib
import logging
import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio

from hypha_worker.executors.isolation import fork_server
from hypha_worker.executors.isolation.layers import Launch

_log = logging.getLogger(__name__)

_TIMEOUT: Final = 10.0
"""Seconds in which the server must start a process. It usually takes a few milliseconds, also to start the server."""


class ForkServer:
    """Starts processes in the thread of the event loop: the server ends with that thread."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        """Held from a request until its answer."""
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def start(self, launch: Launch, cwd: Path, output: int) -> tuple[int, int]:
        """Start a process; return its id, and a pipe from which its exit code can be read once, as text.

        Not cancelled once it has asked for the process: nobody would end it.

        Args:
            launch: what it becomes.
            cwd: its working directory.
            output: descriptor for its standard output and error.

        Raises:
            OSError: the server does not work.
        """
        async with self._lock:
            control = self._connect()
            reader, writer = os.pipe()
            try:
                try:
                    _request(control, launch, cwd, [writer, output, *launch.descriptors])
                finally:
                    os.close(writer)
                with anyio.fail_after(_TIMEOUT, shield=True):
                    await anyio.wait_readable(control)
                if not (answer := control.recv(64)):
                    raise ConnectionResetError("the process that starts executors has ended")
                return int(answer), reader
            except BaseException:
                os.close(reader)
                self.close()  # its next answer could be the one to this request
                raise

    def reap(self, pid: int) -> None:
        """Free the id of a process whose exit code was read."""
        if self._control is not None:
            with contextlib.suppress(BrokenPipeError):  # init has reaped it then
                self._control.send(b"reap %d" % pid)

    def close(self) -> None:
        """End the server; processes that it has started run on, unless their layers end them."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None

    def _connect(self) -> socket.socket:
        """Return the socket of the running server; start one if there is none."""
        if self._server is not None and self._server.poll() is not None:
            _log.warning("the process that starts executors has ended with status %d", self._server.returncode)
            self.close()
        if self._control is not None:
            return self._control
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.settimeout(_TIMEOUT)
        with other:
            script = [sys.executable, "-I", "-S", fork_server.__file__, str(other.fileno()), str(os.getpid())]
            try:
                self._server = subprocess.Popen(
                    script, stdin=subprocess.DEVNULL, cwd="/", env={}, start_new_session=True, pass_fds=[other.fileno()]
                )
            except BaseException:
                own.close()
                raise
        self._control = own
        return own


def _request(control: socket.socket, launch: Launch, cwd: Path, descriptors: Sequence[int]) -> None:
    start = {
        "steps": launch.steps,
        "command": launch.command,
        "env": launch.env,
        "cwd": str(cwd),
        "numbers": list(launch.descriptors),
    }
    with open(os.memfd_create("hypha-start"), "wb") as file:
        file.write(marshal.dumps(start))
        file.flush()
        socket.send_fds(control, [b"start"], [file.fileno(), *descriptors])
