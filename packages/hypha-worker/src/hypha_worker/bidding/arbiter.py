"""Decides which requests a worker answers with an offer, and at which price.

Pure. Called by `bidding.bidder` with the requests of a batch window, and by `service` when a scheduler asks why it got
no offer. What is offered is reserved in `leasing.lease_manager` for half a second; a renewal by the scheduler turns the
offer into a lease that it can dispatch a job to.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hypha_proto.ids import PeerId
from hypha_proto.offers import OFFER_WINDOW, REQUEST_BATCH_SIZE, REQUEST_BATCH_WINDOW, WorkerRequest
from hypha_worker.leasing.capacity import Allocation, Capabilities, Capacity, executor_text

Strategy = Literal["flexible", "whole"]
Evaluation = Literal["profit", "utilization", "affinity"]


@dataclass(frozen=True, slots=True)
class OfferPolicy:
    """The owner's prices and preferences. Prices are tokens per lease-hour."""

    price: float = 100.0
    floor: float = 0.0
    strategy: Strategy = "flexible"
    evaluation: Evaluation = "profit"
    schedulers: tuple[PeerId, ...] = ()
    """The only schedulers that get offers, the preferred ones first; empty: all schedulers."""

    def offer_price(self, bid: float) -> float | None:
        """Return the price of an offer for `bid`, or None if the bid is too low."""
        if self.strategy == "whole":
            return max(bid, self.price) if bid >= self.floor else None
        return bid if bid >= max(self.price, self.floor) else None


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request and when it was received."""

    scheduler: PeerId
    request: WorkerRequest
    received_at: float
    """Seconds of the local monotonic clock."""

    @property
    def deadline(self) -> float:
        """When offers are no longer accepted, on the local clock; at most `OFFER_WINDOW` after receipt."""
        timeout_ms = self.request.timeout_ms
        return self.received_at + (OFFER_WINDOW if timeout_ms is None else min(OFFER_WINDOW, timeout_ms / 1000))


@dataclass(frozen=True, slots=True)
class PlannedOffer:
    """An offer to send."""

    received_request: ReceivedRequest
    allocation: Allocation
    price: float


@dataclass(frozen=True, slots=True)
class Arbiter:
    """Decides by the owner's policy which requests get an offer."""

    policy: OfferPolicy
    capabilities: Capabilities

    def rejection_reasons(self, scheduler: PeerId, request: WorkerRequest, free: Capacity) -> tuple[str, ...]:
        """Return every reason against an offer while `free` is available, for people; empty if one would be made."""
        return (
            *self._policy_reasons(scheduler, request),
            *self._executor_reasons(request),
            *self._resource_reasons(request, free),
        )

    def decide(
        self, batch: Sequence[ReceivedRequest], free: Capacity, now: float, leased: frozenset[uuid.UUID] = frozenset()
    ) -> list[PlannedOffer]:
        """Choose the offers for a batch of requests, best first, together at most `free`.

        Args:
            batch: the requests of one batch window.
            free: capacity that no lease holds.
            now: the local monotonic clock, seconds.
            leased: requests that have a lease already; they get no second offer.
        """
        planned: list[PlannedOffer] = []
        seen = set(leased)
        for received_request in self._rank(batch, free):
            request = received_request.request
            if request.id in seen or now >= received_request.deadline:
                continue
            if self.rejection_reasons(received_request.scheduler, request, free):
                continue
            seen.add(request.id)
            planned.append(self._plan(received_request, free))
            free = free.without([planned[-1].allocation])
        return planned

    def _plan(self, received_request: ReceivedRequest, free: Capacity) -> PlannedOffer:
        request = received_request.request
        allocation = free.whole() if self.policy.strategy == "whole" else free.fit(request.spec.resources)
        price = self.policy.offer_price(request.bid)
        if allocation is None or price is None:
            raise AssertionError(f"request {request.id} was planned although it does not fit")
        return PlannedOffer(received_request, allocation, price)

    def _rank(self, batch: Iterable[ReceivedRequest], free: Capacity) -> list[ReceivedRequest]:
        scores: dict[Evaluation, Callable[[ReceivedRequest], tuple[float, ...]]] = {
            "profit": lambda received: (self._price(received),),
            "utilization": lambda received: (_utilization(received, free), self._price(received)),
            "affinity": lambda received: (-self._preference(received.scheduler), self._price(received)),
        }
        score = scores[self.policy.evaluation]
        return sorted(
            batch,
            key=lambda received: (
                *(-value for value in score(received)),
                received.received_at,
                received.request.id.int,
            ),
        )

    def _price(self, received_request: ReceivedRequest) -> float:
        return self.policy.offer_price(received_request.request.bid) or 0.0

    def _preference(self, scheduler: PeerId) -> int:
        listed = self.policy.schedulers
        return listed.index(scheduler) if scheduler in listed else len(listed)

    def _policy_reasons(self, scheduler: PeerId, request: WorkerRequest) -> tuple[str, ...]:
        policy, reasons = self.policy, []
        if policy.schedulers and scheduler not in policy.schedulers:
            reasons.append(f"scheduler {scheduler} is not among offer.schedulers of this worker")
        if policy.offer_price(request.bid) is None:
            least = policy.floor if policy.strategy == "whole" else max(policy.price, policy.floor)
            reasons.append(f"the bid of {request.bid:g} is below {least:g}, the least this worker accepts")
        return tuple(reasons)

    def _executor_reasons(self, request: WorkerRequest) -> tuple[str, ...]:
        missing = self.capabilities.missing_executors(request.spec.executor)
        configured = ", ".join(sorted(map(executor_text, self.capabilities.executors))) or "none"
        return tuple(
            f"executor {executor_text(executor)} is not configured; configured: {configured}" for executor in missing
        )

    def _resource_reasons(self, request: WorkerRequest, free: Capacity) -> tuple[str, ...]:
        total, wanted = self.capabilities.capacity.resources, request.spec.resources
        short = [
            f"{name}: {getattr(wanted, name):g} requested, {getattr(free.resources, name):g} free "
            f"of {getattr(total, name):g}"
            for name in free.resources.lacking(wanted)
        ]
        if not short and self.policy.strategy == "whole" and not free.resources.covers(total):
            short.append("the machine is offered as a whole only, and a part of it is leased")
        return tuple(short)


def _utilization(received_request: ReceivedRequest, free: Capacity) -> float:
    """Return the mean share of the free resources that a request would use, over those of which any is free."""
    wanted = received_request.request.spec.resources
    shares = [
        getattr(wanted, name) / amount
        for name in ("gpu", "cpu", "storage", "memory")
        if (amount := getattr(free.resources, name)) > 0
    ]
    return sum(shares) / len(shares) if shares else 0.0


@dataclass(slots=True)
class RequestBatch:
    """Requests that are decided together, so that the best of them wins and not the first."""

    window: float = REQUEST_BATCH_WINDOW
    size: int = REQUEST_BATCH_SIZE
    _pending: list[ReceivedRequest] = field(default_factory=list)

    def add(self, received_request: ReceivedRequest) -> None:
        """Add a request; drop it if the batch is full."""
        if len(self._pending) < self.size:
            self._pending.append(received_request)

    def seconds_until_due(self, now: float) -> float | None:
        """Return the seconds until the batch must be decided (0: now), or None while it is empty."""
        if not self._pending:
            return None
        if len(self._pending) >= self.size:
            return 0.0
        return max(0.0, self._pending[0].received_at + self.window - now)

    def drain(self) -> list[ReceivedRequest]:
        """Return all requests and empty the batch."""
        drained, self._pending = self._pending, []
        return drained
