"""Several publishers of one key: all live ones are found, and records of others cannot be forged."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import pytest
import trio
import trio.testing
from support.waiting import until

from hypha_net import EndpointSettings, dataset_directory, open_endpoint
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net._libp2p.kad import client
from hypha_net._libp2p.kad.messages import PROTOCOL, Kind, Message
from hypha_net._libp2p.kad.server import KadServer, KnownPeer
from hypha_net._libp2p.kad.store import MAX_PROVIDERS, MAX_RECORDS_OF_PEER, PROVIDER_TTL, ProviderStore, RecordStore
from hypha_net.endpoint import Stream
from hypha_proto.datasets import DatasetRecord
from hypha_proto.ids import PeerId
from hypha_proto.signed_records import heartbeat_key, signed_bytes

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
ONE, OTHER = (("blake3:" + letter * 64) for letter in "12")
PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(4)]


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
            message = put(a.peer_id, heartbeat_key(a.peer_id, b"digits"), forged)
            server.answer(a.peer_id, message)
            assert await s.find_records(b"digits") == []
        value = b'{"seq": 9}'
        signed = a._identity.key.sign(signed_bytes(a.peer_id, b"digits", value)) + value
        server.answer(a.peer_id, put(a.peer_id, heartbeat_key(a.peer_id, b"digits"), signed))
        [record] = await s.find_records(b"digits")
        assert (record.publisher, record.value) == (a.peer_id, value)


def put(publisher: PeerId, key: bytes, value: bytes) -> Any:
    message = Message(type=Kind.PUT_VALUE, key=key)
    message.record.key, message.record.value = key, value
    message.record.publisher, message.record.ttl = publisher.raw, 20
    return message


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
        server.answer(PEERS[1], put(PEERS[1], key, b"v"))
        assert store.get(key) is None
    server.answer(PEERS[1], add_provider(PEERS[0]))
    assert server.answer(PEERS[0], add_provider(PEERS[0], PEERS[1])) is None  # ADD_PROVIDER has no answer
    assert providers(server) == []  # neither connected nor with a signed record
    for peer in PEERS[:2]:
        server.answer(peer, put(peer, heartbeat_key(peer, b"k"), b"v"))
    assert providers(server) == [PEERS[0]]


def test_a_provider_is_listed_while_connected_or_while_its_signed_record_is_renewed() -> None:
    now = [1000.0]
    known: list[KnownPeer] = []
    server = KadServer(lambda: known, RecordStore(None, lambda: now[0]))
    server.answer(PEERS[0], add_provider(PEERS[0]))
    server.answer(PEERS[0], put(PEERS[0], heartbeat_key(PEERS[0], b"k"), b"v"))
    assert providers(server) == [PEERS[0]]
    now[0] += 21
    assert providers(server) == []
    known.append(KnownPeer(PEERS[0], lambda: (b"\x04\x7f\x00\x00\x01\x06\x0f\xa1",)))
    answer = server.answer(PEERS[3], Message(type=Kind.GET_PROVIDERS, key=b"k"))
    assert [(PeerId(peer.id), list(peer.addrs)) for peer in answer.provider_peers] == [
        (PEERS[0], [b"\x04\x7f\x00\x00\x01\x06\x0f\xa1"])
    ]


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
