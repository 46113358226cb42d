"""The listener and the upgrade of connections: limits on handshakes, streams before and ends during registration."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import pytest
import trio
from libp2p.network.connection.swarm_connection import SwarmConn
from support.gateways import LOOPBACK, open_gateway, open_node
from support.waiting import until

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.dial import listener
from hypha_net._libp2p.relay import client
from hypha_net.endpoint import Stream
from hypha_net.errors import NetError, UnreachableError


async def idle(address: str) -> trio.SocketStream:
    """Open a TCP connection and send nothing."""
    _, _, host, _, port, *_ = address.split("/")
    return await trio.open_tcp_stream(host, int(port))


async def test_silent_sockets_do_not_count_as_connections(authority: Any) -> None:
    async with (
        open_node(authority, "gateway", listen_addresses=(LOOPBACK,), max_connections=4) as gateway,
        open_node(authority, "leaf") as leaf,
        AsyncExitStack() as stack,
    ):
        for _ in range(8):
            await stack.enter_async_context(await idle(gateway.addresses[0]))
        await leaf.connect(gateway.addresses[0])


@pytest.mark.parametrize(
    ("host", "network"),
    [("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8:1:2:3::4", "2001:db8:1:2::/64")],
)
def test_handshakes_are_counted_per_ipv4_address_or_ipv6_network(host: str, network: str) -> None:
    assert listener.network_of(host) == network


@pytest.mark.parametrize("loopback", [LOOPBACK, "/ip6/::1/tcp/0"])
async def test_concurrent_handshakes_of_one_host_are_limited(
    authority: Any, monkeypatch: Any, caplog: Any, loopback: str
) -> None:
    monkeypatch.setattr(listener, "MAX_HANDSHAKES_PER_HOST", 2)
    hosts = list[str]()
    monkeypatch.setattr(listener, "network_of", lambda host: hosts.append(host) or host)
    async with (
        open_node(authority, "gateway", listen_addresses=(loopback,)) as gateway,
        open_node(authority, "leaf") as leaf,
        AsyncExitStack() as stack,
    ):
        sockets = [await stack.enter_async_context(await idle(gateway.addresses[0])) for _ in range(3)]
        assert await sockets[2].receive_some(1) == b""
        assert caplog.text.count("rejected: too many concurrent handshakes") == 1
        with pytest.raises(UnreachableError, match="it ended the connection before a handshake; is it full"):
            await leaf.connect(gateway.addresses[0])
        await sockets[0].aclose()

        async def is_connected() -> bool:
            with suppress(UnreachableError):
                await leaf.connect(gateway.addresses[0])
            return bool(leaf.connected_peers())

        await until(is_connected)
        assert set(hosts) == {loopback.split("/")[2]}


ASK = "/test/who/1"


@pytest.fixture
def late_registration(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Delay registration with the swarm until all streams of a connection wait for something, for listed nodes."""
    start = SwarmConn.start
    nodes = []

    async def start_late(self: SwarmConn) -> None:
        if any(self.swarm is node._swarm for node in nodes):
            await anyio.wait_all_tasks_blocked()
        await start(self)

    monkeypatch.setattr(SwarmConn, "start", start_late)
    return nodes


async def test_reservation_requested_before_registration_is_granted(
    authority: Any, late_registration: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(client, "RETRY_PAUSES", (60.0,))
    async with open_gateway(authority) as gateway:
        late_registration.append(gateway)
        leaf = EndpointSettings(gateway_addresses=(gateway.addresses[0],))
        async with open_endpoint(authority.identity("leaf"), leaf) as node:
            await until(lambda: bool(node.addresses), 15)


async def test_role_is_known_on_the_first_stream(authority: Any, late_registration: Any) -> None:
    async with (
        open_node(authority, "asked", "scheduler", listen_addresses=(LOOPBACK,), require_roles=True) as asked,
        open_node(authority, "asking", "worker") as asking,
    ):
        late_registration.append(asked)
        roles = []

        async def answer(stream: Stream) -> None:
            roles.append(asked._peers.role(stream.peer))

        asked.handle(ASK, answer)
        await asking.connect(asked.addresses[0])
        try:
            await (await asking.open_stream(asked.peer_id, [ASK])).aclose()
        except NetError as error:
            pytest.fail(f"refused, although workers may: {error}")
        await until(lambda: bool(roles))
        assert roles == ["worker"]


async def test_connection_that_ends_during_registration_is_not_kept(authority: Any) -> None:
    async with open_node(authority, "gateway", listen_addresses=(LOOPBACK,)) as gateway:
        swarm, add, added = gateway._swarm, gateway._swarm.add_conn, anyio.Event()

        async def add_what_has_ended(muxed: Any, direction: str) -> Any:
            connection = await add(muxed, direction)
            await connection.close()
            swarm.connections[muxed.peer_id] = [connection]  # as when the connection ends before it is listed
            added.set()
            return connection

        swarm.add_conn = add_what_has_ended
        async with open_node(authority, "leaf") as leaf:
            with suppress(UnreachableError):
                await leaf.connect(gateway.addresses[0])
            await added.wait()
            await until(lambda: not swarm.connections)
            swarm.add_conn = add
            await until(lambda: not leaf.connected_peers())
            await leaf.connect(gateway.addresses[0])
            await until(lambda: any(info.protocols for info in gateway.connected_peers().values()))


async def test_a_connection_that_arrives_while_the_node_ends_is_no_unexpected_error(
    authority: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tasks of the swarm end before its state says so; trio then takes no further ones."""
    async with (
        open_node(authority, "asked", listen_addresses=(LOOPBACK,)) as asked,
        open_node(authority, "asking") as asking,
    ):

        async def refuse(*_: Any, **__: Any) -> SwarmConn:
            raise RuntimeError("Nursery is closed to new arrivals")

        monkeypatch.setattr(asking._swarm, "add_conn", refuse)
        with pytest.raises(UnreachableError, match="shutting down"):
            await asking.connect(asked.addresses[0])
    assert "unexpected error" not in caplog.text
