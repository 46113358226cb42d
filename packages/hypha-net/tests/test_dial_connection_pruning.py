"""Connection pruning: peers with several connections use the same one, others are closed, no message is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from libp2p.peer.id import ID
from multiaddr import Multiaddr
from support.endpoint_helpers import echo_at_once, next_event
from support.gateways import ECHO, LOOPBACK, open_gateway, open_node
from support.waiting import until

from hypha_net._libp2p.dial import connection_pruning
from hypha_net._libp2p.dial.tcp import dial_tcp
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net._libp2p.relay.messages import HopKind, HopMessage, Status
from hypha_net.events import CircuitEnded
from hypha_proto.ids import PeerId

TOPIC = "merging"


async def check_echo(node: Libp2pEndpoint, peer: Libp2pEndpoint, text: bytes = b"there and back") -> None:
    stream = await node.open_stream(peer.peer_id, [ECHO])
    await stream.send_all(text)
    assert await stream.receive_some() == text
    await stream.aclose()


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close unused connections after half a second."""
    monkeypatch.setattr(connection_pruning, "GRACE", 0.5)
    monkeypatch.setattr(connection_pruning, "INTERVAL", 0.1)


def connection_count(node: Libp2pEndpoint, peer: Libp2pEndpoint) -> int:
    return len(node._dialer.connections(peer.peer_id))


def initiators(node: Libp2pEndpoint, peer: Libp2pEndpoint) -> list[bool]:
    """Return for each connection whether `node` dialled it."""
    return [bool(each.muxed_conn.is_initiator) for each in node._dialer.connections(peer.peer_id)]


def without_peer(address: str) -> Multiaddr:
    """Return an address without its peer id, so that it is dialled although a connection exists."""
    return Multiaddr(address.partition("/p2p/")[0])


