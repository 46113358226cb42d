"""DHT: accepted records, precedence, closest peers, persistence, several publishers of a key, and forged records."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import anyio
import pytest
import trio
import trio.testing
from support.waiting import until

from hypha_net import EndpointSettings, dataset_directory, open_endpoint
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net._libp2p.kad import client, server, store
from hypha_net._libp2p.kad.messages import PROTOCOL, Kind, Message
from hypha_net._libp2p.kad.server import CLOSEST, KadServer, KnownPeer
from hypha_net._libp2p.kad.store import MAX_PROVIDERS, MAX_RECORDS_OF_PEER, PROVIDER_TTL, ProviderStore, RecordStore
from hypha_net._libp2p.wire.delimited import MessageReader, read_message, write_message
from hypha_net.endpoint import Stream
from hypha_net.errors import StreamResetError, TransferError
from hypha_net.testing import MemoryNetwork
from hypha_proto.datasets import DatasetRecord
from hypha_proto.ids import PeerId
from hypha_proto.signed_records import heartbeat_key, signed_bytes

PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(30)]
ADDRESS = (b"\x04\x7f\x00\x00\x01\x06\x0f\xa1",)


def put(key: bytes, value: bytes, publisher: PeerId | None = None, ttl: int = 100) -> Any:
    message = Message(type=Kind.PUT_VALUE, key=key)
    message.record.key, message.record.value, message.record.ttl = key, value, ttl
    if publisher is not None:
        message.record.publisher = publisher.raw
    return message


class Gateway:
    """A server with a store, a clock and connected peers."""

    def __init__(self, folder: Path | None = None) -> None:
        self.now = 1000.0
        self.known = [KnownPeer(peer, lambda: ADDRESS) for peer in PEERS]
        self.store = RecordStore(folder, lambda: self.now)
        self.server = KadServer(lambda: self.known, self.store)

    def put(self, peer: PeerId, message: Any) -> None:
        answer = self.server.answer(peer, message)
        assert answer.record == message.record  # always echoed, even if it is not stored

    def get(self, key: bytes) -> tuple[bytes, PeerId, int] | None:
        answer = self.server.answer(PEERS[9], Message(type=Kind.GET_VALUE, key=key))
        assert answer.closer_peers
        if not answer.HasField("record"):
            return None
        assert answer.record.key == key
        return answer.record.value, PeerId(answer.record.publisher), answer.record.ttl


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def test_a_record_is_stored_with_its_publisher_until_it_expires(gateway: Gateway) -> None:
    assert gateway.get(b"mnist") is None
    gateway.put(PEERS[0], put(b"mnist", b"{}"))
    assert gateway.get(b"mnist") == (b"{}", PEERS[0], 100)
    gateway.now += 40
    assert gateway.get(b"mnist") == (b"{}", PEERS[0], 60)
    gateway.now += 60
    assert gateway.get(b"mnist") is None
    gateway.put(PEERS[0], put(b"mnist", b"{}", ttl=1 << 31))
    assert gateway.get(b"mnist") == (b"{}", PEERS[0], store.MAX_TTL)
    gateway.put(PEERS[0], put(b"mnist", b"{}", ttl=0))
    assert gateway.get(b"mnist") == (b"{}", PEERS[0], server.DEFAULT_TTL)


def test_the_newest_record_wins_and_for_one_publisher_the_highest_seq(gateway: Gateway) -> None:
    for peer, value, winner in (
        (0, b'{"seq": 5}', (b'{"seq": 5}', 0)),
        (0, b'{"seq": 4}', (b'{"seq": 5}', 0)),
        (0, b'{"seq": 5, "again": 1}', (b'{"seq": 5, "again": 1}', 0)),
        (1, b'{"seq": 1}', (b'{"seq": 1}', 1)),
        (1, b"no json", (b'{"seq": 1}', 1)),
        (2, b"no json", (b"no json", 2)),
        (2, b'["seq"]', (b'["seq"]', 2)),
        (2, b'{"seq": true}', (b'{"seq": true}', 2)),
    ):
        gateway.put(PEERS[peer], put(b"k", value))
        found = gateway.get(b"k")
        assert found is not None
        assert found[:2] == (winner[0], PEERS[winner[1]])


def test_records_of_other_publishers_are_refused_and_replicas_are_ignored(gateway: Gateway) -> None:
    gateway.put(PEERS[1], put(b"k", b"forged", publisher=PEERS[0]))
    assert gateway.get(b"k") is None
    gateway.put(PEERS[0], put(b"k", b"own", publisher=PEERS[0]))
    gateway.put(PEERS[1], put(b"k", b"own", publisher=PEERS[0], ttl=9999))  # a replica of a stored record
    gateway.put(PEERS[1], put(b"k", b"forged", publisher=PEERS[0]))
    assert gateway.get(b"k") == (b"own", PEERS[0], 100)


@pytest.mark.parametrize("spoil", ["key", "empty", "long key", "long value"])
def test_a_record_beyond_the_limits_is_not_stored(gateway: Gateway, spoil: str) -> None:
    message = put(b"k", b"v")
    if spoil == "key":
        message.record.key = b"other"
    elif spoil == "empty":
        message.key = message.record.key = b""
    elif spoil == "long key":
        message.key = message.record.key = bytes(server.MAX_KEY + 1)
    else:
        message.record.value = bytes(server.MAX_VALUE + 1)
    gateway.put(PEERS[0], message)
    assert gateway.get(b"k") is None
    assert gateway.get(bytes(message.record.key)) is None


def test_one_peer_cannot_fill_the_record_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_RECORDS_OF_PEER", 3)
    monkeypatch.setattr(store, "MAX_STORED", 1000)
    gateway = Gateway()
    for n in range(5):
        gateway.put(PEERS[0], put(b"k%d" % n, b"v"))
    gateway.put(PEERS[0], put(b"k0", b"newer"))
    gateway.put(PEERS[1], put(b"other", b"v"))
    gateway.put(PEERS[1], put(b"large", bytes(990)))
    kept = [key for key in (b"k0", b"k1", b"k2", b"k3", b"k4", b"other", b"large") if gateway.get(key)]
    assert kept == [b"k0", b"k1", b"k2", b"other"]
    monkeypatch.setattr(store, "MAX_STORED_OF_PEER", 100)
    gateway.put(PEERS[2], put(b"more than one's share", bytes(90)))
    assert gateway.get(b"more than one's share") is None
    gateway.now += 100
    gateway.put(PEERS[0], put(b"k4", b"room again"))
    assert gateway.get(b"k4") is not None


@pytest.mark.parametrize("key", [b"", b"x", bytes(60), PEERS[3].raw])
def test_find_node_returns_the_closest_connected_peers_for_any_key(gateway: Gateway, key: bytes) -> None:
    asking = PEERS[0]
    gateway.known.append(KnownPeer(PeerId.from_public_key(b"?" * 32), tuple))  # its addresses are not known yet
    answer = gateway.server.answer(asking, Message(type=Kind.FIND_NODE, key=key))
    target = int.from_bytes(hashlib.sha256(key).digest(), "big")
    expected = sorted(PEERS[1:], key=lambda p: int.from_bytes(hashlib.sha256(p.raw).digest(), "big") ^ target)
    assert [PeerId(peer.id) for peer in answer.closer_peers] == expected[:CLOSEST]
    assert all(tuple(peer.addrs) == ADDRESS for peer in answer.closer_peers)
    if key == PEERS[3].raw:
        assert answer.closer_peers[0].id == key


def test_records_survive_a_restart_and_a_corrupt_file_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Gateway(tmp_path)
    first.put(PEERS[0], put(b"\xff\x00 any bytes", b"\x00\xff"))
    first.store.save()
    second = Gateway(tmp_path)
    second.now += 30
    assert second.get(b"\xff\x00 any bytes") == (b"\x00\xff", PEERS[0], 70)
    (file,) = tmp_path.iterdir()
    for spoilt in (
        "{",
        "[" * 9000,
        "[1]",
        '[["!", "!", "!", 1]]',
        "[[1, 2, 3, 4]]",
        json.dumps([["", "", "", "soon"]]),
        json.dumps([["", "", "", 10**400]]),
    ):
        file.write_text(spoilt)
        caplog.clear()
        third = Gateway(tmp_path)
        assert third.get(b"\xff\x00 any bytes") is None
        assert file.name in caplog.text
        third.put(PEERS[0], put(b"k", b"v"))
        third.store.save()
        assert Gateway(tmp_path).get(b"k") is not None


async def test_many_puts_cause_one_write_and_a_full_disk_does_not_disturb_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one write per put a single peer could keep a gateway busy."""
    monkeypatch.setattr(store, "SAVE_EVERY", 0.05)
    writes = Mock(wraps=store._write)
    monkeypatch.setattr(store, "_write", writes)
    gateway = Gateway(tmp_path)
    make, remove, names = tmp_path.mkdir, tmp_path.rmdir, partial(os.listdir, tmp_path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gateway.store.save_changes)
        remove()
        gateway.put(PEERS[0], put(b"k", b"0"))
        await until(lambda: writes.call_count > 3)  # it is retried, and not logged again
        make()
        for number in range(1000):
            gateway.put(PEERS[0], put(b"k", b"%d" % number))
        assert not names()
        await until(lambda: names() == ["dht-records.json"], 15)
        assert Gateway(tmp_path).get(b"k") is not None
        gateway.put(PEERS[0], put(b"last", b"v"))
        tasks.cancel_scope.cancel()
    assert Gateway(tmp_path).get(b"last") is not None
    assert sum("dht-records" in record.getMessage() for record in caplog.records) == 1


