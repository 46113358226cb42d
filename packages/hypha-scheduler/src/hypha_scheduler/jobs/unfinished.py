"""Jobs whose scheduler ended without recording their end: found by their journals when the next scheduler starts.

Their files are only read. A journal is locked while its job runs, so that schedulers that share an output directory do
not name each other's jobs.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from hypha_proto.record_file import EVENTS, read_ends
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.journal import JOURNAL, RUNNER_KINDS, read_journal

_log = logging.getLogger(__name__)

QUEUED: Final = "queued.json"
"""File in the directory of a job that waits for its turn or for its first workers."""
MAX_DIRECTORIES: Final = 1000
"""Directories that are looked at, newest first."""
MAX_NAMED: Final = 10
"""Jobs that are named in the log, newest first."""
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
    """Time at which its journal was last written, or its scheduler last marked it as running."""
    was_stopped: bool = False
    """Whether its scheduler was stopped and has stopped its tasks, too."""

    def __str__(self) -> str:
        began = "" if self.began is None else f"began {_readable(self.began)}, "
        reached = "recorded no result" if self.progress is None else f"completed {self.progress}"
        how = "was stopped" if self.was_stopped else "ended"
        text = (
            f"job {self.job_id} has no end: its scheduler {how} while it ran. It {began}{reached} and was last "
            f"recorded {_readable(self.last_record)}; its files are in {self.directory}. "
            f"Resume it with `hypha-scheduler resume {self.directory} --config FILE`; a job that is refused there, "
            "submit again"
        )
        if (checkpoint := _newest_checkpoint(self.directory)) is not None:
            text += f", with model.path = {str(checkpoint)!r} to start from the model that it had"
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
    owners = {os.geteuid(), runs.stat().st_uid}
    written = sorted(((at, path) for path in journals if (at := _written_at(path, owners)) is not None), reverse=True)
    found = (_examine(path, at) for at, path in written[:MAX_DIRECTORIES])
    return [job for job in found if job is not None]


def log_unfinished(found: Sequence[UnfinishedJob], runs: Path) -> None:
    """Log jobs in an output directory that have no end, and what to do."""
    for job in found[:MAX_NAMED]:
        _log.warning("%s", job)
    if len(found) > MAX_NAMED:
        _log.warning("%d further jobs in %s have no end", len(found) - MAX_NAMED, runs)


def read_resumable(directory: Path) -> list[dict[str, Any]]:
    """Return the journal of a job that runs nowhere and has not finished; its first record has the job's table.

    A job that has failed may succeed once the reason is gone. Nothing is written.

    Raises:
        JobFailedError: there is no such job, it runs or has finished, or its journal is malformed.
        OSError: the journal cannot be read.
    """
    path = directory / JOURNAL
    if not path.is_file():
        raise JobFailedError(f"{directory}: there is no job to resume: it has no {JOURNAL}")
    if is_running(path):
        raise JobFailedError(f"{directory}: another scheduler runs this job; stop it first")
    records = read_journal(path)
    if not records:
        raise JobFailedError(f"{directory}: there is no job to resume: {JOURNAL} has no record")
    if any(record.get("record") == "finished" for record in records):
        raise JobFailedError(f"{directory}: the job cannot be resumed: it has finished")
    if (directory / "result.json").exists():
        raise JobFailedError(f"{directory}: the job cannot be resumed: it has finished, result.json is there")
    if not isinstance(records[0].get("job"), dict):
        raise JobFailedError(f"{directory}: there is no job to resume: the first record of {JOURNAL} has no job")
    return records


def read_unfinished(directory: Path, job_type: str) -> list[dict[str, Any]]:
    """Return the journal of an interrupted or failed job of a type, to resume it.

    Raises:
        JobFailedError: `read_resumable` raises it, or the job is of another type.
        OSError: the journal cannot be read.
    """
    records = read_resumable(directory)
    was = records[0]["job"].get("type")
    if was != job_type:
        raise JobFailedError(
            f"{directory}: the job is of type {was!r}, not {job_type!r}; resume it as it was submitted"
        )
    return records


def _newest_checkpoint(directory: Path) -> Path | None:
    """Return the last model that a training job has written."""
    found = [path for path in (directory / "checkpoints").glob("round-*") if path.name[6:].isdecimal()]
    return max(found, key=lambda path: int(path.name[6:]), default=None)


def _readable(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _written_at(path: Path, owners: Collection[int]) -> float | None:
    """Return when a journal was last written; None if there is none, or one that others have put there."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISREG(found.st_mode) and found.st_uid in owners and not path.parent.is_symlink():
        return found.st_mtime
    _log.warning("%s is not looked at: it is a link, no regular file, or of another user", path)
    return None


def _examine(path: Path, written: float) -> UnfinishedJob | None:
    directory = path.parent
    try:
        if (directory / "result.json").exists() or (directory / QUEUED).exists() or is_running(path):
            return None  # a queued job is run by the queue
        first, last = read_ends(path)
        events = read_ends(directory / EVENTS)[0] if (directory / EVENTS).exists() else []
    except OSError as error:
        _log.warning("cannot read whether the job in %s has ended: %s", directory, error)
        return None
    if _has_ended(last):
        return None
    job_id = next((record["job_id"] for record in first if isinstance(record.get("job_id"), str)), directory.name)
    times = (event.get("time") for event in events if event.get("event") != "queued")
    began = next((time for time in times if isinstance(time, int | float)), None)
    of_runner = (record for record in reversed(last) if record.get("record") in RUNNER_KINDS)
    was_stopped = next((record.get("tasks_run_on") is False for record in of_runner), False)
    return UnfinishedJob(job_id, directory, began, _progress(last), written, was_stopped)


def _has_ended(records: list[dict[str, Any]]) -> bool:
    """Return whether the last run of a job, which may have been resumed, has an end."""
    kinds = (record.get("record") for record in reversed(records))
    return next((kind in _ENDS for kind in kinds if kind in _ENDS or kind == "resumed"), False)


def _progress(records: list[dict[str, Any]]) -> str | None:
    """Return the kind and number of the last record that has a number of its kind."""
    numbered = (
        f"{kind} {record[kind]}"
        for record in reversed(records)
        if isinstance(kind := record.get("record"), str) and isinstance(record.get(kind), int)
    )
    return next(numbered, None)


def is_running(path: Path) -> bool:
    """Return whether a scheduler has locked the journal."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
