"""Yamux session over a pipe in memory, on a mock clock: transfer, flow control, cancellation, hostile peers."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamEOF, MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import Yamux

from hypha_net._libp2p.yamux import session as session_module
from hypha_net._libp2p.yamux.frames import INITIAL_WINDOW, MAX_WINDOW
from hypha_net._libp2p.yamux.link_estimator import ReceiveRate
from hypha_net._libp2p.yamux.receive_buffer import UnreadBytes
from hypha_net._libp2p.yamux.session import MAX_STREAMS, PING_INTERVAL, PING_TIMEOUT, YamuxSession
from hypha_net.buffer_pool import release_buffer

pytestmark = pytest.mark.virtual_clock

PEER = ID(b"\x00\x24" + bytes(36))
HEADER = struct.Struct(">BBHII")
DATA, UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8


class PipeConnection:
    """One end of a pipe as a `SecureTransport`: a write is sent whole or not at all."""

    def __init__(self, stream: Any, *, is_initiator: bool) -> None:
        self.stream = stream
        self.is_initiator = is_initiator
        self._lock = trio.Lock()
        self._waiting: bytes | None = b""

    async def read(self, n: int | None = None) -> bytes:
        try:
            return bytes(await self.stream.receive_some(n))
        except (trio.ClosedResourceError, trio.BrokenResourceError) as error:
            raise ConnectionClosedError("gone") from error

    def read_now(self, buffer: memoryview) -> int | None:
        if self._waiting is None:
            return 0
        if not self._waiting:
            return None
        data, self._waiting = self._waiting[: len(buffer)], self._waiting[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)

    async def wait_readable(self, *, fair: bool = True) -> None:
        self._waiting = await self.read(1 << 16) or None

    async def write(self, data: bytes, body: memoryview | None = None) -> None:
        async with self._lock:
            with trio.CancelScope(shield=True):
                try:
                    await self.stream.send_all(data if body is None else data + body)
                except (trio.ClosedResourceError, trio.BrokenResourceError) as error:
                    raise ConnectionClosedError("gone") from error

    async def close(self) -> None:
        with trio.CancelScope(shield=True):
            await self.stream.aclose()

    def get_remote_address(self) -> None:
        return None

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.DIRECT


class DelayedEnd:
    """One end of a link with latency."""

    def __init__(self, delay: float, there: Any, back: Any) -> None:
        self._delay, self._there, self._back = delay, there, back
        self._rest = b""

    async def send_all(self, data: bytes) -> None:
        self._there.send_nowait((trio.current_time() + self._delay, bytes(data)))

    async def receive_some(self, n: int | None = None) -> bytes:
        while not self._rest:
            try:
                at, self._rest = await self._back.receive()
            except trio.EndOfChannel:
                return b""
            await trio.sleep_until(at)
        data, self._rest = self._rest[:n], self._rest[n:] if n is not None else b""
        return data

    async def aclose(self) -> None:
        self._there.close()


class PacedEnd(DelayedEnd):
    """One end of a link with a limited rate and no buffer."""

    def __init__(self, rate: float, there: Any, back: Any) -> None:
        super().__init__(0.0, there, back)
        self._rate = rate

    async def send_all(self, data: bytes) -> None:
        await trio.sleep(len(data) / self._rate)
        await super().send_all(data)


def channels() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return both ends of an unbounded queue in each direction."""
    to_two, at_two = trio.open_memory_channel[tuple[float, bytes]](float("inf"))
    to_one, at_one = trio.open_memory_channel[tuple[float, bytes]](float("inf"))
    return (to_two, at_one), (to_one, at_two)


def delayed_pair(delay: float) -> tuple[DelayedEnd, DelayedEnd]:
    """Return both ends of a link with latency and unlimited rate."""
    one, two = channels()
    return DelayedEnd(delay, *one), DelayedEnd(delay, *two)


def paced_pair(rate: float) -> tuple[PacedEnd, PacedEnd]:
    """Return both ends of a link with a rate in bytes per second."""
    one, two = channels()
    return PacedEnd(rate, *one), PacedEnd(rate, *two)


