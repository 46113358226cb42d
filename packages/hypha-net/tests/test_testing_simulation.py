"""Simulation of five hundred nodes for an hour, with faults, churn and partitions, reproducible by its seed;
and the processor time of simulated nodes."""

from __future__ import annotations

import hashlib
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import anyio.abc
import pytest

from hypha_net import dataset_directory, pubsub, rpc
from hypha_net.errors import NetError, UnreachableError
from hypha_net.testing import Faults, MemoryEndpoint, MemoryNetwork, simulate
from hypha_proto.datasets import DatasetRecord
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_LEASE, LeaseRenewal, RenewalFailed, RenewLease
from hypha_proto.offers import OFFER, WORKER_REQUESTS, OfferReceived, WorkerOffer, WorkerRequest, WorkerSpec
from hypha_proto.resources import Resources

HOUR = 3600.0
ROUGH = Faults(delay=0.02, jitter=0.2, gossip_loss=0.02, break_rate=0.001, refuse_rate=0.01)


@dataclass
class World:
    """Simulated network: schedulers publish requests, some workers make offers, and schedulers renew their leases."""

    seed: int
    workers: int
    schedulers: int
    datasets: int
    network: MemoryNetwork = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    _history: hashlib._Hash = field(default_factory=hashlib.blake2b)

    def __post_init__(self) -> None:
        self.network = MemoryNetwork(self.seed, ROUGH)

    def note(self, what: str, who: PeerId, about: object = "") -> None:
        """Record an event in the history."""
        self.counts[what] += 1
        self._history.update(f"{anyio.current_time():.6f} {what} {who} {about}\n".encode())

    @property
    def history(self) -> str:
        return self._history.hexdigest()

    async def run(self, seconds: float) -> None:
        """Run all nodes for some virtual seconds."""
        async with anyio.create_task_group() as tasks:
            for kind, count, life in (
                ("data", self.datasets, self.data_node),
                ("worker", self.workers, self.worker),
                ("scheduler", self.schedulers, self.scheduler),
            ):
                for index in range(count):
                    tasks.start_soon(self._restart_repeatedly, kind, index, life)
            tasks.start_soon(self._divide_temporarily)
            await anyio.sleep(seconds)
            tasks.cancel_scope.cancel()

    async def _restart_repeatedly(
        self, kind: str, index: int, life: Callable[[MemoryEndpoint, random.Random], Awaitable[None]]
    ) -> None:
        """Run a node that fails from time to time and comes back with the same identity."""
        chance = random.Random(f"{self.seed}/{kind}/{index}")
        await anyio.sleep(chance.random())
        while True:
            with anyio.move_on_after(chance.expovariate(1 / HOUR)):
                async with self.network.endpoint(f"{kind}-{index}") as node:
                    self.note("begin", node.peer_id)
                    await life(node, chance)
            await anyio.sleep(chance.uniform(5, 60))

    async def _divide_temporarily(self) -> None:
        await anyio.sleep(600)
        nodes = self.network.nodes()
        self.network.divide([node.peer_id for node in nodes[::2]], [node.peer_id for node in nodes[1::2]])
        await anyio.sleep(300)
        self.network.divide()

    async def data_node(self, node: MemoryEndpoint, chance: random.Random) -> None:
        await dataset_directory.announce_dataset(node, f"set-{chance.randrange(3)}", DatasetRecord(num_slices=4))
        await anyio.sleep_forever()

    async def worker(self, node: MemoryEndpoint, chance: random.Random) -> None:
        held: set[uuid.UUID] = set()

        async def renew(_peer: PeerId, request: RenewLease) -> LeaseRenewal:
            return RenewalFailed()

        rpc.serve(node, RENEW_LEASE, renew)
        async with pubsub.subscribe(node, WORKER_REQUESTS) as heard:
            async for source, request in heard:
                self.note("heard", node.peer_id, request.id)
                if request.id in held or chance.random() > 0.04:
                    continue
                held.add(request.id)
                offer = WorkerOffer(
                    id=uuid.UUID(int=chance.getrandbits(128)),
                    request_id=request.id,
                    price=1.0,
                    resources=Resources(cpu=1.0),
                    timeout_ms=500,
                )
                try:
                    await rpc.call(node, source, OFFER, offer)
                except NetError as error:
                    self.note("offer lost", node.peer_id, type(error).__name__)

    async def scheduler(self, node: MemoryEndpoint, chance: random.Random) -> None:
        taken: list[tuple[PeerId, uuid.UUID]] = []

        async def take(peer: PeerId, offer: WorkerOffer) -> OfferReceived:
            self.note("offer", node.peer_id, f"{peer} {offer.id}")
            taken.append((peer, offer.id))
            return OfferReceived()

        rpc.serve(node, OFFER, take)
        while True:
            spec = WorkerSpec(resources=Resources(cpu=1.0), executor=[])
            request = WorkerRequest(id=uuid.UUID(int=chance.getrandbits(128)), spec=spec, timeout_ms=5000, bid=1.0)
            await pubsub.publish(node, WORKER_REQUESTS, request)
            self.note("published", node.peer_id, request.id)
            found = await dataset_directory.find_dataset(node, f"set-{chance.randrange(3)}")
            self.note("looked up", node.peer_id, len(found))
            for _ in range(4):
                await anyio.sleep(chance.uniform(25, 35))
                for worker, lease in taken[-4:]:
                    await self._renew(node, worker, lease)

    async def _renew(self, node: MemoryEndpoint, worker: PeerId, lease: uuid.UUID) -> None:
        try:
            await rpc.call(node, worker, RENEW_LEASE, RenewLease(id=lease))
            self.note("renewed", node.peer_id, lease)
        except UnreachableError:
            self.note("gone", node.peer_id, lease)
        except NetError as error:
            self.note("broke off", node.peer_id, type(error).__name__)


