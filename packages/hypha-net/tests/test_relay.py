"""Circuit relay: nodes without listeners connect through their gateway, within its limits, and by hole punching.

Reservations are renewed in time, and not more often than necessary, even with skewed clocks.
"""

from __future__ import annotations

import gc
import socket
import ssl
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
import trio.testing
from libp2p.custom_types import TProtocol
from multiaddr import Multiaddr
from support.endpoint_helpers import accept_pushes, echo, next_event, push_header, read_all
from support.gateways import ECHO, LOOPBACK, open_gateway, open_node
from support.loopback_ports import free_port
from support.waiting import until

from hypha_net import EndpointSettings, open_endpoint, transfer
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net._libp2p.relay import dcutr, server
from hypha_net._libp2p.relay.circuit import CircuitConnection, RelayEndpoint
from hypha_net._libp2p.relay.client import RelayClient
from hypha_net._libp2p.relay.dcutr import CONNECT, PROTOCOL, SYNC, HolePunch, HolePuncher
from hypha_net._libp2p.relay.dcutr import PROTOCOL as DCUTR
from hypha_net._libp2p.relay.messages import HOP, STOP, HopKind, HopMessage, Status, StopKind, StopMessage
from hypha_net._libp2p.relay.server import RelayServer
from hypha_net._libp2p.wire.delimited import read_message, write_message
from hypha_net._libp2p.yamux.frames import HEADER, size_with_tls
from hypha_net._libp2p.yamux.link_estimator import MAX_FRAME, MIN_FRAME
from hypha_net.buffer_pool import MAX_POOLED_BODY
from hypha_net.endpoint import Stream
from hypha_net.errors import StreamResetError, TransferError, UnreachableError
from hypha_net.events import CircuitEnded, Connected, Events, HolePunched
from hypha_net.settings import RelayLimits
from hypha_net.testing import MemoryNetwork, simulate
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PullRequest

SINK = "/test/sink/1"


@asynccontextmanager
async def hidden_nodes(
    authority: Any, limits: RelayLimits | None = None, **changes: Any
) -> AsyncIterator[tuple[Libp2pEndpoint, Libp2pEndpoint, Libp2pEndpoint]]:
    """Open a gateway and two nodes without listeners."""
    settings = EndpointSettings(
        listen_addresses=(LOOPBACK,), role="gateway", relay_circuit=False, relay=limits or RelayLimits()
    )
    async with open_endpoint(authority.identity("gateway", "gateway"), settings) as gateway:
        hidden = EndpointSettings(gateway_addresses=(gateway.addresses[0],), **changes)
        async with (
            open_endpoint(authority.identity("one"), hidden) as one,
            open_endpoint(authority.identity("two", "worker"), hidden) as two,
        ):
            for node in (one, two):
                await node.wait_for_gateway(15)
                await until(lambda node=node: node.addresses or not hidden.relay_circuit)  # type: ignore[misc]
            yield gateway, one, two


async def ask_hop(node: Libp2pEndpoint, gateway: PeerId, request: Any) -> Any:
    stream = await node.open_stream(gateway, [HOP])
    await write_message(stream, request)
    answer = await read_message(stream, HopMessage)
    await stream.aclose()
    return answer


async def test_nodes_without_listeners_communicate_through_the_relay(authority: Any) -> None:
    async with hidden_nodes(authority) as (gateway, one, two):
        assert two.addresses == (f"{gateway.addresses[0]}/p2p-circuit/p2p/{two.peer_id}",)
        two.handle(ECHO, echo)
        stream = await one.open_stream(two.peer_id, [ECHO])
        assert stream.peer == two.peer_id
        await stream.send_all(b"through the gateway")
        await stream.send_eof()
        assert await read_all(stream) == b"through the gateway"
        await stream.aclose()
        assert one.peer_id in two.connected_peers()
        assert one.connected_peers()[two.peer_id].role == "worker"
        assert not one.is_direct(two.peer_id)
        # identify reports it too, which gateways of other implementations rely on
        await until(lambda: gateway.connected_peers()[two.peer_id].addresses == two.addresses, 15)


