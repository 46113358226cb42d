"""Processes that a benchmark measures: each does what lines of JSON on its standard input say, one after the other.

A measurement (`measures`) starts them with `Child`; the programs in `programs` answer with `answer` or `answer_async`.
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
    """A process of a benchmark ended or said that it cannot go on."""


class Child:
    """A running process; `ask` has it do something."""

    def __init__(self, program: str, **options: Any) -> None:
        self.program = program
        command = [sys.executable, "-m", f"benchmarks.programs.{program}", json.dumps(options)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about: dict[str, Any] = self.wait(START_TIMEOUT)
        """What it said when it was ready."""

    def begin(self, do: str, **arguments: Any) -> None:
        """Have it do something without waiting for the end; `wait` comes later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def wait(self, timeout: float) -> Any:
        """The result of what was begun.

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
        """Have it do something and wait for the result."""
        self.begin(do, **arguments)
        return self.wait(timeout)

    def memory(self) -> int:
        """Its resident memory in bytes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def started(program: str, **options: Any) -> Iterator[Child]:
    """A process for the time of the context."""
    child = Child(program, **options)
    try:
        yield child
    finally:
        child.close()


def options() -> Any:
    """What the parent gave this process."""
    return json.loads(sys.argv[1])


def say(answer: Mapping[str, Any]) -> None:
    """Answer the parent."""
    print(json.dumps(answer), flush=True)


def answer(about: Mapping[str, Any], deeds: Mapping[str, Callable[..., Any]]) -> None:
    """Do what the parent says until it has no more to say."""
    say({"result": dict(about)})
    for line in sys.stdin:
        said = json.loads(line)
        try:
            say({"result": deeds[said.pop("do")](**said)})
        except Exception as error:  # noqa: BLE001 - the parent raises it
            say({"error": repr(error)})


async def answer_async(about: Mapping[str, Any], deeds: Mapping[str, Callable[..., Awaitable[Any]]]) -> None:
    """As `answer`, for a program with an event loop."""
    say({"result": dict(about)})
    while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        said = json.loads(line)
        try:
            say({"result": await deeds[said.pop("do")](**said)})
        except Exception as error:  # noqa: BLE001 - the parent raises it
            say({"error": repr(error)})
