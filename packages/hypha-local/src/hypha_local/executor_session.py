"""Commands of `hypha-accelerate-executor` in one process, because importing torch takes longer than most of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import anyio
import anyio.to_thread

from hypha_local.errors import ProcessFailedError
from hypha_local.processes import LocalProcess, Processes, script
from hypha_proto.codec import parse_json

_COMMAND: Final = ("hypha-accelerate-executor", "session")


class ExecutorSession:
    """A process that executes one command after the other; it is started by the first, and again if it has ended."""

    def __init__(self, processes: Processes, command: Sequence[str] | None = None) -> None:
        """Store the parts; no process is started.

        Args:
            processes: starts the process, and ends it.
            command: what is started; None for ``hypha-accelerate-executor session``.
        """
        self._processes = processes
        self._command = [script(_COMMAND[0]), *_COMMAND[1:]] if command is None else list(command)
        self._child: LocalProcess | None = None
        self._turn = anyio.Lock()

    async def run(self, arguments: Sequence[str], *, timeout: float) -> str:
        """Execute a command; return what it printed.

        Args:
            arguments: the command's name and its arguments.
            timeout: seconds, those included in which earlier commands end.

        Raises:
            ProcessFailedError: it failed, the process ended, or it was not done in time.
        """
        with anyio.move_on_after(timeout) as scope:
            async with self._turn:
                answer = await self._ask(arguments)
        if scope.cancelled_caught:
            what = f"{arguments[0]} was not done within {timeout:g} s"
            if self._child is None:
                raise ProcessFailedError(what)
            await self._processes.kill(self._child.name)  # its next answer would be that of this command
            raise self._child.failure(what)
        if answer["status"] != 0:
            raise ProcessFailedError(f"{arguments[0]} ended with status {answer['status']}: {answer['output']}")
        return str(answer["output"])

    async def _ask(self, arguments: Sequence[str]) -> dict[str, Any]:
        if self._child is None or self._child.process.poll() is not None:
            self._child = self._processes.start("models", self._command, has_pipes=True)
        child, line = self._child, json.dumps(list(arguments)).encode() + b"\n"
        text = await anyio.to_thread.run_sync(_exchange, child, line, abandon_on_cancel=True)
        if not text.endswith(b"\n"):
            raise child.failure(f"{arguments[0]} ended with status {await self._processes.wait(child)}")
        answer: dict[str, Any] = parse_json(text)
        return answer


def _exchange(child: LocalProcess, line: bytes) -> bytes:
    """Write a line to a process; return the line that it answers, or less if it has ended."""
    assert child.process.stdin is not None
    assert child.process.stdout is not None
    try:
        child.process.stdin.write(line)
        child.process.stdin.flush()
    except BrokenPipeError:
        return b""
    return child.process.stdout.readline()
