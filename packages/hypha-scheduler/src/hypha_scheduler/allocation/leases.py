"""What this scheduler holds: leases, when each must be renewed, and when it is lost. Pure; the clock is passed in.

`auction` takes leases, `lease_keeper` renews what this ledger says is due, and `training` hears what was lost.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_AT, RENEWED_LEASE

RETRY_PAUSE: Final = 0.5
"""Seconds between attempts to reach a peer whose lease is due."""


@dataclass(slots=True)
class HeldLease:
    """One lease of this scheduler."""

    lease: uuid.UUID
    peer: PeerId
    due: float
    """When it is to be renewed (again)."""
    expires: float
    """When the worker may drop it."""
    in_flight: bool = False


class HeldLeases:
    """All leases of one job. A life is counted from when the renewal was *asked for*, so it never ends too late."""

    def __init__(self) -> None:
        """Hold nothing."""
        self._held: dict[uuid.UUID, HeldLease] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease: object) -> bool:
        return lease in self._held

    def held(self) -> tuple[HeldLease, ...]:
        """Every lease."""
        return tuple(self._held.values())

    def record_renewal(self, lease: uuid.UUID, peer: PeerId, asked_at: float, life: float = RENEWED_LEASE) -> None:
        """A renewal that was asked for at `asked_at` succeeded: the lease is ours for `life` seconds from then."""
        self._held[lease] = HeldLease(lease, peer, asked_at + RENEW_AT * life, asked_at + life)

    def next_due(self) -> float | None:
        """When something is to be done: a renewal, or an expiry."""
        times = [held.expires if held.in_flight else min(held.due, held.expires) for held in self._held.values()]
        return min(times, default=None)

    def begin_renewals(self, now: float) -> tuple[HeldLease, ...]:
        """Leases to renew now; each is in flight until `take`, `failed` or `unanswered`."""
        due = tuple(h for h in self._held.values() if h.due <= now < h.expires and not h.in_flight)
        for held in due:
            held.in_flight = True
        return due

    def schedule_retry(self, lease: uuid.UUID, now: float) -> None:
        """The peer could not be asked: try again soon, as long as the lease lives."""
        held = self._held.get(lease)
        if held is not None:
            held.in_flight = False
            held.due = now + RETRY_PAUSE

    def drop(self, lease: uuid.UUID) -> HeldLease | None:
        """The lease is released, or the worker says that it is gone. Returns it if it was held."""
        return self._held.pop(lease, None)

    def expire(self, now: float) -> tuple[HeldLease, ...]:
        """Drop and return the leases whose life is over."""
        gone = tuple(held for held in self._held.values() if held.expires <= now)
        for held in gone:
            del self._held[held.lease]
        return gone
