"""What the audits have in common: findings, and the journal and the dataset's manifest in a job's directory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hypha_proto.datasets import MANIFEST
from hypha_proto.file_digests import digest_file
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.journal import JOURNAL, read_journal

_MAX_FAULTS: Final = 100


class NoAuditError(Exception):
    """A directory is none of a job that can be audited."""


@dataclass(slots=True)
class Findings:
    """Outcome of an audit; as text it says what is proven, on one line."""

    faults: list[str] = field(default_factory=list)
    """What is wrong, one line each."""

    def add(self, fault: str) -> None:
        """Add a fault; of very many only the first are kept."""
        if len(self.faults) < _MAX_FAULTS:
            self.faults.append(fault)


def read_records(directory: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the records of a job's journal, and the type of the job.

    Raises:
        NoAuditError: the directory holds no journal, or it cannot be read.
    """
    try:
        records = read_journal(directory / JOURNAL)
    except (OSError, JobFailedError) as error:
        raise NoAuditError(str(error)) from None
    if not records:
        raise NoAuditError(f"{directory}: there is no {JOURNAL} with a record; name a job's directory")
    job = records[0].get("job")
    return records, str(job.get("type", "diloco") if isinstance(job, dict) else None)


def read_samples(directory: Path, digest: object, findings: Findings) -> dict[int, int]:
    """Return the number of samples of each slice by the dataset's manifest, whose digest is given; empty if malformed.

    Raises:
        OSError: it cannot be read.
    """
    path = directory / MANIFEST
    text = path.read_bytes()
    if (found := digest_file(path)) != digest:
        findings.add(f"{path}: the digest is {found}, and the journal has {digest}")
    try:
        return {index: int(entry["samples"]) for index, entry in enumerate(json.loads(text)["slices"])}
    except (ValueError, TypeError, KeyError) as error:
        findings.add(f"{path}: it is malformed: {error!r}")
        return {}
