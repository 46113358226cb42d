"""Draining workers of a real network: a training job goes on, and the processes end as their owner wants."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.local_network import Job, LocalNetwork, processes_of, trainer

from hypha_local.processes import script

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(300)]

DRAIN_TIMEOUT = 100
ROUNDS = 8
SLOW = "slow-trainer"
"""Executor whose job lasts longer than a command takes to start on a busy machine."""
MANY = 2000
"""More rounds than any test waits for."""


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNetwork]:
    root: Path = tmp_path_factory.mktemp("network") / "run"
    network = LocalNetwork(root, workers=3)
    for name in network.trainers:
        network.set_drain_timeout(name, DRAIN_TIMEOUT)
        network.extend(name, trainer(SLOW, 0.2))
    try:
        network.up()
        yield network
    finally:
        for name in network.trainers:
            network.kill(name)  # its drain would wait for a job that a failed test has left
        network.down()
    assert processes_of(root) == []


@pytest.fixture(autouse=True)
def _all_workers_run(network: LocalNetwork) -> Iterator[None]:
    network.revive()
    yield
    for name in network.trainers:
        assert "Traceback" not in network.log(name), network.log(name)


def result(job: Job) -> dict[str, object]:
    [path] = job.runs.glob("*/result.json")
    found: dict[str, object] = json.loads(path.read_text())
    return found


def check_left(network: LocalNetwork, job: Job, name: str) -> None:
    """Check that a worker has left after a round in which its update counted, and that the job goes on to its end."""
    assert job.wait(120) == 0, job.log
    peer = network.peer_id(name)
    [left] = job.events("worker_left")
    rounds = {event["round"]: event for event in job.events("round")}
    assert left["worker"] == peer
    assert rounds[left["round"]]["counts"][peer] > 0
    assert len(rounds[left["round"]]["counts"]) == 3
    assert all(peer not in rounds[number]["counts"] for number in rounds if number > left["round"])
    assert max(rounds) == result(job)["rounds"] == ROUNDS
    assert [event["peer"] for event in job.events("lease_draining")] == [peer]
    assert job.events("worker_lost") == []


@pytest.mark.gate
def test_worker_that_gets_sigterm_leaves_the_job_after_its_round(network: LocalNetwork) -> None:
    job = network.job(rounds=ROUNDS, min_workers=2)
    job.wait_for_round(2)
    process = network.processes.child("worker-1").process
    process.send_signal(signal.SIGTERM)
    assert process.wait(DRAIN_TIMEOUT) == 0
    check_left(network, job, "worker-1")
    assert "executor exited with status 0" in network.log("worker-1")


def test_owner_drains_a_worker_by_command(network: LocalNetwork) -> None:
    job = network.job(rounds=ROUNDS, kind=SLOW, min_workers=2)
    job.wait_for_round(2)
    command = [script("hypha-worker"), "drain", "--config", str(network.configuration("worker-2"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRAIN_TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    begun, over = map(json.loads, done.stdout.splitlines())
    assert [entry["executor"] for entry in begun["jobs"]] == [f"train/{SLOW}"]
    assert over == {"drained": True, "cancelled": []}
    assert network.processes.child("worker-2").process.wait(60) == 0
    check_left(network, job, "worker-2")
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert again.returncode == 3


def test_worker_that_the_job_needs_stays_until_a_second_sigterm(network: LocalNetwork) -> None:
    job = network.job(rounds=MANY, resources="allocation_timeout = 6\n")
    job.wait_for_round(2)
    process = network.processes.child("worker-3").process
    process.send_signal(signal.SIGTERM)
    job.wait_for_round(len(job.events("round")) + 2)
    assert len(job.events("lease_draining")) == 1
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert job.wait(60) == 1
    assert "2 of at least 3 remain" in job.events("paused")[0]["reason"]
