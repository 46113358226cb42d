"""Auction: decides which offers win, by most resources per token. Pure; clock, randomness, round trips are passed in.

The maximum price is compared here and never leaves the scheduler.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Annotated, Final

from pydantic import ConfigDict, Field

from hypha_net.node.config.models import Section
from hypha_proto.ids import PeerId
from hypha_proto.leases import TEMPORARY_LEASE, Rejection
from hypha_proto.offers import MAX_OFFER_LIFE, WorkerOffer, WorkerSpec
from hypha_proto.resources import Resources

DENIED: Final = "denied"
"""Code of a peer that did not grant the lease that it had offered; not sent, unlike `REJECTION_CODES`."""
EXCLUDED: Final = "excluded"
"""Code of a peer that the job excludes (`RoleRequest.excluded`); not sent."""
_DECISION_MARGIN: Final = 0.025
"""Seconds between a decision and the last moment at which an offer can be accepted, for delays on this machine."""
_ACCEPT_MARGIN: Final = 0.01
"""Seconds that an offer must have left: with less its renewal would come too late more often than not."""
_SHORT_NOTICE: Final = 0.1
"""A peer that offered the usual life is not blamed for a denial if its offer had less than these seconds left."""
_LATE_ROUND_TRIPS: Final = 1.5
_LATE_MARGIN: Final = 0.1
"""A renewal is late after 1.5 round trips and this many seconds: the next best offer is taken instead."""
_MAX_PEERS: Final = 4096
"""Peers whose offers and rejections are stored, so that memory is bounded."""


FIRST_PAUSE: Final = 1.0
"""Seconds for which a peer is left out after its first failure; doubled with each further one."""
LONGEST_PAUSE: Final = 60.0
_JITTER: Final = (0.75, 1.25)


class PeerBackoff:
    """Pauses by peer, whatever the role: honest peers recover quickly, cheats are left out for ever longer."""

    def __init__(self, random: Random) -> None:
        """Start without failures."""
        self._random = random
        self._failures: dict[PeerId, int] = {}
        self._until: dict[PeerId, float] = {}

    def record_failure(self, peer: PeerId, now: float) -> float:
        """Count a failure; return the pause in seconds that begins now."""
        count = self._failures.get(peer, 0)
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(count, 16)) * self._random.uniform(*_JITTER)
        self._failures[peer] = count + 1
        self._until[peer] = now + pause
        return pause

    def is_left_out(self, peer: PeerId, now: float) -> bool:
        """Return whether a pause of `peer` has not ended yet."""
        return now < self._until.get(peer, now)

    def failures(self, peer: PeerId) -> int:
        """Return how often `peer` failed."""
        return self._failures.get(peer, 0)


_Weight = Annotated[float, Field(ge=0, le=1e6)]
_OfferKey = tuple[PeerId, str, uuid.UUID | None]
"""Peer, role, and request if the peer may have several offers for the role."""


class AuctionTable(Section):
    """``[scheduler.auction]``: how offers of workers are chosen; the weights value one unit of each resource."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    decision_window: float = Field(
        default=0.25,  # half the life of a nearby worker's offer
        ge=0,
        le=MAX_OFFER_LIFE,
        description="Seconds from the first acceptable offer until the best are chosen, or less if offers end before.",
    )
    gpu: _Weight = Field(default=25.0, description="Weight of a GB of GPU memory.")
    cpu: _Weight = Field(default=1.0, description="Weight of a core.")
    memory: _Weight = Field(default=0.1, description="Weight of a GB of memory.")
    storage: _Weight = Field(default=0.01, description="Weight of a GB of storage.")


