"""Rounds of a DiLoCo job (arXiv:2311.08105): decides when workers synchronize, from reports of executors. Pure.

Training workers report batches; the response says how many more to process before sending the update. When all updates
are under way, the members and their weights are announced to the parameter server, whose outer step closes the round.
Workers join, go and come back between rounds (`members`); with too few of them, or without a parameter server, the open
round waits. The clock is passed in, and actions are returned as effects, which `operator` translates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.training_reports import Acknowledged, Continue, Done, ReportAnswer, ReportError, ScheduleUpdate
from hypha_scheduler.strategies.diloco.batch_allocation import MeasuredBatch, seconds_since_first
from hypha_scheduler.strategies.diloco.events import late_event
from hypha_scheduler.strategies.diloco.members import Roster, RoundMember, RoundPause, Standing
from hypha_scheduler.strategies.diloco.open_round import Round, RoundShare, mean_loss
from hypha_scheduler.strategies.diloco.round_allocation import RoundAllocation
from hypha_scheduler.strategies.diloco.round_deadlines import RoundDeadlines
from hypha_scheduler.strategies.diloco.round_effects import (
    AnnounceRound,
    Effect,
    Fail,
    Joined,
    RoundSettings,
    StepOverdue,
)

_HURRY: Final = 5.0
"""Least time in seconds that the parameter server waits for updates of which the sender is gone."""


class Rounds:
    """State of the rounds of one job. Methods that process an event return the response or effects that follow."""

    def __init__(self, settings: RoundSettings, members: Iterable[PeerId], now: float, closed: int = 0) -> None:
        """Start the round after `closed` with `members`."""
        self.settings = settings
        self._first = closed + 1
        self.members = {peer: RoundMember(self._first, since=now, seen_at=now) for peer in members}
        """Workers that take part in the job."""
        self._rounds: dict[int, Round] = {self._first: Round(self._first, now, is_first=True)}
        self._roster = Roster(settings.min_members, self.members)
        self._deadlines = RoundDeadlines(settings, self._roster, self._rounds, self._first)
        self._allocation = RoundAllocation(settings, self._roster)
        self.closed = closed
        """Number of the last round whose outer step was taken; 0 before the first."""
        self._steps: deque[float] = deque(maxlen=8)
        """Seconds from the announcement to the step of the last rounds."""
        self.pause = RoundPause(self._roster)
        self._unreported: tuple[Effect, ...] = ()
        """Effects of methods that return none."""
        self.closes_by_commit = False
        """Whether the parameter server pushes its outer update before it reports the step."""

    def round_of(self, peer: PeerId) -> int | None:
        """Return the number of the round that a worker is in; None if it is no member."""
        member = self.members.get(peer)
        return None if member is None else member.round

    @property
    def evaluation_timeout(self) -> float:
        """Seconds that workers may take to evaluate the last weights; 0 if none does."""
        return self._deadlines.evaluation_timeout(self.closed, self.members.values())

    @property
    def is_complete(self) -> bool:
        """Whether the last outer step was taken."""
        return self.closed >= self.settings.rounds

    @property
    def is_over(self) -> bool:
        """Whether the last outer step was taken, and merged by every worker that is not left out of the last round."""
        settled = all(member.done or self.is_excused(peer) for peer, member in self.members.items())
        return self.is_complete and settled

    def is_excused(self, peer: PeerId) -> bool:
        """Return whether the last round continues without `peer`, which then has nothing left to do."""
        last, member = self._rounds.get(self.settings.rounds), self.members.get(peer)
        is_out = self.is_complete and member is not None and member.standing is not Standing.TRAINING
        return is_out or (last is not None and peer in last.dropped)

    @property
    def _open(self) -> Round | None:
        """The round after the last closed one; None before the first report in it, and after the last round."""
        return self._rounds.get(self.closed + 1)

    @property
    def _last(self) -> Round:
        """The last closed round of this run."""
        return self._rounds.get(self.closed) or self._rounds[self._first]

    def _begin_open(self, now: float) -> Round:
        return self._rounds.setdefault(self.closed + 1, Round(self.closed + 1, now))

    # --------------------------------------------------------------------------------------------- members come and go

    def add(self, peer: PeerId, now: float) -> tuple[Effect, ...]:
        """Add a worker that was given a task: until it joins, no round expects it."""
        self.members[peer] = RoundMember(self.closed + 1, Standing.PREPARING, since=now, seen_at=now)
        return self._go_on(now)

    def joins(self, peer: PeerId) -> bool:
        """Return whether the executor of a worker has asked with which round it begins."""
        member = self.members.get(peer)
        return member is not None and member.joins

    def is_preparing(self, peer: PeerId) -> bool:
        """Return whether a worker has not joined since its executor was started."""
        member = self.members.get(peer)
        return member is not None and member.standing is Standing.PREPARING

    def may_begin(self, peer: PeerId) -> bool:
        """Return whether a worker has joined the open round, and has reported no batch of it."""
        return self._roster.may_begin(peer, self._open)

    def can_join_now(self, peer: PeerId) -> bool:
        """Return whether a worker may begin with the open round.

        It may if the round has not begun, if nobody trains in it, if the round needs more members, or if the worker has
        asked before the round began.
        """
        current = self._open
        if peer not in self.members or self.is_complete:
            return False
        return current is None or self._roster.can_join(peer, current)

    def join(self, peer: PeerId, now: float, *, waits: bool = False) -> tuple[int | None, tuple[Effect, ...]]:
        """Let a worker begin with a round; None if it has to ask again. What it did in the open round is given up.

        With `waits` it has to ask again in any case.
        """
        member = self.members.get(peer)
        if member is None:
            return None, ()
        member.joins = True
        if self.may_begin(peer):  # the question was repeated, or it is a worker of the first round
            member.heard(now)
            return member.round, ()
        effects = self._drop_open_work(peer, member, f"worker {peer} begins anew", now)
        if waits or not self.can_join_now(peer):
            member.asked_in = self.closed + 1 if member.asked_in is None else member.asked_in
            member.heard(now)
            return None, effects
        self._admit(peer, member, now)
        return member.round, (*effects, *self._go_on(now))

    def join_at_once(self, peer: PeerId, now: float) -> bool:
        """Let a worker whose executor does not ask begin with the round of its task, if that is open still."""
        member, current = self.members.get(peer), self._open
        if member is None or member.joins or member.standing is not Standing.PREPARING:
            return False
        if member.round != self.closed + 1 or (current is not None and current.announced_at is not None):
            return False
        self._admit(peer, member, now)
        current = self._begin_open(now)
        if peer in current.refused:
            current.dropped.add(peer)
            member.change(Standing.AWAY, now)
        return True

    def _admit(self, peer: PeerId, member: RoundMember, now: float) -> None:
        current = self._begin_open(now)
        current.dropped.discard(peer)
        current.parts.pop(peer, None)
        member.round, member.asked_in = current.number, None
        member.change(Standing.JOINED, now)
        self._unreported += (Joined(peer, current.number),)

    def restart(self, peer: PeerId, why: str, now: float) -> tuple[Effect, ...]:
        """Process that the executor of a worker has died and is started again: it has to join.

        Its update of the open round counts if it was stated; the parameter server does not wait long for it.
        """
        member = self.members.get(peer)
        if member is None:
            return ()
        effects = self._drop_open_work(peer, member, f"the executor of {peer} ended: {why}", now)
        member.asked_in = None
        member.change(Standing.PREPARING, now)
        current = self._open
        if current is None or current.announced_at is None or not current.has_posted(peer):
            return effects
        return (*effects, AnnounceRound(current.number, current.announced, self._hurry()))

    def _drop_open_work(self, peer: PeerId, member: RoundMember, why: str, now: float) -> tuple[Effect, ...]:
        """Go on without what a worker has trained in open rounds, apart from updates that are under way."""
        if member.standing is Standing.PREPARING:
            return ()
        member.change(Standing.PREPARING, now)
        for current in self._unclosed():
            if not current.has_posted(peer) or peer in current.dropped:
                current.parts.pop(peer, None)
        self.pause.last_change = why
        return self._go_on(now)

    def _unclosed(self) -> list[Round]:
        return [current for current in self._rounds.values() if current.number > self.closed]

    # ---------------------------------------------------------------------------------------------------------- pauses

    def server_lost(self, why: str, now: float) -> tuple[Effect, ...]:
        """Process that there is no parameter server: no deadline passes until there is another one."""
        self.pause.server_gone = why
        for current in self._unclosed():
            current.announced, current.announced_at = (), None
            current.was_announced = current.is_outdated = False
        return self.take_effects(now)

    def server_ready(self, now: float) -> tuple[Effect, ...]:
        """Process that there is a parameter server again: if the open round is complete it is announced again."""
        self.pause.server_gone = None
        return self._go_on(now)

    def take_effects(self, now: float) -> tuple[Effect, ...]:
        """Return the effects of methods that return none; begin or end a pause if there is reason to."""
        effects, self._unreported = self._unreported, ()
        change = self.pause.set(None if self.is_complete else self.pause.why(self.closed + 1, self._open), now)
        if change is not None and self.pause.reason is None:
            self.postpone(now - self.pause.began_at, self.pause.began_at)
        return effects if change is None else (*effects, change)

    def postpone(self, seconds: float, before: float) -> None:
        """Move deadlines, because the job stood still for `seconds`; those that count from reports up to `before`."""
        for current in self._rounds.values():
            current.postpone(seconds, before)
        for member in self.members.values():
            member.postpone(seconds, before)

    def _go_on(self, now: float) -> tuple[Effect, ...]:
        """Announce what is complete, end or begin a pause, or fail if nobody is left whose update may count."""
        announced: tuple[Effect, ...] = ()
        for current in self._unclosed():
            announced += self._announce_if_complete(current, now)
        return (*self.take_effects(now), *announced)

    # ------------------------------------------------------------------------------------------------- training workers

    def training_began(self, peer: PeerId, now: float) -> None:
        """Record that a worker got its first slice, and begins its first batch when it has fetched it."""
        member = self.members.get(peer)
        if member is None or member.standing is Standing.PREPARING:
            return
        member.heard(now)
        part = self._rounds[member.round].part(peer)
        part.last_at = now if part.last_at is None else part.last_at

    def batches_done(
        self, peer: PeerId, batches: Sequence[MeasuredBatch], now: float, left: int | None = None
    ) -> ReportAnswer:
        """Process a report of finished batches; the response is to continue, or how many more precede the update.

        Args:
            peer: the worker.
            batches: what it has trained since the last report.
            now: time of the report.
            left: how many more batches its executor will train as far as it knows, if it states that: then it waits for
                the answer to the report of the last one, which may allocate more.
        """
        member = self.members.get(peer)
        if member is None:
            return ReportError()
        if member.standing is Standing.PREPARING:  # a late report of an executor that has ended
            return Done() if self.is_excused(peer) else Continue()
        current = self._rounds[member.round]
        part = current.part(peer)
        self._came_back(peer, member, current, now)
        if member.done or part.posted_at is not None:
            return Done() if member.done else Continue()
        longest = max(0.0, now - current.began_at)
        batches = [batch.bounded(self.settings.batch_size, longest) for batch in batches]
        current.batch_began(now, part.last_at, seconds_since_first(batches))
        self._measure_batches(member, part, batches, now)
        part.last_at = now
        part.count_batches(len(batches), sum(batch.samples for batch in batches), left)
        return self._answer_batch(current, peer, now)

    def count_reported(self, peer: PeerId, number: int, first: int, count: int) -> int:
        """Note that a worker reports batches of a round; return how many of them are not to be counted.

        These are the ones that it has reported before. Batches of another round than the worker's are never counted,
        nor are those that come after its update, which states them.

        Args:
            peer: the worker.
            number: the round.
            first: number of batches of the round before these.
            count: number of these batches.
        """
        part = self._part_in(peer, number)
        if part is None:
            return count
        known = count if part.posted_at is not None else min(count, max(0, part.reported - first))
        part.reported = max(part.reported, first + count)
        return known

    def batches_known(self, peer: PeerId, now: float) -> ReportAnswer:
        """Process a report of which no batch is to be counted; the response is as that of `batches_done`."""
        member = self.members.get(peer)
        if member is None:
            return ReportError()
        if member.standing is not Standing.PREPARING:
            member.heard(now)
        return Done() if member.done or self.is_excused(peer) else Continue()

    def last_batch(self, peer: PeerId, number: int) -> int | None:
        """Return after how many batches of a round a worker sends its update; None if it is not known yet."""
        part = self._part_in(peer, number)
        return None if part is None or part.remaining is None else part.reported + part.remaining

    def settle_end(self, peer: PeerId, number: int) -> None:
        """Allocate no more to a worker in a round: its executor knows its last batch, and waits for no answer then."""
        if (part := self._part_in(peer, number)) is not None:
            part.is_settled = True

    def _part_in(self, peer: PeerId, number: int) -> RoundShare | None:
        """Return the part of a worker in a round; None if it is not in this one."""
        member = self.members.get(peer)
        if member is None or member.standing is Standing.PREPARING or member.round != number:
            return None
        return self._rounds[number].part(peer)

    def _came_back(self, peer: PeerId, member: RoundMember, current: Round, now: float) -> None:
        """Expect the update of a worker that reports in a round that still needs it."""
        member.heard(now)
        is_open = current.number > self.closed and current.announced_at is None and peer not in current.refused
        if is_open and member.standing in (Standing.JOINED, Standing.AWAY):
            current.dropped.discard(peer)
            member.change(Standing.TRAINING, now)
            self._unreported = self.take_effects(now)

    def _measure_batches(
        self, member: RoundMember, part: RoundShare, batches: Sequence[MeasuredBatch], now: float
    ) -> None:
        if not member.has_trained and part.last_at is not None:
            self.settings.timeouts.starts.append(now - member.since)
        member.has_trained = True
        interval = None if part.last_at is None or now < part.last_at else now - part.last_at
        member.throughput.observe_report(batches, interval, begins_round=part.batches == 0)
        if interval is not None:
            member.rhythm.batch_took(interval)

    def _answer_batch(self, current: Round, peer: PeerId, now: float) -> ReportAnswer:
        if self.is_excused(peer):
            return Done()
        if peer in current.dropped or self.members[peer].standing is Standing.AWAY:
            # its update is not used: it begins anew with another round, or catches up once the round is closed
            ends = self.members[peer].joins or current.number <= self.closed
            return ScheduleUpdate(counter=0) if ends else Continue()
        count = self._allocation.allocate(peer, current, now)
        return Continue() if count is None else ScheduleUpdate(counter=count)

    def update_sending(self, peer: PeerId, now: float) -> None:
        """Process that an executor is about to send its pseudo-gradient, which its worker will state."""
        member = self.members.get(peer)
        if member is not None and member.standing is not Standing.PREPARING:
            member.heard(now)
            self._rounds[member.round].part(peer).sending_at = now

    def update_started(self, peer: PeerId, now: float, counts: tuple[int, int] | None = None) -> tuple[Effect, ...]:
        """Process that a worker starts to send its pseudo-gradient; its samples in this round are final.

        `counts` are the numbers of samples and batches where these are stated; otherwise the reported batches count.
        """
        member = self.members.get(peer)
        if member is None or member.standing is Standing.PREPARING:
            return ()
        current = self._rounds[member.round]
        part = current.part(peer)
        self._came_back(peer, member, current, now)
        if part.posted_at is None and part.sending_at is not None and now >= part.sending_at:
            member.rhythm.sendings.append(now - part.sending_at)
        part.post(now, counts)
        return self._go_on(now)

    def goes_on_without(self, peer: PeerId, number: int) -> bool:
        """Return whether an update of a worker that is stated now cannot count in a round."""
        current, member = self._rounds.get(number), self.members.get(peer)
        if number <= self.closed or member is None or current is None:
            return number <= self.closed or member is None
        if member.standing is Standing.PREPARING or current.announced_at is not None:
            return member.standing is Standing.PREPARING or peer in current.dropped
        return peer in current.refused

    def progress_of(self, peer: PeerId, number: int) -> tuple[int, int]:
        """Return the samples and batches that a worker has reported in a round."""
        current = self._rounds.get(number)
        part = None if current is None else current.parts.get(peer)
        return (0, 0) if part is None else (part.samples, part.batches)

    def is_dropped(self, peer: PeerId, number: int) -> bool:
        """Return whether a round is closed, or continues without a worker."""
        current = self._rounds.get(number)
        return number <= self.closed or (current is not None and peer in current.dropped)

    def is_announced(self, number: int) -> bool:
        """Return whether the members of a round were announced: a parameter server may have averaged them."""
        current = self._rounds.get(number)
        return number <= self.closed or (current is not None and current.was_announced)

    def loss_of(self, number: int, members: Iterable[PeerId]) -> float | None:
        """Return the mean loss of members of a round that have reported one, weighted by samples."""
        current = self._rounds.get(number)
        parts = [] if current is None else [part for peer, part in current.parts.items() if peer in set(members)]
        return mean_loss(parts)

    def metrics_reported(
        self, peer: PeerId, number: int, loss: float | None, now: float | None = None
    ) -> tuple[Effect, ...]:
        """Record the loss that a worker reported for a round, which it does when its update has arrived."""
        current, member = self._rounds.get(number), self.members.get(peer)
        if member is None or current is None:
            return ()
        part = current.part(peer)
        part.loss = math.nan if loss is None else loss
        if now is not None and number > self.closed and part.note_delivery(now):
            member.rhythm.delivery_took(now - (part.last_at or now))
        return current.close(only_complete=True)

    def update_merged(self, peer: PeerId, now: float) -> ReportAnswer:
        """Process that a worker has merged the outer update; it continues with the next round, leaves or is done."""
        member = self.members.get(peer)
        if member is None or member.standing is Standing.PREPARING:
            return ReportError()
        member.heard(now)
        if not self._rounds[member.round].was_announced:  # a response was lost and the report repeated
            if member.round > self.settings.rounds:  # since the job was taken up again
                member.done = True
                return Done()
            return Continue() if member.round > 1 else ReportError()
        if member.round >= self.settings.rounds:
            member.done = True
            return Done()
        taking_part = sum(m.standing in (Standing.TRAINING, Standing.JOINED) for m in self.members.values())
        if member.drains and taking_part > self.settings.min_members:
            del self.members[peer]
            self._unreported = self.take_effects(now)
            for current in self._unclosed():  # it may have been the last one for which the next round waits
                if current.number > member.round:
                    self._unreported += self._announce_if_complete(current, now)
            return Done()
        self._next_round(peer, member, now)
        return Continue()

    def _next_round(self, peer: PeerId, member: RoundMember, now: float) -> None:
        """Let a worker that has merged the outer update of its round begin the next one."""
        if (closed_at := self._rounds[member.round].closed_at) is not None and now >= closed_at:
            evaluates = self._deadlines.is_evaluated(member.round)
            (member.rhythm.evaluated_merges if evaluates else member.rhythm.merges).append(now - closed_at)
            self.settings.timeouts.merges.append(now - closed_at)
        member.round += 1
        current = self._rounds.setdefault(member.round, Round(member.round, now))
        current.part(peer).last_at = now
        if member.standing is Standing.AWAY and current.number > self.closed:
            self._catch_up(peer, member, current, now)
        self._forget_rounds()

    def _catch_up(self, peer: PeerId, member: RoundMember, current: Round, now: float) -> None:
        """Let a worker that was late, and does not ask with which round it begins, take part again."""
        if current.announced_at is not None:
            current.dropped.add(peer)
            return
        member.change(Standing.JOINED, now)
        self._unreported = self.take_effects(now)

    def _forget_rounds(self) -> None:
        """Forget rounds that were reported and in which no worker is any more."""
        needed = [m.round for m in self.members.values() if m.standing is not Standing.PREPARING]
        behind = min([self.closed + 1, *needed]) - 1
        for number in [n for n, found in self._rounds.items() if n < behind and found.reported]:
            del self._rounds[number]

    # ------------------------------------------------------------------------------------------------- parameter server

    def _announce_if_complete(self, current: Round, now: float) -> tuple[Effect, ...]:
        """Announce the members of a round that waits for none; again if they are others than before."""
        expected, least = self._roster.expected(current), self._roster.least(current)
        if current.number <= self.closed or self.pause.server_gone is not None:
            return ()
        if len(expected) < least:
            return self._wait_for_others(current, expected)
        if not all(current.has_posted(peer) for peer in expected):
            return ()
        parts = {peer: current.parts[peer] for peer in sorted(expected)}  # one order for averaging and for the record
        members = tuple((peer, part.samples) for peer, part in parts.items() if part.samples)
        if current.announced_at is not None and members == current.announced and not current.is_outdated:
            return ()
        if len(members) < least:
            return (Fail(f"round {current.number}: {len(members)} updates of at least {least}"),)
        current.announce(members, now)
        self._roster.leave_out_joiners(current, now)
        has_gone = any(self.members[peer].standing is Standing.PREPARING for peer in parts)
        return (AnnounceRound(current.number, members, self._hurry() if has_gone else self._deadlines.updates_wait()),)

    def _wait_for_others(self, current: Round, expected: Collection[PeerId]) -> tuple[Effect, ...]:
        """Take back the announcement of a round that has too few members now, unless the step was taken already."""
        others = self.members.keys() - current.refused
        if current.refused and not others:
            why = f"{self.pause.last_change}; {len(expected)} of at least 1 remain"
            return (Fail(f"round {current.number}: {why}"),)
        if current.announced_at is None:
            return ()
        current.announced_at = None
        if not current.announced:  # no update has arrived
            return ()
        return (AnnounceRound(current.number, current.announced, self._hurry()),)

    def hurry(self) -> tuple[Effect, ...]:
        """Let the parameter server wait less for updates, as one may not come; nothing if no members were announced."""
        current = self._open
        if current is None or current.announced_at is None:
            return ()
        return (AnnounceRound(current.number, current.announced, self._hurry()),)

    def _hurry(self) -> float:
        """Return how long the parameter server waits for updates of which the sender is gone: as long as for others."""
        wait = self._deadlines.updates_wait()
        return min(wait, max(_HURRY, 2 * max(self._steps))) if self._steps else wait

    def outer_step_taken(self, now: float) -> tuple[ReportAnswer, tuple[Effect, ...]]:
        """Process that the parameter server has taken an outer step, which closes a round.

        A parameter server that states its term has pushed the outer update before: then the commit has closed the
        round (`step_committed`).
        """
        current = self._open
        if self.closes_by_commit or current is None or not current.was_announced:  # or a repeated report
            return (self._after_step() if self.closed else ReportError()), ()
        return self._after_step_of(current, now)

    def step_committed(self, number: int, now: float) -> tuple[Effect, ...]:
        """Process that an outer update was recorded, which closes its round."""
        self.closes_by_commit = True
        current = self._rounds.get(number)
        if current is None or number != self.closed + 1:
            return ()
        return self._after_step_of(current, now)[1]

    def _after_step_of(self, current: Round, now: float) -> tuple[ReportAnswer, tuple[Effect, ...]]:
        self.closed += 1
        if current.announced_at is None:
            current.announced_at = now
        elif current.announced:
            self.settings.timeouts.steps.append(now - current.announced_at)
            self._steps.append(now - current.announced_at)
        current.closed_at, current.was_announced = now, True
        self._roster.leave_out_unfinished(current, now)
        missed = () if self.is_complete else self._roster.count_missed(current)
        before = self._rounds.get(self.closed - 1)
        late = before.close(only_complete=False) if before else ()
        effects = (*late, *current.close(only_complete=True), *missed, *self.take_effects(now))
        return self._after_step(), effects

    def _after_step(self) -> ReportAnswer:
        return Done() if self.is_complete else Acknowledged()

    def update_refused(self, number: int, peer: PeerId, reason: str, now: float) -> tuple[Effect, ...]:
        """Continue a round without a member whose update was refused, as long as there is another one."""
        current = self._rounds.get(number)
        if current is None or peer not in self.members or number <= self.closed or peer in current.refused:
            return ()
        current.dropped.add(peer)
        current.refused.add(peer)
        current.withdraw(peer)
        self.pause.last_change = f"the update of {peer} was refused: {reason}"
        return self._go_on(now)

    def update_missing(self, number: int, peer: PeerId, reason: str, now: float) -> tuple[Effect, ...]:
        """Continue a round without a member whose update did not reach the parameter server.

        A worker whose executor was started again since may still train in this round.
        """
        current, member = self._rounds.get(number), self.members.get(peer)
        if current is None or member is None or number <= self.closed or not current.has_posted(peer):
            return ()  # a repeated report: it may train again by now
        if member.standing is not Standing.PREPARING:
            return self.update_refused(number, peer, reason, now)
        current.parts.pop(peer, None)
        current.withdraw(peer)
        self.pause.last_change = f"the update of {peer} did not arrive: {reason}"
        return self._go_on(now)

    # ----------------------------------------------------------------------------------------- draining, lost and late

    def drain(self, peer: PeerId) -> None:
        """Let a worker leave once it has merged the outer update of its round, if the job has enough others then."""
        if (member := self.members.get(peer)) is not None:
            member.drains = True

    def worker_lost(self, peer: PeerId, why: str, now: float) -> tuple[Effect, ...]:
        """Remove a lost worker; its updates in rounds that are not closed are not used."""
        if self.members.pop(peer, None) is None:
            return ()
        self.pause.last_change = f"worker {peer} was lost: {why}"
        for current in self._unclosed():
            current.parts.pop(peer, None)
            current.dropped.discard(peer)
        return self._go_on(now)

    def deadline(self) -> float | None:
        """Return the time at which a worker or the parameter server is overdue or suspected; None if none can be."""
        if self.is_complete:
            return None if self.is_over else self._deadlines.of_merging(self._last)
        times = list(self._deadlines.replacements(is_paused=self.pause.reason is not None).values())
        if self.pause.reason is None:
            due = self._round_deadline()
            times += [*([] if due is None else [due]), *self._deadlines.suspicions(self._open).values()]
        return min(times, default=None)

    def _round_deadline(self) -> float | None:
        current = self._open
        if current is None:  # no worker has merged the last outer update yet
            return self._deadlines.of_merging(self._last)
        return self._deadlines.of_round(current)

    def resume_round(
        self,
        posted: Mapping[PeerId, tuple[int, int]],
        announced: Collection[PeerId] | None,
        now: float,
        refused: Collection[PeerId] = (),
        away: Collection[PeerId] = (),
    ) -> None:
        """Go on with the round after the last closed one, in a scheduler that was started again.

        Args:
            posted: samples and batches of the workers whose updates are under way.
            announced: its members, if they were announced; the round goes on without the others.
            now: time of the restart.
            refused: workers whose updates were refused in it; it goes on without them, too.
            away: workers that were late in the round before, and have not come back.
        """
        self.closes_by_commit = True
        current = self._rounds[self._first]
        current.is_first, current.trains_at = False, now
        for peer, (samples, batches) in posted.items():
            if peer in self.members:
                current.parts[peer] = RoundShare(samples=samples, batches=batches, posted_at=now)
        if announced is not None:
            current.announced_at, current.was_announced = now, True
            current.dropped |= self.members.keys() - set(announced)
            for peer in current.dropped:
                self.members[peer].change(Standing.AWAY, now)
        for peer in self.members.keys() & set(away):
            if not current.has_posted(peer):
                self.members[peer].change(Standing.AWAY, now)
        current.refused.update(refused)
        current.dropped.update(refused)

    def announce_again(self, now: float) -> tuple[Effect, ...]:
        """Announce the members of the open round if it is complete, although they may have been announced before."""
        for current in self._unclosed():
            current.announced = ()
        return self._go_on(now)

    def expire(self, now: float) -> tuple[Effect, ...]:
        """Apply the deadlines that have passed: suspect, leave out and replace workers or the parameter server."""
        due = self.deadline()
        if due is None or now < due:
            return ()
        if self.is_complete:
            return self._stop_merging(now)
        is_paused, current = self.pause.reason is not None, self._open
        effects: tuple[Effect, ...] = self._deadlines.replace_workers(now, is_paused=is_paused)
        if current is not None and not is_paused:
            effects = (*effects, *self._deadlines.suspect(current, now))
        due = None if is_paused else self._round_deadline()
        return effects if due is None or now < due else (*effects, *self._end_round(now))

    def _end_round(self, now: float) -> tuple[Effect, ...]:
        """Go on without a parameter server, or workers, that have exceeded the deadline of the open round."""
        current = self._begin_open(now)
        if current.announced_at is not None:
            since = now - current.announced_at
            reason = f"round {current.number}: the parameter server took no outer step within {since:.0f} s"
            return (StepOverdue(reason), *self.server_lost(reason, now))
        late = self._roster.missing(current)
        waited = {peer: now - current.waited_from(peer) for peer in late}
        for peer in late:
            self._leave_out(peer, current, now)
        names = ", ".join(sorted(str(peer) for peer in late))
        limit, longest = self.settings.timeout, max(waited.values(), default=0.0)
        remedy = "" if limit is None else f" (raise rounds.timeout, {limit:g} s, to wait for longer)"
        self.pause.last_change = f"round {current.number}: no update within {longest:.0f} s from {names}{remedy}"
        reports = tuple(late_event(peer, current.number, seconds) for peer, seconds in waited.items())
        return (*reports, *self._go_on(now))

    def _leave_out(self, peer: PeerId, current: Round, now: float) -> None:
        member = self.members[peer]
        waited = now - max(member.seen_at, current.began_at)
        current.dropped.add(peer)
        member.change(Standing.AWAY, now)
        member.waited = waited

    def _stop_merging(self, now: float) -> tuple[Effect, ...]:
        """End the job without workers that have not merged the last outer update in time."""
        last = self._last
        reported = last.close(only_complete=False)
        late = [peer for peer, member in self.members.items() if not member.done and not self.is_excused(peer)]
        last.dropped.update(late)
        return (*reported, *(late_event(peer, last.number, now - (last.closed_at or now)) for peer in late))

    # ------------------------------------------------------------------------------------------------------- reporting

    def finish(self) -> tuple[Effect, ...]:
        """Report the closed rounds that still wait for a worker's metrics."""
        effects: tuple[Effect, ...] = ()
        for current in list(self._rounds.values()):
            effects += current.close(only_complete=False)
        return effects
