"""A bidirectional byte stream in memory, with back-pressure, half close and reset, as `Endpoint` promises."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.lowlevel

from hypha_net.errors import StreamClosedError, StreamResetError
from hypha_proto.ids import PeerId

WINDOW = 256 << 10


class Pipe:
    """One direction: bytes in order, at most `WINDOW` of them on the way; `on_the_way` is awaited before each write."""

    def __init__(self, on_the_way: Callable[[], Awaitable[None]]) -> None:
        self._buffer = bytearray()
        self._ended = False
        self._unread = False
        self._broken: str | None = None
        self._changed = anyio.Event()
        self._on_the_way = on_the_way

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def write(self, data: memoryview) -> None:
        """Put all of `data` in, waiting for room."""
        if self._ended:
            raise StreamClosedError("sending has ended on this side")
        await self._on_the_way()
        while data:
            if self._broken is not None:
                raise StreamResetError(self._broken)
            if self._unread:
                raise StreamResetError("the peer closed the stream")
            room = WINDOW - len(self._buffer)
            if room > 0:
                self._buffer += data[:room]
                data = data[room:]
                self._notify()
            else:
                await self._changed.wait()

    async def read(self, limit: int) -> bytes:
        """Take 1 to `limit` bytes out; empty after the clean end."""
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
        """The writer has no more."""
        self._ended = True
        self._notify()

    def abandon(self) -> None:
        """The reader takes no more."""
        self._unread = True
        self._notify()

    def break_off(self, reason: str) -> None:
        """Everything in it is lost; both sides see `StreamResetError`."""
        self._broken = self._broken or reason
        self._notify()

    @property
    def finished(self) -> bool:
        """Whether nothing can pass any more."""
        return self._broken is not None or (self._ended and (self._unread or not self._buffer))


class MemoryStream:
    """One end of a pair of pipes."""

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
        self.break_off("the peer reset the stream")

    async def aclose(self) -> None:
        """See `Stream.aclose`."""
        self._closed = True
        self._outgoing.end()
        self._incoming.abandon()

    def break_off(self, reason: str) -> None:
        """Break both directions."""
        self._incoming.break_off(reason)
        self._outgoing.break_off(reason)

    @property
    def finished(self) -> bool:
        """Whether both directions are over."""
        return self._incoming.finished and self._outgoing.finished
