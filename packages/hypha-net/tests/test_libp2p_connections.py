"""What a peer asks in the moment in which its connection comes about is answered as what it asks later."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from bounded_waits import run, until
from libp2p.network.connection.swarm_connection import SwarmConn

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p import relay
from hypha_net.endpoint import Stream
from hypha_net.errors import NetError

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
    monkeypatch.setattr(relay, "RETRY", (60.0,))

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
