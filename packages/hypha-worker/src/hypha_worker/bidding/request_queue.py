"""Requests that await a decision: those of the open batch window, and those for which nothing was free.

Pure; the clock is passed in. `bidding.bidder` adds what arrives on the topic, and sends the offers that are decided.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypha_proto.ids import PeerId
from hypha_worker.bidding.arbiter import Arbiter, PlannedOffer
from hypha_worker.bidding.request_batch import DeferredRequests, ReceivedRequest, RequestBatch
from hypha_worker.leasing.lease_manager import LeaseManager, LeaseState


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided at one moment."""

    offers: tuple[PlannedOffer, ...]
    requests: tuple[ReceivedRequest, ...]
    """The requests that are done with: they get one of the offers, or none at all."""


@dataclass(slots=True)
class RequestQueue:
    """Requests in the order in which `arbiter` decides them, whenever a batch is due or resources have become free."""

    arbiter: Arbiter
    lease_manager: LeaseManager
    batch: RequestBatch = field(default_factory=RequestBatch)
    """Those that have just arrived."""
    deferred: DeferredRequests = field(default_factory=DeferredRequests)
    is_freed: bool = False
    """Whether a lease or an offer has ended: deferred requests are to be decided again."""

    def seconds_until_due(self, now: float) -> float | None:
        """Return the seconds until there may be something to decide (0: now), or None if nothing waits."""
        batch_due = self.batch.seconds_until_due(now)
        if not self.deferred.pending:
            return batch_due
        if self.is_freed:
            return 0.0
        ends = [lease.ends for lease in self.lease_manager.leases if lease.end is None]
        deferred_due = max(0.0, min((*ends, self.deferred.next_deadline)) - now)
        return deferred_due if batch_due is None else min(batch_due, deferred_due)

    def decide(self, now: float) -> Decision:
        """Decide about the batch, if it is due, and about deferred requests; sweep the expired leases before.

        While a batch is open, its requests compete with the deferred ones, which get what these leave of the free
        capacity.
        """
        leases, is_due = self.lease_manager, self.batch.seconds_until_due(now) == 0.0
        self.is_freed = False
        if leases.is_closed or leases.is_paused:
            return Decision((), (*self.deferred.drain(), *self.batch.drain()))
        open_batch = () if is_due else self.batch.pending
        batch = self.batch.drain() if is_due else []
        known = [*self.deferred.pending, *batch]
        self.deferred.drop_superseded(batch)
        requests = [*self.deferred.drain(), *batch]
        planned = self.arbiter.decide([*requests, *open_batch], leases.free, now, leases.leased_requests, leases.usage)
        keys = {received.key for received in requests}
        offers = tuple(plan for plan in planned if plan.received_request.key in keys)
        deferred = self._defer(requests, offers, now)
        return Decision(offers, tuple(received for received in known if received.key not in deferred))

    def _defer(
        self, requests: Sequence[ReceivedRequest], offers: Sequence[PlannedOffer], now: float
    ) -> set[tuple[PeerId, uuid.UUID]]:
        """Keep the requests that could get an offer later; return which.

        A scheduler that holds a lease, or has an offer for the same executors, has been served: it may want no second
        one, and all leases of a job are on different workers.
        """
        leases = self.lease_manager.leases
        holders = {lease.scheduler for lease in leases if lease.state is not LeaseState.OFFERED}
        served = {(lease.scheduler, lease.executors) for lease in leases if lease.state is LeaseState.OFFERED}
        served |= {(plan.received_request.scheduler, plan.received_request.request.spec.executor) for plan in offers}
        for received in requests:
            key = (received.scheduler, received.request.spec.executor)
            is_served = received.scheduler in holders or key in served
            is_open = now < received.deadline and not is_served
            if is_open and self.arbiter.is_possible(received.scheduler, received.request):
                self.deferred.add(received)
        return {received.key for received in self.deferred.pending}
