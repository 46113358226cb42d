"""Utilization: the request that uses the largest part of the free resources first."""

from __future__ import annotations

from msgspec.structs import asdict

from hypha_proto.resources import Resources
from hypha_worker.bidding.evaluation import RequestEvaluation, register_evaluation
from hypha_worker.bidding.policy import OfferPolicy
from hypha_worker.bidding.request_batch import ReceivedRequest


@register_evaluation
class Utilization(RequestEvaluation):
    """Prefers the largest mean share of the free resources, over those of which any is free; then the higher price."""

    name = "utilization"

    def score(self, received: ReceivedRequest, policy: OfferPolicy, free: Resources) -> tuple[float, ...]:
        """See `RequestEvaluation.score`."""
        wanted = received.request.spec.resources
        shares = [getattr(wanted, name) / amount for name, amount in asdict(free).items() if amount > 0]
        price = policy.offer_price(received.request.bid) or 0.0
        share = sum(shares) / len(shares) if shares else 0.0
        return share, price, -policy.preference(received.scheduler, received.request)