Pipe = Callable[[], tuple[Any, Any]]


@asynccontextmanager
async def two_sessions(
    make_pipe: Pipe = trio.testing.memory_stream_pair, kinds: tuple[type, type] = (YamuxSession, YamuxSession)
) -> AsyncIterator[tuple[Any, Any]]:
    """Yield a dialling and an accepting session of the given classes."""
    ends = make_pipe()
    made: list[Any] = []
    for kind, end, initiator in zip(kinds, ends, (True, False), strict=True):
        connection: Any = PipeConnection(end, is_initiator=initiator)
        made.append(kind(connection, PEER) if kind is YamuxSession else kind(connection, PEER, is_initiator=initiator))
    async with trio.open_nursery() as nursery:
        for session in made:
            nursery.start_soon(session.start)
        for session in made:
            await session.event_started.wait()
        yield made[0], made[1]
        for session in made:
            await session.close()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def session_and_wire(
    make_pipe: Pipe = trio.testing.memory_stream_pair, unread: UnreadBytes | None = None
) -> AsyncIterator[tuple[YamuxSession, Any]]:
    """Yield an accepting session and the other end of its pipe, on which a test writes raw frames."""
    ours, theirs = make_pipe()
    connection: Any = PipeConnection(ours, is_initiator=False)
    session = YamuxSession(connection, PEER, unread=unread)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.start)
        await session.event_started.wait()
        yield session, theirs
        await session.close()


def run(case: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(3600):
            await case()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@asynccontextmanager
async def two_ends(make_pipe: Pipe = trio.testing.memory_stream_pair) -> AsyncIterator[tuple[Any, Any, Any, Any]]:
    """Yield two sessions and both ends of a stream, the one that opened it first."""
    async with two_sessions(make_pipe) as (one, two):
        yield one, two, await one.open_stream(), await two.accept_stream()


def frame(kind: int, flags: int, stream: int, length: int | None = None, data: bytes = b"") -> bytes:
    return HEADER.pack(0, kind, flags, stream, len(data) if length is None else length) + data


FIRST_PING = frame(2, 1, 0, 1)
"""What a session sends first, to measure the round trip."""


async def read_all(stream: Any) -> bytes:
    data = bytearray()
    while True:
        try:
            part = await stream.read(65536)
        except Exception as error:
            if "EOF" in type(error).__name__:
                return bytes(data)
            raise
        if not part:
            return bytes(data)
        data += part


# ------------------------------------------------------------------------------------------------------------ transfer


async def test_frame_received_as_its_reader_is_cancelled_goes_to_the_next_reader() -> None:
    async with session_and_wire() as (session, wire):
        await wire.send_all(frame(UPDATE, SYN, 1, 0))
        stream = await session.accept_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.read_into, memoryview(bytearray(9)))
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            target = stream.inplace_target(0, 5)  # what the session does before the reader's task runs again
            assert target is not None
            target[:] = b"first"
            stream.commit_inplace(5)
            stream.receive(memoryview(bytearray(b" then")))
        assert await stream.read(99) + await stream.read(99) == b"first then"
        assert session.unread.size == 0


