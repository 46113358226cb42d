"""Bidirectional byte stream in memory, with back-pressure, half close and reset, as `Endpoint` requires."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel

from hypha_net.errors import StreamClosedError, StreamResetError
from hypha_proto.ids import PeerId

WINDOW = 256 << 10


class Pipe:
    """One direction of a stream: at most `WINDOW` bytes in flight; `delay` is awaited before each write."""

    def __init__(self, delay: Callable[[], Awaitable[None]]) -> None:
        self._buffer = bytearray()
        self._ended = False
        self._unread = False
        self._broken: str | None = None
        self._changed = anyio.Event()
        self._delay = delay

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def write(self, data: memoryview) -> None:
        """Write all of `data`, waiting for space."""
        if self._ended:
            raise StreamClosedError("sending has ended on this side")
        await self._delay()
        while data:
            if self._broken is not None:
                raise StreamResetError(self._broken)
            if self._unread:
                raise StreamResetError("the peer closed the stream")
            space = WINDOW - len(self._buffer)
            if space > 0:
                self._buffer += data[:space]
                data = data[space:]
                self._notify()
            else:
                await self._changed.wait()

    async def read(self, limit: int) -> bytes:
        """Read 1 to `limit` bytes; empty after the clean end."""
        while True:
            if self._broken is not None:
                raise StreamResetError(self._broken)
            if self._buffer:
                data = bytes(self._buffer[:limit])
                del self._buffer[:limit]
                self._notify()
                return data
            if self._ended:
                return b""
            await self._changed.wait()

    def end(self) -> None:
        """End writing cleanly."""
        self._ended = True
        self._notify()

    def stop_reading(self) -> None:
        """End reading: further writes fail."""
        self._unread = True
        self._notify()

    def abort(self, reason: str) -> None:
        """Discard everything in flight; both sides get `StreamResetError`."""
        self._broken = self._broken or reason
        self._notify()

    @property
    def is_finished(self) -> bool:
        """Whether no more bytes can pass."""
        return self._broken is not None or (self._ended and (self._unread or not self._buffer))


class MemoryStream:
    """One end of a stream, made of two pipes."""

    def __init__(self, peer: PeerId, protocol: str, incoming: Pipe, outgoing: Pipe) -> None:
        self.peer = peer
        self.protocol = protocol
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False
        self.sent = 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `Stream.send_all`."""
        if self._closed:
            raise StreamClosedError("the stream is closed on this side")
        await self._outgoing.write(memoryview(data))
        self.sent += len(data)

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        """See `Stream.receive_some`."""
        if self._closed:
            raise StreamClosedError("the stream is closed on this side")
        return await self._incoming.read(max_bytes)

    async def receive_into(self, buffer: bytearray | memoryview) -> int:
        """See `Stream.receive_into`."""
        data = await self.receive_some(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    async def send_eof(self, last: bytes = b"") -> None:
        """See `Stream.send_eof`."""
        if last:
            await self.send_all(last)
        self._outgoing.end()
        await anyio.lowlevel.checkpoint()

    async def reset(self) -> None:
        """See `Stream.reset`."""
        self.abort("the peer reset the stream")

    async def aclose(self) -> None:
        """See `Stream.aclose`."""
        self._closed = True
        self._outgoing.end()
        self._incoming.stop_reading()

    def abort(self, reason: str) -> None:
        """Abort both directions."""
        self._incoming.abort(reason)
        self._outgoing.abort(reason)

    @property
    def is_finished(self) -> bool:
        """Whether both directions are finished."""
        return self._incoming.is_finished and self._outgoing.is_finished
