"""Subscribers of a topic behind a gateway that forwards nothing, by scripted nodes (`support.scripted_nodes`)."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing
from multiaddr import Multiaddr
from support.scripted_nodes import (
    WORKER_TOPIC,
    ScriptedGateway,
    SubscribedNode,
    running,
)
from support.waiting import until
from support.wire_peer import Stream, dial, field, fields, speak

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_proto.ids import PeerId

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
HOP, STOP = "/libp2p/circuit/relay/0.2.0/hop", "/libp2p/circuit/relay/0.2.0/stop"


@asynccontextmanager
async def leaf_of(authority: Any, gateway: str, identity: Any = None) -> AsyncIterator[Libp2pEndpoint]:
    """Open one of our endpoints, connected to a gateway."""
    identity = identity or authority.identity("leaf", "scheduler")
    settings = EndpointSettings(listen_addresses=(LOOPBACK,), gateway_addresses=(gateway,))
    async with open_endpoint(identity, settings) as leaf:
        await leaf.wait_for_gateway(10)
        yield leaf


# ------------------------------------------------------------------------------------------------------------- topics


async def test_a_publisher_behind_a_foreign_gateway_finds_the_subscribers_at_once(authority: Any) -> None:
    """A scheduler publishes and joins nothing; the gateway forwards nothing."""
    gateway = ScriptedGateway(authority.identity("gateway", "gateway"))
    worker = SubscribedNode(authority.identity("worker", "worker"))
    async with running(gateway, worker):
        await worker.connect(gateway.address)
        async with leaf_of(authority, gateway.address) as leaf:
            await leaf.connect_subscribers(WORKER_TOPIC)
            await until(lambda: worker.identity.peer_id in leaf.topic_peers(WORKER_TOPIC), 30)


async def test_a_publish_alone_looks_for_subscribers(authority: Any) -> None:
    gateway = ScriptedGateway(authority.identity("gateway", "gateway"))
    worker = SubscribedNode(authority.identity("worker", "worker"))
    async with running(gateway, worker):
        await worker.connect(gateway.address)
        async with leaf_of(authority, gateway.address) as leaf:
            assert not leaf.topic_peers(WORKER_TOPIC)
            await leaf.publish(WORKER_TOPIC, b"x")
            await until(lambda: worker.identity.peer_id in leaf.topic_peers(WORKER_TOPIC), 30)


async def test_a_publisher_finds_more_peers_than_one_answer_names(authority: Any) -> None:
    """An answer to FIND_NODE names the 20 peers closest to its key, and the worker is far from this node's."""
    own = authority.identity("leaf", "scheduler")
    half = key_space_half(own.peer_id.raw)
    far = authority.identity("far", "worker")
    while key_space_half(far.peer_id.raw) == half:
        far = authority.identity("far", "worker")
    gateway, worker = ScriptedGateway(authority.identity("gateway", "gateway")), SubscribedNode(far)
    strangers = [PeerId.from_public_key(bytes((number,)) * 32).raw for number in range(120)]
    assert sum(key_space_half(stranger) == half for stranger in strangers) > 20
    nowhere = b"\x04\x7f\0\0\x01\x06\0\x01"  # port 1
    gateway.extra = {stranger: [nowhere] for stranger in strangers}
    async with running(gateway, worker):
        await worker.connect(gateway.address)
        async with leaf_of(authority, gateway.address, own) as leaf:
            await leaf.publish(WORKER_TOPIC, b"x")
            await until(lambda: far.peer_id in leaf.topic_peers(WORKER_TOPIC), 10)
            assert gateway.find_nodes < 64


def key_space_half(peer: bytes) -> int:
    return hashlib.sha256(peer).digest()[0] >> 7


def test_looks_at_a_gateways_neighbours_are_limited_while_messages_are_published(authority: Any) -> None:
    clock = trio.testing.MockClock(rate=1)

    async def main() -> None:
        gateway = ScriptedGateway(authority.identity("gateway", "gateway"))
        async with running(gateway), leaf_of(authority, gateway.address) as leaf:
            for _ in range(300):
                await leaf.publish(WORKER_TOPIC, b"x")
            await until(lambda: gateway.find_nodes, 30)
            clock.rate = 0
            for _ in range(300):
                await leaf.publish(WORKER_TOPIC, b"x")
            await leaf.find_peers()
            assert 1 <= gateway.find_nodes <= 3  # one of them is that of `find_peers`
            clock.rate = 1

    trio.run(main, clock=clock)


async def test_a_subscriber_that_can_only_be_relayed_to_is_connected_through_the_gateway(authority: Any) -> None:
    identity = authority.identity("rust", "worker")
    sources: list[bytes] = []

    async def stop(stream: Stream) -> None:
        request = fields(await stream.message())
        await stream.say(field(1, 1) + field(4, 100))
        async with speak(stream, identity, opened=False) as inner:
            sources.append(fields(request[2][0])[1][0])
            await inner.closed.wait()

    settings = EndpointSettings(listen_addresses=(LOOPBACK,), role="gateway")
    async with open_endpoint(authority.identity("gateway", "gateway"), settings) as gateway:
        circuit = Multiaddr(f"{gateway.addresses[0]}/p2p-circuit").to_bytes()
        about = {"addresses": [circuit], "handlers": {STOP: stop}}
        async with speak(await dial(gateway.addresses[0]), identity, **about) as rust:
            answer, _ = await rust.ask(HOP, field(1, 0))
            assert fields(answer)[5] == [100]
            async with leaf_of(authority, gateway.addresses[0]) as leaf:

                async def connected() -> bool:  # not before gateway and leaf know each other's protocols
                    await leaf.connect_subscribers(WORKER_TOPIC, timeout=10)
                    return identity.peer_id in leaf.connected_peers()

                await until(connected, 30)
                assert set(sources) == {leaf.peer_id.raw}
