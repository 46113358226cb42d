"""The goodput benchmark at a small size: both jobs lose time to failures, and ours less."""

from __future__ import annotations

import pytest

from benchmarks.simulation.goodput import goodput, run_job, run_restarting_job


def test_a_restarting_job_loses_each_round_that_a_failure_interrupts() -> None:
    whole = run_restarting_job(0, 10, 40.0, 1000, interval=1e9)
    assert (whole.seconds, whole.failures) == (400.0, 0)

    found = run_restarting_job(0, 10, 40.0, 1000, interval=80.0)
    assert found.failures > 0
    assert found.seconds > 400.0 + 30.0 * found.failures


def test_our_job_takes_its_samples_in_spite_of_failures() -> None:
    whole, found = run_job(0, 6), run_job(0, 6, interval=90.0)

    assert found.failures > 0
    assert 0.5 < found.rate / whole.rate <= 1.05


@pytest.mark.nightly
def test_goodput_is_higher_than_with_restarts_if_failures_are_frequent() -> None:
    found = goodput(2, rounds=6, seeds=2)

    assert found.ours > 0.7 > found.restarting
