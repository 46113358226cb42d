"""What survives a restart of the scheduler: one record a line, on disk before anything is built on it.

A job's journal says what was accepted, who holds what, and which rounds are closed. A line that was cut by a crash is
the last one and does not count.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any


class Journal:
    """Appends records to a file; waits for the disk, or has a thread of its own wait.

    A disk that writes gigabytes of a model takes seconds for a line, in which nobody's lease would be renewed.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`, new or for appending; readable by its owner only, for a job may name secrets' places."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file: IO[bytes] = os.fdopen(descriptor, "ab", buffering=0)
        self._disk = ThreadPoolExecutor(1, "journal")
        self._pending_sync: Future[None] | None = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._disk.submit(self._file.close)
        self._disk.shutdown(wait=False)

    def record(self, kind: str, **fields: object) -> None:
        """Write a record; it is on disk when this returns.

        Raises:
            OSError: it is not, or one before it is not.
        """
        self._write(kind, fields)
        os.fsync(self._file.fileno())

    def record_async(self, kind: str, **fields: object) -> None:
        """Write a record that will be on disk before the next one that is waited for; later ones say if it is not.

        Raises:
            OSError: it cannot be written, or one before it is not on disk.
        """
        self._write(kind, fields)
        self._pending_sync = self._disk.submit(os.fsync, self._file.fileno())

    def _write(self, kind: str, fields: dict[str, object]) -> None:
        if self._pending_sync is not None and self._pending_sync.done():
            self._pending_sync.result()
        self._file.write(json.dumps({"record": kind} | fields).encode() + b"\n")


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
