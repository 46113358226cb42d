"""Allocation on the in-memory network and a virtual clock: slow links, peers that cheat, incomplete sets."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

import anyio
import anyio.abc
import pytest

from hypha_net import pubsub, rpc
from hypha_net.endpoint import PeerInfo
from hypha_net.errors import NetError
from hypha_net.testing import Faults, MemoryEndpoint, MemoryNetwork, simulate
from hypha_proto.ids import PeerId
from hypha_proto.leases import (
    RELEASE_LEASE,
    RENEW_LEASE,
    WHY_NOT,
    LeaseReleased,
    LeaseRenewal,
    Reasons,
    Rejection,
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
from hypha_scheduler.allocation.allocator import Allocator
from hypha_scheduler.allocation.auction import AcceptedOffer, RoleRequest
from hypha_scheduler.allocation.leases import HeldLeases
from hypha_scheduler.allocation.renewal import renew_leases
from hypha_scheduler.allocation.shortage import Shortage
from hypha_scheduler.errors import AllocationError

pytestmark = pytest.mark.virtual_clock

BATCH_WINDOW = 0.2
RENEWED = 10.0


@dataclass
class Worker:
    """Worker for one role, by default with room for one lease, whose offers live for 500 ms and two round trips."""

    endpoint: MemoryEndpoint
    tasks: anyio.abc.TaskGroup
    role: str = "train"
    price: float = 100.0
    amounts: Resources = field(default_factory=lambda: Resources(cpu=1))
    offers: bool = True
    is_roomy: bool = False
    """Whether it has room for any number of leases."""
    grants: Callable[[], Awaitable[bool]] | None = None
    """Whether it grants a renewal; None for all of its own leases."""
    rejections: tuple[Rejection, ...] = (Rejection(code="newer", text="no"),)
    lease: uuid.UUID | None = None
    expires: float = 0.0
    released: list[str] = field(default_factory=list)
    renewals: int = 0
    asked: int = 0
    """Questions why it makes no offer."""
    is_silent: bool = False
    """Whether it answers none of them."""

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        rpc.serve(self.endpoint, RENEW_LEASE, self.renew)
        rpc.serve(self.endpoint, RELEASE_LEASE, self.release)
        rpc.serve(self.endpoint, WHY_NOT, self.why_not)
        async with pubsub.subscribe(self.endpoint, WORKER_REQUESTS) as requests:
            task_status.started()
            async for scheduler, request in requests:
                if request.spec.executor[0].name == self.role and self.offers:
                    self.tasks.start_soon(self.bid, scheduler, request)

    @property
    def is_free(self) -> bool:
        return self.is_roomy or self.lease is None or anyio.current_time() >= self.expires

    async def appear(self, delay: float) -> None:
        """Make offers from `delay` seconds on."""
        await anyio.sleep(delay)
        self.offers = True

    async def bid(self, scheduler: PeerId, request: WorkerRequest) -> None:
        await anyio.sleep(BATCH_WINDOW)
        if not self.is_free:
            return
        self.lease, self.expires = uuid.uuid4(), anyio.current_time() + 2.0
        lease = self.lease
        await self.endpoint.connect_peer(scheduler)
        life = min(2.0, 0.5 + 2 * (self.endpoint.round_trip_time(scheduler) or 0.0))
        self.expires = anyio.current_time() + life
        await self.send(scheduler, request.id, lease, int(life * 1000))

    async def send(self, scheduler: PeerId, request: uuid.UUID, lease: uuid.UUID, timeout_ms: int) -> None:
        offer = WorkerOffer(
            id=lease, request_id=request, price=self.price, resources=self.amounts, timeout_ms=timeout_ms
        )
        with suppress(NetError):  # the test may have cut the link
            await rpc.call(self.endpoint, scheduler, OFFER, offer)

    async def renew(self, _peer: PeerId, request: RenewLease) -> LeaseRenewal:
        self.renewals += 1
        granted = request.id == self.lease and not self.is_free if self.grants is None else await self.grants()
        if not granted:
            return RenewalFailed()
        self.expires = anyio.current_time() + RENEWED
        return Renewed(id=request.id, timeout_ms=int(RENEWED * 1000))

    async def release(self, _peer: PeerId, request: ReleaseLease) -> LeaseReleased:
        known = request.id == self.lease
        if known:
            self.lease = None
            self.released.append(request.reason)
        return LeaseReleased(known=known)

    async def why_not(self, _peer: PeerId, _question: WhyNot) -> Reasons:
        self.asked += 1
        if self.is_silent:
            await anyio.sleep_forever()
        return Reasons(rejections=self.rejections if self.is_free else (BUSY,))


BUSY = Rejection(code="busy", text="leased")
PRICE = Rejection(code="price", text="bid")


def role_request(role: str, count: int, max_price: float = 120.0) -> RoleRequest:
    spec = WorkerSpec(resources=Resources(cpu=1), executor=(ExecutorDescriptor(role, role),))
    return RoleRequest(role, spec, bid=100.0, max_price=max_price, count=count)


@dataclass
class Lab:
    """A scheduler's endpoint and workers around it."""

    network: MemoryNetwork
    scheduler: MemoryEndpoint
    tasks: anyio.abc.TaskGroup
    workers: list[Worker]
    leases: HeldLeases = field(default_factory=HeldLeases)
    shortages: list[Shortage] = field(default_factory=list)

    def allocator(self, *requests: RoleRequest, timeout: float = 60.0, least: int | None = None) -> Allocator:
        """Make an allocator that gets the offers to this scheduler, and keep its leases renewed."""
        made = Allocator(
            self.scheduler,
            requests,
            self.leases,
            minimum={request.role: request.count if least is None else least for request in requests},
            timeout=timeout,
            tasks=self.tasks,
            on_shortage=self.shortages.append,
            random=Random(0),
        )

        async def offered(peer: PeerId, offer: WorkerOffer) -> OfferReceived:
            made.add_offer(peer, offer)
            return OfferReceived()

        rpc.serve(self.scheduler, OFFER, offered)
        self.tasks.start_soon(renew_leases, self.scheduler, self.leases, lambda held, _: made.lease_lost(held.lease))
        return made


