"""``/yamux/1.0.0``: many streams over one connection, wire-compatible with other yamux implementations.

py-libp2p's own fails a write after five seconds without credit, takes a killed peer for a clean end of stream, and
corrupts the connection when a blocked write is cancelled. Here a broken connection resets its streams, a frame is sent
whole or not at all (the connection below shields it), and a peer that is silent for `PING_INTERVAL` + `PING_TIMEOUT`
loses the connection.

The specification: https://github.com/hashicorp/yamux/blob/master/spec.md
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Awaitable, Callable
from enum import IntEnum, IntFlag
from types import TracebackType
from typing import Final

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import IOException
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)
from multiaddr import Multiaddr

_log = logging.getLogger("hypha_net.muxer")

PROTOCOL: Final = "/yamux/1.0.0"
INITIAL_WINDOW: Final = 256 << 10
"""What the specification grants every stream at its start."""
WINDOW: Final = 4 << 20
"""What we let a peer have under way on one stream."""
FRAME: Final = 64 << 10
"""Largest piece of one stream that is sent at a time, so that streams take turns."""
MAX_STREAMS: Final = 4096
"""Streams that a peer may have open at once."""
PING_INTERVAL: Final = 15.0
PING_TIMEOUT: Final = 15.0
FROZEN: Final = 2.0
"""When a sleep overshoots by so much this process was stopped, and silence says nothing about the peer."""
MAX_CONTROL: Final = 4 * MAX_STREAMS
"""Control frames that wait to be sent; a peer that causes more without reading any is dropped."""

_HEADER: Final = struct.Struct(">BBHII")


class Type(IntEnum):
    """Kinds of frames."""

    DATA = 0
    WINDOW = 1
    PING = 2
    GO_AWAY = 3


class Flag(IntFlag):
    """What a frame does to its stream."""

    SYN = 1
    ACK = 2
    FIN = 4
    RST = 8


class MuxedStream(IMuxedStream):
    """One stream. Reading returns buffered bytes before an end; a reset discards them."""

    def __init__(self, muxer: Muxer, stream_id: int) -> None:
        self.muxed_conn = muxer
        self.muxer = muxer
        self.stream_id = stream_id
        self.pending_flags = Flag(0)
        """SYN or ACK that the next frame of this stream carries."""
        self._buffer = bytearray()
        self._unreturned = 0
        self._credit = INITIAL_WINDOW
        self._room = WINDOW
        self._ended_here = False
        self._ended_there = False
        self._broken: str | None = None
        self._discarding = False
        self._changed = trio.Event()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # ------------------------------------------------------------------------------------------------ reading

    async def read(self, n: int | None = None) -> bytes:
        """1 to `n` bytes; `MuxedStreamEOF` after the peer's clean end, `MuxedStreamReset` after any other."""
        while True:
            if self._broken is not None:
                raise MuxedStreamReset(self._broken)
            if self._buffer:
                break
            if self._ended_there:
                raise MuxedStreamEOF("the peer has ended the stream")
            await self._changed.wait()
        size = len(self._buffer) if n is None or n <= 0 else min(n, len(self._buffer))
        data = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        await self._return_credit(size)
        return data

    async def _return_credit(self, size: int) -> None:
        """Let the peer send as much again as was read, in portions of a quarter of the window."""
        self._unreturned += size
        if self._unreturned >= WINDOW // 4 and not self._ended_there and self._broken is None:
            amount, self._unreturned = self._unreturned, 0
            self._room += amount
            try:
                await self.muxer.send_frame(Type.WINDOW, Flag(0), self.stream_id, amount)
            except IOException as error:
                _log.debug("no credit returned on a dying connection: %s", error)

    def receive(self, data: bytes) -> None:
        """Take bytes off the wire.

        Raises:
            MuxedStreamError: they are more than this side allowed.
        """
        if len(data) > self._room:
            raise MuxedStreamError(
                f"the peer sent {len(data)} bytes on stream {self.stream_id} with {self._room} allowed"
            )
        self._room -= len(data)
        if self._discarding:
            self.muxer.queue_credit(self, len(data))
        elif data:
            self._buffer += data
            self._notify()

    def allow(self, amount: int) -> None:
        """Count credit that goes to the peer."""
        self._room += amount

    def end_there(self) -> None:
        """The peer sends no more."""
        self._ended_there = True
        self._notify()

    # ------------------------------------------------------------------------------------------------ writing

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`, waiting for the peer's credit as long as it takes."""
        rest = memoryview(data)
        while rest:
            if self._broken is not None:
                raise MuxedStreamReset(self._broken)
            if self._ended_here:
                raise MuxedStreamClosed("sending has ended on this side")
            if self._credit == 0:
                await self._changed.wait()
                continue
            size = min(len(rest), self._credit, FRAME)
            self._credit -= size
            await self._send(Type.DATA, Flag(0), size, rest[:size])
            rest = rest[size:]

    async def _send(self, kind: Type, flags: Flag, length: int, data: memoryview | None = None) -> None:
        flags |= self.pending_flags
        self.pending_flags = Flag(0)
        try:
            await self.muxer.send_frame(kind, flags, self.stream_id, length, data)
        except IOException as error:
            raise MuxedStreamReset(f"the connection broke off: {error}") from error

    def add_credit(self, amount: int) -> None:
        """The peer takes `amount` bytes more."""
        self._credit = min(self._credit + amount, 1 << 32)
        self._notify()

    async def announce(self) -> None:
        """Open the stream on the wire, with our whole window."""
        await self._send(Type.WINDOW, Flag(0), WINDOW - INITIAL_WINDOW)

    # ------------------------------------------------------------------------------------------------- ending

    async def close(self) -> None:
        """End the sending side; reading goes on. Idempotent."""
        if self._ended_here or self._broken is not None:
            return
        self._ended_here = True
        self._notify()
        await self._send(Type.WINDOW, Flag.FIN, 0)
        self.muxer.forget_if_over(self)

    async def discard(self) -> None:
        """Read no more: what still comes is dropped."""
        self._discarding = True
        size = len(self._buffer)
        self._buffer.clear()
        await self._return_credit(size)

    async def reset(self) -> None:
        """Break the stream off, and tell the peer."""
        if self._broken is not None or (self._ended_here and self._ended_there):
            return
        self.break_off("this side reset the stream")
        await self._send(Type.WINDOW, Flag.RST, 0)

    def break_off(self, reason: str) -> None:
        """Everything under way is lost."""
        self._broken = self._broken or reason
        self._buffer.clear()
        self._notify()
        self.muxer.forget_if_over(self)

    @property
    def over(self) -> bool:
        """Whether nothing will pass any more, in either direction."""
        return self._broken is not None or (self._ended_here and self._ended_there)

    def is_closed(self) -> bool:
        """See `over`; the name that py-libp2p asks for."""
        return self.over

    def set_deadline(self, ttl: int) -> None:
        """Deadlines are the caller's cancel scopes."""
        raise NotImplementedError("use a cancel scope around the operation")

    def get_remote_address(self) -> tuple[str, int] | None:
        """Address of the connection's other end."""
        return self.muxer.get_remote_address()

    async def __aenter__(self) -> MuxedStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await (self.close() if error is None else self.reset())


class Muxer(IMuxedConn):
    """A connection that carries streams."""

    def __init__(self, conn: ISecureConn, peer_id: ID) -> None:
        self._conn = conn
        self.peer_id = peer_id
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self._streams: dict[int, MuxedStream] = {}
        self._next_id = 1 if conn.is_initiator else 2
        self._accepted, self._to_accept = trio.open_memory_channel[MuxedStream](MAX_STREAMS)
        self._control, self._to_send = trio.open_memory_channel[tuple[Type, Flag, int, int]](MAX_CONTROL)
        self._leaving = False
        self._peer_leaving = False
        self._heard = trio.current_time()
        self._scope = trio.CancelScope()

    # -------------------------------------------------------------------------------------------------- life

    async def start(self) -> None:
        """Read frames until the connection ends; py-libp2p runs this in a task of the swarm."""
        reason = "the connection was closed"
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._keep_alive)
                    nursery.start_soon(self._send_control)
                    self.event_started.set()
                    reason = await self._read_frames()
                    nursery.cancel_scope.cancel()
        finally:
            self.event_started.set()
            with trio.CancelScope(shield=True):
                await self._shut_down(reason)

    async def close(self) -> None:
        """Tell the peer, end every stream and the connection. Idempotent."""
        if not self._leaving:
            self._leaving = True
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 0.5):
                try:
                    await self.send_frame(Type.GO_AWAY, Flag(0), 0, 0)
                except IOException as error:
                    _log.debug("no goodbye to %s: %s", self.peer_id, error)
            self._scope.cancel()
            await self._shut_down("the connection was closed")

    async def _shut_down(self, reason: str) -> None:
        if self.event_closed.is_set():
            return
        self.event_closed.set()
        for stream in list(self._streams.values()):
            stream.break_off(reason)
        self._accepted.close()
        await self._conn.close()
        if self.on_close is not None:
            await self.on_close()

    async def _keep_alive(self) -> None:
        """Ask a silent peer for a sign of life, and end the connection when none comes."""
        while True:
            slept_at = trio.current_time()
            await trio.sleep(PING_INTERVAL)
            if (
                trio.current_time() - slept_at > PING_INTERVAL + FROZEN
                or trio.current_time() - self._heard < PING_INTERVAL
            ):
                continue
            asked_at = trio.current_time()
            await self.send_frame(Type.PING, Flag.SYN, 0, 0)
            await trio.sleep(PING_TIMEOUT)
            if self._heard < asked_at and trio.current_time() - asked_at < PING_TIMEOUT + FROZEN:
                _log.warning(
                    "%s has been silent for %.0f s and is given up", self.peer_id, trio.current_time() - self._heard
                )
                await self._shut_down("the peer is silent")
                self._scope.cancel()

    # ------------------------------------------------------------------------------------------------ streams

    async def open_stream(self) -> MuxedStream:
        """Open a stream to the peer."""
        if self.is_closed or self._leaving or self._peer_leaving:
            raise MuxedConnUnavailable("the connection is closing")
        stream = MuxedStream(self, self._next_id)
        stream.pending_flags = Flag.SYN
        self._next_id += 2
        self._streams[stream.stream_id] = stream
        await stream.announce()
        return stream

    async def accept_stream(self) -> MuxedStream:
        """Wait for a stream that the peer opens."""
        try:
            stream = await self._to_accept.receive()
            await stream.announce()
        except (trio.EndOfChannel, trio.ClosedResourceError, MuxedStreamReset):
            raise MuxedConnUnavailable("the connection is closed") from None
        return stream

    def forget_if_over(self, stream: MuxedStream) -> None:
        """Drop the entry of a stream that has ended."""
        if stream.over:
            self._streams.pop(stream.stream_id, None)

    # ------------------------------------------------------------------------------------------------- frames

    async def send_frame(
        self, kind: Type, flags: Flag, stream_id: int, length: int, data: memoryview | None = None
    ) -> None:
        """Send one frame, whole. Raises `IOException` when the connection is gone."""
        header = _HEADER.pack(0, kind, flags, stream_id, length)
        await self._conn.write(header if data is None else header + bytes(data))

    async def _read_frames(self) -> str:
        """Handle frames until there are no more; why there are none."""
        buffer = bytearray()
        try:
            while True:
                if not await self._fill(buffer, _HEADER.size):
                    return "the peer closed the connection"
                version, kind, flags, stream_id, length = _HEADER.unpack_from(buffer)
                del buffer[: _HEADER.size]
                if version != 0 or kind > Type.GO_AWAY:
                    raise MuxedStreamError(f"a frame of version {version}, type {kind}")
                body = b""
                if kind == Type.DATA and length:
                    if length > WINDOW:
                        raise MuxedStreamError(f"a frame of {length} bytes")
                    if not await self._fill(buffer, length):
                        return "the connection ended within a frame"
                    body = bytes(memoryview(buffer)[:length])
                    del buffer[:length]
                await self._handle(Type(kind), Flag(flags & 15), stream_id, length, body)
        except MuxedStreamError as error:
            _log.warning("%s does not speak yamux properly and is dropped: %s", self.peer_id, error)
            return str(error)
        except IOException as error:
            return str(error)

    def _queue(self, kind: Type, flags: Flag, stream_id: int, length: int) -> None:
        """Have the writer task send a frame: readers that wait for room could wait for each other for ever."""
        try:
            self._control.send_nowait((kind, flags, stream_id, length))
        except trio.WouldBlock:
            raise MuxedStreamError("it causes control frames faster than it reads them") from None

    def queue_credit(self, stream: MuxedStream, amount: int) -> None:
        """Return credit for bytes that nobody wants."""
        if amount:
            stream.allow(amount)
            self._queue(Type.WINDOW, Flag(0), stream.stream_id, amount)

    async def _send_control(self) -> None:
        try:
            async for frame in self._to_send:
                await self.send_frame(*frame)
        except IOException as error:
            _log.debug("control frames to %s end: %s", self.peer_id, error)

    async def _fill(self, buffer: bytearray, size: int) -> bool:
        while len(buffer) < size:
            data = await self._conn.read(256 << 10)
            if not data:
                return False
            self._heard = trio.current_time()
            buffer += data
        return True

    async def _handle(self, kind: Type, flags: Flag, stream_id: int, length: int, body: bytes) -> None:
        if kind == Type.PING:
            if Flag.SYN in flags:
                self._queue(Type.PING, Flag.ACK, 0, length)
            return
        if kind == Type.GO_AWAY:
            self._peer_leaving = True
            return
        stream = self._accept(stream_id) if Flag.SYN in flags else self._streams.get(stream_id)
        if stream is None:
            if not flags & (Flag.RST | Flag.FIN) and Flag.SYN not in flags and kind == Type.DATA:
                self._queue(Type.WINDOW, Flag.RST, stream_id, 0)
            return
        if kind == Type.DATA:
            stream.receive(body)
        else:
            stream.add_credit(length)
        if Flag.RST in flags:
            stream.break_off("the peer reset the stream")
        elif Flag.FIN in flags:
            stream.end_there()
            self.forget_if_over(stream)

    def _accept(self, stream_id: int) -> MuxedStream | None:
        ours = stream_id % 2 == self._next_id % 2
        if ours or stream_id == 0 or stream_id in self._streams:
            raise MuxedStreamError(f"stream {stream_id} is not the peer's to open")
        if len(self._streams) >= MAX_STREAMS or self._leaving:
            self._queue(Type.WINDOW, Flag.RST, stream_id, 0)
            return None
        stream = MuxedStream(self, stream_id)
        stream.pending_flags = Flag.ACK
        self._streams[stream_id] = stream
        self._accepted.send_nowait(stream)  # its size is that of the table of streams
        return stream

    # --------------------------------------------------------------------------------------------- properties

    @property
    def is_initiator(self) -> bool:
        """Whether this side dialled."""
        return bool(self._conn.is_initiator)

    @property
    def is_established(self) -> bool:
        """Whether streams can be opened."""
        return self.event_started.is_set() and not self.is_closed

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
