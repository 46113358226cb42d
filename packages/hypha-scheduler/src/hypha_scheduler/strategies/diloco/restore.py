"""State that the journal of a DiLoCo job restores (`records`). Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import singledispatchmethod
from typing import Any

import msgspec

from hypha_proto.ids import PeerId
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.strategies.diloco.loss_trend import LossTrend
from hypha_scheduler.strategies.diloco.records import (
    KINDS,
    AnnouncedRecord,
    AssignedRecord,
    BeganRecord,
    ContributedRecord,
    JoinedRecord,
    LeftRecord,
    RefusedRecord,
    RoundRecord,
    TermRecord,
    UnusedRecord,
)
from hypha_scheduler.strategies.diloco.sample_ledger import SampleLedger, SampleSpan, subtract_spans
from hypha_scheduler.strategies.journal_records import parse_record


@dataclass(frozen=True, slots=True)
class CommittedRound:
    """Digests in the record of a round."""

    update: str
    """Of the outer update."""
    weights: str
    """Of the global weights after it."""


@dataclass(slots=True)
class RestoredTraining:
    """State of a job after the records of an interrupted run."""

    began: BeganRecord | None = None
    """What it works with, by the first record; None if there is none."""
    workers: tuple[PeerId, ...] = ()
    """Workers of the last run that have not left it, in the order in which they came."""
    members: dict[PeerId, int] = field(default_factory=dict)
    """Last member number of each worker that the job has ever had."""
    next_member: int = 0
    """Lowest member number that was never given to a worker."""
    starting: set[PeerId] = field(default_factory=set)
    """Workers of which nothing shows that their executors have begun to train."""
    term: int = 0
    """Last term; 0 before the first."""
    server: PeerId | None = None
    """Parameter server of that term."""
    continues: bool = False
    """Whether it has taken the place of another one, of which some worker may not know."""
    closed: int = 0
    """Last committed round."""
    commits: dict[int, CommittedRound] = field(default_factory=dict)
    """Committed rounds by their numbers."""
    samples: Counter[PeerId] = field(default_factory=Counter)
    """Samples of each worker in committed rounds."""
    batches: Counter[PeerId] = field(default_factory=Counter)
    losses: LossTrend = field(default_factory=LossTrend)
    loss: float | None = None
    """Loss of the last committed round."""
    used: list[SampleSpan] = field(default_factory=list)
    """Samples of the members of committed rounds."""
    assigned: dict[PeerId, tuple[SampleSpan, ...]] = field(default_factory=dict)
    """What each worker has and no committed round has used; what it has contributed to the open round is among it."""
    contributed: dict[PeerId, ContributedRecord] = field(default_factory=dict)
    """Contributions to the open round, but for those whose samples were assigned again."""
    refusals: Counter[PeerId] = field(default_factory=Counter)
    """Number of refused updates of each worker, in the last term."""
    refused: dict[PeerId, UnusedRecord | None] = field(default_factory=dict)
    """Workers without which the open round goes on, and their updates that were refused; None if not recorded."""
    announced: AnnouncedRecord | None = None
    """Members of the open round, as they were announced last; None if they were not."""
    announcements: list[AnnouncedRecord] = field(default_factory=list)
    """All announcements of the open round: the parameter server may have followed any."""
    present: set[PeerId] = field(default_factory=set)
    """Workers that have taken part in the last committed round, or begin with the open one."""
    stating: set[PeerId] = field(default_factory=set)
    """Workers of the last term whose executors have stated contributions."""

    @property
    def weights(self) -> str | None:
        """Digest of the weights after the last committed round; None before the first."""
        return self.commits[self.closed].weights if self.closed else None

    def restore_ledger(self, ledger: SampleLedger, workers: Iterable[PeerId] = ()) -> None:
        """Bring a new ledger to this state.

        Args:
            ledger: the ledger.
            workers: those that train on. What others have is AVAILABLE, also what they have contributed to the open
                round.

        Raises:
            JobFailedError: the dataset does not have the samples that the journal names.
        """
        ledger.restore(self.used)
        try:
            for peer in workers:
                for span in self.assigned.get(peer, ()):
                    ledger.assigned(peer, span)
                if (found := self.contributed.get(peer)) is not None:
                    ledger.contribute(peer, found.round, found.ranges)
        except ValueError as error:
            raise JobFailedError(f"journal: it does not fit the dataset: {error}") from None


def restore(journal: Iterable[Mapping[str, Any]]) -> RestoredTraining:
    """Return the state after the records of a journal.

    Args:
        journal: all of its records, with those of the runner, which are skipped.

    Raises:
        JobFailedError: a record is malformed or does not follow those before it; its line and field are named.
    """
    replay = _Replay()
    for number, record in enumerate(journal, 1):
        kind = record.get("record")
        parsed = KINDS.get(str(kind))
        if parsed is None:
            continue
        try:
            replay.add(parse_record(record, parsed))
        except ValueError as error:
            raise JobFailedError(f"journal: line {number}: the record {kind!r} is malformed: {error}") from None
    return replay.finish()


class _Replay:
    """Applies records in their order."""

    def __init__(self) -> None:
        self.state = RestoredTraining()
        self.open: defaultdict[tuple[int, int], list[tuple[int, PeerId, SampleSpan]]] = defaultdict(list)
        """What workers have of each slice, numbered in the order of assignment."""
        self.assignments = 0
        self.handled: set[tuple[PeerId, tuple[SampleSpan, ...]]] = set()
        """Contributions to the open round of which it is known that they went back."""
        self.assigned_again: defaultdict[tuple[int, int], list[SampleSpan]] = defaultdict(list)
        """Samples that somebody had before, by slice; in the open round."""

    @singledispatchmethod
    def add(self, record: msgspec.Struct) -> None:
        """Apply a record.

        Raises:
            ValueError: it does not follow those before it.
        """
        raise TypeError(f"{record} is no record of a DiLoCo job")

    @add.register
    def _begin(self, record: BeganRecord) -> None:
        state = self.state
        if state.began is not None and (other := state.began.differences(record)):
            raise ValueError(f"it is of another job than the first one: {'; '.join(other)}")
        state.began = state.began or record
        state.workers = record.workers
        self._number(dict(zip(record.workers, range(len(record.workers)), strict=True)))

    @add.register
    def _appoint(self, record: TermRecord) -> None:
        state = self.state
        if record.term <= state.term:
            raise ValueError(f"term is {record.term}, after {state.term}")
        state.term, state.server, state.continues = record.term, record.server, record.continues
        state.workers = state.workers if record.workers is None else record.workers
        self._number(record.numbers)
        state.announced = None
        state.announcements.clear()
        if record.continues:
            return
        state.starting = set(state.workers)
        state.stating.clear()
        state.refusals.clear()
        self.open.clear()
        self._open_round()

    def _number(self, members: Mapping[PeerId, int]) -> None:
        self.state.members |= members
        self.state.next_member = max(self.state.next_member, *(number + 1 for number in members.values()), 0)

    @add.register
    def _join(self, record: JoinedRecord) -> None:
        """Take from a worker what it was assigned; one that begins with the open round gives up its update, too."""
        state, worker = self.state, record.worker
        self._number({worker: record.member})
        if worker not in state.workers:
            state.workers = (*state.workers, worker)
        if record.round is None:
            state.starting.add(worker)
        else:
            state.starting.discard(worker)
            state.present.add(worker)
        self._return_assigned(worker)
        if record.round is not None and worker in state.contributed:
            self._withdraw(worker)

    @add.register
    def _leave(self, record: LeftRecord) -> None:
        """Take from a worker what it has; its update may still count if the members of the round were announced."""
        state, worker = self.state, record.worker
        state.workers = tuple(peer for peer in state.workers if peer != worker)
        state.starting.discard(worker)
        state.stating.discard(worker)
        self._return_assigned(worker)
        if worker in state.contributed and state.announced is None:
            self._withdraw(worker)

    def _return_assigned(self, worker: PeerId) -> None:
        """Take from a worker what it was assigned and has not contributed."""
        contributed = self.state.contributed.get(worker)
        kept = () if contributed is None else contributed.ranges
        for slice_, found in self.open.items():
            left = []
            for number, peer, held in found:
                parts = subtract_spans(held, subtract_spans(held, kept)) if peer == worker else [held]
                left += [(number, peer, part) for part in parts]
            self.open[slice_] = left

    def _open_round(self) -> None:
        self.state.contributed.clear()
        self.state.refused.clear()
        self.state.announced = None
        self.state.announcements.clear()
        self.handled.clear()
        self.assigned_again.clear()

    @add.register
    def _assign(self, record: AssignedRecord) -> None:
        """Take samples from whoever had them: they had come back before they were assigned again."""
        span = record.span
        self.state.starting.discard(record.worker)
        for peer in [peer for peer, each in self.state.contributed.items() if _overlap(each.ranges, span)]:
            self._withdraw(peer)
        self.assigned_again[span.slice] += self._take_from_others(None, span)
        self._add_open(record.worker, span)

    def _withdraw(self, peer: PeerId) -> None:
        spans = self.state.contributed.pop(peer).ranges
        self.handled.add((peer, spans))
        self._take(peer, spans)

    def _take_from_others(self, worker: PeerId | None, span: SampleSpan) -> list[SampleSpan]:
        """Let nobody but `worker` have these samples; return what was taken."""
        left, taken = [], []
        for number, peer, held in self.open[span.slice]:
            parts = [held] if peer == worker else subtract_spans(held, [span])
            left += [(number, peer, part) for part in parts]
            taken += subtract_spans(held, parts)
        self.open[span.slice] = left
        return taken

    def _add_open(self, worker: PeerId, span: SampleSpan) -> None:
        self.assignments += 1
        self.open[span.slice].append((self.assignments, worker, span))

    @add.register
    def _contribute(self, record: ContributedRecord) -> None:
        state = self.state
        if record.round != state.closed + 1:
            raise ValueError(f"round is {record.round}, and the open one is {state.closed + 1}")
        state.contributed[record.worker] = record
        state.starting.discard(record.worker)
        if record.contribution is not None:
            state.stating.add(record.worker)
        for span in record.ranges:  # the record of an assignment waits for the next sync, and can be lost
            self._take_from_others(record.worker, span)
            has = [held for _, peer, held in self.open[span.slice] if peer == record.worker]
            for missing in subtract_spans(span, has):
                self._add_open(record.worker, missing)

    @add.register
    def _refuse(self, record: RefusedRecord) -> None:
        state, worker = self.state, record.worker
        state.refusals[worker] += 1
        if not record.dropped or record.round != state.closed + 1:
            return
        if (held := state.contributed.get(worker)) is None:
            state.refused.setdefault(worker, None)
            return
        unused = UnusedRecord(peer=worker, why=record.reason, ranges=held.ranges, contribution=held.contribution)
        state.refused.setdefault(worker, unused)
        self._withdraw(worker)

    @add.register
    def _announce(self, record: AnnouncedRecord) -> None:
        state = self.state
        if record.round != state.closed + 1:
            raise ValueError(f"round is {record.round}, and the open one is {state.closed + 1}")
        self._check_term(record.term)
        state.announced = record
        state.announcements.append(record)

    def _check_term(self, term: int) -> None:
        if term != self.state.term:
            raise ValueError(f"term is {term}, and the last one is {self.state.term}")

    @add.register
    def _commit(self, record: RoundRecord) -> None:
        state = self.state
        if record.round != state.closed + 1:
            raise ValueError(f"round is {record.round}, and the one before is {state.closed}")
        self._check_term(record.term)
        for member in record.members:
            state.samples[member.peer] += member.samples
            state.batches[member.peer] += member.batches
            state.used += member.ranges
            if member.contribution is not None:
                state.stating.add(member.peer)
            self._take(member.peer, member.ranges)
            for span in member.ranges:
                self._take_from_others(None, span)
            state.contributed.pop(member.peer, None)
        state.present = {member.peer for member in record.members}
        for peer in list(state.contributed):
            self._withdraw(peer)
        for unused in record.unused:
            self._return(unused)
        state.closed = record.round
        state.commits[record.round] = CommittedRound(record.update, record.weights)
        state.loss = record.loss
        state.losses.add(record.round, record.loss)
        self._open_round()

    def _return(self, unused: UnusedRecord) -> None:
        """Take from a worker the samples of an update that did not count, but for those that it was assigned again."""
        if (unused.peer, unused.ranges) in self.handled:
            return
        for span in unused.ranges:
            self._take(unused.peer, subtract_spans(span, self.assigned_again[span.slice]))

    def _take(self, worker: PeerId, spans: Iterable[SampleSpan]) -> None:
        """Keep of each range that overlaps these samples the part after them, as `SampleLedger.contribute` does."""
        for span in spans:
            left = []
            for number, peer, held in self.open[span.slice]:
                rest = held
                if peer == worker and span.first < held.end and held.first < span.end:
                    rest = SampleSpan(*held.slice, min(span.end, held.end), held.end)
                left += [(number, peer, rest)] if rest.samples else []
            self.open[span.slice] = left

    def finish(self) -> RestoredTraining:
        """Return the state after all records."""
        assigned = defaultdict[PeerId, list[SampleSpan]](list)
        for _, peer, span in sorted(entry for found in self.open.values() for entry in found):
            assigned[peer].append(span)
        self.state.assigned = {peer: tuple(spans) for peer, spans in assigned.items()}
        return self.state


def _overlap(spans: Iterable[SampleSpan], other: SampleSpan) -> bool:
    return any(s.slice == other.slice and s.first < other.end and other.first < s.end for s in spans)