async def read_by(stream: Any, kind: str, size: int) -> bytes:
    """Read up to `size` bytes (or one part) with one of three methods; then overwrite the buffer that was used."""
    if kind == "read":
        return bytes(await stream.read(size))
    buffer = memoryview(bytearray(size))
    try:
        if kind == "into":
            return bytes(buffer[: await stream.read_into(buffer)])
        buffer = await stream.read_part()
        return bytes(buffer)
    finally:
        buffer[:] = bytes(len(buffer))
        release_buffer(buffer)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 60_000), min_size=1, max_size=6),
    st.lists(st.integers(100, 50_000), min_size=1, max_size=40),
    st.lists(
        st.tuples(st.integers(1, 90_000), st.booleans(), st.sampled_from(["into", "read", "part"])),
        min_size=1,
        max_size=40,
    ),
)
def test_cancelled_readers_lose_no_bytes_wherever_frames_are_split(
    frames: list[int], cuts: list[int], reads: list[tuple[int, bool, str]]
) -> None:
    """A frame is received in place if a reader waits; if that is cancelled, the next reader, of any kind, gets it."""
    whole = random.Random(len(frames)).randbytes(sum(frames))

    async def case() -> None:
        async with session_and_wire() as (session, wire):
            await wire.send_all(frame(UPDATE, SYN, 1, 0))
            stream = await session.accept_stream()
            got = bytearray()

            async def arrive() -> None:
                sent, at = b"", 0
                for size in frames:
                    sent += frame(DATA, 0, 1, data=whole[at : at + size])
                    at += size
                sent += frame(UPDATE, FIN, 1, 0)
                at = 0
                while at < len(sent):
                    cut = cuts[at % len(cuts)]
                    await wire.send_all(sent[at : at + cut])
                    at += cut
                    await trio.sleep(0.1)

            async def read() -> None:
                for number in itertools.count():
                    size, patient, kind = reads[number % len(reads)]
                    with trio.move_on_after(3600 if patient else 0.07):
                        try:
                            got.extend(await read_by(stream, kind, size))
                        except MuxedStreamEOF:
                            return

            async def swallow() -> None:
                while await wire.receive_some():
                    pass

            async with trio.open_nursery() as nursery:
                nursery.start_soon(swallow)
                nursery.start_soon(arrive)
                await read()
                nursery.cancel_scope.cancel()
            assert bytes(got) == whole
            assert session.unread.size == 0

    run(case)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 200_000), max_size=4), st.lists(st.integers(0, 9000))),
        max_size=6,
    )
)
def test_streams_deliver_all_bytes_in_order(plan: list[tuple[bool, list[int], list[int]]]) -> None:
    async def case() -> None:
        async with two_sessions() as (one, two):
            for index, (dialler, there, back) in enumerate(plan):
                opener, accepter = (one, two) if dialler else (two, one)
                near = await opener.open_stream()
                far = await accepter.accept_stream()
                sent = [random.Random(index * 100 + i).randbytes(size) for i, size in enumerate(there)]
                answer = [random.Random(index * 100 + 50 + i).randbytes(size) for i, size in enumerate(back)]
                got: dict[str, bytes] = {}

                async def pump(
                    stream: Any, parts: list[bytes], into: str, peer: Any, *, got: dict[str, bytes] = got
                ) -> None:
                    async with trio.open_nursery() as nursery:

                        async def receive() -> None:
                            got[into] = await read_all(peer)

                        nursery.start_soon(receive)
                        for part in parts:
                            await stream.write(part)
                        await stream.close()

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(pump, near, sent, "there", far)
                    nursery.start_soon(pump, far, answer, "back", near)
                assert got == {"there": b"".join(sent), "back": b"".join(answer)}
            assert not one._streams
            assert not two._streams

    run(case)


@pytest.mark.parametrize(
    "kinds", [(YamuxSession, Yamux), (Yamux, YamuxSession)], ids=["we dial py-libp2p", "py-libp2p dials us"]
)
@pytest.mark.parametrize("ours_opens", [True, False])
async def test_interoperates_with_py_libp2p_yamux(kinds: tuple[type, type], ours_opens: bool) -> None:
    async with two_sessions(kinds=kinds) as pair:
        ours, stock = pair if kinds[0] is YamuxSession else pair[::-1]
        opener, accepter = (ours, stock) if ours_opens else (stock, ours)
        payload = random.Random(1).randbytes(1_500_000)
        near = await opener.open_stream()
        got: list[bytes] = []

        async def serve() -> None:
            far = await accepter.accept_stream()
            data = await read_all(far)
            await far.write(data[::-1])
            await far.close()

        async def ask() -> None:
            await near.write(payload)
            await near.close()
            got.append(await read_all(near))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            nursery.start_soon(ask)
        assert got == [payload[::-1]]
        broken = await opener.open_stream()
        await broken.write(b"x")
        far = await accepter.accept_stream()
        await broken.reset()
        if accepter is ours:
            with pytest.raises(MuxedStreamReset):
                await far.read(10)
        again = await opener.open_stream()  # the connection is intact, whatever py-libp2p makes of the reset
        await again.write(b"y")
        assert await (await accepter.accept_stream()).read(10) == b"y"


