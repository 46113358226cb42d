"""Audit of an inference job: proves from its files that each row of the dataset has exactly one result.

It reads the journal, the manifest of the dataset, the parts and the manifest of the results. `strategies.inference`
calls it at the end of a job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hypha_net.transfer.io.integrity import ContentVerifier
from hypha_proto.datasets import MANIFEST
from hypha_proto.texts import quote
from hypha_scheduler.audit.job_directory import Findings, read_samples
from hypha_scheduler.jobs.journal import JOURNAL

_RESULTS: Final = "results"
_INCOMING: Final = "incoming"


@dataclass(slots=True)
class InferenceFindings(Findings):
    """Outcome of the audit of an inference job."""

    slices: int = 0
    """Slices of the dataset."""
    rows: int = 0
    """Rows of the dataset."""
    proven: int = 0
    """Rows that were found, each once."""
    errors: int = 0
    """Those of them that could not be computed."""
    is_complete: bool = False
    """Whether the job has written the manifest of its results."""

    def __str__(self) -> str:
        state = "complete" if self.is_complete else "no manifest of the results yet"
        found = f"{self.proven} of {self.rows} rows of {self.slices} slices have exactly one result"
        return f"{found}, {self.errors} of them an error; {state}"


def audit(directory: Path, records: Sequence[Mapping[str, Any]]) -> InferenceFindings:
    """Audit the files of an inference job, whose journal has these records; a slice without a part is a fault, too.

    Raises:
        OSError: a file cannot be read.
    """
    findings = InferenceFindings()
    begin = next((record for record in records if record.get("record") == "inference"), {})
    expected = _expected_rows(directory, begin, findings)
    parts = _parts(records, len(expected), findings)
    found = {index: _audit_part(directory, record, expected, findings) for index, record in parts.items()}
    _audit_results(directory, expected, parts, findings)
    for index, rows in expected.items():
        if index not in parts:
            findings.add(f"slice {index}: its {rows} rows have no result; resume the job")
    findings.proven = sum(rows for rows, _ in found.values())
    findings.errors = sum(errors for _, errors in found.values())
    return findings


def _expected_rows(directory: Path, begin: Mapping[str, Any], findings: InferenceFindings) -> dict[int, int]:
    """Return the number of rows of each slice, by the dataset's manifest that the journal names."""
    if not begin:
        findings.add(f"{directory / JOURNAL}: it does not say which dataset the job computes; the job had not begun")
        return {}
    expected = read_samples(directory, begin.get("manifest"), findings)
    findings.slices, findings.rows = len(expected), sum(expected.values())
    return expected


def _parts(
    records: Sequence[Mapping[str, Any]], slices: int, findings: InferenceFindings
) -> dict[int, Mapping[str, Any]]:
    """Return the record of each slice's part."""
    parts: dict[int, Mapping[str, Any]] = {}
    for record in records:
        if record.get("record") != "part":
            continue
        index = record.get("slice")
        if type(index) is not int or not 0 <= index < slices:
            findings.add(f"{JOURNAL}: a part is of slice {index!r}, and the dataset has {slices}")
        elif index in parts:
            findings.add(f"slice {index}: the journal has two parts of it")
        else:
            parts[index] = record
    return parts


def _audit_part(
    directory: Path, record: Mapping[str, Any], expected: Mapping[int, int], findings: InferenceFindings
) -> tuple[int, int]:
    """Audit the part of a slice; return the numbers of its rows and of those that are errors."""
    index = record["slice"]
    path = directory / _RESULTS / f"part-{index}.jsonl"
    if not path.exists():
        path = directory / _INCOMING / str(record.get("file"))
    try:
        seen, digest = _read_part(path, index, findings)
    except FileNotFoundError:
        findings.add(f"slice {index}: its part is missing: {directory / _RESULTS / f'part-{index}.jsonl'}")
        return 0, 0
    if digest != record.get("digest"):
        findings.add(f"{path}: the digest is {digest}, and the journal has {record.get('digest')}")
    rows = expected[index]
    if missing := sorted(set(range(rows)) - seen.keys())[:5]:
        findings.add(f"{path}: rows {', '.join(map(str, missing))} have no result")
    if extra := sorted(seen.keys() - set(range(rows)))[:5]:
        findings.add(f"{path}: rows {', '.join(map(str, extra))} are none of the slice's {rows}")
    counted = [is_error for row, is_error in seen.items() if row < rows]
    return len(counted), sum(counted)


def _read_part(path: Path, index: int, findings: InferenceFindings) -> tuple[dict[int, bool], str]:
    """Return whether each row of a part is an error, by its number, and the digest of the part."""
    seen: dict[int, bool] = {}
    content, size = ContentVerifier(None, None), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            content.update(memoryview(line))
            size += len(line)
            _audit_row(f"{path}: line {number}", line, index, seen, findings)
    return seen, content.verify(size)


def _audit_row(place: str, line: bytes, index: int, seen: dict[int, bool], findings: InferenceFindings) -> None:
    try:
        row = json.loads(line.decode())
        position = row["slice"], row["row"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        findings.add(f"{place} is no result: {quote(error)}")
        return
    number = position[1]
    if any(type(value) is not int for value in position) or position[0] != index or number < 0:
        findings.add(f"{place}: it is of slice and row {quote(position)}, in the part of slice {index}")
    elif number in seen:
        findings.add(f"{place}: row {number} has a second result")
    else:
        seen[number] = "error" in row


def _audit_results(
    directory: Path, expected: Mapping[int, int], parts: Mapping[int, Mapping[str, Any]], findings: InferenceFindings
) -> None:
    """Audit the folder of the results: its manifest, and files that do not belong there."""
    folder = directory / _RESULTS
    found = folder.iterdir() if folder.is_dir() else ()
    names = {entry.name for entry in found if not entry.name.startswith(".")}  # a data node keeps digests there
    for name in sorted(names - {f"part-{index}.jsonl" for index in parts} - {MANIFEST}):
        findings.add(f"{folder / name}: the journal does not know this file")
    findings.is_complete = MANIFEST in names
    if not findings.is_complete:
        return
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        listed = {entry["file"]: (entry["samples"], entry["digest"]) for entry in manifest["slices"]}
    except (ValueError, TypeError, KeyError) as error:
        findings.add(f"{folder / MANIFEST}: it is malformed: {error!r}")
        return
    known = {f"part-{index}.jsonl": (expected[index], record.get("digest")) for index, record in parts.items()}
    for name in sorted(listed.keys() | known.keys()):
        if listed.get(name) != known.get(name):
            what = f"{listed.get(name)!r}, and by the journal {known.get(name)!r}"
            findings.add(f"{folder / MANIFEST}: rows and digest of {name} are {what}")