@dataclass(frozen=True, slots=True)
class RoleRequest:
    """Demand for `count` workers of one role."""

    role: str
    """``train`` or ``aggregate``."""
    spec: WorkerSpec
    bid: float
    """Tokens per lease-hour; published in the request."""
    max_price: float
    """Maximum price in tokens per lease-hour; never sent."""
    count: int
    minimum: int = 0
    """Number of leases without which the job cannot go on."""
    distinct_peers: bool = True
    """Whether each lease is on another peer. Several on one peer need executors that name their lease."""
    starts_at_minimum: bool = False
    """Whether the job starts once it holds the minimum, and gets each further lease as it is found. Otherwise the first
    search delivers its leases together at its end."""
    settle: float = 0.0
    """Seconds for which the minimum must have been held before a job with `starts_at_minimum` starts; it starts at once
    when it holds all leases."""
    excluded: frozenset[PeerId] = frozenset()
    """Peers whose offers are ignored, as work has failed there. A lease of one of them without a task is released once
    the role has another lease; until then it is kept, and another is sought beside it."""


@dataclass(frozen=True, slots=True)
class AcceptedOffer:
    """Offer that meets its request."""

    role: str
    lease: uuid.UUID
    peer: PeerId
    price: float
    resources: Resources
    at: float
    """Time of receipt."""
    expires: float
    """Time at which the worker drops the temporary lease, if the offer took no time to arrive."""
    score: float
    """Value of the resources; see `resource_score`."""
    round_trip: float = 0.0
    """Seconds to the peer and back."""
    waiting_since: float = 0.0
    """When the first of an unbroken sequence of offers of this peer and role was received."""
    request: uuid.UUID | None = None
    """Request that it answers, if its role may have several leases of a peer; None if its newest offer alone counts."""

    @property
    def key(self) -> _OfferKey:
        """What another offer has that takes its place."""
        return self.peer, self.role, self.request

    @property
    def accept_by(self) -> float:
        """Last moment to accept it: the offer was on its way for half a round trip, the renewal takes another half."""
        return self.expires - self.round_trip

    @property
    def rank(self) -> tuple[float, float, float]:
        """Sort key, best offer first: most resources per token, then lower price, then earlier receipt."""
        return (-(self.score / self.price) if self.price > 0 else float("-inf"), self.price, self.at)


@dataclass(slots=True)
class _Renewal:
    """Renewal in flight that accepts an offer."""

    offer: AcceptedOffer
    asked_at: float
    late_at: float
    is_late: bool = False
    """Whether another offer may be taken in its place."""
    is_abandoned: bool = False
    """Whether its lease is no longer wanted."""

    @property
    def is_short_notice(self) -> bool:
        """Whether this side waited so long that the lease may have ended before the renewal arrived."""
        offer = self.offer
        return offer.expires - offer.at >= TEMPORARY_LEASE and offer.accept_by - self.asked_at < _SHORT_NOTICE


def resource_score(resources: Resources, weights: AuctionTable) -> float:
    """Return the value of resources; with the default weights, an equivalent number of CPU cores."""
    return (
        weights.gpu * resources.gpu
        + weights.cpu * resources.cpu
        + weights.memory * resources.memory
        + weights.storage * resources.storage
    )