async def test_blocked_writer_waits_without_blocking_other_streams() -> None:
    async with two_ends() as (one, two, slow, slow_far):
        done = trio.Event()

        async def write() -> None:
            await slow.write(bytes(3 * MAX_WINDOW))
            await slow.close()
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            await trio.sleep(120)  # far longer than py-libp2p's five seconds, and than keepalive
            assert not done.is_set()
            assert two.unread.size <= MAX_WINDOW
            quick = await one.open_stream()
            quick_far = await two.accept_stream()
            await quick.write(b"hello")
            assert await quick_far.read(10) == b"hello"
            assert len(await read_all(slow_far)) == 3 * MAX_WINDOW
        assert done.is_set()
        assert two.unread.size == 0


@pytest.mark.parametrize(
    ("delay", "rate", "window"),
    [(0.0001, 40e6, INITIAL_WINDOW), (0.1, 20e6, MAX_WINDOW), (0.0001, 400e6, MAX_WINDOW)],
    ids=["short round trip", "long round trip", "fast link"],
)
async def test_window_grows_on_links_with_long_round_trip_or_high_rate(delay: float, rate: float, window: int) -> None:
    async with two_ends(lambda: delayed_pair(delay)) as (_one, _two, near, far):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.write, bytes(80 * INITIAL_WINDOW))
            left = 80 * INITIAL_WINDOW
            while left:
                count = len(await far.read(100_000))
                left -= count
                await trio.sleep(count / rate)
        assert far.receive_window == window


def test_a_pause_does_not_count_as_a_slow_link() -> None:
    rate = ReceiveRate()
    for arrival in range(200):
        rate.add(1 << 20, arrival * 0.001)
    fast = rate.bytes_per_second
    assert fast == pytest.approx(1000 << 20, rel=0.05)
    rate.add(1 << 20, 100.0)
    assert rate.bytes_per_second == fast
    for arrival in range(200):
        rate.add(1 << 10, 100 + arrival * 0.001)
    assert rate.bytes_per_second == pytest.approx(1000 << 10, rel=0.05)


@pytest.mark.parametrize("rate", [40_000_000, 2_000_000], ids=lambda rate: f"{rate // 125_000} Mbit/s")
async def test_request_is_not_delayed_by_two_transfers_that_fill_the_link(rate: int) -> None:
    async with two_sessions(lambda: paced_pair(rate)) as (one, two):

        async def serve() -> None:
            while True:
                far = await two.accept_stream()
                nursery.start_soon(answer if await far.read(1) == b"?" else drain, far)

        async def answer(far: Any) -> None:
            await far.write(b"!" * 100)
            await far.close()

        async def drain(far: Any) -> None:
            while True:
                await far.read(1 << 20)

        async def fill() -> None:
            near = await one.open_stream()
            while True:
                await near.write(bytes(1 << 20))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            nursery.start_soon(fill)
            nursery.start_soon(fill)
            await trio.sleep(2)
            times = []
            for _ in range(60):
                began = trio.current_time()
                near = await one.open_stream()
                await near.write(b"?")
                await near.close()
                assert len(await read_all(near)) == 100
                times.append(trio.current_time() - began)
                await trio.sleep(0.01)
            assert max(times) < 0.05
            nursery.cancel_scope.cancel()


async def test_slow_reader_grants_window_regularly() -> None:
    async with two_ends() as (_one, two, near, far), trio.open_nursery() as nursery:
        nursery.start_soon(near.write, bytes(2 * INITIAL_WINDOW))
        await trio.sleep(1)
        assert near._send_window == 0
        for _ in range(10):
            await trio.sleep(1.1)
            await far.read(1000)
        assert two.unread.size > INITIAL_WINDOW - 2000  # what was read has been replaced: the writer sees progress
        nursery.cancel_scope.cancel()


# ------------------------------------------------------------------------------------------------------ end of streams