def play(world: World, seconds: float) -> World:
    async def main() -> World:
        await world.run(seconds)
        return world

    return simulate(main, seed=world.seed)


def test_history_is_determined_by_the_seed() -> None:
    one, two, other = (play(World(seed, 30, 3, 2), 900) for seed in (4, 4, 5))
    assert one.counts == two.counts
    assert one.history == two.history
    assert one.history != other.history


def test_a_request_over_a_standing_connection_takes_one_round_trip() -> None:
    async def main() -> list[float]:
        network = MemoryNetwork(seed=1, faults=Faults(delay=0.05))
        async with network.endpoint("a") as a, network.endpoint("b") as b:

            async def fail(_peer: PeerId, _request: RenewLease) -> LeaseRenewal:
                return RenewalFailed()

            rpc.serve(b, RENEW_LEASE, fail)
            taken = []
            for _ in range(3):
                began = anyio.current_time()
                await rpc.call(a, b.peer_id, RENEW_LEASE, RenewLease(id=uuid.UUID(int=1)))
                taken.append(anyio.current_time() - began)
            network.degrade(a.peer_id, b.peer_id, Faults(delay=30))
            with pytest.raises(UnreachableError):
                await a.open_stream(b.peer_id, [RENEW_LEASE.protocol], timeout=1, request=b"x")
            assert b.peer_id in a.connected_peers()
            return taken

    assert simulate(main) == pytest.approx([0.15, 0.1, 0.1])  # the first has to connect


async def test_overdue_gossip_is_delivered_at_once() -> None:
    network = MemoryNetwork(seed=1, faults=Faults(delay=0.01))
    async with network.endpoint("a") as a, network.endpoint("b") as b, network.endpoint("c") as c:
        network.degrade(a.peer_id, c.peer_id, Faults(delay=0.03))
        async with b.subscribe("t") as at_b, c.subscribe("t") as at_c:
            await a.publish("t", b"said")
            await anyio.sleep(0.005)
            time.sleep(0.1)
            with anyio.fail_after(15):
                assert (await anext(at_b)).data == (await anext(at_c)).data == b"said"


def times_of_arrival(processing: float, publishers: list[str]) -> list[tuple[str, float]]:
    """Let publishers send at once, in this order; return who was received when, in milliseconds after the delay."""

    async def main() -> list[tuple[str, float]]:
        network = MemoryNetwork(faults=Faults(delay=0.02), processing=processing)
        received = []
        async with network.endpoint("a") as a, network.endpoint("b") as b, network.endpoint("c") as c:
            names = {a.peer_id: "a", b.peer_id: "b"}
            nodes = {"a": a, "b": b}
            async with c.subscribe("topic") as messages:
                for number, name in enumerate(publishers):
                    await nodes[name].publish("topic", bytes([number]))
                async for message in messages:
                    received.append((names[message.source], round(1000 * anyio.current_time() - 20, 3)))
                    if len(received) == len(publishers):
                        return received
        raise AssertionError("unreachable")

    return simulate(main)


def test_deliveries_take_no_time_by_default() -> None:
    assert {when for _, when in times_of_arrival(0.0, ["a", "a", "b"])} == {0.0}


def test_deliveries_are_handled_one_after_the_other() -> None:
    assert [when for _, when in times_of_arrival(0.001, ["a", "a", "a"])] == [1.0, 2.0, 3.0]


def test_a_sender_of_many_messages_delays_another_by_one_turn() -> None:
    arrivals = times_of_arrival(0.001, ["a"] * 10 + ["b"])
    assert next(when for name, when in arrivals if name == "b") <= 3.0
    assert [when for _, when in arrivals] == [float(number) for number in range(1, 12)]


@pytest.mark.virtual_clock
async def test_a_request_and_its_answer_take_one_turn_each_and_are_counted() -> None:
    async def healthy(_peer: PeerId, _request: HealthRequest) -> Health:
        return Health(healthy=True)

    network = MemoryNetwork(processing=0.001)
    async with network.endpoint("a") as a, network.endpoint("b") as b:
        rpc.serve(b, HEALTH_CHECK, healthy)
        began = anyio.current_time()
        await rpc.call(a, b.peer_id, HEALTH_CHECK, HealthRequest())
        seconds, at_a, at_b = anyio.current_time() - began, a.processor.handled, b.processor.handled
    assert seconds == pytest.approx(0.002)
    assert (at_a, at_b) == (1, 1)


def test_a_cancelled_delivery_leaves_its_turn_to_the_next() -> None:
    async def main() -> float:
        network = MemoryNetwork(processing=1.0)
        async with network.endpoint("a") as a, network.endpoint("b") as b, anyio.create_task_group() as tasks:
            tasks.start_soon(b.processor.handle, a.peer_id)
            with anyio.move_on_after(0.5):
                await anyio.sleep(0.1)
                await b.processor.handle(a.peer_id)
            await handle_as(b, a.peer_id)
            return anyio.current_time()

    async def handle_as(node: MemoryEndpoint, sender: PeerId) -> None:
        with anyio.fail_after(5):
            await node.processor.handle(sender)

    assert simulate(main) == pytest.approx(2.0)
