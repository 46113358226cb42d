"""The programs of a local network as child processes that never outlive it.

Each child leads a session of its own, so that a Ctrl-C reaches this process alone, which then ends the children;
`Processes` leaves none behind, whichever way its context is left. On Linux the kernel ends them also when this process
is killed outright.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import psutil

from hypha_local.errors import ProcessFailedError

TERM_TIMEOUT: Final = 15.0
"""Seconds that a program gets to end after SIGTERM before it is killed."""
POLL: Final = 0.02
TAIL: Final = 15
_LIBC: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG: Final = 1


def _end_with_parent() -> None:
    """In a child, before its program: have the kernel end it when this process is killed and cannot do so itself."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


@dataclass(frozen=True, slots=True)
class Child:
    """One running program."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def last_lines(self, count: int = TAIL) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


def script(name: str) -> str:
    """Path of a console script of this environment."""
    return str(Path(sys.executable).parent / name)


class Processes:
    """Child processes and their logs."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: dict[str, Child] = {}

    def start(self, name: str, command: Sequence[str], *, stdout: Path | None = None) -> Child:
        """Start a program; its output goes to ``logs/<name>.log``, or its stdout to a file of its own.

        Raises:
            ProcessFailedError: the program cannot be started.
        """
        log = self._logs / f"{name}.log"
        with log.open("ab") as errors, (stdout or log).open("ab") as output:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env=child_environment(os.environ),
                    start_new_session=True,
                    preexec_fn=_end_with_parent if _LIBC is not None else None,
                )
            except OSError as error:
                raise ProcessFailedError(f"{name}: {command[0]} cannot be started: {error}") from None
        child = Child(name, process, log)
        self._children[name] = child
        return child

    def child(self, name: str) -> Child:
        """The program that was started as `name`."""
        return self._children[name]

    async def wait(self, child: Child) -> int:
        """Wait until a program ends; its exit status, negative for a signal."""
        while (status := child.process.poll()) is None:  # noqa: ASYNC110 - an exit has no portable event
            await anyio.sleep(POLL)
        return status

    async def run(self, name: str, command: Sequence[str], *, timeout: float, stdout: Path | None = None) -> None:
        """Run a program to its end.

        Raises:
            ProcessFailedError: it failed, or took longer than `timeout` seconds.
        """
        child = self.start(name, command, stdout=stdout)
        with anyio.move_on_after(timeout) as scope:
            status = await self.wait(child)
        if scope.cancelled_caught:
            raise ProcessFailedError(f"{name} was not done within {timeout:g} s; its last lines:\n{child.last_lines()}")
        del self._children[name]
        if status != 0:
            raise ProcessFailedError(f"{name} ended with status {status}; its last lines:\n{child.last_lines()}")

    async def watch(self, names: Sequence[str]) -> None:
        """Return never; raise as soon as one of the named programs ends.

        Raises:
            ProcessFailedError: one has ended.
        """
        while True:
            for child in [self._children[name] for name in names]:
                status = child.process.poll()
                if status is not None:
                    raise ProcessFailedError(
                        f"{child.name} ended with status {status}; its last lines ({child.log}):\n{child.last_lines()}"
                    )
            await anyio.sleep(POLL)

    async def stop(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """End the named programs, or all: SIGTERM, then SIGKILL for what is left after `TERM_TIMEOUT`.

        Returns:
            Exit statuses by name, negative for a signal.
        """
        chosen = [child for name, child in self._children.items() if names is None or name in names]
        running = [child for child in chosen if child.process.poll() is None]
        for child in running:
            _signal(child, signal.SIGTERM)
        with anyio.move_on_after(TERM_TIMEOUT):
            for child in running:
                await self.wait(child)
        for child in running:
            if child.process.poll() is None:
                _kill_tree(child)
            child.process.wait()
        return {child.name: child.process.returncode for child in chosen}


def _signal(child: Child, number: signal.Signals) -> None:
    """Signal a child's whole process group; a group that has gone meanwhile needs none."""
    try:
        os.killpg(child.process.pid, number)
    except ProcessLookupError:
        return


def _kill_tree(child: Child) -> None:
    """Kill a program and whatever it started, in whichever session that lives."""
    try:
        family = psutil.Process(child.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    _signal(child, signal.SIGKILL)
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a child inherits: without HYPHA_* and OTEL_*, which would change every node alike, and with bytecode caches.

    Seven programs that compile the same modules at every start would cost most of the demo's time.
    """
    dropped = ("HYPHA_", "OTEL_", "PYTHONDONTWRITEBYTECODE")
    return {key: value for key, value in environment.items() if not key.startswith(dropped)}


@asynccontextmanager
async def local_processes(logs: Path) -> AsyncIterator[Processes]:
    """Processes that are all ended when the context is left, also by an error or a cancellation."""
    processes = Processes(logs)
    try:
        yield processes
    finally:
        with anyio.CancelScope(shield=True):
            await processes.stop()
