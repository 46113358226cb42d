"""Evaluations: which of several competing requests a worker answers first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from msgspec.structs import asdict

from hypha_proto.resources import Resources
from hypha_worker.bidding.policy import EvaluationName, OfferPolicy
from hypha_worker.bidding.request_batch import ReceivedRequest

Evaluation = Callable[[ReceivedRequest, OfferPolicy, Resources], tuple[float, ...]]
"""Returns the score of a request where these resources are free; the largest is answered first.

Requests with equal scores alternate between their schedulers.
"""


def profit(received: ReceivedRequest, policy: OfferPolicy, _free: Resources) -> tuple[float, ...]:
    """Prefer the highest price, then the order of ``offer.prefer``."""
    return _price(received, policy), -policy.preference(received.scheduler, received.request)


def affinity(received: ReceivedRequest, policy: OfferPolicy, _free: Resources) -> tuple[float, ...]:
    """Prefer the order of ``offer.prefer``, and all others after it; then the higher price."""
    return -policy.preference(received.scheduler, received.request), _price(received, policy)


def utilization(received: ReceivedRequest, policy: OfferPolicy, free: Resources) -> tuple[float, ...]:
    """Prefer the largest mean share of the free resources, over those of which any is free; then the higher price."""
    wanted = received.request.spec.resources
    shares = [getattr(wanted, name) / amount for name, amount in asdict(free).items() if amount > 0]
    share = sum(shares) / len(shares) if shares else 0.0
    return share, *profit(received, policy, free)


def _price(received: ReceivedRequest, policy: OfferPolicy) -> float:
    return policy.offer_price(received.request.bid) or 0.0


EVALUATIONS: Final[Mapping[EvaluationName, Evaluation]] = {
    "affinity": affinity,
    "profit": profit,
    "utilization": utilization,
}
"""By the value of the key ``offer.evaluation``."""
