"""Channels of messages over streams that break: everything arrives once and in order, and hostile frames end them."""

from __future__ import annotations

import json
import random
from contextlib import suppress

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from support.endpoint_helpers import memory_pair

from hypha_net.endpoint import Stream
from hypha_net.errors import StreamResetError
from hypha_net.message_channel import MAX_PENDING, ChannelError, MessageChannel, receive_frame, send_frame
from hypha_net.testing import MemoryEndpoint
from hypha_proto.errors import DecodeError

PROTOCOL = "/test/channel"


class TextCodec:
    """Frames of text messages as JSON."""

    def encode(self, sequence: int, acknowledged: int, message: str | None) -> bytes:
        return json.dumps([sequence, acknowledged, message]).encode()

    def decode(self, data: bytes) -> tuple[int, int, str | None]:
        try:
            sequence, acknowledged, message = json.loads(data)
        except ValueError as error:
            raise DecodeError(str(error)) from None
        return sequence, acknowledged, message


class Side:
    """A channel that records what it handles."""

    def __init__(self) -> None:
        self.handled: list[str] = []
        self.channel: MessageChannel[str, str] = MessageChannel(TextCodec(), self.handle, max_frame=1000)

    async def handle(self, message: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.handled.append(message)


async def connect(a: MemoryEndpoint, b: MemoryEndpoint, tasks: anyio.abc.TaskGroup) -> tuple[Stream, Stream]:
    """Open a stream from `a` to `b`; return both ends."""
    sender, receiver = anyio.create_memory_object_stream[Stream](1)

    async def accept(stream: Stream) -> None:
        await sender.send(stream)
        await anyio.sleep_forever()

    b.handle(PROTOCOL, accept)
    near = await a.open_stream(b.peer_id, [PROTOCOL])
    await near.send_all(b"")
    return near, await receiver.receive()


async def run_until_broken(side: Side, stream: Stream, peer_wants: int) -> None:
    with suppress(StreamResetError):
        await side.channel.run(stream, peer_wants)


@pytest.mark.parametrize("seed", range(20))
async def test_messages_arrive_once_and_in_order_although_streams_break(seed: int) -> None:
    chance = random.Random(seed)
    first, second = Side(), Side()
    sent: dict[str, list[str]] = {"first": [], "second": []}
    async with memory_pair() as (a, b):
        for round_number in range(12):
            async with anyio.create_task_group() as tasks:
                near, far = await connect(a, b, tasks)
                tasks.start_soon(run_until_broken, first, near, second.channel.next_wanted)
                tasks.start_soon(run_until_broken, second, far, first.channel.next_wanted)
                for number in range(chance.randrange(8)):
                    for name, side in (("first", first), ("second", second)):
                        text = f"{name} {round_number} {number}"
                        sent[name].append(text)
                        side.channel.send(text)
                    for _ in range(chance.randrange(6)):
                        await anyio.lowlevel.checkpoint()
                if round_number == 11:
                    await first.channel.wait_until_handled()
                    await second.channel.wait_until_handled()
                await near.reset()
    assert second.handled == sent["first"]
    assert first.handled == sent["second"]
    assert (first.channel.pending, second.channel.pending) == (0, 0)


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        ([1, 0, "gap"], "0 is missing"),
        ([0, 7, None], "acknowledges message 7"),
        ("no frame", "malformed"),
        (["x" * 2000], "over the limit"),
    ],
    ids=["gap", "false acknowledgement", "malformed", "too long"],
)
async def test_a_peer_that_breaks_the_rules_ends_the_stream(frame: object, complaint: str) -> None:
    side = Side()
    async with memory_pair() as (a, b), anyio.create_task_group() as tasks:
        near, far = await connect(a, b, tasks)
        await send_frame(near, json.dumps(frame).encode())
        with pytest.raises(ChannelError, match=complaint):
            await side.channel.run(far, 0)
        await near.reset()
    assert side.handled == []


