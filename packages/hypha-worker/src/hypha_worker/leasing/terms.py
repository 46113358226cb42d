"""The owner's terms for leases: how long offers and idle leases last, and how much one scheduler may hold.

Plain data, built by `config`. `leasing.lease_manager` applies the durations and counts, `bidding.rejection` compares
the counts with the quota before an offer is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hypha_proto.leases import TEMPORARY_LEASE

MAX_TEMPORARY_LEASE: Final = 2.0
"""Longest life of an offer's temporary lease in seconds, on the longest link."""
MAX_DRAIN: Final = 7 * 24 * 3600.0
"""Longest time in seconds that running jobs may have to end."""
IDLE_LEASE: Final = 60.0
"""Seconds for which a lease may be held without a job."""
MAX_ORPHAN_GRACE: Final = 7 * 24 * 3600.0
"""Largest time in seconds that a worker's owner may allow for it."""
ORPHAN_GRACE: Final = 120.0
"""Longest time in seconds for which a job may run on, and its lease is held, without renewals."""


@dataclass(frozen=True, slots=True)
class LeaseUsage:
    """What one scheduler has of a worker at present."""

    offers: int = 0
    """Live offers, not accepted yet."""
    leases: int = 0
    """Accepted offers whose resources are not free again."""
    jobs: int = 0
    """Jobs that still have processes."""
    lapsed: int = 0
    """Recent offers that it neither accepted nor declined."""

    @property
    def reservations(self) -> int:
        """Offers and leases together."""
        return self.offers + self.leases

    @property
    def claims(self) -> int:
        """What it has had its share by: offers and leases, and the resources that lapsed offers kept from others."""
        return self.reservations + self.lapsed


@dataclass(frozen=True, slots=True)
class ReachedLimit:
    """A limit of `Quota` that one scheduler has reached."""

    key: str
    """Its key in the table ``[offer]``."""
    used: int
    limit: int


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits for each scheduler; None is no limit."""

    max_offers: int | None = None
    max_leases: int | None = None
    """Limit of leases; a live offer counts too, because it may be accepted at any moment."""
    max_jobs: int | None = None

    def reached(self, usage: LeaseUsage) -> tuple[ReachedLimit, ...]:
        """Return every limit that a scheduler with this usage has reached."""
        limits = (
            ("max_offers", usage.offers, self.max_offers),
            ("max_leases", usage.reservations, self.max_leases),
            ("max_jobs", usage.jobs, self.max_jobs),
        )
        return tuple(
            ReachedLimit(key, used, limit) for key, used, limit in limits if limit is not None and used >= limit
        )


NO_QUOTA: Final = Quota()


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Durations in seconds, and the quota of each scheduler."""

    temporary_lease: float = TEMPORARY_LEASE
    """Life of an offer on a link without delay."""
    idle_lease: float = IDLE_LEASE
    """Time without a job after which a lease ends."""
    quota: Quota = NO_QUOTA
    orphan_grace: float = ORPHAN_GRACE
    """Most time after its expiry for which a lease is held for its running job; 0 is none."""

    def offer_life(self, round_trip: float | None) -> float:
        """Return the life of an offer on a link with this round trip; None counts as none.

        The scheduler's answer is at least a round trip away, and it needs another one to renew.
        """
        return min(MAX_TEMPORARY_LEASE, self.temporary_lease + 2 * (round_trip or 0.0))
