"""Goodput of a training job whose learners fail: ours on a simulated network, and one that restarts from checkpoints.

Both pay the same simulated costs (`COSTS`). Our job is the real operator in the network of the tests
(`support.diloco_network`); the reference is a model of a job that stops as a whole with each failure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, Final

import anyio

from hypha_net.testing import simulate

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # the simulated network is shared with the tests

from support.diloco_network import Delays, Network
from support.diloco_processes import Training
from support.diloco_scheduler import LEASE
from support.diloco_simulation import BATCH, FakeDataset, job_table

from hypha_scheduler.strategies.diloco.specs import TRAIN

LEARNERS: Final = 16
SPARES: Final = 2
"""Machines beyond those that the job wants."""
BATCHES: Final = 6
"""Batches of a learner in a round, while all are there."""
REPAIR: Final = 60.0
"""Seconds until a machine that has failed is back."""
COSTS: Final = Delays(message=0.05, start=20.0, weights=4.0, batch=4.0, push=3.0, step=2.0, merge=1.0, auction=2.0)


@dataclass(frozen=True)
class Job:
    """A job that has finished."""

    seconds: float
    """From the first batch to the last commit."""
    samples: int
    """Accepted samples."""
    failures: int = 0

    @property
    def rate(self) -> float:
        """Accepted samples per second."""
        return self.samples / self.seconds


@dataclass
class Failures:
    """Machines of learners that fail and come back."""

    seed: int
    interval: float
    """Mean seconds between two failures of the job's learners."""
    count: int = 0
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = Random(f"failures/{self.seed}")

    async def happen(self, network: Network) -> None:
        """Let machines fail until the job ends."""
        while not network.rounds:  # noqa: ASYNC110 - both jobs begin without failures
            await anyio.sleep(1.0)
        while True:
            await anyio.sleep(self.random.expovariate(1.0 / self.interval))
            learners = [process for process in network.processes(TRAIN) if isinstance(process, Training)]
            if learners:
                self.count += 1
                node = self.random.choice(learners).node
                node.crash()
                network.tasks.start_soon(_repair, node.come_back)


async def _repair(come_back: Callable[[], None]) -> None:
    await anyio.sleep(REPAIR)
    come_back()


def run_job(seed: int, rounds: int, interval: float | None = None) -> Job:
    """Run our job; without `interval` nothing fails."""
    failures = None if interval is None else Failures(seed, interval)
    during: Callable[[Network], Coroutine[Any, Any, None]] | None = None if failures is None else failures.happen
    table = job_table(
        rounds={"update_rounds": rounds, "avg_samples_between_updates": LEARNERS * BATCHES * BATCH},
        resources={"num_workers": LEARNERS, "min_workers": 2, "allocation_timeout": 600.0},
    )
    network = Network(
        seed,
        table,
        workers=LEARNERS + SPARES,
        delays=COSTS,
        dataset=FakeDataset(samples=[64] * 200),
        during=during,
    )
    simulate(network.run, seed=seed)
    if network.outcome != "finished":
        raise AssertionError(f"seed {seed}: the job has failed: {network.outcome}")
    times = [at for at, kind, _ in network.record_times if kind == "round"]
    samples = sum(member["samples"] for record in network.rounds[1:] for member in record["members"])
    return Job(times[-1] - times[0], samples, 0 if failures is None else failures.count)


def run_restarting_job(seed: int, rounds: int, round_seconds: float, samples: int, interval: float) -> Job:
    """Run a job that stops with each failure of a learner and begins its round anew from the last checkpoint.

    It writes a checkpoint after every round, which costs nothing. A failure is noticed when the lease of the machine is
    lost; then another machine is found, all learners start again and fetch the weights.

    Args:
        seed: of the failures.
        rounds: number of rounds that count.
        round_seconds: duration of a round.
        samples: accepted samples of all rounds.
        interval: mean seconds between two failures.
    """
    random = Random(f"restarts/{seed}")
    now, done, failures = 0.0, 0, 0
    next_failure = random.expovariate(1.0 / interval)
    ready_at = 0.0
    while done < rounds:
        end = max(now, ready_at) + round_seconds
        if next_failure >= end:
            now, done = end, done + 1
            continue
        failures += 1
        now = next_failure
        next_failure = now + random.expovariate(1.0 / interval)
        ready_at = now + _restart_seconds(random)
    return Job(now, samples, failures)


def _restart_seconds(random: Random) -> float:
    """Return how long a job stands still after a failure."""
    noticed = LEASE + random.uniform(0.0, 1.0)
    found = random.uniform(0.5, 1.5) * COSTS.auction
    started = max(_spread(random, COSTS.start) + _spread(random, COSTS.weights) for _ in range(LEARNERS))
    return float(noticed + found + started)


def _spread(random: Random, seconds: float) -> float:
    return random.uniform(0.5 * seconds, 1.5 * seconds)


@dataclass(frozen=True)
class Goodput:
    """Accepted samples per second, as shares of those without failures."""

    ours: float
    restarting: float


@cache
def _undisturbed(seed: int, rounds: int) -> Job:
    """Run our job without failures."""
    return run_job(seed, rounds)


def goodput(rounds_between_failures: float, rounds: int, seeds: int) -> Goodput:
    """Return the mean goodput of both jobs over some seeds."""
    ours, restarting = [], []
    for seed in range(seeds):
        whole = _undisturbed(seed, rounds + 1)
        round_seconds = whole.seconds / rounds
        interval = rounds_between_failures * round_seconds
        ours.append(run_job(seed, rounds + 1, interval).rate / whole.rate)
        other = run_restarting_job(seed, rounds, round_seconds, whole.samples, interval)
        restarting.append(other.rate / whole.rate)
    return Goodput(mean(ours), mean(restarting))
