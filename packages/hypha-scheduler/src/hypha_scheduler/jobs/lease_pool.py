"""The leases of one job: searches for those that its operator wants, renews them, and releases those it does not.

The first search looks for all roles together, so that a job does not hold workers that are of no use without others;
where every role starts at its minimum, it delivers leases once that has settled. Later ones, for growth and
replacement, deliver each lease as it is found, and go on as long as the job.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import anyio
import anyio.abc

from hypha_net.endpoint import Endpoint
from hypha_proto.ids import PeerId
from hypha_proto.offers import WorkerOffer
from hypha_scheduler.allocation.allocator import Allocator, release, release_when_back
from hypha_scheduler.allocation.auction import AcceptedOffer, RoleRequest
from hypha_scheduler.allocation.leases import HeldLease, HeldLeases
from hypha_scheduler.allocation.renewal import renew_leases
from hypha_scheduler.errors import AllocationError
from hypha_scheduler.strategies.base import Lease

if TYPE_CHECKING:
    from hypha_scheduler.jobs.runner import JobRunner


@dataclass(slots=True)
class _LeaseSearch:
    """A search that is in progress."""

    allocator: Allocator
    scope: anyio.CancelScope
    wanted: tuple[RoleRequest, ...]
    holders: frozenset[PeerId]
    """Workers that held leases of the job when it began: it takes no offers of theirs."""


@dataclass(slots=True)
class LeasePool:
    """Leases of one job."""

    runner: JobRunner
    """Hears what happens to the leases."""
    endpoint: Endpoint
    tasks: anyio.abc.TaskGroup
    """Task group of the job."""
    _timeout: float = field(init=False)
    """Seconds for which the job waits for the minimum of a role, before its begin and later."""
    _wanted: tuple[RoleRequest, ...] = ()
    _held: dict[uuid.UUID, Lease] = field(default_factory=dict)
    _renewed: HeldLeases = field(init=False)
    _taken_back: set[uuid.UUID] = field(default_factory=set)
    """Leases of an earlier run that are renewed and not yet held."""
    _adopted: frozenset[uuid.UUID] = frozenset()
    """Leases of an earlier run."""
    _draining: set[uuid.UUID] = field(default_factory=set)
    """Held leases whose workers have announced that they will end."""
    _search: _LeaseSearch | None = None
    _is_stale: bool = False
    """Whether the leases have changed since they were last compared with the demand."""
    _last: Allocator | None = None
    """Allocator of the search before; it releases offers that come late."""
    _short_since: dict[str, float] = field(default_factory=dict)
    """Time since which the job, which has begun, holds less than its minimum of a role."""
    _began: bool = False
    """Whether the first search has found its leases."""
    _closed: bool = False

    def __post_init__(self) -> None:
        self._timeout = self.runner.job.allocation_timeout
        self._renewed = HeldLeases(on_gone=self.runner.on_lease_gone)

    @property
    def held(self) -> tuple[Lease, ...]:
        """Leases that were delivered and neither lost nor released."""
        return tuple(self._held.values())

    @property
    def _has_begun(self) -> bool:
        """Whether the job has its first leases: from a search, or from an earlier run and not given up."""
        return self._began or not self._adopted.isdisjoint(self._held)

    def __contains__(self, lease: object) -> bool:
        return lease in self._held

    def renews(self, lease: uuid.UUID, peer: PeerId) -> bool:
        """Return whether a lease of a peer is renewed, also one that is not delivered yet."""
        held = self._renewed.get(lease)
        return held is not None and held.peer == peer

    def seconds_left(self, lease: uuid.UUID) -> float:
        """Return the seconds until a lease expires unless it is renewed; 0 if it is not held."""
        held = self._renewed.get(lease)
        return 0.0 if held is None else max(0.0, held.expires - anyio.current_time())

    def is_taking(self, lease: uuid.UUID, peer: PeerId) -> bool:
        """Return whether a peer was asked for its offer of a lease, and its answer is not there yet."""
        asked = () if self._search is None else self._search.allocator.auction.unanswered
        return any(offer.lease == lease and offer.peer == peer for offer in asked)

    def check(self, lease: uuid.UUID) -> None:
        """Find out whether the worker of a lease is there still."""
        self._renewed.check(lease, anyio.current_time())

    async def renew(self) -> None:
        """Renew the leases until cancelled."""
        await renew_leases(self.endpoint, self._renewed, self._on_not_renewed)

    # ------------------------------------------------------------------------------------------------------- adoption

    def take_back(self, lease: Lease, asked_at: float, life: float) -> None:
        """Renew from now on a lease of an earlier run of the scheduler; `adopt` delivers it.

        Args:
            lease: the lease.
            asked_at: when its last renewal was sent.
            life: seconds for which it lasts from then.
        """
        self._renewed.record_renewal(lease.id, lease.peer, asked_at, life)
        self._taken_back.add(lease.id)
        self.runner.on_lease_held(lease)

    def adopt(self, leases: Sequence[Lease]) -> tuple[Lease, ...]:
        """Hold those leases that were taken back and are still renewed, and return them; then the job has begun."""
        self._taken_back.clear()
        found = tuple(lease for lease in leases if lease.id in self._renewed)
        self._held |= {lease.id: lease for lease in found}
        self._adopted = frozenset(lease.id for lease in found)
        self._is_stale = True
        return found

    def drop_unknown(self, leases: Sequence[Lease], reason: str) -> None:
        """Release leases of an earlier run of the scheduler that nothing runs on."""
        for lease in leases:
            self.tasks.start_soon(release, self.endpoint, lease.peer, lease.id, reason)

    # --------------------------------------------------------------------------------------------------------- demand

    def set_demand(self, requests: Sequence[RoleRequest]) -> None:
        """Set which leases are wanted; begins a search for those that are missing, and releases surplus ones.

        Raises:
            ValueError: two requests are for the same role.
        """
        wanted = tuple(requests)
        if self._closed or (wanted == self._wanted and not self._is_stale):
            return
        _check_roles(wanted)
        self._wanted = wanted
        self._is_stale = False
        self._release_surplus()
        self._start_search()

    def task_ended(self) -> None:
        """Compare leases and demand again at the next `set_demand`: a lease may be surplus now."""
        self._is_stale = True

    def _missing(self) -> tuple[RoleRequest, ...]:
        unusable = {lease.id for request in self._wanted for lease in self._unusable(request)}
        held = Counter(lease.role for lease in self._held.values() if lease.id not in unusable)
        short = ((request, request.count - held[request.role]) for request in self._wanted)
        return tuple(
            replace(request, count=count, minimum=max(0, request.minimum - held[request.role]))
            for request, count in short
            if count > 0
        )

    def _release_surplus(self) -> None:
        for request in self._wanted:
            unusable = self._unusable(request)
            if len(unusable) < sum(lease.role == request.role for lease in self._held.values()):
                for lease in unusable:
                    self.release(lease.id, "attempts of this job failed at its worker")
        wanted = {request.role: request.count for request in self._wanted}
        for role, count in Counter(lease.role for lease in self._held.values()).items():
            idle = [lease for lease in self.held if lease.role == role and not self.runner.has_task(lease.id)]
            for lease in idle[::-1][: max(0, count - wanted.get(role, 0))]:  # the newest first
                self.release(lease.id, "the job needs it no longer")

    def _unusable(self, request: RoleRequest) -> list[Lease]:
        """Return the leases of a role at peers that it excludes on which no task runs."""
        at_excluded = (lease for lease in self.held if lease.role == request.role and lease.peer in request.excluded)
        return [lease for lease in at_excluded if not self.runner.has_task(lease.id)]

    def _start_search(self) -> None:
        missing, holders = self._missing(), frozenset(lease.peer for lease in self._held.values())
        if self._search is not None:
            if self._search.wanted == missing and self._search.holders <= holders:
                return
            self._stop_search()
        seconds = self._time_left(missing)
        if not missing or self._closed:
            return
        distinct = {request.role for request in self._wanted if request.distinct_peers}
        starts_early = not self._has_begun and all(request.starts_at_minimum for request in missing)
        allocator = Allocator(
            self.endpoint,
            missing,
            self._renewed,
            minimum={request.role: 0 if self._has_begun else request.minimum for request in missing},
            timeout=seconds,
            tasks=self.tasks,
            settings=self.runner.host.auction,
            on_shortage=self.runner.on_shortage,
            excluded=holders,
            exclusive=frozenset(lease.peer for lease in self._held.values() if lease.role in distinct),
            on_acquired=self._on_found,
            settle=max(request.settle for request in missing) if starts_early else None,
            on_settled=self._on_settled,
            demand=self._wanted,
            holding=Counter(lease.role for lease in self._held.values()),
        )
        self._search = _LeaseSearch(allocator, anyio.CancelScope(), missing, holders)
        self.tasks.start_soon(self._run_search, self._search)

    def _stop_search(self) -> None:
        """Stop the search; what it holds and has not delivered is released."""
        search, self._search = self._search, None
        if search is None:
            return
        self._last = search.allocator
        search.scope.cancel()
        search.allocator.close()
        for offer in search.allocator.auction.held:
            if offer.lease not in self._held and offer.lease in self._renewed:
                self._drop(offer.lease, offer.peer, "the job's needs have changed")

    async def _run_search(self, search: _LeaseSearch) -> None:
        with search.scope:
            try:
                offers = await search.allocator.allocate()
            except AllocationError as error:
                self._give_up(search)
                if self.runner.on_placed is not None and not self._has_begun:
                    self._start_search()
                else:
                    self.runner.on_allocation_timeout(search.allocator.short_roles, str(error))
                return
            self._search, self._last = None, search.allocator
            if not self._has_begun:
                self._deliver(offers, search.allocator.seconds)
            elif overdue := self._overdue():
                self.runner.on_allocation_timeout(overdue, await search.allocator.shortage.explain(self._timeout))
        self._start_search()  # for replacements of what was lost meanwhile

    def _time_left(self, missing: Sequence[RoleRequest]) -> float:
        """Return the seconds of a search: until the job has waited long enough for the minimum of a role."""
        if not self._has_begun:
            return self._timeout
        now = anyio.current_time()
        short = (request.role for request in missing if request.minimum)
        self._short_since = {role: self._short_since.get(role, now) for role in short}
        return max(0.0, min(self._short_since.values(), default=math.inf) + self._timeout - now)

    def _overdue(self) -> list[str]:
        """Return the roles for whose minimum the job has waited long enough; for each the time begins again."""
        now, short = anyio.current_time(), {request.role for request in self._missing() if request.minimum}
        found = [role for role, since in self._short_since.items() if role in short and now >= since + self._timeout]
        for role in found:
            del self._short_since[role]
        return found

    def _give_up(self, search: _LeaseSearch) -> None:
        """End a search that found too few leases to begin with; the next one follows unless the job ends."""
        self._search, self._last = None, search.allocator
        self._is_stale = True
        for offer in search.allocator.auction.held:
            self._drop(offer.lease, offer.peer, "the scheduler found too few workers to go with it")

    def _on_found(self, offer: AcceptedOffer) -> None:
        """Deliver a lease at once if the job has begun."""
        self.runner.on_lease_held(Lease(offer.lease, offer.peer, offer.role, offer.price))
        if self._search is not None and self._has_begun:
            self._deliver_found(self._search, (offer,))

    def _on_settled(self) -> None:
        """Begin the job with what its first search holds."""
        if self._search is not None and not self._has_begun:
            self._deliver_found(self._search, self._search.allocator.auction.held)

    def _deliver_found(self, search: _LeaseSearch, offers: Sequence[AcceptedOffer]) -> None:
        """Deliver leases of a search that goes on for the others."""
        for offer in offers:
            search.wanted = _without(search.wanted, offer.role)
        self._deliver(offers, search.allocator.elapsed)

    def _deliver(self, offers: Sequence[AcceptedOffer], seconds: float) -> None:
        self._began = True
        leases = tuple(Lease(offer.lease, offer.peer, offer.role, offer.price) for offer in offers)
        self._held |= {lease.id: lease for lease in leases}
        self._is_stale = True  # they may take the place of others
        self.runner.on_leases_acquired(leases, seconds)

    # --------------------------------------------------------------------------------------------------------- events

    def on_offer(self, peer: PeerId, offer: WorkerOffer) -> None:
        """Pass an offer of a worker to the search that asked for it."""
        allocators = (None if self._search is None else self._search.allocator, self._last)
        for allocator in allocators:
            if allocator is not None and allocator.auction.is_requested(offer):
                allocator.add_offer(peer, offer)
                return

    def drop(self, lease: uuid.UUID, reason: str) -> None:
        """Treat a lease as lost that its worker has ended, without telling the worker."""
        held = self._renewed.drop(lease)
        if held is not None:
            self._on_lost(held, reason)

    def drain(self, peer: PeerId, leases: Collection[uuid.UUID], reason: str) -> tuple[Lease, ...]:
        """Return the leases among `leases` that `peer` drains, each at the first call only.

        Those of a search that goes on are given back, since their worker would start no task on them.
        """
        for renewed in self._renewed.held():
            if renewed.peer == peer and renewed.lease in leases and renewed.lease not in self._held:
                self._drop(renewed.lease, peer, reason)
                self._on_lost(renewed, reason)
        new = [held for held in self.held if held.peer == peer and held.id in leases and held.id not in self._draining]
        self._draining = {lease for lease in self._draining if lease in self._held} | {held.id for held in new}
        return tuple(new)

    def _on_not_renewed(self, held: HeldLease, reason: str) -> None:
        self.tasks.start_soon(release_when_back, self.endpoint, held.peer, held.lease, reason)
        self._on_lost(held, reason)

    def _on_lost(self, held: HeldLease, reason: str) -> None:
        lease = self._held.pop(held.lease, None)
        self._is_stale = True
        if lease is None:
            if self._search is not None:
                self._search.allocator.lease_lost(held.lease)
            return
        self.runner.on_lease_lost(lease, reason)

    # -------------------------------------------------------------------------------------------------------- releases

    def release(self, lease: uuid.UUID, reason: str) -> None:
        """Release a lease in the background, which cancels a task on it."""
        held = self._held.pop(lease, None)
        if held is not None:
            self._is_stale = True
            self._drop(lease, held.peer, reason)

    def _drop(self, lease: uuid.UUID, peer: PeerId, reason: str) -> None:
        self._renewed.drop(lease)
        self.tasks.start_soon(self._release_until_answered, lease, peer, reason)

    async def _release_until_answered(self, lease: uuid.UUID, peer: PeerId, reason: str) -> None:
        if not await release(self.endpoint, peer, lease, reason):
            await release_when_back(self.endpoint, peer, lease, reason)

    async def leave(self, reason: str) -> None:
        """Renew no lease any more: the workers hold those of running tasks for a while. Release all others."""
        for lease in [*self._taken_back, *(lease for lease in self._held if self.runner.has_task(lease))]:
            self._renewed.drop(lease)
            self._held.pop(lease, None)
        await self.close(reason)

    def stop_searching(self) -> None:
        """Begin no further search: the job ends."""
        self._closed = True

    async def close(self, reason: str) -> None:
        """End the search and release all leases; return when their workers have answered or cannot be reached."""
        self._closed = True
        search, self._search = self._search, None
        leases = {held.lease: held.peer for held in self._renewed.held()}
        if search is not None:
            search.scope.cancel()
            search.allocator.close()
            leases |= {offer.lease: offer.peer for offer in search.allocator.auction.unanswered}
        self._held.clear()
        async with anyio.create_task_group() as tasks:
            for lease, peer in leases.items():
                self._renewed.drop(lease)
                tasks.start_soon(release, self.endpoint, peer, lease, reason)


def _check_roles(requests: Sequence[RoleRequest]) -> None:
    for name, count in Counter(request.role for request in requests).items():
        if count > 1:
            raise ValueError(f"role_requests: two requests for role {name!r}; one request states the count of a role")


def _without(requests: tuple[RoleRequest, ...], role: str) -> tuple[RoleRequest, ...]:
    """Return the requests with one lease of a role less."""
    fewer = (
        replace(request, count=request.count - 1, minimum=max(0, request.minimum - 1))
        if request.role == role
        else request
        for request in requests
    )
    return tuple(request for request in fewer if request.count > 0)
