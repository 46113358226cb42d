"""Placement on eight real workers, each a process of its own behind a gateway, by a new scheduler for each job."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.measures.placement import REAL_WORKERS, place_on_real_workers
from benchmarks.run import open_run

BOUND = 4.0
"""Seconds. The benchmark `placement` asks for one on an idle machine."""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_gets_all_of_eight_real_workers_within_a_bound(tmp_path: Path) -> None:
    with open_run(tmp_path, size=1, repeat=1, count=1, leaves=1, minutes=1, workers=1) as run:
        times = place_on_real_workers(run, REAL_WORKERS, jobs=3)
    assert len(times) == 3
    assert max(times) < BOUND, times