async def dial_each_other(one: Libp2pEndpoint, two: Libp2pEndpoint, both: int = 2) -> None:
    """Make a connection from either side, as if both had dialled at the same moment."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dial_tcp, one._swarm, without_peer(two.addresses[0]), two.peer_id)
        tasks.start_soon(dial_tcp, two._swarm, without_peer(one.addresses[0]), one.peer_id)
    await until(lambda: connection_count(one, two) == connection_count(two, one) == both)


@asynccontextmanager
async def pair(authority: Any) -> AsyncIterator[tuple[Libp2pEndpoint, Libp2pEndpoint]]:
    """Yield two nodes, the one with the smaller id first."""
    async with (
        open_node(authority, "one", listen_addresses=(LOOPBACK,)) as one,
        open_node(authority, "two", listen_addresses=(LOOPBACK,)) as two,
    ):
        for node in (one, two):
            node.handle(ECHO, echo_at_once)
        smaller, larger = sorted((one, two), key=lambda node: node.peer_id.raw)
        yield smaller, larger


class Traffic:
    """Requests and gossip in both directions while `running` is open; every message has its own number."""

    def __init__(self, one: Libp2pEndpoint, two: Libp2pEndpoint) -> None:
        self._nodes = (one, two)
        self.answered = 0
        self.sent: Counter[bytes] = Counter()
        self.received: Counter[bytes] = Counter()
        self._over = False

    async def request_all(self, node: Libp2pEndpoint, peer: Libp2pEndpoint) -> None:
        while not self._over:
            await check_echo(node, peer, f"{self.answered}".encode())
            self.answered += 1
            await anyio.sleep(0.005)

    async def publish_all(self, node: Libp2pEndpoint) -> None:
        number = 0
        while not self._over:
            text = f"{node.peer_id} {number}".encode()
            self.sent[text] += 1
            await node.publish(TOPIC, text)
            number += 1
            await anyio.sleep(0.02)

    async def receive(self, messages: Any) -> None:
        async for message in messages:
            self.received[message.data] += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        one, two = self._nodes
        async with one.subscribe(TOPIC) as of_one, two.subscribe(TOPIC) as of_two:
            for node, peer in ((one, two), (two, one)):
                await until(lambda node=node, peer=peer: peer.peer_id in node.topic_peers(TOPIC))  # type: ignore[misc]
                await until(lambda node=node, peer=peer: in_mesh(node, peer))  # type: ignore[misc]
            async with anyio.create_task_group() as tasks:
                for messages in (of_one, of_two):
                    tasks.start_soon(self.receive, messages)
                for node, peer in ((one, two), (two, one)):
                    tasks.start_soon(self.request_all, node, peer)
                    tasks.start_soon(self.publish_all, node)
                yield
                self._over = True
                await until(lambda: self.received.total() >= self.sent.total())
                tasks.cancel_scope.cancel()


def in_mesh(node: Libp2pEndpoint, peer: Libp2pEndpoint) -> bool:
    return ID(peer.peer_id.raw) in node._gossip[1].mesh.get(TOPIC, set())


@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.nightly)])
async def test_both_ends_keep_the_connection_that_the_smaller_id_dialled(
    authority: Any, short_grace: None, times: int
) -> None:
    async with pair(authority) as (smaller, larger):
        await dial_tcp(larger._swarm, without_peer(smaller.addresses[0]), smaller.peer_id)
        traffic = Traffic(smaller, larger)
        async with traffic.running():
            await dial_tcp(smaller._swarm, without_peer(larger.addresses[0]), larger.peer_id)
            await until(lambda: connection_count(larger, smaller) == 2)
            for node, peer in ((smaller, larger), (larger, smaller)):
                used = node._dialer.connection(peer.peer_id)
                assert used is not None
                assert used.muxed_conn.is_initiator is (node is smaller), "from the first stream on"
            await wait_for_one_connection_dialled_by_smaller(smaller, larger)
            for _ in range(1, times):
                kept = smaller._dialer.connection(larger.peer_id)
                await dial_each_other(smaller, larger, 3)
                await wait_for_one_connection_dialled_by_smaller(smaller, larger)
                assert smaller._dialer.connection(larger.peer_id) is not kept, "the newest"
            before = traffic.answered
            await until(lambda: traffic.answered > before + 10 and traffic.sent.total() > 10 * times, 60)
        assert traffic.received == traffic.sent, "each message once, none lost"


async def wait_for_one_connection_dialled_by_smaller(smaller: Libp2pEndpoint, larger: Libp2pEndpoint) -> None:
    await until(lambda: connection_count(smaller, larger) == connection_count(larger, smaller) == 1)
    assert (initiators(smaller, larger), initiators(larger, smaller)) == ([True], [False])


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.nightly)])
async def test_simultaneous_dials_end_with_one_connection(authority: Any, short_grace: None, times: int) -> None:
    simultaneous = 0
    async with pair(authority) as (one, two):
        for _ in range(times):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one.connect, two.addresses[0])
                tasks.start_soon(two.connect, one.addresses[0])
            simultaneous += connection_count(one, two) == 2
            async with anyio.create_task_group() as tasks:
                for node, peer in ((one, two), (two, one)):
                    for _ in range(5):
                        tasks.start_soon(check_echo, node, peer)
            await until(lambda: connection_count(one, two) == connection_count(two, one) == 1)
            await check_echo(one, two)
            await check_echo(two, one)
            await one.disconnect(two.peer_id)
            await until(lambda: not one.connected_peers() and not two.connected_peers())
    assert simultaneous, "there never were two connections: the test has shown nothing"


async def test_open_streams_keep_a_surplus_connection(authority: Any, short_grace: None) -> None:
    async with pair(authority) as (smaller, larger):
        await dial_tcp(larger._swarm, without_peer(smaller.addresses[0]), smaller.peer_id)
        await until(lambda: connection_count(smaller, larger) == 1)
        streams = [
            await larger.open_stream(smaller.peer_id, [ECHO]),
            await smaller.open_stream(larger.peer_id, [ECHO]),
        ]
        await dial_tcp(smaller._swarm, without_peer(larger.addresses[0]), larger.peer_id)
        await anyio.sleep(3 * connection_pruning.GRACE)
        for stream in streams:
            assert connection_count(smaller, larger) == connection_count(larger, smaller) == 2
            await stream.send_all(b"still there")
            assert await stream.receive_some() == b"still there"
            await stream.aclose()
        await wait_for_one_connection_dialled_by_smaller(smaller, larger)


async def test_only_the_dialling_side_closes_a_connection(authority: Any, short_grace: None) -> None:
    async with pair(authority) as (smaller, larger):
        # like an implementation that keeps every connection
        larger._pruner._can_close = lambda *_: False  # type: ignore[method-assign]
        await dial_each_other(smaller, larger)
        await anyio.sleep(3 * connection_pruning.GRACE)
        assert connection_count(smaller, larger) == connection_count(larger, smaller) == 2
        await check_echo(smaller, larger)
        await check_echo(larger, smaller)


# ---------------------------------------------------------------------------------------------------- relays


@asynccontextmanager
async def behind_gateway(authority: Any) -> AsyncIterator[tuple[Libp2pEndpoint, Libp2pEndpoint, Libp2pEndpoint]]:
    """Yield a gateway that relays, and two nodes with a reservation there."""
    async with (
        open_gateway(authority, relay_circuit=False) as gateway,
        open_node(authority, "one", gateway=gateway, listen_addresses=(LOOPBACK,)) as one,
        open_node(authority, "two", gateway=gateway, listen_addresses=(LOOPBACK,)) as two,
    ):
        for node in (one, two):
            node.handle(ECHO, echo_at_once)
            await until(lambda node=node: any("p2p-circuit" in each for each in node.addresses))  # type: ignore[misc]
        yield gateway, one, two


async def test_reservation_moves_before_its_connection_is_closed(authority: Any, short_grace: None) -> None:
    async with behind_gateway(authority) as (gateway, leaf, other):
        hop = gateway._relay_server
        assert hop is not None
        [first] = gateway._dialer.connections(leaf.peer_id)
        await dial_tcp(leaf._swarm, without_peer(gateway.addresses[0]), gateway.peer_id)
        await until(lambda: connection_count(gateway, leaf) == 2)
        assert hop.depends_on_connection(leaf.peer_id, first)
        await until(lambda: first not in gateway._dialer.connections(leaf.peer_id))
        assert connection_count(gateway, leaf) == connection_count(leaf, gateway) == 1
        assert hop.has_reservation(leaf.peer_id)
        [circuit] = [address for address in leaf.addresses if "p2p-circuit" in address]
        assert await other.connect(circuit) == leaf.peer_id


async def test_connection_stays_when_its_reservation_cannot_be_moved(authority: Any, short_grace: None) -> None:
    async with behind_gateway(authority) as (gateway, leaf, _other):
        hop = gateway._relay_server
        assert hop is not None
        [first] = gateway._dialer.connections(leaf.peer_id)
        hop._reserve = lambda _peer: HopMessage(type=HopKind.STATUS, status=Status.RESERVATION_REFUSED)  # type: ignore[method-assign]
        for node, peer in ((leaf, gateway), (gateway, leaf)):
            await dial_tcp(node._swarm, without_peer(peer.addresses[0]), peer.peer_id)
        await until(lambda: connection_count(gateway, leaf) == connection_count(leaf, gateway) == 3)
        of_gateway = gateway._dialer.connections(leaf.peer_id)
        assert [hop.depends_on_connection(leaf.peer_id, each) for each in of_gateway] == [True, False, False]
        await anyio.sleep(3 * connection_pruning.GRACE)
        assert first in gateway._dialer.connections(leaf.peer_id)
        assert hop.has_reservation(leaf.peer_id)


async def test_direct_connection_replaces_the_circuit(authority: Any, short_grace: None) -> None:
    async with behind_gateway(authority) as (gateway, one, two):
        punch = two._puncher.punch
        two._puncher.punch = do_not_punch  # type: ignore[method-assign]
        [circuit] = [address for address in two.addresses if "p2p-circuit" in address]
        await one.connect(circuit)
        await until(lambda: connection_count(one, two) == connection_count(two, one) == 1)
        hop = gateway._relay_server
        assert hop is not None
        assert hop._circuits.total() == 1
        traffic = Traffic(one, two)
        with gateway.events.follow(CircuitEnded) as ended:
            async with traffic.running():
                held = await one.open_stream(two.peer_id, [ECHO])
                assert not one.is_direct(two.peer_id)
                await punch(one.peer_id)
                await until(lambda: one.is_direct(two.peer_id) and two.is_direct(one.peer_id))
                await anyio.sleep(3 * connection_pruning.GRACE)
                assert hop._circuits.total() == 1, "a stream is open on it"
                await held.send_all(b"through the gateway")
                assert await held.receive_some() == b"through the gateway"
                await held.aclose()
                event = await next_event(ended, CircuitEnded)
                assert (event.source, event.target, event.outcome) == (one.peer_id, two.peer_id, "done")
                await until(lambda: connection_count(one, two) == connection_count(two, one) == 1)
                assert hop._circuits.total() == 0
                before = traffic.answered
                await until(lambda: traffic.answered > before + 10)
        assert traffic.received == traffic.sent, "each message once, none lost"
        assert one.is_direct(two.peer_id)
        assert two.is_direct(one.peer_id)
        assert len(one.addresses) == len(two.addresses) == 2, "both kept their reservations"


async def do_not_punch(_peer: PeerId) -> None:
    """Replace `punch`, so that no direct connection is made at once."""
