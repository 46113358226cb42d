"""Child processes that a benchmark measures: each executes commands, one JSON object per line of its standard input.

A measurement (`measures`) starts them with `start_child`; the programs in `programs` call `serve_commands` or
`serve_commands_async`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil

START_TIMEOUT = 60.0
ROOT = Path(__file__).parents[1]


class ChildFailedError(Exception):
    """A child process ended or reported an error."""


class Child:
    """Running child process; `ask` executes a command in it."""

    def __init__(self, program: str, **options: Any) -> None:
        self.program = program
        command = [sys.executable, "-m", f"benchmarks.programs.{program}", json.dumps(options)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about: dict[str, Any] = self.wait(START_TIMEOUT)
        """What it reported when it was ready."""

    def begin(self, do: str, **arguments: Any) -> None:
        """Send a command without waiting for its result; call `wait` for that."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def wait(self, timeout: float) -> Any:
        """Return the result of the last command.

        Raises:
            ChildFailedError: it failed, ended, or took longer than `timeout` seconds.
        """
        timer = threading.Timer(timeout, self._process.kill)
        timer.start()
        try:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        answer = json.loads(line) if line else {"error": f"it ended, or was not done within {timeout:g} s"}
        if "error" in answer:
            raise ChildFailedError(f"{self.program}: {answer['error']}")
        return answer["result"]

    def ask(self, do: str, *, timeout: float = 300.0, **arguments: Any) -> Any:
        """Execute a command and return its result."""
        self.begin(do, **arguments)
        return self.wait(timeout)

    def memory(self) -> int:
        """Return its resident memory in bytes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def start_child(program: str, **options: Any) -> Iterator[Child]:
    """Run a child process while the context is open."""
    child = Child(program, **options)
    try:
        yield child
    finally:
        child.close()


def options() -> Any:
    """Return the options that the parent passed to this process."""
    return json.loads(sys.argv[1])


def reply(message: Mapping[str, Any]) -> None:
    """Send a message to the parent."""
    print(json.dumps(message), flush=True)


def serve_commands(about: Mapping[str, Any], commands: Mapping[str, Callable[..., Any]]) -> None:
    """Report `about`, then execute the parent's commands until its input ends."""
    reply({"result": dict(about)})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply({"result": commands[command.pop("do")](**command)})
        except Exception as error:  # noqa: BLE001 - the parent raises it
            reply({"error": repr(error)})


async def serve_commands_async(about: Mapping[str, Any], commands: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
    """Do the same as `serve_commands`, in a program with an event loop."""
    reply({"result": dict(about)})
    while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        command = json.loads(line)
        try:
            reply({"result": await commands[command.pop("do")](**command)})
        except Exception as error:  # noqa: BLE001 - the parent raises it
            reply({"error": repr(error)})
