"""Slots of training workers: member numbers and shares of the evaluation data, as workers come and go. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hypha_proto.ids import PeerId


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one worker in a job."""

    member: int
    """Number of the worker in the job, from 0; never given to another one."""
    share: int | None
    """Which share of the evaluation samples it evaluates, from 0; None if all shares are taken."""


class Slots:
    """Slots of the workers of one job."""

    def __init__(self, shares: int, first_member: int = 0) -> None:
        """Start without workers.

        Args:
            shares: number of shares of the evaluation samples, the job's `num_workers`.
            first_member: lowest member number that was never given away.
        """
        self.shares = shares
        self._next = first_member
        self._slots: dict[PeerId, Slot] = {}

    def add(self, peer: PeerId) -> Slot:
        """Give a worker a new member number and the lowest free share; one that has a slot keeps it."""
        if (found := self._slots.get(peer)) is not None:
            return found
        return self.restore(peer, self._next)

    def restore(self, peer: PeerId, member: int) -> Slot:
        """Give a worker the member number that it had in an earlier run of the scheduler, and the lowest free share."""
        taken = {slot.share for other, slot in self._slots.items() if other != peer}
        share = next((number for number in range(self.shares) if number not in taken), None)
        self._slots[peer] = slot = Slot(member, share)
        self._next = max(self._next, member + 1)
        return slot

    def remove(self, peer: PeerId) -> None:
        """Free the share of a worker that is none any more; its number stays unused."""
        self._slots.pop(peer, None)

    def of(self, peer: PeerId) -> Slot | None:
        """Return the slot of a worker, or None if it has none."""
        return self._slots.get(peer)
