"""Plan of a replay from the journal of a DiLoCo job; checks that the files are those that the journal names.

Reads files and writes none.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from msgspec.structs import astuple, replace
from pydantic import ValidationError

from hypha_proto.codec import from_json
from hypha_proto.contributions import OPTIMIZER_RESET, Contribution, SampleRange
from hypha_proto.datasets import MANIFEST, Manifest, SliceEntry
from hypha_proto.errors import DecodeError, TensorFileError
from hypha_proto.file_digests import digest_directory, digest_file
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import TrainConfig, UriReference
from hypha_proto.replay_plan import FORMAT, RecordedRound, RecordedUpdate, ReplayPlan, Run, SliceFile
from hypha_proto.texts import quote
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.journal import JOURNAL
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.records import (
    KINDS,
    BeganRecord,
    ContributedRecord,
    JoinedRecord,
    MemberRecord,
    RoundRecord,
    TermRecord,
)
from hypha_scheduler.strategies.diloco.restore import restore
from hypha_scheduler.strategies.diloco.result_model import START_MODEL, UPDATES
from hypha_scheduler.strategies.diloco.specs import PlacedJob, outer_optimizer
from hypha_scheduler.strategies.journal_records import parse_record
from hypha_scheduler.strategies.replayable import ReplayOptions

PREPROCESSOR: Final = "preprocessor"
"""Directory of a preprocessor that the scheduler serves, in a job's directory."""


def plan_replay(directory: Path, records: Sequence[Mapping[str, Any]], options: ReplayOptions) -> ReplayPlan:
    """Return the plan of a job; see `strategies.replayable.Replayable`."""
    journal = directory / JOURNAL
    job_id, job = _accepted(journal, records[0])
    restore(records)  # checks that each record follows those before it
    read = _read(journal, records)
    began = read.began
    if began is None or not read.rounds:
        raise JobFailedError(f"{journal}: no round is recorded, so there is nothing to compute again")
    _check_model(directory, began)
    manifest = _manifest(directory, began)
    rounds = tuple(_plan_round(found, read, manifest) for found in read.rounds)
    return ReplayPlan(
        format=FORMAT,
        job_id=job_id,
        model=str((directory / START_MODEL).resolve()),
        preprocessor=_preprocessor(directory, job, options.preprocessor),
        slices=_slices(manifest, rounds, options.data),
        runs=tuple(
            Run(train=_train(job_id, job, term, began.batch_size), outer=outer_optimizer(job)) for term in read.terms
        ),
        rounds=tuple(replace(each, kept=_kept(directory, each)) for each in rounds),
        threads=options.threads,
        tolerance=options.tolerance,
    )


# ---------------------------------------------------------------------------------------------------------- the journal


@dataclass(frozen=True, slots=True)
class _Term:
    """What decides the settings of the training workers in a term."""

    workers: tuple[PeerId, ...]
    scheduled_for: int
    """Number of workers that the learning-rate schedule is made for."""


@dataclass(frozen=True, slots=True)
class _FoundRound:
    """Record of a round, with its line, the position of its term, and the member numbers of workers by then."""

    line: int
    term: int
    record: RoundRecord
    numbers: Mapping[PeerId, int]


@dataclass(slots=True)
class _Read:
    """What the journal says."""

    journal: Path
    began: BeganRecord | None = None
    """What the job works with."""
    terms: list[_Term] = field(default_factory=list)
    numbers: dict[PeerId, int] = field(default_factory=dict)
    """Last member number of each worker."""
    stated: dict[tuple[PeerId, str], int] = field(default_factory=dict)
    """Member number that a worker had when it stated an update; a worker that is lost and comes again has another."""
    rounds: list[_FoundRound] = field(default_factory=list)
    unused: defaultdict[int, dict[PeerId, Contribution | None]] = field(default_factory=lambda: defaultdict(dict))
    """Updates that count in no round, by the round that they were computed in; None if they were not stated."""

    def recorded(
        self, found: _FoundRound, peer: PeerId, update: str | None, stated: Contribution | None, samples: int
    ) -> RecordedUpdate:
        """Return an update with the member number of the worker that has computed it; None if that is unknown."""
        known = None if update is None else self.stated.get((peer, update))
        member = found.numbers.get(peer) if known is None else known
        return RecordedUpdate(peer=peer, samples=samples, update=update, contribution=stated, member=member)


