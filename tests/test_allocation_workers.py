"""Schedulers and workers together: real allocators and real workers on the in-memory network and a virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from random import Random

import anyio
import pytest

from benchmarks.simulation.job import ONE_CORE, Demand, Placement, place_job
from benchmarks.simulation.network import open_placement_network, open_simulated_worker, seeded_ids
from hypha_net.testing import Faults, MemoryNetwork, simulate
from hypha_scheduler.allocation.leases import HeldLeases
from hypha_worker.leasing.capacity import Capacity

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3, 4))]


@pytest.mark.parametrize(
    ("jobs", "workers", "placed"),
    [
        pytest.param(6, 8, 2, id="so few workers that each scheduler can ask all who else competes for them"),
        pytest.param(10, 20, 5, marks=pytest.mark.nightly, id="many"),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_of_jobs_that_compete_as_many_are_placed_as_fit(seed: int, jobs: int, workers: int, placed: int) -> None:
    """They ask for 4 leases each, within a second; a worker has room for one."""
    random = Random(seed)
    found: list[Placement] = []

    async def main() -> None:
        all_asked = anyio.Event()

        async def job(name: str) -> None:
            await anyio.sleep(random.random())
            async with network.place(name, Demand(train=3)) as placement:
                found.append(placement)
                if len(found) == jobs:
                    all_asked.set()
                await all_asked.wait()

        async with open_placement_network(seed) as network, anyio.create_task_group() as tasks:
            await network.add_workers(workers, ONE_CORE)
            for number in range(jobs):
                tasks.start_soon(job, f"scheduler-{number}")

    with seeded_ids(seed):
        simulate(main, seed=seed)
    assert sum(not placement.failure for placement in found) == placed


def place(seed: int, delays: Sequence[float], demand: Demand) -> Placement:
    """Place a job among workers that have room for one lease each, by the one-way delays of their links."""

    async def main() -> Placement:
        network = MemoryNetwork(seed=seed, faults=Faults(delay=0.02))
        async with AsyncExitStack() as stack:
            scheduler = await stack.enter_async_context(network.endpoint("scheduler"))
            for number, delay in enumerate(delays):
                endpoint = await stack.enter_async_context(network.endpoint(f"worker-{number}"))
                network.degrade(endpoint.peer_id, scheduler.peer_id, Faults(delay=delay))
                await stack.enter_async_context(open_simulated_worker(endpoint, Capacity(ONE_CORE)))
            return await stack.enter_async_context(place_job(scheduler, demand, HeldLeases()))

    with seeded_ids(seed):
        return simulate(main, seed=seed)


ONE_WAY = (0.005, 0.05, 0.15, 0.3)


@pytest.mark.parametrize("seed", range(3))
def test_workers_on_long_links_are_placed_beside_near_ones(seed: int) -> None:
    found = place(seed, ONE_WAY, Demand(train=3))
    assert len(found.offers) == 4
    assert found.seconds < 10


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("far", ONE_WAY[1:])
def test_near_workers_are_delayed_by_far_ones_by_a_round_trip_at_most(seed: int, far: float) -> None:
    demand = Demand(train=2, servers=0)
    alone = place(seed, ONE_WAY[:1] * 2, demand)
    beside = place(seed, [*ONE_WAY[:1] * 2, far, far], demand)
    assert len(alone.offers) == len(beside.offers) == 2
    assert beside.seconds <= alone.seconds + max(2 * far, 0.25)  # or the decision window, if that is longer
