"""Slots of training workers: member numbers and shares of the evaluation data, as workers come and go. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypha_proto.ids import PeerId


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one worker in a job."""

    member: int
    """Number of the worker in the job, from 0; never given to another one."""
    share: int | None
    """Which share of the evaluation samples it evaluates, from 0; None if all shares are taken."""


@dataclass(slots=True)
class Slots:
    """Slots of the workers of one job."""

    shares: int
    """Number of shares of the evaluation samples, the job's `num_workers`."""
    next_member: int = 0
    """Lowest member number that was never given away."""
    held: dict[PeerId, Slot] = field(default_factory=dict)
    """A worker that is removed frees its share; its number stays unused."""

    def add(self, peer: PeerId) -> Slot:
        """Give a worker a new member number and the lowest free share; one that has a slot keeps it."""
        return self.held.get(peer) or self.restore(peer, self.next_member)

    def restore(self, peer: PeerId, member: int) -> Slot:
        """Give a worker the member number that it had in an earlier run of the scheduler, and the lowest free share."""
        taken = {slot.share for other, slot in self.held.items() if other != peer}
        share = next((number for number in range(self.shares) if number not in taken), None)
        self.held[peer] = slot = Slot(member, share)
        self.next_member = max(self.next_member, member + 1)
        return slot