async def test_broken_connection_is_never_a_clean_end_of_stream() -> None:
    async with two_ends() as (one, two, near, far):
        await near.write(b"half of it")
        assert await far.read(100) == b"half of it"
        await one.transport.stream.aclose()
        for _ in range(2):
            with pytest.raises(MuxedStreamReset):
                await far.read(100)
        with pytest.raises(MuxedStreamReset):
            await far.write(b"x")
        await two.event_closed.wait()
        with pytest.raises(MuxedConnUnavailable):
            await two.open_stream()
        with pytest.raises(MuxedConnUnavailable):
            await two.accept_stream()


async def test_reset_discards_unread_bytes() -> None:
    async with two_ends() as (one, two, near, far):
        await near.write(bytes(1000))
        await near.reset()
        await near.reset()
        await trio.sleep(1)
        assert two.unread.size == 0
        with pytest.raises(MuxedStreamReset):
            await far.read(10)
        assert not one._streams
        assert not two._streams


async def test_discarded_stream_does_not_block_the_writer() -> None:
    async with two_ends() as (one, two, near, far):
        await near.write(b"x")
        await far.close()
        await far.discard()
        await near.write(bytes(3 * MAX_WINDOW))
        await near.close()
        with pytest.raises(MuxedStreamEOF):
            await near.read(1)
        await trio.sleep(1)
        assert not one._streams
        assert not two._streams


async def test_close_flushes_pending_fin_and_does_not_wait_for_a_closed_peer() -> None:
    async with two_ends() as (one, two, near, far):
        await near.write(b"the last answer")
        with trio.CancelScope() as scope:
            scope.cancel()
            await near.close()
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.close)
            assert await read_all(far) == b"the last answer"
            nursery.start_soon(two.close)
        assert trio.current_time() == began


async def test_stream_ended_before_connection_close_is_readable_to_its_end() -> None:
    async with two_sessions() as (one, two):
        near, cut = await one.open_stream(), await one.open_stream()
        far, cut_far = await two.accept_stream(), await two.accept_stream()
        await near.write(bytes(100_000))
        await near.close()
        await cut.write(bytes(100_000))
        await one.close()
        await two.event_closed.wait()
        assert len(await read_all(far)) == 100_000
        with pytest.raises(MuxedStreamReset):
            await cut_far.read(10)
        with pytest.raises(MuxedStreamReset):
            await far.write(b"x")


async def test_close_of_a_blocked_connection_is_bounded() -> None:
    async with session_and_wire(trio.testing.lockstep_stream_pair) as (session, _peer):
        await trio.sleep(PING_INTERVAL + 1)  # the write of a ping is blocked
        began = trio.current_time()
        await session.close()
        assert trio.current_time() - began <= session_module.GO_AWAY_TIMEOUT


# -------------------------------------------------------------------------------------------------------- cancellation


async def test_cancelled_write_does_not_corrupt_other_streams() -> None:
    async with two_sessions(trio.testing.lockstep_stream_pair) as (one, two):
        streams = [await one.open_stream() for _ in range(8)]
        far = [await two.accept_stream() for _ in streams]
        for number, stream in enumerate(streams):
            with trio.move_on_after(0.01 * number):
                await stream.write(bytes(MAX_WINDOW))
        survivor = await one.open_stream()
        survivor_far = await two.accept_stream()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(survivor.write, bytes(range(256)) * 1000)
            got = bytearray()
            while len(got) < 256_000:
                got += await survivor_far.read(10_000)
        assert got == bytes(range(256)) * 1000
        for stream in (*streams, *far):
            await stream.reset()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_cancelled_close_or_reset_still_reaches_the_peer(how: str) -> None:
    async with two_ends() as (_one, _two, near, far):
        with trio.CancelScope() as scope:
            scope.cancel()
            await getattr(near, how)()
        assert scope.cancelled_caught
        with pytest.raises(MuxedStreamEOF if how == "close" else MuxedStreamReset):
            await far.read(10)


async def test_cancelled_open_leaves_no_stream() -> None:
    async with two_sessions() as (one, two):
        with trio.CancelScope() as scope:
            scope.cancel()
            await one.open_stream()
        assert not one._streams
        near = await one.open_stream()
        await near.write(b"next")
        assert await (await two.accept_stream()).read(10) == b"next"


