"""Start-up of child processes that print one line when they are ready."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path


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
