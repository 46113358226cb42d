"""Child processes: start-up of those that print one line when they are ready, interruption, and their end."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import psutil


def first_line(process: subprocess.Popen[str], seconds: float = 20, log: Path | None = None) -> str:
    """Return the first line that a process prints, without its newline; fail if none arrives within `seconds`.

    A process that prints nothing in time is killed. `log` is the file of its standard error, shown on failure.
    """
    assert process.stdout is not None
    killer = threading.Timer(seconds, process.kill)
    killer.start()
    try:
        line = process.stdout.readline()
    finally:
        killer.cancel()
    told = log.read_text()[-4000:] if log is not None else ""
    assert line, f"{process.args!r}\nended, or said nothing within {seconds:g} s and was killed\n{told}"
    return line.rstrip("\n")


def is_alive(process: psutil.Process | int) -> bool:
    """Return whether a process, or the one of an id, has not ended; one that nobody has waited for has."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def accept_interrupts() -> None:
    """Let Ctrl-C end a program, also if these tests run in the background of a shell, which ignores it for them.

    For the argument `preexec_fn` of `subprocess.Popen`.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
