"""The listener: sockets without a handshake, and limits on concurrent handshakes."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import trio
from support.waiting import until

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.dial import listener
from hypha_net.errors import UnreachableError

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


async def idle(address: str) -> trio.SocketStream:
    """Open a TCP connection and send nothing."""
    _, _, host, _, port, *_ = address.split("/")
    return await trio.open_tcp_stream(host, int(port))


async def test_silent_sockets_do_not_count_as_connections(authority: Any) -> None:
    settings = EndpointSettings((LOOPBACK,), max_connections=4)
    async with (
        open_endpoint(authority.identity("gateway"), settings) as gateway,
        open_endpoint(authority.identity("leaf"), EndpointSettings()) as leaf,
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
        open_endpoint(authority.identity("gateway"), EndpointSettings((loopback,))) as gateway,
        open_endpoint(authority.identity("leaf"), EndpointSettings()) as leaf,
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
