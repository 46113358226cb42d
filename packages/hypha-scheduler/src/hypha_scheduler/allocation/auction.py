"""Auction: decides which offers win, by most resources per token. Pure; the clock is passed in.

Called by `allocator`, which does the I/O: it registers requests and offers, asks for a decision, and accepts what was
selected. The maximum price is compared here and never leaves the scheduler.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.leases import TEMPORARY_LEASE
from hypha_proto.offers import WorkerOffer, WorkerSpec
from hypha_proto.resources import Resources

DECISION_WINDOW: Final = 0.25
"""Seconds between the first acceptable offer and the decision: half the life of an offer's lease."""
_MAX_OFFERS: Final = 4096
"""Limit of stored offers, so that a flood of offers cannot exhaust memory."""


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
    """Time at which the worker drops the temporary lease."""

    @property
    def rank(self) -> tuple[float, float, float]:
        """Sort key, best offer first: most resources per token, then lower price, then earlier receipt."""
        score = resource_score(self.resources)
        return (-(score / self.price) if self.price > 0 else float("-inf"), self.price, self.at)


def resource_score(resources: Resources) -> float:
    """Return the value of resources as an equivalent number of CPU cores."""
    return 25 * resources.gpu + resources.cpu + 0.1 * resources.memory + 0.01 * resources.storage


class Auction:
    """State of one job's search for workers.

    All leases of a job are on different peers, since reports of older executors name only the peer: two executors of
    one job on the same peer could not be told apart.
    """

    def __init__(self, role_requests: Iterable[RoleRequest], excluded: frozenset[PeerId] = frozenset()) -> None:
        """Start a search for `role_requests` that accepts no offers of `excluded` peers."""
        self._role_requests = {role_request.role: role_request for role_request in role_requests}
        self._request_roles: dict[uuid.UUID, str] = {}
        self._offers: dict[uuid.UUID, AcceptedOffer] = {}
        self._chosen: dict[uuid.UUID, AcceptedOffer] = {}
        self._held: dict[uuid.UUID, AcceptedOffer] = {}
        self._excluded = set(excluded)
        self._first_at: float | None = None
        self.rejections: dict[PeerId, str] = {}
        """Reason for which the last offer of a peer was rejected, in words for the operator."""

    def register_request(self, request: uuid.UUID, role: str) -> None:
        """Register the id of a published request for `role`; offers for earlier requests stay valid."""
        self._request_roles[request] = role

    def add_offer(self, peer: PeerId, offer: WorkerOffer, now: float) -> bool:
        """Store an offer if it meets its request; return whether it does."""
        role = self._request_roles.get(offer.request_id)
        if role is None or len(self._offers) >= _MAX_OFFERS:
            return False
        role_request = self._role_requests[role]
        if offer.price > role_request.max_price:
            self.rejections[peer] = f"asks {offer.price:g} tokens an hour for {role}, more than the job pays"
            return False
        if not offer.resources.covers(role_request.spec.resources):
            lacking = ", ".join(offer.resources.lacking(role_request.spec.resources))
            self.rejections[peer] = f"offers too little {lacking} for {role}"
            return False
        if peer in self._excluded:
            return False
        life = TEMPORARY_LEASE if offer.timeout_ms is None else min(offer.timeout_ms / 1000, 60.0)
        self._offers[offer.id] = AcceptedOffer(role, offer.id, peer, offer.price, offer.resources, now, now + life)
        if self._first_at is None and self.missing()[role]:
            self._first_at = now
        return True

    def missing(self) -> dict[str, int]:
        """Return the number of workers of each role that are neither held nor being accepted."""
        taken = [offer.role for offer in (*self._chosen.values(), *self._held.values())]
        return {role: role_request.count - taken.count(role) for role, role_request in self._role_requests.items()}

    @property
    def complete(self) -> bool:
        """Whether all requested workers are held."""
        return not self._chosen and not any(self.missing().values())

    @property
    def held(self) -> tuple[AcceptedOffer, ...]:
        """Offers that were accepted and confirmed by their workers."""
        return tuple(self._held.values())

    def decide_at(self) -> float | None:
        """Return the time of the next decision, or None without an acceptable offer."""
        return None if self._first_at is None else self._first_at + DECISION_WINDOW

    def all_offers_in(self, candidates: Iterable[PeerId], now: float) -> bool:
        """Return whether waiting cannot improve the choice: every candidate has made an offer for every open role."""
        open_roles = [role for role, missing in self.missing().items() if missing]
        bidders = {(offer.peer, offer.role) for offer in self._usable(now)}
        taken = {offer.peer for offer in (*self._held.values(), *self._chosen.values())}
        return all((peer, role) in bidders for peer in candidates if peer not in taken for role in open_roles)

    def _usable(self, now: float) -> list[AcceptedOffer]:
        taken = {offer.peer for offer in (*self._held.values(), *self._chosen.values())}
        return [b for b in self._offers.values() if b.expires > now and b.peer not in taken | self._excluded]

    def decide(self, now: float) -> tuple[AcceptedOffer, ...]:
        """Select the best offers; the caller passes each of them to `confirm` or `deny`."""
        self._offers = {offer.lease: offer for offer in self._usable(now)}
        self._first_at = None
        chosen: list[AcceptedOffer] = []
        for role in sorted(self._role_requests, key=lambda role: self._role_requests[role].count):
            busy = {offer.peer for offer in chosen}
            ranked = sorted(
                (b for b in self._offers.values() if b.role == role and b.peer not in busy), key=self._preference
            )
            seen: set[PeerId] = set()
            for offer in ranked:
                if len(seen) < self.missing()[role] and offer.peer not in seen:
                    seen.add(offer.peer)
                    chosen.append(offer)
        for offer in chosen:
            self._chosen[offer.lease] = self._offers.pop(offer.lease)
        return tuple(chosen)

    def _preference(self, offer: AcceptedOffer) -> tuple[bool, tuple[float, float, float]]:
        """Return the sort key of an offer; peers that another role needs come last."""
        return (self._needed_elsewhere(offer), offer.rank)

    def _needed_elsewhere(self, offer: AcceptedOffer) -> bool:
        for role, missing in self.missing().items():
            if role != offer.role and self._role_requests[role].count > self._role_requests[offer.role].count:
                peers = {other.peer for other in self._offers.values() if other.role == role}
                if offer.peer in peers and len(peers) <= missing:
                    return True
        return False

    def confirm(self, lease: uuid.UUID) -> None:
        """Record that the worker confirmed a selected offer."""
        self._held[lease] = self._chosen.pop(lease)

    def deny(self, lease: uuid.UUID, now: float) -> None:
        """Record that a selected offer was no longer available; its peer may make another."""
        self._chosen.pop(lease, None)
        if self._first_at is None and any(self.missing()[offer.role] for offer in self._usable(now)):
            self._first_at = now

    def lease_lost(self, lease: uuid.UUID) -> None:
        """Search again for a lease that was held and is lost."""
        self._held.pop(lease, None)
