"""Executors with torch die and stand still, on real processes: the job goes on, and is computed again exactly."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fault_table import FaultRow
from support.local_network import LocalNetwork, local_network
from support.member_faults import JOINED, RESTARTED, name_of
from support.proof import check_used_once

from hypha_local.network_layout import process_executor

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(400)]

WORKERS = 3
ROUNDS = 16
SLOW = process_executor("train", "slow", sys.executable, "hypha.accelerate_executor.training", 0.05)
"""Takes a second and more for a round."""


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNetwork]:
    root: Path = tmp_path_factory.mktemp("network") / "run"
    with local_network(root, WORKERS, **{f"worker_{number}": SLOW for number in range(1, WORKERS + 1)}) as running:
        yield running


def test_executors_that_die_or_stand_still_begin_anew_and_the_job_is_computed_again(
    network: LocalNetwork, fault_row: FaultRow
) -> None:
    job = network.job(rounds=ROUNDS, kind="slow", workers=WORKERS, min_workers=1)
    job.wait_for_round(2, 120)
    killed, stopped = sorted(job.events("round")[-1]["counts"])[:2]
    began = time.time()
    network.commands(name_of(network, killed))[0].send_signal(signal.SIGKILL)
    restarted = job.wait_for_event(RESTARTED, after=began, worker=killed)
    assert restarted["micro_batch"] is not None  # the kernel ends processes so when memory is exhausted
    executor = network.commands(name_of(network, stopped))[0]
    executor.suspend()
    try:
        job.wait_for_event("worker_late", after=began, worker=stopped)
    finally:
        executor.resume()
    job.wait_for_event(JOINED, after=began, worker=stopped)
    joined = job.wait_for_event(JOINED, after=began, worker=killed)
    fault_row("an executor with torch is killed", f"trains again after {joined['time'] - began:.1f} s")
    assert job.wait(180) == 0, job.log
    assert "Traceback" not in job.log
    check_used_once(job)
    stated = {
        (member["peer"], record["round"]): member["contribution"]
        for record in job.records("round")
        for member in record["members"]
    }
    begun = {peer: [number for (name, number), found in stated.items() if (name, found["optimizer"]) == (peer, "reset")]
             for peer in (killed, stopped)}  # fmt: skip
    assert begun[killed][0] == begun[stopped][0] == 1
    assert len(begun[killed]) == len(begun[stopped]) == 2
    assert stated[killed, begun[killed][1]]["micro_batch"] == restarted["micro_batch"]
    for arguments in (["audit"], ["replay", "--data", str(network.folders.data / "digits"), "--threads", "1"]):
        done = network.scheduler_command(job, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"proven: {ROUNDS} rounds equal to the bit"
