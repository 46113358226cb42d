"""Concurrency limits per peer: unfinished operations of one peer are bounded and do not delay others.

`test_transfer` tests the rate of a token bucket.
"""

from __future__ import annotations

from typing import Final

import anyio
import pytest
from support.gateways import Opener

from hypha_net import rpc
from hypha_net._libp2p.kad.messages import PROTOCOL as KAD
from hypha_net._libp2p.kad.messages import Kind, Message
from hypha_net._libp2p.kad.server import MAX_STREAMS_PER_PEER
from hypha_net._libp2p.wire.delimited import write_message
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import RequestTimeoutError, StreamResetError
from hypha_net.per_peer_limiter import PerPeerLimiter
from hypha_net.rpc import MAX_CONCURRENT_READS
from hypha_net.token_bucket import KeyedTokenBucket
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.protocols import HEALTH

HALF_A_MESSAGE: Final = b"\xff\xff\x3f" + bytes(1 << 16)
"""Of a DHT message: a length of 1 MiB, and 64 KiB of data."""

A, B = (PeerId.from_public_key(bytes([n]) * 32) for n in range(2))


async def begin(node: Endpoint, peer: PeerId, protocol: str, data: bytes, count: int) -> list[Stream]:
    """Open streams and send the first part of a message on each."""
    streams = []
    for _ in range(count):
        stream = await node.open_stream(peer, [protocol])
        await stream.send_all(data)
        streams.append(stream)
    return streams


async def test_partial_requests_delay_only_their_sender(opener: Opener) -> None:
    async def healthy(_peer: PeerId, _request: HealthRequest) -> Health:
        return Health(healthy=True)

    async with opener(3) as (server, greedy, other):
        rpc.serve(server, HEALTH_CHECK, healthy)
        begun = await begin(greedy, server.peer_id, HEALTH, bytes(1 << 16), MAX_CONCURRENT_READS + 8)
        with pytest.raises(RequestTimeoutError):
            await rpc.call(greedy, server.peer_id, HEALTH_CHECK, HealthRequest(), timeout=0.5)
        assert (await rpc.call(other, server.peer_id, HEALTH_CHECK, HealthRequest())).healthy
        for stream in begun:
            await stream.reset()
        assert (await rpc.call(greedy, server.peer_id, HEALTH_CHECK, HealthRequest())).healthy


async def test_an_incomplete_request_is_dropped_with_a_reason(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rpc, "READ_TIMEOUT", 0.2)

    async def healthy(_peer: PeerId, _request: HealthRequest) -> Health:
        return Health(healthy=True)

    async with opener(2) as (server, slow):
        rpc.serve(server, HEALTH_CHECK, healthy)
        (stream,) = await begin(slow, server.peer_id, HEALTH, b"half", 1)
        with pytest.raises(StreamResetError):
            await stream.receive_some()
        assert f"request from {slow.peer_id} on {HEALTH} dropped: too slow" in caplog.text


async def test_partial_dht_requests_delay_only_their_sender(libp2p_opener: Opener) -> None:
    async with libp2p_opener(3) as (gateway, greedy, other):
        begun = await begin(greedy, gateway.peer_id, KAD, HALF_A_MESSAGE, MAX_STREAMS_PER_PEER + 8)
        late = await greedy.open_stream(gateway.peer_id, [KAD])
        await write_message(late, Message(type=Kind.FIND_NODE, key=b"k"))
        with anyio.move_on_after(0.5) as waited:
            await late.receive_some()
        assert waited.cancelled_caught
        await other.put_record(b"k", b"v")
        for stream in begun:
            await stream.reset()
        assert await late.receive_some()
        assert [record.value for record in await greedy.find_records(b"k")] == [b"v"]


async def test_a_slot_is_released_on_errors_and_nothing_is_kept_of_idle_peers() -> None:
    limiter, log = PerPeerLimiter(1), list[str]()

    async def take(peer: PeerId, name: str, goes_on: anyio.Event) -> None:
        async with limiter.acquire(peer):
            log.append(name)
            await goes_on.wait()
            raise ValueError(name)

    first, never = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take, A, "first", never)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(take, A, "second", never)
        tasks.start_soon(take, B, "other", never)
        await anyio.wait_all_tasks_blocked()
        assert log == ["first", "other"]
        tasks.cancel_scope.cancel()
    with pytest.raises(ExceptionGroup):
        async with anyio.create_task_group() as tasks:
            first.set()
            tasks.start_soon(take, A, "again", first)
    assert log == ["first", "other", "again"]
    assert not limiter._peers


def test_keyed_buckets_refill_with_time_and_are_bounded_in_number() -> None:
    now = [0.0]
    a, b, c = (PeerId.from_public_key(bytes([n]) * 32) for n in range(3))
    bucket = KeyedTokenBucket[PeerId](2, 3, 2, lambda: now[0])
    for _ in range(3):
        assert bucket.has_token(a)
        bucket.take(a)
    assert not bucket.has_token(a)
    assert bucket.has_token(b)
    now[0] = 0.5
    assert bucket.has_token(a)
    bucket.take(b)
    bucket.take(c)
    assert len(bucket) == 2
