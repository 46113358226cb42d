"""Real rust-libp2p against real daemons and endpoints of ours. See README.md; not collected by default."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

import anyio
import pytest
from interop import ours
from interop.authority import Authority
from interop.rust_peer import RustError, RustPeer, rust_peer
from support.loopback_ports import free_port
from support.waiting import until

from hypha_net import rpc
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net.errors import RefusedError, StreamResetError, UnreachableError
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_LEASE, RenewalFailed, RenewLease

Certify = Callable[..., Path]
MIB = 1 << 20
TOPIC = "hypha/worker"

pytestmark = pytest.mark.timeout(300, func_only=True)  # the build of the peer takes longer


def bare(address: str) -> str:
    """An address without its last ``/p2p/``, as libp2p's identify hands it on."""
    return address.rpartition("/p2p/")[0]


@asynccontextmanager
async def pair(binary: Path, certify: Certify, **settings: object) -> AsyncIterator[tuple[RustPeer, Libp2pEndpoint]]:
    """A Rust peer and an endpoint of ours, not connected."""
    async with rust_peer(binary, certify("rust"), **settings) as rust, ours.leaf(certify("ours")) as own:
        yield rust, own


async def connect(rust: RustPeer, own: Libp2pEndpoint, *, rust_dials: bool) -> PeerId:
    if rust_dials:
        await rust.do("dial", address=own.addresses[0])
        await rust.until("connected", peer=str(own.peer_id))
    else:
        await own.connect(rust.address)
    peer = PeerId.parse(rust.id)
    await until(lambda: peer in own.connected_peers(), 15)
    return peer


# -------------------------------------------------------------------------------------- 1. transport and identify


@pytest.mark.parametrize("rust_dials", [True, False])
async def test_handshake_identify_and_ping(binary: Path, certify: Certify, rust_dials: bool) -> None:
    async with pair(binary, certify, ping=1.0) as (rust, own):
        peer = await connect(rust, own, rust_dials=rust_dials)
        seen = await rust.until("identified", peer=str(own.peer_id))
        assert seen["version"] == "/hypha-identify/0.0.1"
        assert seen["agent"].startswith("hypha-python/")
        assert bare(own.addresses[0]) in seen["addresses"]
        assert {"/ipfs/kad/1.0.0", "/meshsub/1.1.0", "/ipfs/ping/1.0.0"} <= set(seen["protocols"])
        await until(lambda: own.connected_peers()[peer].agent == "hypha-rust/0.0.1", 15)
        assert bare(rust.address) in own.connected_peers()[peer].addresses
        await rust.until("ping", count=3, peer=str(own.peer_id), error=None)
        assert not rust.of("identify_failed")


async def test_wrong_peer_id_is_refused(binary: Path, certify: Certify) -> None:
    async with pair(binary, certify) as (rust, own):
        other = ours.load_identity(*ours.files(certify("other"))).peer_id
        await rust.do("dial", address=own.addresses[0].replace(str(own.peer_id), str(other)))
        assert "peer" in (await rust.until("dial_failed"))["error"].lower()
        with pytest.raises(UnreachableError):
            await own.connect(rust.address.replace(rust.id, str(other)))


async def test_gateway_daemon_answers_a_rust_peer(binary: Path, certify: Certify) -> None:
    async with (
        ours.gateway(certify("gate", "gateway"), free_port()) as gate,
        rust_peer(binary, certify("rust", "worker"), ping=1.0) as rust,
    ):
        await rust.do("dial", address=gate.address)
        seen = await rust.until("identified", peer=str(gate.id))
        assert bare(gate.address) in seen["addresses"]
        assert "/libp2p/circuit/relay/0.2.0/hop" in seen["protocols"]
        await rust.until("ping", count=2, peer=str(gate.id), error=None)
        assert await rust.do("health", peer=str(gate.id)) is True


