"""Contract tests of `Endpoint`, run on both implementations: py-libp2p and memory.

The fixture `opener` (see conftest) opens N endpoints; the first is the gateway of the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest
from support.endpoint_helpers import next_event, read_all
from support.gateways import Opener
from support.waiting import until

from hypha_net.endpoint import GossipMessage, Stream
from hypha_net.errors import (
    AddressError,
    RefusedError,
    StreamClosedError,
    StreamResetError,
    UnreachableError,
    UnsupportedProtocolError,
)
from hypha_net.events import Connected, Disconnected
from hypha_proto.ids import PeerId

ECHO = "/test/echo/1"
OTHER = "/test/other/1"
TOPIC = "test/topic"


async def echo(stream: Stream) -> None:
    await stream.send_all(str(stream.peer).encode() + b":" + await read_all(stream))


async def test_a_stream_is_bidirectional_and_can_be_half_closed(opener: Opener) -> None:
    async with opener(2) as (gateway, leaf):
        gateway.handle(ECHO, echo)
        stream = await leaf.open_stream(gateway.peer_id, [ECHO])
        assert (stream.peer, stream.protocol) == (gateway.peer_id, ECHO)
        await stream.send_all(b"one ")
        await stream.send_all(bytearray(b"two"))
        await stream.send_eof()
        await stream.send_eof()
        with pytest.raises(StreamClosedError):
            await stream.send_all(b"three")
        assert await read_all(stream) == f"{leaf.peer_id}:one two".encode()
        assert await stream.receive_some() == b""
        await stream.aclose()
        await stream.aclose()
        with pytest.raises(StreamClosedError):
            await stream.receive_some()


async def test_the_last_bytes_of_a_stream_are_sent_with_its_end(opener: Opener) -> None:
    async with opener(2) as (gateway, leaf):
        gateway.handle(ECHO, echo)
        for last in (b"two", bytes(3 << 20)):
            stream = await leaf.open_stream(gateway.peer_id, [ECHO])
            await stream.send_all(b"one ")
            await stream.send_eof(last)
            await stream.send_eof()
            with pytest.raises(StreamClosedError):
                await stream.send_all(b"three")
            with pytest.raises(StreamClosedError):
                await stream.send_eof(b"three")
            assert await read_all(stream) == f"{leaf.peer_id}:one ".encode() + last
            await stream.aclose()


async def test_data_beyond_all_buffers_arrives_complete_at_a_late_reader(opener: Opener) -> None:
    async with opener(2) as (gateway, leaf):
        arrived: list[int] = []

        async def count(stream: Stream) -> None:
            await anyio.wait_all_tasks_blocked()  # all buffers are full
            arrived.append(len(await read_all(stream)))

        gateway.handle(ECHO, count)
        stream = await leaf.open_stream(gateway.peer_id, [ECHO])
        await stream.send_all(memoryview(bytes(12 << 20)))
        await stream.send_eof()
        assert await stream.receive_some() == b""
        assert arrived == [12 << 20]
        await stream.aclose()
        assert leaf.traffic.sent >= 12 << 20


async def test_many_streams_at_once(opener: Opener) -> None:
    async with opener(2) as (gateway, leaf):
        gateway.handle(ECHO, echo)
        answers: set[bytes] = set()

        async def ask(index: int) -> None:
            stream = await leaf.open_stream(gateway.peer_id, [ECHO])
            await stream.send_all(b"%d" % index)
            await stream.send_eof()
            answers.add(await read_all(stream))
            await stream.aclose()

        async with anyio.create_task_group() as tasks:
            for index in range(300):
                tasks.start_soon(ask, index)
        assert len(answers) == 300


async def test_a_reset_is_an_error_and_never_a_clean_end(opener: Opener) -> None:
    async with opener(2) as (gateway, leaf):
        seen: list[str] = []

        async def handler(stream: Stream) -> None:
            assert await stream.receive_some() == b"begin"
            await stream.send_all(b"go on")
            try:
                await read_all(stream)
                seen.append("end")
            except StreamResetError:
                seen.append("reset")

        gateway.handle(ECHO, handler)
        stream = await leaf.open_stream(gateway.peer_id, [ECHO])
        await stream.send_all(b"begin")
        assert await stream.receive_some() == b"go on"
        await stream.reset()
        await stream.reset()
        await until(lambda: bool(seen))
        assert seen == ["reset"]


async def test_a_handler_that_fails_resets_its_stream(opener: Opener) -> None:
    async with opener(2) as (gateway, leaf):

        async def handler(stream: Stream) -> None:
            await stream.receive_some()
            raise RuntimeError("a fault of the handler")

        gateway.handle(ECHO, handler)
        stream = await leaf.open_stream(gateway.peer_id, [ECHO])
        await stream.send_all(b"x")
        with pytest.raises(StreamResetError):
            await read_all(stream)
        await stream.aclose()
        gateway.handle(ECHO, echo)
        again = await leaf.open_stream(gateway.peer_id, [ECHO])
        await again.send_eof()
        assert await read_all(again)
        await again.aclose()


async def test_the_first_protocol_that_the_peer_supports_is_selected(opener: Opener) -> None:
    async with opener(2) as (gateway, leaf):
        gateway.handle(ECHO, echo)
        stream = await leaf.open_stream(gateway.peer_id, [OTHER, ECHO])
        assert stream.protocol == ECHO
        await stream.aclose()
        with pytest.raises(UnsupportedProtocolError):
            await leaf.open_stream(gateway.peer_id, [OTHER])


async def test_an_unknown_peer_is_unreachable(opener: Opener) -> None:
    async with opener(2) as nodes:
        with pytest.raises(UnreachableError):
            await nodes[1].open_stream(PeerId.from_public_key(bytes(range(32))), [ECHO], timeout=5)


async def test_an_address_that_names_another_peer_is_refused(opener: Opener) -> None:
    async with opener(3) as (gateway, leaf, other):
        transport = other.addresses[0].partition("/p2p/")[0]
        with pytest.raises(RefusedError, match=str(other.peer_id)):
            await leaf.connect(f"{transport}/p2p/{PeerId.from_public_key(bytes(range(32)))}")
        assert await leaf.connect(other.addresses[0]) == other.peer_id
        assert await leaf.connect(gateway.addresses[0]) == gateway.peer_id
        with pytest.raises(AddressError):
            await leaf.connect("/nonsense/1")


async def test_gossip_is_forwarded_by_the_gateway(opener: Opener) -> None:
    async with opener(3) as (gateway, one, two):
        async with gateway.subscribe(TOPIC) as hub, one.subscribe(TOPIC) as of_one, two.subscribe(TOPIC) as of_two:
            await until(lambda: all(gateway.peer_id in leaf.topic_peers(TOPIC) for leaf in (one, two)))
            await until(lambda: {one.peer_id, two.peer_id} <= gateway.topic_peers(TOPIC))
            heard: dict[str, list[tuple[PeerId, bytes]]] = {"hub": [], "one": [], "two": []}

            async def keep(name: str, messages: AsyncIterator[GossipMessage]) -> None:
                async for message in messages:
                    heard[name].append((message.source, message.data))

            async with anyio.create_task_group() as tasks:
                for name, messages in (("hub", hub), ("one", of_one), ("two", of_two)):
                    tasks.start_soon(keep, name, messages)
                for index in range(20):
                    await one.publish(TOPIC, b"%d" % index)
                await two.publish(TOPIC, b"back")
                with anyio.move_on_after(5):
                    await until(lambda: [len(each) for each in heard.values()] == [21, 1, 20])
                tasks.cancel_scope.cancel()
        numbers, back = [(one.peer_id, b"%d" % index) for index in range(20)], [(two.peer_id, b"back")]
        assert {name: sorted(each) for name, each in heard.items()} == {
            "hub": sorted(numbers + back),
            "one": back,
            "two": sorted(numbers),
        }
        await until(lambda: not gateway.topic_peers(TOPIC))


async def test_two_subscriptions_of_one_topic_get_every_message(opener: Opener) -> None:
    async with opener(2) as (gateway, leaf), gateway.subscribe(TOPIC) as first:
        async with gateway.subscribe(TOPIC) as second:
            await until(lambda: gateway.peer_id in leaf.topic_peers(TOPIC))
            await leaf.publish(TOPIC, b"both")
            with anyio.fail_after(15):
                assert [(await anext(first)).data, (await anext(second)).data] == [b"both", b"both"]
        await leaf.publish(TOPIC, b"one")
        with anyio.fail_after(15):
            assert (await anext(first)).data == b"one"


async def test_a_record_is_found_by_other_nodes_with_its_publisher(opener: Opener) -> None:
    async with opener(3) as (_, one, two):
        assert await two.find_records(b"mnist") == []
        await one.put_record(b"mnist", b'{"num_slices": 3}')
        (found,) = await two.find_records(b"mnist")
        assert (found.key, found.value, found.publisher) == (b"mnist", b'{"num_slices": 3}', one.peer_id)
        await one.put_record(b"mnist", b'{"num_slices": 4}')
        assert (await two.find_records(b"mnist"))[0].value == b'{"num_slices": 4}'


async def test_disconnect_resets_streams_on_both_sides_and_a_later_stream_reconnects(opener: Opener) -> None:
    async with opener(3) as (_, one, two):
        served: list[Stream] = []
        ends: list[str] = []

        async def hold(stream: Stream) -> None:
            served.append(stream)
            try:
                await read_all(stream)
            except StreamResetError:
                ends.append("reset")
                raise

        two.handle(ECHO, hold)
        stream = await one.open_stream(two.peer_id, [ECHO])
        await stream.send_all(b"x")
        await until(lambda: bool(served))
        await one.disconnect(two.peer_id)
        await one.disconnect(two.peer_id)
        assert two.peer_id not in one.connected_peers()
        with pytest.raises(StreamResetError):
            await read_all(stream)
        await stream.aclose()
        await until(lambda: ends == ["reset"] and one.peer_id not in two.connected_peers())
        two.handle(ECHO, echo)
        again = await one.open_stream(two.peer_id, [ECHO])
        await again.send_eof()
        assert await read_all(again)
        await again.aclose()


async def test_a_closed_endpoint_resets_its_streams_and_opens_no_more(opener: Opener) -> None:
    begun: list[bytes] = []
    ends: list[str] = []

    async def hold(stream: Stream) -> None:
        begun.append(await stream.receive_some())
        try:
            ends.append(repr(await read_all(stream)))
        except (StreamResetError, StreamClosedError):
            ends.append("broken")
            raise

    async with opener(2) as (gateway, leaf):
        gateway.handle(ECHO, hold)
        stream = await leaf.open_stream(gateway.peer_id, [ECHO])
        await stream.send_all(b"x")
        await until(lambda: begun)
    with pytest.raises((StreamResetError, StreamClosedError)):
        await stream.receive_some()
    with pytest.raises((StreamResetError, StreamClosedError)):
        await stream.send_all(b"y")
    await stream.aclose()
    assert set(ends) <= {"broken"}  # or the handler was cancelled, which is an end of no stream either
    with pytest.raises((StreamClosedError, UnreachableError)):
        await leaf.open_stream(gateway.peer_id, [ECHO], timeout=5)


async def test_a_write_ends_when_the_reader_has_closed_or_reset(opener: Opener) -> None:
    async with opener(2) as (gateway, leaf):

        async def refuse(stream: Stream) -> None:
            await stream.receive_some()
            await stream.reset()

        gateway.handle(ECHO, refuse)
        stream = await leaf.open_stream(gateway.peer_id, [ECHO])
        with anyio.fail_after(10), pytest.raises(StreamResetError):
            while True:
                await stream.send_all(bytes(1 << 20))
        await stream.aclose()


async def test_connects_and_disconnects_emit_events(opener: Opener) -> None:
    async with opener(3) as (_, one, two):
        one.handle(ECHO, echo)
        with one.events.follow(Connected, Disconnected) as at_one, two.events.follow(Connected, Disconnected) as at_two:
            stream = await two.open_stream(one.peer_id, [ECHO])
            await stream.aclose()
            assert await anext(aiter(at_two)) == Connected(one.peer_id, "outbound")
            assert await anext(aiter(at_one)) == Connected(two.peer_id, "inbound")
            await two.disconnect(one.peer_id)
            for told, peer in ((at_one, two.peer_id), (at_two, one.peer_id)):
                event = await next_event(told, Disconnected)
                assert event.peer == peer


async def test_find_peers_returns_peers_that_are_not_connected(opener: Opener) -> None:
    async with opener(3) as (_, one, two):
        assert two.peer_id not in one.connected_peers()
        found = await one.find_peers()
        assert two.peer_id in found
        assert one.peer_id not in found


async def test_the_round_trip_is_known_once_a_peer_is_connected(opener: Opener) -> None:
    async with opener(3) as (gateway, first, second):
        assert first.round_trip_time(second.peer_id) is None
        began = anyio.current_time()
        await first.connect_peer(second.peer_id)
        round_trip = first.round_trip_time(second.peer_id)
        assert round_trip is not None
        assert 0 <= round_trip <= anyio.current_time() - began
        await until(lambda: second.round_trip_time(first.peer_id) is not None)
        await first.connect_peer(second.peer_id)  # connected already
        stranger = PeerId.from_public_key(bytes(range(32)))
        with pytest.raises(UnreachableError):
            await first.connect_peer(stranger, timeout=2)
        assert first.round_trip_time(stranger) is None
        assert gateway.round_trip_time(stranger) is None


async def test_subscribers_can_be_connected_before_the_first_message(opener: Opener) -> None:
    """The gateway here is in no topic: over libp2p it forwards nothing."""
    async with opener(3) as (_, publisher, subscriber):
        async with subscriber.subscribe("topic") as heard:
            await publisher.connect_subscribers("topic", timeout=10)
            await until(lambda: subscriber.peer_id in publisher.topic_peers("topic"))
            await publisher.publish("topic", b"first")
            with anyio.fail_after(10):
                assert await anext(heard) == GossipMessage(publisher.peer_id, b"first")
        await publisher.connect_subscribers("nobody is here", timeout=1)
