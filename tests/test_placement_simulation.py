"""Real workers and schedulers on simulated networks: rough links, peers that cheat, and jobs that compete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random

import anyio
import pytest

from benchmarks.simulation.cheats import FreeOfferWithoutLease, LeaseHolder, OfferFlood, RequestFlood, Scripted
from benchmarks.simulation.job import BID, ONE_CORE, Demand, Placement, place_job
from benchmarks.simulation.network import (
    FOUR_CORES,
    PROCESSING,
    PlacementNetwork,
    open_placement_network,
    open_simulated_worker,
    seeded_ids,
)
from hypha_net.testing import Faults, MemoryNetwork, simulate
from hypha_proto.leases import RENEWED_LEASE
from hypha_proto.resources import Resources
from hypha_scheduler.allocation.leases import HeldLeases
from hypha_worker.leasing.capacity import Capacity

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


IDLE_LEASE = 60.0
"""Seconds for which a worker keeps a lease on which no job runs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one simulated placement beside cheats."""

    placement: Placement
    honest: bool
    """Whether all its leases are at honest workers."""


def place(
    cheats: Mapping[str, Scripted],
    demand: Demand,
    *,
    capacity: Resources = FOUR_CORES,
    processing: float = PROCESSING,
    seed: int = 1,
    afterwards: float = 0.0,
) -> Outcome:
    """Place one job among six workers, after the cheats had a second to take what they want; wait `afterwards`."""

    async def main() -> Outcome:
        async with open_placement_network(seed, processing=processing) as network:
            await network.add_workers(6, capacity)
            for name, cheat in cheats.items():
                await network.add_cheat(name, cheat.run)
            await anyio.sleep(1.0)
            async with network.place("scheduler", demand) as placement:
                await anyio.sleep(afterwards)
                return Outcome(placement, {offer.peer for offer in placement.offers} <= set(network.workers))

    with seeded_ids(seed):
        return simulate(main, seed=seed)


@pytest.mark.parametrize("denies", [True, False], ids=["denied", "ignored"])
def test_free_offers_without_a_lease_behind_them(denies: bool) -> None:
    cheats = {f"cheat-{number}": FreeOfferWithoutLease(denies=denies) for number in range(3)}
    found = place(cheats, Demand(train=3))
    assert sum(cheat.renewals for cheat in cheats.values()) > 0
    assert found.honest
    assert found.placement.seconds < 3.0, found.placement.failure


@pytest.mark.nightly
def test_thousands_of_offers_that_last_a_minute() -> None:
    """They all arrive before the workers have decided about the requests."""
    flood = OfferFlood(count=2100, concurrent=2100)
    found = place({"cheat": flood}, Demand(train=3, timeout=10.0), processing=0.0)
    assert flood.sent > 4096
    assert found.honest
    assert found.placement.seconds < 5.0, found.placement.failure


def test_bids_beyond_every_price() -> None:
    found = place({"cheat": LeaseHolder(1e300, FOUR_CORES)}, Demand(train=3, timeout=10.0))
    assert found.placement.seconds < 2.0, found.placement.failure


def test_leases_without_a_job_end() -> None:
    """Four of six workers are held by a scheduler that needs more: the honest job gets its four when two are freed."""
    holder = LeaseHolder(BID, ONE_CORE, leases=4, requests=4)
    found = place({"cheat": holder}, Demand(train=3, timeout=2 * IDLE_LEASE), capacity=ONE_CORE, afterwards=10.0)
    assert IDLE_LEASE / 2 < found.placement.seconds < IDLE_LEASE + 30.0, found.placement.failure
    assert holder.held == {}


def test_a_hundred_requests_in_each_batch_window() -> None:
    """At equal bids; the flood's offers hold all cores most of the time, and the job gets its share of the rest."""
    flood = RequestFlood(ONE_CORE, BID)
    found = place({"cheat": flood}, Demand(train=1, timeout=10.0))
    assert flood.sent >= 500
    assert found.placement.seconds < 5.0, found.placement.failure


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


def place_on_links(seed: int, delays: Sequence[float], demand: Demand) -> Placement:
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
    found = place_on_links(seed, ONE_WAY, Demand(train=3))
    assert len(found.offers) == 4
    assert found.seconds < 10


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("far", ONE_WAY[1:])
def test_near_workers_are_delayed_by_far_ones_by_a_round_trip_at_most(seed: int, far: float) -> None:
    demand = Demand(train=2, servers=0)
    alone = place_on_links(seed, ONE_WAY[:1] * 2, demand)
    beside = place_on_links(seed, [*ONE_WAY[:1] * 2, far, far], demand)
    assert len(alone.offers) == len(beside.offers) == 2
    assert beside.seconds <= alone.seconds + max(2 * far, 0.25)  # or the decision window, if that is longer
