"""Append-only file of JSON lines, each of which is written whole or not at all. Used by `journal` and `event_file`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_BLOCK: Final = 1 << 16


class JsonLinesFile:
    """Appends JSON objects to a file, one a line.

    A disk without room takes a part of a line. That part is cut off again, at once and, where this fails too, before
    the next line.
    """

    _cut_at: int | None = None
    """Size of the file without the part of a line that could not be cut off."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        """Open or create `path`.

        Raises:
            OSError: it cannot be opened. All errors of this class name the path.
        """
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._descriptor

    def append(self, line: Mapping[str, object]) -> None:
        """Write a line; numbers that are not finite become null.

        Raises:
            OSError: it could not be written; the file ends with the line before.
            TypeError: a value cannot be written as JSON.
            ValueError: a value refers to itself.
        """
        data = _encode(line)
        with self._naming_path():
            self._cut()
            whole = os.fstat(self._descriptor).st_size
            try:
                self._write(data)
            except OSError:
                self._cut_at = whole
                self._cut()
                raise

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _cut(self) -> None:
        """Remove what follows the last whole line."""
        if self._cut_at is not None:
            os.ftruncate(self._descriptor, self._cut_at)
            self._cut_at = None

    def sync(self) -> None:
        """Wait until all lines are on disk.

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


def cut_last_line(descriptor: int) -> int:
    """Truncate a file after its last line feed, where a crash has cut a line short; return its size then."""
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


def _encode(line: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps(line, allow_nan=False)
    except ValueError:
        json.dumps(line)  # raises unless a number was the reason
        text = json.dumps(_finite(line), allow_nan=False)
    return text.encode() + b"\n"


def _finite(value: object) -> object:
    """Return a value with None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