# ------------------------------------------------------------------------------------------------------- hostile peers


@pytest.mark.parametrize(
    "wire",
    [
        b"\x01" + bytes(11),
        frame(7, 0, 0),
        frame(DATA, SYN, 1, MAX_WINDOW + 1),
        frame(DATA, SYN, 2, data=b"x"),
        frame(DATA, SYN, 0, data=b"x"),
        frame(UPDATE, SYN, 1, 0) * 2,
        frame(UPDATE, SYN, 1, 0) + frame(DATA, 0, 1, data=bytes(MAX_WINDOW)) + frame(DATA, 0, 1, data=b"x"),
        frame(DATA, SYN | FIN, 1, data=b"x") + frame(DATA, 0, 1, data=b"y"),
    ],
    ids=["version", "type", "length", "our id", "id 0", "open twice", "window", "after its end"],
)
async def test_protocol_violation_closes_the_connection(wire: bytes) -> None:
    async with session_and_wire() as (session, peer):
        await peer.send_all(wire)
        await session.event_closed.wait()
        assert session.is_closed


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=40),
            st.builds(
                lambda kind, flags, stream, data: frame(kind, flags, stream, data=data if kind == DATA else b""),
                st.integers(0, 3),
                st.integers(0, 15),
                st.integers(0, 9),
                st.binary(max_size=30),
            ),
        ),
        max_size=40,
    )
)
def test_random_input_only_closes_the_connection(wire: list[bytes]) -> None:
    async def case() -> None:
        async with session_and_wire() as (session, peer), trio.open_nursery() as nursery:

            async def accept() -> None:
                try:
                    while True:
                        nursery.start_soon(read, await session.accept_stream())
                except MuxedConnUnavailable:
                    return

            async def read(stream: Any) -> None:
                try:
                    while True:
                        await stream.read(10)
                except MuxedStreamEOF:
                    with suppress(MuxedStreamReset):
                        await stream.close()
                except MuxedStreamReset:
                    return

            nursery.start_soon(accept)
            for part in wire:
                try:
                    await peer.send_all(part)
                except trio.BrokenResourceError:
                    break
            await peer.aclose()
            await session.event_closed.wait()
        assert session.is_closed

    run(case)


@pytest.mark.parametrize(
    "flood",
    [
        lambda n: frame(UPDATE, SYN, 2 * n + 1, 0) + frame(UPDATE, RST, 2 * n + 1, 0),
        lambda n: frame(PING, SYN, 0, n),
        lambda n: frame(DATA, 0, 2 * n + 1, data=b"x"),
    ],
    ids=["open and reset", "ping", "unknown streams"],
)
async def test_flood_by_a_peer_that_does_not_read_closes_the_connection(flood: Callable[[int], bytes]) -> None:
    async with (
        session_and_wire(trio.testing.lockstep_stream_pair) as (session, peer),
        trio.open_nursery() as nursery,
    ):

        async def accept() -> None:
            with pytest.raises(MuxedConnUnavailable):
                while True:
                    await session.accept_stream()

        nursery.start_soon(accept)
        with pytest.raises((trio.BrokenResourceError, trio.ClosedResourceError)):
            for first in range(0, 8 * MAX_STREAMS, 64):
                await peer.send_all(b"".join(map(flood, range(first, first + 64))))
        await session.event_closed.wait()


async def test_unread_bytes_are_limited_per_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_UNREAD", 3 * MAX_WINDOW)
    async with session_and_wire() as (session, peer):
        for stream in range(1, 11, 2):
            await peer.send_all(frame(UPDATE, SYN, stream, 0) + frame(DATA, 0, stream, data=bytes(INITIAL_WINDOW)))
        await session.event_closed.wait()
        assert session.unread.size == 0


