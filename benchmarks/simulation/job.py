"""A job's search for workers as a scheduler makes it: real allocator and renewal, on any endpoint.

The leases are held but nothing is dispatched to them. Used by simulations and by the benchmark with real processes.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.abc

from hypha_net import rpc
from hypha_net.endpoint import Endpoint
from hypha_proto.ids import PeerId
from hypha_proto.offers import OFFER, ExecutorDescriptor, OfferReceived, WorkerOffer, WorkerSpec
from hypha_proto.resources import Resources
from hypha_scheduler.allocation.allocator import Allocator, release
from hypha_scheduler.allocation.auction import AcceptedOffer, RoleRequest
from hypha_scheduler.allocation.leases import HeldLeases
from hypha_scheduler.allocation.renewal import renew_leases
from hypha_scheduler.errors import AllocationError

TRAIN: Final = ExecutorDescriptor("train", "diloco-transformer")
SERVER: Final = ExecutorDescriptor("aggregate", "parameter-server")
BID: Final = 100.0
"""Bid of an honest scheduler, in tokens per lease-hour."""
ONE_CORE: Final = Resources(cpu=1.0)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one job asks for."""

    train: int
    """Training workers."""
    servers: int = 1
    """Parameter servers."""
    resources: Resources = ONE_CORE
    """Requirement on each of them."""
    bid: float = BID
    timeout: float = 60.0
    """Seconds after which the job gives up."""

    @property
    def leases(self) -> int:
        """Number of leases in all."""
        return self.train + self.servers

    def role_requests(self) -> tuple[RoleRequest, ...]:
        """Return the demand as the allocator takes it."""
        train = WorkerSpec(resources=self.resources, executor=(TRAIN,))
        server = WorkerSpec(resources=self.resources, executor=(SERVER,))
        requests = (
            RoleRequest("train", train, self.bid, self.bid, self.train),
            RoleRequest("aggregate", server, self.bid, self.bid, self.servers),
        )
        return tuple(request for request in requests if request.count)


@dataclass(frozen=True, slots=True)
class Placement:
    """Outcome of a search for workers."""

    offers: tuple[AcceptedOffer, ...] = ()
    """Accepted offers whose leases are held; none if the search failed."""
    seconds: float = math.inf
    """From the first request until all leases were held."""
    failure: str = ""
    """Why the job could not be placed; empty if it was."""


@asynccontextmanager
async def place_job(endpoint: Endpoint, demand: Demand, leases: HeldLeases) -> AsyncIterator[Placement]:
    """Search for the workers of a job; renew its leases until the context ends, then release them."""
    async with anyio.create_task_group() as tasks:
        allocator = _open_allocator(endpoint, demand, leases, tasks)
        tasks.start_soon(renew_leases, endpoint, leases, lambda held, _why: allocator.lease_lost(held.lease))
        try:
            yield await _search(allocator)
        finally:
            with anyio.CancelScope(shield=True):
                await _release_all(endpoint, leases)
            tasks.cancel_scope.cancel()


async def _search(allocator: Allocator) -> Placement:
    try:
        offers = await allocator.allocate()
    except AllocationError as error:
        return Placement(failure=str(error))
    return Placement(offers, allocator.seconds)


def _open_allocator(endpoint: Endpoint, demand: Demand, leases: HeldLeases, tasks: anyio.abc.TaskGroup) -> Allocator:
    """Return an allocator that gets the offers that reach `endpoint`."""
    minimum = {request.role: request.count for request in demand.role_requests()}
    allocator = Allocator(endpoint, demand.role_requests(), leases, minimum, demand.timeout, tasks)

    async def on_offer(peer: PeerId, offer: WorkerOffer) -> OfferReceived:
        allocator.add_offer(peer, offer)
        return OfferReceived()

    rpc.serve(endpoint, OFFER, on_offer)
    return allocator


async def _release_all(endpoint: Endpoint, leases: HeldLeases) -> None:
    async with anyio.create_task_group() as tasks:
        for held in leases.held():
            leases.drop(held.lease)
            tasks.start_soon(release, endpoint, held.peer, held.lease, "the job is over")
