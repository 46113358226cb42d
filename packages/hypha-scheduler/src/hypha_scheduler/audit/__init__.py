"""Audit of a job: proves from the files in its directory what the job claims.

An audit follows the journal, the manifests and the other files by itself: it shares with what wrote them only the
reading of journal lines and tensors, and the digests. The strategies call theirs at the end of a job.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hypha_scheduler.audit import diloco, inference
from hypha_scheduler.audit.job_directory import Findings, NoAuditError, read_records
from hypha_scheduler.errors import JobFailedError

__all__ = ["Findings", "NoAuditError", "audit"]

_AUDITS: Final[dict[str, Callable[[Path, list[dict[str, Any]]], Findings]]] = {
    "diloco": diloco.audit,
    "inference": inference.audit,
}


def audit(directory: Path) -> Findings:
    """Audit the files of a job; of one that runs, those so far.

    Raises:
        NoAuditError: the directory holds no journal of a job that can be audited, or a file cannot be read.
    """
    records, kind = read_records(directory)
    if kind not in _AUDITS:
        known = " and ".join(f'"{each}"' for each in _AUDITS)
        raise NoAuditError(f"{directory}: the job is of type {kind!r}; only those of type {known} can be audited")
    try:
        return _AUDITS[kind](directory, records)
    except OSError as error:
        raise NoAuditError(str(error)) from None


def prove(directory: Path, what: str) -> None:
    """Audit a job before it ends; `what` it has made.

    Raises:
        JobFailedError: the audit has found something wrong.
    """
    try:
        faults = audit(directory).faults
    except NoAuditError as error:
        raise JobFailedError(f"the audit of the {what} has failed: {error}") from None
    if faults:
        raise JobFailedError("\n".join([f"{directory}: the audit of the {what} has failed:", *faults]))
