"""Journal of a job: an append-only file of JSON records, synced to disk.

The runner records that the job was accepted, its leases, the starts and ends of its tasks and its own end; between them
stand the records of its operator, from which a strategy restores the operator's state. The first record has the version
of the format.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import anyio
import anyio.to_thread

from hypha_proto.record_file import RecordFile, whole_lines
from hypha_scheduler.errors import JobFailedError

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
    """Appends records to a file, and syncs them to disk.

    While a disk writes gigabytes of a model, a sync takes seconds, during which no lease would be renewed: `sync` does
    it in a thread, and `record` is for the begin and the end of a job.
    """

    def __init__(self, path: Path) -> None:
        """Open or create `path`, readable by its owner only, since a job may name the location of secrets."""
        self._file = RecordFile(path, 0o600)
        self._limiter = anyio.CapacityLimiter(1)
        self.written = 0
        """Number of records that were appended."""
        self.synced = 0
        """How many of these are on disk."""
        self._sync_lock = threading.Lock()
        self._failure: OSError | None = None
        """Error of the first sync that failed; the system reports such an error to one sync only."""

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    def lock(self) -> bool:
        """Lock the file until it is closed, by which other schedulers see that its job runs; return whether it is."""
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            path = self._file.path
            _log.warning("%s cannot be locked, so another scheduler may call its job unfinished: %s", path, error)
            return False
        return True

    def append(self, kind: str, /, **fields: object) -> None:
        """Write a record; the next sync brings it to disk.

        Raises:
            OSError: this record could not be written, or an earlier one not synced.
            TypeError: a value cannot be written as JSON.
            ValueError: a value refers to itself.
        """
        if self._failure is not None:
            raise self._failure
        is_first = self._file.is_empty and not self.written
        first: dict[str, object] = {"record": kind, "format": FORMAT} if is_first else {"record": kind}
        self._file.append(first | fields)
        self.written += 1

    def record(self, kind: str, /, **fields: object) -> None:
        """Write a record and sync it to disk before returning; raises what `append` does."""
        self.append(kind, **fields)
        self._sync()

    async def sync(self) -> None:
        """Sync all records that were appended to disk, in a thread.

        Raises:
            OSError: they could not be synced.
        """
        await anyio.to_thread.run_sync(self._sync, limiter=self._limiter)

    def touch(self) -> None:
        """Set the time at which the file was last written, by which the next scheduler sees when the job last ran.

        Raises:
            OSError: it cannot be set.
        """
        os.utime(self._file.path)

    def _sync(self) -> None:
        """Sync the records that were written so far; after a failure always raise: nobody knows what is on disk."""
        with self._sync_lock:
            written = self.written
            if self._failure is not None:
                raise self._failure
            if self.synced < written:
                try:
                    self._file.sync()
                except OSError as error:
                    self._failure = error
                    raise
                self.synced = written


def check_names(kind: str, fields: Mapping[str, object]) -> None:
    """Check the names in a record of a strategy.

    Raises:
        ValueError: the kind or a field is one of the runner's.
    """
    if kind in RUNNER_KINDS:
        raise ValueError(f"journal: records of kind {kind!r} are the runner's; name yours otherwise")
    if taken := _RUNNER_FIELDS & fields.keys():
        raise ValueError(f"journal: record {kind!r} has the field {min(taken)!r}, which is the runner's; rename it")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return all complete records, oldest first; empty if there is no file.

    Raises:
        JobFailedError: the journal is of another format, or a complete line is not a record.
        OSError: it cannot be read.
    """
    try:
        lines = whole_lines(path.read_bytes())
    except FileNotFoundError:
        return []
    records = [_parse(path, number, line) for number, line in enumerate(lines, 1)]
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
