"""Worker allocation: publishes requests, accepts the offers that the auction selects, and explains failures.

The I/O around `auction`. Called by `training` with the role requests that `submit` made; `service` delivers the offers.
Accepted leases are kept alive by `renewal`.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_net import instrumentation, pubsub, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_proto.ids import PeerId
from hypha_proto.leases import (
    RELEASE_LEASE,
    RENEW_LEASE,
    RENEWED_LEASE,
    WHY_NOT,
    ReleaseLease,
    Renewed,
    RenewLease,
    WhyNot,
)
from hypha_proto.offers import OFFER_WINDOW, WORKER_REQUESTS, WorkerOffer, WorkerRequest
from hypha_proto.resources import Timestamp
from hypha_scheduler.allocation.auction import AcceptedOffer, Auction, RoleRequest
from hypha_scheduler.allocation.leases import HeldLeases
from hypha_scheduler.errors import AllocationError

_log = logging.getLogger(__name__)

REPUBLISH: Final = 1.0
"""Seconds after which an unmet request is published again."""
_QUICK_REPUBLISH: Final = 0.25
_RENEW_TIMEOUT: Final = 5.0
_REASON_TIMEOUT: Final = 3.0
_MAX_PEERS_ASKED: Final = 32
_MAX_LEASE_LIFE: Final = 3600.0


def lease_life(timeout_ms: int | None) -> float:
    """Return the life of a renewed lease in seconds; older workers do not state it."""
    return RENEWED_LEASE if timeout_ms is None else min(timeout_ms / 1000, _MAX_LEASE_LIFE)


def make_request(role_request: RoleRequest) -> WorkerRequest:
    """Build a request with a new id. It contains the bid; the maximum price is never sent."""
    return WorkerRequest(
        id=uuid.uuid4(),
        spec=role_request.spec,
        timeout=Timestamp.of(time.time() + OFFER_WINDOW),
        bid=role_request.bid,
        timeout_ms=int(OFFER_WINDOW * 1000),
    )


@dataclass(slots=True)
class Allocator:
    """Search for the workers of one job."""

    endpoint: Endpoint
    role_requests: tuple[RoleRequest, ...]
    leases: HeldLeases
    minimum: dict[str, int]
    """Number of workers of each role that suffices after `timeout`."""
    timeout: float
    """Seconds to find all workers."""
    seconds: float = 0.0
    """Time from the first published request until all leases were held."""
    auction: Auction = field(init=False)
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _requests: dict[str, WorkerRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.auction = Auction(self.role_requests)

    def add_offer(self, peer: PeerId, offer: WorkerOffer) -> None:
        """Pass a received offer to the auction."""
        if self.auction.add_offer(peer, offer, anyio.current_time()):
            self._changed.set()
        else:
            _log.debug("offer %s of %s rejected: %s", offer.id, peer, self.auction.rejections.get(peer, "stale"))

    def lease_lost(self, lease: uuid.UUID) -> None:
        """Search for a replacement of a lease that was lost during the search."""
        self.auction.lease_lost(lease)
        self._changed.set()

    async def allocate(self) -> tuple[AcceptedOffer, ...]:
        """Search until all leases are held, or until `timeout` if the minimum is held then; return the leases.

        Raises:
            AllocationError: fewer workers than the minimum were found within `timeout` seconds. The message says how
                many were found, and why the other workers made no offer.
        """
        deadline = anyio.current_time() + self.timeout
        await self._wait_for_peers(deadline)
        began = anyio.current_time()
        next_publish = began
        while not self.auction.complete:
            now = anyio.current_time()
            if now >= deadline:
                if not self._has_minimum():
                    raise AllocationError(await self._explain_shortage())
                break
            if now >= next_publish:
                await self._publish()
                next_publish = now + REPUBLISH
            if await self._decide():
                next_publish = min(next_publish, anyio.current_time() + _QUICK_REPUBLISH)
            else:
                await self._wait(min(next_publish, deadline, self.auction.decide_at() or deadline))
        self.seconds = anyio.current_time() - began
        return self.auction.held

    def _has_minimum(self) -> bool:
        held = Counter(offer.role for offer in self.auction.held)
        return all(held[role] >= count for role, count in self.minimum.items())

    async def _wait_for_peers(self, deadline: float) -> None:
        await self.endpoint.connect_subscribers(WORKER_REQUESTS.name)  # a Rust gateway forwards no request to them
        logged = False
        while not self.endpoint.topic_peers(WORKER_REQUESTS.name) and anyio.current_time() < deadline:
            if not logged:
                _log.info("waiting for peers in the topic %s", WORKER_REQUESTS.name)
                logged = True
            await anyio.sleep(0.05)

    async def _publish(self) -> None:
        for role_request in self.role_requests:
            if self.auction.missing()[role_request.role] > 0:
                request = make_request(role_request)
                self._requests[role_request.role] = request
                self.auction.register_request(request.id, role_request.role)
                with instrumentation.span(
                    "advertise", {"hypha.role": role_request.role, "hypha.bid": role_request.bid}, kind="producer"
                ):
                    await pubsub.publish(self.endpoint, WORKER_REQUESTS, request)

    def _candidates(self) -> list[PeerId]:
        """Return the peers that may make offers: subscribers whose certificate does not state a role but worker."""
        known = self.endpoint.connected_peers()
        peers = self.endpoint.topic_peers(WORKER_REQUESTS.name)
        return [peer for peer in peers if peer not in known or known[peer].role in (None, "worker")]

    async def _decide(self) -> bool:
        """Select offers and accept them if it is time to; return whether any were selected."""
        at = self.auction.decide_at()
        now = anyio.current_time()
        if at is None or (now < at and not self.auction.all_offers_in(self._candidates(), now)):
            return False
        chosen = self.auction.decide(now)
        async with anyio.create_task_group() as tasks:
            for offer in chosen:
                tasks.start_soon(self._accept, offer)
        return bool(chosen)

    async def _accept(self, offer: AcceptedOffer) -> None:
        with instrumentation.span("lease", {"hypha.role": offer.role, "hypha.peer.id": str(offer.peer)}) as span:
            span.set({"hypha.taken": await self._renew(offer)})

    async def _renew(self, offer: AcceptedOffer) -> bool:
        """Accept an offer by renewing its lease; return whether the worker confirmed it."""
        asked_at = anyio.current_time()
        try:
            answer = await rpc.call(
                self.endpoint, offer.peer, RENEW_LEASE, RenewLease(id=offer.lease), timeout=_RENEW_TIMEOUT
            )
        except NetError as error:
            _log.warning("%s made an offer but cannot be reached: %s", offer.peer, error)
            self.auction.deny(offer.lease, anyio.current_time())
            return False
        if isinstance(answer, Renewed):
            self.leases.record_renewal(offer.lease, offer.peer, asked_at, lease_life(answer.timeout_ms))
            self.auction.confirm(offer.lease)
            return True
        _log.info("the offer of %s expired before it was accepted", offer.peer)
        self.auction.deny(offer.lease, anyio.current_time())
        return False

    async def _wait(self, until: float) -> None:
        with anyio.move_on_after(max(0.0, until - anyio.current_time())):
            await self._changed.wait()
        self._changed = anyio.Event()

    async def _explain_shortage(self) -> str:
        """Describe for the job's owner why not enough workers were found."""
        held = Counter(offer.role for offer in self.auction.held)
        found = ", ".join(
            f"{held[role_request.role]} of {role_request.count} for {role_request.role}"
            for role_request in self.role_requests
        )
        lines = [f"not enough workers within {self.timeout:g} s: {found}"]
        peers = sorted(self.endpoint.topic_peers(WORKER_REQUESTS.name))
        if not peers:
            return (
                f"{lines[0]}; no peer subscribes to worker requests: is a gateway connected, and is a worker running?"
            )
        reasons: dict[PeerId, list[str]] = {peer: [text] for peer, text in self.auction.rejections.items()}
        missing = [role for role, count in self.auction.missing().items() if count > 0 and role in self._requests]
        async with anyio.create_task_group() as tasks:
            for peer in (await self._peers_to_ask(peers))[:_MAX_PEERS_ASKED]:
                for role in missing:
                    tasks.start_soon(self._ask_reasons, peer, role, reasons)
        for offer in self.auction.held:
            reasons[offer.peer] = [f"taken for {offer.role} already: each part of a job runs on a worker of its own"]
        for peer, texts in sorted(reasons.items()):
            lines.append(f"{peer}: {'; '.join(texts) or 'would make an offer now'}")
        lines += [_hint_for_unlisted(role, self._requests[role].bid) for role in missing]
        return "\n  ".join(lines)

    async def _peers_to_ask(self, connected: list[PeerId]) -> list[PeerId]:
        """Return the peers to ask for reasons; workers without an offer often have no connection to this node."""
        try:
            found = await self.endpoint.find_peers(timeout=_REASON_TIMEOUT)
        except NetError as error:
            _log.debug("cannot look up further workers to ask why they made no offer: %s", error)
            return connected
        return list(dict.fromkeys((*connected, *found)))

    async def _ask_reasons(self, peer: PeerId, role: str, reasons: dict[PeerId, list[str]]) -> None:
        question = WhyNot(request=self._requests[role])
        try:
            answer = await rpc.call(self.endpoint, peer, WHY_NOT, question, timeout=_REASON_TIMEOUT)
        except NetError as error:
            _log.debug("%s did not answer why it made no offer: %s", peer, error)
            return
        reasons.setdefault(peer, []).extend(f"{role}: {reason[:200]}" for reason in answer.reasons[:8])


def _hint_for_unlisted(role: str, bid: float) -> str:
    """Explain likely reasons of workers that were not found or did not answer."""
    return (
        f"workers that are not named here made no offer for {role}: the bid of {bid:g} may be under their price or "
        "floor (raise the bid), or they lack required resources"
    )


async def release(endpoint: Endpoint, peer: PeerId, lease: uuid.UUID, reason: str, *, timeout: float = 2.5) -> None:
    """Release a lease, which cancels the jobs on it. An unreachable worker drops the lease when it expires."""
    try:
        await rpc.call(endpoint, peer, RELEASE_LEASE, ReleaseLease(id=lease, reason=reason), timeout=timeout)
    except NetError as error:
        _log.info("lease %s at %s could not be released and will expire: %s", lease, peer, error)
