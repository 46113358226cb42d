"""Batch allocation by measured throughput: workers finish together and the target is met with little excess."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.diloco.batch_allocation import ThroughputEstimate, WorkerProgress, allocate_batches

PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(6)]
SPEEDS = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=6)


@settings(derandomize=True)
@example(
    speeds=[1.0, 1.0, 1.0, 1.0], target=21, size=1
)  # all finish at the same time, so the surplus must be removed worker by worker
@given(speeds=SPEEDS, target=st.integers(1, 3000), size=st.integers(1, 64))
def test_target_is_met_with_small_excess_and_short_waits(speeds: list[float], target: int, size: int) -> None:
    workers = [
        WorkerProgress(peer, size, batch_seconds=speed, next_at=speed)
        for peer, speed in zip(PEERS, speeds, strict=False)
    ]
    allocation = allocate_batches(workers, target)
    total = sum(allocation.batches.values()) * size
    assert target <= total < target + size
    assert allocation.samples == total
    for worker in workers:
        if batches := allocation.batches[worker.peer]:
            finish = worker.finish_after(batches)
            assert finish <= allocation.finish + 1e-6
            # no worker could have processed two more batches before the slowest finishes
            assert allocation.finish - finish <= 2 * worker.batch_seconds + 1e-6


def test_four_times_slower_worker_gets_a_quarter() -> None:
    seconds = [1.0, 1.0, 4.0]
    allocation = allocate_batches(
        [WorkerProgress(p, 16, batch_seconds=s, next_at=s) for p, s in zip(PEERS, seconds, strict=False)], 1440
    )
    assert [allocation.batches[peer] for peer in PEERS[:3]] == [40, 40, 10]


def test_minimum_batches_are_always_allocated() -> None:
    workers = [
        WorkerProgress(PEERS[0], 10, done=100, batch_seconds=1.0, next_at=1.0),
        WorkerProgress(PEERS[1], 10, min_batches=1),
        WorkerProgress(PEERS[2], 10, batch_seconds=1000.0, next_at=1000.0, min_batches=1),
    ]
    assert allocate_batches(workers, 50).batches == {PEERS[0]: 0, PEERS[1]: 1, PEERS[2]: 1}


def test_finished_worker_gets_no_batches() -> None:
    workers = [
        WorkerProgress(PEERS[0], 10, done=40, batch_seconds=1.0, next_at=1.0, is_finished=True),
        WorkerProgress(PEERS[1], 10, done=10, batch_seconds=1.0, next_at=1.0),
    ]
    assert allocate_batches(workers, 100).batches == {PEERS[0]: 0, PEERS[1]: 5}


def test_second_measurement_replaces_the_warm_up() -> None:
    estimate = ThroughputEstimate()
    estimate.observe(10, 50.0)
    assert not estimate.known
    estimate.observe(10, 1.0)
    assert estimate.known
    assert estimate.seconds_per_sample == pytest.approx(0.1)
    for bad in (float("nan"), float("inf"), -1.0):
        estimate.observe(10, bad)
    estimate.observe(0, 1.0)
    assert estimate.seconds_per_sample == pytest.approx(0.1)
