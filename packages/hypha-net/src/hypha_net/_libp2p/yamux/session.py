"""``/yamux/1.0.0``: many streams over one connection, wire-compatible with other yamux implementations.

py-libp2p's own fails a write after five seconds without credit, takes a killed peer for a clean end of stream, and
corrupts the connection when a blocked write is cancelled. Here a broken connection resets its streams, a frame is sent
whole or not at all (the connection below shields it), and a peer that is silent for `PING_INTERVAL` + `PING_TIMEOUT`
loses the connection.

The specification: https://github.com/hashicorp/yamux/blob/master/spec.md
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import trio
from libp2p.abc import IMuxedConn
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamError, MuxedStreamReset
from multiaddr import Multiaddr

from hypha_net._libp2p.yamux.link_estimator import AdaptiveFrameSize, RttEstimator
from hypha_net._libp2p.yamux.receive_buffer import Unread, acquire_buffer
from hypha_net._libp2p.yamux.stream import (
    HEADER,
    SMALL,
    START_WINDOW,
    WINDOW,
    FrameFlag,
    FrameType,
    YamuxStream,
    frame_header,
)
from hypha_net._libp2p.yamux.transport import SecureTransport

_log = logging.getLogger("hypha_net.muxer")

PROTOCOL: Final = "/yamux/1.0.0"
MAX_STREAMS: Final = 4096
"""Streams that a peer may have open at once."""
PING_INTERVAL: Final = 15.0
PING_TIMEOUT: Final = 15.0
GOODBYE_TIMEOUT: Final = 0.5
"""Seconds within which what waits to be sent has to leave when this side closes the connection."""
FROZEN: Final = 2.0
"""When a sleep overshoots by so much this process was stopped, and silence says nothing about the peer."""
MAX_CONTROL: Final = 4 * MAX_STREAMS
"""Control frames that wait to be sent; a peer that causes more without reading any is dropped."""

MAX_UNREAD: Final = 256 << 20
"""Bytes of one peer that may wait to be read; a connection that brings more is dropped."""
MAX_WIDE: Final = MAX_UNREAD // 2 // WINDOW
"""Streams of a connection that have the largest window at once."""

_EMPTY: Final = memoryview(b"")


class YamuxSession(IMuxedConn):
    """A connection that carries streams."""

    def __init__(
        self,
        conn: SecureTransport,
        peer_id: ID,
        serve: Callable[[YamuxStream], Awaitable[None]] | None = None,
        unread: Unread | None = None,
    ) -> None:
        """Carry streams over `conn`; those that the peer opens go to `serve`, or wait for `accept_stream`.

        Args:
            unread: what the peer's other connections have brought too, if it has any.
        """
        self._conn = conn
        self._serve = serve
        self._served: trio.Nursery
        self._serving = 0
        """Streams that `serve` has not done with."""
        self.peer_id = peer_id
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self._fault = ""
        """What the peer did that ends the connection, once it has."""
        self.end_reason = ""
        """Why the connection ended, once it has."""
        self.unread = unread or Unread()
        self._round_trips = RttEstimator()
        self.relayed = conn.get_connection_type() is ConnectionType.RELAYED
        self._frame_size = AdaptiveFrameSize()
        self._bulk = trio.Lock()
        """Held while a large frame is sent: large ones take turns, and small ones wait for one of them at most."""
        self._streams: dict[int, YamuxStream] = {}
        self._next_id = 1 if conn.is_initiator else 2
        self._accepted, self._to_accept = trio.open_memory_channel[YamuxStream](MAX_STREAMS)
        self._control, self._to_send = trio.open_memory_channel[tuple[FrameType, FrameFlag, int, int]](MAX_CONTROL)
        self._queue_empty = trio.Event()
        self._leaving = False
        self._peer_leaving = False
        self._write_failed = False
        """What the peer has sent before may still be read, and then the connection ends."""
        self.began = self._heard = trio.current_time()
        self._scope = trio.CancelScope()

    # -------------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Read frames until the connection ends, and serve streams until each has; py-libp2p runs this in a task."""
        async with trio.open_nursery() as self._served:
            await self._run()

    async def _run(self) -> None:
        reason = "the connection was closed"
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._keep_alive)
                    nursery.start_soon(self._send_control)
                    self.event_started.set()
                    try:
                        reason = await self._read_frames()
                    finally:
                        await self._shut_down(
                            self._fault or reason
                        )  # first: it frees a write that the peer does not take
                        nursery.cancel_scope.cancel()
        except Exception:  # noqa: BLE001 - it runs in a task of the swarm's, which an error would end with every connection
            _log.exception("the connection with %s is given up", self.peer_id)
        finally:
            self.event_started.set()
            await self._shut_down(self._fault or reason)

    async def close(self) -> None:
        """Tell the peer, end every stream and the connection. Idempotent."""
        if self._leaving or self.is_closed:
            return
        self._leaving = True
        with trio.CancelScope(shield=True, deadline=trio.current_time() + GOODBYE_TIMEOUT):
            self.queue_frame(FrameType.GO_AWAY, FrameFlag(0), 0, 0)
            await self._queue_empty.wait()
        await self._shut_down("the connection was closed")
        self._scope.cancel()

    async def _shut_down(self, reason: str) -> None:
        if self.event_closed.is_set():
            return
        self.end_reason = reason
        self.event_closed.set()
        self._queue_empty.set()  # nothing of it will be sent any more
        for stream in list(self._streams.values()):
            stream.connection_lost(reason)
        self._accepted.close()
        self._control.close()
        with trio.CancelScope(shield=True):
            await self._conn.close()
            if self.on_close is not None:
                await self.on_close()

    async def _keep_alive(self) -> None:
        """Ask a silent peer for a sign of life, and end the connection when none comes."""
        while True:
            frozen = await self._sleeps_too_long(max(0.0, self._heard + PING_INTERVAL - trio.current_time()))
            await self._end_wasted_streams()
            if frozen:
                continue
            if trio.current_time() - self._heard < PING_INTERVAL:
                continue
            asked_at = trio.current_time()
            self.queue_frame(FrameType.PING, FrameFlag.SYN, 0, 0)
            if not await self._sleeps_too_long(PING_TIMEOUT) and self._heard < asked_at:
                silent = trio.current_time() - self._heard
                _log.warning("%s has been silent for %.0f s and is given up", self.peer_id, silent)
                await self._shut_down("the peer is silent")
                self._scope.cancel()
                return

    async def _end_wasted_streams(self) -> None:
        now = trio.current_time()
        for stream in [stream for stream in self._streams.values() if stream.is_wasted(now)]:
            await stream.reset()

    async def _sleeps_too_long(self, seconds: float) -> bool:
        """Sleep; true if this process was stopped meanwhile: then counting starts anew."""
        until = trio.current_time() + seconds
        await trio.sleep_until(until)
        if trio.current_time() <= until + FROZEN:
            return False
        self._heard = trio.current_time()
        return True

    # ------------------------------------------------------------------------------------------------ streams

    async def open_stream(self, *, announce: bool = True) -> YamuxStream:
        """Open a stream to the peer, which hears of it now, or without `announce` with the first bytes on it."""
        if self.is_closed or self._leaving or self._peer_leaving:
            raise MuxedConnUnavailable("the connection is closing")
        stream = YamuxStream(self, self._next_id)
        stream.pending_flags = FrameFlag.SYN
        self._next_id += 2
        self._streams[stream.stream_id] = stream
        try:
            if announce:
                await stream.announce()
            else:
                await trio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            self._streams.pop(stream.stream_id, None)
            raise
        return stream

    async def accept_stream(self) -> YamuxStream:
        """Wait for a stream that the peer opens; for the connection's end where `serve` gets them."""
        try:
            stream = await self._to_accept.receive()
            await stream.announce()
        except (trio.EndOfChannel, trio.ClosedResourceError, MuxedStreamReset):
            raise MuxedConnUnavailable("the connection is closed") from None
        return stream

    def forget_if_over(self, stream: YamuxStream) -> None:
        """Drop the entry of a stream that has ended."""
        if stream.over:
            self._streams.pop(stream.stream_id, None)

    # ------------------------------------------------------------------------------------------------- frames

    async def send_frame(
        self,
        kind: FrameType,
        flags: FrameFlag,
        stream_id: int,
        length: int,
        data: memoryview | None = None,
        before: bytes = b"",
    ) -> None:
        """Send one frame, whole. Raises `IOException` when the connection is gone.

        Args:
            before: a frame that goes with it, made by `frame_header`.
        """
        header = before + frame_header(kind, flags, stream_id, length)
        try:
            if data is None:
                await self._conn.write(header)
            elif length <= SMALL:  # one record of TLS
                await self._conn.write(header + data)
            else:
                await self._send_large(header, data, length)
        except IOException:
            self._write_failed = True
            raise

    async def _send_large(self, header: bytes, data: memoryview, length: int) -> None:
        try:
            self._bulk.acquire_nowait()
        except trio.WouldBlock:
            await self._bulk.acquire()
        try:
            began = trio.current_time()
            await self._conn.write(header, data)
            self._frame_size.took(length, trio.current_time() - began)
        finally:
            self._bulk.release()

    async def _read_frames(self) -> str:
        """Handle frames until there are no more; why there are none."""
        header = memoryview(bytearray(HEADER.size))
        try:
            while True:
                if not await self._fill(header):
                    return "the peer closed the connection"
                version, kind, flags, stream_id, length = HEADER.unpack(header)
                if version != 0 or kind > FrameType.GO_AWAY:
                    raise MuxedStreamError(f"a frame of version {version}, type {kind}")
                body = _EMPTY
                if kind == FrameType.DATA and length:
                    read = await self._read_body(stream_id, length)
                    if read is None:
                        return "the connection ended within a frame"
                    body = read
                self._handle(FrameType(kind), FrameFlag(flags & 15), stream_id, length, body)
        except MuxedStreamError as error:
            _log.warning("%s does not speak yamux properly and is dropped: %s", self.peer_id, error)
            return str(error)
        except IOException as error:
            return str(error)

    async def _read_body(self, stream_id: int, length: int) -> memoryview | None:
        """A frame's bytes, empty where they have landed; none at the connection's end."""
        if length > WINDOW:
            raise MuxedStreamError(f"a frame of {length} bytes")
        stream = self._streams.get(stream_id)
        if stream is not None and stream.lands(length):
            return await self._fill_landing(stream, length)
        body = acquire_buffer(length)
        return body if await self._fill(body) else None

    def queue_frame(self, kind: FrameType, flags: FrameFlag, stream_id: int, length: int) -> None:
        """Have the writer task send a frame: readers that wait for room could wait for each other for ever."""
        if self.is_closed:
            return
        try:
            self._control.send_nowait((kind, flags, stream_id, length))
        except trio.WouldBlock:
            self._give_up("it causes control frames faster than it reads them")
            return
        if self._queue_empty.is_set():
            self._queue_empty = trio.Event()

    def _give_up(self, fault: str) -> None:
        """Drop the connection, whoever notices that it must be."""
        if not self._fault:
            self._fault = fault
            _log.warning("%s does not speak yamux properly and is dropped: %s", self.peer_id, fault)
            self._scope.cancel()

    @property
    def first_window(self) -> int:
        """What a peer may have under way on one stream at first: more where three processes keep each other busy."""
        return WINDOW if self.relayed and self.may_widen() else START_WINDOW

    def may_widen(self) -> bool:
        """Whether one more stream may have the largest window: many of them unread would end the connection."""
        return sum(stream.is_wide for stream in self._streams.values()) < MAX_WIDE

    @property
    def frame(self) -> int:
        """How many bytes of one stream are sent at a time now."""
        return self._frame_size.bytes

    def round_trip(self) -> float:
        """The shortest time that a ping took to come back, in seconds; 0 until there have been a few. Asks again."""
        number = self._round_trips.next_number()
        if number is not None:
            self.queue_frame(FrameType.PING, FrameFlag.SYN, 0, number)
        return self._round_trips.seconds()

    def queue_credit(self, stream: YamuxStream, amount: int) -> None:
        """Return credit for bytes that nobody wants."""
        if amount:
            stream.allow(amount)
            self.queue_frame(FrameType.WINDOW, FrameFlag(0), stream.stream_id, amount)

    async def _send_control(self) -> None:
        try:
            async for frame in self._to_send:
                await self.send_frame(*frame)
                if not self._to_send.statistics().current_buffer_used:
                    self._queue_empty.set()
        except IOException as error:
            _log.debug("control frames to %s end: %s", self.peer_id, error)
        self._queue_empty.set()

    async def _fill(self, buffer: memoryview) -> bool:
        while buffer:
            count = self._conn.read_now(buffer)
            if count is None:
                await self._conn.more()
                continue
            if not count:
                return False
            self._heard = trio.current_time()
            buffer = buffer[count:]
        return True

    async def _fill_landing(self, stream: YamuxStream, length: int) -> memoryview | None:
        """Read a frame's body to where a reader waits for it; to a buffer, if it goes away, and none at the end.

        An empty buffer says that the body has landed.
        """
        there = 0
        while there < length:
            rest = stream.landing(there, length)
            if rest is None:
                body = acquire_buffer(length)
                body[:there] = stream.rescued()
                return body if await self._fill(body[there:]) else None
            count = self._conn.read_now(rest)
            if count is None:
                await self._conn.more()
                continue
            if not count:
                return None
            self._heard = trio.current_time()
            there += count
        stream.land(length)
        return _EMPTY

    def _handle(self, kind: FrameType, flags: FrameFlag, stream_id: int, length: int, body: memoryview) -> None:
        if kind == FrameType.PING:
            if FrameFlag.SYN in flags:
                self.queue_frame(FrameType.PING, FrameFlag.ACK, 0, length)
            else:
                self._round_trips.came_back(length)
            return
        if kind == FrameType.GO_AWAY:
            self._peer_leaving = True
            return
        stream = self._accept(stream_id) if FrameFlag.SYN in flags else self._streams.get(stream_id)
        if stream is None:
            if not flags & (FrameFlag.RST | FrameFlag.FIN) and FrameFlag.SYN not in flags and kind == FrameType.DATA:
                self.queue_frame(FrameType.WINDOW, FrameFlag.RST, stream_id, 0)
            return
        if kind == FrameType.DATA:
            stream.receive(body)
            if self.unread.size > MAX_UNREAD:
                raise MuxedStreamError(f"{self.unread.size} bytes of it wait to be read")
        else:
            stream.add_credit(length)
        if FrameFlag.RST in flags:
            stream.break_off("the peer reset the stream")
        elif FrameFlag.FIN in flags:
            stream.end_there()
            self.forget_if_over(stream)

    def _accept(self, stream_id: int) -> YamuxStream | None:
        ours = stream_id % 2 == self._next_id % 2
        if ours or stream_id == 0 or stream_id in self._streams:
            raise MuxedStreamError(f"stream {stream_id} is not the peer's to open")
        if self._is_crowded() or self._leaving or self.is_closed:
            self.queue_frame(FrameType.WINDOW, FrameFlag.RST, stream_id, 0)
            return None
        stream = YamuxStream(self, stream_id)
        stream.pending_flags = FrameFlag.ACK
        self._hand_over(stream)
        self._streams[stream_id] = stream
        return stream

    def _is_crowded(self) -> bool:
        """Whether the peer has as many streams open as it may."""
        if len(self._streams) < MAX_STREAMS:
            return False
        return sum(number % 2 != self._next_id % 2 for number in self._streams) >= MAX_STREAMS

    def _hand_over(self, stream: YamuxStream) -> None:
        try:
            if self._serve is None:
                self._accepted.send_nowait(stream)
                return
            if self._serving == 2 * MAX_STREAMS:
                raise trio.WouldBlock
        except trio.WouldBlock:
            raise MuxedStreamError("it opens and resets streams faster than they are looked at") from None
        self._serving += 1
        self._served.start_soon(self._serve_one, self._serve, stream)

    async def _serve_one(self, serve: Callable[[YamuxStream], Awaitable[None]], stream: YamuxStream) -> None:
        try:
            await serve(stream)
        finally:
            self._serving -= 1

    # --------------------------------------------------------------------------------------------- properties

    @property
    def is_initiator(self) -> bool:
        """Whether this side dialled."""
        return bool(self._conn.is_initiator)

    @property
    def is_established(self) -> bool:
        """Whether streams can be opened."""
        return self.event_started.is_set() and not self.is_closed and not self._write_failed

    @property
    def is_closed(self) -> bool:
        """Whether the connection is over."""
        return self.event_closed.is_set()

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Addresses of the connection below."""
        return self._conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        """Direct or relayed."""
        return self._conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Address of the connection's other end."""
        return self._conn.get_remote_address()