def _accepted(journal: Path, record: Mapping[str, Any]) -> tuple[uuid.UUID, DilocoJobConfig]:
    """Return the id and the table of the job."""
    try:
        return uuid.UUID(str(record.get("job_id"))), DilocoJobConfig.model_validate(record.get("job"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise JobFailedError(
            f"{journal}: this version does not know the job: {what}; use the version of hypha-scheduler that ran it"
        ) from None
    except ValueError:
        raise JobFailedError(f"{journal}: the first record names no job_id") from None


def _read(journal: Path, records: Sequence[Mapping[str, Any]]) -> _Read:
    read = _Read(journal)
    for line, record in enumerate(records, 1):
        kind = KINDS.get(str(record.get("record")))
        match None if kind is None else parse_record(record, kind):
            case BeganRecord() as began:
                read.began = began
                read.numbers |= {peer: number for number, peer in enumerate(began.workers)}
            case TermRecord() as term:
                _read_term(read, line, term)
            case JoinedRecord(worker=worker, member=member):
                read.numbers[worker] = member
            case ContributedRecord(worker=worker, update=str(update)) if worker in read.numbers:
                read.stated[worker, update] = read.numbers[worker]
            case RoundRecord() as found:
                _read_round(read, line, found)
    return read


def _read_term(read: _Read, line: int, record: TermRecord) -> None:
    began = () if read.began is None else read.began.workers
    workers = record.workers or (read.terms[-1].workers if read.terms else began)
    if not workers:
        raise JobFailedError(f"{read.journal}: line {line}: nothing says which workers the term has")
    scheduled_for = record.scheduled_for
    if scheduled_for is None:  # whoever trains on in the next term keeps to the schedule
        scheduled_for = read.terms[-1].scheduled_for if record.continues and read.terms else len(workers)
    read.numbers |= record.numbers
    read.terms.append(_Term(workers, scheduled_for))


def _read_round(read: _Read, line: int, record: RoundRecord) -> None:
    if not read.terms:
        raise JobFailedError(f"{read.journal}: line {line}: a round before the record of its term")
    read.rounds.append(_FoundRound(line, len(read.terms) - 1, record, dict(read.numbers)))
    for unused in record.unused:
        stated = unused.contribution
        found = read.unused[record.round if stated is None else stated.round]
        # of several, the first one; but a process that was started again decides the state that it goes on with
        if unused.peer not in found or (stated is not None and stated.optimizer == OPTIMIZER_RESET):
            found[unused.peer] = stated


def _plan_round(found: _FoundRound, read: _Read, manifest: Manifest) -> RecordedRound:
    record = found.record
    if not record.members:
        raise JobFailedError(f"{read.journal}: line {found.line}: round {record.round} has no member")
    for member in record.members:
        place = f"{read.journal}: line {found.line}: round {record.round}: {member.peer}"
        ranges = () if member.contribution is None else member.contribution.ranges
        faults = (_find_fault(member, record.round), *(_range_fault(part, manifest) for part in ranges))
        if fault := next(filter(None, faults), None):
            raise JobFailedError(f"{place}: {fault}")
    members = {member.peer for member in record.members}
    unused = {peer: stated for peer, stated in read.unused[record.round].items() if peer not in members}
    return RecordedRound(
        round=record.round,
        run=found.term,
        members=tuple(
            read.recorded(found, each.peer, each.update, each.contribution, each.samples) for each in record.members
        ),
        unused=tuple(
            read.recorded(found, peer, None if stated is None else stated.update, stated, 0)
            for peer, stated in unused.items()
        ),
        update=record.update,
        weights_before=record.weights_before,
        weights=record.weights,
    )


def _find_fault(member: MemberRecord, number: int) -> str | None:
    """Return how the record of a member contradicts what its executor stated; None if it does not."""
    stated = member.contribution
    if stated is None:
        return None
    if stated.round != number:
        return f"its executor stated round {stated.round}"
    if stated.update != member.update:
        return f"the update is {member.update}, and its executor stated {stated.update}"
    ranges = tuple((part.epoch, part.slice, part.first, part.end) for part in stated.ranges)
    if ranges != (recorded := tuple(map(astuple, member.ranges))):
        return f"the ranges are {quote(recorded)}, and its executor stated {quote(ranges)}"
    samples = sum(part.end - part.first for part in stated.ranges)
    if samples != member.samples:
        return f"its weight is {member.samples} samples, and its ranges hold {samples}"
    batches = -(-samples // max(1, stated.batch_size))
    if not stated.batch_size or batches != stated.batches:
        return (
            f"{samples} samples are {batches} batches of {stated.batch_size}, and its executor stated {stated.batches}"
        )
    return None


def _range_fault(part: SampleRange, manifest: Manifest) -> str | None:
    if part.slice >= len(manifest.slices):
        return f"it names slice {part.slice}, and the dataset has {len(manifest.slices)}"
    samples = manifest.slices[part.slice].samples
    if part.end > samples:
        return f"it names the positions {part.first} to {part.end} of slice {part.slice}, which has {samples} samples"
    return None


# ------------------------------------------------------------------------------------------------------------ the files


def _train(job_id: uuid.UUID, job: DilocoJobConfig, term: _Term, batch_size: int) -> TrainConfig:
    """Return the configuration with which the workers of a term trained; its references lead nowhere."""
    model, peer = UriReference(value=f"file:{START_MODEL}"), term.workers[0]
    placed = PlacedJob(job_id, job, peer, peer, term.workers, model, batch=batch_size, scheduled_for=term.scheduled_for)
    return placed.train_config()


def _check_digest(path: Path, what: str, digest: str, recorded: str, source: str = "the journal") -> None:
    if digest != recorded:
        raise JobFailedError(f"{path}: {what} has changed: its digest is {digest}, and {source} has {recorded}")


def _check_model(directory: Path, began: BeganRecord) -> None:
    folder = directory / START_MODEL
    if not folder.is_dir():
        raise JobFailedError(f"{folder}: the start model is missing; put it back as it was")
    _check_digest(folder, "the start model", digest_directory(folder), began.model)


def _manifest(directory: Path, began: BeganRecord) -> Manifest:
    path = directory / MANIFEST
    if began.manifest is None:
        raise JobFailedError(
            f"{directory / JOURNAL}: the data nodes of dataset {began.dataset!r} have no manifest, so nobody can say "
            "whether its slices are those of the job"
        )
    if not path.is_file():
        raise JobFailedError(f"{path}: the dataset's manifest is missing; put it back as it was")
    _check_digest(path, "the dataset's manifest", digest_file(path), began.manifest)
    try:
        manifest: Manifest = from_json(Manifest, path.read_bytes())
    except DecodeError as error:
        raise JobFailedError(f"{path}: it is malformed: {error}") from None
    return manifest


def _slices(manifest: Manifest, rounds: Iterable[RecordedRound], data: Path | None) -> tuple[SliceFile, ...]:
    """Return the files of the slices that the rounds name, after comparing their digests."""
    wanted = sorted({part.slice for part in _ranges(rounds) if _range_fault(part, manifest) is None})
    if data is None:
        raise JobFailedError(f"name the folder of the slices of dataset {manifest.dataset!r} with --data FOLDER")
    if not data.is_dir():
        raise JobFailedError(f"--data {data}: there is no such folder")
    return tuple(_slice(data, index, manifest.slices[index], manifest.dataset) for index in wanted)


def _slice(data: Path, index: int, entry: SliceEntry, dataset: str) -> SliceFile:
    path = data / entry.file
    if not path.is_file():
        raise JobFailedError(f"--data {data}: slice {index} of dataset {dataset!r} is missing: {entry.file}")
    _check_digest(path, f"slice {index} of dataset {dataset!r}", digest_file(path), entry.digest, "the job's manifest")
    return SliceFile(index=index, path=str(path.resolve()))


def _ranges(rounds: Iterable[RecordedRound]) -> Iterator[SampleRange]:
    for found in rounds:
        for update in (*found.members, *found.unused):
            if update.contribution is not None:
                yield from update.contribution.ranges


def _kept(directory: Path, recorded: RecordedRound) -> str | None:
    """Return the file of a round's outer update if the job has kept it."""
    from hypha_proto.update_file import open_update

    path = directory / UPDATES / f"round-{recorded.round}.safetensors"
    if not path.is_file():
        return None
    if (digest := digest_file(path)) != recorded.update:
        raise JobFailedError(
            f"{path}: the outer update of round {recorded.round} has the digest {digest}, and the journal has "
            f"{recorded.update}"
        )
    try:
        open_update(path)[0].close()
    except TensorFileError as error:
        raise JobFailedError(f"{path.parent}: {error}") from None
    return str(path.resolve())


def _preprocessor(directory: Path, job: DilocoJobConfig, named: Path | None) -> str | None:
    """Return the directory of the job's preprocessor; None if it has none."""
    if job.preprocessor is None:
        return None
    folder = named or directory / PREPROCESSOR
    if not folder.is_dir():
        raise JobFailedError(
            f"{folder}: the preprocessor is not there; if executors fetched it from a hub, name a folder of its files "
            "with --preprocessor FOLDER"
        )
    return str(folder.resolve())
