"""Leases held for one job: when each is due for renewal, and when it expires. Pure; clock and randomness are passed in.

`allocator` adds leases and `renewal` renews those that are due and reports to `jobs.lease_pool` those that are lost.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_AT, RENEWED_LEASE

RETRY_PAUSE: Final = 0.5
"""Seconds between attempts to renew a lease."""
JITTER: Final = (0.9, 1.1)
"""Bounds of the factor by which the time until each renewal is multiplied, so that those of many leases spread out."""


@dataclass(slots=True)
class HeldLease:
    """Lease that a scheduler holds at a worker."""

    lease: uuid.UUID
    peer: PeerId
    due: float
    """Time of the next renewal."""
    expires: float
    """Time at which the worker may drop it."""
    in_flight: bool = False
    """Whether a renewal is in progress."""


class HeldLeases:
    """Leases of one job.

    A lease's life counts from the moment at which the renewal was sent, so that it is never assumed to last longer
    than at the worker.
    """

    def __init__(
        self, random: Random | None = None, on_gone: Callable[[uuid.UUID], None] = lambda _lease: None
    ) -> None:
        """Start without leases; the times of renewals are drawn from `random`.

        `on_gone` is called with each lease that is dropped or expires.
        """
        self._random = random or Random()
        self._on_gone = on_gone
        self._held: dict[uuid.UUID, HeldLease] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease: object) -> bool:
        return lease in self._held

    def get(self, lease: uuid.UUID) -> HeldLease | None:
        """Return a lease, or None if it is not held."""
        return self._held.get(lease)

    def held(self) -> tuple[HeldLease, ...]:
        """Return all leases."""
        return tuple(self._held.values())

    def record_renewal(self, lease: uuid.UUID, peer: PeerId, asked_at: float, life: float = RENEWED_LEASE) -> None:
        """Record a successful renewal that was sent at `asked_at`; the lease lasts `life` seconds from then."""
        due = asked_at + RENEW_AT * life * self._random.uniform(*JITTER)
        self._held[lease] = HeldLease(lease, peer, due, asked_at + life)

    def begin_renewals(self, now: float) -> tuple[HeldLease, ...]:
        """Return the leases to renew now; each is in flight until `record_renewal`, `schedule_retry` or `drop`."""
        due = tuple(h for h in self._held.values() if h.due <= now < h.expires and not h.in_flight)
        for held in due:
            held.in_flight = True
        return due

    def schedule_retry(self, lease: uuid.UUID, now: float) -> None:
        """Schedule another renewal attempt after one that got no response."""
        held = self._held.get(lease)
        if held is not None:
            held.in_flight = False
            held.due = now + RETRY_PAUSE

    def check(self, lease: uuid.UUID, now: float) -> None:
        """Renew a lease now, because its worker may have ended."""
        held = self._held.get(lease)
        if held is not None and not held.in_flight:
            held.due = now

    def drop(self, lease: uuid.UUID) -> HeldLease | None:
        """Remove and return a lease that was released or that the worker no longer has; None if it was not held."""
        held = self._held.pop(lease, None)
        if held is not None:
            self._on_gone(lease)
        return held

    def expire(self, now: float) -> tuple[HeldLease, ...]:
        """Remove and return the expired leases."""
        gone = tuple(held for held in self._held.values() if held.expires <= now)
        for held in gone:
            self.drop(held.lease)
        return gone
