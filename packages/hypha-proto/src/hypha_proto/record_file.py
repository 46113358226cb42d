"""Append-only files of records, one JSON object a line, such as the journal and the events of a job.

A line is written whole or not at all. What follows the last line feed is a line that is still being written, or that a
crash has cut short: readers leave it, and it is removed when the file is opened to append.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError

EVENTS: Final = "metrics.jsonl"
"""Name of the event file in a job's directory."""
_BLOCK: Final = 1 << 16
_PART: Final = 64 << 10
"""Bytes that are read at the begin or the end of a file."""
_MAX_READ: Final = 1 << 24
"""Bytes that are read at a time; no record is longer."""


class RecordFile:
    """Appends records to a file.

    A disk without room takes a part of a line. That part is cut off again, at once and, where this fails too, before
    the next line.
    """

    _is_torn = False
    """Whether the file ends with a part of a line that could not be cut off."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Open or create `path`, and remove a last line that a crash has cut short.

        Raises:
            OSError: it cannot be opened. All errors of this class name the path.
        """
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
        self.is_empty = _cut_last_line(self._descriptor) == 0
        """Whether the file had no record when it was opened."""

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._descriptor

    def append(self, record: Mapping[str, object]) -> None:
        """Write a record; numbers that are not finite become null.

        Raises:
            OSError: it could not be written; the file ends with the record before.
            TypeError: a value cannot be written as JSON.
            ValueError: a value refers to itself.
        """
        data = _encode(record)
        with self._naming_path():
            self._cut()
            try:
                self._write(data)
            except OSError:
                self._is_torn = True
                self._cut()
                raise

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _cut(self) -> None:
        """Remove what follows the last whole line."""
        if self._is_torn:
            _cut_last_line(self._descriptor)
            self._is_torn = False

    def sync(self) -> None:
        """Wait until all records are on disk.

        Raises:
            OSError: they could not be written.
        """
        with self._naming_path():
            os.fsync(self._descriptor)

    @contextmanager
    def _naming_path(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(self.path)) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def whole_lines(data: bytes) -> list[bytes]:
    """Return the lines of a file, or of its end; the first one may lack its begin then."""
    return data.split(b"\n")[:-1]


def read_ends(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the records at the begin and at the end of a file, each from `_PART` bytes; what is no record is skipped.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        first = file.read(_PART)
        file.seek(max(0, os.fstat(file.fileno()).st_size - _PART))
        return list(_parse(whole_lines(first))), list(_parse(whole_lines(file.read(_PART))))


def _parse(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            record = parse_json(line)
        except DecodeError:
            continue  # cut where the part that was read begins
        if isinstance(record, dict):
            yield record


@dataclass(slots=True)
class RecordReader:
    """Reads the records of a file as they are written."""

    path: Path
    """It need not exist yet."""
    position: int = 0
    """Bytes of the file that were read."""

    def read(self) -> list[dict[str, Any]]:
        """Return the records that were added since the last call, `_MAX_READ` bytes at most.

        Raises:
            DecodeError: a line is no JSON.
        """
        data = b""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            file.seek(self.position)
            data = file.read(_MAX_READ)
        lines = whole_lines(data)
        self.position += sum(len(line) + 1 for line in lines)
        return [record for line in lines if isinstance(record := parse_json(line), dict)]


def _cut_last_line(descriptor: int) -> int:
    """Truncate a file after its last line feed; return its size then."""
    size = end = os.fstat(descriptor).st_size
    while end > 0:
        begin = max(0, end - _BLOCK)
        if (found := os.pread(descriptor, end - begin, begin).rfind(b"\n")) >= 0:
            end = begin + found + 1
            break
        end = begin
    if end < size:
        os.ftruncate(descriptor, end)
    return end


def _encode(record: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps(record, allow_nan=False)
    except ValueError:
        json.dumps(record)  # raises unless a number was the reason
        text = json.dumps(_finite(record), allow_nan=False)
    return text.encode() + b"\n"


def _finite(value: object) -> object:
    """Return a value with None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