async def test_a_put_after_a_pause_is_saved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SAVE_EVERY", 60.0)
    gateway = Gateway(tmp_path)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(gateway.store.save_changes)
        await anyio.wait_all_tasks_blocked()
        gateway.put(PEERS[0], put(b"k", b"v"))
        await until(lambda: Gateway(tmp_path).get(b"k") is not None, 15)
        tasks.cancel_scope.cancel()


def test_a_node_that_is_not_a_gateway_returns_peers_and_stores_nothing() -> None:
    kad_node = KadServer(lambda: [KnownPeer(PEERS[1], lambda: ADDRESS)], None)
    kad_node.answer(PEERS[0], put(b"k", b"v"))
    answer = kad_node.answer(PEERS[0], Message(type=Kind.GET_VALUE, key=b"k"))
    assert not answer.HasField("record")
    assert [peer.id for peer in answer.closer_peers] == [PEERS[1].raw]
    assert kad_node.answer(PEERS[0], Message(type=Kind.ADD_PROVIDER, key=b"k")) is None


async def test_several_requests_on_one_stream_and_malformed_bytes_on_another(gateway: Gateway) -> None:
    network = MemoryNetwork()
    async with network.endpoint("a") as a, network.endpoint("b") as b:
        b.handle(PROTOCOL, gateway.server.serve)
        stream = await a.open_stream(b.peer_id, [PROTOCOL])
        for _ in range(3):
            await write_message(stream, Message(type=Kind.FIND_NODE, key=b"x" * 300))
            assert len((await read_message(stream, Message)).closer_peers) == CLOSEST
        await stream.send_eof()
        assert await read_message(stream, Message) is None
        for rubbish in (b"\xff" * 6, b"\x80\x80\x80\x01", b"\x05\xff\xff\xff\xff\xff", b"\x05ab"):
            stream = await a.open_stream(b.peer_id, [PROTOCOL])
            await stream.send_all(rubbish)
            await stream.send_eof()
            with pytest.raises(StreamResetError):
                await read_message(stream, Message)


