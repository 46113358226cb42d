"""Peers that misbehave: certified workers and schedulers that an honest job must be placed beside.

Each is a small script on an `Endpoint`: `await cheat.run(endpoint)` serves its side until cancelled or for ever. They
write messages that our own code refuses to encode, as a modified node would.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

import anyio
import anyio.abc
import cbor2

from hypha_net import pubsub, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_LEASE, RENEWED_LEASE, LeaseRenewal, RenewalFailed, Renewed, RenewLease
from hypha_proto.offers import (
    OFFER,
    WORKER_REQUESTS,
    ExecutorDescriptor,
    OfferReceived,
    WorkerOffer,
    WorkerRequest,
    WorkerSpec,
)
from hypha_proto.resources import Resources

BURST: Final = 100
"""Requests that fill a worker's batch window."""
_TRAIN: Final = ExecutorDescriptor("train", "diloco-transformer")


class Scripted(Protocol):
    """A peer that follows a script."""

    async def run(self, endpoint: Endpoint) -> None:
        """Follow the script, until cancelled or for ever."""
        ...


def _offer(request: WorkerRequest, life: float, scale: float = 1000.0) -> WorkerOffer:
    """Make an offer at price 0 of much more than was requested."""
    wanted = request.spec.resources
    more = Resources(gpu=scale * wanted.gpu, cpu=scale * wanted.cpu, memory=scale * wanted.memory, storage=scale)
    return WorkerOffer(
        id=uuid.uuid4(),
        request_id=request.id,
        price=0.0,
        resources=more,
        timeout_ms=int(life * 1000),
    )


@dataclass(slots=True)
class FreeOfferWithoutLease:
    """Worker that offers at price 0 and, when it is chosen, denies the renewal or does not answer it (row 1)."""

    denies: bool = False
    renewals: int = 0
    """How often it was chosen."""

    async def run(self, endpoint: Endpoint) -> None:
        """Answer every request with an offer."""
        rpc.serve(endpoint, RENEW_LEASE, self._renew)
        async with pubsub.subscribe(endpoint, WORKER_REQUESTS) as messages, anyio.create_task_group() as tasks:
            async for scheduler, request in messages:
                tasks.start_soon(_send, endpoint, scheduler, _offer(request, 2.0))

    async def _renew(self, _scheduler: PeerId, _message: RenewLease) -> LeaseRenewal:
        self.renewals += 1
        if not self.denies:
            await anyio.sleep_forever()
        return RenewalFailed()


@dataclass(slots=True)
class OfferFlood:
    """Worker that answers each of the first requests with thousands of offers that last a minute (row 2)."""

    count: int = 4096
    """Offers for each request."""
    requests: int = 2
    """Requests that it answers: one of each role of a job."""
    life: float = 60.0
    """Seconds for which the offers last, as they say."""
    concurrent: int = 32
    """Offers in flight at once for each request."""
    sent: int = 0

    async def run(self, endpoint: Endpoint) -> None:
        """Flood every scheduler that publishes a request."""
        rpc.serve(endpoint, RENEW_LEASE, self._renew)
        async with pubsub.subscribe(endpoint, WORKER_REQUESTS) as messages, anyio.create_task_group() as tasks:
            async for scheduler, request in messages:
                if self.sent < self.count * self.requests:
                    self.sent += self.count
                    for _ in range(self.concurrent):
                        tasks.start_soon(self._flood, endpoint, scheduler, request)

    async def _flood(self, endpoint: Endpoint, scheduler: PeerId, request: WorkerRequest) -> None:
        for _ in range(self.count // self.concurrent):
            await _send(endpoint, scheduler, _offer(request, self.life))

    async def _renew(self, _scheduler: PeerId, _message: RenewLease) -> LeaseRenewal:
        return RenewalFailed()


@dataclass(slots=True)
class LeaseHolder:
    """Scheduler that accepts every offer and keeps the leases without dispatching a job (rows 3 and 5)."""

    bid: float
    resources: Resources
    leases: int = 1 << 30
    """As many leases as it takes."""
    requests: int = 1 << 30
    """As many requests as it publishes."""
    pause: float = 0.5
    """Seconds between its requests."""
    executor: ExecutorDescriptor = _TRAIN
    held: dict[uuid.UUID, PeerId] = field(default_factory=dict)
    _taken: int = 0

    async def run(self, endpoint: Endpoint) -> None:
        """Ask for leases, and renew those that it got."""
        async with anyio.create_task_group() as tasks:

            async def on_offer(peer: PeerId, offer: WorkerOffer) -> OfferReceived:
                if self._taken < self.leases:
                    self._taken += 1
                    tasks.start_soon(self._hold, endpoint, peer, offer.id)
                return OfferReceived()

            rpc.serve(endpoint, OFFER, on_offer)
            for _ in range(self.requests):
                if self._taken < self.leases:
                    await publish_request(endpoint, make_request(self.resources, self.executor), self.bid)
                await anyio.sleep(self.pause)

    async def _hold(self, endpoint: Endpoint, peer: PeerId, lease: uuid.UUID) -> None:
        with suppress(NetError):  # the worker may be gone
            while await _renews(endpoint, peer, lease):
                self.held[lease] = peer
                await anyio.sleep(RENEWED_LEASE / 3)
        self.held.pop(lease, None)
        self._taken -= 1


@dataclass(slots=True)
class RequestFlood:
    """Scheduler that fills the workers' batch windows with requests and accepts no offer (row 4)."""

    resources: Resources
    bid: float
    burst: int = BURST
    """Requests published at once."""
    pause: float = 0.2
    """Seconds between bursts; gossip accepts 64 messages a second of one origin in the long run."""
    executor: ExecutorDescriptor = _TRAIN
    sent: int = 0

    async def run(self, endpoint: Endpoint) -> None:
        """Publish bursts of requests for ever."""

        async def ignore(_peer: PeerId, _offer: WorkerOffer) -> OfferReceived:
            return OfferReceived()

        rpc.serve(endpoint, OFFER, ignore)
        while True:
            for _ in range(self.burst):
                await publish_request(endpoint, make_request(self.resources, self.executor), self.bid)
            self.sent += self.burst
            await anyio.sleep(self.pause)


def make_request(resources: Resources, executor: ExecutorDescriptor = _TRAIN) -> WorkerRequest:
    """Make a request with a new id and a bid of 1."""
    spec = WorkerSpec(resources=resources, executor=(executor,))
    return WorkerRequest(id=uuid.uuid4(), spec=spec, bid=1.0, timeout_ms=5000)


async def publish_request(endpoint: Endpoint, request: WorkerRequest, bid: float) -> None:
    """Publish a request with a bid that our own encoder may refuse."""
    plain = cbor2.loads(WORKER_REQUESTS.encode(request))
    await endpoint.publish(WORKER_REQUESTS.name, cbor2.dumps({**plain, "bid": bid}))


async def _send(endpoint: Endpoint, scheduler: PeerId, offer: WorkerOffer) -> None:
    with suppress(NetError):  # it may have all it asked for and be gone
        await rpc.call(endpoint, scheduler, OFFER, offer, timeout=5.0)


async def _renews(endpoint: Endpoint, peer: PeerId, lease: uuid.UUID) -> bool:
    answer = await rpc.call(endpoint, peer, RENEW_LEASE, RenewLease(id=lease), timeout=RENEWED_LEASE / 4)
    return isinstance(answer, Renewed)
