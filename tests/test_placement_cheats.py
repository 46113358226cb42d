"""Peers that cheat do not keep an honest job from its workers: real workers and schedulers, simulated network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import anyio
import pytest

from benchmarks.simulation.cheats import FreeOfferWithoutLease, LeaseHolder, OfferFlood, RequestFlood, Scripted
from benchmarks.simulation.job import BID, ONE_CORE, Demand, Placement
from benchmarks.simulation.network import FOUR_CORES, PROCESSING, open_placement_network, seeded_ids
from hypha_net.testing import simulate
from hypha_proto.resources import Resources

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
