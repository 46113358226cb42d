"""What survives a restart of the scheduler: one record a line, on disk before anything is built on it.

A job's journal says what was accepted, who holds what, and which rounds are closed. A line that was cut by a crash is
the last one and does not count.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any


class Journal:
    """Appends records to a file and waits for the disk."""

    def __init__(self, path: Path) -> None:
        """Open `path`, new or for appending; readable by its owner only, for a job may name secrets' places."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file: IO[bytes] = os.fdopen(descriptor, "ab", buffering=0)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    def record(self, kind: str, **fields: object) -> None:
        """Write a record; it is on disk when this returns.

        Raises:
            OSError: it is not.
        """
        self._file.write(json.dumps({"record": kind} | fields).encode() + b"\n")
        os.fsync(self._file.fileno())


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole records, oldest first; empty when there is no file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records: list[dict[str, Any]] = []
    for line in lines[:-1]:  # what follows the last line feed was cut by a crash
        found = json.loads(line)
        if isinstance(found, dict):
            records.append(found)
    return records
