"""A data node is killed during a job, or a slice changes on its disk: the job continues with what it can get."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from support.local_network import LocalNetwork, processes_of
from support.waiting import wait_until

from hypha_local.demo_tasks import DIGITS

pytestmark = [pytest.mark.nightly, pytest.mark.processes, pytest.mark.timeout(400)]


def given(network: LocalNetwork, name: str) -> int:
    """Return the number of slices that a data node has served."""
    return network.log(name).count("INFO hypha_data.slice_resolver: slice ")


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalNetwork]:
    """A network with one data node; `second_data_node` adds another for the tests after it."""
    network = LocalNetwork(tmp_path_factory.mktemp("network") / "run", 2, twins={"data-2": "data"})
    second = network.nodes.pop("data-2")
    try:
        network.up()
        network.nodes["data-2"] = second
        yield network
    finally:
        network.down()
    assert processes_of(network.folders.root) == []


@pytest.fixture
def second_data_node(network: LocalNetwork) -> str:
    """Start another data node with the same dataset; return its name once it is healthy."""
    network.start("data-2")
    network.wait_healthy("data-2")
    return "data-2"


def test_a_job_finishes_without_a_slice_that_changed_on_the_disk(network: LocalNetwork) -> None:
    path = network.folders.data / DIGITS.name / "slice-00002.safetensors"
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))  # of the same size
    try:
        job = network.job(rounds=6)
        assert job.wait(60) == 0, job.log
    finally:
        path.write_bytes(before)
    [result] = [json.loads(found.read_text()) for found in job.runs.glob("*/result.json")]
    [unused] = result["slices_set_aside"]
    assert unused["slice"] == 2
    assert list(unused["providers"]) == [network.peer_id("data")]
    [event] = job.events("slice_set_aside")
    assert event["left"] == 4 * len(network.trainers) - 1
    assert "without slice 2 (slice-00002.safetensors) at data node" in job.log
    assert not job.events("worker_lost")
    assert "Traceback" not in "".join([job.log, *map(network.log, [*network.trainers, "data"])])


def test_a_job_continues_when_its_only_data_node_restarts(network: LocalNetwork) -> None:
    job = network.job(rounds=20)
    job.wait_for_round(5)
    network.kill("data")
    time.sleep(10)
    network.start("data")
    network.wait_healthy("data")
    assert job.wait(240) == 0, job.log
    assert "Traceback" not in job.log
    assert not job.events("worker_lost")
    assert "retrying in 2 s" in "".join(map(network.log, network.trainers))


def test_a_job_continues_without_loss_while_another_data_node_serves_the_dataset(
    network: LocalNetwork, second_data_node: str
) -> None:
    nodes = ["data", second_data_node]
    already = {name: given(network, name) for name in nodes}
    job = network.job(rounds=40)
    wait_until(lambda: all(given(network, name) > already[name] for name in nodes), 60, "slices from both data nodes")
    network.kill("data")
    before = given(network, second_data_node)
    [closed] = [len(job.events("round"))]
    job.wait_for_round(closed + 10, timeout=120)
    assert given(network, second_data_node) > before
    assert job.wait(240) == 0, job.log
    assert "Traceback" not in job.log
    assert not job.events("worker_lost")
