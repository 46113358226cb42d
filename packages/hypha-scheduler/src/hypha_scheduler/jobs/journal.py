"""Journal of a job: an append-only file of JSON records, synced to disk.

The runner records that the job was accepted, its leases, the starts and ends of its tasks and its own end; between them
stand the records of its operator, from which a strategy restores the operator's state. The first record has the version
of the format. A crash can truncate only the last line, which does not count.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import anyio
import anyio.to_thread

from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.json_lines import JsonLinesFile, cut_last_line

_log = logging.getLogger(__name__)

JOURNAL: Final = "journal.jsonl"
"""Name of the journal in a job's directory."""

FORMAT: Final = 2
"""Version of the format; written to the first record."""
RUNNER_KINDS: Final = frozenset(
    {"accepted", "resumed", "placed", "leased", "started", "ended", "interrupted", "finished", "failed"}
)
"""Kinds of records that only the runner writes."""
_RUNNER_FIELDS: Final = frozenset({"record", "format"})


class Journal:
    """Appends records to a file and syncs them to disk, either at once or on a background thread.

    While a disk writes gigabytes of a model, a sync takes seconds, during which no lease would be renewed.
    """

    def __init__(self, path: Path) -> None:
        """Open or create `path`, readable by its owner only, since a job may name the location of secrets.

        A last line that a crash has cut short is removed.
        """
        self._path = path
        self._file = JsonLinesFile(path, 0o600)
        self._is_new = cut_last_line(self._file.fileno()) == 0
        self._limiter = anyio.CapacityLimiter(1)
        self.written = 0
        """Number of records that were appended."""
        self.synced = 0
        """How many of these are on disk."""
        self._disk = ThreadPoolExecutor(1, "journal")
        self._lines = 0
        """Number of lines that were written, of any kind of record."""
        self._synced_lines = 0
        self._sync_lock = threading.Lock()
        self._is_sync_queued = False
        """Whether a sync in the background has yet to begin, which covers what is written until then."""
        self._failure: OSError | None = None
        """Error of the first sync that failed; the system reports such an error to one sync only."""

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        fcntl.flock(self._file.fileno(), fcntl.LOCK_UN)
        self._disk.submit(self._file.close)
        self._disk.shutdown(wait=False)

    def lock(self) -> bool:
        """Lock the file until it is closed, by which other schedulers see that its job runs; return whether it is."""
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            _log.warning("%s cannot be locked, so another scheduler may call its job unfinished: %s", self._path, error)
            return False
        return True

    def record(self, kind: str, /, **fields: object) -> None:
        """Write a record and sync it to disk before returning.

        Raises:
            OSError: this or an earlier record could not be written or synced.
        """
        self._write(kind, fields)
        self._sync()

    def append(self, kind: str, /, **fields: object) -> None:
        """Write a record of a strategy; `sync` brings it to disk.

        Raises:
            OSError: this record could not be written, or an earlier one not synced.
            TypeError: a value cannot be written as JSON.
            ValueError: the kind or a field is one of the runner's, or a value refers to itself.
        """
        if kind in RUNNER_KINDS:
            raise ValueError(f"journal: records of kind {kind!r} are the runner's; name yours otherwise")
        if taken := _RUNNER_FIELDS & fields.keys():
            raise ValueError(f"journal: record {kind!r} has the field {min(taken)!r}, which is the runner's; rename it")
        self._write(kind, fields)
        self.written += 1

    async def sync(self) -> None:
        """Sync all records that were appended to disk, in a thread.

        Raises:
            OSError: they could not be synced.
        """
        written = self.written
        await anyio.to_thread.run_sync(self._sync, limiter=self._limiter)
        self.synced = written

    def record_lazily(self, kind: str, /, **fields: object) -> None:
        """Write a record that whichever sync comes next brings to disk; for records that others make up for.

        Raises:
            OSError: this record could not be written, or an earlier one not synced.
        """
        self._write(kind, fields)

    def touch(self) -> None:
        """Set the time at which the file was last written, by which the next scheduler sees when the job last ran.

        Raises:
            OSError: it cannot be set.
        """
        os.utime(self._path)

    def record_async(self, kind: str, /, **fields: object) -> None:
        """Write a record and sync it to disk in the background; a later call raises the error of a failed sync.

        Raises:
            OSError: this record could not be written, or an earlier one not synced.
        """
        self._write(kind, fields)
        if not self._is_sync_queued:
            self._is_sync_queued = True
            self._disk.submit(self._sync_queued)

    def _write(self, kind: str, fields: Mapping[str, object]) -> None:
        if self._failure is not None:
            raise self._failure
        first: dict[str, object] = {"record": kind, "format": FORMAT} if self._is_new else {"record": kind}
        self._file.append(first | dict(fields))
        self._is_new = False
        self._lines += 1

    def _sync_queued(self) -> None:
        self._is_sync_queued = False
        self._sync()

    def _sync(self) -> None:
        """Sync the lines that were written so far; after a failure always raise: nobody knows what is on disk."""
        wanted = self._lines
        with self._sync_lock:
            if self._failure is not None:
                raise self._failure
            if self._synced_lines >= wanted:  # by a sync that this one waited for
                return
            written = self._lines
            try:
                self._file.sync()
            except OSError as error:
                self._failure = error
                raise
            self._synced_lines = written


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return all complete records, oldest first; empty if there is no file.

    Raises:
        JobFailedError: the journal is of another format, or a complete line is not a record.
        OSError: it cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = [_parse(path, number, line) for number, line in enumerate(lines[:-1], 1)]  # a crash cut what follows
    if records and (version := records[0].get("format")) != FORMAT:
        remedy = "read it with the version of hypha-scheduler that wrote it"
        raise JobFailedError(f"{path}: the journal is of format {version!r}, this version reads {FORMAT}; {remedy}")
    return records


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)  # the strict parser takes four times as long, and this file is our own
    except (ValueError, RecursionError) as error:
        raise JobFailedError(f"{path}: line {number} of the journal is malformed: {error}") from None
    if not isinstance(found, dict):
        raise JobFailedError(f"{path}: line {number} of the journal is malformed: not an object")
    return found
