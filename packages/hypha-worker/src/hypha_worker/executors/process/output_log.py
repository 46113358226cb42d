"""The output of an executor's process: a bounded file, the worker's log, and the last lines for the job's end.

Called by `process_runner`.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

import anyio
import anyio.abc

from hypha_worker.errors import is_disk_fault

_log = logging.getLogger(__name__)

LAST_LINES: Final = 40
"""Number of a process's last output lines in the report of its end."""
HIDDEN: Final = "{JOB_JSON}"
"""What stands in place of hidden text."""
_LINE_LIMIT: Final = 4096
_ERROR_LINE: Final = re.compile(r"(ERROR|CRITICAL) [\w.]+: ")
"""Start of a line that an executor logs as an error; reported first, as a launcher's traceback may follow it."""
_LOG_LIMIT: Final = 64 << 20


class OutputLog:
    """Records what a process writes to its standard output and error."""

    def __init__(self, path: Path, log_name: str) -> None:
        """Prepare.

        Args:
            path: file that gets the lines.
            log_name: stands before each line in the worker's log.
        """
        self._path = path
        self._log_name = log_name
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._hidden: Sequence[str] = ()
        self.error: str | None = None
        """The last line that the process logged as an error."""

    def hide(self, text: str) -> None:
        """Replace `text`, and its `repr`, by `HIDDEN` wherever a line shows it."""
        self._hidden = (text, repr(text)[1:-1])

    def last_lines(self, *, failed: bool) -> tuple[str, ...]:
        """Return the last lines; if it `failed`, a logged error comes first."""
        if not failed or self.error is None:
            return tuple(self._lines)
        others = [line for line in self._lines if line != self.error]
        return (self.error, *others[1 - LAST_LINES :])

    async def read(self, stream: anyio.abc.ByteReceiveStream) -> None:
        """Record a stream to its end."""
        with self._path.open("wb", buffering=0) as file:
            pending = b""
            with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
                while True:
                    *lines, pending = (pending + await stream.receive(65536)).split(b"\n")
                    for line in lines:
                        self._record(file, line)
                    if len(pending) > _LINE_LIMIT:  # progress bars end lines with a carriage return
                        self._record(file, pending)
                        pending = b""
            if pending:
                self._record(file, pending)

    def _record(self, file: FileIO, line: bytes) -> None:
        _append_line(file, line)
        text = line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
        for job in self._hidden:  # a launcher that failed prints its command, with the whole spec
            text = text.replace(job, HIDDEN)
        text = text[:_LINE_LIMIT]
        if text:
            if _ERROR_LINE.match(text):
                self.error = text
            self._lines.append(text)
            _log.info("[%s] %s", self._log_name, text, extra={"unlimited": True})


def _append_line(file: FileIO, line: bytes) -> None:
    """Append a line to the process's log file; on a full disk the line is in the worker's log only."""
    try:
        if file.tell() < _LOG_LIMIT:
            file.write(line + b"\n")
    except OSError as error:
        if not is_disk_fault(error):
            raise