async def test_a_message_over_the_size_limit_is_refused_before_it_is_read() -> None:
    network = MemoryNetwork()
    async with network.endpoint("a") as a, network.endpoint("b") as b:
        seen: list[str] = []

        async def serve(stream: Stream) -> None:
            with pytest.raises(TransferError, match="over the limit of 100"):
                await read_message(stream, Message, 100)
            seen.append("refused")

        b.handle(PROTOCOL, serve)
        stream = await a.open_stream(b.peer_id, [PROTOCOL])
        await stream.send_all(b"\x80\x80\x80\x01")
        await until(lambda: seen, 15)


async def test_messages_are_parsed_independently_of_chunk_boundaries() -> None:
    messages = [Message(type=Kind.FIND_NODE, key=bytes(n)) for n in (0, 1, 200, 70_000)]
    network = MemoryNetwork()
    async with network.endpoint("a") as a, network.endpoint("b") as b:
        taken: list[Any] = []
        ends: list[str] = []

        async def serve(stream: Stream) -> None:
            reader = MessageReader(stream, Message)
            try:
                while (message := await reader.next()) is not None:
                    taken.append(message)
                ends.append("end")
            except TransferError as error:
                ends.append(str(error))

        b.handle(PROTOCOL, serve)
        sink = await a.open_stream(b.peer_id, [PROTOCOL])
        for message in messages * 3:
            await write_message(sink, message)
        await sink.send_eof()
        for cut in (b"\x05ab", b"\xff" * 6, b"\x80\x80\x80\x01", b"\x80"):
            other = await a.open_stream(b.peer_id, [PROTOCOL])
            await other.send_all(cut)
            await other.send_eof()
        await until(lambda: len(ends) >= 5, 15)
        assert taken == messages * 3
        assert sorted(ends) == [
            "a message of 2097152 bytes is over the limit of 1048576",
            "a message's length has too many bytes",
            "end",
            "the stream ended within a message",
            "the stream ended within a message",
        ]


LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ONE, OTHER = (("blake3:" + letter * 64) for letter in "12")


@asynccontextmanager
async def open_nodes(authority: Any, names: str, gateways: int = 1) -> AsyncIterator[list[Libp2pEndpoint]]:
    """Open the gateways, then a node for each letter of `names`, connected to all gateways."""
    async with anyio.create_task_group() as tasks:
        nodes: list[Libp2pEndpoint] = []

        async def hold(name: str, settings: EndpointSettings, *, task_status: Any) -> None:
            async with open_endpoint(authority.identity(name), settings) as node:
                task_status.started(node)
                await anyio.sleep_forever()

        settings = EndpointSettings(listen_addresses=(LOOPBACK,), role="gateway")
        nodes += [await tasks.start(hold, f"gateway-{index}", settings) for index in range(gateways)]
        settings = EndpointSettings(gateway_addresses=tuple(gateway.addresses[0] for gateway in nodes))
        for name in names:
            nodes.append(await tasks.start(hold, name, settings))
            await until(lambda: len(nodes[-1]._gateways.connected()) >= gateways)
        yield nodes
        tasks.cancel_scope.cancel()


async def test_all_live_providers_of_a_dataset_are_found_and_dead_ones_are_not(
    authority: Any, monkeypatch: Any
) -> None:
    async with open_nodes(authority, "abs") as (gateway, a, b, s):

        async def told() -> dict[PeerId, str | None]:
            return {each.provider: each.record.manifest for each in await dataset_directory.find_dataset(s, "digits")}

        async def all_told() -> bool:
            return await told() == {a.peer_id: ONE, b.peer_id: ONE, gateway.peer_id: OTHER}

        async def only_a() -> bool:
            return await told() == {a.peer_id: ONE, gateway.peer_id: OTHER}

        for node, manifest in ((gateway, OTHER), (a, ONE), (b, ONE)):
            await dataset_directory.announce_dataset(
                node, "digits", DatasetRecord(num_slices=4, seq=1, manifest=manifest)
            )
            monkeypatch.setattr(dataset_directory, "RECORD_TTL", 2.0)
        await until(all_told, 15)
        await b._close()
        await until(only_a, 15)  # a's announcement would have expired before b's if it were not renewed


