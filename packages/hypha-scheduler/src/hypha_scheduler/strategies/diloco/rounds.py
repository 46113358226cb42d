"""Rounds of a DiLoCo job (arXiv:2311.08105): decides when workers synchronize, from reports of executors. Pure.

Training workers report batches; the response says how many more to process before sending the update. When all updates
are under way, the members and their weights are announced to the parameter server, whose outer step closes the
round. The clock is passed in, and actions are returned as effects, which `operator` translates.
Called by `training_state`; calls `batch_allocation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.progress import Acknowledged, Continue, Done, ProgressError, ProgressResponse, ScheduleUpdate
from hypha_scheduler.strategies.diloco.batch_allocation import (
    BatchAllocation,
    ThroughputEstimate,
    WorkerProgress,
    allocate_batches,
)

DECIDED_SHARE: Final = 0.5
"""Fraction of a round's target after which batches are allocated even if some worker's throughput is unknown."""
_MIN_CHANGE: Final = 0.2
"""A worker's allocation is changed only if it is off by more than this fraction and by more than one batch."""


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """Settings of the rounds of a job."""

    rounds: int
    """Number of rounds."""
    target: int
    """Samples of all workers per round."""
    batch_size: int
    """Samples per batch of a worker."""
    min_members: int
    """Number of workers without which the job fails."""
    timeout: float | None = None
    """Maximum duration of a round in seconds; None to derive it from the forecast."""
    grace: float = 30.0
    """Minimum time in seconds beyond the forecast before a member counts as late."""
    step_timeout: float = 600.0
    """Timeout in seconds of steps without a forecast: starting an executor, an outer step, merging it."""
    evaluation: float = 0.0
    """Timeout in seconds of merging an outer update if the model is then evaluated; 0 without evaluation."""


@dataclass(frozen=True, slots=True)
class AnnounceRound:
    """Effect: announce to the parameter server whose updates to average."""

    round: int
    members: tuple[tuple[PeerId, int], ...]
    """Peer and number of samples of each member."""


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """Effect: report a closed round."""

    round: int
    samples: Mapping[PeerId, int]
    batches: Mapping[PeerId, int]
    waits: Mapping[PeerId, float]
    """Seconds from each worker's update until the round waited for no further one: the last came, or was given up."""
    seconds: float
    """Duration to the outer step; the first round begins when the first worker begins its first batch."""
    loss: float | None
    """Mean loss over workers, weighted by samples; None if no worker reported one."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Effect: fail the job."""

    reason: str


