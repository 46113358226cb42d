"""Yamux session (``/yamux/1.0.0``): many streams over one connection, wire-compatible with other implementations.

Replaces py-libp2p's yamux, which fails a write after five seconds without credit, takes a killed peer for a clean end
of stream, and corrupts the connection when a blocked write is cancelled. Here a broken connection resets its streams, a
frame is sent whole or not at all (the transport shields it), and a peer that is silent for `PING_INTERVAL` +
`PING_TIMEOUT` loses the connection.

Made by `compat.swarm.YamuxMultistream` over a `yamux.transport.SecureTransport`; passes each inbound stream to
`streams.inbound`.

Specification: https://github.com/hashicorp/yamux/blob/master/spec.md
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

from hypha_net._libp2p.yamux.frames import (
    HEADER,
    INITIAL_WINDOW,
    MAX_WINDOW,
    SMALL_BODY,
    FrameFlag,
    FrameType,
    frame_header,
)
from hypha_net._libp2p.yamux.link_estimator import AdaptiveFrameSize, ReceiveRate, RttEstimator
from hypha_net._libp2p.yamux.receive_buffer import UnreadBytes
from hypha_net._libp2p.yamux.stream import YamuxStream
from hypha_net._libp2p.yamux.transport import SecureTransport
from hypha_net.buffer_pool import acquire_buffer

_log = logging.getLogger("hypha_net.yamux")

PROTOCOL: Final = "/yamux/1.0.0"
MAX_STREAMS: Final = 4096
"""Streams that a peer may have open at once."""
PING_INTERVAL: Final = 15.0
"""Seconds of silence after which the peer is pinged."""
PING_TIMEOUT: Final = 15.0
"""Seconds within which it must then send something."""
GO_AWAY_TIMEOUT: Final = 0.5
"""Seconds within which queued control frames are sent when this side closes the connection."""
SUSPENDED: Final = 2.0
"""A sleep that overshoots by so many seconds means that this process was suspended: silence then proves nothing."""
MAX_CONTROL: Final = 4 * MAX_STREAMS
"""Queued control frames; a peer that causes more without reading any loses the connection."""
MAX_UNREAD: Final = 256 << 20
"""Received bytes of one peer that may wait to be read; a connection that exceeds it is closed."""
MAX_WIDE: Final = MAX_UNREAD // 2 // MAX_WINDOW
"""Streams of one connection that may have a widened receive window at once."""

MAX_WINDOW_SECONDS: Final = 0.03
"""Time in which all widened windows of a connection arrive at its present rate; a request may wait as long."""

_EMPTY: Final = memoryview(b"")


class YamuxSession(IMuxedConn):
    """A connection that carries streams."""

    def __init__(
        self,
        conn: SecureTransport,
        peer_id: ID,
        serve: Callable[[YamuxStream], Awaitable[None]] | None = None,
        unread: UnreadBytes | None = None,
    ) -> None:
        """Carry streams over `conn`; those that the peer opens go to `serve`, or wait for `accept_stream`.

        Args:
            unread: the counter that the peer's other connections use, if it has any.
        """
        self.transport = conn
        """The secure connection below."""
        self._serve = serve
        self._served: trio.Nursery
        self._serving = 0
        """Number of streams for which `serve` is running."""
        self.peer_id = peer_id
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self._fault = ""
        """The peer's protocol violation that ends the connection; empty without one."""
        self.end_reason = ""
        """Why the connection ended; empty while it lives."""
        self.unread = unread or UnreadBytes()
        """Counter of received bytes that have not been read, shared by the peer's connections."""
        self._rtt = RttEstimator()
        self.event_round_trip_measured = trio.Event()
        self.is_relayed = conn.get_connection_type() is ConnectionType.RELAYED
        self._frame_size = AdaptiveFrameSize()
        self._receive_rate = ReceiveRate()
        self._bulk = trio.Lock()
        """Held while a large frame is sent, so that a small frame waits for one large frame at most."""
        self._streams: dict[int, YamuxStream] = {}
        self._next_id = 1 if conn.is_initiator else 2
        self._accepted, self._to_accept = trio.open_memory_channel[YamuxStream](MAX_STREAMS)
        self._control, self._queued = trio.open_memory_channel[tuple[FrameType, FrameFlag, int, int]](MAX_CONTROL)
        self._queue_empty = trio.Event()
        self._closing = False
        self._peer_closing = False
        """Whether the peer has sent GO_AWAY."""
        self._write_failed = False
        """Whether sending has failed; what the peer has sent before may still be read."""
        self.started_at = self.last_received_at = trio.current_time()
        """When this session began, and the last bytes of the peer arrived, by trio's clock."""
        self._scope = trio.CancelScope()

    # --------------------------------------------------------------------------------------------- lifetime

    async def start(self) -> None:
        """Read frames until the connection ends, and serve its streams to their end. Run in a task by py-libp2p."""
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
                    self.round_trip()
                    try:
                        reason = await self._read_frames()
                    finally:
                        # before the tasks are cancelled: it ends a write that the peer does not accept
                        await self._shut_down(self._fault or reason)
                        nursery.cancel_scope.cancel()
        except Exception:  # noqa: BLE001 - in a task of the swarm: an error would end it with every other connection
            _log.exception("closing the connection with %s after an unexpected error", self.peer_id)
        finally:
            self.event_started.set()
            await self._shut_down(self._fault or reason)

    async def close(self) -> None:
        """Send GO_AWAY, end every stream and close the connection. Idempotent."""
        if self._closing or self.is_closed:
            return
        self._closing = True
        with trio.CancelScope(shield=True, deadline=trio.current_time() + GO_AWAY_TIMEOUT):
            self.queue_frame(FrameType.GO_AWAY, FrameFlag(0), 0, 0)
            await self._queue_empty.wait()
        await self._shut_down("the connection was closed")
        self._scope.cancel()

    async def _shut_down(self, reason: str) -> None:
        if self.event_closed.is_set():
            return
        self.end_reason = reason
        self.event_closed.set()
        self._queue_empty.set()  # nothing more of it is sent
        for stream in list(self._streams.values()):
            stream.connection_lost(reason)
        self._accepted.close()
        self._control.close()
        with trio.CancelScope(shield=True):
            await self.transport.close()
            if self.on_close is not None:
                await self.on_close()

    async def _keep_alive(self) -> None:
        """Ping a silent peer, and close the connection when it does not answer."""
        while True:
            silent_until = self.last_received_at + PING_INTERVAL
            suspended = await self._sleep_was_suspended(max(0.0, silent_until - trio.current_time()))
            await self._reset_overdue_streams()
            if suspended:
                continue
            if trio.current_time() - self.last_received_at < PING_INTERVAL:
                continue
            pinged_at = trio.current_time()
            self.queue_frame(FrameType.PING, FrameFlag.SYN, 0, 0)
            if not await self._sleep_was_suspended(PING_TIMEOUT) and self.last_received_at < pinged_at:
                silent = trio.current_time() - self.last_received_at
                _log.warning("closing the connection with %s: silent for %.0f s", self.peer_id, silent)
                await self._shut_down("the peer is silent")
                self._scope.cancel()
                return

    async def _reset_overdue_streams(self) -> None:
        now = trio.current_time()
        for stream in [stream for stream in self._streams.values() if stream.is_discard_overdue(now)]:
            await stream.reset()

    async def _sleep_was_suspended(self, seconds: float) -> bool:
        """Sleep; return whether this process was suspended meanwhile, after which the peer's silence counts anew."""
        until = trio.current_time() + seconds
        await trio.sleep_until(until)
        if trio.current_time() <= until + SUSPENDED:
            return False
        self.last_received_at = trio.current_time()
        return True

    # ------------------------------------------------------------------------------------------------ streams

    async def open_stream(self, *, send_syn: bool = True) -> YamuxStream:
        """Open a stream to the peer. Without `send_syn`, the SYN flag travels with the first bytes on it."""
        if self.is_closed or self._closing or self._peer_closing:
            raise MuxedConnUnavailable("the connection is closing")
        stream = YamuxStream(self, self._next_id, FrameFlag.SYN)
        self._next_id += 2
        self._streams[stream.stream_id] = stream
        try:
            if send_syn:
                await stream.send_syn()
            else:
                await trio.lowlevel.checkpoint_if_cancelled()
        except BaseException:
            self._streams.pop(stream.stream_id, None)
            raise
        return stream

    async def accept_stream(self) -> YamuxStream:
        """Wait for a stream that the peer opens. With a `serve` function, which gets them, wait for the end."""
        try:
            stream = await self._to_accept.receive()
            await stream.send_syn()
        except (trio.EndOfChannel, trio.ClosedResourceError, MuxedStreamReset):
            raise MuxedConnUnavailable("the connection is closed") from None
        return stream

    def remove_if_finished(self, stream_id: int) -> None:
        """Forget a stream if it is finished in both directions."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.is_finished:
            del self._streams[stream_id]

    def has_streams_in_use(self) -> bool:
        """Return whether streams are served here, or were opened here and are still in use by this side.

        Does not count a stream that the peer opened and that is no longer served, nor one that was closed here without
        reading on: those may stay half-open at the peer.
        """
        if self._serving:
            return True
        opened = (stream for number, stream in self._streams.items() if number % 2 == self._next_id % 2)
        return any(not stream.is_unused for stream in opened)

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
            before: a packed frame to send in front of it.
        """
        header = before + frame_header(kind, flags, stream_id, length)
        try:
            if data is None:
                await self.transport.write(header)
            elif length <= SMALL_BODY:  # header and body in one TLS record
                await self.transport.write(header + data)
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
            await self.transport.write(header, data)
            self._frame_size.add_sample(length, trio.current_time() - began)
        finally:
            self._bulk.release()

    async def _read_frames(self) -> str:
        """Handle frames until the connection ends. Return why it ended."""
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
            _log.warning("%s violates the yamux protocol, closing the connection: %s", self.peer_id, error)
            return str(error)
        except IOException as error:
            return str(error)

    async def _read_body(self, stream_id: int, length: int) -> memoryview | None:
        """Return a frame's body: empty if it went straight to a reader, None at the connection's end."""
        if length > MAX_WINDOW:
            raise MuxedStreamError(f"a frame of {length} bytes")
        stream = self._streams.get(stream_id)
        if stream is not None and stream.can_receive_inplace(length):
            return await self._fill_inplace(stream, length)
        body = acquire_buffer(length)
        return body if await self._fill(body, within_frame=True) else None

    def queue_frame(self, kind: FrameType, flags: FrameFlag, stream_id: int, length: int) -> None:
        """Have the writer task send a frame without a body.

        The reader must not wait for the connection to accept it: two peers that both do so would deadlock.
        """
        if self.is_closed:
            return
        try:
            self._control.send_nowait((kind, flags, stream_id, length))
        except trio.WouldBlock:
            self._close_for_violation("it causes control frames faster than it reads them")
            return
        if self._queue_empty.is_set():
            self._queue_empty = trio.Event()

    def _close_for_violation(self, fault: str) -> None:
        """Close the connection from any task, because of what the peer did."""
        if not self._fault:
            self._fault = fault
            _log.warning("%s violates the yamux protocol, closing the connection: %s", self.peer_id, fault)
            self._scope.cancel()

    @property
    def initial_receive_window(self) -> int:
        """Receive window of a new stream; larger on relayed connections, which pass through three processes."""
        return MAX_WINDOW if self.is_relayed and self.can_widen() else INITIAL_WINDOW

    def can_widen(self) -> bool:
        """Return whether one more stream may have a widened window: many of them unread would exceed `MAX_UNREAD`."""
        return sum(stream.is_wide for stream in self._streams.values()) < MAX_WIDE

    def is_fast_for(self, extra: int) -> bool:
        """Return whether the wide windows and `extra` bytes arrive within `MAX_WINDOW_SECONDS`."""
        wide = sum(stream.receive_window for stream in self._streams.values() if stream.is_wide)
        return wide + extra <= MAX_WINDOW_SECONDS * self._receive_rate.bytes_per_second

    @property
    def frame_size(self) -> int:
        """How many bytes of one stream are sent in one frame at present."""
        return self._frame_size.bytes

    @property
    def shortest_round_trip(self) -> float | None:
        """The shortest round trip in seconds so far; None before the reply to the ping that `start` sends."""
        return self._rtt.shortest

    def round_trip(self) -> float:
        """Return the shortest round trip so far in seconds, 0 until there are enough; ping again if it is time."""
        number = self._rtt.next_ping()
        if number is not None:
            self.queue_frame(FrameType.PING, FrameFlag.SYN, 0, number)
        return self._rtt.seconds()

    async def _send_control(self) -> None:
        try:
            async for frame in self._queued:
                await self.send_frame(*frame)
                if not self._queued.statistics().current_buffer_used:
                    self._queue_empty.set()
        except IOException as error:
            _log.debug("control frames to %s end: %s", self.peer_id, error)
        self._queue_empty.set()

    async def _fill(self, buffer: memoryview, *, within_frame: bool = False) -> bool:
        while buffer:
            count = self.transport.read_now(buffer)
            if count is None:
                await self.transport.wait_readable(fair=not within_frame)
                continue
            if not count:
                return False
            self._count_received(count)
            buffer = buffer[count:]
        return True

    def _count_received(self, count: int) -> None:
        self.last_received_at = trio.current_time()
        self._receive_rate.add(count, self.last_received_at)

    async def _fill_inplace(self, stream: YamuxStream, length: int) -> memoryview | None:
        """Read a frame's body into the buffer of a waiting reader and return an empty buffer.

        If that reader leaves meanwhile, return the body in a buffer of its own. Return None at the connection's end.
        """
        received = 0
        while received < length:
            rest = stream.inplace_target(received, length)
            if rest is None:
                body = acquire_buffer(length)
                body[:received] = stream.take_spilled()
                return body if await self._fill(body[received:], within_frame=True) else None
            count = self.transport.read_now(rest)
            if count is None:
                await self.transport.wait_readable(fair=False)
                continue
            if not count:
                return None
            self._count_received(count)
            received += count
        stream.commit_inplace(length)
        for _ in range(2):  # trio runs tasks in random order: after two turns the reader has offered its buffer again
            await trio.lowlevel.checkpoint()
        return _EMPTY

    def _handle(self, kind: FrameType, flags: FrameFlag, stream_id: int, length: int, body: memoryview) -> None:
        if kind == FrameType.PING:
            if FrameFlag.SYN in flags:
                self.queue_frame(FrameType.PING, FrameFlag.ACK, 0, length)
            else:
                self._rtt.add_reply(length)
                if self._rtt.shortest is not None:
                    self.event_round_trip_measured.set()
            return
        if kind == FrameType.GO_AWAY:
            self._peer_closing = True
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
            stream.add_send_window(length)
        if FrameFlag.RST in flags:
            stream.abort("the peer reset the stream")
        elif FrameFlag.FIN in flags:
            stream.receive_end()
            self.remove_if_finished(stream_id)

    def _accept(self, stream_id: int) -> YamuxStream | None:
        is_ours = stream_id % 2 == self._next_id % 2
        if is_ours or stream_id == 0 or stream_id in self._streams:
            raise MuxedStreamError(f"stream {stream_id} is not the peer's to open")
        if self._has_max_streams() or self._closing or self.is_closed:
            self.queue_frame(FrameType.WINDOW, FrameFlag.RST, stream_id, 0)
            return None
        stream = YamuxStream(self, stream_id, FrameFlag.ACK)
        self._hand_over(stream)
        self._streams[stream_id] = stream
        return stream

    def _has_max_streams(self) -> bool:
        """Return whether the peer has `MAX_STREAMS` open."""
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
            raise MuxedStreamError("it opens and resets streams faster than they are served") from None
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
        return bool(self.transport.is_initiator)

    @property
    def is_established(self) -> bool:
        """Whether streams can be opened."""
        return self.event_started.is_set() and not self.is_closed and not self._write_failed

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended."""
        return self.event_closed.is_set()

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Return the addresses of the connection below."""
        return self.transport.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        """Return whether the connection is direct or relayed."""
        return self.transport.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return host and port of the connection's other end, if known."""
        return self.transport.get_remote_address()