@pytest.mark.parametrize("reason", ["unknown CA", "revoked"])
@pytest.mark.parametrize("bad", ["Rust", "ours"])
async def test_who_is_not_trusted_is_refused_both_ways(
    binary: Path, authority: Authority, reason: str, bad: str
) -> None:
    if reason == "revoked":
        prefix = authority.node("bad")
        good = authority.node("good")
        authority.revoke(prefix)
    else:
        prefix = Authority(authority.folder.parent / "other").node("bad")
        good = authority.node("good")
    rusts, own_prefix = (prefix, good) if bad == "Rust" else (good, prefix)
    crls = own_prefix.with_name(f"{own_prefix.name}-crls.pem")
    identity = ours.load_identity(*ours.files(own_prefix), crls)
    settings = ours.EndpointSettings(listen_addresses=(ours.LOOPBACK,))
    async with rust_peer(binary, rusts) as rust, ours.open_endpoint(identity, settings) as own:
        with pytest.raises(RefusedError) as refusal:
            await own.connect(rust.address)
        print(f"\n{bad} {reason}, ours dials:", refusal.value)
        print("Rust, dialled:", (await rust.until("refused"))["detail"])
        await rust.do("dial", address=own.addresses[0])
        await until(lambda: rust.of("dial_failed") or rust.of("closed"), 15)
        print("Rust dials:", rust.of("dial_failed") or rust.of("closed"))
        assert not own.connected_peers()
        assert not await rust.do("connected")


# --------------------------------------------------------------------------------------------------- 2. streams


@pytest.mark.parametrize("rust_dials", [True, False])
async def test_large_streams_both_ways(binary: Path, certify: Certify, rust_dials: bool) -> None:
    async with pair(binary, certify) as (rust, own):
        peer = await connect(rust, own, rust_dials=rust_dials)
        size = 64 * MIB
        for what in ("send", "receive"):
            began = time.monotonic()
            assert await rust.do(what, peer=str(own.peer_id), size=size, timeout=100) == size
            print(f"Rust {what}: {64 / (time.monotonic() - began):.0f} MiB/s")
        for name, ask in (("send", ours.send), ("receive", ours.receive)):
            began = time.monotonic()
            assert await ask(own, peer, size) == size
            print(f"ours {name}: {64 / (time.monotonic() - began):.0f} MiB/s")


@pytest.mark.parametrize("rust_dials", [True, False])
async def test_300_streams_at_once(binary: Path, certify: Certify, rust_dials: bool) -> None:
    async with pair(binary, certify) as (rust, own):
        peer = await connect(rust, own, rust_dials=rust_dials)
        assert await rust.do("many", peer=str(own.peer_id), count=300, size=100_000, timeout=60) == 300
        assert await ours.many(own, peer, 300, 100_000) == 300


async def test_resets_are_seen_as_such(binary: Path, certify: Certify) -> None:
    async with pair(binary, certify) as (rust, own):
        peer = await connect(rust, own, rust_dials=True)
        with pytest.raises(RustError, match=r"ConnectionReset|BrokenPipe|reset"):
            await rust.do("be_reset", peer=str(own.peer_id))
        stream = await own.open_stream(peer, [ours.RESET])
        await stream.send_all(b"x")
        with pytest.raises(StreamResetError):
            await stream.receive_some()
        assert await ours.many(own, peer, 1, 1000) == 1


async def test_silent_connection_with_a_stream_lives_by_pings(binary: Path, certify: Certify) -> None:
    """Rust pings seldom, so that only our keepalive asks (after 15 s of silence); then a Rust stream ends cleanly."""
    async with pair(binary, certify, ping=1000.0) as (rust, own):
        await connect(rust, own, rust_dials=True)
        assert await rust.do("hold", peer=str(own.peer_id), seconds=40.0, timeout=60) == 1
        assert not rust.of("closed")


async def test_idle_connection(binary: Path, certify: Certify) -> None:
    """What libp2p's idle timeout of 10 s does with a connection that has only protocols which keep none."""
    async with pair(binary, certify, idle=2.0) as (rust, own):
        peer = await connect(rust, own, rust_dials=True)
        await anyio.sleep(8)
        print("after the idle timeout:", rust.of("closed"), peer in own.connected_peers())
        if rust.of("closed"):
            assert await ours.many(own, peer, 1, 10) == 1  # dialled again at the address that identify told
            await rust.until("connected", count=2, peer=str(own.peer_id))


# ---------------------------------------------------------------------------------------------------- 3. gossip


