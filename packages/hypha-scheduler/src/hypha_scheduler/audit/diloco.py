"""Audit of a DiLoCo job: proves from its files that each sample was used at most once in each epoch.

It reads the records of rounds and contributions, the manifest of the dataset, the start model and the weights after the
last round. From the outer updates that the job has kept it computes weights again, up to the first round without one.
`strategies.diloco` calls it at the end of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from hypha_proto.errors import TensorFileError
from hypha_proto.file_digests import digest_directory, digest_file
from hypha_proto.texts import quote
from hypha_scheduler.audit.job_directory import Findings, read_samples
from hypha_scheduler.jobs.journal import JOURNAL

START_MODEL: Final = "start-model"
"""Directory of the start model, in the job's directory."""
_ALL: Final = 2**63 - 1
"""End of a range that means all samples of a slice of unknown size."""


class _Range(NamedTuple):
    epoch: int
    slice: int
    first: int
    end: int

    def __str__(self) -> str:
        end = "the end" if self.end == _ALL else str(self.end)
        return f"positions {self.first} to {end} of slice {self.slice} in epoch {self.epoch}"


class _Use(NamedTuple):
    """Range of a contribution, sorted by position."""

    range: _Range
    round: int
    peer: str


@dataclass(slots=True)
class DilocoFindings(Findings):
    """Outcome of the audit of a DiLoCo job."""

    rounds: int = 0
    """Committed rounds."""
    terms: int = 0
    """Parameter servers that were appointed."""
    contributions: int = 0
    """Contributions of members to committed rounds."""
    unstated: int = 0
    """Contributions of which it is not proven which weights they began with: the executor did not state it, or in
    round 1 stated others than those that are recorded.

    The scheduler does not know the digest of the start model's weights before the first outer update.
    """
    unused: int = 0
    """Updates that are part of no round."""
    samples: int = 0
    """Samples in exactly one contribution, of all epochs; without those of slices of unknown size."""
    epochs: int = 0
    """Epochs of which samples were used."""
    open: int | None = None
    """Samples of these epochs that are in no contribution; None if the sizes of the slices are not known."""
    weights: str | None = None
    """Digest of the weights after the last round, as recorded."""
    recomputed: int = 0
    """Rounds whose weights follow from the start model and the outer updates, equal to the bit."""
    keeps_updates: bool = False
    """Whether the job keeps its outer updates."""
    is_finished: bool = False
    """Whether the job has finished."""

    def __str__(self) -> str:
        state = "finished" if self.is_finished else "not finished"
        if not self.rounds:
            return f"no round was committed; {state}"
        left = "" if self.open is None else f", {self.open} are open (in none)"
        lines = [
            f"{_plural(self.rounds, 'round')} in {_plural(self.terms, 'term')}; {state}",
            f"{_plural(self.samples, 'sample')} of {_plural(self.epochs, 'epoch')} in exactly one contribution{left}",
            f"unstated: {self.unstated} of {_plural(self.contributions, 'contribution')}"
            + (" (ranges follow from what was handed out and reported)" if self.unstated else ""),
            f"{_plural(self.unused, 'update')} did not count",
            f"weights after round {self.rounds}: {self.weights}",
        ]
        if self.recomputed:
            rounds = _plural(self.recomputed, "round")
            lines.append(f"weights of {rounds} computed again from the start model, equal to the bit")
        elif not self.keeps_updates:
            lines.append("weights not computed again: without rounds.keep_updates the job keeps no outer updates")
        return "\n".join(lines)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


class _RoundDigests(NamedTuple):
    """Digests in the record of a round."""

    round: int
    update: str
    before: str
    weights: str


