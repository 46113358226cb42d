"""Errors of jobs, with messages for the job's owner."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class JobFailedError(Exception):
    """Failure of a job; the message gives the reason and, where there is one, the remedy."""


def files_unusable(directory: Path, errors: Iterable[BaseException]) -> str:
    """Return why a job failed whose own files in `directory` cannot be used, with the remedy where there is one."""
    found = list(errors)
    text = f"{directory}: the job's files cannot be used: {'; '.join(map(str, found))}"
    if any(isinstance(error, OSError) and error.errno in _NO_ROOM for error in found):
        text += "; free space on that disk, then resume the job or submit it again"
    return text


def waits_for_room(directory: Path, error: OSError) -> str:
    """Return why a job pauses whose files in `directory` find no room, with the remedy."""
    return f"{directory}: there is no room for the job's files: {error}; free space on that disk, then the job goes on"


def lacks_room(error: OSError) -> bool:
    """Return whether a file could not be written because its disk, or a quota, is full."""
    return error.errno in _NO_ROOM


class JobInterruptedError(Exception):
    """The scheduler ends before the job; the job has not failed, and the message says how it goes on."""


class JobCancelledError(JobFailedError):
    """The job's owner has cancelled it."""


class AllocationError(JobFailedError):
    """Too few workers were found in time."""


class JobRefusedError(Exception):
    """A job is not taken; the message says why, and what to do."""