@dataclass(frozen=True, slots=True)
class Late:
    """Effect: report that a round continues without a worker after waiting `seconds` for it."""

    peer: PeerId
    round: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Effect: report the metrics of a worker over a round."""

    peer: PeerId
    round: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Left:
    """Effect: report that a draining worker has left after a round in which its update counts."""

    peer: PeerId
    round: int


Effect = AnnounceRound | RoundClosed | Late | Measured | Left | Fail


@dataclass(slots=True)
class _Contribution:
    """Contribution of one worker to one round."""

    last_at: float | None = None
    """Time at which its last batch was reported, or its first one began."""
    samples: int = 0
    batches: int = 0
    remaining: int | None = None
    """Number of further batches allocated to it; None before the allocation."""
    posted_at: float | None = None
    """Time at which it started to send its update."""
    loss: float | None = None


@dataclass(slots=True)
class _Round:
    number: int
    began_at: float
    is_first: bool = False
    """Whether it is the first of this run."""
    trains_at: float | None = None
    """Time at which the first batch of the job began, if in this round; before that, executors were starting."""
    parts: dict[PeerId, _Contribution] = field(default_factory=dict)
    dropped: set[PeerId] = field(default_factory=set)
    """Members that were late or whose update was refused."""
    finish: float | None = None
    """Forecast of the time at which the last batch is complete."""
    announced_at: float | None = None
    """Time at which the members were announced, the last time if one was lost or refused afterwards."""
    closed_at: float | None = None
    """Time of the outer step."""
    reported: bool = False
    """Whether `RoundClosed` was returned."""

    @property
    def counted_from(self) -> float:
        """Time from which the duration of the round counts."""
        return self.began_at if self.trains_at is None else self.trains_at

    def batch_began(self, now: float, earliest: float | None, seconds: float | None) -> None:
        """Begin the first round with its first batch: one that took `seconds`, and not before `earliest`, ends now."""
        if not self.is_first:
            return
        took = seconds if seconds is not None and math.isfinite(seconds) else 0.0
        began = min(now, max(now - took, now if earliest is None else earliest))
        self.trains_at = began if self.trains_at is None else min(self.trains_at, began)

    def waited_from(self, peer: PeerId) -> float:
        """Return the time since which the round has waited for a worker; one that has not begun is still starting."""
        part = self.parts.get(peer)
        return self.began_at if part is None or part.last_at is None else self.counted_from

    def part(self, peer: PeerId) -> _Contribution:
        return self.parts.setdefault(peer, _Contribution())


@dataclass(slots=True)
class _Member:
    round: int = 1
    throughput: ThroughputEstimate = field(default_factory=ThroughputEstimate)
    done: bool = False
    drains: bool = False
    """Whether its worker has announced that it will end."""


class Rounds:
    """State of the rounds of one job. Methods that process an event return the response or effects that follow."""

    def __init__(self, settings: RoundSettings, members: Iterable[PeerId], now: float, closed: int = 0) -> None:
        """Start the round after `closed` with `members`."""
        self._settings = settings
        self._first = closed + 1
        self._members = {peer: _Member(self._first) for peer in members}
        self._rounds: dict[int, _Round] = {self._first: _Round(self._first, now, is_first=True)}
        self._closed = closed

    @property
    def members(self) -> frozenset[PeerId]:
        """Workers that take part in the job."""
        return frozenset(self._members)

    def round_of(self, peer: PeerId) -> int | None:
        """Return the number of the round that a worker is in; None if it is no member."""
        member = self._members.get(peer)
        return None if member is None else member.round

    @property
    def closed(self) -> int:
        """Number of the last round whose outer step was taken; 0 before the first."""
        return self._closed

    @property
    def over(self) -> bool:
        """Whether the last outer step was taken, and merged by every worker that is not left out of the last round."""
        settled = all(member.done or self.is_excused(peer) for peer, member in self._members.items())
        return self._closed >= self._settings.rounds and settled

    def is_excused(self, peer: PeerId) -> bool:
        """Return whether the last round continues without `peer`, which then has nothing left to do."""
        last = self._rounds.get(self._settings.rounds)
        return last is not None and peer in last.dropped

    # ------------------------------------------------------------------------------------------------- training workers

    def training_began(self, peer: PeerId, now: float) -> None:
        """Record that a worker got its first slice, and begins its first batch when it has fetched it."""
        member = self._members.get(peer)
        if member is not None:
            part = self._rounds[member.round].part(peer)
            part.last_at = now if part.last_at is None else part.last_at

    def batch_done(self, peer: PeerId, samples: int, now: float, seconds: float | None = None) -> ProgressResponse:
        """Process a finished batch; the response is to continue, or how many more batches precede the update.

        Args:
            peer: the worker.
            samples: samples in the batch.
            now: time of the report.
            seconds: duration of the batch as the executor states it; None if it does not.
        """
        member = self._members.get(peer)
        if member is None:
            return ProgressError()
        current = self._rounds[member.round]
        part = current.part(peer)
        if member.done or part.posted_at is not None:
            return Done() if member.done else Continue()
        samples = min(samples, self._settings.batch_size)
        current.batch_began(now, part.last_at, seconds)
        if part.last_at is not None:
            member.throughput.observe(samples, now - part.last_at)
        part.last_at = now
        part.samples += samples
        part.batches += 1
        part.remaining = None if part.remaining is None else max(0, part.remaining - 1)
        return self._answer_batch(current, peer, part, now)

    def _answer_batch(self, current: _Round, peer: PeerId, part: _Contribution, now: float) -> ProgressResponse:
        if self.is_excused(peer):
            return Done()
        if (
            peer in current.dropped
        ):  # late: once the round is closed it sends its update, which is not used, and catches up
            return ScheduleUpdate(counter=0) if current.number <= self._closed else Continue()
        if part.remaining == 0 or not self._can_allocate(current):
            return Continue()
        allocation = self._allocate(current, now)
        current.finish = max(allocation.finish, now)  # without batches left, the forecast may be in the past
        count = allocation.batches[peer]
        if part.remaining is not None and abs(count - part.remaining) <= max(1.0, _MIN_CHANGE * part.remaining):
            return Continue()
        part.remaining = count
        return ScheduleUpdate(counter=count)

    def _expected(self, current: _Round) -> list[PeerId]:
        """Return the members whose updates belong to the round."""
        return [p for p, m in self._members.items() if m.round <= current.number and p not in current.dropped]

    def _can_allocate(self, current: _Round) -> bool:
        expected = self._expected(current)
        done = sum(part.samples for part in current.parts.values())
        if done >= DECIDED_SHARE * self._settings.target:
            return True
        in_flight = sum(current.part(peer).posted_at is None for peer in expected) * self._settings.batch_size
        return done + in_flight >= self._settings.target or all(
            self._members[peer].throughput.known for peer in expected
        )

    def _allocate(self, current: _Round, now: float) -> BatchAllocation:
        expected = self._expected(current)
        gone = sum(part.samples for peer, part in current.parts.items() if peer not in expected)
        return allocate_batches(
            [self._worker_progress(current, peer, now) for peer in expected], self._settings.target - gone
        )

    def _worker_progress(self, current: _Round, peer: PeerId, now: float) -> WorkerProgress:
        part, throughput = current.part(peer), self._members[peer].throughput
        size = self._settings.batch_size
        seconds = None if throughput.seconds_per_sample is None else throughput.seconds_per_sample * size
        since = now if part.last_at is None else part.last_at
        if seconds is not None:
            seconds = max(seconds, now - since)  # an overdue batch is better evidence than earlier batches
        return WorkerProgress(
            peer=peer,
            batch_size=size,
            done=part.samples,
            batch_seconds=seconds,
            next_at=since + (seconds or 0.0),
            min_batches=0 if part.batches else 1,
            is_finished=part.posted_at is not None or part.remaining == 0,
        )

    def update_started(self, peer: PeerId, now: float) -> tuple[Effect, ...]:
        """Process that a worker starts to send its pseudo-gradient; its samples in this round are final."""
        member = self._members.get(peer)
        if member is None:
            return ()
        current = self._rounds[member.round]
        part = current.part(peer)
        part.posted_at = now if part.posted_at is None else part.posted_at
        return self._announce_if_complete(current, now)

    def metrics_reported(self, peer: PeerId, number: int, loss: float | None) -> tuple[Effect, ...]:
        """Record the loss that a worker reported for a round."""
        current = self._rounds.get(number)
        if peer not in self._members or current is None:
            return ()
        current.part(peer).loss = loss
        return self._close_round(current, only_complete=True)

    def update_merged(self, peer: PeerId, now: float) -> ProgressResponse:
        """Process that a worker has merged the outer update; it continues with the next round, leaves or is done."""
        member = self._members.get(peer)
        if member is None:
            return ProgressError()
        if self._rounds[member.round].announced_at is None:  # a response was lost and the report repeated
            return Continue() if member.round > 1 else ProgressError()
        if member.round >= self._settings.rounds:
            member.done = True
            return Done()
        if member.drains and len(self._members) > self._settings.min_members:
            del self._members[peer]
            return Done()
        member.round += 1
        self._rounds.setdefault(member.round, _Round(member.round, now)).part(peer).last_at = now
        behind = min(m.round for m in self._members.values()) - 1
        for number in [n for n, found in self._rounds.items() if n < behind and found.reported]:
            del self._rounds[number]
        return Continue()

    # ------------------------------------------------------------------------------------------------- parameter server

    def _announce_if_complete(self, current: _Round, now: float, again: bool = False) -> tuple[Effect, ...]:
        expected = self._expected(current)
        if current.number <= self._closed or (current.announced_at is not None and not again):
            return ()
        if not all(current.part(peer).posted_at is not None for peer in expected):
            return ()
        members = tuple((peer, current.parts[peer].samples) for peer in expected if current.parts[peer].samples)
        if len(members) < self._settings.min_members:
            return (Fail(f"round {current.number}: {len(members)} updates of at least {self._settings.min_members}"),)
        current.announced_at = now
        return (AnnounceRound(current.number, members),)

    def outer_step_taken(self, now: float) -> tuple[ProgressResponse, tuple[Effect, ...]]:
        """Process that the parameter server has taken an outer step, which closes a round."""
        current = self._rounds.get(self._closed + 1)
        if current is None or current.announced_at is None:  # a response was lost and the report repeated
            return (self._after_step() if self._closed else ProgressError()), ()
        self._closed += 1
        current.closed_at = now
        before = self._rounds.get(self._closed - 1)
        late = self._close_round(before, only_complete=False) if before else ()
        return self._after_step(), late + self._close_round(current, only_complete=True)

    def _after_step(self) -> ProgressResponse:
        return Done() if self._closed >= self._settings.rounds else Acknowledged()

    def update_refused(self, number: int, peer: PeerId, reason: str, now: float) -> tuple[Effect, ...]:
        """Continue a round without a member whose update the parameter server refused."""
        current = self._rounds.get(number)
        if current is None or peer not in self._members or number <= self._closed or peer in current.dropped:
            return ()
        current.dropped.add(peer)
        return self._continue_without(current, f"the parameter server refused the update of {peer}: {reason}", now)

    def _continue_without(self, current: _Round, why: str, now: float) -> tuple[Effect, ...]:
        remaining, least = len(self._expected(current)), self._settings.min_members
        if remaining < least:
            return (Fail(f"round {current.number}: {why}; {remaining} of at least {least} remain"),)
        return self._announce_if_complete(current, now, again=True)

    # ----------------------------------------------------------------------------------------- draining, lost and late

    def drain(self, peer: PeerId) -> None:
        """Let a worker leave once it has merged the outer update of its round, if the job has enough others then."""
        if (member := self._members.get(peer)) is not None:
            member.drains = True

    def worker_lost(self, peer: PeerId, why: str, now: float) -> tuple[Effect, ...]:
        """Remove a lost worker; its updates in rounds that are not closed are not used."""
        if self._members.pop(peer, None) is None:
            return ()
        if len(self._members) < self._settings.min_members and self._closed < self._settings.rounds:
            need = self._settings.min_members
            return (Fail(f"worker {peer} was lost: {why}; {len(self._members)} of at least {need} remain"),)
        effects: tuple[Effect, ...] = ()
        for current in [r for r in self._rounds.values() if r.number > self._closed]:
            current.parts.pop(peer, None)
            effects += self._announce_if_complete(current, now, again=current.announced_at is not None)
        return effects

    def deadline(self) -> float | None:
        """Return the time at which the open round is overdue, or None when the job is complete."""
        current = self._rounds.get(self._closed + 1)
        if current is None:
            last = self._rounds[self._closed]
            timeout = max(self._settings.step_timeout, self._settings.evaluation)
            return None if self.over else (last.closed_at or last.began_at) + timeout
        if current.announced_at is not None:
            updates, step = self._settings.timeout or 0.0, self._settings.step_timeout
            return current.announced_at + updates + step
        began = current.trains_at if current.number == self._first else current.began_at
        if self._settings.timeout is not None and began is not None:  # starting executors have a timeout of their own
            return began + self._settings.timeout
        if (until := self._evaluating_until(current)) is not None:
            return until
        starting = any(
            not self._members[peer].throughput.observations and not current.part(peer).batches
            for peer in self._expected(current)
        )
        if current.finish is None or starting:
            return current.began_at + self._settings.step_timeout
        return current.finish + max(self._settings.grace, current.finish - current.began_at)

    def _evaluating_until(self, current: _Round) -> float | None:
        """Return the deadline of workers that may still be evaluating the last outer update, or None."""
        before = self._rounds.get(current.number - 1)
        if not self._settings.evaluation or before is None or before.closed_at is None:
            return None
        behind = any(self._members[peer].round < current.number for peer in self._expected(current))
        return before.closed_at + self._settings.evaluation if behind else None

    def expire(self, now: float) -> tuple[Effect, ...]:
        """Apply the deadline if it has passed: continue the round without late workers, or fail the job."""
        due = self.deadline()
        if due is None or now < due:
            return ()
        current = self._rounds.get(self._closed + 1)
        if current is None:
            waiting = sorted(str(peer) for peer, member in self._members.items() if not member.done)
            return (Fail(f"the outer update of round {self._closed} was not merged by {', '.join(waiting)}"),)
        if current.announced_at is not None:
            since = now - current.announced_at
            return (Fail(f"round {current.number}: the parameter server took no outer step within {since:.0f} s"),)
        late = [peer for peer in self._expected(current) if current.part(peer).posted_at is None]
        current.dropped.update(late)
        names = ", ".join(sorted(str(peer) for peer in late))
        waited = {peer: now - current.waited_from(peer) for peer in late}
        reports = tuple(Late(peer, current.number, seconds) for peer, seconds in waited.items())
        longest = max(waited.values(), default=0.0)
        limit = self._settings.timeout
        remedy = "" if limit is None else f" (raise rounds.timeout, {limit:g} s, to wait for longer)"
        return reports + self._continue_without(current, f"no update within {longest:.0f} s from {names}{remedy}", now)

    # ------------------------------------------------------------------------------------------------------- reporting

    def finish(self) -> tuple[Effect, ...]:
        """Report the closed rounds that still wait for a worker's metrics."""
        effects: tuple[Effect, ...] = ()
        for current in list(self._rounds.values()):
            effects += self._close_round(current, only_complete=False)
        return effects

    def _close_round(self, current: _Round, *, only_complete: bool) -> tuple[Effect, ...]:
        """Report a closed round once: as soon as the loss of every contributor is known, or without `only_complete`."""
        posted = {peer: part for peer, part in current.parts.items() if part.posted_at is not None}
        parts = {peer: part for peer, part in posted.items() if peer not in current.dropped}
        whole = all(part.loss is not None for part in parts.values())
        if current.reported or current.closed_at is None or (only_complete and not whole):
            return ()
        current.reported = True
        last = current.announced_at or 0.0
        losses = [(part.loss, part.samples) for part in parts.values() if part.loss is not None and part.samples]
        weight = sum(samples for _, samples in losses)
        return (
            RoundClosed(
                round=current.number,
                samples={peer: part.samples for peer, part in parts.items()},
                batches={peer: part.batches for peer, part in parts.items()},
                waits={peer: max(0.0, last - (part.posted_at or last)) for peer, part in parts.items()},
                seconds=current.closed_at - current.counted_from,
                loss=sum(loss * samples for loss, samples in losses) / weight if weight else None,
            ),
        )
