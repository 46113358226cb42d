"""Who holds which part of this machine, and until when. Pure: the clock is passed in, `service` runs the sweep.

Before this room: `offers` decides what to offer. After it: `jobs` runs on a lease that is held. A lease's resources
are free again when its job's processes are gone, not when its time is over.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from enum import Enum

from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEWED_LEASE, TEMPORARY_LEASE
from hypha_worker.leasing.capacity import Allocation, Capacity


class LeaseError(Exception):
    """A lease cannot be used as asked; the message says why."""


class LeaseState(Enum):
    """The life of a lease."""

    OFFERED = "offered"
    """An offer is out; the resources are kept for it."""
    HELD = "held"
    """A scheduler took it and renews it."""
    ENDING = "ending"
    """It is over, but its job's processes are not gone yet."""
    SPENT = "spent"
    """Its job has ended and its resources are free; it is known until it would have run out."""


@dataclass(slots=True)
class Lease:
    """A part of the machine for one scheduler."""

    id: uuid.UUID
    scheduler: PeerId
    request_id: uuid.UUID
    allocation: Allocation
    price: float
    expires: float
    """Seconds of the local monotonic clock."""
    state: LeaseState = LeaseState.OFFERED
    has_job: bool = False
    """Whether a job runs on it."""

    def remaining(self, now: float) -> float:
        """Seconds left."""
        return max(0.0, self.expires - now)


class LeaseManager:
    """All leases of one worker. Their resources never add up to more than the machine."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._leases: dict[uuid.UUID, Lease] = {}

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Every lease that is known."""
        return tuple(self._leases.values())

    @property
    def free(self) -> Capacity:
        """What no lease holds."""
        taken = (lease.allocation for lease in self._leases.values() if lease.state is not LeaseState.SPENT)
        return self._capacity.without(taken)

    @property
    def leased_requests(self) -> frozenset[uuid.UUID]:
        """Requests that are answered by a lease which still holds resources."""
        return frozenset(lease.request_id for lease in self._leases.values() if lease.state is not LeaseState.SPENT)

    def offer(
        self,
        lease_id: uuid.UUID,
        scheduler: PeerId,
        request_id: uuid.UUID,
        allocation: Allocation,
        price: float,
        now: float,
    ) -> Lease:
        """Keep `allocation` for an offer.

        Raises:
            LeaseError: it is not free, or the id is taken.
        """
        free = self.free
        if lease_id in self._leases:
            raise LeaseError(f"lease {lease_id} exists already")
        if not free.resources.covers(allocation.resources) or not set(allocation.devices) <= set(free.devices):
            raise LeaseError(f"{allocation.resources} is not free any more: free is {free.resources}")
        lease = Lease(lease_id, scheduler, request_id, allocation, price, now + TEMPORARY_LEASE)
        self._leases[lease_id] = lease
        return lease

    def renew(self, lease_id: uuid.UUID, scheduler: PeerId, now: float) -> Lease:
        """Hold a lease on; a spent one is confirmed but not prolonged.

        Raises:
            LeaseError: it is unknown, another scheduler's, or over.
        """
        lease = self._owned_lease(lease_id, scheduler)
        if now >= lease.expires or lease.state is LeaseState.ENDING:
            raise LeaseError(f"lease {lease_id} is over")
        if lease.state is not LeaseState.SPENT:
            lease.state = LeaseState.HELD
            lease.expires = now + RENEWED_LEASE
        return lease

    def attach_job(self, lease_id: uuid.UUID, scheduler: PeerId, now: float) -> Lease:
        """Put a job on a lease, which also takes an offer.

        Raises:
            LeaseError: the lease is unknown, another scheduler's, over, spent, or has a job.
        """
        lease = self._owned_lease(lease_id, scheduler)
        if lease.state is LeaseState.SPENT:
            raise LeaseError(f"lease {lease_id} is spent: its job has ended")
        self.renew(lease_id, scheduler, now)
        if lease.has_job:
            raise LeaseError(f"a job runs on lease {lease_id} already")
        lease.has_job = True
        return lease

    def detach_job(self, lease_id: uuid.UUID, *, keep: bool = False) -> None:
        """The job of a lease is gone with all its processes.

        Args:
            keep: the lease was not over and waits for another job, rather than give its resources back now.
        """
        lease = self._leases.get(lease_id)
        if lease is None or not lease.has_job:
            return
        lease.has_job = False
        if lease.state is LeaseState.ENDING:
            del self._leases[lease_id]
        elif not keep:
            lease.state = LeaseState.SPENT

    def release(self, lease_id: uuid.UUID, scheduler: PeerId) -> Lease:
        """End a lease. One that has a job keeps its resources until `detach_job`.

        Raises:
            LeaseError: it is unknown or another scheduler's.
        """
        lease = self._owned_lease(lease_id, scheduler)
        self._end(lease)
        return lease

    def cancel_offer(self, lease_id: uuid.UUID) -> None:
        """Take an offer back that could not be sent; one that was taken meanwhile stays."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.state is LeaseState.OFFERED:
            del self._leases[lease_id]

    def sweep(self, now: float) -> list[Lease]:
        """End what has run out; gives those whose jobs must be cancelled now."""
        expired = [lease for lease in self._leases.values() if now >= lease.expires]
        over = [lease for lease in expired if lease.state is not LeaseState.ENDING]
        for lease in over:
            self._end(lease)
        return [lease for lease in over if lease.has_job]

    def find(self, lease_id: uuid.UUID, scheduler: PeerId) -> Lease | None:
        """The lease if it is known and that scheduler's."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.scheduler == scheduler else None

    def _owned_lease(self, lease_id: uuid.UUID, scheduler: PeerId) -> Lease:
        lease = self.find(lease_id, scheduler)
        if lease is None:  # a stranger learns nothing about leases that are not its own
            raise LeaseError(f"{scheduler} has no lease {lease_id} here")
        return lease

    def _end(self, lease: Lease) -> None:
        if lease.has_job:
            lease.state = LeaseState.ENDING
        else:
            del self._leases[lease.id]