@dataclass(slots=True)
class _Journal:
    """What was read of the journal so far."""

    findings: DilocoFindings
    samples: Mapping[int, int]
    """Number of samples of each slice; empty if it is not known."""
    term: int = 0
    weights: str | None = None
    """Digest after the last round."""
    uses: list[_Use] = field(default_factory=list)
    contributed: dict[tuple[int, str], Mapping[str, Any]] = field(default_factory=dict)
    """Last record of a contribution, by round and worker."""
    announced: set[tuple[int, str]] = field(default_factory=set)
    rounds: list[_RoundDigests] = field(default_factory=list)
    """Digests of the rounds, in the order of their records."""


def audit(directory: Path, records: Sequence[Mapping[str, Any]]) -> DilocoFindings:
    """Audit the files of a DiLoCo job, whose journal has these records.

    Raises:
        OSError: a file cannot be read.
    """
    findings = DilocoFindings()
    rounds = audit_records(records, _samples(directory, records, findings), findings)
    _audit_start_model(directory, records, findings)
    _audit_weights(directory, findings)
    findings.keeps_updates = _keeps_updates(records)
    _audit_rounds(directory, _audit_updates(directory, rounds, findings), findings)
    return findings


def audit_records(
    records: Iterable[Mapping[str, Any]], samples: Mapping[int, int], findings: DilocoFindings
) -> Sequence[_RoundDigests]:
    """Audit the records of a journal; return the digests of each round.

    Args:
        records: all of them.
        samples: number of samples of each slice; empty if it is not known.
        findings: gets what is found.
    """
    journal = _Journal(findings, samples)
    for line, record in enumerate(records, 1):
        _audit_record(journal, line, record)
    _audit_uses(journal)
    return journal.rounds


def _samples(directory: Path, records: Sequence[Mapping[str, Any]], findings: DilocoFindings) -> dict[int, int]:
    """Return the number of samples of each slice; empty if the data nodes had no manifest."""
    began = _find_began(records)
    if began is None:
        findings.add(f"{directory / JOURNAL}: it does not say what the job works with; the job had not begun")
        return {}
    return {} if began.get("manifest") is None else read_samples(directory, began["manifest"], findings)


