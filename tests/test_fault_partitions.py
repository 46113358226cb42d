"""A training job across two networks behind NAT: one of them is cut off for 30 s, and the gateway restarts.

All traffic between the two goes over the gateway's relay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.fault_table import FaultRow
from support.homed_network import HomedNetwork, homed_network
from support.local_network import Job
from support.member_faults import CONTINUED, JOINED, LOST, PAUSED, first_round_with, wait_until_complete
from support.netns import needs_namespaces
from support.numpy_executor import executor_toml, write_model
from support.proof import check_whole_epochs, prove

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400), needs_namespaces]

WORKERS = 3
HOMES = {"worker-3": "b", "job-2": "b"}
"""Programs in home b; all others run in a, the scheduler of the first job too."""
CUT = 30.0
"""Seconds for which nothing goes into home b or out of it."""
DELAY = 0.06


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HomedNetwork]:
    with homed_network(tmp_path_factory.mktemp("network") / "run", WORKERS, HOMES) as network:
        for name in network.trainers:
            network.extend(name, executor_toml("numpy", DELAY))
        network.up()
        write_model(network.folders.root / "small-model", 64)
        yield network


@pytest.fixture(autouse=True)
def _no_executor_is_left(network: HomedNetwork) -> Iterator[None]:
    yield
    network.stop_jobs()
    network.check_quiet()


def start(network: HomedNetwork, rounds: int) -> Job:
    """Start a job for three workers that goes on with two."""
    return network.job(rounds=rounds, kind="numpy", model='path = "../small-model"', min_workers=WORKERS - 1)


def cut_off(network: HomedNetwork) -> float:
    """Cut home b off for 30 s; return when it is connected again."""
    network.spaces.cut("b")
    time.sleep(CUT)
    network.spaces.mend("b")
    return time.time()


def test_a_worker_behind_a_partition_is_fenced_and_rejoins(network: HomedNetwork, fault_row: FaultRow) -> None:
    """The gateway restarts before it."""
    rounds = 32
    job = start(network, rounds)
    job.wait_for_round(2)
    restarted = time.time()
    network.kill("gateway")
    network.start("gateway")
    job.wait_for_round(len(job.events("round")) + 4)
    fault_row("the gateway restarts", f"four rounds later after {time.time() - restarted:.1f} s")
    wait_until_complete(job, WORKERS)
    peer, number, began = network.peer_id("worker-3"), len(job.records("round")), time.time()
    mended = cut_off(network)
    meanwhile = len(job.records("round")) - number
    assert meanwhile >= 3, "the majority did not go on"
    joined = job.wait_for_event(JOINED, after=began, worker=peer)
    job.wait_for(lambda: first_round_with(job, peer, joined["round"] - 1) is not None, "a round of the worker")
    fault_row(
        f"a worker is cut off for {CUT:.0f} s",
        f"{meanwhile} rounds without it; joins again {joined['time'] - mended:.1f} s after the end",
    )
    prove(network, job, rounds)
    check_whole_epochs(job, rounds // 2)


def test_a_scheduler_behind_a_partition_pauses_and_goes_on(network: HomedNetwork, fault_row: FaultRow) -> None:
    """It is in home b with one worker: data, parameter server and the other workers are in a."""
    rounds = 12
    job = start(network, rounds)
    job.wait_for_round(1)
    wait_until_complete(job, WORKERS)
    began = time.time()
    mended = cut_off(network)
    paused = job.wait_for_event(PAUSED, after=began)
    continued = job.wait_for_event(CONTINUED, after=paused["time"])
    fault_row(
        f"the scheduler and one worker are cut off for {CUT:.0f} s",
        f"paused after {paused['time'] - began:.1f} s, trains {continued['time'] - mended:.1f} s after the end",
    )
    assert job.events(LOST)
    prove(network, job, rounds)
    check_whole_epochs(job, rounds // 2)
