"""A data node is killed during a job: the job continues with another provider, or waits for the node to return."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.local_network import Job, LocalNetwork, processes_of
from support.waiting import wait_until

from hypha_local import network_layout
from hypha_local.network_layout import NodePlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROUNDS = 60


def given(network: LocalNetwork, name: str) -> int:
    """Return the number of slices that a data node has served."""
    return network.log(name).count("INFO hypha_data.slice_resolver: slice ")


def test_a_job_continues_without_loss_while_another_data_node_serves_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = network_layout.plan_nodes

    def with_two(workers: int) -> list[NodePlan]:
        nodes = planned(workers)
        [data] = [node for node in nodes if node.name == "data"]
        return [*nodes, NodePlan("data-2", data.program, data.role, network_layout.free_ports(1)[0])]

    monkeypatch.setattr("support.local_network.plan_nodes", with_two)
    root = tmp_path / "run"
    network = LocalNetwork(root, 2)
    try:
        network.up()
        job = network.job(rounds=ROUNDS)
        train_past_the_end_of_a_data_node(network, job)
    finally:
        network.down()
    assert processes_of(root) == []


def train_past_the_end_of_a_data_node(network: LocalNetwork, job: Job) -> None:
    nodes = ["data", "data-2"]
    wait_until(lambda: all(given(network, name) for name in nodes), 60, "slices from both data nodes")
    network.kill("data")
    before = given(network, "data-2")
    [closed] = [len(job.events("round"))]
    job.wait_for_round(closed + 10, timeout=120)
    assert given(network, "data-2") > before
    assert job.wait(240) == 0, job.log
    assert "Traceback" not in job.log
    assert not job.events("worker_lost")


def test_a_job_continues_when_its_only_data_node_restarts(tmp_path: Path) -> None:
    root = tmp_path / "run"
    network = LocalNetwork(root, 2)
    try:
        network.up()
        job = network.job(rounds=ROUNDS)
        job.wait_for_round(5)
        network.kill("data")
        time.sleep(10)
        network.revive()
        assert job.wait(240) == 0, job.log
        assert "Traceback" not in job.log
        assert not job.events("worker_lost")
        assert "again in 2 s" in "".join(map(network.log, network.trainers))
    finally:
        network.down()
    assert processes_of(root) == []