@pytest.mark.parametrize("excluded", [(), ("127.0.0.0/8", "10.0.0.0/8")], ids=["all", "loopback excluded"])
async def test_a_circuit_address_is_dialled_even_if_the_relays_address_is_excluded(
    authority: Any, excluded: tuple[str, ...]
) -> None:
    async with hidden_nodes(authority, exclude_cidr=excluded) as (_gateway, one, two):
        two.handle(ECHO, echo)
        assert await one.connect(two.addresses[0]) == two.peer_id
        assert one.peer_id in two.connected_peers()


async def test_excluded_addresses_are_not_shared_but_circuit_addresses_are(authority: Any) -> None:
    excluded = ("127.0.0.0/8",)
    async with (
        open_gateway(authority, exclude_cidr=excluded) as gateway,
        open_node(authority, "one", "worker", gateway=gateway, listen_addresses=(LOOPBACK,)) as one,
        open_node(authority, "two", "worker", gateway=gateway, listen_addresses=(LOOPBACK,)) as two,
    ):
        two.handle(ECHO, echo)
        await until(lambda: len(one.addresses) == len(two.addresses) == 2)
        with one.events.follow(Connected) as connected:
            await (await one.open_stream(two.peer_id, [ECHO])).aclose()
            assert await anext(aiter(connected)) == Connected(two.peer_id, "outbound", relayed=True)


async def test_a_file_is_pushed_through_the_gateway_and_counted_once_on_the_wire(
    authority: Any, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * (4 << 12))
    async with hidden_nodes(authority) as (gateway, one, two):
        landed = accept_pushes(two, tmp_path / "landing")
        header = push_header(*await transfer.describe(source))
        assert await transfer.push(one, two.peer_id, source, header) == 4 << 20
        assert 4 << 20 < one.traffic.sent < 5 << 20
        assert 4 << 20 < gateway.traffic.received < 5 << 20
    assert [path.read_bytes() for path in landed] == [source.read_bytes()]


async def test_a_relay_forwards_half_closes_and_resets(authority: Any) -> None:
    async with hidden_nodes(authority) as (_gateway, one, two):
        seen: list[str] = []

        async def handler(stream: Stream) -> None:
            try:
                await read_all(stream)
                seen.append("end")
            except StreamResetError:
                seen.append("reset")

        two.handle(ECHO, handler)
        stream = await one.open_stream(two.peer_id, [ECHO])
        await stream.send_all(b"x")
        await stream.reset()
        other = await one.open_stream(two.peer_id, [ECHO])
        await other.send_eof()
        assert await read_all(other) == b""
        await other.aclose()
        await until(lambda: len(seen) >= 2, 15)
        assert sorted(seen) == ["end", "reset"]
        held = await one.open_stream(two.peer_id, [ECHO])
        await held.send_all(b"x")
        await one.disconnect(two.peer_id)
        await until(lambda: one.peer_id not in two.connected_peers() and len(seen) >= 3, 15)
        assert seen[2] == "reset"
        again = await one.open_stream(two.peer_id, [ECHO])
        await again.aclose()


async def test_the_relay_answers_each_request_with_its_status(authority: Any) -> None:
    async with hidden_nodes(authority) as (gateway, one, two):
        request = HopMessage(type=HopKind.RESERVE)
        request.peer.id = two.peer_id.raw
        answer = await ask_hop(one, gateway.peer_id, request)
        assert (answer.type, answer.status) == (HopKind.STATUS, Status.OK)
        assert answer.reservation.addrs
        assert answer.reservation.expire
        assert not answer.HasField("limit")
        connect = HopMessage(type=HopKind.CONNECT)
        connect.peer.id = b"nonsense"
        assert (await ask_hop(one, gateway.peer_id, connect)).status == Status.MALFORMED_MESSAGE
        strange = HopMessage(type=HopKind.STATUS)
        assert (await ask_hop(one, gateway.peer_id, strange)).status == Status.UNEXPECTED_MESSAGE