@asynccontextmanager
async def open_lab(count: int, delays: Sequence[float] = (), seed: int = 0) -> AsyncIterator[Lab]:
    """Open a scheduler and `count` workers; `delays` are the seconds of their links, one way."""
    network = MemoryNetwork(seed=seed, faults=Faults(delay=0.005))
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(1000))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        scheduler = await stack.enter_async_context(network.endpoint("scheduler"))
        workers = []
        for number in range(count):
            endpoint = await stack.enter_async_context(network.endpoint(f"worker-{number}"))
            workers.append(Worker(endpoint, tasks))
        for worker, delay in zip(workers, delays, strict=False):
            network.degrade(worker.endpoint.peer_id, scheduler.peer_id, Faults(delay=delay))
        for worker in workers:
            await tasks.start(worker.run)
        yield Lab(network, scheduler, tasks, workers)
        tasks.cancel_scope.cancel()


async def never() -> bool:
    await anyio.sleep_forever()
    raise AssertionError


async def deny() -> bool:
    return False


async def grant() -> bool:
    return True


async def late() -> bool:
    await anyio.sleep(3.0)
    return True


def peers(offers: Sequence[AcceptedOffer]) -> set[PeerId]:
    return {offer.peer for offer in offers}


# ----------------------------------------------------------------------------------------------------------- slow links

DELAYS = (0.005, 0.05, 0.15, 0.3)


@pytest.mark.parametrize("delay", DELAYS)
async def test_a_worker_is_placed_while_others_of_the_topic_stay_silent(delay: float) -> None:
    async with open_lab(2, [delay]) as lab:
        lab.workers[1].offers = False
        allocator = lab.allocator(role_request("train", 1))
        assert len(await allocator.allocate()) == 1
        assert allocator.seconds < 0.6 + 8 * delay


async def test_leases_that_may_share_workers_are_offered_together() -> None:
    async with open_lab(3) as lab:
        for worker in lab.workers[:2]:
            worker.is_roomy, worker.grants = True, grant
        lab.workers[2].offers = False
        allocator = lab.allocator(replace(role_request("train", 6), distinct_peers=False))
        found = await allocator.allocate()
        assert [*Counter(lease.peer for lease in found).values()] == [3, 3]
        assert allocator.seconds < 2 * 0.5  # two of each, then one: the third worker is silent


