"""Leases: which scheduler holds which part of this machine, and until when.

Pure: the clock is passed in. `bidding.bidder` reserves what it offers here, `service` renews, releases and sweeps, and
`jobs.job_manager` attaches jobs. A lease's resources are free again when its job's processes are gone, not when the
lease expires.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from enum import Enum

from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEWED_LEASE, TEMPORARY_LEASE
from hypha_proto.offers import ExecutorDescriptor
from hypha_worker.leasing.capacity import Allocation, Capacity


class LeaseError(Exception):
    """A lease cannot be used as requested; the message says why."""


class LeaseState(Enum):
    """The states of a lease."""

    OFFERED = "offered"
    """An offer was sent; its resources are reserved."""
    HELD = "held"
    """A scheduler accepted the offer and renews the lease."""
    ENDING = "ending"
    """It was released or has expired, but its job still has processes."""
    SPENT = "spent"
    """Its job has ended and its resources are free; it stays known until it expires."""


@dataclass(slots=True)
class Lease:
    """A part of the machine, reserved for one scheduler."""

    id: uuid.UUID
    scheduler: PeerId
    request_id: uuid.UUID
    allocation: Allocation
    price: float
    expires: float
    """Seconds of the local monotonic clock."""
    state: LeaseState = LeaseState.OFFERED
    has_job: bool = False
    """Whether a job is attached."""
    executors: tuple[ExecutorDescriptor, ...] = ()
    """The executors that its request asked for."""

    def remaining(self, now: float) -> float:
        """Return the seconds left."""
        return max(0.0, self.expires - now)


class LeaseManager:
    """All leases of one worker. Together they never hold more than the machine has."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._leases: dict[uuid.UUID, Lease] = {}

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Every known lease."""
        return tuple(self._leases.values())

    @property
    def free(self) -> Capacity:
        """Capacity that no lease holds."""
        taken = (lease.allocation for lease in self._leases.values() if lease.state is not LeaseState.SPENT)
        return self._capacity.without(taken)

    @property
    def leased_requests(self) -> frozenset[uuid.UUID]:
        """Requests with a lease that still holds resources."""
        return frozenset(lease.request_id for lease in self._leases.values() if lease.state is not LeaseState.SPENT)

    def offer(
        self,
        lease_id: uuid.UUID,
        scheduler: PeerId,
        request_id: uuid.UUID,
        allocation: Allocation,
        price: float,
        now: float,
        executors: tuple[ExecutorDescriptor, ...] = (),
    ) -> Lease:
        """Reserve `allocation` for an offer.

        Raises:
            LeaseError: it is not free, or the id is in use.
        """
        free = self.free
        if lease_id in self._leases:
            raise LeaseError(f"lease {lease_id} already exists")
        if not free.resources.covers(allocation.resources) or not set(allocation.devices) <= set(free.devices):
            raise LeaseError(f"{allocation.resources} is no longer free: free is {free.resources}")
        lease = Lease(lease_id, scheduler, request_id, allocation, price, now + TEMPORARY_LEASE, executors=executors)
        self._leases[lease_id] = lease
        return lease

    def renew(self, lease_id: uuid.UUID, scheduler: PeerId, now: float) -> Lease:
        """Extend a lease; a spent one is confirmed but not extended.

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
        """Attach a job to a lease; this also accepts an offer that was not renewed yet.

        Raises:
            LeaseError: the lease is unknown, another scheduler's, over, spent, or has a job.
        """
        lease = self._owned_lease(lease_id, scheduler)
        if lease.state is LeaseState.SPENT:
            raise LeaseError(f"lease {lease_id} is spent: its job has ended")
        self.renew(lease_id, scheduler, now)
        if lease.has_job:
            raise LeaseError(f"a job already runs on lease {lease_id}")
        lease.has_job = True
        return lease

    def detach_job(self, lease_id: uuid.UUID, *, keep: bool = False) -> None:
        """Detach the job of a lease, after its last process has ended.

        Args:
            keep: keep the lease for another job, unless it is over; otherwise free its resources now.
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
        """End a lease. If it has a job, its resources stay reserved until `detach_job`.

        Raises:
            LeaseError: it is unknown or another scheduler's.
        """
        lease = self._owned_lease(lease_id, scheduler)
        self._end(lease)
        return lease

    def cancel_offer(self, lease_id: uuid.UUID) -> None:
        """Remove an offer that could not be sent; keep it if it was accepted meanwhile."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.state is LeaseState.OFFERED:
            del self._leases[lease_id]

    def sweep(self, now: float) -> list[Lease]:
        """End leases that have expired; return those whose jobs must be cancelled now."""
        expired = [
            lease for lease in self._leases.values() if now >= lease.expires and lease.state is not LeaseState.ENDING
        ]
        for lease in expired:
            self._end(lease)
        return [lease for lease in expired if lease.has_job]

    def find(self, lease_id: uuid.UUID, scheduler: PeerId) -> Lease | None:
        """Return the lease if it is known and belongs to `scheduler`, else None."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.scheduler == scheduler else None

    def find_for_dispatch(
        self, dispatch_id: uuid.UUID, scheduler: PeerId, executor: ExecutorDescriptor
    ) -> Lease | None:
        """Return the lease that a dispatch is for, or None.

        Our schedulers dispatch by a lease's id. Those of the older network make an id of their own: for them it is the
        oldest held lease of this scheduler that has no job and was requested for an executor of this class.
        """
        lease = self.find(dispatch_id, scheduler)
        if lease is not None:
            return lease
        for lease in self._leases.values():
            is_open = lease.state is LeaseState.HELD and not lease.has_job and lease.scheduler == scheduler
            if is_open and type(executor) in map(type, lease.executors):
                return lease
        return None

    def _owned_lease(self, lease_id: uuid.UUID, scheduler: PeerId) -> Lease:
        lease = self.find(lease_id, scheduler)
        if lease is None:  # the same answer for other schedulers' leases, so that it reveals nothing about them
            raise LeaseError(f"{scheduler} has no lease {lease_id} here")
        return lease

    def _end(self, lease: Lease) -> None:
        if lease.has_job:
            lease.state = LeaseState.ENDING
        else:
            del self._leases[lease.id]