async def test_gossip_passes_through_our_gateway_also_after_its_restart(binary: Path, certify: Certify) -> None:
    async with (
        ours.gateway(certify("gate", "gateway"), free_port()) as gate,
        rust_peer(binary, certify("one")) as one,
        rust_peer(binary, certify("two")) as two,
        ours.leaf(certify("ours"), gate.address) as own,
        own.subscribe(TOPIC) as messages,
    ):
        for rust in (one, two):
            await rust.do("subscribe", topic=TOPIC)
            await rust.do("dial", address=gate.address)
        for again in range(2):
            for rust in (one, two):
                await rust.until("subscribed", count=1 + again, peer=str(gate.id), topic=TOPIC)
                with anyio.fail_after(15):
                    while str(gate.id) not in await rust.do("mesh", topic=TOPIC):
                        await anyio.sleep(0.1)
            await until(lambda: gate.id in own.topic_peers(TOPIC), 15)
            await anyio.sleep(2)
            await one.do("publish", topic=TOPIC, data=f"from rust {again}")
            heard = await two.until("heard", data=f"from rust {again}")
            assert heard["source"] == one.id
            with anyio.fail_after(10):
                message = await anext(messages)
            assert (str(message.source), message.data.decode()) == (one.id, f"from rust {again}")
            await own.publish(TOPIC, f"from python {again}".encode())
            for rust in (one, two):
                assert (await rust.until("heard", data=f"from python {again}"))["source"] == str(own.peer_id)
            if not again:
                await gate.kill()
                for rust in (one, two):
                    await rust.until("closed", peer=str(gate.id))
                await gate.start()
                await until(lambda: gate.id in own.connected_peers(), 30)
                for rust in (one, two):
                    await rust.do("dial", address=gate.address)
        assert len(one.of("heard")) == 2
        assert len(two.of("heard")) == 4


async def test_gossip_of_more_rust_peers_than_a_mesh_has(binary: Path, certify: Certify) -> None:
    async with ours.gateway(certify("gate", "gateway"), free_port()) as gate, anyio.create_task_group() as tasks:
        rusts: list[RustPeer] = []
        stop = anyio.Event()

        async def keep(number: int) -> None:
            async with rust_peer(binary, certify(f"rust{number}")) as rust:
                await rust.do("subscribe", topic=TOPIC)
                await rust.do("dial", address=gate.address)
                await rust.until("subscribed", peer=str(gate.id))
                rusts.append(rust)
                await stop.wait()

        for number in range(14):
            tasks.start_soon(keep, number)
        await until(lambda: len(rusts) == 14, 60)
        await anyio.sleep(4)
        for number, rust in enumerate(rusts):
            await rust.do("publish", topic=TOPIC, data=f"number {number}")
        for number in range(14):
            for rust in rusts[:number] + rusts[number + 1 :]:
                await rust.until("heard", data=f"number {number}")
        assert all(len(rust.of("heard")) == 13 for rust in rusts)
        stop.set()


# ------------------------------------------------------------------------------------------------- 4. directory


async def test_directory_with_a_rust_client(binary: Path, certify: Certify) -> None:
    async with (
        ours.gateway(certify("gate", "gateway"), free_port()) as gate,
        rust_peer(binary, certify("one")) as one,
        rust_peer(binary, certify("two")) as two,
        ours.leaf(certify("ours"), gate.address) as own,
    ):
        for rust in (one, two):
            await rust.do("dial", address=gate.address)
            await rust.until("routed", peer=str(gate.id))
            await rust.do("bootstrap")
        # a Rust node learns our leaf's address and dials it, by its own doing
        found = dict(await one.do("closest", peer=str(own.peer_id)))
        assert any(address in own.addresses[0] for address in found[str(own.peer_id)]), found
        await one.until("connected", peer=str(own.peer_id), relayed=False, dialled=True)
        # records: plain key, publisher, ttl, update
        for number in (3, 5):
            value = json.dumps({"num_slices": number})
            assert await one.do("put", key="mnist", value=value, ttl=600.0) == "stored"
            got = await two.do("get", key="mnist")
            assert (got["value"], got["publisher"]) == (value, one.id)
            assert 500 < got["ttl"] <= 600
            [record] = await own.find_records(b"mnist")
            assert (record.value.decode(), str(record.publisher)) == (value, one.id)
        await own.put_record(b"cifar", b'{"num_slices": 2}', ttl=60)
        got = await two.do("get", key="cifar")
        assert (got["value"], got["publisher"]) == ('{"num_slices": 2}', str(own.peer_id))
        assert 50 < got["ttl"] <= 60
        with pytest.raises(RustError, match="not found"):
            await two.do("get", key="nothing")
        # and over a restart of the gateway
        await gate.kill()
        await gate.start()
        await two.until("closed", peer=str(gate.id))
        await two.do("dial", address=gate.address)
        await two.until("connected", count=2, peer=str(gate.id))
        assert (await two.do("get", key="mnist"))["publisher"] == one.id


