"""Subscribers of a topic behind a gateway that forwards nothing, by scripted nodes.

They are made of several `wire_peer` connections, and share no code with ours but TLS keys. The gateway is not in the
topic of worker requests, and so forwards none.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import pytest
import trio
import trio.testing
from multiaddr import Multiaddr
from support.gateways import LOOPBACK, open_gateway
from support.waiting import until
from support.wire_peer import IDENTIFY, Stream, WirePeer, dial, field, fields, speak

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_proto.ids import PeerId

KAD: Final = "/ipfs/kad/1.0.0"
MESHSUB: Final = "/meshsub/1.1.0"
WORKER_TOPIC: Final = "hypha/worker"
PUT_VALUE, GET_VALUE, ADD_PROVIDER, GET_PROVIDERS, FIND_NODE = range(5)
CLOSEST: Final = 20


class ScriptedNode:
    """A node that listens on loopback, dials, and knows who its neighbours are by identify."""

    def __init__(self, identity: Any) -> None:
        self.identity = identity
        self.address = ""
        """Where it listens, with its peer id."""
        self.handlers: dict[str, Callable[[Stream], Awaitable[None]]] = {}
        self.neighbours: dict[bytes, WirePeer] = {}
        """Connections by peer id."""
        self.listening: dict[bytes, list[bytes]] = {}
        """Addresses of connected peers, as multiaddr bytes, by peer id."""
        self._lifetime = trio.CancelScope()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until shut down or cancelled."""
        with self._lifetime:
            async with trio.open_nursery() as self._tasks:
                [listener] = await self._tasks.start(partial(trio.serve_tcp, self._accept, 0, host="127.0.0.1"))
                self.address = f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}/p2p/{self.identity.peer_id}"
                task_status.started()

    def shut_down(self) -> None:
        """End the node and its connections."""
        self._lifetime.cancel()

    async def connect(self, address: str) -> None:
        """Dial a multiaddr and wait until its node is identified."""
        await self._tasks.start(self._serve, await dial(address), True)

    async def _accept(self, transport: trio.SocketStream) -> None:
        await self._serve(transport, False)

    async def _serve(
        self, transport: trio.SocketStream, opened: bool, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        about = {"handlers": self.handlers, "addresses": [_multiaddr(self.address)]}
        try:
            async with speak(transport, self.identity, opened=opened, **about) as peer:
                self.neighbours[peer.remote] = peer
                try:
                    await self._identify(peer)
                    task_status.started()
                    await peer.closed.wait()
                finally:
                    if self.neighbours.get(peer.remote) is peer:
                        del self.neighbours[peer.remote]
                        self.listening.pop(peer.remote, None)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, AssertionError):
            pass  # the other side left before it was identified

    async def _identify(self, peer: WirePeer) -> None:
        stream = await peer.open(IDENTIFY)
        told = fields(await stream.message())
        await stream.half_close()
        self.listening[peer.remote] = told.get(2, [])
        await self.connected(peer, {protocol.decode() for protocol in told.get(3, [])})

    async def connected(self, peer: WirePeer, protocols: set[str]) -> None:
        """Do what this kind of node does on a new connection."""


class ScriptedGateway(ScriptedNode):
    """A gateway: knows its neighbours, and is in no topic."""

    def __init__(self, identity: Any) -> None:
        super().__init__(identity)
        self.handlers[KAD] = self._answer
        self.extra: dict[bytes, list[bytes]] = {}
        """Further peers in its routing table, with their addresses."""
        self.find_nodes = 0
        """Requests for the closest peers so far."""

    async def _answer(self, stream: Stream) -> None:
        try:
            while True:
                asked = fields(await stream.message())
                kind, key = asked.get(1, [0])[0], asked.get(2, [b""])[0]
                if kind == ADD_PROVIDER:
                    continue
                self.find_nodes += kind == FIND_NODE
                closer = self._closest(stream.peer.remote, key)
                await stream.say(field(1, kind) + field(2, key) + closer + field(10, 1))
        except AssertionError:  # the end of the stream
            await stream.half_close()

    def _closest(self, asking: bytes, key: bytes) -> bytes:
        known = {**self.listening, **self.extra}
        target = int.from_bytes(hashlib.sha256(key).digest(), "big")
        nearest = sorted(known, key=lambda raw: int.from_bytes(hashlib.sha256(raw).digest(), "big") ^ target)
        chosen = [raw for raw in nearest if raw != asking][:CLOSEST]
        return b"".join(
            field(8, field(1, raw) + b"".join(field(2, address) for address in known[raw]) + field(3, 1))
            for raw in chosen
        )


class SubscribedNode(ScriptedNode):
    """A node in the topic of worker requests; it ignores what it hears."""

    def __init__(self, identity: Any) -> None:
        super().__init__(identity)
        self.handlers[MESHSUB] = Stream.read_all

    async def connected(self, peer: WirePeer, protocols: set[str]) -> None:
        """Announce the topic."""
        if MESHSUB in protocols:
            self._tasks.start_soon(self._subscribe, peer)

    async def _subscribe(self, peer: WirePeer) -> None:
        try:
            stream = await peer.open(MESHSUB)
            await stream.say(field(1, field(1, 1) + field(2, WORKER_TOPIC.encode())))
        except (AssertionError, trio.BrokenResourceError, trio.ClosedResourceError):
            return  # the connection is gone


def _multiaddr(address: str) -> bytes:
    """Encode ``/ip4/<host>/tcp/<port>``; a ``/p2p/`` part is left out."""
    host, port = address.split("/")[2], int(address.split("/")[4])
    return bytes((4, *map(int, host.split(".")), 6)) + port.to_bytes(2, "big")


@asynccontextmanager
async def running(*nodes: ScriptedNode) -> AsyncIterator[None]:
    """Run nodes while the context is open."""
    async with trio.open_nursery() as tasks:
        for node in nodes:
            await tasks.start(node.run)
        try:
            yield
        finally:
            for node in nodes:
                node.shut_down()
            tasks.cancel_scope.cancel()


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


@pytest.mark.parametrize("publishes", [False, True], ids=["before it publishes", "by publishing alone"])
async def test_a_publisher_behind_a_foreign_gateway_finds_the_subscribers(authority: Any, publishes: bool) -> None:
    """A scheduler publishes and joins nothing; the gateway forwards nothing."""
    gateway = ScriptedGateway(authority.identity("gateway", "gateway"))
    worker = SubscribedNode(authority.identity("worker", "worker"))
    async with running(gateway, worker):
        await worker.connect(gateway.address)
        async with leaf_of(authority, gateway.address) as leaf:
            assert not leaf.topic_peers(WORKER_TOPIC)
            await (leaf.publish(WORKER_TOPIC, b"x") if publishes else leaf.connect_subscribers(WORKER_TOPIC))
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

    async with open_gateway(authority) as gateway:
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
