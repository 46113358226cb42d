"""A training worker of a real network gets SIGTERM: it hands its round in and leaves, and the job goes on."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.local_network import local_network

DRAIN_TIMEOUT = 100
ROUNDS = 8


@pytest.mark.gate
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_worker_that_gets_sigterm_leaves_the_job_after_its_round(tmp_path_factory: pytest.TempPathFactory) -> None:
    root: Path = tmp_path_factory.mktemp("network") / "run"
    with local_network(root, workers=3, drain_timeout=DRAIN_TIMEOUT) as network:
        job = network.job(rounds=ROUNDS, min_workers=2)
        job.wait_for_round(2)
        process, peer = network.processes.child("worker-1").process, network.peer_id("worker-1")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DRAIN_TIMEOUT) == 0
        assert job.wait(120) == 0, job.log
        [left] = job.events("worker_left")
        rounds = {event["round"]: event for event in job.events("round")}
        assert left["worker"] == peer
        assert rounds[left["round"]]["counts"][peer] > 0, "its update of the round counts"
        assert len(rounds[left["round"]]["counts"]) == 3
        assert all(peer not in rounds[number]["counts"] for number in rounds if number > left["round"])
        assert max(rounds) == json.loads((job.directory / "result.json").read_text())["rounds"] == ROUNDS
        assert [event["peer"] for event in job.events("lease_draining")] == [peer]
        assert job.events("worker_lost") == []
        assert "executor exited with status 0" in network.log("worker-1")
        for name in network.trainers:
            assert "Traceback" not in network.log(name), network.log(name)
