"""The health of a node: it needs its program to be ready, and one of its gateways."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
import trio.testing

from hypha_net import rpc
from hypha_net.node.health import GATEWAY_WARNING, Readiness, gateway_outage, serve_health, watch_gateways
from hypha_net.testing import MemoryNetwork
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest

FIRST, SECOND = "/ip4/192.0.2.1/tcp/4001", "/ip4/192.0.2.2/tcp/4001"
OUTAGE = f"no gateway is connected: {FIRST}, {SECOND}"


def run(case: Any) -> None:
    """Run a test's function with a node and another peer, on a clock that does not wait."""

    async def main() -> None:
        network = MemoryNetwork()
        async with network.endpoint("node") as node, network.endpoint("other") as other:
            await other.connect(node.addresses[0])
            await case(node, other)

    clock = trio.testing.MockClock(autojump_threshold=0)
    anyio.run(main, backend="trio", backend_options={"clock": clock})


def test_a_node_without_a_gateway_is_not_healthy_and_warns_every_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def case(node: Any, other: Any) -> None:
        async def ask() -> Health:
            await anyio.sleep(1.0)
            return await rpc.call(other, node.peer_id, HEALTH_CHECK, HealthRequest())

        node.gateway_peers = {FIRST: None, SECOND: None}
        readiness = Readiness(outage=gateway_outage(node))
        serve_health(node, readiness, role="worker", version="1")
        readiness.ready()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch_gateways, node, readiness)
            assert (await ask()).reason == OUTAGE
            await anyio.sleep(2.5 * GATEWAY_WARNING)
            node.gateway_peers = {FIRST: None, SECOND: other.peer_id}
            assert (await ask()).healthy
            node.gateway_peers = {FIRST: None, SECOND: None}
            answer = await ask()
            assert (answer.healthy, answer.reason) == (False, OUTAGE)
            readiness.waiting("draining")
            node.gateway_peers = {FIRST: other.peer_id, SECOND: None}
            assert (await ask()).reason == "draining"
            tasks.cancel_scope.cancel()

    with caplog.at_level(logging.INFO, "hypha_net.node.health"):
        run(case)
    warning = f"{OUTAGE}; check gateway_addresses, and that a gateway runs there"
    assert [record.getMessage() for record in caplog.records] == [
        warning,
        warning,
        "ready",
        f"not ready: {OUTAGE}",
        "not ready: draining",
    ]


def test_a_node_without_configured_gateways_is_healthy_when_its_program_is_ready() -> None:
    async def case(node: Any, _other: Any) -> None:
        readiness = Readiness(outage=gateway_outage(node))
        assert readiness.reason == "starting"
        readiness.ready()
        await watch_gateways(node, readiness)
        assert readiness.is_ready

    run(case)
