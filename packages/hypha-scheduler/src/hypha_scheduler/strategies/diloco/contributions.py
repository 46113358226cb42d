"""Updates of the rounds that are not committed: what each was computed from, and why some do not count. Pure.

The worker of an executor states its update to the scheduler before it is sent to the parameter server
(`hypha_proto.contributions`); the update of a worker that states nothing is known by its batches only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.contributions import MAX_RANGES, OPTIMIZER_KEPT, OPTIMIZER_RESET, Contribution, StateContribution
from hypha_proto.ids import PeerId
from hypha_proto.texts import quote
from hypha_scheduler.strategies.diloco.records import ContributedRecord, UnusedRecord
from hypha_scheduler.strategies.diloco.sample_ledger import ALL, SampleSpan

MAX_REFUSALS: Final = 3
"""Number of refused updates with which a worker is excluded from the job."""


@dataclass(slots=True)
class Contributions:
    """Updates of the rounds that are not committed, and refusals."""

    refusals: Counter[PeerId] = field(default_factory=Counter)
    """Number of refused updates of each worker."""
    _updates: dict[tuple[int, PeerId], ContributedRecord] = field(default_factory=dict)
    refused: set[tuple[int, PeerId]] = field(default_factory=set)
    """Rounds of which no further update of a worker is taken."""
    unused: list[UnusedRecord] = field(default_factory=list)
    """Updates that do not count, for the next record."""

    def add(self, update: ContributedRecord) -> None:
        """Add the update of a worker, in place of an earlier one of the round."""
        self._updates[update.round, update.worker] = update

    def get(self, peer: PeerId, number: int) -> ContributedRecord | None:
        """Return the update of a worker in a round; None if it has none that may count."""
        return self._updates.get((number, peer))

    def rounds_of(self, peer: PeerId) -> list[int]:
        """Return the rounds in which a worker has an update that may count."""
        return [number for number, member in self._updates if member == peer]

    def is_over(self, peer: PeerId, number: int) -> bool:
        """Return whether another statement of a worker in a round is refused without looking at it."""
        return (number, peer) in self.refused or self.refusals[peer] >= MAX_REFUSALS

    def refuse(self, peer: PeerId, number: int) -> None:
        """Count a refused update."""
        self.refused.add((number, peer))
        self.refusals[peer] += 1

    def discard(self, peer: PeerId, number: int, why: str) -> None:
        """Note that the update of a worker, if there is one, does not count."""
        if (found := self._updates.pop((number, peer), None)) is not None:
            unused = UnusedRecord(peer=peer, why=why, ranges=found.ranges, contribution=found.contribution)
            self.unused.append(unused)

    def close(self, number: int, members: Collection[PeerId], why: str) -> list[ContributedRecord]:
        """Return the updates of `members` in a round that is committed, in their order; all others do not count."""
        found = [self._updates.pop((number, peer)) for peer in members if (number, peer) in self._updates]
        for earlier, peer in [key for key in self._updates if key[0] <= number]:
            self.discard(peer, earlier, why)
        self.refused = {key for key in self.refused if key[0] > number}
        return found


def spans_of(contribution: Contribution | None) -> tuple[SampleSpan, ...] | None:
    """Return the samples that an executor states; None if it states nothing."""
    if contribution is None:
        return None
    return tuple(SampleSpan(part.epoch, part.slice, part.first, part.end) for part in contribution.ranges)


def find_fault(message: StateContribution, number: int, weights: str | None) -> str | None:
    """Return what is wrong with a statement, apart from its samples; None if nothing is.

    Args:
        message: the statement.
        number: round of the worker.
        weights: digest of the weights with which the round began, if it is known.
    """
    if message.round != number:
        return f"it is of round {message.round}, and this worker is in round {number}"
    stated = message.contribution
    if stated is None:
        return None
    if stated.round != message.round:
        return f"the executor states round {stated.round}, its worker round {message.round}"
    if stated.update != message.update:
        return f"the executor states an update with digest {stated.update}, its worker one with {message.update}"
    if weights is not None and stated.weights != weights:
        return f"it began from weights with digest {stated.weights}; those of round {number} have {weights}"
    if stated.optimizer not in (OPTIMIZER_KEPT, OPTIMIZER_RESET):
        return f"its optimizer {quote(stated.optimizer)} is neither {OPTIMIZER_KEPT!r} nor {OPTIMIZER_RESET!r}"
    if stated.batch_size == 0:
        return "its batch_size is 0"
    if any(part.end >= ALL for part in stated.ranges):
        return f"a range ends at {ALL} or later: state how many samples were used"
    if len(stated.ranges) > MAX_RANGES:
        return f"{len(stated.ranges)} ranges are over the limit of {MAX_RANGES}"
    return None
