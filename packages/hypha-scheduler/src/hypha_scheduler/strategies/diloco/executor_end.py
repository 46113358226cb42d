"""End of the process that has computed, from the end of the executor's command. Pure.

A worker reports the exit code and the last lines of the command that it has started. `accelerate launch` exits with 1
whatever its processes exit with, and prints a traceback of its own after their last lines. Called by `retries`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from hypha_scheduler.strategies.base import TaskEnded

_LAUNCHER_CODE: Final = 1
_END: Final = re.compile(r"^\s*exitcode\s*: (-?\d+) \(pid|returned non-zero exit status (\d+)\.$")
"""Where `accelerate launch` says with what a process has exited: with several processes, or with one."""
_SIGNALLED: Final = re.compile(r"died with <Signals\.\w+: (\d+)>\.$")
_TRACEBACK: Final = "Traceback (most recent call last):"
_ELASTIC: Final = re.compile(r"[WEI]\d{4} \d\d:\d\d:")
"""Begin of a line that the launcher of several processes logs."""
_ERROR: Final = re.compile(r"(ERROR|CRITICAL) [\w.]+: ")
"""Begin of a line that an executor logs as an error; the worker puts the last one of them first."""


def end_of_process(end: TaskEnded) -> TaskEnded:
    """Return the end of the process that has computed: its exit code, and its last lines with its error as the last."""
    lines = [line for line in end.last_lines if line.strip()]
    code = _launched_code(lines) if end.exit_code == _LAUNCHER_CODE else None
    if code is not None:
        lines = _without_launcher(lines)
    if lines and _ERROR.match(lines[0]):
        lines = [*lines[1:], lines[0]]
    return replace(end, exit_code=end.exit_code if code is None else code, last_lines=tuple(lines))


def _launched_code(lines: Sequence[str]) -> int | None:
    """Return with what the process has exited that failed first, which the launcher names last; None without one."""
    for line in reversed(lines):
        if (found := _END.search(line)) is not None:
            return int(found[1] or found[2])
        if (found := _SIGNALLED.search(line)) is not None:
            return -int(found[1])
    return None


def _without_launcher(lines: Sequence[str]) -> list[str]:
    """Return the lines before the launcher's traceback, which is the last one."""
    begin = max((number for number, line in enumerate(lines) if line == _TRACEBACK), default=len(lines))
    return [line for line in lines[:begin] if not _ELASTIC.match(line)]
