"""Gateways on the loopback interface, and checks of connections between real endpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net.endpoint import Endpoint
from hypha_proto.ids import PeerId
from support.authority import Authority

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ECHO = "/test/echo/1"
Opener = Callable[[int], AbstractAsyncContextManager[list[Endpoint]]]
"""Opens some endpoints, of which the first is the gateway of the others."""


def open_gateway(authority: Authority, **changes: Any) -> AbstractAsyncContextManager[Libp2pEndpoint]:
    """Open a gateway of an organisation; `changes` are those to its settings."""
    settings = EndpointSettings(listen_addresses=(LOOPBACK,), role="gateway", **changes)
    return open_endpoint(authority.identity("gateway", "gateway"), settings)


def open_node(
    authority: Authority, name: str, role: str | None = None, gateway: Endpoint | None = None, **changes: Any
) -> AbstractAsyncContextManager[Libp2pEndpoint]:
    """Open a node of an organisation, which connects to `gateway`; `changes` are those to its settings."""
    if gateway is not None:
        changes["gateway_addresses"] = (gateway.addresses[0],)
    return open_endpoint(authority.identity(name, role), EndpointSettings(**changes))


async def check_echo(node: Libp2pEndpoint, peer: PeerId) -> None:
    """Check that a stream to a peer that echoes carries bytes in both directions."""
    stream = await node.open_stream(peer, [ECHO])
    await stream.send_all(b"there and back")
    assert await stream.receive_some() == b"there and back"
    await stream.aclose()
