"""Affinity: the preferred schedulers and executors first."""

from __future__ import annotations

from hypha_proto.resources import Resources
from hypha_worker.bidding.evaluation import RequestEvaluation, register_evaluation
from hypha_worker.bidding.policy import OfferPolicy
from hypha_worker.bidding.request_batch import ReceivedRequest


@register_evaluation
class Affinity(RequestEvaluation):
    """Prefers the order of ``offer.prefer``, and all others after it; then the higher price."""

    name = "affinity"

    def score(self, received: ReceivedRequest, policy: OfferPolicy, free: Resources) -> tuple[float, ...]:
        """See `RequestEvaluation.score`."""
        price = policy.offer_price(received.request.bid) or 0.0
        return -policy.preference(received.scheduler, received.request), price