@dataclass(slots=True)
class Auction:
    """State of one job's search for workers.

    Leases of roles with `distinct_peers` are on different peers, and a peer has at most one live offer for such a role.
    For the others it has one for each request.
    """

    role_requests: tuple[RoleRequest, ...]
    settings: AuctionTable = field(default_factory=AuctionTable)
    random: Random = field(default_factory=Random)
    excluded: frozenset[PeerId] = frozenset()
    """Peers with which the job has leases from earlier searches."""
    exclusive: frozenset[PeerId] = frozenset()
    """Those of them that have a lease of a role with `distinct_peers`, and get no other."""
    rejections: dict[tuple[PeerId, str], tuple[Rejection, ...]] = field(default_factory=dict)
    """Reason for which the last offer of a peer for a role was rejected or came to nothing."""
    _requests: dict[str, RoleRequest] = field(init=False)
    _request_roles: dict[uuid.UUID, str] = field(default_factory=dict)
    _offers: dict[_OfferKey, AcceptedOffer] = field(default_factory=dict)
    _renewals: dict[uuid.UUID, _Renewal] = field(default_factory=dict)
    _held: dict[uuid.UUID, AcceptedOffer] = field(default_factory=dict)
    _backoff: PeerBackoff = field(init=False)
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self._requests = {role_request.role: role_request for role_request in self.role_requests}
        self._backoff = PeerBackoff(self.random)

    # ---------------------------------------------------------------------------------------------------------- offers

    def register_request(self, request: uuid.UUID, role: str) -> None:
        """Register the id of a published request for `role`; offers for earlier requests stay valid."""
        self._request_roles[request] = role

    def add_offer(self, peer: PeerId, offer: WorkerOffer, now: float, round_trip: float = 0.0) -> bool:
        """Store an offer in place of an older one of its peer and role; return whether it can be accepted."""
        role = self._request_roles.get(offer.request_id)
        if role is None or self._backoff.is_left_out(peer, now):
            return False
        key = peer, role, None if self._requests[role].distinct_peers else offer.request_id
        if reasons := self._reasons_against(peer, offer, self._requests[role]):
            self._offers.pop(key, None)
            self._record_rejection(peer, role, reasons)
            return False
        life = min(offer.timeout_ms / 1000, MAX_OFFER_LIFE)
        score = resource_score(offer.resources, self.settings)
        older = self._offers.get(key)
        since = older.waiting_since if older is not None and older.accept_by >= now else now
        accepted = AcceptedOffer(
            role, offer.id, peer, offer.price, offer.resources, now, now + life, score, round_trip, since, key[2]
        )
        if accepted.accept_by < now or not self._has_room_for(key, now):
            return False
        self._offers[key] = accepted
        self.rejections.pop((peer, role), None)
        return True

    def _reasons_against(self, peer: PeerId, offer: WorkerOffer, role_request: RoleRequest) -> tuple[Rejection, ...]:
        role, wanted = role_request.role, role_request.spec.resources
        if peer in role_request.excluded:
            text = f"is excluded for {role}: attempts of this job failed there"
            return (Rejection(code=EXCLUDED, text=text),)
        if offer.price > role_request.max_price:
            text = f"asks {offer.price:g} tokens an hour for {role}, more than the job pays"
            return (Rejection(code="price", text=text),)
        if lacking := offer.resources.lacking(wanted):
            return tuple(
                Rejection(
                    code=name,
                    text=f"offers too little {name} for {role}",
                    required=getattr(wanted, name),
                    available=getattr(offer.resources, name),
                )
                for name in lacking
            )
        return ()

    def _record_rejection(self, peer: PeerId, role: str, reasons: tuple[Rejection, ...]) -> None:
        if (peer, role) in self.rejections or len(self.rejections) < _MAX_PEERS * len(self._requests):
            self.rejections[peer, role] = reasons

    def _has_room_for(self, key: _OfferKey, now: float) -> bool:
        limit = _MAX_PEERS * len(self._requests)
        if key not in self._offers and len(self._offers) >= limit:
            self._offers = {live.key: live for live in self._offers.values() if live.accept_by >= now}
        return key in self._offers or len(self._offers) < limit

    def _taken_peers(self) -> set[PeerId]:
        return {*self.excluded, *self.exclusive, *(offer.peer for offer in self._accepted())}

    def _accepted(self) -> tuple[AcceptedOffer, ...]:
        return (*self._held.values(), *(renewal.offer for renewal in self._renewals.values()))

    def _exclusive_peers(self, offers: Iterable[AcceptedOffer]) -> set[PeerId]:
        """Return the peers of those offers whose role shares its peers with no other lease."""
        return {offer.peer for offer in offers if self._requests[offer.role].distinct_peers}

    def _may_lease(self, offer: AcceptedOffer, taken: set[PeerId], exclusive: set[PeerId]) -> bool:
        return offer.peer not in (taken if self._requests[offer.role].distinct_peers else exclusive)

    def _usable(self, now: float) -> list[AcceptedOffer]:
        """Return the offers that can still be accepted, of peers with which no lease is held or being renewed."""
        taken, used = self._taken_peers(), {*self._held, *self._renewals}
        exclusive = self._exclusive_peers(self._accepted()) | self.exclusive
        return [
            offer
            for offer in self._offers.values()
            if offer.accept_by >= now + _ACCEPT_MARGIN and offer.lease not in used
            if self._may_lease(offer, taken, exclusive)
            if not self._backoff.is_left_out(offer.peer, now)
        ]

    # ----------------------------------------------------------------------------------------------------------- state

    def missing(self) -> dict[str, int]:
        """Return the number of workers of each role that are neither held nor being accepted."""
        expected = [renewal.offer.role for renewal in self._renewals.values() if not renewal.is_late]
        taken = [*expected, *(offer.role for offer in self._held.values())]
        return {role: max(0, request.count - taken.count(role)) for role, request in self._requests.items()}

    @property
    def open_requests(self) -> tuple[RoleRequest, ...]:
        """Requests for roles that lack workers."""
        missing = self.missing()
        return tuple(role_request for role_request in self.role_requests if missing[role_request.role])

    @property
    def complete(self) -> bool:
        """Whether all requested workers are held."""
        return len(self._held) == sum(request.count for request in self._requests.values())

    @property
    def held(self) -> tuple[AcceptedOffer, ...]:
        """Offers that were accepted and confirmed by their workers."""
        return tuple(self._held.values())

    @property
    def unanswered(self) -> tuple[AcceptedOffer, ...]:
        """Offers whose renewals have not been answered: their workers may or may not hold the leases."""
        return tuple(renewal.offer for renewal in self._renewals.values())

    # ------------------------------------------------------------------------------------------------------- decisions

    def decide_at(self, now: float) -> float | None:
        """Return the time of the next decision, or None without an acceptable offer for an open role.

        It is the end of the decision window, or earlier if an offer at hand must be accepted before. What is at hand
        after a denial has waited for its window already, so that the next best offer is taken at once.
        """
        missing = self.missing()
        offers = [offer for offer in self._usable(now) if missing[offer.role]]
        if not offers:
            return None
        window_end = min(offer.waiting_since for offer in offers) + self.settings.decision_window
        return min(window_end, min(offer.accept_by for offer in offers) - _DECISION_MARGIN)

    def all_offers_in(self, candidates: Collection[PeerId] | None, now: float) -> bool:
        """Return whether waiting cannot improve the choice: every candidate has made an offer for every open role.

        Those that a role excludes are not waited for.

        Args:
            candidates: all peers that may make offers, or None if there may be others than those that are known.
            now: the local monotonic clock, seconds.
        """
        if not candidates:  # nobody is known, and so nobody's silence means anything
            return False
        open_roles = [role for role, missing in self.missing().items() if missing]
        bidders = {(offer.peer, offer.role) for offer in self._usable(now)}
        taken = self._taken_peers()
        waited_for = (peer for peer in candidates if peer not in taken and not self._backoff.is_left_out(peer, now))
        return all(
            (peer, role) in bidders or peer in self._requests[role].excluded
            for peer in waited_for
            for role in open_roles
        )

    def decide(self, now: float) -> tuple[AcceptedOffer, ...]:
        """Select the best offers; the caller renews each and passes it to `confirm` or `deny`."""
        self._offers = {offer.key: offer for offer in self._usable(now)}
        missing = self.missing()
        chosen: dict[uuid.UUID, AcceptedOffer] = {}
        for role in sorted(self._requests, key=lambda role: self._requests[role].count):
            busy, exclusive = {offer.peer for offer in chosen.values()}, self._exclusive_peers(chosen.values())
            offered = (offer for offer in self._offers.values() if offer.role == role and offer.lease not in chosen)
            found = sorted(
                (offer for offer in offered if self._may_lease(offer, busy, exclusive)), key=self._preference
            )
            chosen |= {offer.lease: offer for offer in found[: missing[role]]}
        for offer in chosen.values():
            late_at = now + _LATE_ROUND_TRIPS * offer.round_trip + _LATE_MARGIN
            self._renewals[offer.lease] = _Renewal(offer, now, late_at)
            del self._offers[offer.key]
        return tuple(chosen.values())

    def take_unneeded(self, now: float) -> tuple[AcceptedOffer, ...]:
        """Remove and return the offers for roles whose leases are all held, while another role lacks workers.

        Released at once, their workers can make an offer for that role; otherwise they would keep what they offered for
        the unneeded one until it ends.
        """
        held = Counter(offer.role for offer in self._held.values())
        full = {role for role, request in self._requests.items() if held[role] >= request.count}
        if len(full) == len(self._requests):
            return ()
        unneeded = tuple(offer for offer in self._usable(now) if offer.role in full)
        for offer in unneeded:
            del self._offers[offer.key]
        return unneeded

    def _preference(self, offer: AcceptedOffer) -> tuple[bool, int, tuple[float, float, float]]:
        """Return the sort key of an offer; peers that another role needs come last, then those that failed before."""
        return (self._needed_elsewhere(offer), self._backoff.failures(offer.peer), offer.rank)

    def _needed_elsewhere(self, offer: AcceptedOffer) -> bool:
        for role, missing in self.missing().items():
            if role != offer.role and self._requests[role].count > self._requests[offer.role].count:
                peers = {other.peer for other in self._offers.values() if other.role == role}
                if offer.peer in peers and len(peers) <= missing:
                    return True
        return False

    # ---------------------------------------------------------------------------------------------------------- leases

    def next_late_at(self) -> float | None:
        """Return when the next renewal in flight is late, or None if none will be."""
        return min((renewal.late_at for renewal in self._renewals.values() if not renewal.is_late), default=None)

    def mark_late(self, now: float) -> tuple[AcceptedOffer, ...]:
        """Stop counting on renewals that are late; return their offers. Their answers still count if they come."""
        late = [renewal for renewal in self._renewals.values() if not renewal.is_late and renewal.late_at <= now]
        for renewal in late:
            renewal.is_late = True
        return tuple(renewal.offer for renewal in late)

    def is_requested(self, offer: WorkerOffer) -> bool:
        """Return whether an offer answers a request of this search."""
        return offer.request_id in self._request_roles

    def confirm(self, lease: uuid.UUID) -> bool:
        """Record that the worker granted a lease; return whether it is still needed. If not, release it."""
        renewal = self._renewals.pop(lease, None)
        if renewal is None or renewal.is_abandoned or self._is_closed:
            return False
        role = renewal.offer.role
        if sum(offer.role == role for offer in self._held.values()) >= self._requests[role].count:
            return False
        self._held[lease] = renewal.offer
        return True

    def deny(self, lease: uuid.UUID, now: float) -> float:
        """Record that a worker did not grant a lease; return the seconds for which its offers are ignored."""
        renewal = self._renewals.pop(lease, None)
        if renewal is None or renewal.is_short_notice:
            return 0.0
        return self._leave_out(renewal.offer, "did not grant", now)

    def lease_lost(self, lease: uuid.UUID, now: float) -> None:
        """Search again for a lease that was held and is lost; its peer is left out for a while."""
        offer = self._held.pop(lease, None)
        if offer is not None:
            self._leave_out(offer, "did not keep", now)

    def _leave_out(self, offer: AcceptedOffer, what: str, now: float) -> float:
        pause = self._backoff.record_failure(offer.peer, now)
        text = f"{what} the lease that it had offered for {offer.role}; its offers are ignored for {pause:.1f} s"
        self._record_rejection(offer.peer, offer.role, (Rejection(code=DENIED, text=text),))
        return pause

    def give_up(self) -> tuple[AcceptedOffer, ...]:
        """Drop all leases, also those that are granted later; return those that were held, to be released."""
        released = self.held
        self._held.clear()
        for renewal in self._renewals.values():
            renewal.is_late = renewal.is_abandoned = True
        return released

    def close(self) -> None:
        """End the search: leases that are granted from now on are not needed."""
        self._is_closed = True
