"""Files of jobs that wait: their tables with all secrets, so that they wait again after a restart.

``queued.json`` in a job's directory, which only its owner can read, from its submission until it has its first workers.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypha_proto.codec import parse_json
from hypha_proto.record_file import EVENTS
from hypha_proto.whole_directory import remove_tree, replace_file
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.jobs.events import EventFile
from hypha_scheduler.jobs.journal import JOURNAL
from hypha_scheduler.jobs.unfinished import QUEUED, is_running
from hypha_scheduler.submission.resumption import revealed

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that waited when its scheduler ended."""

    job_id: uuid.UUID
    submitted_at: float
    """Seconds since the Unix epoch."""
    number: int
    """Place among the jobs that were submitted to the same scheduler."""
    table: dict[str, Any]


def write_queued(directory: Path, job: JobTable, submitted_at: float, number: int) -> None:
    """Create the directory of a job, and record that it waits.

    Raises:
        OSError: it cannot be recorded; then it does not wait after a restart, either.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        content = {"submitted_at": submitted_at, "number": number, "job": revealed(job)}
        replace_file(directory / QUEUED, json.dumps(content, default=str).encode(), mode=0o600)
        with EventFile(directory / EVENTS) as events:
            about = {"name": job.name, "type": job.type, "rounds": job.planned_steps}
            known = {key: value for key, value in about.items() if value is not None}
            events.write("queued", job_id=directory.name, directory=str(directory), **known)
    except OSError:
        (directory / QUEUED).unlink(missing_ok=True)
        raise


def remove_queued(directory: Path) -> None:
    """Record that a job waits no longer."""
    (directory / QUEUED).unlink(missing_ok=True)


def end_queued(directory: Path, error: str, *, is_cancelled: bool = False) -> None:
    """Record the end of a job that has not begun; log it if that cannot be written."""
    try:
        remove_queued(directory)
        with EventFile(directory / EVENTS) as events:
            events.write("failed", error=error, **({"cancelled": True} if is_cancelled else {}))
    except OSError as failure:
        _log.error("the end of job %s is not recorded: %s", directory.name, failure)


def read_queue(runs: Path) -> list[QueuedJob]:
    """Return the jobs that waited when the scheduler of an output directory ended, in their order.

    What they had begun to prepare is removed, and done again: none had a worker.
    """
    found = sorted(_queued_jobs(runs), key=lambda job: (job.submitted_at, job.number))
    return [job for job in found if _is_cleared(runs / str(job.job_id))]


def _queued_jobs(runs: Path) -> Iterator[QueuedJob]:
    for path in runs.glob(f"*/{QUEUED}"):
        try:
            job = _read_queued(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("%s is ignored, and its job does not wait any longer: %s", path, error)
            continue
        if job is not None:
            yield job


def _read_queued(path: Path) -> QueuedJob | None:
    """Return a job that waits; None if it runs at another scheduler.

    Raises:
        ValueError: it is not a file of this user, or malformed.
    """
    about = path.lstat()
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or path.parent.is_symlink():
        raise ValueError("it is a link, no regular file, or of another user")
    journal = path.parent / JOURNAL
    if journal.exists() and is_running(journal):
        return None
    content = parse_json(path.read_bytes())
    if not isinstance(content["job"], dict):
        raise ValueError("it has no job")
    return QueuedJob(
        uuid.UUID(path.parent.name), float(content["submitted_at"]), int(content["number"]), content["job"]
    )


def _is_cleared(directory: Path) -> bool:
    """Remove what a job has begun to prepare; return whether it may begin anew."""
    try:
        for path in directory.iterdir():
            if path.name not in {EVENTS, QUEUED}:
                remove_tree(path)
    except OSError as error:
        _log.error(
            "job %s does not wait until the next start: %s cannot be cleared: %s", directory.name, directory, error
        )
        return False
    return True
