"""Decides which requests a worker answers with an offer, and at which price.

Pure. What is offered is reserved in `leasing.lease_manager` for a moment; a renewal by the scheduler turns the offer
into a lease on which it can start tasks.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from msgspec.structs import asdict

from hypha_proto.ids import PeerId
from hypha_proto.leases import Rejection
from hypha_proto.offers import ExecutorDescriptor, WorkerRequest
from hypha_proto.resources import Resources
from hypha_worker.bidding.policy import EvaluationName, OfferSection
from hypha_worker.bidding.rejection import (
    executor_reasons,
    policy_reasons,
    quota_reasons,
    resource_reasons,
    start_reasons,
)
from hypha_worker.bidding.request_batch import ReceivedRequest
from hypha_worker.executor_health import ExecutorHealth
from hypha_worker.leasing.capacity import Allocation, Capabilities, Capacity
from hypha_worker.leasing.terms import LeaseUsage

_UNUSED: Final = LeaseUsage()
_NO_USAGE: Final[Mapping[PeerId, LeaseUsage]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PlannedOffer:
    """An offer to send."""

    received_request: ReceivedRequest
    allocation: Allocation
    price: float


@dataclass(frozen=True, slots=True)
class Arbiter:
    """Decides by the owner's policy which requests get an offer."""

    policy: OfferSection
    capabilities: Capabilities
    health: Mapping[ExecutorDescriptor, ExecutorHealth] = field(default_factory=dict, compare=False)
    """How the executors have started; those that fail are not offered."""

    def rejection_reasons(
        self, scheduler: PeerId, request: WorkerRequest, free: Capacity, usage: LeaseUsage = _UNUSED
    ) -> tuple[Rejection, ...]:
        """Return every reason against an offer; empty if one would be made.

        Args:
            free: capacity that no lease holds.
            usage: what `scheduler` has here.
        """
        return (
            *policy_reasons(self.policy, scheduler, request.bid),
            *quota_reasons(self.policy.quota, usage),
            *executor_reasons(self.capabilities, request.spec.executor),
            *start_reasons(self.health, request.spec.executor),
            *resource_reasons(self.policy, self.capabilities, request, free),
        )

    def is_possible(self, scheduler: PeerId, request: WorkerRequest) -> bool:
        """Return whether an offer could be made if nothing was leased."""
        return not self.rejection_reasons(scheduler, request, self.capabilities.capacity)

    def decide(
        self,
        batch: Sequence[ReceivedRequest],
        free: Capacity,
        now: float,
        leased: Set[tuple[PeerId, uuid.UUID]] = frozenset(),
        usage: Mapping[PeerId, LeaseUsage] = _NO_USAGE,
    ) -> list[PlannedOffer]:
        """Choose the offers for a batch of requests, best first, together at most `free`.

        Of requests with equal scores, those of the scheduler with the fewest offers, leases and lapsed offers come
        first, so that many requests of one scheduler do not take everything before another's equal bid, and neither
        does one that accepts none of its offers.

        Args:
            batch: the requests of one batch window.
            free: capacity that no lease holds.
            now: the local monotonic clock, seconds.
            leased: schedulers and requests that have a lease already; they get no second offer.
            usage: what each scheduler has here.
        """
        planned: list[PlannedOffer] = []
        seen, used = set(leased), dict(usage)
        for tier in self._tiers(batch, free):
            while tier:
                received = min(tier, key=lambda each: used.get(each.scheduler, _UNUSED).claims)
                tier.remove(received)
                key, known = (received.scheduler, received.request.id), used.get(received.scheduler, _UNUSED)
                if key in seen or now >= received.deadline:
                    continue
                if self.rejection_reasons(received.scheduler, received.request, free, known):
                    continue
                seen.add(key)
                used[received.scheduler] = replace(known, offers=known.offers + 1)
                planned.append(self._plan(received, free))
                free = free.without([planned[-1].allocation])
        return planned

    def _tiers(self, batch: Sequence[ReceivedRequest], free: Capacity) -> list[list[ReceivedRequest]]:
        """Return the requests grouped by score, the highest first, each group in the order of arrival."""
        tiers: dict[tuple[float, ...], list[ReceivedRequest]] = {}
        for received in sorted(batch, key=lambda each: (each.received_at, each.request.id.int)):
            score = _EVALUATIONS[self.policy.evaluation](received, self.policy, free.resources)
            tiers.setdefault(score, []).append(received)
        return [tiers[score] for score in sorted(tiers, reverse=True)]

    def _plan(self, received_request: ReceivedRequest, free: Capacity) -> PlannedOffer:
        request = received_request.request
        price = self.policy.offer_price(request.bid)
        allocation = self._allocate(request, free)
        if allocation is None or price is None:
            raise AssertionError(f"request {request.id} was planned although it does not fit")
        return PlannedOffer(received_request, allocation, price)

    def _allocate(self, request: WorkerRequest, free: Capacity) -> Allocation | None:
        if self.policy.is_whole:
            return free.whole()
        sharded = self.capabilities.is_sharded(request.spec.executor)
        wanted = self.capabilities.with_defaults(request.spec.resources, free.available(sharded=sharded))
        return free.fit(wanted, sharded=sharded)


_Evaluation = Callable[[ReceivedRequest, OfferSection, Resources], tuple[float, ...]]
"""Returns the score of a request where these resources are free; the largest is answered first.

Requests with equal scores alternate between their schedulers.
"""


def _profit(received: ReceivedRequest, policy: OfferSection, _free: Resources) -> tuple[float, ...]:
    """Prefer the highest price, then the order of ``offer.prefer``."""
    return _price(received, policy), -policy.preference(received.scheduler, received.request)


def _affinity(received: ReceivedRequest, policy: OfferSection, _free: Resources) -> tuple[float, ...]:
    """Prefer the order of ``offer.prefer``, and all others after it; then the higher price."""
    return -policy.preference(received.scheduler, received.request), _price(received, policy)


def _utilization(received: ReceivedRequest, policy: OfferSection, free: Resources) -> tuple[float, ...]:
    """Prefer the largest mean share of the free resources, over those of which any is free; then the higher price."""
    wanted = received.request.spec.resources
    shares = [getattr(wanted, name) / amount for name, amount in asdict(free).items() if amount > 0]
    share = sum(shares) / len(shares) if shares else 0.0
    return share, *_profit(received, policy, free)


def _price(received: ReceivedRequest, policy: OfferSection) -> float:
    return policy.offer_price(received.request.bid) or 0.0


_EVALUATIONS: Final[Mapping[EvaluationName, _Evaluation]] = {
    "affinity": _affinity,
    "profit": _profit,
    "utilization": _utilization,
}
"""By the value of the key ``offer.evaluation``."""
