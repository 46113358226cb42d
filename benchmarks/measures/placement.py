"""Time from a job's first request until all its leases are held: simulated with up to 200 workers, and 8 real ones.

Simulations run on a virtual clock with links of 20 to 80 ms one way and 1 ms of processor time per delivery; a job
that is not placed within `TIMEOUT` counts with that time.
"""

from __future__ import annotations

import logging
import os
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import anyio

from benchmarks.children import start_child
from benchmarks.run import BenchmarkRun
from benchmarks.simulation.cheats import BURST, FreeOfferWithoutLease, LeaseHolder, OfferFlood, RequestFlood, Scripted
from benchmarks.simulation.job import BID, ONE_CORE, Demand
from benchmarks.simulation.network import FOUR_CORES, PlacementNetwork, open_placement_network, seeded_ids
from benchmarks.tables import Row, quantile
from hypha_net.testing import simulate
from hypha_proto.protocols import WORKER_REQUESTS_TOPIC

TIMEOUT = 10.0
SETTINGS = ((10, 8, 4.0), (100, 8, 1.0), (100, 90, 0.4), (200, 8, 0.6), (200, 180, 0.4))
"""Workers, leases of the job, and simulations for each repetition: few of large networks, which take seconds each."""
MS = 1000
CROWD_WORKERS, CROWD_LEASES, CROWD_TIMEOUT = 200, 4, 60.0
REAL_WORKERS = 8
GOSSIP_RATE = 64
"""Messages of one origin that gossip forwards per second in the long run."""
_SETTLING = 1.5
"""Seconds in which cheats take leases before the job asks; up to a batch window more, so that runs differ."""
_LEAST_IS = "the least that the links allow"


@dataclass(frozen=True)
class Scenario:
    """One simulated placement."""

    seed: int
    nodes: int
    """Workers, or with `cheats` workers and cheats."""
    leases: int
    cheats: int = 0


