"""The start of a worker: it is ready when requests can reach it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import anyio
import pytest

from hypha_net import pubsub
from hypha_net.node.lifecycle import Node
from hypha_net.testing import MemoryNetwork
from hypha_proto.offers import WORKER_REQUESTS
from hypha_worker.service import serve


async def test_a_worker_is_ready_when_a_peer_is_on_its_topic(tmp_path: Path, make_config: Any) -> None:
    network = MemoryNetwork()
    async with (
        network.endpoint("worker") as endpoint,
        network.endpoint("gateway") as gateway,
        anyio.create_task_group() as tasks,
    ):
        node = Node(endpoint, tasks)
        tasks.start_soon(serve, make_config(tmp_path), node)
        while "hypha/worker" not in (node.readiness.reason or ""):
            await anyio.sleep(0.02)
        assert not node.readiness.is_ready
        await gateway.connect(endpoint.addresses[0])
        async with pubsub.subscribe(gateway, WORKER_REQUESTS):
            while not node.readiness.is_ready:
                await anyio.sleep(0.02)
        tasks.cancel_scope.cancel()


async def test_a_worker_whose_topic_has_peers_logs_no_waiting(
    tmp_path: Path, make_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hypha_net.node.health"):
        network = MemoryNetwork()
        async with (
            network.endpoint("worker") as endpoint,
            network.endpoint("gateway") as gateway,
            pubsub.subscribe(gateway, WORKER_REQUESTS),
            anyio.create_task_group() as tasks,
        ):
            await gateway.connect(endpoint.addresses[0])
            node = Node(endpoint, tasks)
            tasks.start_soon(serve, make_config(tmp_path), node)
            while not node.readiness.is_ready:
                await anyio.sleep(0.02)
            tasks.cancel_scope.cancel()
    assert [record.getMessage() for record in caplog.records if "ready" in record.getMessage()] == ["ready"]


@pytest.mark.parametrize(("default", "status"), [(1e-9 * 5, 507), (1e-3, 200)])
async def test_the_default_of_storage_bounds_a_job_where_the_machine_lists_none(
    default: float, status: int, in_lab: Any, serve_slices: Any
) -> None:
    async with in_lab(resources={"cpu": 2.0, "memory": 4.0, "default": {"storage": default}}) as lab:
        await serve_slices(lab, 1)
        await lab.start(
            f"""
answer = post("/resources/fetch", {{"resource": config["data"], "path": "slices"}})
sys.exit(0 if answer[0] == {status} else str(answer))
"""
        )
        end = await lab.scheduler.ended()
        assert end.outcome == "finished", end
