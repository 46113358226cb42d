"""Schedulers and workers together: real allocators and real workers on the in-memory network and a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import anyio
import anyio.abc
import pytest

from hypha_net import rpc
from hypha_net.testing import Faults, MemoryEndpoint, MemoryNetwork, simulate
from hypha_proto.ids import PeerId
from hypha_proto.offers import OFFER, ExecutorDescriptor, OfferReceived, WorkerOffer, WorkerSpec
from hypha_proto.resources import Resources
from hypha_scheduler.allocation.allocator import Allocator, release
from hypha_scheduler.allocation.auction import AcceptedOffer, RoleRequest
from hypha_scheduler.allocation.leases import HeldLeases
from hypha_scheduler.allocation.renewal import renew_leases
from hypha_scheduler.errors import AllocationError
from hypha_worker.bidding.arbiter import Arbiter, OfferPolicy
from hypha_worker.bidding.bidder import Bidder
from hypha_worker.leasing.capacity import Capabilities, Capacity
from hypha_worker.leasing.lease_manager import LeaseManager
from hypha_worker.service import Worker
from hypha_worker.tasks.output_store import OutputStore
from hypha_worker.tasks.task_manager import TaskManager
from hypha_worker.tasks.task_run import TaskHost

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3, 4))]
EXECUTORS = frozenset({ExecutorDescriptor("train", "train"), ExecutorDescriptor("aggregate", "aggregate")})
ROOM = Resources(cpu=1.0)
"""Resources of a worker, and what each request asks: a worker has room for one lease."""


async def start_worker(endpoint: MemoryEndpoint, tasks: anyio.abc.TaskGroup) -> Worker:
    capabilities = Capabilities(Capacity(ROOM), EXECUTORS)
    lease_manager = LeaseManager(capabilities.capacity)
    task_manager = TaskManager(
        TaskHost(endpoint, lease_manager, Path("unused"), OutputStore(Path("unused/outputs"))), tasks
    )
    worker = Worker(endpoint, Arbiter(OfferPolicy(), capabilities), lease_manager, task_manager)
    worker.listen()
    await tasks.start(Bidder(endpoint, worker.arbiter, lease_manager, worker.sweep).run)
    tasks.start_soon(worker.sweep_loop)
    return worker


def role_requests(train: int, aggregate: int) -> tuple[RoleRequest, ...]:
    wanted = {ExecutorDescriptor("train", "train"): train, ExecutorDescriptor("aggregate", "aggregate"): aggregate}
    return tuple(
        RoleRequest(executor.name, WorkerSpec(resources=ROOM, executor=(executor,)), 100.0, 120.0, count)
        for executor, count in wanted.items()
        if count
    )


@dataclass
class Scheduler:
    """Seeks leases for one job, and renews those that it holds."""

    endpoint: MemoryEndpoint
    tasks: anyio.abc.TaskGroup
    random: Random
    leases: HeldLeases = field(default_factory=HeldLeases)
    held: tuple[AcceptedOffer, ...] = ()
    seconds: float = 0.0

    async def place(self, requests: tuple[RoleRequest, ...], pause: float = 0.0, timeout: float = 60.0) -> None:
        """Search as a job does, after a pause: keep what is found, or release everything."""
        await anyio.sleep(pause)
        minimum = {request.role: request.count for request in requests}
        allocator = Allocator(
            self.endpoint, requests, self.leases, minimum, timeout, tasks=self.tasks, random=self.random
        )

        async def offered(peer: PeerId, offer: WorkerOffer) -> OfferReceived:
            allocator.add_offer(peer, offer)
            return OfferReceived()

        rpc.serve(self.endpoint, OFFER, offered)
        self.tasks.start_soon(
            renew_leases, self.endpoint, self.leases, lambda held, _: allocator.lease_lost(held.lease)
        )
        try:
            self.held = await allocator.allocate()
        except AllocationError:
            for held in self.leases.held():
                self.leases.drop(held.lease)
                self.tasks.start_soon(release, self.endpoint, held.peer, held.lease, "the job is over")
        self.seconds = allocator.seconds


def play(
    seed: int,
    schedulers: int,
    workers: int,
    requests: tuple[RoleRequest, ...],
    delay: Callable[[Random, int], float] = lambda random, _number: random.uniform(0.02, 0.08),
    spread: float = 1.0,
) -> list[Scheduler]:
    """Let schedulers seek leases; return them when each has found its leases or has failed.

    Args:
        seed: of the order of tasks and of all random choices.
        schedulers: their number.
        workers: their number.
        requests: what each scheduler seeks.
        delay: seconds of one of a worker's links, one way, by its number.
        spread: seconds within which they begin.
    """
    made: list[Scheduler] = []
    random = Random(seed)

    async def main() -> None:
        network = MemoryNetwork(seed=seed, faults=Faults(delay=0.02))
        async with AsyncExitStack() as stack:
            stack.enter_context(anyio.fail_after(300))
            tasks = await stack.enter_async_context(anyio.create_task_group())
            for number in range(schedulers):
                endpoint = await stack.enter_async_context(network.endpoint(f"scheduler-{number}"))
                made.append(Scheduler(endpoint, tasks, Random(f"{seed}/{number}")))
            for number in range(workers):
                endpoint = await stack.enter_async_context(network.endpoint(f"worker-{number}"))
                for scheduler in made:
                    network.degrade(endpoint.peer_id, scheduler.endpoint.peer_id, Faults(delay=delay(random, number)))
                await start_worker(endpoint, tasks)
            async with anyio.create_task_group() as searches:
                for scheduler in made:
                    searches.start_soon(scheduler.place, requests, random.uniform(0, spread))
            tasks.cancel_scope.cancel()

    simulate(main, seed=seed)
    return made


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_as_many_of_ten_schedulers_are_placed_as_fit_on_twenty_workers(seed: int) -> None:
    schedulers = play(seed, 10, 20, role_requests(3, 1))
    placed = [scheduler for scheduler in schedulers if scheduler.held]
    print(sorted(round(s.seconds, 1) for s in placed))
    assert [len(scheduler.held) for scheduler in placed] == [4] * 5
    peers = [offer.peer for scheduler in placed for offer in scheduler.held]
    assert len(set(peers)) == 20


@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_of_six_schedulers_are_placed_as_fit_on_eight_workers(seed: int) -> None:
    """So few that every scheduler can ask all workers whether others compete for them."""
    schedulers = play(seed, 6, 8, role_requests(3, 1))
    assert sorted(len(scheduler.held) for scheduler in schedulers) == [0, 0, 0, 0, 4, 4]


ONE_WAY = (0.005, 0.05, 0.15, 0.3)


@pytest.mark.parametrize("seed", range(3))
def test_workers_on_long_links_are_placed_beside_near_ones(seed: int) -> None:
    [scheduler] = play(seed, 1, 4, role_requests(3, 1), lambda _random, number: ONE_WAY[number])
    assert len(scheduler.held) == 4
    assert scheduler.seconds < 10


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("far", ONE_WAY[1:])
def test_near_workers_are_delayed_by_far_ones_by_a_round_trip_at_most(seed: int, far: float) -> None:
    def near_and_far(_random: Random, number: int) -> float:
        return ONE_WAY[0] if number < 2 else far

    [alone] = play(seed, 1, 2, role_requests(2, 0), near_and_far)
    [beside] = play(seed, 1, 4, role_requests(2, 0), near_and_far)
    assert len(alone.held) == len(beside.held) == 2
    assert beside.seconds <= alone.seconds + max(2 * far, 0.25)  # or the decision window, if that is longer
