"""The output of an executor's process: a file with all of it, the worker's log, and the last lines for the end."""

from __future__ import annotations

import logging
import math
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.abc

from hypha_worker.logs.run_log import RunLog

_log = logging.getLogger(__name__)

LAST_LINES: Final = 50
"""Number of a process's last output lines in the report of its end."""
MAX_LINE_RATE: Final = 200
"""Lines of one process in each second that the worker's log gets; further ones are counted."""
HIDDEN: Final = "{JOB_JSON}"
"""What stands in place of hidden text."""
_BLOCK: Final = 1 << 16
_LINE_LIMIT: Final = 4096
_ERROR_LINE: Final = re.compile(r"(ERROR|CRITICAL) [\w.]+: ")
"""Start of a line that an executor logs as an error; reported first, as a launcher's traceback may follow it."""
_TRACEBACK: Final = b"Traceback (most recent call last):"
_IN_TRACEBACK: Final = (b" ", b"During handling of the above", b"The above exception was the")
_ERROR_BYTES: Final = re.compile(rb"(ERROR|CRITICAL) ")


@dataclass(slots=True)
class LineBudget:
    """Allows `MAX_LINE_RATE` lines in each second, and counts the others."""

    deadline: float = -math.inf
    """End of the second."""
    left_out: int = 0
    """Lines that were not allowed in it."""
    _taken: int = 0

    def take(self, wanted: int, now: float) -> int:
        """Return how many of the next lines are allowed."""
        if now >= self.deadline:
            self.deadline, self._taken = now + 1, 0
        allowed = min(wanted, MAX_LINE_RATE - self._taken)
        self._taken += allowed
        self.left_out += wanted - allowed
        return allowed

    def take_left_out(self) -> int:
        """Return how many lines were not allowed since the last call."""
        count, self.left_out = self.left_out, 0
        return count


class OutputLog:
    """Records what a process writes to its standard output and error."""

    def __init__(self, file: RunLog | None, log_name: str) -> None:
        """Prepare.

        Args:
            file: gets all of the output; none where it is only to be reported.
            log_name: stands before each line in the worker's log.
        """
        self._file = file
        self._log_name = log_name
        self._lines: deque[bytes] = deque(maxlen=LAST_LINES)
        self._traceback = 0
        """Lines of a traceback that were the last ones."""
        self._is_ended = False
        """Whether its last line was among them."""
        self._hidden: Sequence[str] = ()
        self._budget = LineBudget()
        self.error: str | None = None
        """The last line that the process logged as an error."""

    def hide(self, text: str) -> None:
        """Replace `text`, and its `repr`, by `HIDDEN` wherever a line shows it."""
        self._hidden = (text, repr(text)[1:-1])

    def last_lines(self, *, failed: bool) -> tuple[str, ...]:
        """Return the last lines; if it `failed`, a logged error comes first."""
        lines = tuple(filter(None, map(self._clean, self._lines)))
        if not failed or self.error is None:
            return lines
        others = [line for line in lines if line != self.error]
        return (self.error, *others[1 - LAST_LINES :])

    async def read(self, stream: anyio.abc.ByteReceiveStream) -> None:
        """Record a stream to its end."""
        if self._file is None:
            await self._read(stream)
            return
        with self._file:
            await self._read(stream)

    async def _read(self, stream: anyio.abc.ByteReceiveStream) -> None:
        pending = b""
        try:
            with suppress(anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError):
                while True:
                    *lines, pending = (pending + await self._receive(stream)).split(b"\n")
                    if len(pending) > _LINE_LIMIT:  # progress bars end lines with a carriage return
                        lines, pending = [*lines, pending], b""
                    self._record(lines)
        finally:
            self._record([pending])
            self._tell_left_out()

    async def _receive(self, stream: anyio.abc.ByteReceiveStream) -> bytes:
        """Return the next output, which is in the file by then; tell meanwhile what was left out of the log."""
        if self._budget.left_out:
            with anyio.CancelScope(deadline=self._budget.deadline):
                return self._store(await stream.receive(_BLOCK))
            self._tell_left_out()
        return self._store(await stream.receive(_BLOCK))

    def _store(self, block: bytes) -> bytes:
        if self._file is not None:
            self._file.write(block)
        return block

    def _record(self, lines: Sequence[bytes]) -> None:
        """Log as many lines as may be, and remember the last ones. Their number is bounded by a block's."""
        lines = [line for line in lines if line.rstrip(b"\r")]
        now = anyio.current_time()
        if now >= self._budget.deadline:
            self._tell_left_out()
        for line in lines[: self._budget.take(len(lines), now)]:
            if text := self._clean(line):
                _log.info("[%s] %s", self._log_name, text, extra={"unlimited": True})
        for line in lines:
            if _ERROR_BYTES.search(line) and _ERROR_LINE.match(error := self._clean(line)):
                self.error = error
                for _ in range(min(self._traceback, len(self._lines))):  # says the same; the file has it
                    self._lines.pop()
                self._traceback = 0
            else:
                self._count_traceback(line)
            self._lines.append(line)

    def _count_traceback(self, line: bytes) -> None:
        """Count the lines of a traceback, which ends with the first line that is not indented."""
        goes_on = self._traceback and line.startswith(_IN_TRACEBACK)
        if line.startswith(_TRACEBACK) or goes_on:
            self._traceback, self._is_ended = self._traceback + 1, False
        elif self._traceback and not self._is_ended:
            self._traceback, self._is_ended = self._traceback + 1, True
        else:
            self._traceback = 0

    def _clean(self, line: bytes) -> str:
        """Return a line as people see it: of a progress bar the last state, and without the job's specification."""
        text = line.decode(errors="replace").rstrip("\r").rsplit("\r", 1)[-1]
        for job in self._hidden:  # a launcher that failed prints its command, with the whole spec
            text = text.replace(job, HIDDEN)
        return text

    def _tell_left_out(self) -> None:
        if count := self._budget.take_left_out():
            _log.info("[%s] %s lines were left out of this log; %s",
                      self._log_name, f"{count:,}", self._where, extra={"unlimited": True})  # fmt: skip

    @property
    def _where(self) -> str:
        if self._file is None:
            return "they are stored nowhere"
        return f"they are in {self._file.path}" if self._file.is_complete else f"{self._file.path} is incomplete"
