"""`hypha_net.endpoint.Stream` over a yamux stream; translates py-libp2p's errors.

Made by `streams.inbound` and `streams.outbound` once a protocol is agreed on; used by protocol handlers and clients.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamClosed, MuxedStreamEOF, MuxedStreamError

from hypha_net._libp2p.yamux.stream import YamuxStream
from hypha_net.errors import StreamClosedError, StreamResetError
from hypha_proto.ids import PeerId


def _translated(error: Exception) -> StreamClosedError | StreamResetError:
    kind = StreamClosedError if isinstance(error, MuxedStreamClosed) else StreamResetError
    return kind(str(error))


class Libp2pStream:
    """A negotiated stream; see `hypha_net.endpoint.Stream`."""

    def __init__(self, muxed: YamuxStream, protocol: str) -> None:
        self._muxed = muxed
        self.protocol = protocol
        self._closed = False
        self.peer = PeerId(muxed.peer_id.to_bytes())

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `Stream.send_all`."""
        self._check_open()
        try:
            await self._muxed.write(data)
        except (MuxedStreamError, MuxedConnUnavailable) as error:
            raise _translated(error) from error

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        """See `Stream.receive_some`."""
        self._check_open()
        try:
            return await self._muxed.read(max_bytes)
        except MuxedStreamEOF:
            return b""
        except (MuxedStreamError, MuxedConnUnavailable) as error:
            raise _translated(error) from error

    async def receive_into(self, buffer: bytearray | memoryview) -> int:
        """See `Stream.receive_into`."""
        self._check_open()
        try:
            return await self._muxed.read_into(memoryview(buffer))
        except MuxedStreamEOF:
            return 0
        except (MuxedStreamError, MuxedConnUnavailable) as error:
            raise _translated(error) from error

    async def receive_part(self) -> memoryview:
        """Return the next received part without a copy, for `buffer_pool.release_buffer`; empty at the end."""
        self._check_open()
        try:
            return await self._muxed.read_part()
        except MuxedStreamEOF:
            return memoryview(b"")
        except (MuxedStreamError, MuxedConnUnavailable) as error:
            raise _translated(error) from error

    def carry_circuit(self) -> None:
        """Widen the receive window: a relayed connection passes through three processes that wait for each other."""
        self._muxed.carry_circuit()

    async def send_eof(self, last: bytes = b"") -> None:
        """See `Stream.send_eof`."""
        try:
            await self._muxed.write(last, end=True)
            await self._muxed.close()
        except (MuxedStreamError, MuxedConnUnavailable) as error:
            raise _translated(error) from error

    async def reset(self) -> None:
        """See `Stream.reset`."""
        self._closed = True
        await self._end(self._muxed.reset)

    async def aclose(self) -> None:
        """See `Stream.aclose`."""
        if not self._closed:
            self._closed = True
            await self._end(self._muxed.close)
            await self._end(self._muxed.discard)

    async def _end(self, action: Callable[[], Awaitable[None]]) -> None:
        with suppress(MuxedStreamError, MuxedConnUnavailable):  # the peer has ended it already
            await action()
        await trio.lowlevel.checkpoint_if_cancelled()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosedError("the stream is closed on this side")
