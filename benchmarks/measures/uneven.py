"""Time in which simulated workers of different speeds train, with our rounds and with the same steps for each."""

from __future__ import annotations

from statistics import mean
from typing import Final

from benchmarks.run import BenchmarkRun
from benchmarks.simulation.uneven_speeds import Slowdown, utilisation
from benchmarks.tables import Row

JOBS: Final = {
    "workers at 1:1:2:4, 20 % jitter": None,
    "the same, one slows 5 times in the third round": Slowdown(),
}


def measure(run: BenchmarkRun) -> list[Row]:
    """Simulate each job, `repeat` times."""
    rows = []
    for what, slowdown in JOBS.items():
        ours = mean(utilisation(seed, slowdown=slowdown).useful for seed in range(run.repeat))
        fixed = mean(utilisation(seed, slowdown=slowdown, fixed=True).useful for seed in range(run.repeat))
        rows.append(
            Row(f"{what}, training", "%", 100 * ours, 100 * fixed, "same steps for each", ours / fixed, "≥ 95 %")
        )
    return rows