# ----------------------------------------------------------------------------------------------------- 5. relay


async def test_rust_peer_is_reached_through_our_relay(binary: Path, certify: Certify) -> None:
    async with (
        ours.gateway(certify("gate", "gateway"), free_port()) as gate,
        rust_peer(binary, certify("hidden"), listen=[]) as hidden,
        rust_peer(binary, certify("other"), listen=[]) as other,
        ours.leaf(certify("ours"), gate.address) as own,
    ):
        await hidden.do("listen", address=f"{gate.address}/p2p-circuit")
        reserved = await hidden.until("reserved", relay=str(gate.id))
        assert reserved["limit"] is None or "None" in reserved["limit"]
        peer = PeerId.parse(hidden.id)
        assert await ours.send(own, peer, 4 * MIB) == 4 * MIB
        assert await ours.receive(own, peer, 4 * MIB) == 4 * MIB
        assert not own.is_direct(peer)
        await hidden.until("circuit_in", peer=str(own.peer_id))
        assert await hidden.do("send", peer=str(own.peer_id), size=MIB) == MIB
        await other.do("dial", address=f"{gate.address}/p2p-circuit/p2p/{hidden.id}")
        await other.until("connected", peer=hidden.id)
        assert await other.do("send", peer=hidden.id, size=4 * MIB) == 4 * MIB


async def test_our_leaf_is_reached_by_rust_through_our_relay(binary: Path, certify: Certify) -> None:
    async with (
        ours.gateway(certify("gate", "gateway"), free_port()) as gate,
        ours.leaf(certify("hidden"), gate.address, listen_addresses=()) as hidden,
        rust_peer(binary, certify("rust"), listen=[]) as rust,
    ):
        await until(lambda: any("p2p-circuit" in address for address in hidden.addresses), 15)
        await rust.do("dial", address=gate.address)
        await rust.until("routed", peer=str(gate.id))
        found = dict(await rust.do("closest", peer=str(hidden.peer_id)))
        circuits = [address for address in found[str(hidden.peer_id)] if "p2p-circuit" in address]
        assert circuits, found
        await rust.do("dial", address=hidden.addresses[0])
        await rust.until("connected", peer=str(hidden.peer_id), relayed=True)
        seen = await rust.until("identified", peer=str(hidden.peer_id))
        assert bare(hidden.addresses[0]) in seen["addresses"], seen
        assert await rust.do("send", peer=str(hidden.peer_id), size=4 * MIB) == 4 * MIB
        assert await rust.do("receive", peer=str(hidden.peer_id), size=4 * MIB) == 4 * MIB
        with pytest.raises(RustError):
            await rust.do("send", peer=str(ours.load_identity(*ours.files(certify("absent"))).peer_id), size=1)


async def test_our_leaves_use_a_rust_relay_with_stock_limits(binary: Path, certify: Certify) -> None:
    async with rust_peer(binary, certify("relay"), relay=True, kad_server=True) as relay:
        await relay.do("external", address=relay.address.split("/p2p/")[0])
        async with (
            ours.leaf(certify("hidden"), relay.address, listen_addresses=()) as hidden,
            ours.leaf(certify("ours"), relay.address) as own,
        ):
            await until(lambda: any("p2p-circuit" in address for address in hidden.addresses), 20)
            assert await ours.send(own, hidden.peer_id, 20_000) == 20_000
            assert not own.is_direct(hidden.peer_id)
            # the relay's own limit: 128 KiB a circuit. It ends the circuit, and another one is made
            with pytest.raises((StreamResetError, UnreachableError)):
                await ours.send(own, hidden.peer_id, 400_000)
            with anyio.fail_after(20):
                assert await ours.send(own, hidden.peer_id, 20_000) == 20_000


