"""Journal records of an inference job, and the state that they restore. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hypha_net.redaction import redact_urls
from hypha_proto.job_spec import HuggingFaceReference, PeersReference, UriReference
from hypha_proto.texts import quote
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.strategies.base import Artifact
from hypha_scheduler.strategies.inference.parts import PartRecord
from hypha_scheduler.strategies.journal_records import parse_record

VERSION: Final = 1
"""Version of the records of this strategy."""
BEGIN: Final = "inference"
"""First record: what decides the results of a job, which a resumed one must have the same."""
PART: Final = "part"
"""Record of a committed part."""


@dataclass(slots=True)
class RestoredInference:
    """State of an interrupted run."""

    identity: Mapping[str, Any] | None = None
    """Fields of the first record; None if there is none."""
    parts: dict[int, PartRecord] = field(default_factory=dict)
    """Committed parts by slice."""


def describe_artifact(artifact: Artifact) -> dict[str, Any]:
    """Return what identifies a model or preprocessor: its files' digests, the commit in its hub, or its URI."""
    reference = artifact.origin or artifact.reference
    if isinstance(reference, HuggingFaceReference):
        files = sorted(reference.filenames)
        return {"repository": reference.repository, "revision": reference.revision, "files": files}
    if isinstance(reference, UriReference):
        return {"uri": redact_urls(reference.value)}  # a presigned URL has another signature after each start
    assert isinstance(reference, PeersReference)
    return {"files": {name: file.digest for name, file in zip(reference.filenames or (), artifact.files, strict=True)}}


def restore(journal: Iterable[Mapping[str, Any]]) -> RestoredInference:
    """Return the state after the records of a journal.

    Raises:
        JobFailedError: a record is malformed or of another version, or a slice was committed twice.
    """
    state = RestoredInference()
    for record in journal:
        if record.get("record") == BEGIN and state.identity is None:
            state.identity = record
        elif record.get("record") == PART:
            _add_part(state, record)
    if state.identity is not None and (version := state.identity.get("version")) != VERSION:
        raise JobFailedError(
            f"journal: its inference records are of version {version!r}, and this program reads {VERSION}; resume "
            "the job with the version of hypha-scheduler that began it"
        )
    return state


def _add_part(state: RestoredInference, record: Mapping[str, Any]) -> None:
    try:
        part = parse_record(record, PartRecord)
        if part.slice in state.parts:
            raise ValueError(f"slice {part.slice} was committed before")
    except ValueError as error:
        number = len(state.parts) + 1
        raise JobFailedError(f"journal: the record of part {number} is malformed: {error}") from None
    state.parts[part.slice] = part


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return how a resumed job differs from the one that the journal is of, one line a key."""
    lines = []
    for key, what in _NAMES.items():
        was, found = before.get(key), now.get(key)
        if isinstance(was, Mapping) and isinstance(found, Mapping):
            pairs = [(f"{what}: {part}", was.get(part), found.get(part)) for part in sorted({*was, *found})]
        else:
            pairs = [(what, was, found)]
        lines += [f"{name} is {quote(new)}, and was {quote(old)}" for name, old, new in pairs if old != new]
    return lines


_NAMES: Final = {
    "dataset": "dataset",
    "manifest": "digest of the dataset's manifest",
    "slices": "number of slices",
    "model": "model",
    "preprocessor": "preprocessor",
    "sampling": "inference",
    "columns": "results.columns",
}
