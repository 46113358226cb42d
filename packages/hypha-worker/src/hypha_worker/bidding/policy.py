"""The owner's prices and preferences: the table ``[offer]``. Pure."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from hypha_net.node.config.models import Section
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId
from hypha_proto.leases import TEMPORARY_LEASE
from hypha_proto.offers import WorkerRequest
from hypha_proto.wire_schema import MAX_PRICE
from hypha_worker.leasing.terms import (
    IDLE_LEASE,
    MAX_ORPHAN_GRACE,
    MAX_TEMPORARY_LEASE,
    ORPHAN_GRACE,
    LeaseTerms,
    Quota,
)


def _peer(text: str) -> str:
    try:
        return str(PeerId.parse(text))
    except InvalidIdError as error:
        raise ValueError(str(error)) from None


def _preferred(text: str) -> str:
    """Check an entry of `OfferSection.prefer`: what begins like a peer id must be one."""
    return _peer(text) if text.startswith(PEER_ID_START) else text


PEER_ID_START: Final = "12D3Koo"
"""How every peer id begins in base58."""
Strategy = Literal["flexible", "whole"]
EvaluationName = Literal["affinity", "profit", "utilization"]
Price = Annotated[float, Field(ge=0, le=MAX_PRICE, allow_inf_nan=False)]
Limit = Annotated[int, Field(ge=1)] | None
PeerText = Annotated[str, AfterValidator(_peer)]
PreferredText = Annotated[str, Field(min_length=1), AfterValidator(_preferred)]


class StrategySection(Section):
    """``[offer.strategy]``, the older form of the key."""

    type: Strategy = Field(description="flexible or whole.")


class OfferSection(Section):
    """``[offer]``."""

    price: Price = Field(default=100.0, description="Price of this worker, in tokens per lease-hour, at most 1e9.")
    floor: Price = Field(
        default=0.0, description="Bids below this get no offer; with strategy flexible, neither do bids below price."
    )
    strategy: Strategy | StrategySection = Field(
        default="flexible",
        description="flexible: offer what is requested, at the bid. whole: offer everything at once.",
    )
    evaluation: EvaluationName = Field(
        default="profit", description="Which request wins when several compete: profit, utilization or affinity."
    )
    schedulers: list[PeerText] = Field(
        default=[], description="Peer ids of the only schedulers that get offers; empty: all."
    )
    prefer: list[PreferredText] = Field(
        default=[],
        description="Peer ids of schedulers and names of executors whose requests are preferred, the most preferred "
        "first: before the price with affinity, between equal prices otherwise. Excludes nobody.",
    )
    max_offers: Limit = Field(default=None, description="Live offers to one scheduler at the same time.")
    max_leases: Limit = Field(default=None, description="Leases of one scheduler, live offers to it included.")
    max_jobs: Limit = Field(default=None, description="Running jobs of one scheduler.")
    idle_lease: float = Field(
        default=IDLE_LEASE, gt=0, allow_inf_nan=False, description="Seconds without a job after which a lease ends."
    )
    temporary_lease: float = Field(
        default=TEMPORARY_LEASE,
        ge=0.1,
        le=MAX_TEMPORARY_LEASE,
        allow_inf_nan=False,
        description="Seconds for which an offer is reserved, 0.1 to 2; two round trips to the scheduler are added, up "
        "to 2 s in all.",
    )

    orphan_grace: float = Field(
        default=ORPHAN_GRACE,
        ge=0,
        le=MAX_ORPHAN_GRACE,
        allow_inf_nan=False,
        description="Longest time in seconds for which a job whose scheduler asks for it runs on, and its lease is "
        "held without charge, after the lease was not renewed in time; at most a week. 0: never.",
    )

    oversubscribe: bool = Field(
        default=False,
        description="Let jobs that ask for no cores share them, so that more tasks may run than there are cores.",
    )

    @property
    def is_whole(self) -> bool:
        """Whether everything is offered at once."""
        return (self.strategy if isinstance(self.strategy, str) else self.strategy.type) == "whole"

    @property
    def least_bid(self) -> float:
        """The lowest bid that gets an offer."""
        return self.floor if self.is_whole else max(self.price, self.floor)

    def offer_price(self, bid: float) -> float | None:
        """Return the price of an offer for `bid`, or None if the bid is too low."""
        if bid < self.least_bid:
            return None
        return max(bid, self.price) if self.is_whole else bid

    def is_allowed(self, scheduler: PeerId) -> bool:
        """Return whether `scheduler` may get offers."""
        return not self.schedulers or str(scheduler) in self.schedulers

    def preference(self, scheduler: PeerId, request: WorkerRequest) -> int:
        """Return the position of a request in `prefer`, 0 for the most preferred."""
        names = {str(scheduler), *(executor.name for executor in request.spec.executor)}
        return next((place for place, preferred in enumerate(self.prefer) if preferred in names), len(self.prefer))

    @property
    def quota(self) -> Quota:
        """What one scheduler may have at the same time."""
        return Quota(self.max_offers, self.max_leases, self.max_jobs)

    def lease_terms(self) -> LeaseTerms:
        """Return the owner's terms for leases."""
        return LeaseTerms(self.temporary_lease, self.idle_lease, self.quota, self.orphan_grace)
