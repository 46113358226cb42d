"""Simulated workers of different speeds: rounds keep them all busy, and suspect none of them."""

from __future__ import annotations

import pytest

from benchmarks.simulation.uneven_speeds import Costs, Slowdown, utilisation

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]


@pytest.mark.parametrize("seed", SEEDS)
def test_workers_of_different_speeds_train_nearly_all_the_time(seed: int) -> None:
    found = utilisation(seed)

    assert found.useful >= 0.95
    assert found.suspected == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_worker_that_slows_5_times_within_a_round_holds_nobody_up(seed: int) -> None:
    found = utilisation(seed, slowdown=Slowdown())

    assert found.useful >= 0.95
    assert found.suspected == 0


def test_with_the_same_steps_for_each_worker_the_slowest_decides() -> None:
    assert utilisation(0, fixed=True).useful < 0.6
    assert utilisation(0, slowdown=Slowdown(), fixed=True).useful < 0.6


def test_reports_of_several_batches_on_a_slow_link_change_little() -> None:
    near = utilisation(0, costs=Costs(batches=(0.02, 0.02, 0.04, 0.08), link=0.001))
    far = utilisation(0, costs=Costs(batches=(0.02, 0.02, 0.04, 0.08), link=0.1))

    assert far.suspected == 0
    assert far.seconds < 1.15 * near.seconds
