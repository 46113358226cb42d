"""Batch allocation by measured throughput: workers finish together and the target is met with little excess."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.diloco.batch_allocation import (
    MeasuredBatch,
    ThroughputEstimate,
    WorkerProgress,
    allocate_batches,
)

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


def test_single_stalls_change_the_estimate_little() -> None:
    estimate = ThroughputEstimate()
    for seconds in (9.0, 1.0, 1.1, 0.9, 30.0, 1.0, 25.0, 1.0):
        estimate.observe(10, seconds)
    assert estimate.seconds_per_sample == pytest.approx(0.1, rel=0.05)


def test_worker_that_has_become_five_times_slower_is_noticed_after_three_batches() -> None:
    estimate = ThroughputEstimate()
    for _ in range(20):
        estimate.observe(10, 1.0)
    for _ in range(3):
        estimate.observe(10, 5.0)
    assert estimate.seconds_per_sample == pytest.approx(0.5)
    for _ in range(3):
        estimate.observe(10, 1.0)
    assert estimate.seconds_per_sample == pytest.approx(0.1)


def test_of_short_batches_those_of_a_second_count() -> None:
    estimate = ThroughputEstimate()
    for number in range(600):  # a machine that does other things for 60 ms at a time
        estimate.observe(10, 0.0016 if number // 30 % 2 else 0.0024)
        if number > 500:
            assert estimate.seconds_per_sample == pytest.approx(0.0002, rel=0.05)


def test_batches_reported_at_one_moment_share_its_interval() -> None:
    apart, together = ThroughputEstimate(), ThroughputEstimate()
    for _ in range(8):
        apart.observe_report([MeasuredBatch(10)], 1.0, begins_round=False)
        together.observe_report([MeasuredBatch(10)], 2.0, begins_round=False)
        together.observe_report([MeasuredBatch(10)], 0.0, begins_round=False)
    assert together.seconds_per_sample == pytest.approx(apart.seconds_per_sample)


def test_stated_durations_count_with_what_passes_between_the_reports() -> None:
    estimate = ThroughputEstimate()
    for _ in range(8):  # two batches of 1 s, a wait for data of 0.5 s, and 0.5 s that the executor does not state
        estimate.observe_report([MeasuredBatch(10, 1.0), MeasuredBatch(10, 1.0, 0.5)], 3.0, begins_round=False)
    assert estimate.seconds_per_sample == pytest.approx(0.15, rel=0.02)


@pytest.mark.parametrize("stated", [0.0, 1e-12, float("nan"), -1.0])
def test_executor_that_understates_its_durations_gains_nothing(stated: float) -> None:
    estimate = ThroughputEstimate()
    for _ in range(8):
        estimate.observe_report([MeasuredBatch(10, stated).bounded(10, 100.0)], 1.0, begins_round=False)
    assert estimate.seconds_per_sample == pytest.approx(0.1)


def test_updates_arrive_together_however_long_they_take() -> None:
    deliveries = [0.0, 4.0, 9.5]
    workers = [
        WorkerProgress(peer, 16, batch_seconds=1.0, next_at=1.0, delivery_seconds=seconds)
        for peer, seconds in zip(PEERS, deliveries, strict=False)
    ]
    allocation = allocate_batches(workers, 16 * 100)
    arrivals = [worker.finish_after(allocation.batches[worker.peer]) for worker in workers]
    assert max(arrivals) == allocation.finish
    assert max(arrivals) - min(arrivals) <= 1.0
    assert sum(allocation.batches.values()) == 100


WORKERS = st.builds(
    WorkerProgress,
    peer=st.just(PEERS[0]),
    batch_size=st.just(16),
    done=st.integers(0, 20).map(lambda batches: 16 * batches),
    batch_seconds=st.none() | st.floats(0.01, 20.0),
    next_at=st.floats(-5.0, 30.0),
    min_batches=st.integers(0, 1),
    is_finished=st.booleans(),
    delivery_seconds=st.floats(0.0, 30.0),
)


@settings(derandomize=True)
@given(workers=st.lists(WORKERS, min_size=1, max_size=6), target=st.integers(1, 2000))
def test_no_allocation_ends_earlier(workers: list[WorkerProgress], target: int) -> None:
    for worker, peer in zip(workers, PEERS, strict=False):
        worker.peer = peer
    counts = {worker.peer: 0 if worker.is_finished else worker.min_batches for worker in workers}
    able = [worker for worker in workers if worker.batch_seconds is not None and not worker.is_finished]
    while able and sum(worker.done + 16 * counts[worker.peer] for worker in workers) < target:
        counts[min(able, key=lambda worker: worker.finish_after(counts[worker.peer] + 1)).peer] += 1
    ends = [worker.finish_after(counts[worker.peer]) for worker in workers if counts[worker.peer]]

    allocation = allocate_batches(workers, target)
    assert allocation.finish == pytest.approx(max(ends, default=0.0), abs=1e-6)
    assert sum(allocation.batches.values()) == sum(counts.values())
    assert allocation.samples == sum(worker.done + 16 * counts[worker.peer] for worker in workers)
