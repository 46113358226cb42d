"""Workers that a job holds, and what each does about its rounds. Pure; called by `rounds`.

A worker is PREPARING until it has joined a round, JOINED until it has reported a batch of it, and TRAINING from then
on. One that was late is AWAY until it reports in the open round or joins again. A round waits for TRAINING ones only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import EmitEvent
from hypha_scheduler.strategies.diloco.batch_allocation import ThroughputEstimate
from hypha_scheduler.strategies.diloco.events import continued_event, member_event
from hypha_scheduler.strategies.diloco.open_round import Round
from hypha_scheduler.strategies.diloco.round_effects import Overdue
from hypha_scheduler.strategies.silence import low_median, recent

MAX_MISSED: Final = 3
"""Number of rounds in succession that went on without a worker, after which it is replaced."""


class Standing(Enum):
    """What the open round may expect of a worker."""

    PREPARING = "preparing"
    """Nothing: its executor starts, or waits for the round with which it begins."""
    JOINED = "joined"
    """Nothing yet: it may begin with its round, and fetches weights and samples."""
    TRAINING = "training"
    """Its update."""
    AWAY = "away"
    """Nothing: a round went on without it, and it has not come back."""


@dataclass(slots=True)
class Rhythm:
    """Durations in seconds between reports of one worker in this run."""

    batches: deque[float] = field(default_factory=recent)
    """Last intervals between reports of batches, of which one may state several; the first one, a warm-up, is replaced
    by the second."""
    sendings: deque[float] = field(default_factory=recent)
    """Last times from the report that it sends its update to the statement of the update."""
    deliveries: deque[float] = field(default_factory=recent)
    """Last times from the report of the last batch to the arrival of the update at the parameter server."""
    merges: deque[float] = field(default_factory=recent)
    """Last times from the end of a round to its report that it has merged the outer update."""
    evaluated_merges: deque[float] = field(default_factory=recent)
    """The same after rounds whose weights are evaluated, which some executors do before they report."""
    is_warm: bool = False
    usual_interval: float = 0.0
    """Median of the last intervals between reports of batches; 0 if there is none."""
    usual_delivery: float = 0.0
    """Median of the last deliveries of updates; 0 if there is none."""

    def batch_took(self, seconds: float) -> None:
        """Note an interval between two reports of batches; none passes between those that arrive at one moment."""
        if seconds <= 0.0:
            return
        if not self.is_warm and self.batches:
            self.batches.clear()
            self.is_warm = True
        self.batches.append(seconds)
        self.usual_interval = low_median(self.batches)

    def delivery_took(self, seconds: float) -> None:
        """Note the time from the last batch to the arrival of the update."""
        self.deliveries.append(seconds)
        self.usual_delivery = low_median(self.deliveries)

    @property
    def longest_batch(self) -> float:
        """Longest of the last intervals between batches; 0 if there is none."""
        return max(self.batches, default=0.0)


@dataclass(slots=True)
class RoundMember:
    """One worker of a job."""

    round: int = 1
    """Round that it is in, or was in last; that of its task as long as it is PREPARING."""
    standing: Standing = Standing.TRAINING
    since: float = 0.0
    """Time since which it has this standing."""
    seen_at: float = 0.0
    """Time of its last sign of life."""
    throughput: ThroughputEstimate = field(default_factory=ThroughputEstimate)
    rhythm: Rhythm = field(default_factory=Rhythm)
    has_trained: bool = False
    """Whether it has reported a batch in this run."""
    joins: bool = False
    """Whether its executor asks with which round it begins."""
    asked_in: int | None = None
    """Round that was open when it asked so, if it waits for the answer."""
    done: bool = False
    drains: bool = False
    """Whether its worker has announced that it will end."""
    missed: int = 0
    """Number of rounds in succession that were closed without its update."""
    waited: float = 0.0
    """Seconds for which its last round has waited for it in vain."""
    is_suspected: bool = False
    is_overdue: bool = False
    """Whether its replacement was asked for."""

    def change(self, standing: Standing, now: float) -> None:
        """Change its standing."""
        self.standing, self.since, self.seen_at = standing, now, now
        self.is_suspected = self.is_overdue = False

    def heard(self, now: float) -> None:
        """Note a sign of life."""
        self.seen_at, self.is_suspected = max(now, self.seen_at), False

    def postpone(self, seconds: float, before: float) -> None:
        """Move the times up to `before` from which deadlines count."""
        self.since += seconds if self.since <= before else 0.0
        self.seen_at += seconds if self.seen_at <= before else 0.0


@dataclass(slots=True)
class Roster:
    """The workers of a job."""

    minimum: int
    """Number of workers without which the job pauses."""
    members: dict[PeerId, RoundMember]

    def expected(self, current: Round) -> list[PeerId]:
        """Return the members whose updates belong to a round."""
        return [
            peer
            for peer, member in self.members.items()
            if peer not in current.dropped
            and (current.has_posted(peer) or (member.standing is Standing.TRAINING and member.round <= current.number))
        ]

    def missing(self, current: Round) -> list[PeerId]:
        """Return the members for whose updates a round waits."""
        return [peer for peer in self.expected(current) if not current.has_posted(peer)]

    def least(self, current: Round | None) -> int:
        """Return how many members a round needs: fewer if updates of others were refused in it."""
        return max(1, self.minimum - (0 if current is None else len(current.refused)))

    def present(self, number: int, current: Round | None) -> list[PeerId]:
        """Return the workers that can take part in the open round; `current` is None before the first report in it."""
        has_begun = current is None or current.has_begun
        dropped = set() if current is None else current.dropped
        return [
            peer
            for peer, member in self.members.items()
            if peer not in dropped
            and (
                (current is not None and current.has_posted(peer))
                or member.standing is Standing.TRAINING
                or (member.standing is Standing.JOINED and member.round == number)
                or (member.standing is Standing.PREPARING and not has_begun)
            )
        ]

    def lacks_workers(self, number: int, current: Round | None) -> bool:
        """Return whether the open round has too few workers that can take part in it."""
        return len(self.present(number, current)) < self.least(current)

    def may_begin(self, peer: PeerId, current: Round | None) -> bool:
        """Return whether a worker has joined the open round, and has reported no batch of it."""
        member = self.members.get(peer)
        if member is None or current is None or member.round != current.number or current.announced_at is not None:
            return False
        part = current.parts.get(peer)
        if peer in current.dropped or (part is not None and (part.batches or part.posted_at is not None)):
            return False
        begins = member.standing is Standing.TRAINING and current.is_first and not member.has_trained
        return begins or member.standing is Standing.JOINED

    def can_join(self, peer: PeerId, current: Round) -> bool:
        """Return whether a worker may begin with the open round."""
        if current.announced_at is not None or peer in current.refused or current.has_posted(peer):
            return False
        asked_in = self.members[peer].asked_in
        if asked_in is not None and asked_in < current.number:
            return True
        others = [other for other in self.missing(current) if other != peer]
        return not current.has_begun or not others or self.lacks_workers(current.number, current)

    def count_asking(self) -> int:
        """Return how many workers wait for the answer with which round they begin."""
        return sum(
            member.standing is Standing.PREPARING and member.asked_in is not None for member in self.members.values()
        )

    def leave_out_joiners(self, current: Round, now: float) -> None:
        """Go on without workers that have joined a round and have reported no batch of it."""
        for peer, member in self.members.items():
            if member.standing is Standing.JOINED and member.round <= current.number:
                current.dropped.add(peer)
                member.change(Standing.AWAY, now)

    def leave_out_unfinished(self, current: Round, now: float) -> None:
        """Go on without workers that train in a round which is closed, from updates that were announced before."""
        for peer, member in self.members.items():
            is_in = member.standing in (Standing.TRAINING, Standing.JOINED) and member.round <= current.number
            if is_in and not current.has_posted(peer) and peer not in current.dropped:
                current.dropped.add(peer)
                member.change(Standing.AWAY, now)

    def count_missed(self, current: Round) -> tuple[Overdue, ...]:
        """Count the rounds that went on without workers, and ask for others in place of those that miss too many."""
        effects: list[Overdue] = []
        for peer, member in self.members.items():
            if current.has_posted(peer) and peer not in current.dropped:
                member.missed = 0
            elif member.standing is Standing.AWAY:
                member.missed += 1
            if member.standing is Standing.AWAY and member.missed >= MAX_MISSED and not member.is_overdue:
                member.is_overdue = True
                effects.append(Overdue(peer, f"{member.missed} rounds in succession went on without it"))
        return tuple(effects)


@dataclass(slots=True)
class RoundPause:
    """Whether the open round waits, for want of workers or of a parameter server, and why."""

    roster: Roster
    server_gone: str | None = None
    """Why there is no parameter server; None if there is one."""
    last_change: str = "workers are missing"
    """What happened last to a worker, which is the reason if there are too few now."""
    reason: str | None = None
    """Why the open round waits; None if it does not."""
    began_at: float = 0.0
    """Time at which it began to wait."""

    def why(self, number: int, current: Round | None) -> str | None:
        """Return why the open round has to wait; None if it need not. `current` is None before it has begun."""
        if self.server_gone is not None:
            return f"there is no parameter server: {self.server_gone}"
        if (current is not None and current.announced_at is not None) or not self.roster.lacks_workers(number, current):
            return None
        count, least = len(self.roster.present(number, current)), self.roster.least(current)
        return f"{self.last_change}; {count} of at least {least} remain"

    def set(self, why: str | None, now: float) -> EmitEvent | None:
        """Begin or end a pause; return the event that tells of it."""
        before, self.reason = self.reason, why
        if why is not None:
            self.began_at = now if before is None else self.began_at
            return None if why == before else member_event("paused", why)
        return None if before is None else continued_event(now - self.began_at, "what it waited for is there")
