"""Profit: the highest price first."""

from __future__ import annotations

from hypha_proto.resources import Resources
from hypha_worker.bidding.evaluation import RequestEvaluation, register_evaluation
from hypha_worker.bidding.policy import OfferPolicy
from hypha_worker.bidding.request_batch import ReceivedRequest


@register_evaluation
class Profit(RequestEvaluation):
    """Prefers the highest price, then the order of ``offer.prefer``."""

    name = "profit"

    def score(self, received: ReceivedRequest, policy: OfferPolicy, free: Resources) -> tuple[float, ...]:
        """See `RequestEvaluation.score`."""
        price = policy.offer_price(received.request.bid) or 0.0
        return price, -policy.preference(received.scheduler, received.request)
