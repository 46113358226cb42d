"""Programs that tests start, and that say by their first line that they are up."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path


def first_line(process: subprocess.Popen[str], seconds: float = 20, log: Path | None = None) -> str:
    """The first line that a process prints, without its end; fails when none comes within `seconds`.

    A process that says nothing in time is killed. `log` is shown on failure: where its standard error goes.
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