@dataclass(frozen=True)
class Result:
    """One simulated placement."""

    seconds: float
    least: float
    """The shortest time that the links allow."""
    messages: float
    """Messages delivered meanwhile, per worker."""


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure simulated placements in as many processes as there are processors, then real ones."""
    rows: list[Row] = []
    # what nodes warn of beside cheats would hide the table
    with ProcessPoolExecutor(os.cpu_count(), initializer=logging.disable, initargs=(logging.WARNING,)) as pool:
        crowd = pool.submit(place_crowd, min(CROWD_WORKERS, run.workers))
        for nodes, leases, share in SETTINGS:
            if nodes > run.workers:
                continue
            runs = max(1, round(share * run.repeat))
            plain = [Scenario(seed, nodes, leases) for seed in range(runs)]
            cheated = [replace(scenario, cheats=nodes // 10) for scenario in plain]
            results = list(pool.map(place, plain + cheated))
            rows += _rows(f"{leases} leases on {nodes} workers", results[:runs], results[runs:])
        rows += crowd.result()
    return rows + measure_real(run)


def _rows(what: str, plain: Sequence[Result], cheated: Sequence[Result]) -> list[Row]:
    seconds, cheated_seconds = ([result.seconds for result in results] for results in (plain, cheated))
    least = [result.least for result in plain]
    rows = []
    for name, share in (("p50", 0.5), ("p95", 0.95)):
        ours, reference = quantile(seconds, share) * MS, quantile(least, share) * MS
        rows.append(Row(f"{what}, {name}", "ms", ours, reference, _LEAST_IS, ours / reference))
    ours, reference = quantile(cheated_seconds, 0.95) * MS, quantile(seconds, 0.95) * MS
    rows.append(Row(f"{what}, a tenth cheats, p95", "ms", ours, reference, "without", ours / reference, "≤ 2"))
    messages = [statistics.mean(result.messages for result in results) for results in (plain, cheated)]
    rows.append(Row(f"{what}, messages a worker", "", messages[0]))
    rows.append(
        Row(
            f"{what}, a tenth cheats, messages a worker",
            "",
            messages[1],
            messages[0],
            "without",
            messages[1] / messages[0],
        )
    )
    return rows


def place(scenario: Scenario) -> Result:
    """Simulate one placement."""

    async def main() -> Result:
        async with open_placement_network(scenario.seed) as network:
            await network.add_workers(scenario.nodes - scenario.cheats, FOUR_CORES)
            early, late = make_cheats(scenario)
            await _add(network, "early", early)
            await anyio.sleep(_SETTLING + random.Random(scenario.seed).uniform(0, 0.2))
            await _add(network, "late", late)
            before = network.messages
            demand = Demand(train=scenario.leases - 1, timeout=TIMEOUT)
            async with network.place("scheduler", demand) as placement:
                messages = (network.messages - before) / len(network.workers)
                least = network.least_seconds("scheduler", scenario.leases)
                return Result(min(placement.seconds, TIMEOUT), least, messages)

    with seeded_ids(scenario.seed):
        return simulate(main, seed=scenario.seed)


async def _add(network: PlacementNetwork, name: str, cheats: Sequence[Scripted]) -> None:
    for number, cheat in enumerate(cheats):
        await network.add_cheat(f"{name}-{number}", cheat.run)


def make_cheats(scenario: Scenario) -> tuple[list[Scripted], list[Scripted]]:
    """Return a scenario's cheats: those that are there before the job, and those that begin with its first request.

    Every kind in turn, but only one that floods the topic: gossip's limit per origin bounds what it can send.
    """
    early: list[Scripted] = []
    late: list[Scripted] = []
    for number in range(scenario.seed, scenario.seed + scenario.cheats):
        match number % 5:
            case 0:
                early.append(FreeOfferWithoutLease(denies=number % 2 == 0))
            case 1:
                early.append(OfferFlood(count=200))
            case 2:
                early.append(LeaseHolder(1e300, FOUR_CORES))
            case 3 if not late:
                late.append(RequestFlood(ONE_CORE, BID, pause=BURST / GOSSIP_RATE))
            case _:
                early.append(LeaseHolder(BID, ONE_CORE, leases=4))
    return early, late


def place_crowd(workers: int) -> list[Row]:
    """Let as many jobs ask at once as all workers together can take, and count those that are placed."""
    jobs = workers // CROWD_LEASES
    placed: list[float] = []

    async def place_one(network: PlacementNetwork, name: str) -> None:
        async with network.place(name, Demand(train=CROWD_LEASES - 1, timeout=CROWD_TIMEOUT)) as placement:
            if not placement.failure:
                placed.append(placement.seconds)
                await anyio.sleep(CROWD_TIMEOUT)

    async def main() -> None:
        async with open_placement_network(0) as network:
            await network.add_workers(workers, ONE_CORE)
            await anyio.sleep(_SETTLING)
            async with anyio.create_task_group() as tasks:
                for number in range(jobs):
                    tasks.start_soon(place_one, network, f"scheduler-{number}")
                with anyio.move_on_after(CROWD_TIMEOUT):
                    while len(placed) < jobs:  # noqa: ASYNC110 - on a virtual clock
                        await anyio.sleep(0.1)
                tasks.cancel_scope.cancel()

    with seeded_ids(0):
        simulate(main)
    what = f"{jobs} jobs of {CROWD_LEASES} leases on {workers} workers with one lease each"
    rows = [Row(f"{what}, placed", "jobs", len(placed), jobs, "all that fit", len(placed) / jobs, "1")]
    if placed:
        rows.append(Row(f"{what}, the last one placed", "s", max(placed)))
    return rows


def measure_real(run: BenchmarkRun) -> list[Row]:
    """Place jobs on real workers behind a gateway, a process each, one job after the other."""
    times = place_on_real_workers(run, REAL_WORKERS, max(5, run.count // 25))
    what = f"{REAL_WORKERS} leases on {REAL_WORKERS} real workers"
    return [
        Row(f"{what}, p50", "ms", quantile(times, 0.5) * MS),
        Row(f"{what}, p95", "ms", quantile(times, 0.95) * MS, bound="< 1000 ms"),
    ]


def place_on_real_workers(run: BenchmarkRun, workers: int, jobs: int) -> list[float]:
    """Place jobs that need all workers, each by a new scheduler; return the seconds from the first request.

    The first one, which is not counted, waits until all workers are there.
    """
    issue = run.organisation.node
    with ExitStack() as stack:
        gateway = stack.enter_context(start_child("node", files=issue("gateway", "gateway"), role="gateway"))
        gateway.ask("subscribe", topic=WORKER_REQUESTS_TOPIC)
        about = {"gateway": gateway.about["address"]}
        for number in range(workers):
            name = f"worker-{number}"
            work_dir = str(run.folder / name)
            stack.enter_context(start_child("worker", files=issue(name, "worker"), work_dir=work_dir, **about))
        scheduler = stack.enter_context(start_child("scheduler", files=issue("scheduler", "scheduler"), **about))
        return [scheduler.ask("place", leases=workers) for _ in range(jobs + 1)][1:]
