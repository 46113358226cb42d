"""Relay reservations are renewed in time, and not more often than necessary, even with skewed clocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import anyio
import pytest

from hypha_net._libp2p.relay.circuit import CircuitConnection, RelayEndpoint
from hypha_net._libp2p.relay.client import RelayClient
from hypha_net._libp2p.relay.messages import HOP, HopMessage
from hypha_net._libp2p.relay.server import RelayServer
from hypha_net._libp2p.wire.delimited import read_message, write_message
from hypha_net.endpoint import Stream
from hypha_net.errors import UnreachableError
from hypha_net.events import Events
from hypha_net.settings import RelayLimits
from hypha_net.testing import MemoryNetwork, simulate
from hypha_proto.ids import PeerId

HOUR = 3600.0
NOW = 1_800_000_000.0


class Everywhere:
    """An endpoint of a relay to which every peer is connected."""

    addresses = (f"/ip4/127.0.0.1/tcp/1/p2p/{PeerId.from_public_key(bytes(32))}",)

    def direct_connections(self, peer: PeerId) -> frozenset[object]:
        return frozenset({peer})

    async def open_stream(self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0) -> Stream:
        raise UnreachableError(f"{peer} is not asked here")


async def no_circuit(_circuit: CircuitConnection, _source: PeerId) -> None:
    raise AssertionError("nobody is called")


async def ignore_announcement(_gateway: PeerId) -> None:
    """Announce nothing."""


async def hold_reservation(skew: float, lifetime: float, *, ours: bool) -> tuple[int, int]:
    """Hold a reservation for three hours; return the number of requests, and of minutes without reservation."""
    hop = RelayServer(
        Everywhere(), RelayLimits(reservation_lifetime=lifetime), Events(), lambda: NOW + anyio.current_time()
    )
    asked, gone = 0, 0
    network = MemoryNetwork()
    async with network.endpoint("node") as node, network.endpoint("relay") as relay:

        async def serve(stream: Stream) -> None:
            nonlocal asked
            asked += 1
            await read_message(stream, HopMessage)
            answer: Any = hop._reserve(stream.peer)
            if not ours:
                answer.reservation.ClearField("lifetime")
            await write_message(stream, answer)

        relay.handle(HOP, serve)
        clock = lambda: NOW + skew + anyio.current_time()  # noqa: E731
        client = RelayClient(cast(RelayEndpoint, node), no_circuit, ignore_announcement, clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.keep_reservation, relay.peer_id)
            for _ in range(180):
                await anyio.sleep(60)
                gone += not hop.has_reservation(node.peer_id)
            tasks.cancel_scope.cancel()
    return asked, gone


@pytest.mark.parametrize("skew", [-HOUR, 0.0, HOUR])
@pytest.mark.parametrize("lifetime", [60.0, 600.0, HOUR])
def test_clock_skew_does_not_affect_reservations_at_a_hypha_relay(skew: float, lifetime: float) -> None:
    asked, gone = simulate(lambda: hold_reservation(skew, lifetime, ours=True))
    assert gone == 0
    assert asked == pytest.approx(3 * HOUR / (lifetime / 2), abs=1)


@pytest.mark.parametrize("skew", [-HOUR, 0.0, HOUR])
def test_at_other_relays_clock_skew_costs_at_most_two_renewals_a_minute(skew: float) -> None:
    asked, gone = simulate(lambda: hold_reservation(skew, HOUR, ours=False))
    assert gone == 0
    assert asked <= 3 * HOUR / 30 + 1