@pytest.mark.nightly
def test_each_gateway_receives_a_record_once_per_third_of_its_lifetime(authority: Any, monkeypatch: Any) -> None:
    answer, clock = KadServer.answer, trio.testing.MockClock(rate=1)
    puts: defaultdict[int, list[float]] = defaultdict(list)

    def note(self: KadServer, peer: PeerId, message: Any) -> Any:
        if message.type == Kind.PUT_VALUE and message.key == b"k":
            puts[id(self)].append(trio.current_time())
        return answer(self, peer, message)

    async def main() -> None:
        async with open_nodes(authority, "a", 2) as (*_, node):
            monkeypatch.setattr(KadServer, "answer", note)
            clock.rate = 0
            await node.put_record(b"k", b"v", ttl=30.0)
            while len(puts) < 2 or min(map(len, puts.values())) < 6:
                clock.jump(0.5)
                await node.find_records(b"k")  # the answers to earlier puts have arrived before
            clock.rate = 1

    trio.run(main, clock=clock)
    for times in puts.values():  # the first ones may be of a gateway that has just connected
        assert all(10 <= later - earlier < 20 for earlier, later in itertools.pairwise(times[-4:])), times


async def test_an_update_is_found_although_another_publisher_uses_the_key(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "GRACE", 3600.0)  # both gateways are asked, and the second may answer late
    async with open_nodes(authority, "abs", gateways=2) as (_, _, a, b, s):
        for seq in range(1, 4):
            for node in (a, b):
                await node.put_record(b"digits", b'{"num_slices": %d, "seq": %d}' % (seq, seq))
            values = [record.value for record in await s.find_records(b"digits")]
            assert values == [b'{"num_slices": %d, "seq": %d}' % (seq, seq)] * 2


async def test_an_unresponsive_gateway_does_not_delay_look_ups(authority: Any) -> None:
    async with open_nodes(authority, "as", gateways=2) as (frozen, _, a, s):
        await a.put_record(b"digits", b"{}")

        async def never(_stream: Stream) -> None:
            await anyio.sleep_forever()

        frozen.handle(PROTOCOL, never)
        for _ in range(3):
            assert [record.publisher for record in await s.find_records(b"digits", timeout=3600)] == [a.peer_id]


async def test_a_record_without_its_publishers_signature_is_ignored(authority: Any) -> None:
    """The gateway itself forges the record: other peers cannot, as it accepts records from their publishers only."""
    async with open_nodes(authority, "as") as (gateway, a, s):
        await a.put_record(b"digits", b'{"seq": 1}')
        server = KadServer(lambda: (), RecordStore(None))
        genuine = a._identity.key.sign(signed_bytes(a.peer_id, b"other", b'{"seq": 9}'))
        provider = Message(type=Kind.ADD_PROVIDER, key=b"digits")
        provider.provider_peers.add(id=a.peer_id.raw)
        server.answer(a.peer_id, provider)
        gateway.handle(PROTOCOL, server.serve)
        for forged in (bytes(64) + b'{"seq": 9}', b"short", genuine + b'{"seq": 9}'):
            message = put(heartbeat_key(a.peer_id, b"digits"), forged, a.peer_id)
            server.answer(a.peer_id, message)
            assert await s.find_records(b"digits") == []
        value = b'{"seq": 9}'
        signed = a._identity.key.sign(signed_bytes(a.peer_id, b"digits", value)) + value
        server.answer(a.peer_id, put(heartbeat_key(a.peer_id, b"digits"), signed, a.peer_id))
        [record] = await s.find_records(b"digits")
        assert (record.publisher, record.value) == (a.peer_id, value)


def add_provider(*peers: PeerId, key: bytes = b"k") -> Any:
    message = Message(type=Kind.ADD_PROVIDER, key=key)
    for peer in peers:
        message.provider_peers.add(id=peer.raw)
    return message


def providers(server: KadServer, key: bytes = b"k") -> list[PeerId]:
    answer = server.answer(PEERS[3], Message(type=Kind.GET_PROVIDERS, key=key))
    return [PeerId(peer.id) for peer in answer.provider_peers]


def test_a_gateway_accepts_signed_records_and_providers_only_from_the_peer_itself() -> None:
    store = RecordStore(None)
    server = KadServer(lambda: (), store)
    for key in (heartbeat_key(PEERS[0], b"k"), b"/hypha/heartbeat/0.1.0/", b"/hypha/heartbeat/0.1.0/nobody/k"):
        server.answer(PEERS[1], put(key, b"v", PEERS[1]))
        assert store.get(key) is None
    server.answer(PEERS[1], add_provider(PEERS[0]))
    assert server.answer(PEERS[0], add_provider(PEERS[0], PEERS[1])) is None  # ADD_PROVIDER has no answer
    assert providers(server) == []  # neither connected nor with a signed record
    for peer in PEERS[:2]:
        server.answer(peer, put(heartbeat_key(peer, b"k"), b"v", peer))
    assert providers(server) == [PEERS[0]]


