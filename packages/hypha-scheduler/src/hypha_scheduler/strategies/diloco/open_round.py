"""State of one round, from the first report in it to the record of its outer update. Pure; called by `rounds`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.diloco.round_effects import RoundClosed


@dataclass(slots=True)
class RoundShare:
    """Part of one worker in one round."""

    last_at: float | None = None
    """Time at which its last batch was reported, or its first one began."""
    samples: int = 0
    batches: int = 0
    reported: int = 0
    """Number of batches that its executor need not report again; those before a restart of the scheduler included."""
    remaining: int | None = None
    """Number of further batches allocated to it; None before the allocation."""
    promised: int = 0
    """Number of further batches that it may train by what it was told: more than `remaining` as long as it may not have
    heard of fewer."""
    asks: bool = False
    """Whether its executor waits at its last batch for the answer, and trains on if that allocates more."""
    is_settled: bool = False
    """Whether its executor was told that this is all it trains, and waits for no answer at its last batch."""
    sending_at: float | None = None
    """Time at which its executor reported that it sends its update; its worker may still have to state it."""
    posted_at: float | None = None
    """Time at which its update was under way, and its samples final."""
    delivered_at: float | None = None
    """Time at which its executor reported that its update has arrived at the parameter server."""
    loss: float | None = None
    """Mean loss; None until it is reported, NaN if no sample had a label."""

    @property
    def is_trained(self) -> bool:
        """Whether it trains no more batches in the round."""
        return self.posted_at is not None or (self.remaining == 0 and self.promised == 0)

    def count_batches(self, count: int, samples: int, left: int | None) -> None:
        """Count reported batches.

        Args:
            count: their number.
            samples: samples in them.
            left: how many more its executor will train as far as it knows; None if it does not state it.
        """
        self.batches += count
        self.samples += samples
        self.remaining = None if self.remaining is None else max(0, self.remaining - count)
        allocated, promised = self.remaining or 0, max(0, self.promised - count)
        self.promised = allocated if left is None else max(allocated, min(promised, left))
        self.asks = left is not None

    def post(self, now: float, counts: tuple[int, int] | None) -> None:
        """Note that its update is under way: of how many samples and batches, if that is stated."""
        self.posted_at = now if self.posted_at is None else self.posted_at
        self.samples, self.batches = counts or (self.samples, self.batches)
        self.remaining = self.promised = 0

    def allocate(self, count: int) -> None:
        """Allocate further batches to it."""
        self.remaining, self.promised = count, max(self.promised, count) if self.asks else count

    def note_delivery(self, now: float) -> bool:
        """Note that its update has arrived; return whether that is news, and the time of its last batch is known."""
        if self.posted_at is None or self.delivered_at is not None:
            return False
        self.delivered_at = now
        return self.last_at is not None and now >= self.last_at

    def postpone(self, seconds: float, before: float) -> None:
        """Move the times up to `before`."""
        self.last_at = _moved(self.last_at, seconds, before)
        self.sending_at = _moved(self.sending_at, seconds, before)
        self.posted_at = _moved(self.posted_at, seconds, before)
        self.delivered_at = _moved(self.delivered_at, seconds, before)


def _moved(at: float | None, seconds: float, before: float) -> float | None:
    return at if at is None or at > before else at + seconds


@dataclass(slots=True)
class Round:
    """One round."""

    number: int
    began_at: float
    is_first: bool = False
    """Whether it is the first of this run."""
    trains_at: float | None = None
    """Time at which the first batch of the job began, if in this round; before that, executors were starting."""
    parts: dict[PeerId, RoundShare] = field(default_factory=dict)
    dropped: set[PeerId] = field(default_factory=set)
    """Members that were late or whose update was refused."""
    refused: set[PeerId] = field(default_factory=set)
    """Those of them whose update was refused, or did not arrive."""
    finish: float | None = None
    """Forecast of the time at which the last batch is complete."""
    announced_at: float | None = None
    """Time at which the members were announced, the last time if one was lost or refused afterwards; None while the
    round needs other members, or another parameter server."""
    was_announced: bool = False
    """Whether its members were announced at any time, or its step was taken."""
    announced: tuple[tuple[PeerId, int], ...] = ()
    """Members that were announced last, which a parameter server may have averaged."""
    is_outdated: bool = False
    """Whether a member was withdrawn since the last announcement."""
    closed_at: float | None = None
    """Time of the outer step."""
    reported: bool = False
    """Whether `RoundClosed` was returned."""

    def postpone(self, seconds: float, before: float = math.inf) -> None:
        """Move the times up to `before`, and the forecast."""
        self.began_at = _moved(self.began_at, seconds, before) or 0.0
        self.trains_at = _moved(self.trains_at, seconds, before)
        self.finish = None if self.finish is None else self.finish + seconds
        self.announced_at = _moved(self.announced_at, seconds, before)
        self.closed_at = _moved(self.closed_at, seconds, before)
        for part in self.parts.values():
            part.postpone(seconds, before)

    @property
    def counted_from(self) -> float:
        """Time from which the duration of the round counts."""
        return self.began_at if self.trains_at is None else self.trains_at

    @property
    def has_begun(self) -> bool:
        """Whether a worker has trained in it, or in an earlier round of this run or of the one before."""
        return not self.is_first or any(part.batches or part.posted_at is not None for part in self.parts.values())

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

    def part(self, peer: PeerId) -> RoundShare:
        """Return the part of a worker, empty if it has none yet."""
        part = self.parts.get(peer)
        return self.parts.setdefault(peer, RoundShare()) if part is None else part

    def has_posted(self, peer: PeerId) -> bool:
        """Return whether the update of a worker is under way."""
        part = self.parts.get(peer)
        return part is not None and part.posted_at is not None

    def withdraw(self, peer: PeerId) -> None:
        """Take a worker from the announced members: the parameter server does not have its update."""
        self.announced = tuple(member for member in self.announced if member[0] != peer)
        self.is_outdated = True

    def announce(self, members: tuple[tuple[PeerId, int], ...], now: float) -> None:
        """Note that its members are announced."""
        self.announced, self.announced_at, self.was_announced, self.is_outdated = members, now, True, False

    def close(self, *, only_complete: bool) -> tuple[RoundClosed, ...]:
        """Report a closed round once: as soon as the loss of every contributor is known, or without `only_complete`."""
        posted = {peer: part for peer, part in self.parts.items() if part.posted_at is not None}
        parts = {peer: part for peer, part in posted.items() if peer not in self.dropped}
        whole = all(part.loss is not None for part in parts.values())
        if self.reported or self.closed_at is None or (only_complete and not whole):
            return ()
        self.reported = True
        last = self.announced_at or 0.0
        return (
            RoundClosed(
                round=self.number,
                samples={peer: part.samples for peer, part in parts.items()},
                batches={peer: part.batches for peer, part in parts.items()},
                waits={peer: max(0.0, last - (part.posted_at or last)) for peer, part in parts.items()},
                seconds=self.closed_at - self.counted_from,
                loss=mean_loss(parts.values()),
            ),
        )


def mean_loss(parts: Iterable[RoundShare]) -> float | None:
    """Return the mean loss of those that have reported one, weighted by samples."""
    losses = [(part.loss, part.samples) for part in parts if part.loss is not None and part.samples]
    losses = [(loss, samples) for loss, samples in losses if math.isfinite(loss)]
    weight = sum(samples for _, samples in losses)
    return sum(loss * samples for loss, samples in losses) / weight if weight else None
