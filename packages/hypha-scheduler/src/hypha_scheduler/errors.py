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


class AllocationError(JobFailedError):
    """Too few workers were found in time."""


class StrategyError(Exception):
    """No strategy for a type of job, or one that cannot be loaded."""
