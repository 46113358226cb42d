"""Allocation of a round's batches to its members, by their throughput. Pure; called by `rounds`.

Batches are allocated so that all updates arrive at about the same time, but never more than the round lacks beyond what
others may train by what they were told. A worker that has trained its last batch gets what is left, so a round ends
with its target, whatever was forecast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.diloco.batch_allocation import WorkerProgress, allocate_batches
from hypha_scheduler.strategies.diloco.members import Roster
from hypha_scheduler.strategies.diloco.open_round import Round, RoundShare
from hypha_scheduler.strategies.diloco.round_effects import RoundSettings

DECIDED_SHARE: Final = 0.5
"""Fraction of a round's target after which batches are allocated even if some worker's throughput is unknown."""
_MIN_CHANGE: Final = 0.2
"""A worker's allocation is changed only if it is off by more than this fraction and by more than one batch."""
_MIN_FIRST: Final = 0.5
"""A worker's first allocation in a round waits until others have given up this fraction of what it is to be."""


@dataclass(frozen=True, slots=True)
class RoundAllocation:
    """Allocates the batches of one job's rounds; a suspected worker gets none."""

    settings: RoundSettings
    roster: Roster

    def allocate(self, peer: PeerId, current: Round, now: float) -> int | None:
        """Return how many more batches a worker processes; None if that is not known yet, or stays as it was."""
        part = current.part(peer)
        counted = [peer for peer in self.roster.expected(current) if not self.roster.members[peer].is_suspected]
        is_final = part.is_settled or (part.remaining == 0 and not part.asks)
        if is_final or not self._is_possible(current, counted):
            return None
        workers = [self._progress(current, other, now, is_asking=other == peer) for other in counted]
        others = sum(part.samples for part in current.parts.values()) - sum(worker.done for worker in workers)
        allocation = allocate_batches(workers, self.settings.target - others)
        current.finish = max(allocation.finish, now)  # without batches left, the forecast may be in the past
        wanted = allocation.batches[peer]
        count = self._bounded(peer, current, allocation.batches)
        if not self._is_worth_telling(part, current, wanted, count):
            return None
        part.allocate(count)
        return count

    def _bounded(self, peer: PeerId, current: Round, batches: Mapping[PeerId, int]) -> int:
        """Return how many batches a worker is to train: no more than before if others may train all that is missing.

        `batches` would let all updates arrive together. Those that were told nothing yet share what others leave.
        """
        part, wanted = current.part(peer), batches[peer]
        if part.remaining is not None and wanted <= part.remaining:
            return wanted
        others = [(current.part(other), count) for other, count in batches.items() if other != peer]
        untold = sum(count for other, count in others if other.remaining is None)
        told = sum(other.promised for other, _ in others if other.posted_at is None and other.remaining is not None)
        missing = self.settings.target - sum(part.samples for part in current.parts.values())
        room = math.ceil(missing / self.settings.batch_size) - told
        if part.remaining is not None:
            return max(part.remaining, min(wanted, room - untold))
        return max(0, min(wanted, math.ceil(room * wanted / max(1, wanted + untold))))

    def _is_worth_telling(self, part: RoundShare, current: Round, wanted: int, count: int) -> bool:
        """Return whether a worker is told of `count` batches, where `wanted` would let all updates arrive together."""
        if part.remaining is None:
            return count >= _MIN_FIRST * wanted
        if part.remaining == 0:  # a single batch is left to another worker, if one trains still
            others = [other for other in current.parts.values() if other is not part]
            return count > 1 or (count == 1 and all(other.is_trained for other in others))
        return abs(count - part.remaining) > max(1.0, _MIN_CHANGE * part.remaining)

    def _is_possible(self, current: Round, counted: Sequence[PeerId]) -> bool:
        done = sum(part.samples for part in current.parts.values())
        if done >= DECIDED_SHARE * self.settings.target:
            return True
        in_flight = sum(current.part(peer).posted_at is None for peer in counted) * self.settings.batch_size
        return done + in_flight >= self.settings.target or all(
            self.roster.members[peer].throughput.known for peer in counted
        )

    def _progress(self, current: Round, peer: PeerId, now: float, *, is_asking: bool) -> WorkerProgress:
        part, member = current.part(peer), self.roster.members[peer]
        size, per_sample = self.settings.batch_size, member.throughput.seconds_per_sample
        since = now if part.last_at is None else part.last_at
        seconds = None
        if per_sample is not None:
            seconds = per_sample * size
            if part.remaining is not None:  # an overdue report is better evidence than earlier batches
                seconds += max(0.0, now - since - max(seconds, member.rhythm.longest_batch))
        return WorkerProgress(
            peer=peer,
            batch_size=size,
            done=part.samples,
            batch_seconds=seconds,
            next_at=since + (seconds or 0.0),
            min_batches=0 if part.batches else 1,
            is_finished=part.posted_at is not None or (part.remaining == 0 and not is_asking),
            delivery_seconds=member.rhythm.usual_delivery,
        )
