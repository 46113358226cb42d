"""Training state of a DiLoCo job: rounds, slices and totals, and the response to each report of an executor. Pure.

Combines `sample_ledger`, `rounds` and `contributions`. `operator` asks it for a response and effects for each report,
and for samples for each request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.batch_reports import BatchesCounted, ReportBatches
from hypha_proto.contributions import ContributionKnown, StateContribution
from hypha_proto.datasets import UnusableSlice
from hypha_proto.ids import PeerId
from hypha_proto.job_membership import RoundToJoin
from hypha_proto.texts import shorten
from hypha_proto.training_reports import (
    MICRO_BATCH,
    ROUND_SECONDS,
    Acknowledged,
    BatchDone,
    Done,
    OuterStepTaken,
    ReportAnswer,
    ReportError,
    RoundMetrics,
    ScheduleUpdate,
    SendingUpdate,
    TrainedBatch,
    TrainingReport,
)
from hypha_scheduler.strategies.base import SliceRefusedError
from hypha_scheduler.strategies.diloco import round_effects
from hypha_scheduler.strategies.diloco.batch_allocation import MeasuredBatch
from hypha_scheduler.strategies.diloco.contributions import Contributions, find_fault, spans_of
from hypha_scheduler.strategies.diloco.events import WEIGHTS_FETCHED
from hypha_scheduler.strategies.diloco.records import ContributedRecord, RefusedRecord, UnusedRecord
from hypha_scheduler.strategies.diloco.round_effects import Left, Measured
from hypha_scheduler.strategies.diloco.rounds import Rounds
from hypha_scheduler.strategies.diloco.sample_ledger import SampleLedger, SampleSpan

_METRICS: Final = 64
"""Maximum number of metrics taken from one report."""
_MAX_COUNT: Final = (1 << 32) - 1
_OTHER_REPORTS: Final = frozenset({"evaluation_loss", WEIGHTS_FETCHED, MICRO_BATCH})
"""Metrics that are reported before or after those of the round's training."""
_TRAINED: Final = frozenset({"loss", "samples"})
"""Metrics of the round's training; without labels there is no loss."""

Effect = round_effects.Effect | ContributedRecord | RefusedRecord
"""A `ContributedRecord` is to be written before anybody hears of the update."""


class NotJoinedError(SliceRefusedError):
    """A worker asks for samples before it has joined a round."""


