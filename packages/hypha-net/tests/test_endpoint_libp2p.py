"""The endpoint over py-libp2p: certificates, ports, gateway restarts, round trips, and patched library functions."""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import trio.testing
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify import identify
from libp2p.identity.identify_push import identify_push
from libp2p.identity.update import update_peerstore_from_identify
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.connection import swarm_connection
from libp2p.network.swarm import Swarm
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.pubsub import pubsub
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.rpc_queue import RpcQueue
from libp2p.pubsub.validators import signature_validator
from libp2p.tools.anyio_service.trio_manager import TrioManager
from libp2p.tools.anyio_service.trio_tasks import MAX_CHILDREN_TASKS
from libp2p.tools.timed_cache.last_seen_cache import LastSeenCache
from support.gateways import ECHO, LOOPBACK, Opener, open_gateway, open_node
from support.loopback_ports import free_port
from support.waiting import until
from support.wire_peer import dial, speak

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p import endpoint
from hypha_net._libp2p.endpoint import ROUND_TRIP_TIMEOUT, Libp2pEndpoint
from hypha_net.endpoint import Stream
from hypha_net.errors import NetError, RefusedError, UnreachableError
from hypha_net.identity import load_identity
from hypha_net.peer_names import known_name


async def test_a_peer_that_trusts_us_is_still_refused_when_we_do_not_trust_it(
    authority: Any, foreign_authority: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key, trust = foreign_authority.files("stranger")
    trust.write_bytes(trust.read_bytes() + authority.org.pem() + authority.root.pem())
    with caplog.at_level(logging.WARNING):
        async with (
            open_gateway(authority) as one,
            open_endpoint(load_identity(cert, key, trust), EndpointSettings()) as two,
        ):
            with pytest.raises(RefusedError, match="compare trust_pem of both nodes") as caught:
                await two.connect(one.addresses[0])
            await until(lambda: "from 127.0.0.1" in caplog.text)
            assert not one.connected_peers()
            assert not two.connected_peers()
    assert "the peer refused this node's certificate" in str(caught.value)
    assert "does not trust the CA" in str(caught.value)
    (line,) = [record.getMessage() for record in caplog.records if "from 127.0.0.1" in record.getMessage()]
    assert all(words in line for words in ("stranger", "other org", "12D3KooW", "compare trust_pem of both nodes")), (
        line
    )
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("revoked", [None, False, True], ids=["no lists", "lists", "revoked"])
async def test_a_trust_bundle_may_end_at_the_organisation(authority: Any, revoked: bool | None) -> None:
    def org_only(name: str, crls: Any = None) -> Any:
        cert, key, trust = authority.files(name)
        cert.write_bytes(cert.read_bytes().replace(authority.org.pem(), b""))  # the node's certificate only
        trust.write_bytes(authority.org.pem())
        return load_identity(cert, key, trust, crls)

    leaf = org_only("leaf")
    crls = None if revoked is None else authority.revocations(leaf.certificate.serial if revoked else 4711)
    gateway = org_only("gateway", crls)
    settings = EndpointSettings(listen_addresses=(LOOPBACK,), role="gateway")
    async with open_endpoint(gateway, settings) as one, open_endpoint(leaf, EndpointSettings()) as two:
        if revoked:
            with pytest.raises(RefusedError, match="revoked"):
                await two.connect(one.addresses[0])
        else:
            assert await two.connect(one.addresses[0]) == one.peer_id


@pytest.mark.parametrize("kind", ["dns", "dns4"])
async def test_host_names_are_resolved_by_the_system(authority: Any, kind: str) -> None:
    async with open_gateway(authority) as one, open_node(authority, "leaf") as two:
        port = one.addresses[0].split("/")[4]
        with pytest.raises(UnreachableError, match=r"nowhere\.invalid"):
            await two.connect(f"/{kind}/nowhere.invalid/tcp/{port}")
        assert await two.connect(f"/{kind}/localhost/tcp/{port}") == one.peer_id


async def test_connected_peers_hear_of_protocols_that_are_added(libp2p_opener: Opener) -> None:
    """A node that starts is dialled before its services have registered their handlers."""
    async with libp2p_opener(2) as (gateway, leaf):
        await until(lambda: bool(gateway.connected_peers()[leaf.peer_id].protocols))
        assert ECHO not in gateway.connected_peers()[leaf.peer_id].protocols
        leaf.handle(ECHO, Stream.aclose)
        await until(lambda: ECHO in gateway.connected_peers()[leaf.peer_id].protocols)


async def test_peer_info_contains_identify_and_certificate_data(libp2p_opener: Opener) -> None:
    async with libp2p_opener(2) as (gateway, leaf):
        await until(lambda: bool(leaf.connected_peers()[gateway.peer_id].agent))
        info = leaf.connected_peers()[gateway.peer_id]
        assert info.agent.startswith("hypha-python/")
        assert info.role == "gateway"
        assert info.certificate_not_after is not None
        assert known_name(gateway.peer_id) == info.certificate_name == "gateway"
        assert "/ipfs/kad/1.0.0" in info.protocols
        assert gateway.addresses[0].startswith(info.addresses[0])
        assert identify.PROTOCOL_VERSION == "/hypha-identify/0.0.1"
        assert leaf.traffic.sent > 0
        assert leaf.traffic.received > 0


async def test_nodes_restore_records_and_topics_after_a_gateway_restart(authority: Any) -> None:
    gateway = authority.identity("gateway", "gateway")
    settings = EndpointSettings(listen_addresses=(f"/ip4/127.0.0.1/tcp/{free_port()}",), role="gateway")
    node = EndpointSettings(listen_addresses=(LOOPBACK,), gateway_addresses=settings.listen_addresses)
    async with (
        open_endpoint(authority.identity("one"), node) as one,
        open_endpoint(authority.identity("two"), node) as two,
        one.subscribe("t") as heard,
    ):
        for value in (b"first", b"second"):
            async with open_endpoint(gateway, settings) as hub, hub.subscribe("t"):
                for leaf in (one, two):
                    await leaf.wait_for_gateway(15)
                if value == b"first":
                    await one.put_record(b"key", value)
                await until(lambda: two.find_records(b"key"), 15)
                await until(lambda: hub.peer_id in two.topic_peers("t"))
                await until(lambda: one.peer_id in hub.topic_peers("t"))
                await two.publish("t", value)
                with anyio.fail_after(15):
                    assert (await anext(heard)).data == value
            await until(lambda: not one.connected_peers().keys() & {gateway.peer_id})


async def test_an_endpoint_tells_which_of_its_gateways_is_connected(authority: Any) -> None:
    settings = EndpointSettings(listen_addresses=(f"/ip4/127.0.0.1/tcp/{free_port()}",), role="gateway")
    [address], silent = settings.listen_addresses, f"/ip4/127.0.0.1/tcp/{free_port()}"
    async with open_node(authority, "one", gateway_addresses=(silent, address)) as one:
        assert one.gateways() == {silent: None, address: None}
        async with open_endpoint(authority.identity("gateway", "gateway"), settings) as hub:
            assert hub.gateways() == {}
            await until(lambda: one.gateways() == {silent: None, address: hub.peer_id}, 15)
        await until(lambda: one.gateways() == {silent: None, address: None}, 15)


async def test_closing_ends_the_handlers_of_open_streams(libp2p_opener: Opener) -> None:
    held: set[Stream] = set()
    async with libp2p_opener(3) as nodes:
        gateway = nodes[0]

        async def hold(stream: Stream) -> None:
            held.add(stream)
            try:
                await anyio.sleep_forever()
            finally:
                held.remove(stream)

        gateway.handle(ECHO, hold)
        for leaf in nodes[1:]:
            for _ in range(10):
                await (await leaf.open_stream(gateway.peer_id, [ECHO])).send_all(b"x")
        await until(lambda: len(held) == 20)
    assert not held


# functions of py-libp2p 0.8.1 that are replaced or relied on: if one changes, review it before updating its hash
PATCHED: dict[str, tuple[Any, str]] = {
    "Swarm._handle_inbound_connection": (Swarm._handle_inbound_connection, "0800fdf9770ed8e6"),
    "Swarm._do_handle_inbound_connection": (Swarm._do_handle_inbound_connection, "c22fdfd5289f671c"),
    "Swarm.add_conn": (Swarm.add_conn, "d469d71b3ed1f4df"),
    "Swarm.remove_conn": (Swarm.remove_conn, "0a3e93157b1a04c3"),
    "Swarm.new_stream": (Swarm.new_stream, "125812a9745b972b"),
    "Swarm._select_connection": (Swarm._select_connection, "c2e8aec487d3b012"),
    "SwarmConn": (swarm_connection.SwarmConn, "5b5613ad6d1909c2"),
    "RpcQueue.__init__": (RpcQueue.__init__, "29b912ed933ac51f"),
    "RpcQueue.pop": (RpcQueue.pop, "58742c150a7cccd3"),
    "RpcQueue.close": (RpcQueue.close, "4bb966ac87afbe63"),
    "Pubsub.subscribe": (pubsub.Pubsub.subscribe, "935991d27b658c35"),
    "Pubsub.continuously_read_stream": (pubsub.Pubsub.continuously_read_stream, "ac0c4ad87ca39288"),
    "Pubsub.stream_handler": (pubsub.Pubsub.stream_handler, "4be06aba2f448b7b"),
    "Pubsub.push_msg": (pubsub.Pubsub.push_msg, "1531483ab4d77674"),
    "Pubsub._handle_dead_peer": (pubsub.Pubsub._handle_dead_peer, "10026d998d3016b4"),
    "Pubsub._handle_new_peer": (pubsub.Pubsub._handle_new_peer, "305ba4224e6151d7"),
    "Pubsub._handle_new_peer_with_retry": (pubsub.Pubsub._handle_new_peer_with_retry, "123bb71089592a00"),
    "Pubsub.handle_dead_peer_queue": (pubsub.Pubsub.handle_dead_peer_queue, "8071f96dbabdc7c8"),
    "Pubsub.publish": (pubsub.Pubsub.publish, "5e875e00e471afb8"),
    "Pubsub.handle_sending_messages": (pubsub.Pubsub.handle_sending_messages, "4eb0b978f9c4b142"),
    "Pubsub.write_msg": (pubsub.Pubsub.write_msg, "ee86b14b4181afff"),
    "GossipSub.publish": (GossipSub.publish, "b978282af46297f7"),
    "GossipSub.handle_rpc": (GossipSub.handle_rpc, "bb6f7311e2958a22"),
    "GossipSub._handle_dropped_rpc": (GossipSub._handle_dropped_rpc, "c81733f1db845ea1"),
    "LastSeenCache": (LastSeenCache, "233b00298cbbe12f"),
    "signature_validator": (signature_validator, "4ef201cd300c8e3e"),
    "BasicHost._identify_peer": (BasicHost._identify_peer, "a8e37ea32f624529"),
    "AutoConnector.maybe_connect": (AutoConnector.maybe_connect, "018fac95eafc2413"),
    "BasicHost.get_addrs": (BasicHost.get_addrs, "9d79f88eb0d4824b"),
    "update_peerstore_from_identify": (update_peerstore_from_identify, "aee0031d9166bd17"),
    "identify._mk_identify_protobuf": (identify._mk_identify_protobuf, "5361becff806511c"),
    "identify_push_handler_for": (identify_push.identify_push_handler_for, "d7fee29230fa505d"),
    "Multiselect.negotiate": (Multiselect.negotiate, "e870e3fe41c87e3c"),
    "MultiselectCommunicator": (MultiselectCommunicator, "839787d17af6f21c"),
    "TrioManager.__init__": (TrioManager.__init__, "fb0b775688db8266"),
}


@pytest.mark.parametrize("name", PATCHED)
def test_patched_functions_of_the_library_have_not_changed(name: str) -> None:
    function, known = PATCHED[name]
    found = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    assert found == known, (
        f"py-libp2p's {name} has changed: read its new source, decide whether what hypha_net._libp2p puts in its place "
        f"is still right (docs/libp2p.md), and only then write {found} here"
    )


@pytest.mark.parametrize("service", ["pubsub", "router", "swarm"])
async def test_a_failed_library_service_ends_the_endpoint_with_an_error(authority: Any, service: str) -> None:
    async def fail() -> None:
        raise RuntimeError("a fault of its own")

    with pytest.raises(NetError, match=r"the network engine failed: RuntimeError.'a fault of its own'"):
        async with open_node(authority, "node") as node:
            pubsub, router = node._gossip
            {"pubsub": pubsub, "router": router, "swarm": node._swarm}[service].manager.run_task(fail)
            await anyio.sleep_forever()


async def test_a_node_can_have_more_peers_than_the_librarys_task_limit(authority: Any) -> None:
    async with open_node(authority, "node") as node:
        manager = node._gossip[0].manager

        async def begin_many() -> None:
            for _ in range(MAX_CHILDREN_TASKS + 10):
                manager.run_task(anyio.sleep_forever)
            begun.set()

        begun = anyio.Event()
        manager.run_task(begin_many)
        await begun.wait()
        await anyio.sleep(0.1)
        assert manager.is_running


@asynccontextmanager
async def opened_leaf(authority: Any) -> AsyncIterator[Libp2pEndpoint]:
    async with open_node(authority, "leaf", "worker", listen_addresses=(LOOPBACK,)) as leaf:
        yield leaf


def test_a_peer_that_answers_no_ping_counts_as_connected_after_a_timeout_and_then_at_once(authority: Any) -> None:
    clock = trio.testing.MockClock(rate=1)

    async def main() -> None:
        identity = authority.identity("silent", "scheduler")
        async with opened_leaf(authority) as leaf, speak(await dial(leaf.addresses[0]), identity, answers_pings=False):
            peer = identity.peer_id
            await until(lambda: peer in leaf.connected_peers())
            clock.rate = 0  # from here on a wait ends with an event or a jump
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(leaf.connect_peer, peer)
                await anyio.wait_all_tasks_blocked()
                clock.jump(ROUND_TRIP_TIMEOUT)
            await leaf.connect_peer(peer)
            assert leaf.round_trip_time(peer) is None

    trio.run(main, clock=clock)


async def test_the_round_trip_of_a_connection_that_replaces_another_is_awaited(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "ROUND_TRIP_TIMEOUT", 3600.0)
    identity = authority.identity("peer", "scheduler")
    peer = identity.peer_id
    async with opened_leaf(authority) as leaf, anyio.create_task_group() as tasks:

        async def connect() -> None:
            await leaf.connect_peer(peer, timeout=3600)
            assert leaf.round_trip_time(peer) is not None
            tasks.cancel_scope.cancel()

        async with speak(await dial(leaf.addresses[0]), identity, answers_pings=False) as first:
            await until(lambda: peer in leaf.connected_peers())
            tasks.start_soon(connect)
            await anyio.wait_all_tasks_blocked()
            async with speak(await dial(leaf.addresses[0]), identity):
                await until(lambda: len(leaf._dialer.connections(peer)) == 2)
                await first.drop()
                await anyio.sleep_forever()


async def test_the_round_trip_is_known_while_a_new_connection_is_not_measured_yet(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "ROUND_TRIP_TIMEOUT", 3600.0)
    identity = authority.identity("peer", "scheduler")
    peer = identity.peer_id
    async with opened_leaf(authority) as leaf, speak(await dial(leaf.addresses[0]), identity):
        await until(lambda: leaf.round_trip_time(peer) is not None)
        async with speak(await dial(leaf.addresses[0]), identity, answers_pings=False):
            await until(lambda: len(leaf._dialer.connections(peer)) == 2)
            assert leaf.round_trip_time(peer) is not None
            await leaf.connect_peer(peer, timeout=3600)
        await until(lambda: len(leaf._dialer.connections(peer)) == 1)
        assert leaf.round_trip_time(peer) is not None


async def test_the_round_trip_of_a_relayed_connection_is_measured_end_to_end(authority: Any) -> None:
    async with open_gateway(authority) as gateway:
        settings = EndpointSettings(gateway_addresses=(gateway.addresses[0],))  # reachable by the relay only
        async with (
            open_endpoint(authority.identity("one", "worker"), settings) as one,
            open_endpoint(authority.identity("two", "worker"), settings) as two,
        ):
            await until(lambda: one.addresses and two.addresses)
            await one.connect_peer(two.peer_id)
            assert not one.is_direct(two.peer_id)
            assert one.round_trip_time(two.peer_id) is not None
            await until(lambda: two.round_trip_time(one.peer_id) is not None)
