"""The moment in which a connection comes about: what is asked in it, what ends in it, and who only seems to come."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import pytest
import trio
from libp2p.network.connection.swarm_connection import SwarmConn
from support.waiting import run, until

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.dial import upgrade
from hypha_net._libp2p.relay import client
from hypha_net.endpoint import Stream
from hypha_net.errors import NetError, UnreachableError

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ASK = "/test/who/1"


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has a node's swarm learn of its connections half a second after they carry streams."""
    start = SwarmConn.start
    nodes = []

    async def begin(self: SwarmConn) -> None:
        if any(self.swarm is node._swarm for node in nodes):
            await anyio.sleep(0.5)
        await start(self)

    monkeypatch.setattr(SwarmConn, "start", begin)
    return nodes


def test_a_place_that_is_asked_for_at_once_is_given(authority: Any, late: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(client, "RETRY_PAUSES", (60.0,))

    async def main() -> None:
        settings = EndpointSettings((LOOPBACK,), role="gateway")
        async with open_endpoint(authority.identity("gateway", "gateway"), settings) as gateway:
            late.append(gateway)
            leaf = EndpointSettings(gateway_addresses=(gateway.addresses[0],))
            async with open_endpoint(authority.identity("leaf"), leaf) as node:
                await until(lambda: bool(node.addresses), 15)

    run(main)


def test_a_role_is_known_from_the_first_stream_on(authority: Any, late: Any) -> None:
    async def main() -> None:
        settings = EndpointSettings((LOOPBACK,), require_roles=True)
        async with (
            open_endpoint(authority.identity("asked", "scheduler"), settings) as asked,
            open_endpoint(authority.identity("asking", "worker"), EndpointSettings()) as asking,
        ):
            late.append(asked)
            roles = []

            async def answer(stream: Stream) -> None:
                roles.append(asked._role_of(stream.peer))

            asked.handle(ASK, answer)
            await asking.connect(asked.addresses[0])
            try:
                await (await asking.open_stream(asked.peer_id, [ASK])).aclose()
            except NetError as error:
                pytest.fail(f"refused, although workers may: {error}")
            await until(lambda: bool(roles))
            assert roles == ["worker"]

    run(main)


def test_a_connection_that_breaks_off_while_it_is_registered_is_not_kept(authority: Any) -> None:
    async def main() -> None:
        async with open_endpoint(authority.identity("gateway"), EndpointSettings((LOOPBACK,))) as gateway:
            swarm, add, added = gateway._swarm, gateway._swarm.add_conn, anyio.Event()

            async def add_what_has_ended(muxed: Any, direction: str) -> Any:
                connection = await add(muxed, direction)
                await connection.close()
                swarm.connections[muxed.peer_id] = [connection]  # as it is where the end comes before the entry
                added.set()
                return connection

            swarm.add_conn = add_what_has_ended
            async with open_endpoint(authority.identity("leaf"), EndpointSettings()) as leaf:
                with suppress(UnreachableError):
                    await leaf.connect(gateway.addresses[0])
                await added.wait()
                await until(lambda: not swarm.connections)
                swarm.add_conn = add
                await until(lambda: not leaf.connected_peers())
                await leaf.connect(gateway.addresses[0])
                await until(lambda: any(info.protocols for info in gateway.connected_peers().values()))

    run(main)


async def idle(address: str) -> trio.SocketStream:
    """A TCP connection on which nothing is said."""
    _, _, host, _, port, *_ = address.split("/")
    return await trio.open_tcp_stream(host, int(port))


def test_sockets_that_say_nothing_take_no_place_from_nodes(authority: Any) -> None:
    async def main() -> None:
        settings = EndpointSettings((LOOPBACK,), max_connections=4)
        async with (
            open_endpoint(authority.identity("gateway"), settings) as gateway,
            open_endpoint(authority.identity("leaf"), EndpointSettings()) as leaf,
            AsyncExitStack() as stack,
        ):
            for _ in range(8):
                await stack.enter_async_context(await idle(gateway.addresses[0]))
            await anyio.sleep(0.2)
            await leaf.connect(gateway.addresses[0])

    run(main)


@pytest.mark.parametrize(
    ("host", "network"),
    [("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8:1:2:3::4", "2001:db8:1:2::/64")],
)
def test_strangers_are_counted_by_what_a_network_has(host: str, network: str) -> None:
    assert upgrade.network_of(host) == network


@pytest.mark.parametrize("loopback", [LOOPBACK, "/ip6/::1/tcp/0"])
def test_of_one_host_so_many_sockets_that_say_nothing_are_heard(
    authority: Any, monkeypatch: Any, caplog: Any, loopback: str
) -> None:
    monkeypatch.setattr(upgrade, "MAX_STRANGERS_OF_HOST", 2)
    hosts = list[str]()
    monkeypatch.setattr(upgrade, "network_of", lambda host: hosts.append(host) or host)

    async def main() -> None:
        async with (
            open_endpoint(authority.identity("gateway"), EndpointSettings((loopback,))) as gateway,
            open_endpoint(authority.identity("leaf"), EndpointSettings()) as leaf,
            AsyncExitStack() as stack,
        ):
            sockets = [await stack.enter_async_context(await idle(gateway.addresses[0])) for _ in range(3)]
            with anyio.fail_after(10):
                assert await sockets[2].receive_some(1) == b""
            assert caplog.text.count("not taken: too many are in their handshake") == 1
            with pytest.raises(UnreachableError, match="it ended the connection before a handshake; is it full"):
                await leaf.connect(gateway.addresses[0])
            await sockets[0].aclose()

            async def taken() -> bool:
                with suppress(UnreachableError):
                    await leaf.connect(gateway.addresses[0])
                return bool(leaf.connected_peers())

            await until(taken)
            assert set(hosts) == {loopback.split("/")[2]}

    run(main)
