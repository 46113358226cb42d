"""`connect_peer` and `round_trip_time` over libp2p: relayed and replaced connections, peers that answer no ping."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import trio.testing
from support.waiting import until
from support.wire_peer import dial, speak

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p import endpoint
from hypha_net._libp2p.endpoint import ROUND_TRIP_TIMEOUT, Libp2pEndpoint

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@asynccontextmanager
async def opened_leaf(authority: Any) -> AsyncIterator[Libp2pEndpoint]:
    settings = EndpointSettings(listen_addresses=(LOOPBACK,))
    async with open_endpoint(authority.identity("leaf", "worker"), settings) as leaf:
        yield leaf


def test_a_peer_that_answers_no_ping_counts_as_connected_after_a_timeout_and_then_at_once(authority: Any) -> None:
    clock = trio.testing.MockClock(rate=1)

    async def main() -> None:
        identity = authority.identity("silent", "scheduler")
        async with opened_leaf(authority) as leaf, speak(await dial(leaf.addresses[0]), identity, answers_pings=False):
            peer = identity.peer_id
            await until(lambda: peer in leaf.connected_peers())
            clock.rate = 0  # from here on a wait ends with an event or a jump
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leaf.connect_peer, peer)
                await anyio.wait_all_tasks_blocked()
                clock.jump(ROUND_TRIP_TIMEOUT)
            await leaf.connect_peer(peer)
            assert leaf.round_trip_time(peer) is None

    trio.run(main, clock=clock)


async def test_the_round_trip_of_a_connection_that_replaces_another_is_awaited(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "ROUND_TRIP_TIMEOUT", 3600.0)
    identity = authority.identity("peer", "scheduler")
    peer = identity.peer_id
    async with opened_leaf(authority) as leaf, anyio.create_task_group() as tasks:

        async def connect() -> None:
            await leaf.connect_peer(peer, timeout=3600)
            assert leaf.round_trip_time(peer) is not None
            tasks.cancel_scope.cancel()

        async with speak(await dial(leaf.addresses[0]), identity, answers_pings=False) as first:
            await until(lambda: peer in leaf.connected_peers())
            tasks.start_soon(connect)
            await anyio.wait_all_tasks_blocked()
            async with speak(await dial(leaf.addresses[0]), identity):
                await until(lambda: len(leaf._dialer.connections(peer)) == 2)
                await first.drop()
                await anyio.sleep_forever()


async def test_the_round_trip_is_known_while_a_new_connection_is_not_measured_yet(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "ROUND_TRIP_TIMEOUT", 3600.0)
    identity = authority.identity("peer", "scheduler")
    peer = identity.peer_id
    async with opened_leaf(authority) as leaf, speak(await dial(leaf.addresses[0]), identity):
        await until(lambda: leaf.round_trip_time(peer) is not None)
        async with speak(await dial(leaf.addresses[0]), identity, answers_pings=False):
            await until(lambda: len(leaf._dialer.connections(peer)) == 2)
            assert leaf.round_trip_time(peer) is not None
            await leaf.connect_peer(peer, timeout=3600)
        await until(lambda: len(leaf._dialer.connections(peer)) == 1)
        assert leaf.round_trip_time(peer) is not None


async def test_the_round_trip_of_a_relayed_connection_is_measured_end_to_end(authority: Any) -> None:
    settings = EndpointSettings(listen_addresses=(LOOPBACK,), role="gateway")
    async with open_endpoint(authority.identity("gateway", "gateway"), settings) as gateway:
        settings = EndpointSettings(gateway_addresses=(gateway.addresses[0],))  # reachable by the relay only
        async with (
            open_endpoint(authority.identity("one", "worker"), settings) as one,
            open_endpoint(authority.identity("two", "worker"), settings) as two,
        ):
            await until(lambda: one.addresses and two.addresses)
            await one.connect_peer(two.peer_id)
            assert not one.is_direct(two.peer_id)
            assert one.round_trip_time(two.peer_id) is not None
            await until(lambda: two.round_trip_time(one.peer_id) is not None)
