"""Real workers and schedulers on a rough simulated network: leases stay consistent, and at the end all is free."""

from __future__ import annotations

from random import Random

import anyio
import pytest

from benchmarks.simulation.job import Demand
from benchmarks.simulation.network import PlacementNetwork, open_placement_network, seeded_ids
from hypha_net.testing import Faults, simulate
from hypha_proto.leases import RENEWED_LEASE
from hypha_proto.resources import Resources

WORKERS, SCHEDULERS = 6, 4
TWO_CORES = Resources(cpu=2.0)
CHECK_INTERVAL = 0.01
DURATION = 45.0


def check(network: PlacementNetwork, now: float) -> None:
    """Assert that no worker leases more than it has, and that it knows the leases that schedulers believe in."""
    for worker in network.workers.values():
        total = sum((lease.allocation.resources for lease in worker.lease_manager.leases), Resources())
        assert TWO_CORES.covers(total), f"{total} is leased of {TWO_CORES}"
    for scheduler, leases in network.schedulers.items():
        for held in leases.held():
            if held.expires > now:
                manager = network.workers[held.peer].lease_manager
                assert manager.find(held.lease, scheduler) is not None, f"{held} is believed at {now:g}"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_leases_stay_consistent_on_a_rough_network(seed: int) -> None:
    """Jobs of different sizes come and go, with more demand than there is, on links that break and lose gossip."""
    random = Random(f"jobs/{seed}")
    placed: list[float] = []

    async def run_jobs(network: PlacementNetwork, name: str) -> None:
        for number in range(100):
            demand = Demand(train=random.choice((1, 2, 4)), timeout=10.0)
            async with network.place(f"{name}-{number}", demand) as placement:
                if not placement.failure:
                    placed.append(placement.seconds)
                await anyio.sleep(random.uniform(0.0, 2 * RENEWED_LEASE))

    async def keep_checking(network: PlacementNetwork) -> None:
        while True:
            check(network, anyio.current_time())
            await anyio.sleep(CHECK_INTERVAL)

    async def main() -> None:
        rough = Faults(jitter=0.05, gossip_loss=0.1, break_rate=0.02, refuse_rate=0.05)
        async with open_placement_network(seed, faults=rough) as network:
            await network.add_workers(WORKERS, TWO_CORES)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(keep_checking, network)
                for number in range(SCHEDULERS):
                    tasks.start_soon(run_jobs, network, f"scheduler-{number}")
                await anyio.sleep(DURATION)
                tasks.cancel_scope.cancel()
            await anyio.sleep(RENEWED_LEASE + 1.0)
            assert network.schedulers == {}
            for worker in network.workers.values():
                assert worker.lease_manager.leases == ()

    with seeded_ids(seed):
        simulate(main, seed=seed)
    assert len(placed) >= 5
