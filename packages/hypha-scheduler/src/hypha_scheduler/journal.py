"""Journal of a job: an append-only file of JSON records, synced to disk.

It records that the job was accepted, its leases, its closed rounds and its end. After a crash, `unfinished` names the
jobs whose journal has no end; a job does not continue after a restart. A crash can truncate only the last line, which
`read_journal` skips. Written by `reporting` and `end_record`.
"""

from __future__ import annotations

import fcntl
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from hypha_proto.codec import parse_json
from hypha_scheduler.json_lines import JsonLinesFile

_log = logging.getLogger(__name__)

JOURNAL: Final = "journal.jsonl"
"""Name of the journal in a job's directory."""


class Journal:
    """Appends records to a file and syncs them to disk, either at once or on a background thread.

    While a disk writes gigabytes of a model, a sync takes seconds, during which no lease would be renewed.
    """

    def __init__(self, path: Path) -> None:
        """Open or create `path`, readable by its owner only, since a job may name the location of secrets."""
        self._path = path
        self._file = JsonLinesFile(path, 0o600)
        self._disk = ThreadPoolExecutor(1, "journal")
        self._pending_sync: Future[None] | None = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)
        self._disk.submit(self._file.close)
        self._disk.shutdown(wait=False)

    def lock(self) -> None:
        """Lock the file until it is closed, by which other schedulers see that its job runs."""
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            _log.warning("%s cannot be locked, so another scheduler may call its job unfinished: %s", self._path, error)

    def record(self, kind: str, **fields: object) -> None:
        """Write a record and sync it to disk before returning.

        Raises:
            OSError: this or an earlier record could not be written or synced.
        """
        self._write(kind, fields)
        self._file.sync()

    def record_async(self, kind: str, **fields: object) -> None:
        """Write a record and sync it to disk in the background; a later call raises the error of a failed sync.

        Raises:
            OSError: this record could not be written, or an earlier one not synced.
        """
        self._write(kind, fields)
        self._pending_sync = self._disk.submit(self._file.sync)

    def _write(self, kind: str, fields: dict[str, object]) -> None:
        if self._pending_sync is not None and self._pending_sync.done():
            self._pending_sync.result()
        self._file.append({"record": kind} | fields)


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return all complete records, oldest first; empty if there is no file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records: list[dict[str, Any]] = []
    for line in lines[:-1]:  # what follows the last line feed was truncated by a crash
        found = parse_json(line)
        if isinstance(found, dict):
            records.append(found)
    return records