async def test_a_node_accepts_circuits_only_from_relays_that_hold_its_reservation(authority: Any) -> None:
    async with hidden_nodes(authority) as (_gateway, one, two):
        stream = await one.open_stream(two.peer_id, [STOP])
        request = StopMessage(type=StopKind.CONNECT)
        request.peer.id = one.peer_id.raw
        await write_message(stream, request)
        assert (await read_message(stream, StopMessage)).status == Status.PERMISSION_DENIED
        await stream.aclose()


async def test_a_reservation_is_restored_after_reconnection(authority: Any) -> None:
    async with hidden_nodes(authority) as (gateway, one, two):
        two.handle(ECHO, echo)
        await gateway.disconnect(two.peer_id)
        with anyio.fail_after(15):
            while True:
                try:
                    stream = await one.open_stream(two.peer_id, [ECHO])
                    break
                except UnreachableError:
                    await anyio.sleep(0.05)
        await stream.send_eof()
        assert await read_all(stream) == b""
        await stream.aclose()


async def test_expired_reservations_do_not_keep_closed_connections_in_memory(authority: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(server, "SWEEP_EVERY", 0.0)
    async with open_gateway(authority, relay_circuit=False) as gateway:
        kept: list[weakref.ref[Any]] = []
        for name in ("one", "two"):
            async with open_node(authority, name, gateway=gateway) as node:
                await until(lambda: node.addresses and gateway.connected_peers()[node.peer_id].agent)
                await until(lambda: node.connected_peers()[gateway.peer_id].agent)
                kept += [weakref.ref(each) for each in gateway.direct_connections(node.peer_id)]
            await until(lambda: not gateway.connected_peers())
        assert len(kept) == 2
        # collect() returns a count; the tasks of a connection may end after it
        await until(lambda: gc.collect() >= 0 and kept[0]() is None, 60, 0.1)


class Present:
    """An endpoint of a relay of which only the connected peers matter."""

    addresses = (f"/ip4/127.0.0.1/tcp/1/p2p/{PeerId.from_public_key(bytes(32))}",)

    def __init__(self, *, everybody: bool = False) -> None:
        self.peers: set[PeerId] = set()
        self.everybody = everybody
        """Whether every peer is connected."""
        self.number = 0
        """Number of the connection: grows when a peer reconnects."""

    def direct_connections(self, peer: PeerId) -> frozenset[object]:
        return frozenset({(peer, self.number)} if self.everybody or peer in self.peers else ())

    async def open_stream(self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0) -> Stream:
        raise UnreachableError(f"{peer} is not asked here")


@pytest.mark.virtual_clock
async def test_a_reservation_ends_with_its_connection_or_its_lifetime() -> None:
    clock = [1000.0]
    present = Present()
    hop = RelayServer(present, RelayLimits(reservation_lifetime=60), Events(), lambda: clock[0])
    node, other = (PeerId.from_public_key(bytes([n]) * 32) for n in (1, 2))
    network = MemoryNetwork()
    async with network.endpoint("node") as asking, network.endpoint("relay") as relay:
        relay.handle(HOP, hop.serve)

        async def reserve(claimed: PeerId) -> int:
            stream = await asking.open_stream(relay.peer_id, [HOP])
            request = HopMessage(type=HopKind.RESERVE)
            request.peer.id = claimed.raw
            await write_message(stream, request)
            answer = await read_message(stream, HopMessage)
            return int(answer.status)

        assert await reserve(node) == Status.PERMISSION_DENIED  # connected by a relay, or not at all
        present.peers = {asking.peer_id}
        assert await reserve(node) == Status.OK
        assert hop.has_reservation(asking.peer_id)
        assert not hop.has_reservation(node)
        assert not hop.has_reservation(other)
        clock[0] += 7200  # the wall clock was set
        await anyio.sleep(59)
        assert hop.has_reservation(asking.peer_id)
        await anyio.sleep(2)
        assert not hop.has_reservation(asking.peer_id)
        assert await reserve(node) == Status.OK
        present.peers = set()
        assert not hop.has_reservation(asking.peer_id)
        present.peers = {asking.peer_id}
        assert not hop.has_reservation(asking.peer_id)
        assert await reserve(node) == Status.OK
        present.number += 1  # it reconnected unnoticed, and has not renewed on its new connection
        assert not hop.has_reservation(asking.peer_id)


def test_a_frame_in_a_circuit_fits_into_one_frame_of_the_outer_connection(authority: Any) -> None:
    """Holds for every frame size that the link estimator may choose."""
    identity = authority.identity("node")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialling = identity.client_context().wrap_bio(back, there)
    accepting = identity.server_context().wrap_bio(there, back, server_side=True)
    for side in (dialling, accepting, dialling, accepting):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    there.read()
    size = MAX_FRAME
    assert size_with_tls(size) == MAX_POOLED_BODY
    while size >= MIN_FRAME:
        dialling.write(bytes(HEADER.size))  # as the yamux session writes it
        dialling.write(bytes(size))
        assert size < len(there.read()) <= size_with_tls(size)
        size //= 2


async def circuit(one: Libp2pEndpoint, gateway: Libp2pEndpoint, target: PeerId) -> tuple[Stream, Any]:
    """Open a circuit without TLS in it; return it with the relay's answer."""
    stream = await one.open_stream(gateway.peer_id, [HOP])
    request = HopMessage(type=HopKind.CONNECT)
    request.peer.id = target.raw
    await write_message(stream, request)
    return stream, await read_message(stream, HopMessage)


def test_circuit_limits_are_sent_to_both_ends_and_enforced(authority: Any) -> None:
    clock = trio.testing.MockClock(rate=1)

    async def main() -> None:
        async with hidden_nodes(authority, limits) as nodes:
            await case(*nodes)

    async def case(gateway: Libp2pEndpoint, one: Libp2pEndpoint, two: Libp2pEndpoint) -> None:
        told: list[Any] = []

        async def take(stream: Stream) -> None:
            told.append(await read_message(stream, StopMessage))
            await write_message(stream, StopMessage(type=StopKind.STATUS, status=Status.OK))
            await anyio.sleep_forever()

        reserved = await ask_hop(one, gateway.peer_id, HopMessage(type=HopKind.RESERVE))
        two.handle(STOP, take)
        with gateway.events.follow(CircuitEnded) as ended:
            ends = aiter(ended)
            stream, answer = await circuit(one, gateway, two.peer_id)
            for message in (reserved, answer, told[0]):
                assert (message.limit.data, message.limit.duration) == (100_000, 10)
            with pytest.raises(StreamResetError):
                while True:
                    await stream.send_all(bytes(10_000))
            event = await next_event(ended, CircuitEnded)
            assert (event.source, event.target, event.outcome) == (one.peer_id, two.peer_id, "bytes")
            assert 50_000 < event.moved <= 100_000
            first, _ = await circuit(one, gateway, two.peer_id)
            second, _ = await circuit(one, gateway, two.peer_id)
            assert (await circuit(one, gateway, two.peer_id))[1].status == Status.RESOURCE_LIMIT_EXCEEDED
            assert await anext(ends) == CircuitEnded(one.peer_id, two.peer_id, "refused")
            clock.jump(10)
            for each in (first, second):
                with pytest.raises(StreamResetError):
                    await each.receive_some()
                assert await anext(ends) == CircuitEnded(one.peer_id, two.peer_id, "duration")
            assert gateway._relay_server is not None
            assert not gateway._relay_server._circuits

    limits = RelayLimits(max_bytes=100_000, max_duration=10, max_circuits_per_peer=2)
    trio.run(main, clock=clock)


async def test_after_losing_a_circuit_the_next_stream_opens_another(authority: Any) -> None:
    async def drop(stream: Stream) -> None:
        while await stream.receive_some():
            pass
            # at once, before the end of the circuit was read

    async with hidden_nodes(authority, limits=RelayLimits(max_bytes=200000)) as (_gateway, one, two):
        two.handle(SINK, drop)
        for _ in range(10):
            stream = await one.open_stream(two.peer_id, [SINK])
            with pytest.raises(StreamResetError):
                while True:
                    await stream.send_all(bytes(50_000))


async def test_reservations_are_limited_and_renewals_always_succeed(authority: Any) -> None:
    async with hidden_nodes(authority, limits=RelayLimits(max_reservations=1), relay_circuit=False) as (
        gateway,
        one,
        two,
    ):
        statuses = [
            (await ask_hop(node, gateway.peer_id, HopMessage(type=HopKind.RESERVE))).status
            for node in (one, two, one, two)
        ]
        assert statuses == [Status.OK, Status.RESERVATION_REFUSED] * 2
        await gateway.disconnect(one.peer_id)
        assert (await ask_hop(two, gateway.peer_id, HopMessage(type=HopKind.RESERVE))).status == Status.OK


async def test_circuit_events_report_the_outcome(authority: Any) -> None:
    async with hidden_nodes(authority) as (gateway, one, two):
        two.handle(ECHO, echo)
        with gateway.events.follow(CircuitEnded) as ended:
            ends = aiter(ended)
            stream = await one.open_stream(two.peer_id, [ECHO])
            await stream.send_all(bytes(100_000))
            await stream.send_eof()
            assert len(await read_all(stream)) == 100_000
            await stream.aclose()
            await one.disconnect(two.peer_id)
            event = await next_event(ended, CircuitEnded)
            assert event.outcome == "done"
            assert event.moved > 200_000
            await ask_hop(one, gateway.peer_id, HopMessage(type=HopKind.CONNECT))
            assert await anext(ends) == CircuitEnded(one.peer_id, None, "refused")
            two._host.remove_stream_handler(TProtocol(STOP))
            with pytest.raises(UnreachableError, match="CONNECTION_FAILED"):
                await one.open_stream(two.peer_id, [ECHO])
            assert await anext(ends) == CircuitEnded(one.peer_id, two.peer_id, "refused")


async def test_closing_one_of_two_circuits_to_a_node_leaves_the_other_open(authority: Any) -> None:
    async with hidden_nodes(authority) as (gateway, one, two):
        taken: list[Stream] = []

        async def take(stream: Stream) -> None:
            await read_message(stream, StopMessage)
            await write_message(stream, StopMessage(type=StopKind.STATUS, status=Status.OK))
            taken.append(stream)
            await anyio.sleep_forever()

        two.handle(STOP, take)
        first, _ = await circuit(one, gateway, two.peer_id)
        second, _ = await circuit(one, gateway, two.peer_id)
        await first.reset()
        with pytest.raises(StreamResetError):
            await taken[0].receive_some()
        await second.send_all(b"goes on")
        assert await taken[1].receive_some() == b"goes on"
        await taken[1].send_all(b"both ways")
        assert await second.receive_some() == b"both ways"
        await second.send_eof()
        assert await taken[1].receive_some() == b""
        await taken[1].send_all(b"half closed")
        assert await second.receive_some() == b"half closed"


@pytest.mark.nightly
async def test_a_large_file_is_transferred_through_a_circuit(authority: Any, tmp_path: Path) -> None:
    """64 MiB with its digest: by default a gateway does not limit circuits to 128 MiB or 10 minutes."""
    source, target = tmp_path / "source", tmp_path / "target"
    with source.open("wb") as file:
        for number in range(64):
            file.write(number.to_bytes(2, "big") * (1 << 19))
    async with hidden_nodes(authority) as (_gateway, one, two):
        size, digest = await transfer.describe(source)

        async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource:
            return transfer.PullSource(source, digest)

        transfer.serve_pulls(two, resolve)
        pulled = await transfer.pull(one, two.peer_id, PullRequest(dataset="d", index=0), target, digest=digest)
        assert pulled.size == size == 64 << 20
        assert not one.is_direct(two.peer_id)
    assert target.read_bytes() == source.read_bytes()


async def test_a_relay_grants_more_than_four_reservations(authority: Any) -> None:
    async with open_gateway(authority) as gateway, AsyncExitStack() as stack:
        nodes = [
            await stack.enter_async_context(open_node(authority, f"n{n}", "worker", gateway=gateway)) for n in range(7)
        ]
        await until(lambda: all(node.addresses for node in nodes), 15)
        nodes[6].handle(ECHO, echo)
        await (await nodes[5].open_stream(nodes[6].peer_id, [ECHO])).aclose()


async def test_a_circuit_is_upgraded_to_a_direct_connection_for_new_streams(authority: Any) -> None:
    async with (
        open_gateway(authority) as gateway,
        open_node(authority, "one", "worker", gateway=gateway, listen_addresses=(LOOPBACK,)) as one,
        open_node(authority, "two", "worker", gateway=gateway, listen_addresses=(LOOPBACK,)) as two,
    ):
        two.handle(ECHO, echo)
        with anyio.fail_after(15), two.events.follow(HolePunched) as punched:
            await until(lambda: any("p2p-circuit" in address for address in two.addresses), 15)
            [circuit] = [address for address in two.addresses if "p2p-circuit" in address]
            await one.connect(circuit)
            event = await next_event(punched, HolePunched)
            assert (event.peer, event.outcome) == (one.peer_id, "direct")
            await until(lambda: one.is_direct(two.peer_id), 15)
            before = gateway.traffic.received
            stream = await one.open_stream(two.peer_id, [ECHO])
            await stream.send_all(bytes(1 << 20))
            await stream.send_eof()
            assert len(await read_all(stream)) == 1 << 20
            assert gateway.traffic.received - before < 1 << 19


async def test_the_circuit_stays_in_use_if_no_direct_connection_succeeds(authority: Any) -> None:
    async with hidden_nodes(authority) as (_gateway, one, two):
        two.handle(ECHO, echo)
        with two.events.follow(HolePunched) as punched:
            stream = await one.open_stream(two.peer_id, [ECHO])
            event = await next_event(punched, HolePunched)
            assert (event.peer, event.outcome) == (one.peer_id, "failed")
            await stream.send_all(b"goes on")
            await stream.send_eof()
            assert await read_all(stream) == b"goes on"
        assert not two.is_direct(one.peer_id)
        one._host.remove_stream_handler(TProtocol(DCUTR))
        await one.disconnect(two.peer_id)
        with two.events.follow(HolePunched) as punched:
            await (await one.open_stream(two.peer_id, [ECHO])).aclose()
            event = await next_event(punched, HolePunched)
            assert event.outcome == "unsupported"


@pytest.mark.parametrize("rubbish", [b"", b"\x02\x08\x05", b"\x05\xff\xff\xff\xff\xff", b"\x03\x08\xac\x02"])
async def test_a_malformed_hole_punch_message_resets_its_stream(authority: Any, rubbish: bytes, caplog: Any) -> None:
    async with hidden_nodes(authority) as (_gateway, one, two):
        stream = await one.open_stream(two.peer_id, [DCUTR])
        await stream.send_all(rubbish)
        await stream.send_eof()
        with pytest.raises(StreamResetError):
            await read_all(stream)
        two.handle(ECHO, echo)
        await (await one.open_stream(two.peer_id, [ECHO])).aclose()
    assert "Traceback" not in caplog.text


HOUR = 3600.0
NOW = 1_800_000_000.0


async def no_circuit(_circuit: CircuitConnection, _source: PeerId) -> None:
    raise AssertionError("nobody is called")


async def ignore_announcement(_gateway: PeerId) -> None:
    """Announce nothing."""


async def hold_reservation(skew: float, lifetime: float, *, ours: bool) -> tuple[int, int]:
    """Hold a reservation for three hours; return the number of requests, and of minutes without reservation."""
    limits = RelayLimits(reservation_lifetime=lifetime)
    hop = RelayServer(Present(everybody=True), limits, Events(), lambda: NOW + anyio.current_time())
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


@pytest.mark.parametrize(("excluded", "outcome"), [("127.0.0.0/8", "failed"), ("10.0.0.0/8", "direct")])
async def test_hole_punching_to_a_host_name_respects_exclude_cidr(
    authority: Any, monkeypatch: pytest.MonkeyPatch, excluded: str, outcome: str
) -> None:
    monkeypatch.setattr(dcutr, "PUNCH_TIMEOUT", 0.3)
    port = free_port()
    async with open_gateway(authority) as gateway:
        joined = (gateway.addresses[0],)
        named = EndpointSettings(
            (f"/ip4/127.0.0.1/tcp/{port}",), (f"/dns4/localhost/tcp/{port}",), gateway_addresses=joined
        )
        async with (
            open_endpoint(authority.identity("named"), named) as target,
            open_node(authority, "careful", gateway_addresses=joined, exclude_cidr=(excluded,)) as careful,
        ):
            for node in (target, careful):
                await until(lambda node=node: any("p2p-circuit" in each for each in node.addresses))  # type: ignore[misc]
            with careful.events.follow(HolePunched) as punched:
                await target.connect(careful.addresses[0])
                told = await next_event(punched, HolePunched)
            assert (told.peer, told.outcome) == (target.peer_id, outcome)
            assert careful.is_direct(target.peer_id) is (outcome == "direct")


class Alone:
    """An endpoint without connections."""

    def is_direct(self, _peer: Any) -> bool:
        return False


@pytest.mark.virtual_clock
async def test_a_peer_can_make_a_node_dial_only_a_few_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request at a time, a few addresses each, with growing pauses: third parties cannot be flooded."""
    knocks = 0
    meet = dcutr.trio.socket.socket

    def counted(*args: Any) -> Any:
        nonlocal knocks
        knocks += 1
        return meet(*args)

    monkeypatch.setattr(dcutr.trio.socket, "socket", counted)
    monkeypatch.setattr(dcutr, "PUNCH_TIMEOUT", 1.0)

    async def none(*_args: Any) -> None:
        raise AssertionError("nobody answers")

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        victim = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}"
        network = MemoryNetwork()
        async with network.endpoint("node") as node, network.endpoint("peer") as peer:
            puncher = HolePuncher(
                Alone(),  # type: ignore[arg-type]
                Events(),
                candidates=lambda: (f"/ip4/127.0.0.1/tcp/{free_port()}",),
                known=lambda _peer: (),
                dialable=lambda addresses: [str(Multiaddr(address)) for address in addresses],
                dial_known=none,
                upgrade=none,
            )
            node.handle(PROTOCOL, puncher.serve)

            async def ask() -> bool:
                """Return whether the request was served, as far as the peer can see."""
                stream = await peer.open_stream(node.peer_id, [PROTOCOL])
                try:
                    await write_message(stream, HolePunch(type=CONNECT, addresses=[Multiaddr(victim).to_bytes()]))
                    if await read_message(stream, HolePunch) is None:
                        return False
                    await write_message(stream, HolePunch(type=SYNC))
                    await stream.receive_some()
                except (StreamResetError, TransferError):
                    return False
                return True

            async with anyio.create_task_group() as tasks:
                answers: list[bool] = []

                async def note() -> None:
                    answers.append(await ask())

                for _ in range(10):
                    tasks.start_soon(note)
            assert sorted(answers) == [False] * 9 + [True]
            assert 3 <= knocks <= 12
            assert await ask()
