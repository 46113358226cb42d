"""Commands of `hypha-accelerate-executor` in one process, because importing torch takes longer than most of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import anyio

from hypha_local.errors import ProcessFailedError
from hypha_local.processes import POLL, LocalProcess, Processes, script
from hypha_proto.codec import parse_json

_COMMAND: Final = ("hypha-accelerate-executor", "session")


class ExecutorSession:
    """A process that executes one command after the other; it is started by the first, and again if it has ended."""

    def __init__(self, processes: Processes, folder: Path, command: Sequence[str] | None = None) -> None:
        """Store the parts; no process is started.

        Args:
            processes: starts the process, and ends it.
            folder: where the answers are written.
            command: what is started; None for ``hypha-accelerate-executor session``.
        """
        self._processes = processes
        self._answers = folder / "models.jsonl"
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
            await self._kill()
            what = f"{arguments[0]} was not done within {timeout:g} s"
            raise ProcessFailedError(what) if self._child is None else self._child.failure(what)
        if answer["status"] != 0:
            raise ProcessFailedError(f"{arguments[0]} ended with status {answer['status']}: {answer['output']}")
        return str(answer["output"])

    async def _ask(self, arguments: Sequence[str]) -> dict[str, Any]:
        child = self._running()
        begin = self._answers.stat().st_size
        assert child.process.stdin is not None
        try:
            child.process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")
            child.process.stdin.flush()
        except BrokenPipeError:
            await self._processes.wait(child)
        while not (text := self._answer(begin)).endswith(b"\n"):
            if child.process.poll() is not None:
                raise child.failure(f"{arguments[0]} ended with status {child.process.returncode}")
            await anyio.sleep(POLL)
        answer: dict[str, Any] = parse_json(text)
        return answer

    def _running(self) -> LocalProcess:
        """Return the process; start it if there is none."""
        if self._child is None or self._child.process.poll() is not None:
            self._child = self._processes.start("models", self._command, stdout=self._answers, has_input=True)
        return self._child

    async def _kill(self) -> None:
        """Kill the process, whose next answer would be that of a command that was given up."""
        if self._child is not None:
            await self._processes.kill(self._child.name)

    def _answer(self, begin: int) -> bytes:
        with self._answers.open("rb") as file:
            file.seek(begin)
            return file.read()