def test_a_provider_is_listed_while_connected_or_while_its_signed_record_is_renewed() -> None:
    now = [1000.0]
    known: list[KnownPeer] = []
    server = KadServer(lambda: known, RecordStore(None, lambda: now[0]))
    server.answer(PEERS[0], add_provider(PEERS[0]))
    server.answer(PEERS[0], put(heartbeat_key(PEERS[0], b"k"), b"v", PEERS[0], ttl=20))
    assert providers(server) == [PEERS[0]]
    now[0] += 21
    assert providers(server) == []
    known.append(KnownPeer(PEERS[0], lambda: ADDRESS))
    answer = server.answer(PEERS[3], Message(type=Kind.GET_PROVIDERS, key=b"k"))
    assert [(PeerId(peer.id), tuple(peer.addrs)) for peer in answer.provider_peers] == [(PEERS[0], ADDRESS)]


def test_providers_are_bounded_in_number_and_expire() -> None:
    now = [0.0]
    store = ProviderStore(lambda: now[0])
    crowd = [PeerId.from_public_key(n.to_bytes(32, "big")) for n in range(MAX_PROVIDERS + 1)]
    assert [store.add(b"k", peer) for peer in crowd] == [True] * MAX_PROVIDERS + [False]
    assert store.add(b"k", crowd[0])
    assert [store.add(b"%d" % n, crowd[0]) for n in range(MAX_RECORDS_OF_PEER)].count(True) == MAX_RECORDS_OF_PEER - 1
    now[0] = PROVIDER_TTL + 1
    assert store.get(b"k") == []
    assert store.add(b"k", crowd[-1])
    store.remove(b"k", crowd[-1])
    store.remove(b"k", crowd[-1])
    assert store.get(b"k") == []


def test_expired_provider_entries_do_not_count_against_a_peer() -> None:
    now = [0.0]
    store = ProviderStore(lambda: now[0])
    assert all(store.add(b"%d" % n, PEERS[0]) for n in range(MAX_RECORDS_OF_PEER))
    assert not store.add(b"one more", PEERS[0])
    now[0] = PROVIDER_TTL + 1
    assert store.add(b"one more", PEERS[0])
    assert store.get(b"one more") == [PEERS[0]]
    assert store.get(b"0") == []


async def test_a_peer_that_sends_continuously_does_not_starve_others() -> None:
    """Messages without an answer are read as fast as they arrive: the server itself must yield to other tasks."""
    server = KadServer(lambda: (), RecordStore(None))
    turns = [0]

    async def count() -> None:
        while True:
            await trio.lowlevel.checkpoint()
            turns[0] += 1

    async with trio.open_nursery() as tasks:
        tasks.start_soon(count)
        await server.serve(cast(Stream, Waiting(PEERS[0], framed(add_provider(PEERS[0])) * 1001)))
        tasks.cancel_scope.cancel()
    assert turns[0] >= 1000  # one for each message, but for the first, which may go before the counter is started


class Waiting:
    """A stream whose bytes have all come: reading it takes no time."""

    def __init__(self, peer: PeerId, data: bytes) -> None:
        self.peer = peer
        self.protocol = PROTOCOL
        self._data, self._at = data, 0

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        part = self._data[self._at : self._at + max_bytes]
        self._at += len(part)
        return part


def framed(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    assert len(data) < 128
    return bytes([len(data)]) + data


def test_short_lived_records_are_not_saved_to_disk(tmp_path: Any) -> None:
    store = RecordStore(tmp_path)
    store.put(b"k", b"v", PEERS[0].raw, 25)
    store.put(b"lasting", b"v", PEERS[0].raw, 3600)
    store.save()
    again = RecordStore(tmp_path)
    assert again.get(b"lasting") is not None
    assert again.get(b"k") is None
