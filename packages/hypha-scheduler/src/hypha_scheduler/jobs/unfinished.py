"""Jobs whose scheduler ended without recording their end: found by their journals when the next scheduler starts.

Their files are only read. A journal is locked while its job runs, so that schedulers that share an output directory do
not name each other's jobs. Called by `service`.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hypha_proto.codec import parse_json
from hypha_proto.errors import DecodeError
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.event_file import EVENTS
from hypha_scheduler.jobs.journal import JOURNAL, read_journal

_log = logging.getLogger(__name__)

MAX_DIRECTORIES: Final = 1000
"""Directories that are looked at, newest first."""
MAX_NAMED: Final = 10
"""Jobs that are named in the log, newest first."""
_PART: Final = 64 << 10
"""Bytes that are read at the beginning or the end of a file."""
_ENDS: Final = frozenset({"finished", "failed"})


@dataclass(frozen=True, slots=True)
class UnfinishedJob:
    """Job without an end."""

    job_id: str
    directory: Path
    began: float | None
    """Seconds since the Unix epoch, or None if no event states when it began."""
    progress: str | None
    """Last record of the job's strategy, such as ``round 7``; None if there was none."""
    last_record: float
    """Time at which its journal was last written."""

    def __str__(self) -> str:
        began = "" if self.began is None else f"began {_readable(self.began)}, "
        reached = "recorded no result" if self.progress is None else f"completed {self.progress}"
        text = (
            f"job {self.job_id} has no end: its scheduler ended while it ran. It {began}{reached} and was last "
            f"recorded {_readable(self.last_record)}; its files are in {self.directory}. "
            "A job cannot be resumed: submit it again"
        )
        if self.progress is not None and any((self.directory / "model").glob("*.safetensors")):
            text += f", with model.path = {str(self.directory / 'model')!r} to start from the model that it had"
        return f"{text}. Delete the directory to hear no more of it"


def find_unfinished(runs: Path) -> list[UnfinishedJob]:
    """Return the jobs in an output directory that have no end and do not run, the one last recorded first.

    Raises:
        OSError: the directory exists and cannot be read.
    """
    try:
        journals = [(entry / JOURNAL) for entry in runs.iterdir()]
    except FileNotFoundError:
        return []
    written = sorted(((at, path) for path in journals if (at := _written_at(path)) is not None), reverse=True)
    found = (_examine(path, at) for at, path in written[:MAX_DIRECTORIES])
    return [job for job in found if job is not None]


def log_unfinished(runs: Path) -> None:
    """Log the jobs in an output directory that have no end, and what to do; a directory that cannot be read, too."""
    try:
        found = find_unfinished(runs)
    except OSError as error:
        _log.warning("cannot look for unfinished jobs: %s", error)
        return
    for job in found[:MAX_NAMED]:
        _log.warning("%s", job)
    if len(found) > MAX_NAMED:
        _log.warning("%d further jobs in %s have no end", len(found) - MAX_NAMED, runs)


def read_unfinished(directory: Path, job_type: str) -> list[dict[str, Any]]:
    """Return the journal of an interrupted job of a type, to resume it.

    Raises:
        JobFailedError: there is no such job, it has ended, it is of another type, or its journal is malformed.
        OSError: the journal cannot be read.
    """
    records = read_journal(directory / JOURNAL)
    if not records:
        raise JobFailedError(f"{directory}: there is no job to resume: {JOURNAL} has no record")
    if end := next((record["record"] for record in records[::-1] if record.get("record") in _ENDS), None):
        raise JobFailedError(f"{directory}: the job cannot be resumed: it has {end}; submit it again")
    if (directory / "result.json").exists():
        raise JobFailedError(f"{directory}: the job cannot be resumed: it has finished, result.json is there")
    job = records[0].get("job")
    was = job.get("type") if isinstance(job, dict) else None
    if was != job_type:
        raise JobFailedError(
            f"{directory}: the job is of type {was!r}, not {job_type!r}; resume it as it was submitted"
        )
    return records


def _readable(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _written_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None


def _examine(path: Path, written: float) -> UnfinishedJob | None:
    directory = path.parent
    try:
        if (directory / "result.json").exists() or _is_running(path):
            return None
        first, last = _records(_head(path)), _records(_tail(path))
        events = _records(_head(directory / EVENTS)) if (directory / EVENTS).exists() else []
    except OSError as error:
        _log.warning("cannot read whether the job in %s has ended: %s", directory, error)
        return None
    if any(record.get("record") in _ENDS for record in last):
        return None
    job_id = next((record["job_id"] for record in first if isinstance(record.get("job_id"), str)), directory.name)
    began = next((event["time"] for event in events if isinstance(event.get("time"), int | float)), None)
    return UnfinishedJob(job_id[:80], directory, began, _progress(last), written)


def _progress(records: list[dict[str, Any]]) -> str | None:
    """Return the kind and number of the last record that has a number of its kind."""
    numbered = (
        f"{kind} {record[kind]}"
        for record in reversed(records)
        if isinstance(kind := record.get("record"), str) and isinstance(record.get(kind), int)
    )
    return next(numbered, None)


def _is_running(path: Path) -> bool:
    """Return whether a scheduler has locked the journal."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_PART)


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _PART))
        return file.read(_PART)


def _records(data: bytes) -> list[dict[str, Any]]:
    """Return the records in a part of a file; lines that are cut are skipped."""
    return list(_parse(data.splitlines()))


def _parse(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            found = parse_json(line)
        except DecodeError:
            continue
        if isinstance(found, dict):
            yield found