def _find_began(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the record of what the job works with; None if it had not begun."""
    return next((record for record in records if record.get("record") == "began"), None)


# -------------------------------------------------------------------------------------------------------------- records


def _audit_record(journal: _Journal, line: int, record: Mapping[str, Any]) -> None:
    place = f"{JOURNAL}: line {line}"
    try:
        match record.get("record"):
            case "term":
                _audit_term(journal, place, record)
            case "contributed":
                journal.contributed[int(record["round"]), str(record["worker"])] = record
            case "announced":
                journal.announced.update((int(record["round"]), str(peer)) for peer, _ in record["members"])
            case "round":
                _audit_round(journal, place, record)
            case "finished":
                journal.findings.is_finished = True
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        journal.findings.add(f"{place}: the record {record.get('record')!r} is malformed: {quote(error)}")


def _audit_term(journal: _Journal, place: str, record: Mapping[str, Any]) -> None:
    if record["term"] <= journal.term:
        journal.findings.add(f"{place}: term {record['term']} follows term {journal.term}")
    journal.term = int(record["term"])
    journal.findings.terms += 1


def _audit_round(journal: _Journal, place: str, record: Mapping[str, Any]) -> None:
    findings, number = journal.findings, int(record["round"])
    if number != findings.rounds + 1:
        findings.add(f"{place}: round {number} follows round {findings.rounds}")
    if record["term"] != journal.term:
        findings.add(f"{place}: round {number} is of term {record['term']}, in term {journal.term}")
    if journal.weights not in (None, record["weights_before"]):
        was = f"and round {number - 1} ended with {journal.weights}"
        findings.add(f"{place}: round {number} begins with weights {record['weights_before']}, {was}")
    peers = [str(member["peer"]) for member in record["members"]]
    for peer in sorted({peer for peer in peers if peers.count(peer) > 1}):
        findings.add(f"{place}: round {number} has two contributions of {peer}")
    for position, member in enumerate(record["members"]):
        _audit_member(journal, f"{place}: members[{position}]", record, member)
    findings.rounds, findings.weights, journal.weights = number, record["weights"], record["weights"]
    findings.unused += len(record["unused"])
    journal.rounds.append(_RoundDigests(number, record["update"], record["weights_before"], record["weights"]))


def _audit_member(journal: _Journal, place: str, record: Mapping[str, Any], member: Mapping[str, Any]) -> None:
    findings, number, peer = journal.findings, int(record["round"]), str(member["peer"])
    ranges = [_Range(*map(int, each)) for each in member["ranges"]]
    journal.uses += [_Use(each, number, peer) for each in ranges]
    for fault in _range_faults(ranges, journal.samples):
        findings.add(f"{place}: {fault}")
    findings.contributions += 1
    stated = member["contribution"]
    is_unknown = stated is None or (number == 1 and stated["weights"] != record["weights_before"])
    findings.unstated += is_unknown
    if stated is not None:
        for fault in _statement_faults(record, member, stated, ranges):
            findings.add(f"{place}: the contribution of {peer} to round {number} {fault}")
    for fault in _history_faults(journal, number, peer, member):
        findings.add(f"{place}: {peer} {fault}")


def _range_faults(ranges: Iterable[_Range], samples: Mapping[int, int]) -> Iterator[str]:
    """Yield which ranges the dataset does not have."""
    for each in ranges:
        if each.epoch < 0 or each.slice < 0 or not 0 <= each.first < each.end:
            yield f"{each} are no samples"
        elif samples and (each.slice not in samples or each.end > samples[each.slice]):
            size = samples.get(each.slice)
            has = f"{len(samples)} slices" if size is None else f"{size} samples in it"
            yield f"{each} are not in the dataset, which has {has}"


def _statement_faults(
    record: Mapping[str, Any], member: Mapping[str, Any], stated: Mapping[str, Any], ranges: Sequence[_Range]
) -> Iterator[str]:
    """Yield where the statement of an executor differs from what the record says of it."""
    listed = [_Range(each["epoch"], each["slice"], each["first"], each["end"]) for each in stated["ranges"]]
    pairs = [
        ("round", stated["round"], record["round"]),
        ("weights", stated["weights"], stated["weights"] if record["round"] == 1 else record["weights_before"]),
        ("update", stated["update"], member["update"]),
        ("samples", sum(each.end - each.first for each in listed), member["samples"]),
        ("batches", stated["batches"], member["batches"]),
    ]
    for name, found, expected in pairs:
        if found != expected:
            yield f"states {name} {found}, and its round has {expected}"
    if listed != list(ranges):
        yield "states other samples than its round has"


def _history_faults(journal: _Journal, number: int, peer: str, member: Mapping[str, Any]) -> Iterator[str]:
    """Yield how a member differs from what was recorded before its round was committed."""
    found = journal.contributed.get((number, peer))
    if found is None:
        yield f"is a member of round {number}, to which it has contributed nothing"
    else:
        for name in ("samples", "update", "ranges"):
            if found[name] != member[name]:
                yield f"contributed {name} {quote(found[name])} to round {number}, which has {quote(member[name])}"
    if (number, peer) not in journal.announced:
        yield f"is a member of round {number}, and was not announced to its parameter server"


# -------------------------------------------------------------------------------------------------------------- samples


def _audit_uses(journal: _Journal) -> None:
    """Find samples that are in two contributions; count those in one and in none."""
    findings, last = journal.findings, None
    used = 0
    for use in sorted(journal.uses):
        if last is not None and last.range[:2] == use.range[:2] and use.range.first < last.range.end:
            both = _Range(*use.range[:2], use.range.first, min(use.range.end, last.range.end))
            findings.add(
                f"{both} were used twice: by {last.peer} in round {last.round} and by {use.peer} in round {use.round}"
            )
        known = use.range.end != _ALL
        used += use.range.end - use.range.first if known else 0
        last = use if last is None or last.range[:2] != use.range[:2] or use.range.end > last.range.end else last
    findings.samples = used
    findings.epochs = len({use.range.epoch for use in journal.uses})
    if journal.samples:
        findings.open = findings.epochs * sum(journal.samples.values()) - used


# -------------------------------------------------------------------------------------------------------------- weights


def _audit_start_model(directory: Path, records: Sequence[Mapping[str, Any]], findings: DilocoFindings) -> None:
    """Compare the start model with the one that the job began with."""
    began, folder = _find_began(records), directory / START_MODEL
    if began is None:
        return
    if not folder.is_dir():
        findings.add(f"{folder}: the start model is missing")
    elif (digest := digest_directory(folder)) != began.get("model"):
        findings.add(f"{folder}: the digest of the start model is {digest}, and the journal has {began.get('model')}")


def _audit_weights(directory: Path, findings: DilocoFindings) -> None:
    """Compare the weights on disk with those that the last round was committed with."""
    if not findings.rounds:
        return
    path = directory / "outer-state" / f"round-{findings.rounds}" / "weights.safetensors"
    if not path.exists():
        findings.add(f"{path}: the weights after round {findings.rounds} are missing")
        return
    from hypha_proto.safetensors_io import TensorFile  # imported late: numpy takes 0.1 s
    from hypha_proto.weights_digest import digest_weights

    try:
        with TensorFile(path) as file:
            digest = digest_weights((name, file.stored(name)) for name in file.tensors)
    except TensorFileError as error:
        findings.add(f"{path}: it is malformed: {error}")
        return
    if digest != findings.weights:
        findings.add(f"{path}: the digest of the weights is {digest}, and the journal has {findings.weights}")


def _keeps_updates(records: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the job keeps its outer updates, by its table."""
    job = records[0].get("job")
    rounds = job.get("rounds") if isinstance(job, dict) else None
    return isinstance(rounds, dict) and rounds.get("keep_updates") is True


def _audit_updates(
    directory: Path, rounds: Sequence[_RoundDigests], findings: DilocoFindings
) -> list[tuple[_RoundDigests, Path]]:
    """Compare the outer updates that the job has kept with the record; return the first rounds that have theirs."""
    found: list[tuple[_RoundDigests, Path]] = []
    for each in rounds:
        path = _find_update(directory / "updates", each, is_last=each is rounds[-1])
        if not path.exists():
            if findings.keeps_updates:
                findings.add(f"{path}: the outer update of round {each.round} is missing, and the job keeps them")
        elif (digest := digest_file(path)) != each.update:
            findings.add(f"{path}: the digest is {digest}, and the journal has {each.update}")
        elif len(found) == each.round - 1:
            found.append((each, path))
    return found


def _find_update(folder: Path, recorded: _RoundDigests, *, is_last: bool) -> Path:
    """Return the file of a round's outer update, which need not exist; the scheduler renames it after the record."""
    kept = folder / f"round-{recorded.round}.safetensors"
    if kept.exists() or not is_last:
        return kept
    received = sorted(folder.glob(f"round-{recorded.round}-*.safetensors"))
    return next((path for path in received if digest_file(path) == recorded.update), kept)


def _audit_rounds(directory: Path, kept: Sequence[tuple[_RoundDigests, Path]], findings: DilocoFindings) -> None:
    """Compute the weights of the first rounds again; name the first round that does not fit."""
    if not kept or not (directory / START_MODEL).is_dir():
        return
    from hypha_scheduler.audit.weights import compute_weights  # imported late: numpy takes 0.1 s

    expected = [kept[0][0].before, *(each.weights for each, _ in kept)]
    try:
        for number, digest in enumerate(compute_weights(directory / START_MODEL, [path for _, path in kept])):
            if digest != expected[number]:
                what = f"round {number}" if number else "the start model"
                findings.add(
                    f"{directory}: {what} does not fit: its weights, computed again, have the digest {digest}, and the "
                    f"journal has {expected[number]}"
                )
                return
            findings.recomputed = number
    except TensorFileError as error:
        findings.add(f"{directory}: the weights cannot be computed again: {error}")