# -------------------------------------------------------------------------------------------------- behind a gateway


@asynccontextmanager
async def gateway_between(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Let the scheduler be connected to a gateway, which is in the topic, and to those who have dialled it."""
    scheduler, infos = lab.scheduler, lab.scheduler.connected_peers
    async with lab.network.endpoint("gateway") as gateway:
        await scheduler.connect_peer(gateway.peer_id)

        def connected_peers() -> dict[PeerId, PeerInfo]:
            found = dict(infos())
            return found | {gateway.peer_id: replace(found[gateway.peer_id], role="gateway")}

        monkeypatch.setattr(scheduler, "connected_peers", connected_peers)
        monkeypatch.setattr(scheduler, "topic_peers", lambda _topic: frozenset(infos()))
        yield


async def test_behind_a_gateway_a_cheaper_offer_that_comes_later_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first request reaches workers that the scheduler does not know: it cannot tell that all have answered."""

    async with open_lab(2, [0.005, 0.04]) as lab:
        lab.workers[0].price, lab.workers[1].price = 100.0, 60.0
        near, far = lab.workers
        async with gateway_between(lab, monkeypatch):
            allocator = lab.allocator(role_request("train", 1))
            assert peers(await allocator.allocate()) == {far.endpoint.peer_id}
            assert allocator.seconds < 0.2 + 0.25 + 0.2
            assert near.renewals == 0


# ---------------------------------------------------------------------------------------------------- peers that cheat


@pytest.mark.parametrize("grants", [never, deny])
async def test_free_offers_that_are_never_granted_do_not_prevent_placement(
    grants: Callable[[], Awaitable[bool]],
) -> None:
    async with open_lab(4) as lab:
        for cheat in lab.workers[:2]:
            cheat.price, cheat.grants = 0.0, grants
        allocator = lab.allocator(role_request("train", 2))
        found = await allocator.allocate()
        assert peers(found) == {worker.endpoint.peer_id for worker in lab.workers[2:]}
        assert allocator.seconds < 1.5
        assert sum(worker.renewals for worker in lab.workers[:2]) <= 4


async def test_a_peer_that_grants_nothing_is_asked_ever_less_often() -> None:
    async with open_lab(2) as lab:
        lab.workers[0].price, lab.workers[0].grants = 0.0, deny
        allocator = lab.allocator(role_request("train", 2), timeout=60)
        with pytest.raises(AllocationError, match="1 did not grant an offer"):
            await allocator.allocate()
        assert 3 <= lab.workers[0].renewals <= 8


async def test_a_renewal_that_is_granted_late_is_released_unless_needed() -> None:
    async with open_lab(2) as lab:
        lab.workers[0].price, lab.workers[0].grants = 50.0, late
        first, second = lab.workers
        assert peers(await lab.allocator(role_request("train", 1)).allocate()) == {second.endpoint.peer_id}
        await anyio.sleep(5.0)
        assert first.released == ["it was no longer needed"]
        assert second.released == []


async def test_a_renewal_that_is_granted_late_counts_while_it_is_needed() -> None:
    async with open_lab(1) as lab:
        lab.workers[0].grants = late
        allocator = lab.allocator(role_request("train", 1))
        assert len(await allocator.allocate()) == 1
        assert 3.0 < allocator.seconds < 4.0


# ----------------------------------------------------------------------------------------------------- incomplete sets


async def test_an_incomplete_set_is_released_for_others_and_sought_again() -> None:
    async with open_lab(3) as lab:
        lab.workers[2].offers = False
        allocator = lab.allocator(role_request("train", 3), timeout=60)
        lab.tasks.start_soon(lab.workers[2].appear, 30)
        assert len(await allocator.allocate()) == 3
        assert 30 < allocator.seconds < 45
        gave_up = "the scheduler found too few workers to go with it"
        for worker in lab.workers[:2]:
            assert 3 <= worker.released.count(gave_up) <= 10
            assert set(worker.released) <= {gave_up, "the search for workers pauses"}


async def test_an_incomplete_set_is_kept_while_no_worker_is_busy() -> None:
    """The missing worker appears after 30 s and is found within a publication."""

    async with open_lab(4) as lab:
        small = Rejection(code="cpu", text="small", required=1.0, available=0.5)
        lab.workers[2].rejections = (small, BUSY)
        lab.workers[3].rejections = ()
        lab.workers[2].offers = lab.workers[3].offers = False
        allocator = lab.allocator(role_request("train", 3), timeout=60)
        lab.tasks.start_soon(lab.workers[3].appear, 30)
        assert len(await allocator.allocate()) == 3
        assert 30 < allocator.seconds < 31.5
        assert [worker.released for worker in lab.workers] == [[]] * 4


@pytest.mark.parametrize("how", ["busy", "silent", "unreachable", "crowd"])
async def test_an_incomplete_set_is_released_while_others_may_compete(how: str) -> None:
    async with open_lab(24 if how == "crowd" else 4) as lab:
        lab.workers[2].rejections = (BUSY,)
        lab.workers[2].is_silent = how == "silent"
        for worker in lab.workers[3:]:
            worker.rejections = (PRICE,)
        for worker in lab.workers[2:]:
            worker.offers = False
        if how == "crowd":
            lab.workers[2].rejections = lab.workers[3].rejections
        if how == "unreachable":
            lab.network.partition(lab.scheduler.peer_id, lab.workers[2].endpoint.peer_id)
        with pytest.raises(AllocationError):
            await lab.allocator(role_request("train", 3), timeout=15).allocate()
        for worker in lab.workers[:2]:
            assert "the scheduler found too few workers to go with it" in worker.released


async def test_offers_in_a_pause_are_released_and_what_follows_is_not_deferred_until_something_is_held() -> None:
    """Workers would otherwise share what one scheduler gives up among all others, and none would get a whole set."""
    windows: list[tuple[float, int | None]] = []
    async with open_lab(2) as lab:
        lab.workers[1].offers = False
        lab.workers[1].rejections = (BUSY,)
        allocator = lab.allocator(role_request("train", 2), timeout=15)

        async def listen() -> None:
            async with pubsub.subscribe(lab.workers[0].endpoint, WORKER_REQUESTS) as requests:
                async for _, request in requests:
                    windows.append((len(allocator.auction.held), request.timeout_ms))

        async def offer_in_pause() -> None:
            first, second = lab.workers
            while not first.released:
                await anyio.sleep(0.01)
            assert allocator._attempts.resume_at is not None
            second.lease = uuid.uuid4()
            [request] = allocator.requests.values()
            await second.send(lab.scheduler.peer_id, request.id, second.lease, 500)
            await anyio.sleep(0.1)
            assert second.released == ["the search for workers pauses"]
            first.offers = False

        lab.tasks.start_soon(listen)
        lab.tasks.start_soon(offer_in_pause)
        with pytest.raises(AllocationError):
            await allocator.allocate()
    first_pause = next(at for at, (held, _) in enumerate(windows) if at and windows[at - 1][0] and not held)
    assert {window for _, window in windows[:first_pause]} == {1250}
    assert {window for _, window in windows[first_pause:]} == {400}


async def test_a_set_that_is_large_enough_to_start_is_kept_until_the_timeout() -> None:
    async with open_lab(3) as lab:
        lab.workers[2].offers = False
        allocator = lab.allocator(role_request("train", 3), timeout=20, least=2)
        assert len(await allocator.allocate()) == 2
        assert allocator.seconds == pytest.approx(20)
        assert [worker.released for worker in lab.workers] == [[], [], []]


def test_a_set_that_still_grows_over_slow_links_is_not_released() -> None:
    async def case(seed: int) -> None:
        async with open_lab(6, delays=[0.005, 0.1, 0.2, 0.3, 0.3, 0.3], seed=seed) as lab:
            assert len(await lab.allocator(role_request("train", 6)).allocate()) == 6
            assert [worker.released for worker in lab.workers] == [[]] * 6

    for seed in range(5):
        simulate(partial(case, seed), seed=seed)


def test_the_last_attempt_begins_in_time_before_the_deadline() -> None:
    async def case(seed: int) -> None:
        async with open_lab(2, seed=seed) as lab:
            allocator = lab.allocator(role_request("train", 2), timeout=30)
            late = lab.workers[1]
            late.offers = False
            lab.tasks.start_soon(late.appear, 27.5)
            assert len(await allocator.allocate()) == 2

    for seed in range(5):
        simulate(partial(case, seed), seed=seed)


async def test_a_lease_that_its_worker_ends_is_sought_again_while_others_are_missing() -> None:
    async with open_lab(2) as lab:
        lab.workers[1].offers = False
        first = lab.workers[0]
        allocator = lab.allocator(role_request("train", 2), timeout=100, least=1)

        async def end_idle_lease() -> None:
            await anyio.sleep(60)
            first.lease = None
            await anyio.sleep(20)
            lab.workers[1].offers = True

        lab.tasks.start_soon(end_idle_lease)
        assert len(await allocator.allocate()) == 2
        assert allocator.seconds < 85
        assert first.renewals > 20


async def test_an_offer_after_the_search_is_released() -> None:
    async with open_lab(2) as lab:
        lab.workers[1].offers = False
        first, second = lab.workers
        allocator = lab.allocator(role_request("train", 1))
        await allocator.allocate()
        [request] = allocator.requests.values()
        for number in range(50):
            await second.send(lab.scheduler.peer_id, request.id, uuid.UUID(int=number), 500)
        second.lease = uuid.uuid4()
        await anyio.sleep(0.1)
        await second.send(lab.scheduler.peer_id, request.id, second.lease, 500)
        await anyio.sleep(0.1)
        assert second.released == ["the search for workers is over"]
        assert first.released == []
        await second.send(lab.scheduler.peer_id, uuid.uuid4(), uuid.UUID(int=99), 500)


async def test_renewals_in_flight_at_the_deadline_are_released() -> None:
    async with open_lab(1) as lab:
        lab.workers[0].grants = late
        with pytest.raises(AllocationError):
            await lab.allocator(role_request("train", 1), timeout=1.0).allocate()
        await anyio.sleep(5.0)
        assert lab.workers[0].released == ["it was no longer needed"]


# ------------------------------------------------------------------------------------------------------------- reasons


async def test_reasons_are_counted_while_waiting_and_in_the_error(caplog: pytest.LogCaptureFixture) -> None:
    def gpu(available: float) -> Rejection:
        return Rejection(code="gpu", text="no", required=40.0, available=available)

    caplog.set_level(logging.INFO, "hypha_scheduler.allocation")
    async with open_lab(9) as lab:
        codes = [
            (gpu(16.0), PRICE),
            (BUSY, gpu(24.0)),
            (gpu(8.0),),
            (PRICE,),
            (),
            (BUSY,),
            (BUSY,),
            (Rejection(code="newer", text="no"),),
            (PRICE, Rejection(code="draining", text="drains")),
        ]
        for worker, rejections in zip(lab.workers, codes, strict=True):
            worker.offers, worker.rejections = False, rejections
        lab.workers[4].offers, lab.workers[4].price, lab.workers[4].amounts = True, 500.0, Resources(gpu=40)
        wanted = RoleRequest(
            "train",
            WorkerSpec(resources=Resources(gpu=40), executor=(ExecutorDescriptor("train", "train"),)),
            100,
            120,
            1,
        )
        with pytest.raises(AllocationError) as caught:
            await lab.allocator(wanted, timeout=12).allocate()
        causes = (
            "2 busy until their leases end, 3 with too little GPU memory (24 of 40 GB), 2 above the price, "
            "1 draining, 1 newer"
        )
        counted = f"train: 0 of 1 held; 0 of 9 suitable: {causes}"
        lines = str(caught.value).splitlines()
        assert lines[:2] == ["not enough workers within 12 s: 0 of 1 for train", f"  {counted}"]
        assert [record.getMessage() for record in caplog.records if "suitable" in record.getMessage()] == [
            f"waiting for workers: {counted}"
        ]
        assert lab.shortages[0].counts == {"gpu": 3, "price": 2, "busy": 2, "draining": 1, "newer": 1}
        assert len(lab.shortages) == 2
        assert all(worker.asked == 4 for worker in lab.workers)


async def test_unreachable_workers_do_not_end_the_search() -> None:
    async with open_lab(2) as lab:
        lab.workers[0].price = 10.0
        first, second = lab.workers

        async def vanish() -> bool:
            lab.network.partition(lab.scheduler.peer_id, first.endpoint.peer_id)
            raise NetError("gone")

        first.grants = vanish
        assert peers(await lab.allocator(role_request("train", 1)).allocate()) == {second.endpoint.peer_id}
