"""DHT server and store: accepted records, precedence, closest peers, and persistence."""

from __future__ import annotations

import hashlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import anyio
import pytest
from support.waiting import until

from hypha_net._libp2p.kad import server, store
from hypha_net._libp2p.kad.messages import PROTOCOL, Kind, Message
from hypha_net._libp2p.kad.server import CLOSEST, KadServer, KnownPeer
from hypha_net._libp2p.kad.store import RecordStore
from hypha_net._libp2p.wire.delimited import MessageReader, read_message, write_message
from hypha_net.endpoint import Stream
from hypha_net.errors import StreamResetError, TransferError
from hypha_net.testing import MemoryNetwork
from hypha_proto.ids import PeerId

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


def test_a_record_is_stored_with_its_publisher_until_it_expires() -> None:
    gateway = Gateway()
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


def test_the_newest_record_wins_and_for_one_publisher_the_highest_seq() -> None:
    gateway = Gateway()
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


def test_records_of_other_publishers_are_refused_and_replicas_are_ignored() -> None:
    gateway = Gateway()
    gateway.put(PEERS[1], put(b"k", b"forged", publisher=PEERS[0]))
    assert gateway.get(b"k") is None
    gateway.put(PEERS[0], put(b"k", b"own", publisher=PEERS[0]))
    gateway.put(PEERS[1], put(b"k", b"own", publisher=PEERS[0], ttl=9999))  # a replica of a stored record
    gateway.put(PEERS[1], put(b"k", b"forged", publisher=PEERS[0]))
    assert gateway.get(b"k") == (b"own", PEERS[0], 100)


@pytest.mark.parametrize("spoil", ["key", "empty", "long key", "long value"])
def test_a_record_beyond_the_limits_is_not_stored(spoil: str) -> None:
    gateway = Gateway()
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
def test_find_node_returns_the_closest_connected_peers_for_any_key(key: bytes) -> None:
    gateway = Gateway()
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


async def test_several_requests_on_one_stream_and_malformed_bytes_on_another() -> None:
    gateway = Gateway()
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
