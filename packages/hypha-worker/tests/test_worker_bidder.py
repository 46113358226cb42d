"""Bidding over a network on a virtual clock: how long offers live, what is reserved, and messages by strangers."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc
import pytest

from hypha_net import pubsub, rpc
from hypha_net.testing import Faults, MemoryEndpoint, MemoryNetwork
from hypha_proto.ids import PeerId
from hypha_proto.leases import (
    RELEASE_LEASE,
    RENEW_LEASE,
    WHY_NOT,
    ReleaseLease,
    RenewalFailed,
    Renewed,
    RenewLease,
    WhyNot,
)
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
from hypha_worker.bidding.arbiter import Arbiter
from hypha_worker.bidding.bidder import Bidder
from hypha_worker.bidding.policy import OfferSection
from hypha_worker.leasing.capacity import Capabilities, Capacity
from hypha_worker.leasing.lease_manager import LeaseManager, LeaseState
from hypha_worker.service import Worker
from hypha_worker.tasks.output_server import OutputServer
from hypha_worker.tasks.output_store import OutputStore
from hypha_worker.tasks.task_run import TaskHost
from hypha_worker.tasks.task_sessions import TaskSessions

pytestmark = pytest.mark.virtual_clock

TRAIN = ExecutorDescriptor("train", "x")
MACHINE = Capacity(Resources(cpu=4.0))


@dataclass
class Scheduler:
    """A scheduler that records the offers that reach it."""

    endpoint: MemoryEndpoint
    offers: list[tuple[float, PeerId, WorkerOffer]] = field(default_factory=list)
    arrived: anyio.Event = field(default_factory=anyio.Event)

    def listen(self) -> None:
        rpc.serve(self.endpoint, OFFER, self._receive)

    async def _receive(self, peer: PeerId, offer: WorkerOffer) -> OfferReceived:
        self.offers.append((anyio.current_time(), peer, offer))
        self.arrived.set()
        return OfferReceived()

    def request(self, bid: float, cpu: float) -> WorkerRequest:
        spec = WorkerSpec(resources=Resources(cpu=cpu), executor=(TRAIN,))
        return WorkerRequest(id=uuid.uuid4(), spec=spec, bid=bid, timeout_ms=5000)

    async def publish(self, bid: float = 100.0, cpu: float = 1.0) -> None:
        await pubsub.publish(self.endpoint, WORKER_REQUESTS, self.request(bid, cpu))

    async def get_offer(self, **request: float) -> WorkerOffer:
        """Publish a request and wait for its offer."""
        self.arrived = anyio.Event()
        await self.publish(**request)
        with anyio.fail_after(10):
            await self.arrived.wait()
        return self.offers[-1][2]

    async def renew(self, worker: PeerId, lease: uuid.UUID) -> object:
        return await rpc.call(self.endpoint, worker, RENEW_LEASE, RenewLease(id=lease))

    async def hold(self, worker: PeerId, **request: float) -> uuid.UUID:
        """Get an offer and accept it; return the lease."""
        lease = (await self.get_offer(**request)).id
        assert isinstance(await self.renew(worker, lease), Renewed)
        return lease

    async def release(self, worker: PeerId, lease: uuid.UUID) -> bool:
        return (await rpc.call(self.endpoint, worker, RELEASE_LEASE, ReleaseLease(id=lease))).known


@dataclass
class Site:
    """A worker without executors among schedulers."""

    network: MemoryNetwork
    worker: Worker
    schedulers: list[Scheduler]

    @property
    def peer(self) -> PeerId:
        return self.worker.endpoint.peer_id

    @property
    def free(self) -> float:
        return self.worker.lease_manager.free.resources.cpu

    def delay(self, scheduler: Scheduler, seconds: float) -> None:
        """Set the delay of the link to a scheduler, one way."""
        self.network.degrade(self.peer, scheduler.endpoint.peer_id, Faults(delay=seconds))


@asynccontextmanager
async def open_site() -> AsyncIterator[Site]:
    network = MemoryNetwork()
    policy = OfferSection(price=50.0)
    async with (
        network.endpoint("worker") as endpoint,
        network.endpoint("scheduler-0") as first,
        network.endpoint("scheduler-1") as second,
        anyio.create_task_group() as tasks,
    ):
        leases = LeaseManager(MACHINE)
        arbiter = Arbiter(policy, Capabilities(MACHINE, frozenset({TRAIN})))
        store = OutputStore(Path("work/outputs"))
        sessions = TaskSessions(TaskHost(endpoint, leases, Path("work"), store), tasks)
        worker = Worker(endpoint, arbiter, leases, sessions, OutputServer(endpoint, store, leases, tasks))
        worker.listen()
        await tasks.start(Bidder(endpoint, arbiter, leases, worker.sweep).run)
        tasks.start_soon(worker.sweep_loop)
        site = Site(network, worker, [Scheduler(each) for each in (first, second)])
        for scheduler in site.schedulers:
            scheduler.listen()
        yield site
        tasks.cancel_scope.cancel()


async def test_the_life_of_an_offer_counts_from_when_its_scheduler_is_connected() -> None:
    async with open_site() as site:
        [scheduler, _] = site.schedulers
        site.delay(scheduler, 0.3)
        begun = anyio.current_time()
        await scheduler.get_offer()
        [lease] = site.worker.lease_manager.leases
        connected = begun + 0.3 + 0.2 + 0.3  # gossip, batch window, dial
        assert lease.expires == pytest.approx(connected + 1.7, abs=0.01)
        await anyio.sleep(lease.remaining(anyio.current_time()) - 0.01)
        assert site.free == 3.0
        await anyio.sleep(0.01 + 0.25)
        assert site.free == 4.0


async def test_no_offer_lives_longer_than_two_seconds() -> None:
    async with open_site() as site:
        for scheduler, delay in zip(site.schedulers, (0.45, 0.0), strict=True):
            site.delay(scheduler, delay)
            await scheduler.get_offer()
        assert [offer.timeout_ms for scheduler in site.schedulers for _, _, offer in scheduler.offers] == [2000, 500]


@pytest.mark.parametrize("how", ["cut", "silent"])
async def test_an_offer_to_an_unreachable_scheduler_is_given_up(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async with open_site() as site:
        lost, other = site.schedulers
        await lost.publish(cpu=4.0)
        if how == "cut":
            site.network.partition(site.peer, lost.endpoint.peer_id)
        else:
            site.delay(lost, 3600.0)
        await anyio.sleep(0.21)
        assert site.free == (4.0 if how == "cut" else 0.0)
        await anyio.sleep(2.0)
        assert site.free == 4.0
        assert lost.offers == []
        await other.get_offer(cpu=4.0)
    assert [record.levelname for record in caplog.records if "did not reach" in record.getMessage()] == ["WARNING"]


async def test_a_slow_handshake_goes_on_so_that_the_next_request_gets_an_offer() -> None:
    async with open_site() as site:
        [scheduler, _] = site.schedulers
        await scheduler.publish(cpu=4.0)
        site.delay(scheduler, 3.0)
        await anyio.sleep(0.2 + 2.01)
        assert site.free == 4.0
        assert scheduler.endpoint.peer_id not in site.worker.endpoint.connected_peers()
        site.delay(scheduler, 0.3)  # the dial keeps the delay that it began with
        await anyio.sleep(1.0)
        assert scheduler.endpoint.peer_id in site.worker.endpoint.connected_peers()
        assert scheduler.offers == []
        await scheduler.get_offer(cpu=4.0)


async def test_an_offer_is_made_after_an_attempt_to_connect_has_failed() -> None:
    async with open_site() as site:
        [lost, _] = site.schedulers
        await lost.publish(cpu=0.0)
        site.delay(lost, 3600.0)
        await anyio.sleep(11.0)
        site.delay(lost, 0.0)
        await lost.get_offer()


async def test_a_worker_answers_why_it_would_not_bid_with_codes() -> None:
    async with open_site() as site:
        asking, other = site.schedulers
        await other.get_offer(cpu=2.0)
        codes = []
        for cpu, bid in ((1.0, 100.0), (3.0, 10.0), (8.0, 100.0)):
            answer = await rpc.call(asking.endpoint, site.peer, WHY_NOT, WhyNot(request=asking.request(bid, cpu)))
            codes.append([(entry.code, entry.required, entry.available) for entry in answer.rejections])
        assert codes == [[], [("price", 50.0, 10.0), ("busy", None, None)], [("cpu", 8.0, 4.0)]]


async def test_messages_by_strangers_are_counted_and_logged_once(
    recorded: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "hypha_worker")
    async with open_site() as site:
        owner, stranger = site.schedulers
        lease = await owner.hold(site.peer)
        for wrong in (lease, *(uuid.uuid4() for _ in range(49))):
            assert isinstance(await stranger.renew(site.peer, wrong), RenewalFailed)
            assert not await stranger.release(site.peer, wrong)
        assert [each.state for each in site.worker.lease_manager.leases] == [LeaseState.HELD]
        assert await owner.release(site.peer, lease)
        assert isinstance(await owner.renew(site.peer, lease), RenewalFailed)
    total = recorded.total  # type: ignore[attr-defined]
    outcomes = {
        (name, outcome): total(f"hypha.worker.lease.{name}", hypha_outcome=outcome)
        for name in ("renewals", "ends")
        for outcome in ("stranger", "refused", "released", "renewed")
    }
    assert {key: count for key, count in outcomes.items() if count} == {
        ("renewals", "stranger"): 50,
        ("renewals", "renewed"): 1,
        ("renewals", "refused"): 1,
        ("ends", "stranger"): 50,
        ("ends", "released"): 1,
    }
    refused = [record for record in caplog.records if "refused" in record.getMessage()]
    assert len(refused) == 3, "one line for each scheduler and kind of error"


# --------------------------------------------------------------------------------------------------- deferred requests


async def test_a_request_is_answered_when_another_schedulers_offer_lapses() -> None:
    async with open_site() as site:
        first, second = site.schedulers
        await first.get_offer(cpu=4.0)
        [lease] = site.worker.lease_manager.leases
        await second.get_offer(cpu=4.0)
        assert second.offers[0][0] == pytest.approx(lease.expires, abs=0.01)


@pytest.mark.parametrize("is_held", [False, True], ids=["offer", "lease"])
async def test_a_request_is_answered_when_a_scheduler_releases(is_held: bool) -> None:
    async with open_site() as site:
        first, second = site.schedulers
        lease = await first.hold(site.peer, cpu=4.0) if is_held else (await first.get_offer(cpu=4.0)).id
        await second.publish(cpu=4.0)
        await anyio.sleep(0.3)
        assert second.offers == []
        await first.release(site.peer, lease)
        await anyio.sleep(0.01)
        assert len(second.offers) == 1


async def test_a_deferred_request_gets_no_offer_after_its_deadline() -> None:
    async with open_site() as site:
        first, second = site.schedulers
        lease = await first.hold(site.peer, cpu=4.0)
        await second.publish(cpu=4.0)
        await anyio.sleep(5.01)
        await first.release(site.peer, lease)
        await anyio.sleep(1.0)
        assert second.offers == []
        assert site.free == 4.0


async def test_freed_resources_go_to_a_better_bid_of_the_open_batch() -> None:
    async with open_site() as site:
        first, second = site.schedulers
        lease = await first.hold(site.peer, cpu=4.0)
        await second.publish(bid=60.0, cpu=4.0)
        await anyio.sleep(0.3)
        await first.publish(bid=90.0, cpu=4.0)
        await anyio.sleep(0.05)
        await first.release(site.peer, lease)
        await anyio.sleep(0.2)
        assert [each[2].price for each in first.offers] == [100.0, 90.0]
        assert second.offers == []


async def test_a_repeated_request_is_deferred_once_and_not_beside_its_offer() -> None:
    """Ten publications for one search: one offer when the machine is free, and none after that."""
    async with open_site() as site:
        first, second = site.schedulers
        lease = await first.hold(site.peer, cpu=4.0)
        for _ in range(10):
            await second.publish(cpu=3.0)
            await anyio.sleep(0.25)
        await first.release(site.peer, lease)
        await anyio.sleep(4.0)
        assert len(second.offers) == 1
        assert site.free == 4.0


async def test_a_request_of_a_scheduler_that_holds_a_lease_is_not_deferred() -> None:
    """Its job needs other workers; when it ends, nobody would accept the offer."""
    async with open_site() as site:
        [scheduler, _] = site.schedulers
        lease = await scheduler.hold(site.peer, cpu=4.0)
        spec = WorkerSpec(resources=Resources(cpu=2.0), executor=())
        request = WorkerRequest(id=uuid.uuid4(), spec=spec, bid=100.0, timeout_ms=5000)
        await pubsub.publish(scheduler.endpoint, WORKER_REQUESTS, request)
        await anyio.sleep(0.3)
        await scheduler.release(site.peer, lease)
        await anyio.sleep(1.0)
        assert len(scheduler.offers) == 1


async def test_a_scheduler_that_lets_offers_lapse_comes_after_an_equal_bid() -> None:
    async with open_site() as site:
        lazy, other = site.schedulers
        await lazy.get_offer(cpu=4.0)
        await anyio.sleep(1.0)
        await lazy.publish(cpu=4.0)
        await anyio.sleep(0.05)
        await other.publish(cpu=4.0)
        await anyio.sleep(0.25)
        assert (len(lazy.offers), len(other.offers)) == (1, 1)
        await anyio.sleep(20.0)  # both have lapsed, and are forgotten
        await lazy.publish(cpu=4.0)
        await anyio.sleep(0.05)
        await other.publish(cpu=4.0)
        await anyio.sleep(0.2)
        assert (len(lazy.offers), len(other.offers)) == (3, 1)


async def test_a_draining_worker_makes_no_offers_and_withdraws_those_that_were_not_accepted() -> None:
    async with open_site() as site:
        scheduler, other = site.schedulers
        held = await scheduler.hold(site.peer)
        offered = await scheduler.get_offer()
        await other.publish(cpu=4.0)
        await anyio.sleep(0.3)
        site.worker.draining.request(60.0, "its owner drains it")
        assert isinstance(await scheduler.renew(site.peer, offered.id), RenewalFailed)
        assert isinstance(await scheduler.renew(site.peer, held), Renewed)
        question = WhyNot(request=other.request(100.0, 1.0))
        answer = await rpc.call(other.endpoint, site.peer, WHY_NOT, question)
        assert [entry.code for entry in answer.rejections] == ["draining"]
        await scheduler.release(site.peer, held)
        await other.publish()
        await anyio.sleep(10.0)
        assert (len(scheduler.offers), other.offers) == (2, []), "neither for a new request nor for one that waited"