@dataclass(slots=True)
class TrainingState:
    """What workers have trained and are to train, from the start of the first round."""

    rounds: Rounds
    slices: SampleLedger
    server: PeerId
    contributions: Contributions = field(default_factory=Contributions)
    samples: Counter[PeerId] = field(default_factory=Counter)
    """Samples of each worker in committed rounds."""
    batches: Counter[PeerId] = field(default_factory=Counter)
    """Batches of each worker in committed rounds."""
    seconds: dict[PeerId, Counter[str]] = field(default_factory=dict)
    """Where the time of each worker has gone that states it, by `training_reports.ROUND_SECONDS`."""
    micro_batches: dict[PeerId, int] = field(default_factory=dict)
    """Largest number of samples that each worker computes at once, as far as they state it."""
    loss: float | None = None
    """Loss of the last closed round."""
    told_done: set[PeerId] = field(default_factory=set)
    """Peers to which `Done` was sent."""
    set_aside: dict[int, UnusableSlice] = field(default_factory=dict)
    """Slices that were set aside, by index, with the first report of each."""
    lost: dict[PeerId, str] = field(default_factory=dict)
    """Why each lost worker was lost."""
    left: set[PeerId] = field(default_factory=set)
    """Draining workers that have left after a round."""
    honours_ranges: set[PeerId] = field(default_factory=set)
    """Workers whose executors have stated the samples of an update, and so use those only that they are given."""
    taken_up: set[PeerId] = field(default_factory=set)
    """Workers of an earlier run of the scheduler that have stated no update in this one.

    Records of what was assigned to them last may be lost with the machine: then they begin anew."""
    committed: int = 0
    """Last round whose record was written."""
    _late: dict[PeerId, tuple[int, str]] = field(default_factory=dict)
    """Round and digest of the last update of each worker that may be sent, although it came late."""
    _releasing: dict[PeerId, int] = field(default_factory=dict)
    """Lost workers with the announced round in which their updates may still count: what they hold is not free yet."""

    def slice_for(self, peer: PeerId, now: float, *, ahead: bool = False) -> SampleSpan | None:
        """Assign the next samples to a worker; None if the peer is not (or no longer) a member.

        Args:
            peer: the worker.
            now: time of the request.
            ahead: whether its executor is not ready, and asks with which round it begins before it uses them.

        Raises:
            NotJoinedError: the worker has not joined a round, and does not ask ahead.
            LedgerFullError: the worker holds too many unused slices.
            NoUsableSliceError: every slice was set aside.
        """
        if peer not in self.rounds.members:
            return None
        if not ahead:
            if self.rounds.is_preparing(peer) and not self.rounds.join_at_once(peer, now):
                raise NotJoinedError("this worker has to ask first with which round it begins")
            self.rounds.training_began(peer, now)
        return self.slices.assign(peer, whole=peer not in self.honours_ranges)

    def slice_unusable(self, peer: PeerId, report: UnusableSlice) -> bool:
        """Set a slice aside that a worker cannot get from any provider; return False if it was not assigned to it."""
        if not self.slices.set_aside(peer, report.index, report.epoch):
            return False
        self.set_aside.setdefault(report.index, report)
        return True

    def report(self, peer: PeerId, progress: TrainingReport, now: float) -> tuple[ReportAnswer, tuple[Effect, ...]]:
        """Process the report of an executor; return the response, and the effects to apply."""
        if peer == self.server:
            answer, effects = self._server_report(progress, now)
        elif isinstance(progress, SendingUpdate):
            answer, effects = self._update_sending(peer, now), ()
        else:
            answer, effects = self._worker_report(peer, progress, now)
        if isinstance(answer, Done):
            self.told_done.add(peer)
        if isinstance(answer, ReportError) and answer.reason is None:
            answer = ReportError(reason=self._refusal_reason(peer, progress))
        return answer, effects

    def _refusal_reason(self, peer: PeerId, progress: TrainingReport) -> str:
        """Return why a report does not match the state of the job."""
        name = type(progress).__name__
        if peer == self.server:
            early = "no round was announced to it yet"
            return early if isinstance(progress, OuterStepTaken) else f"a parameter server does not report {name}"
        if isinstance(progress, OuterStepTaken):
            return "only the parameter server takes outer steps"
        if peer in self.lost:
            return f"the job continues without this worker: {self.lost[peer]}"
        if peer in self.left:
            return "the job continues without this worker, which has left because it drains"
        if peer not in self.rounds.members:
            return "this worker is not a member of the job"
        return f"{name} came before the parameter server was told to take the outer step"

    def _server_report(self, progress: TrainingReport, now: float) -> tuple[ReportAnswer, tuple[Effect, ...]]:
        if isinstance(progress, OuterStepTaken):
            return self.rounds.outer_step_taken(now)
        return (Acknowledged() if isinstance(progress, RoundMetrics) else ReportError()), ()

    def _worker_report(
        self, peer: PeerId, progress: TrainingReport, now: float
    ) -> tuple[ReportAnswer, tuple[Effect, ...]]:
        if isinstance(progress, BatchDone):
            self.slices.report(peer, _slice_counts(progress.slices))
            return self.rounds.batches_done(peer, (_measured(progress),), now), self.rounds.take_effects(now)
        if isinstance(progress, RoundMetrics):
            return Acknowledged(), self._measured(peer, progress, now)
        if isinstance(progress, OuterStepTaken):
            return ReportError(), ()
        return self._update_merged(peer, now)

    def report_batches(
        self, peer: PeerId, message: ReportBatches, now: float
    ) -> tuple[BatchesCounted, tuple[Effect, ...]]:
        """Process the report of several batches, some of which may have been reported before."""
        count = len(message.batches)
        fresh = message.batches[self.rounds.count_reported(peer, message.round, message.first, count) :]
        for batch in fresh:
            self.slices.report(peer, _slice_counts(batch.slices))
        if fresh:
            left = None if message.last is None else max(0, message.last - message.first - count)
            answer = self.rounds.batches_done(peer, [_measured(batch) for batch in fresh], now, left)
        else:
            answer = self.rounds.batches_known(peer, now)
        effects = self.rounds.take_effects(now)
        if isinstance(answer, ReportError):
            return BatchesCounted(counted=message.first, reason=self._refusal_reason(peer, SendingUpdate())), effects
        counted = min(message.first + count, _MAX_COUNT)
        if isinstance(answer, Done):
            self.told_done.add(peer)
            return BatchesCounted(counted=counted, done=True), effects
        last = self._last_batch(peer, message.round, counted, answer)
        if message.settles and last is not None and last == message.last:
            self.rounds.settle_end(peer, message.round)
        if last == counted and self.rounds.round_of(peer) == message.round:
            self.rounds.update_sending(peer, now)
        return BatchesCounted(counted=counted, last=last), effects

    def _last_batch(self, peer: PeerId, number: int, trained: int, answer: ReportAnswer) -> int | None:
        """Return after how many batches of a round a worker sends its update; it has `trained` so many."""
        is_over = self.rounds.round_of(peer) != number and not self.rounds.is_preparing(peer)
        if is_over or answer == ScheduleUpdate(counter=0):  # the round goes on without it, or has no batches left
            return trained
        last = self.rounds.last_batch(peer, number)
        return None if last is None else min(last, _MAX_COUNT)

    def _update_sending(self, peer: PeerId, now: float) -> ReportAnswer:
        number = self.rounds.round_of(peer)
        if number is None or self.rounds.is_excused(peer):
            return Acknowledged() if number is None else Done()
        self.rounds.update_sending(peer, now)
        return Acknowledged()

    # ---------------------------------------------------------------------------------------------------- contributions

    def state_contribution(
        self, peer: PeerId, message: StateContribution, weights: str | None, now: float
    ) -> tuple[ContributionKnown, tuple[Effect, ...]]:
        """Process the statement of an update; `weights` is the digest with which its round began, if it is known."""
        number = self.rounds.round_of(peer)
        if number is None:
            return ContributionKnown(accepted=False, reason=self._refusal_reason(peer, SendingUpdate())), ()
        known = self.contributions.get(peer, message.round)
        is_repeated = known is not None and known.update == message.update
        if is_repeated or self._late.get(peer) == (message.round, message.update):
            return ContributionKnown(accepted=True), ()
        if self.rounds.is_preparing(peer) or (
            self.rounds.joins(peer)
            and self.rounds.goes_on_without(peer, message.round)
            and not self.contributions.is_over(peer, message.round)
        ):
            return self._send_back(peer, message), self.rounds.take_effects(now)
        is_over = self.contributions.is_over(peer, message.round)
        why = f"an update of this worker in round {message.round} was refused before" if is_over else None
        if why is not None and (message.round != number or known is not None or self.rounds.is_dropped(peer, number)):
            return ContributionKnown(accepted=False, reason=why), ()
        fault = why or find_fault(message, number, weights)
        if fault is None and (fault := self._sample_fault(peer, message, known)) and peer in self.taken_up:
            self.taken_up.discard(peer)
            return self._send_back(peer, message), self.rounds.take_effects(now)
        if fault is not None:
            return ContributionKnown(accepted=False, reason=fault), self._refuse(peer, message, fault, now)
        self.taken_up.discard(peer)
        if message.contribution is not None:
            self.honours_ranges.add(peer)
        return ContributionKnown(accepted=True), self._contribute(peer, number, message, now)

    def _send_back(self, peer: PeerId, message: StateContribution) -> ContributionKnown:
        """Give back the samples of an update that comes too late, whose worker has to join again."""
        if not self.rounds.is_preparing(peer) and self._sample_fault(peer, message, None) is None:
            self.contributions.add(self._update_of(peer, message.round, message))
            self._withdraw(peer, message.round, "it came late")
        why = f"round {message.round} goes on without this update"
        return ContributionKnown(accepted=False, reason=why, rejoin=self.rounds.joins(peer))

    def _sample_fault(self, peer: PeerId, message: StateContribution, known: ContributedRecord | None) -> str | None:
        if known is not None and known.update is not None:
            return f"this worker has stated an update of round {message.round} with digest {known.update}"
        spans = spans_of(message.contribution)
        return None if spans is None or known is not None else self.slices.check(peer, spans)

    def _contribute(self, peer: PeerId, number: int, message: StateContribution, now: float) -> tuple[Effect, ...]:
        """Take the update of a worker into its round, unless the round goes on without it."""
        update = self._update_of(peer, number, message)
        self.contributions.add(update)
        stated = None if update.contribution is None else (update.samples, update.batches)
        effects = self.rounds.update_started(peer, now, stated)
        if self.rounds.is_dropped(peer, number):
            self._withdraw(peer, number, "it came late")
            if update.update is not None:
                self._late[peer] = (number, update.update)
            return effects
        return (update, *effects)

    def _update_of(self, peer: PeerId, number: int, message: StateContribution) -> ContributedRecord:
        stated, digest = message.contribution, message.update
        samples, batches = self.rounds.progress_of(peer, number)
        spans = self.slices.contribute(peer, number, spans_of(stated))
        if stated is not None:
            samples, batches = sum(span.samples for span in spans), stated.batches
        return ContributedRecord(
            worker=peer,
            round=number,
            samples=samples,
            batches=batches,
            update=digest,
            ranges=spans,
            contribution=stated,
        )

    def _refuse(self, peer: PeerId, message: StateContribution, why: str, now: float) -> tuple[Effect, ...]:
        """Count a refused statement; if it is of the worker's round, that goes on without the worker."""
        number = message.round
        self.contributions.refuse(peer, number)
        if number != self.rounds.round_of(peer) or self.contributions.get(peer, number) is not None:
            return (self._refused(peer, number, why),)
        spans = spans_of(message.contribution)
        if spans is not None and self.slices.check(peer, spans) is not None:
            spans = None
        taken = self.slices.contribute(peer, number, spans)
        self.slices.withdraw(peer, number)
        unused = UnusedRecord(peer=peer, why=why, ranges=taken, contribution=message.contribution)
        self.contributions.unused.append(unused)
        effects = self.rounds.update_refused(number, peer, why, now)
        return (self._refused(peer, number, why), *effects)

    def _refused(self, peer: PeerId, number: int, why: str) -> RefusedRecord:
        return RefusedRecord(worker=peer, round=number, reason=why, dropped=self.rounds.is_dropped(peer, number))

    def _withdraw(self, peer: PeerId, number: int, why: str) -> None:
        self.slices.withdraw(peer, number)
        self.contributions.discard(peer, number, why)

    def members_agreed(self, number: int, members: Iterable[PeerId]) -> None:
        """Process that the parameter server has agreed to a round's members: what lost others hold is free."""
        kept = set(members)
        for peer in [p for p, announced in self._releasing.items() if announced == number and p not in kept]:
            self._release(peer, number)

    def commit(self, number: int, members: Sequence[PeerId]) -> tuple[list[ContributedRecord], list[UnusedRecord]]:
        """Commit a round; return the updates of its members in their order, and those that count in none."""
        self.committed = number
        self.slices.commit(number, members)
        updates = self.contributions.close(number, members, "it is not part of the outer update")
        for update in updates:
            self.samples[update.worker] += update.samples
            self.batches[update.worker] += update.batches
        for peer in [peer for peer, announced in self._releasing.items() if announced <= number]:
            self._release(peer, number)
        unused, self.contributions.unused = self.contributions.unused, []
        return updates, unused

    def _free(self, peer: PeerId, number: int) -> None:
        """Let others use the samples of a worker that is gone: those of its updates once it is known which count."""
        self.slices.give_back(peer)
        open_rounds = [
            n for n in self.contributions.rounds_of(peer) if n > self.committed and self.rounds.is_announced(n)
        ]
        if open_rounds:
            self._releasing[peer] = max(open_rounds)
        else:
            self._release(peer, number)

    def keep_until_commit(self, update: ContributedRecord) -> None:
        """Keep the samples of a worker that was lost while its update may have been averaged."""
        for span in update.ranges:
            self.slices.assigned(update.worker, span)
        self.slices.contribute(update.worker, update.round, update.ranges)
        self._releasing[update.worker] = update.round

    def _release(self, peer: PeerId, number: int) -> None:
        self._releasing.pop(peer, None)
        if peer in self.rounds.members and peer not in self.lost:  # it was found again since, and may train
            self.slices.withdraw(peer, number)
        else:
            self.slices.release(peer)
        self.contributions.discard(peer, number, "its worker was lost")

    # --------------------------------------------------------------------------------------------------------- reports

    def _update_merged(self, peer: PeerId, now: float) -> tuple[ReportAnswer, tuple[Effect, ...]]:
        number = self.rounds.round_of(peer)
        answer = self.rounds.update_merged(peer, now)
        queued = self.rounds.take_effects(now)
        if number is None or peer in self.rounds.members:
            return answer, queued
        self._free(peer, number)
        self.left.add(peer)
        return answer, (Left(peer, number), *queued)

    def _measured(self, peer: PeerId, report: RoundMetrics, now: float) -> tuple[Effect, ...]:
        values = {shorten(n, 100): v for n, v in list(report.metrics.items())[:_METRICS] if math.isfinite(v)}
        if (stated := values.get(MICRO_BATCH)) is not None and peer in self.rounds.members:
            self.micro_batches[peer] = max(1, min(int(stated), self.rounds.settings.batch_size))
        if values.keys() & _OTHER_REPORTS and not values.keys() & _TRAINED:
            return (Measured(peer, report.round, values),)
        seconds = {name: values[name] for name in ROUND_SECONDS if values.get(name, -1.0) >= 0}
        if seconds and peer in self.rounds.members:
            self.seconds.setdefault(peer, Counter()).update(seconds)
        reported = self.rounds.metrics_reported(peer, report.round, values.get("loss"), now)
        return (Measured(peer, report.round, values), *reported)

    def worker_lost(self, peer: PeerId, why: str, now: float) -> tuple[Effect, ...]:
        """Remove a lost worker; its unused samples are assigned to others.

        Where the parameter server was told that its update is part of a round, that may have been averaged by now.
        """
        number = self.rounds.round_of(peer)
        self.lost.setdefault(peer, why)
        if number is not None:
            self._free(peer, number)
        return self.rounds.worker_lost(peer, why, now)

    def update_refused(self, number: int, peer: PeerId, reason: str, now: float) -> tuple[Effect, ...]:
        """Continue a round without a member whose update the parameter server refused."""
        counted = peer in self.rounds.members and (number, peer) not in self.contributions.refused
        if counted:
            self.contributions.refuse(peer, number)
        effects: tuple[Effect, ...] = ()
        if not self._is_former(peer, number, reason):
            self._withdraw(peer, number, reason)
            effects = self.rounds.update_refused(number, peer, reason, now)
        return (self._refused(peer, number, reason), *effects) if counted else effects

    def update_missing(self, number: int, peer: PeerId, reason: str, now: float) -> tuple[Effect, ...]:
        """Continue a round without a member whose update did not reach the parameter server in time."""
        if self._is_former(peer, number, reason):
            return ()
        self._withdraw(peer, number, reason)
        return self.rounds.update_missing(number, peer, reason, now)

    def _is_former(self, peer: PeerId, number: int, reason: str) -> bool:
        """Return whether an update is that of a lost worker, which may have been found again since, and drop it."""
        if self._releasing.get(peer) != number:
            return False
        self._withdraw(peer, number, reason)
        self._release(peer, number)
        return True

    # --------------------------------------------------------------------------------------------- members come and go

    def worker_added(self, peer: PeerId, now: float) -> tuple[Effect, ...]:
        """Add a worker that was given a task; it trains when it has joined."""
        self.lost.pop(peer, None)
        for known in (self.left, self.told_done, self.honours_ranges):
            known.discard(peer)
        return self.rounds.add(peer, now)

    def join_round(self, peer: PeerId, weights: str | None, now: float) -> tuple[RoundToJoin, tuple[Effect, ...]]:
        """Answer with which round a worker begins; what it has trained and not stated goes back.

        What it was assigned ahead of its first round stays assigned.

        Args:
            peer: the worker.
            weights: digest of the committed weights; None before the first commit.
            now: time of the question.
        """
        if peer not in self.rounds.members:
            return RoundToJoin(reason=self._refusal_reason(peer, SendingUpdate())), ()
        if self.rounds.is_complete:
            self.told_done.add(peer)
            return RoundToJoin(reason="the last round of the job is closed"), ()
        if not (self.rounds.is_preparing(peer) or self.rounds.may_begin(peer)):
            self.slices.give_back(peer)
        # an update that it stated before it was lost may count in the open round still
        number, effects = self.rounds.join(peer, now, waits=peer in self._releasing)
        if number is None:
            return RoundToJoin(), effects
        if not self.slices.held_by(peer):
            return RoundToJoin(round=number, weights=weights), effects
        self.rounds.training_began(peer, now)
        return RoundToJoin(round=number, weights=weights, keeps=True), effects

    def executor_lost(self, peer: PeerId, why: str, now: float) -> tuple[Effect, ...]:
        """Go on without an executor that is to be started again; what it has trained and not stated goes back."""
        self.slices.give_back(peer)
        return self.rounds.restart(peer, why, now)

    def server_changed(self, server: PeerId | None, now: float, why: str = "it was lost") -> tuple[Effect, ...]:
        """Go on with another parameter server, once its task has started; None: the last one was lost for now."""
        if server is None:
            for peer, number in list(self._releasing.items()):  # no step that it has taken counts any more
                self._release(peer, number)
            return self.rounds.server_lost(why, now)
        self.server = server
        return self.rounds.server_ready(now)


def _measured(batch: TrainedBatch) -> MeasuredBatch:
    """Return the durations of a batch in seconds."""
    seconds = None if batch.batch_ms is None else batch.batch_ms / 1000
    return MeasuredBatch(batch.batch_size, seconds, (batch.wait_ms or 0.0) / 1000)


def _slice_counts(slices: Mapping[str, int] | None) -> dict[int, int] | None:
    """Convert slice indexes to numbers and drop malformed ones."""
    if slices is None:
        return None
    return {int(name): samples for name, samples in slices.items() if name.isascii() and name.isdigit()}
