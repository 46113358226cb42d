"""Identify: valid data of peers is kept, malformed data is dropped, and failed requests are repeated."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.utils import encode_varint_prefixed
from multiaddr import Multiaddr
from support.gateways import LOOPBACK, open_gateway, open_node
from support.waiting import until

from hypha_net._libp2p.identify import retry

GOOD = "/ip4/192.0.2.1/tcp/4001"

UNREADABLE = {
    "a number that does not end": b"\xff\xff",
    "a protocol that there is not": b"\x2f" * 9,
    "a port of one byte": b"\x04\x7f\x00\x00\x01\x06\x0f",
    "a name that is none": b"\x36\x02-x\x06\x0f\xa1",
    "nothing": b"",
}


@asynccontextmanager
async def gateway_and_reporter(authority: Any, *addresses: bytes) -> AsyncIterator[tuple[Any, Any]]:
    """Open a gateway, and a node that reports `addresses` by identify."""
    said = Identify(listen_addrs=addresses, agent_version="odd")

    async def identify(stream: INetStream) -> None:
        await stream.write(encode_varint_prefixed(said.SerializeToString()))
        await stream.close()

    async with open_gateway(authority) as gateway, open_node(authority, "odd") as odd:
        odd._host.set_stream_handler(TProtocol("/ipfs/id/1.0.0"), identify)
        await odd.connect(gateway.addresses[0])
        await until(lambda: gateway.connected_peers()[odd.peer_id].agent == "odd")
        yield gateway, odd


@pytest.mark.parametrize("why", UNREADABLE)
async def test_unprintable_addresses_are_dropped_and_do_no_harm(authority: Any, why: str) -> None:
    async with gateway_and_reporter(authority, UNREADABLE[why], Multiaddr(GOOD).to_bytes()) as (
        gateway,
        odd,
    ):
        await until(lambda: gateway.connected_peers()[odd.peer_id].addresses == (GOOD,))


async def test_only_the_first_addresses_of_a_peer_are_kept(authority: Any) -> None:
    many = [Multiaddr(f"/ip4/192.0.2.1/tcp/{port}").to_bytes() for port in range(1, 1000)]
    async with gateway_and_reporter(authority, *many) as (gateway, odd):
        await until(lambda: bool(gateway.connected_peers()[odd.peer_id].addresses))
        kept = gateway._host.peerstore.addrs(odd._host.get_id())
        assert [str(address) for address in kept] == [f"/ip4/192.0.2.1/tcp/{port}" for port in range(1, 33)]


async def test_a_failed_identify_is_repeated(authority: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, asked = BasicHost._identify_peer, list[Any]()

    async def fail_at_first(host: BasicHost, peer: Any, *, reason: str) -> None:
        asked.append(host)
        if asked.count(host) > 1:
            await ask(host, peer, reason=reason)

    monkeypatch.setattr(BasicHost, "_identify_peer", fail_at_first)
    monkeypatch.setattr(retry, "INTERVAL", 0.1)
    async with (
        open_node(authority, "one", listen_addresses=(LOOPBACK,)) as one,
        open_node(authority, "two", listen_addresses=(LOOPBACK,)) as two,
    ):
        await one.connect(two.addresses[0])
        for node, other in ((one, two), (two, one)):
            known = lambda node=node, other=other: node.connected_peers()[other.peer_id].protocols  # noqa: E731
            await until(known, 20)


async def test_a_peer_that_reconnects_at_once_is_identified_again(authority: Any) -> None:
    async with open_gateway(authority) as gateway, open_node(authority, "node", relay_circuit=False) as node:

        def known() -> bool:
            there, here = gateway.connected_peers(), node.connected_peers()
            both = [there.get(node.peer_id), here.get(gateway.peer_id)]
            return all(info is not None and bool(info.protocols) for info in both)

        await node.connect(gateway.addresses[0])
        await until(known)
        await gateway.disconnect(node.peer_id)
        await until(lambda: not node.connected_peers())
        await node.connect(gateway.addresses[0])
        await until(known, 20)
