"""Child processes of a local network, which never outlive this process.

Each child leads a session of its own, so that Ctrl-C reaches only this process, which then stops the children.
`local_processes` stops all of them however its context is left; on Linux the kernel also terminates them when this
process is killed (`PR_SET_PDEATHSIG`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import psutil

from hypha_local.errors import ProcessFailedError

TERM_TIMEOUT: Final = 15.0
"""Seconds between SIGTERM and SIGKILL."""
POLL: Final = 0.02
_TAIL: Final = 15
_LIBC: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG: Final = 1


def _set_parent_death_signal() -> None:
    """Make the kernel terminate this child when its parent dies; runs in the child before its program."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """One running program."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def failure(self, what: str) -> ProcessFailedError:
        """Return the error for what has gone wrong with it; the message ends with the last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return ProcessFailedError("\n".join((f"{what}; its last lines ({self.log}):", *lines[-_TAIL:])))

    def ended(self) -> ProcessFailedError:
        """Return the error for its end."""
        return self.failure(f"{self.name} ended with status {self.process.returncode}")


def script(name: str) -> str:
    """Return the path of a console script of this Python environment."""
    return str(Path(sys.executable).parent / name)


class Processes:
    """Child processes and their logs."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: dict[str, LocalProcess] = {}

    def start(
        self, name: str, command: Sequence[str], *, stdout: Path | None = None, has_pipes: bool = False
    ) -> LocalProcess:
        """Start a program; its output goes to ``logs/<name>.log``, or its stdout to a file of its own.

        Args:
            name: unique name.
            command: program and arguments.
            stdout: file that its standard output is appended to.
            has_pipes: connect its standard input and output to pipes of `LocalProcess.process` instead.

        Raises:
            ProcessFailedError: the program cannot be started.
        """
        log = self._logs / f"{name}.log"
        with log.open("ab") as errors, (stdout or log).open("ab") as output:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if has_pipes else output,
                    stderr=errors,
                    env=child_environment(os.environ),
                    start_new_session=True,
                    preexec_fn=_set_parent_death_signal if _LIBC is not None else None,
                )
            except OSError as error:
                raise ProcessFailedError(f"{name}: {command[0]} cannot be started: {error}") from None
        child = LocalProcess(name, process, log)
        self._children[name] = child
        return child

    def child(self, name: str) -> LocalProcess:
        """Return the program that was started as `name`."""
        return self._children[name]

    async def wait(self, child: LocalProcess) -> int:
        """Wait until a program exits; return its exit status, negative for a signal."""
        while (status := child.process.poll()) is None:  # noqa: ASYNC110 - an exit has no portable event
            await anyio.sleep(POLL)
        return status

    async def run(self, name: str, command: Sequence[str], *, timeout: float, stdout: Path | None = None) -> None:
        """Run a program to its end.

        Raises:
            ProcessFailedError: the program failed or took longer than `timeout` seconds.
        """
        child = self.start(name, command, stdout=stdout)
        with anyio.move_on_after(timeout) as scope:
            status = await self.wait(child)
        if scope.cancelled_caught:
            raise child.failure(f"{name} was not done within {timeout:g} s")
        del self._children[name]
        if status != 0:
            raise child.ended()

    async def watch(self, names: Sequence[str], may_end: Collection[str] = ()) -> str:
        """Wait until one of the named programs exits; return its name if it may, and has ended with status 0.

        Args:
            names: the programs to watch.
            may_end: those that may end.

        Raises:
            ProcessFailedError: another program has exited, or one has failed.
        """
        while True:
            for child in [self._children[name] for name in names]:
                status = child.process.poll()
                if status == 0 and child.name in may_end:
                    return child.name
                if status is not None:
                    raise child.ended()
            await anyio.sleep(POLL)

    async def stop(self, names: Sequence[str] | None = None) -> dict[str, int]:
        """Stop the named programs, or all: SIGTERM, then SIGKILL for those still running after `TERM_TIMEOUT`.

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

    async def kill(self, name: str) -> None:
        """Kill a program and all that it has started, as if its machine was switched off."""
        child = self._children[name]
        _kill_tree(child)
        await self.wait(child)

    def kill_descendant(self, name: str, word: str) -> bool:
        """Kill one process that a program has started and that has `word` in its command line; return if there is one.

        Args:
            name: name of the program.
            word: one of the words of the command line.
        """
        for process in psutil.Process(self._children[name].process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if word in process.cmdline():
                    process.kill()
                    return True
        return False


def _signal(child: LocalProcess, number: signal.Signals) -> None:
    """Send a signal to a child's process group, unless it has already exited."""
    with suppress(ProcessLookupError):
        os.killpg(child.process.pid, number)


def _kill_tree(child: LocalProcess) -> None:
    """Kill a program and all its descendants, also those in other sessions."""
    try:
        family = psutil.Process(child.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return
    _signal(child, signal.SIGKILL)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child: without HYPHA_* and OTEL_*, which would configure every node the same.

    PYTHONDONTWRITEBYTECODE is dropped too: without bytecode caches, the start of the programs takes most of the demo.
    """
    dropped = ("HYPHA_", "OTEL_", "PYTHONDONTWRITEBYTECODE")
    return {key: value for key, value in environment.items() if not key.startswith(dropped)}


@asynccontextmanager
async def local_processes(logs: Path) -> AsyncIterator[Processes]:
    """Provide `Processes` that are all stopped on exit, also after an error or a cancellation."""
    processes = Processes(logs)
    try:
        yield processes
    finally:
        with anyio.CancelScope(shield=True):
            await processes.stop()