async def test_our_leaves_live_with_a_rust_gateway(binary: Path, certify: Certify) -> None:
    """Which serves directory and relay and, as the gateways in the field, is not in our topic."""
    async with rust_peer(binary, certify("gate"), relay=True, kad_server=True) as gate:
        await gate.do("external", address=bare(gate.address))
        async with (
            ours.leaf(certify("one"), gate.address) as one,
            ours.leaf(certify("two"), gate.address) as two,
            one.subscribe(TOPIC),
            two.subscribe(TOPIC) as messages,
        ):
            await one.put_record(b"mnist", b'{"num_slices": 3, "seq": 1}', ttl=60)
            await two.put_record(b"mnist", b'{"num_slices": 4, "seq": 2}', ttl=60)
            found = {record.publisher: record.value for record in await two.find_records(b"mnist")}
            assert found == {
                one.peer_id: b'{"num_slices": 3, "seq": 1}',
                two.peer_id: b'{"num_slices": 4, "seq": 2}',
            }
            await until(lambda: two.peer_id in one.topic_peers(TOPIC), 60)
            await anyio.sleep(2)
            await one.publish(TOPIC, b"past a gateway that forwards nothing")
            with anyio.fail_after(10):
                assert (await anext(messages)).source == one.peer_id
            assert await ours.send(one, two.peer_id, MIB) == MIB


async def test_limits_of_our_relay_are_told_to_rust_and_kept(binary: Path, certify: Certify) -> None:
    limits = "[relay]\nmax_bytes = 200000\nmax_duration = 60\n"
    async with (
        ours.gateway(certify("gate", "gateway"), free_port(), limits) as gate,
        rust_peer(binary, certify("hidden"), listen=[]) as hidden,
        rust_peer(binary, certify("other"), listen=[]) as other,
    ):
        await hidden.do("listen", address=f"{gate.address}/p2p-circuit")
        limit = (await hidden.until("reserved", relay=str(gate.id)))["limit"]
        assert "200000" in limit
        assert "60s" in limit
        for attempt in (1, 2):
            await other.do("dial", address=f"{gate.address}/p2p-circuit/p2p/{hidden.id}")
            await other.until("connected", count=attempt, peer=hidden.id)
            assert await other.do("send", peer=hidden.id, size=50_000) == 50_000
            with pytest.raises(RustError):
                await other.do("send", peer=hidden.id, size=400_000)
            await other.until("closed", count=attempt, peer=hidden.id)


@pytest.mark.parametrize("hidden", [False, True], ids=["told by identify", "told by dcutr"])
async def test_a_direct_way_follows_a_relayed_one(binary: Path, certify: Certify, hidden: bool) -> None:
    """`/libp2p/dcutr` with libp2p's own behaviour; loopback shows the conversation, not that a NAT lets it through."""
    async with (
        ours.gateway(certify("gate", "gateway"), free_port()) as gate,
        rust_peer(binary, certify("rust"), dcutr=True, hide_listen=hidden) as rust,
        ours.leaf(certify("ours"), gate.address) as own,
    ):
        await rust.do("dial", address=gate.address)
        await rust.until("identified", peer=str(gate.id))
        await until(lambda: any("p2p-circuit" in address for address in own.addresses), 15)
        circuit = next(address for address in own.addresses if "p2p-circuit" in address)
        await rust.do("dial", address=circuit)
        await rust.until("connected", peer=str(own.peer_id), relayed=True)
        await rust.until("connected", peer=str(own.peer_id), relayed=False, timeout=30)
        await until(lambda: own.is_direct(PeerId.parse(rust.id)), 15)
        if hidden:
            assert (await rust.until("dcutr", peer=str(own.peer_id)))["error"] is None
        assert await rust.do("send", peer=str(own.peer_id), size=MIB) == MIB


# -------------------------------------------------------------------------------------------- 6. what Hypha says


async def test_requests_in_both_roles(binary: Path, certify: Certify) -> None:
    async with pair(binary, certify) as (rust, own):
        peer = await connect(rust, own, rust_dials=False)

        async def well(_: PeerId, __: HealthRequest) -> Health:
            return Health(healthy=True, role="worker", version="1")

        rpc.serve(own, HEALTH_CHECK, well)
        assert await rust.do("health", peer=str(own.peer_id)) is True
        assert (await rpc.call(own, peer, HEALTH_CHECK, HealthRequest())).healthy

        renewed = await rpc.call(own, peer, RENEW_LEASE, RenewLease(id=UUID(int=5)))
        assert isinstance(renewed, RenewalFailed)
        # what this node does not serve is reset, and the peer does not wait for it
        with pytest.raises(RustError):
            await rust.do("renew", peer=str(own.peer_id), lease="0123456789abcdef", timeout=5)