@pytest.mark.nightly
async def test_many_unread_circuits_do_not_close_the_connection() -> None:
    async with two_sessions() as (one, two):
        nears, fars = [], []
        for _ in range(128):  # as many circuits as a relay carries for one peer
            nears.append(await one.open_stream())
            fars.append(await two.accept_stream())
            fars[-1].carry_circuit()
        assert sum(far.is_wide for far in fars) == session_module.MAX_WIDE
        async with trio.open_nursery() as nursery:
            for near in nears:
                nursery.start_soon(near.write, bytes(2 * MAX_WINDOW))
            await trio.sleep(60)
            assert not two.is_closed
            assert (
                two.unread.size
                == session_module.MAX_WIDE * MAX_WINDOW + (128 - session_module.MAX_WIDE) * INITIAL_WINDOW
            )
            nursery.cancel_scope.cancel()


async def test_unread_limit_is_shared_by_connections_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_UNREAD", 3 * MAX_WINDOW)
    full = b"".join(
        frame(UPDATE, SYN, stream, 0) + frame(DATA, 0, stream, data=bytes(INITIAL_WINDOW)) for stream in range(1, 15, 2)
    )
    shared = UnreadBytes()
    async with session_and_wire(unread=shared) as (first, one), session_and_wire(unread=shared) as (second, two):
        await one.send_all(full)
        await trio.testing.wait_all_tasks_blocked()
        assert not first.is_closed
        await two.send_all(full)
        await second.event_closed.wait()
        assert not first.is_closed
        stream = await first.accept_stream()
        assert await stream.read(5) == bytes(5)
        assert shared.size == 7 * INITIAL_WINDOW - 5
    assert shared.size == 0


async def test_streams_over_the_limit_are_reset_individually() -> None:
    async with session_and_wire() as (session, peer):

        async def accept() -> None:
            while True:
                await session.accept_stream()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            for stream in range(MAX_STREAMS):
                await peer.send_all(frame(UPDATE, SYN, 2 * stream + 1, 0))
            await trio.sleep(1)
            over = 2 * MAX_STREAMS + 1
            await peer.send_all(frame(UPDATE, SYN, over, 0))
            await trio.sleep(1)
            assert not session.is_closed
            assert (await peer.receive_some()).endswith(frame(UPDATE, RST, over, 0))
            nursery.cancel_scope.cancel()


# ----------------------------------------------------------------------------------------------------------- keepalive


async def test_ping_is_answered_with_its_value() -> None:
    async with session_and_wire() as (_, peer):
        assert await peer.receive_some() == FIRST_PING
        await peer.send_all(frame(PING, SYN, 0, 7))
        assert await peer.receive_some() == frame(PING, ACK, 0, 7)


async def test_silent_peer_is_dropped_after_ping_interval_and_timeout() -> None:
    async with session_and_wire() as (session, peer):
        began = trio.current_time()
        await session.event_closed.wait()
        assert trio.current_time() - began == pytest.approx(PING_INTERVAL + PING_TIMEOUT)
        assert await peer.receive_some() == FIRST_PING + frame(PING, SYN, 0, 0)


def test_suspended_process_does_not_drop_its_peers() -> None:
    clock = trio.testing.MockClock()

    async def case() -> None:
        async with session_and_wire() as (session, peer):
            for seconds in (PING_INTERVAL + 40, PING_INTERVAL, PING_TIMEOUT + 40):
                await trio.testing.wait_all_tasks_blocked()
                clock.jump(seconds)
            await trio.testing.wait_all_tasks_blocked()
            assert not session.is_closed
            assert await peer.receive_some() == FIRST_PING + frame(PING, SYN, 0, 0)
            clock.jump(PING_INTERVAL)
            await trio.testing.wait_all_tasks_blocked()
            await peer.send_all(frame(PING, ACK, 0, 0))
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(PING_TIMEOUT)
            await trio.testing.wait_all_tasks_blocked()
            assert not session.is_closed

    trio.run(case, clock=clock)


async def test_silent_peer_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_CONTROL", 4)
    async with session_and_wire(trio.testing.lockstep_stream_pair) as (session, peer):
        await peer.send_all(frame(PING, SYN, 0, 1))
        await trio.testing.wait_all_tasks_blocked()
        await peer.send_all(frame(PING, SYN, 0, 1) * 4)  # the first reply is being written, these are queued
        await session.event_closed.wait()
        await peer.aclose()
