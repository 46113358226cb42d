"""The owner's prices and preferences. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hypha_proto.ids import PeerId
from hypha_proto.offers import WorkerRequest
from hypha_worker.leasing.terms import NO_QUOTA, Quota

Strategy = Literal["flexible", "whole"]
EvaluationName = Literal["affinity", "profit", "utilization"]


@dataclass(frozen=True, slots=True)
class OfferPolicy:
    """The owner's prices and preferences. Prices are tokens per lease-hour."""

    price: float = 100.0
    floor: float = 0.0
    strategy: Strategy = "flexible"
    evaluation: EvaluationName = "profit"
    """How `arbiter` ranks competing requests."""
    schedulers: tuple[PeerId, ...] = ()
    """The only schedulers that get offers; empty: all schedulers."""
    prefer: tuple[PeerId | str, ...] = ()
    """Schedulers, and names of executors, whose requests are preferred, the most preferred first."""
    quota: Quota = NO_QUOTA

    @property
    def least_bid(self) -> float:
        """The lowest bid that gets an offer."""
        return self.floor if self.strategy == "whole" else max(self.price, self.floor)

    def offer_price(self, bid: float) -> float | None:
        """Return the price of an offer for `bid`, or None if the bid is too low."""
        if bid < self.least_bid:
            return None
        return max(bid, self.price) if self.strategy == "whole" else bid

    def is_allowed(self, scheduler: PeerId) -> bool:
        """Return whether `scheduler` may get offers."""
        return not self.schedulers or scheduler in self.schedulers

    def preference(self, scheduler: PeerId, request: WorkerRequest) -> int:
        """Return the position of a request in `prefer`, 0 for the most preferred."""
        names = {scheduler, *(executor.name for executor in request.spec.executor)}
        return next((place for place, preferred in enumerate(self.prefer) if preferred in names), len(self.prefer))
