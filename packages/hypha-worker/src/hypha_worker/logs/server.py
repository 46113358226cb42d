"""Answers schedulers that ask what the executors of their jobs have printed (``/hypha-logs/0.1.0``).

A log is read for the scheduler alone that `run_log` has recorded with it.
"""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from hypha_proto.ids import PeerId
from hypha_proto.job_logs import MAX_LOGS, MAX_TEXT, ListLogs, LogEntry, LogPart, LogsListed, ReadLog
from hypha_worker.logs.reader import list_job_logs, open_or_empty
from hypha_worker.logs.redaction import LogRedaction
from hypha_worker.logs.run_log import LogFolder, has_ended, older_half, read_origin

_MAX_READS: Final = 2
"""Answers that are made at a time; further ones wait."""
_SEPARATORS: Final = b"\n\r"
_NEXT_LINE: Final = re.compile(rb"[\n\r]")
_UNFINISHED_WORD: Final = re.compile(rb"\S*\Z")


@dataclass(slots=True)
class OpenLog:
    """Both halves of a log as they are at one moment, whatever is written later."""

    halves: tuple[FileIO, ...]
    sizes: tuple[int, ...]
    start: int
    """Position of the first byte that is there."""
    ended: bool

    @property
    def end(self) -> int:
        """Position after the last byte."""
        return self.start + sum(self.sizes)

    def read(self, position: int, length: int) -> bytes:
        """Return bytes from a position that is there, fewer at the end."""
        found, offset = b"", position - self.start
        for file, size in zip(self.halves, self.sizes, strict=True):
            wanted = min(length - len(found), size - offset)
            if wanted > 0:
                file.seek(offset)
                found += file.read(wanted)
            offset = max(0, offset - size)
        return found


class LogServer:
    """Lists and reads logs for the schedulers for which their runs were started."""

    def __init__(self, logs: LogFolder, redaction: LogRedaction) -> None:
        """Serve the logs of a folder."""
        self._folder = logs.folder
        self._redaction = redaction
        self._reads = anyio.CapacityLimiter(_MAX_READS)

    async def list_logs(self, scheduler: PeerId, request: ListLogs) -> LogsListed:
        """Return the logs of a job that belong to a scheduler."""
        entries: list[LogEntry] = []
        for log in reversed(list_job_logs(self._folder, request.job_id)):
            with ExitStack() as files:
                if len(entries) < MAX_LOGS and (found := _open(log.path, scheduler, files)) is not None:
                    entries.append(LogEntry(log.run, found.start, found.end, found.ended))
        return LogsListed(tuple(reversed(entries)))

    async def read_log(self, scheduler: PeerId, request: ReadLog) -> LogPart:
        """Return a part of a log that belongs to a scheduler."""
        async with self._reads:
            with ExitStack() as files:
                for log in list_job_logs(self._folder, request.job_id):
                    if log.run == request.run and (found := _open(log.path, scheduler, files)) is not None:
                        return await anyio.to_thread.run_sync(self._read, found, request)
        return LogPart(known=False, text="", start=0, next=0)

    def _read(self, log: OpenLog, request: ReadLog) -> LogPart:
        start, data, following = read_lines(log, request.position, min(request.limit, MAX_TEXT))
        return LogPart(
            known=True, text=self._redaction.clean(data.decode(errors="replace")), start=start, next=following
        )


def read_lines(log: OpenLog, position: int, limit: int) -> tuple[int, bytes, int]:
    """Return whole lines: the position of the first, the lines, and the position from which to read further ones.

    A text that began or ended within a line could show a part of a secret that is not recognized as one. Of a line that
    is longer than `limit`, whole words are returned, and the rest is skipped.
    """
    position = max(position, log.start)
    if position >= log.end or not limit:
        return position, b"", position
    if position > log.start and log.read(position - 1, 1) not in _SEPARATORS:
        skipped = log.read(position, limit)
        line_end = _NEXT_LINE.search(skipped)
        position += len(skipped) if line_end is None else line_end.end()
        if line_end is None:
            return position, b"", position
    data = log.read(position, limit)
    if log.ended and position + len(data) == log.end:
        return position, data, log.end
    cut = data.rfind(b"\n") + 1 or data.rfind(b"\r") + 1
    if cut:
        return position, data[:cut], position + cut
    if len(data) < limit:  # more of the line may follow
        return position, b"", position
    return position, _UNFINISHED_WORD.sub(b"", data, count=1) + b"\n", position + len(data)


def _open(path: Path, scheduler: PeerId, files: ExitStack) -> OpenLog | None:
    """Open a log if it belongs to a scheduler; None if it does not, or is gone.

    Called by the event loop's thread, which also writes logs: no half is replaced meanwhile.
    """
    origin = read_origin(path)
    if origin is None or origin.scheduler != scheduler:
        return None
    ended = has_ended(path)
    halves = tuple(files.enter_context(open_or_empty(each)) for each in (older_half(path), path))
    return OpenLog(halves, tuple(os.fstat(file.fileno()).st_size for file in halves), origin.dropped, ended)
