"""Wire compatibility with rust-libp2p, byte for byte, in both directions, with a scripted peer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
from multiaddr import Multiaddr
from support.endpoint_helpers import publish_until_heard
from support.gateways import LOOPBACK, open_gateway, open_node
from support.node_processes import crew
from support.waiting import until
from support.wire_peer import IDENTIFY, Stream, WirePeer, dial, field, fields, line, speak, varint

from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_proto.ids import PeerId

KAD, HOP, STOP = "/ipfs/kad/1.0.0", "/libp2p/circuit/relay/0.2.0/hop", "/libp2p/circuit/relay/0.2.0/stop"
PULL, ECHO = "/hypha-tensor-stream/pull", "/test/echo/1"
PUT_VALUE, GET_VALUE, ADD_PROVIDER, GET_PROVIDERS, FIND_NODE = range(5)


@asynccontextmanager
async def gateway_and_leaf(authority: Any, **about: Any) -> AsyncIterator[tuple[Libp2pEndpoint, Libp2pEndpoint]]:
    """Open a gateway and a connected leaf."""
    async with (
        open_gateway(authority, **about) as gateway,
        open_node(authority, "leaf", "worker", gateway=gateway, listen_addresses=(LOOPBACK,)) as leaf,
    ):
        await leaf.wait_for_gateway(10)
        await until(lambda: bool(gateway._known_peers()) and bool(gateway._known_peers()[0].addresses))
        yield gateway, leaf


def multiaddr(text: str) -> bytes:
    return Multiaddr(text).to_bytes()


def ask(kind: int, key: bytes, record: bytes = b"") -> bytes:
    """Encode a Kademlia message as prost does: a type of 0 is omitted."""
    return (field(1, kind) if kind else b"") + (field(3, record) if record else b"") + field(2, key) + field(10, 1)


def closer_peers(answer: bytes) -> dict[bytes, list[bytes]]:
    """Return the peers in an answer with their addresses."""
    peers = [fields(peer) for peer in fields(answer).get(8, [])]
    return {peer[1][0]: peer.get(2, []) for peer in peers}


async def test_identify_reports_the_configured_external_addresses(authority: Any) -> None:
    outside = "/dns4/gateway.example/tcp/4001"
    async with open_gateway(authority, external_addresses=(outside,)) as gateway:
        async with speak(await dial(gateway.addresses[1]), authority.identity("rust", "worker")) as rust:
            stream = await rust.open(IDENTIFY)
            said = fields(await stream.message())
            assert await stream.read_all() == b""
        assert said[1] == [b"\x08\x01\x12\x20" + gateway.peer_id.public_key]
        assert multiaddr(outside) == said[2][0].partition(multiaddr(f"/p2p/{gateway.peer_id}"))[0]
        assert {KAD.encode(), HOP.encode(), b"/meshsub/1.1.0", b"/ipfs/id/push/1.0.0"} <= set(said[3])
        assert STOP.encode() not in said[3]
        assert said[5] == [b"/hypha-identify/0.0.1"]
        assert said[6][0].startswith(b"hypha-python/")


# ------------------------------------------------------------------------------------------------------------------ DHT


async def test_find_node_before_a_dial_always_returns_the_peer(authority: Any) -> None:
    async with gateway_and_leaf(authority) as (gateway, leaf):
        identity = authority.identity("rust", "worker")
        own = multiaddr("/ip4/127.0.0.1/tcp/4999")
        async with speak(await dial(gateway.addresses[0]), identity, addresses=[own]) as rust:
            for key in (identity.peer_id.raw, leaf.peer_id.raw, b"x", bytes(60), b"k" * 300):
                answer, rest = await rust.ask(KAD, ask(FIND_NODE, key))
                assert rest == b""  # one answer, then the end of the stream
                assert list(closer_peers(answer)) == [leaf.peer_id.raw]  # not the requesting peer itself
                direct = leaf.addresses[0].partition("/p2p/")[0]
                addresses = [str(Multiaddr(address)) for address in closer_peers(answer)[leaf.peer_id.raw]]
                assert any(address.partition("/p2p/")[0] == direct for address in addresses)
            await until(lambda: len(gateway._known_peers()) == 2)
            found = await leaf._dht.find_addresses(identity.peer_id, 5)
            assert found == [own]
            await rust.drop()  # as for an idle connection
        await until(lambda: identity.peer_id not in gateway.connected_peers())
        assert await leaf._dht.find_addresses(identity.peer_id, 5) == []


async def test_put_records_are_echoed_and_found_with_their_publisher(authority: Any) -> None:
    async with gateway_and_leaf(authority) as (gateway, leaf):
        identity = authority.identity("rust", "data")
        async with speak(await dial(gateway.addresses[0]), identity) as rust:
            for key in (b"mnist", b"m", b"m" * 60):
                for number in (2, 3):
                    value = b'{"num_slices":%d}' % number
                    publisher = field(666, identity.peer_id.raw) + field(777, 3600)
                    record = field(1, key) + field(2, value) + publisher
                    answer, rest = await rust.ask(KAD, ask(PUT_VALUE, key, record))
                    assert rest == b""
                    assert fields(answer)[2] == [key]
                    assert fields(fields(answer)[3][0]) == fields(record)
                    [found] = await leaf.find_records(key)
                    assert (found.value, found.publisher) == (value, identity.peer_id)
                    answer, _ = await rust.ask(KAD, ask(GET_VALUE, key))
                    got = fields(fields(answer)[3][0])
                    assert (got[1], got[2], got[666]) == ([key], [value], [identity.peer_id.raw])
                    assert 3590 <= got[777][0] <= 3600
                    assert closer_peers(answer)  # closer peers as well
            stream = await rust.open(KAD)
            await stream.say(ask(ADD_PROVIDER, b"mnist"))
            await stream.half_close()
            assert await stream.read_all() == b""  # no answer


async def test_peer_addresses_are_kept_longer_than_two_hours(authority: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """py-libp2p forgets them after 7,200 s; gossip, which carries addresses too, must not restore that limit."""
    async with gateway_and_leaf(authority) as (gateway, leaf), gateway.subscribe("t") as heard, leaf.subscribe("t"):
        await until(lambda: gateway.peer_id in leaf.topic_peers("t"))
        await publish_until_heard(leaf, "t", b"x", heard, 30)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 3 * 3600)
        async with speak(await dial(gateway.addresses[0]), authority.identity("rust", "worker")) as rust:
            answer, _ = await rust.ask(KAD, ask(FIND_NODE, b"key"))
        assert closer_peers(answer)[leaf.peer_id.raw]
        assert gateway.connected_peers()[leaf.peer_id].addresses


# ---------------------------------------------------------------------------------------------------------------- relay


def connect_to(peer: PeerId) -> bytes:
    return field(1, 1) + field(2, field(1, peer.raw))


async def test_a_reservation_has_addresses_and_ends_with_the_connection(authority: Any) -> None:
    async with gateway_and_leaf(authority) as (gateway, leaf):
        identity = authority.identity("rust", "worker")
        async with speak(await dial(gateway.addresses[0]), identity) as rust:
            for _ in range(5):  # renewals
                answer, rest = await rust.ask(HOP, field(1, 0) + field(2, field(1, leaf.peer_id.raw)))
                assert rest == b""  # no further message
                got = fields(answer)
                assert (got[1], got[5]) == ([2], [100])
                reservation = fields(got[3][0])
                assert multiaddr(gateway.addresses[0]) in reservation[2]
                assert reservation[1][0] > time.time() + 1800
                assert 4 not in got  # no limit
            assert gateway._relay_server is not None
            assert gateway._relay_server.has_reservation(identity.peer_id)
            await rust.drop()
        await until(lambda: not gateway._relay_server.has_reservation(identity.peer_id))  # type: ignore[union-attr]
        async with speak(await dial(gateway.addresses[0]), identity) as rust:
            assert not gateway._relay_server.has_reservation(identity.peer_id)
            answer, rest = await rust.ask(HOP, connect_to(identity.peer_id))
            assert (fields(answer)[5], rest) == ([204], b"")


async def test_a_node_behind_a_circuit_is_reachable_and_reaches_others(authority: Any) -> None:
    async with gateway_and_leaf(authority) as (gateway, leaf):
        identity = authority.identity("rust", "worker")
        circuits = [multiaddr(f"{gateway.addresses[0]}/p2p-circuit")]
        sources: list[bytes] = []

        async def echo(stream: Stream) -> None:
            await stream.send_all(await stream.read_all())
            await stream.half_close()

        async def stop(stream: Stream) -> None:
            request = fields(await stream.message())
            assert request.get(1, [0]) == [0]
            sources.append(fields(request[2][0])[1][0])
            await stream.say(field(1, 1) + field(4, 100))
            async with speak(stream, identity, opened=False, handlers={ECHO: echo}) as inner:
                await inner.closed.wait()

        about = {"addresses": circuits, "handlers": {STOP: stop}}
        async with speak(await dial(gateway.addresses[0]), identity, **about) as rust:
            answer, _ = await rust.ask(HOP, field(1, 0))
            assert fields(answer)[5] == [100]
            stream = await leaf.open_stream(identity.peer_id, [ECHO])
            await stream.send_all(b"end to end")
            await stream.send_eof()
            assert await stream.receive_some() == b"end to end"
            assert await stream.receive_some() == b""
            assert sources == [leaf.peer_id.raw]
            await leaf.disconnect(identity.peer_id)


async def test_a_circuit_opened_by_rust_libp2p_reaches_our_node(authority: Any) -> None:
    async with gateway_and_leaf(authority) as (gateway, leaf):

        async def greet(stream: Any) -> None:
            await stream.send_all(b"hello " + str(stream.peer).encode())

        leaf.handle(ECHO, greet)
        identity = authority.identity("rust", "worker")
        async with speak(await dial(gateway.addresses[0]), identity) as rust:
            circuit = await rust.open(HOP)
            await circuit.say(connect_to(leaf.peer_id))
            answer = fields(await circuit.message())
            assert (answer[1], answer[5]) == ([2], [100])
            async with speak(circuit, identity) as inner:
                stream = await inner.open(ECHO)
                await stream.half_close()
                assert await stream.read_all() == b"hello " + str(identity.peer_id).encode()


# --------------------------------------------------------------------------------------------------- idle connections


async def test_a_peer_that_closed_an_idle_connection_is_dialled_again(authority: Any) -> None:
    async with gateway_and_leaf(authority) as (gateway, leaf):
        identity = authority.identity("rust", "worker")
        dialled: list[WirePeer] = []

        async def greet(stream: Stream) -> None:
            await stream.send_all(b"hello")
            await stream.half_close()

        async def accept(transport: trio.SocketStream) -> None:
            async with speak(transport, identity, opened=False, handlers={ECHO: greet}) as peer:
                dialled.append(peer)
                await peer.closed.wait()

        async with trio.open_nursery() as tasks:
            [listener] = await tasks.start(partial(trio.serve_tcp, accept, 0, host="127.0.0.1"))
            port = listener.socket.getsockname()[1]
            own = multiaddr(f"/ip4/127.0.0.1/tcp/{port}")
            async with speak(await dial(gateway.addresses[0]), identity, addresses=[own]):
                for count in (1, 2):
                    stream = await leaf.open_stream(identity.peer_id, [ECHO])
                    assert await stream.receive_some() == b"hello"
                    await stream.aclose()
                    assert len(dialled) == count
                    await dialled[-1].drop()
                    await until(lambda: identity.peer_id not in leaf.connected_peers())
            tasks.cancel_scope.cancel()


async def test_if_the_gateway_forwards_no_gossip_topic_peers_are_dialled(authority: Any) -> None:
    """The peers that such a gateway reports are dialled."""
    identity = authority.identity("rust", "gateway")
    async with open_node(authority, "far", "worker", listen_addresses=(LOOPBACK,)) as far, far.subscribe("t") as heard:
        known = field(8, field(1, far.peer_id.raw) + field(2, multiaddr(far.addresses[0].partition("/p2p/")[0])))

        async def find(stream: Stream) -> None:
            while True:
                kind = fields(await stream.message())[1][0]
                await stream.say(field(1, kind) + known)

        async def accept(transport: trio.SocketStream) -> None:
            async with speak(transport, identity, opened=False, handlers={KAD: find}) as peer:
                await peer.closed.wait()

        async with trio.open_nursery() as tasks:
            [listener] = await tasks.start(partial(trio.serve_tcp, accept, 0, host="127.0.0.1"))
            address = f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}"
            async with (
                open_node(authority, "near", "worker", gateway_addresses=(address,)) as near,
                near.subscribe("t"),
            ):
                await until(lambda: far.peer_id in near.topic_peers("t"), 20)
                await publish_until_heard(near, "t", b"around", heard, 30)
            tasks.cancel_scope.cancel()


# ---------------------------------------------------------------------------------------------------- suspended gateway


@pytest.mark.nightly
@pytest.mark.timeout(150)
@pytest.mark.parametrize("seconds", [20, 45])
async def test_a_suspended_gateway_keeps_the_connections_of_waiting_nodes(
    authority: Any, tmp_path: Path, seconds: int
) -> None:
    async with crew(tmp_path / "nodes.log") as start:
        listening = {"listen_addresses": [LOOPBACK], "role": "gateway"}
        gateway = await start([authority.files("gateway", "gateway")], listening)
        [[address]] = (await gateway.opened())["addresses"]
        leaf = await start([authority.files("leaf", "worker")], {"gateway_addresses": [address]})
        await leaf.opened()
        await until(lambda: bool(leaf.of("state", topic=1)), 20)
        async with speak(await dial(address), authority.identity("rust", "worker")) as rust:
            await rust.ask(KAD, ask(FIND_NODE, b"key"))
            before = len(leaf.of("state"))
            gateway.stop()
            await anyio.sleep(seconds)
            gateway.go_on()
            back = await until(lambda: leaf.of("state")[-1]["topic"] == 1, 25)
            if seconds == 20:
                await anyio.sleep(3)
                assert len(leaf.of("state")) == before  # it never lost its gateway
            else:
                assert any(state["peers"] == 0 for state in leaf.of("state")[before:])
                print(f"\nback {back:.1f} s after the gateway went on")
            await anyio.sleep(3)  # a session that had counted the suspended time would close now
            assert not rust.closed.is_set()
            answer, _ = await rust.ask(KAD, ask(FIND_NODE, b"key"))
            assert closer_peers(answer)


def test_the_scripted_peer_encodes_the_documented_formats() -> None:
    assert varint(300) == b"\xac\x02"
    assert field(666, b"ab") == b"\xd2\x29\x02ab"
    assert fields(field(777, 3600) + field(2, b"x")) == {777: [3600], 2: [b"x"]}
    assert line("/tls/1.0.0") == b"\x0b/tls/1.0.0\n"
    assert IDENTIFY == "/ipfs/id/1.0.0"
