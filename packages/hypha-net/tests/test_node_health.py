"""The health of a node: it needs its program to be ready, and one of its gateways."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from hypha_net import rpc
from hypha_net.node.health import (
    CALL_INTERVAL,
    GATEWAY_WARNING,
    Readiness,
    Twins,
    call_gateways,
    gateway_outage,
    serve_health,
    watch_gateways,
)
from hypha_net.testing import MemoryNetwork
from hypha_proto.health import HEALTH_CHECK, Caller, Health, HealthRequest
from hypha_proto.ids import PeerId

pytestmark = pytest.mark.virtual_clock

FIRST, SECOND = "/ip4/192.0.2.1/tcp/4001", "/ip4/192.0.2.2/tcp/4001"
OUTAGE = f"0 of 2 gateways: {FIRST}: connection refused; {SECOND}: not connected yet"


@asynccontextmanager
async def open_nodes() -> AsyncIterator[tuple[Any, Any]]:
    """Open a node and another peer."""
    network = MemoryNetwork()
    async with network.endpoint("node") as node, network.endpoint("other") as other:
        await other.connect(node.addresses[0])
        yield node, other


async def test_a_node_without_a_gateway_is_not_healthy_and_warns_every_minute(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hypha_net.node.health"):
        async with open_nodes() as (node, other):

            async def ask() -> Health:
                await anyio.sleep(1.0)
                return await rpc.call(other, node.peer_id, HEALTH_CHECK, HealthRequest())

            node.gateway_peers, node.gateway_errors = {FIRST: None, SECOND: None}, {FIRST: "connection refused"}
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
    warning = f"{OUTAGE}; check gateway_addresses, and that a gateway runs there"
    assert [record.getMessage() for record in caplog.records] == [
        warning,
        warning,
        "ready",
        f"not ready: {OUTAGE}",
        "not ready: draining",
    ]


async def test_a_node_without_configured_gateways_is_healthy_when_its_program_is_ready() -> None:
    async with open_nodes() as (node, _other):
        readiness = Readiness(outage=gateway_outage(node))
        assert readiness.reason == "starting"
        readiness.ready()
        await watch_gateways(node, readiness)
        assert readiness.is_ready


def test_of_two_nodes_with_one_certificate_the_later_is_told_while_both_live(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    twins = Twins(lambda: now)
    peer = PeerId(bytes.fromhex("002408011220") + bytes(32))

    def call(process: int, age: int, at: str) -> str | None:
        return twins.note(peer, Caller(process=uuid.UUID(int=process), age_ms=age * 1000, address=at))

    assert call(1, 90, "/old") is None
    now += 5
    assert call(2, 1, "/new") is None  # it may be the first, started again
    now += 5
    assert not caplog.records
    assert call(1, 100, "/old") is None
    assert call(2, 6, "/new") == "/old"
    [record] = caplog.records
    assert "one at /old, and since later one at /new" in record.getMessage()
    now += 4 * CALL_INTERVAL
    assert call(2, 90, "/new") is None


async def test_a_node_whose_certificate_another_uses_is_not_healthy() -> None:
    async with open_nodes() as (node, other):
        node.gateway_peers = {FIRST: other.peer_id}
        serve_health(other, Readiness(), role="gateway", version="1")
        first, second = Readiness(), Readiness()
        for each in (first, second):
            each.ready()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call_gateways, node, first)
            await anyio.sleep(1.0)
            async with anyio.create_task_group() as later:
                later.start_soon(call_gateways, node, second)
                await anyio.sleep(3 * CALL_INTERVAL)
                assert first.is_ready
                assert second.reason is not None
                assert second.reason.startswith(f"another node, at {node.addresses[0]}, uses the same certificate")
                tasks.cancel_scope.cancel()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call_gateways, node, second)
            await anyio.sleep(6 * CALL_INTERVAL)
            assert second.is_ready
            tasks.cancel_scope.cancel()
