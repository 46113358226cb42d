"""Goodput of 16 simulated learners that fail at mean intervals of 2 to 20 rounds, beside restarts from checkpoints."""

from __future__ import annotations

from benchmarks.run import BenchmarkRun
from benchmarks.simulation.goodput import LEARNERS, goodput
from benchmarks.tables import Row

INTERVALS = (2, 5, 10, 20)
"""Mean number of rounds between two failures of the job's learners."""
LEAST_ROUNDS = 6
REQUESTS_A_ROUND = 10
"""`--count` requests mean a tenth as many rounds."""


def measure(run: BenchmarkRun) -> list[Row]:
    """Simulate both jobs for each interval."""
    rounds, rows = max(LEAST_ROUNDS, run.count // REQUESTS_A_ROUND), []
    for interval in INTERVALS:
        found = goodput(interval, rounds, run.repeat)
        rows.append(
            Row(
                f"{LEARNERS} learners, a failure every {interval} rounds, goodput",
                "%",
                100 * found.ours,
                100 * found.restarting,
                "restart from the last checkpoint",
                found.ours / found.restarting,
                "",
            )
        )
    return rows
