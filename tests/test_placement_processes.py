"""Placement on eight real workers, each a process of its own behind a gateway, by a new scheduler for each job."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.measures.placement import REAL_WORKERS, place_on_real_workers
from benchmarks.run import open_run

BOUND = 1.0
"""Seconds, on an idle machine."""


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_a_job_gets_all_of_eight_real_workers_within_a_second(tmp_path: Path) -> None:
    with open_run(tmp_path, size=1, repeat=1, count=1, leaves=1, minutes=1, workers=1) as run:
        times = place_on_real_workers(run, REAL_WORKERS, jobs=3)
    print(*(f"{seconds:.3f} s" for seconds in times))
    assert len(times) == 3
    assert sorted(times)[1] < BOUND, times