async def test_a_repeated_message_is_handled_once_and_a_forgotten_one_is_an_error() -> None:
    side = Side()
    async with memory_pair() as (a, b), anyio.create_task_group() as tasks:
        near, far = await connect(a, b, tasks)
        for _ in range(2):
            await send_frame(near, json.dumps([0, 0, "once"]).encode())
        side.channel.send("answer")
        await near.send_all(b"")
        tasks.start_soon(run_until_broken, side, far, 0)
        assert json.loads(await receive_frame(near, 1000) or b"")[2] == "answer"
        await send_frame(near, json.dumps([1, 1, None]).encode())
        await side.channel.wait_until_handled()
        await near.reset()
        near, far = await connect(a, b, tasks)
        with pytest.raises(ChannelError, match="wants message 0 again"):
            await side.channel.run(far, 0)
        await near.reset()
    assert side.handled == ["once"]


async def test_a_message_is_handled_once_although_the_next_stream_begins_meanwhile() -> None:
    """The next stream waits for the handler, and then tells the peer that the message is handled."""
    side, free, begun = Side(), anyio.Event(), anyio.Event()

    async def handle(message: str) -> None:
        side.handled.append(message)
        begun.set()
        await free.wait()

    side.channel.handle = handle
    async with memory_pair() as (a, b), anyio.create_task_group() as tasks:
        near, far = await connect(a, b, tasks)
        await send_frame(near, json.dumps([0, 0, "once"]).encode())
        tasks.start_soon(run_until_broken, side, far, 0)
        await begun.wait()
        streams = [await connect(a, b, tasks) for _ in range(2)]
        for near, far in streams:
            await send_frame(near, json.dumps([0, 0, "once"]).encode())
            tasks.start_soon(run_until_broken, side, far, 0)
            await anyio.wait_all_tasks_blocked()
        free.set()
        assert json.loads(await receive_frame(near, 1000) or b"") == [0, 1, None]
        for near, _ in streams:
            await near.reset()
    assert side.handled == ["once"]


def test_messages_that_nobody_acknowledges_are_bounded() -> None:
    side = Side()
    for number in range(MAX_PENDING):
        side.channel.send(str(number))
    with pytest.raises(ChannelError, match="wait for their acknowledgement"):
        side.channel.send("one more")


async def test_a_stream_that_breaks_while_the_exchange_is_cancelled_is_no_error() -> None:
    side = Side()
    async with memory_pair() as (a, b), anyio.create_task_group() as tasks:
        near, far = await connect(a, b, tasks)
        with anyio.CancelScope() as scope:

            async def end() -> None:
                await anyio.lowlevel.checkpoint()
                await near.reset()
                scope.cancel()

            tasks.start_soon(end)
            await side.channel.run(far, 0)
        assert scope.cancelled_caught


async def test_a_side_that_has_lost_its_state_goes_on_where_the_other_one_is() -> None:
    first, second, third = Side(), Side(), Side()

    async def exchange(a: MemoryEndpoint, b: MemoryEndpoint, other: Side) -> None:
        async with anyio.create_task_group() as tasks:
            near, far = await connect(a, b, tasks)
            tasks.start_soon(run_until_broken, first, near, other.channel.next_wanted)
            tasks.start_soon(run_until_broken, other, far, first.channel.next_wanted)
            await first.channel.wait_until_handled()
            await other.channel.wait_until_handled()
            tasks.cancel_scope.cancel()

    async with memory_pair() as (a, b):
        first.channel.send("before")
        second.channel.send("down")
        await exchange(a, b, second)
        first.channel.send("after")
        third.channel.send("down again")
        third.channel.take_over(first.channel.next_wanted, first.channel.oldest)
        await exchange(a, b, third)
    assert second.handled == ["before"]
    assert third.handled == ["after"]
    assert first.handled == ["down", "down again"]
