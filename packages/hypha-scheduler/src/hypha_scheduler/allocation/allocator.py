"""Worker allocation: publishes requests and accepts the offers that the auction selects.

The I/O around `auction`. Accepted leases are kept alive by `renewal`; `shortage_report` explains why workers are
missing.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final

import anyio
import anyio.abc

from hypha_net import instrumentation, pubsub, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_proto.ids import PeerId
from hypha_proto.leases import RELEASE_LEASE, RENEW_LEASE, ReleaseLease, Renewed, RenewLease
from hypha_proto.offers import OFFER_WINDOW, WORKER_REQUESTS, WorkerOffer, WorkerRequest
from hypha_scheduler.allocation.auction import AcceptedOffer, Auction, AuctionTable, RoleRequest
from hypha_scheduler.allocation.leases import HeldLeases
from hypha_scheduler.allocation.search_pacing import SearchPacing
from hypha_scheduler.allocation.shortage import Shortage
from hypha_scheduler.allocation.shortage_report import ShortageReport, all_candidates, candidates
from hypha_scheduler.errors import AllocationError

_log = logging.getLogger(__name__)

REPUBLISH: Final = 1.0
"""Seconds after which an unmet request is published again."""
_REPUBLISH_WITH_SET: Final = 0.5
"""The same while an incomplete set is held: it gets what others release before it is released itself."""
_WINDOW: Final = 1.25 * REPUBLISH
"""Seconds for which workers keep a request: until the next one replaces it. Longer, they would reserve resources for
many schedulers whose sets are incomplete and hold each other up."""
_WINDOW_WITHOUT_SET: Final = 0.4
"""Seconds in which workers may answer the request of a search that gave up a set and holds nothing. They do not keep it
until somebody releases a lease: that belongs to those who hold an incomplete set, or none would ever be complete."""
_QUICK_REPUBLISH: Final = 0.25
_MOST_AT_ONCE: Final = 16
"""Requests for one role that are published together: a worker decides about 100 at a time, of all schedulers."""
_REPUBLISH_FOR_GROWTH: Final = 3.0
"""Seconds after which a request is published again that was unmet for `_GROWTH_AFTER` seconds, if the job goes on
without it."""
_GROWTH_AFTER: Final = 10.0
_SOON: Final = 0.01
"""Seconds until the next request, if this turn has taken or released offers, whose workers can offer again."""
_LOST_RELEASE_TIME: Final = 300.0
"""Seconds for which the release of a lost lease is attempted: longer than a worker holds one that is not renewed."""
_LOST_RELEASE_PAUSE: Final = 2.0
_RENEW_TIMEOUT: Final = 5.0
_MAX_LEASE_LIFE: Final = 3600.0


def make_request(role_request: RoleRequest, window: float = OFFER_WINDOW) -> WorkerRequest:
    """Build a request with a new id. It contains the bid; the maximum price is never sent.

    Args:
        role_request: what is requested.
        window: seconds from receipt in which workers may make an offer.
    """
    return WorkerRequest(
        id=uuid.uuid4(),
        spec=role_request.spec,
        bid=role_request.bid,
        timeout_ms=int(window * 1000),
    )


@dataclass(slots=True)
class Allocator:
    """Search for the workers of one job."""

    endpoint: Endpoint
    role_requests: tuple[RoleRequest, ...]
    leases: HeldLeases
    minimum: Mapping[str, int]
    """Leases of each role that suffice at the end of `timeout`; fewer that become no more are not kept for long."""
    timeout: float
    """Seconds to find all workers; infinite while the job goes on without them."""
    tasks: anyio.abc.TaskGroup
    """Task group of the job. Unanswered renewals and releases go on in it when the search is over."""
    settings: AuctionTable = field(default_factory=AuctionTable)
    on_shortage: Callable[[Shortage], None] = lambda _shortage: None
    """Called with what is logged about a role that lacks workers."""
    excluded: frozenset[PeerId] = frozenset()
    """Peers with which the job has leases already."""
    exclusive: frozenset[PeerId] = frozenset()
    """See `Auction.exclusive`."""
    on_acquired: Callable[[AcceptedOffer], None] = lambda _offer: None
    """Called with each confirmed lease; while the minimum is not held it may be given up again."""
    settle: float | None = None
    """Seconds for which the minimum must have been held until `on_settled` is called; None to call it never."""
    on_settled: Callable[[], None] = lambda: None
    """Called once, when the job can start with what is held."""
    demand: tuple[RoleRequest, ...] = ()
    """What the job wants in all, with the leases of `holding`; `role_requests` if empty."""
    holding: Mapping[str, int] = field(default_factory=dict)
    """Number of leases of each role that the job holds already."""
    random: Random = field(default_factory=Random)
    seconds: float = 0.0
    """Time from the first published request until all leases were held."""
    auction: Auction = field(init=False)
    shortage: ShortageReport = field(init=False)
    _attempts: SearchPacing = field(init=False)
    _began: float = 0.0
    _deadline: float = 0.0
    """End of the search; infinite once the job has settled and goes on without the others."""
    _is_over: bool = False
    _is_asking: bool = False
    """Whether workers are being asked if others compete for them."""
    _declining: set[PeerId] = field(default_factory=set)
    """Peers to which the release of an offer is in flight."""
    _settled_at: float | None = None
    """When the minimum will have been held for `settle` seconds."""
    _is_settled: bool = False
    _published_at: float = 0.0
    _next_publish: float = 0.0
    _changed: anyio.Event = field(default_factory=anyio.Event)
    requests: dict[str, WorkerRequest] = field(default_factory=dict)
    """The last request that was published for each role."""

    def __post_init__(self) -> None:
        self.auction = Auction(self.role_requests, self.settings, self.random, self.excluded, self.exclusive)
        self.demand = self.demand or self.role_requests
        self.shortage = ShortageReport(self, self.endpoint, self.auction)

    def add_offer(self, peer: PeerId, offer: WorkerOffer) -> None:
        """Pass a received offer to the auction; in a pause and after the search, release it for others."""
        if self.auction.is_requested(offer) and self._is_pausing():
            self._decline(peer, offer)
        elif self.auction.add_offer(peer, offer, anyio.current_time(), self.endpoint.round_trip_time(peer) or 0.0):
            self._changed.set()
        else:
            _log.debug("offer %s of %s at %g is not acceptable", offer.id, peer, offer.price)

    def lease_lost(self, lease: uuid.UUID) -> None:
        """Search for a replacement of a lease that was lost during the search."""
        now = anyio.current_time()
        self.auction.lease_lost(lease, now)
        self._attempts.restart_patience(now)
        self._changed.set()

    async def allocate(self) -> tuple[AcceptedOffer, ...]:
        """Search until all leases are held, or until `timeout` if the minimum is held then; return the leases.

        Raises:
            AllocationError: fewer workers than the minimum were found within `timeout` seconds. The message says how
                many were found, and why the other workers made no offer.
        """
        self._deadline = anyio.current_time() + self.timeout
        await self._wait_for_peers()
        self._began = self._next_publish = anyio.current_time()
        self._attempts = SearchPacing(self._deadline, self.random)
        async with anyio.create_task_group() as watching:
            watching.start_soon(self.shortage.watch)
            await self._search(watching)
            watching.cancel_scope.cancel()
        self.close()
        if self.short_roles:
            raise AllocationError(await self.shortage.explain(self.timeout))
        self.seconds = self.elapsed
        return self.auction.held

    def close(self) -> None:
        """End the search: offers and leases that come from now on are released."""
        self._is_over = True
        self.auction.close()

    @property
    def elapsed(self) -> float:
        """Seconds since the first published request."""
        return anyio.current_time() - self._began

    async def _search(self, tasks: anyio.abc.TaskGroup) -> None:
        """Search until all leases are held, or until the deadline."""
        while not self.auction.complete and (now := anyio.current_time()) < self._deadline:
            for offer in self.auction.mark_late(now):
                _log.info("%s is late to confirm its offer for %s: taking the next best", offer.peer, offer.role)
            if self._is_stalled(now):
                self._reconsider(now, tasks)
            resume_at = self._attempts.resume_at
            if resume_at is not None and now < resume_at:
                await self._wait(resume_at)
                continue
            self._attempts.resume(now)
            self._check_settled(now)
            if now >= self._next_publish and self.auction.open_requests:
                await self._publish()
                self._published_at = now
                self._next_publish = now + self._republish_after(now)
            self._accept_offers(now)
            self._decline_unneeded(now)
            times = (
                self._deadline,
                self._next_publish,
                self.auction.decide_at(now),
                self.auction.next_late_at(),
                self._attempts.give_up_at,
                self._settled_at,
            )
            await self._wait(min(at for at in times if at is not None and at > now))

    def _check_settled(self, now: float) -> None:
        """Let the job start once the minimum has been held for `settle` seconds."""
        if self.settle is None or self._is_settled:
            return
        if self.short_roles:
            self._settled_at = None
        elif self._settled_at is None:
            self._settled_at = now + self.settle
        if self._settled_at is not None and now >= self._settled_at:
            self._is_settled, self._deadline = True, math.inf
            self.on_settled()

    def is_needed(self) -> bool:
        """Return whether the job waits for the search: it has not begun, or holds less than its minimum of a role."""
        has_begun = self._is_settled or bool(self.holding)
        return not has_begun or self.shortage.is_below_minimum

    def _republish_after(self, now: float) -> float:
        """Return the seconds until an unmet request is published again."""
        if now - self._began >= _GROWTH_AFTER and not self.is_needed():
            return _REPUBLISH_FOR_GROWTH
        return _REPUBLISH_WITH_SET if self.auction.held else REPUBLISH

    def _is_pausing(self) -> bool:
        return self._is_over or self._attempts.resume_at is not None

    @property
    def short_roles(self) -> tuple[str, ...]:
        """Roles with less than their minimum of leases."""
        held = Counter(offer.role for offer in self.auction.held)
        return tuple(role for role, count in self.minimum.items() if held[role] < count)

    def _is_stalled(self, now: float) -> bool:
        """Return whether the set of leases is too small for the job and does not grow any more."""
        at = self._attempts.give_up_at
        if at is None or now < at or not self.short_roles:
            return False
        return self.auction.decide_at(now) is None and self.auction.next_late_at() is None

    def _reconsider(self, now: float, tasks: anyio.abc.TaskGroup) -> None:
        """Give up what is held, unless it turns out that no other scheduler can be waiting for it."""
        if not self.auction.held:
            self._give_up(now)
        elif not self._is_asking:
            self._is_asking = True
            tasks.start_soon(self._give_up_if_contended)

    async def _give_up_if_contended(self) -> None:
        is_contended = await self.shortage.is_contended()
        now, self._is_asking = anyio.current_time(), False
        if self._is_stalled(now):
            if is_contended:
                self._give_up(now)
            else:
                self._attempts.restart_patience(now)
        self._changed.set()

    def _give_up(self, now: float) -> None:
        """Release all leases, which other schedulers may be waiting for, and pause."""
        released = self.auction.give_up()
        for offer in released:
            self._release(offer, "the scheduler found too few workers to go with it")
        pause = self._attempts.give_up(now)
        self._next_publish = now + pause
        if released:
            _log.info("released an incomplete set of %d leases, trying again in %.1f s", len(released), pause)

    def _release(self, offer: AcceptedOffer, reason: str) -> None:
        self.leases.drop(offer.lease)
        self.tasks.start_soon(release, self.endpoint, offer.peer, offer.lease, reason)

    async def _wait_for_peers(self) -> None:
        await self.endpoint.connect_subscribers(WORKER_REQUESTS.name)
        logged = False
        while not self.endpoint.topic_peers(WORKER_REQUESTS.name) and anyio.current_time() < self._deadline:
            if not logged:
                _log.info("waiting for peers in the topic %s", WORKER_REQUESTS.name)
                logged = True
            await anyio.sleep(0.05)

    async def _publish(self) -> None:
        window = _WINDOW if self._attempts.is_first or self.auction.held else _WINDOW_WITHOUT_SET
        for role_request in self.auction.open_requests:
            for _ in range(self._requests_at_once(role_request)):
                request = make_request(role_request, window)
                self.requests[role_request.role] = request
                self.auction.register_request(request.id, role_request.role)
                about: instrumentation.Attributes = {"hypha.role": role_request.role, "hypha.bid": role_request.bid}
                with instrumentation.span("advertise", about, kind=instrumentation.SpanKind.PRODUCER):
                    await pubsub.publish(self.endpoint, WORKER_REQUESTS, request)

    def _requests_at_once(self, role_request: RoleRequest) -> int:
        """Return how many requests to publish for a role: each worker makes one offer for each of them.

        As many as each worker has to take of what is missing, if its leases may share workers.
        """
        if role_request.distinct_peers:
            return 1
        each = math.ceil(self.auction.missing()[role_request.role] / max(1, len(candidates(self.endpoint))))
        return min(_MOST_AT_ONCE, each)

    def _accept_offers(self, now: float) -> None:
        """Select offers and begin to accept them if it is time to."""
        at = self.auction.decide_at(now)
        if at is None or (now < at and not self.auction.all_offers_in(all_candidates(self.endpoint), now)):
            return
        for offer in self.auction.decide(now):
            self.tasks.start_soon(self._accept, offer)
        # a worker that shares its resources among leases makes its next offer at once
        is_shared = any(not request.distinct_peers for request in self.auction.open_requests)
        self._next_publish = min(self._next_publish, now + (_SOON if is_shared else _QUICK_REPUBLISH))

    def _decline(self, peer: PeerId, offer: WorkerOffer) -> None:
        """Release an offer that cannot be accepted, one of each peer at a time: a peer may send any number."""
        if peer not in self._declining:
            self._declining.add(peer)
            self.tasks.start_soon(self._release_declined, peer, offer.id)

    async def _release_declined(self, peer: PeerId, lease: uuid.UUID) -> None:
        try:
            reason = f"the search for workers {'is over' if self._is_over else 'pauses'}"
            await release(self.endpoint, peer, lease, reason)
        finally:
            self._declining.discard(peer)

    def _decline_unneeded(self, now: float) -> None:
        """Release offers for roles that are filled, and ask their workers for the role that is not."""
        unneeded = self.auction.take_unneeded(now)
        for offer in unneeded:
            self._release(offer, f"all workers for {offer.role} are found")
        if unneeded:
            self._next_publish = min(self._next_publish, max(now + _SOON, self._published_at + _QUICK_REPUBLISH))

    async def _accept(self, offer: AcceptedOffer) -> None:
        with instrumentation.span("lease", {"hypha.role": offer.role, "hypha.peer.id": str(offer.peer)}) as span:
            span.set_attribute("hypha.taken", await self._renew(offer))
        self._changed.set()

    async def _renew(self, offer: AcceptedOffer) -> bool:
        """Accept an offer by renewing its lease; return whether the worker confirmed it and it is still needed."""
        asked_at = anyio.current_time()
        try:
            life = await renew(self.endpoint, offer.peer, offer.lease, _RENEW_TIMEOUT)
        except NetError as error:
            pause = self.auction.deny(offer.lease, anyio.current_time())
            _log.warning("%s made an offer but did not confirm it, ignored for %.1f s: %s", offer.peer, pause, error)
            self._release(offer, "its renewal was not answered")  # the answer may have been lost
            return False
        now = anyio.current_time()
        if life is None:
            pause = self.auction.deny(offer.lease, now)
            _log.info("the offer of %s expired before it was accepted, ignored for %.1f s", offer.peer, pause)
            return False
        if not self.auction.confirm(offer.lease):
            _log.info("the lease of %s was confirmed when it was no longer needed", offer.peer)
            self._release(offer, "it was no longer needed")
            return False
        self.leases.record_renewal(offer.lease, offer.peer, asked_at, life)
        self._attempts.restart_patience(now)
        self.on_acquired(offer)
        self._check_settled(now)
        return True

    async def _wait(self, until: float) -> None:
        with anyio.move_on_after(max(0.0, until - anyio.current_time())):
            await self._changed.wait()
        self._changed = anyio.Event()


async def renew(endpoint: Endpoint, peer: PeerId, lease: uuid.UUID, timeout: float) -> float | None:
    """Renew a lease; return the seconds for which it lasts from the call on, or None if its worker does not have it.

    Raises:
        NetError: the worker does not answer.
    """
    answer = await rpc.call(endpoint, peer, RENEW_LEASE, RenewLease(id=lease), timeout=timeout)
    return min(answer.timeout_ms / 1000, _MAX_LEASE_LIFE) if isinstance(answer, Renewed) else None


async def release(endpoint: Endpoint, peer: PeerId, lease: uuid.UUID, reason: str, *, timeout: float = 2.5) -> bool:
    """Release a lease, which cancels the jobs on it; return whether its worker has answered.

    The end of a job, which cancels its background tasks, does not interrupt it.
    """
    try:
        with anyio.CancelScope(shield=True):
            await rpc.call(endpoint, peer, RELEASE_LEASE, ReleaseLease(id=lease, reason=reason), timeout=timeout)
    except NetError as error:
        _log.info("lease %s at %s could not be released: %s", lease, peer, error)
        return False
    return True


async def release_when_back(endpoint: Endpoint, peer: PeerId, lease: uuid.UUID, reason: str) -> None:
    """Release a lease whose worker does not answer, as soon as it does; give up after `_LOST_RELEASE_TIME`.

    Its task would run on for as long as a scheduler may be away, and hold what a new lease needs.
    """
    with anyio.move_on_after(_LOST_RELEASE_TIME):
        while True:
            try:
                await rpc.call(endpoint, peer, RELEASE_LEASE, ReleaseLease(id=lease, reason=reason), timeout=2.5)
            except NetError as error:
                _log.debug("lost lease %s at %s could not be released: %s", lease, peer, error)
            else:
                return
            await anyio.sleep(_LOST_RELEASE_PAUSE)
