"""A worker four times slower than another gets a quarter of its batches, and rounds do not wait long for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.local_network import local_network

from hypha_local.network_layout import process_executor

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(400)]

ROUNDS = 6
# a batch alone takes about 0.02 s; the delay dominates, so that sharing two cores does not decide who is slow
FAST, SLOW = 0.08, 0.38


def test_a_slowed_executor_gets_its_share_of_the_batches(tmp_path: Path) -> None:
    fast, slow = (
        process_executor("train", "uneven", sys.executable, "hypha.accelerate_executor.training", delay)
        for delay in (FAST, SLOW)
    )
    with local_network(tmp_path / "run", worker_1=fast, worker_2=slow) as network:
        job = network.job(rounds=ROUNDS, kind="uneven")
        assert job.wait(300) == 0, job.log
        fast, slow = (network.peer_id(name) for name in network.trainers)
    rounds = job.events("round")
    assert [event["round"] for event in rounds] == list(range(1, ROUNDS + 1))
    measured = rounds[1:]  # throughput is unknown before the first round, and executors start at different times
    for event in measured:
        print(event["counts"], event["waits"], event["seconds"])
    batches = {peer: sum(event["counts"][peer] for event in measured) for peer in (fast, slow)}
    assert 0.15 <= batches[slow] / batches[fast] <= 0.40
    for event in measured:
        assert max(event["waits"].values()) < 0.35 * event["seconds"]
    waited = sum(max(event["waits"].values()) for event in measured)
    assert waited < 0.25 * sum(event["seconds"] for event in measured)
