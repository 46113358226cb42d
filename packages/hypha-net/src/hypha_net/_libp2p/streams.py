"""`Stream` over a muxed stream, with the library's errors translated."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

import trio
from libp2p.abc import INetStream
from libp2p.network.stream.net_stream import NetStream
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamClosed, MuxedStreamEOF, MuxedStreamError

from hypha_net._libp2p.muxed_stream import MuxedStream
from hypha_net.errors import StreamClosedError, StreamResetError
from hypha_proto.ids import PeerId


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except MuxedStreamClosed as error:
        raise StreamClosedError(str(error)) from error
    except (MuxedStreamError, MuxedConnUnavailable) as error:
        raise StreamResetError(str(error)) from error


class Libp2pStream:
    """See `hypha_net.endpoint.Stream`."""

    def __init__(self, stream: INetStream) -> None:
        self._net = cast(NetStream, stream)
        self._muxed = cast(MuxedStream, self._net.muxed_stream)
        self._closed = False
        self._peer = PeerId(self._muxed.muxed_conn.peer_id.to_bytes())

    @property
    def peer(self) -> PeerId:
        """See `Stream.peer`."""
        return self._peer

    @property
    def protocol(self) -> str:
        """See `Stream.protocol`."""
        return str(self._net.get_protocol())

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """See `Stream.send_all`."""
        self._check_open()
        with _translated():
            await self._muxed.write(data)

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        """See `Stream.receive_some`."""
        self._check_open()
        with _translated():
            try:
                return await self._muxed.read(max_bytes)
            except MuxedStreamEOF:
                return b""

    async def receive_into(self, buffer: bytearray | memoryview) -> int:
        """See `Stream.receive_into`."""
        self._check_open()
        with _translated():
            try:
                return await self._muxed.read_into(memoryview(buffer))
            except MuxedStreamEOF:
                return 0

    async def send_eof(self, last: bytes = b"") -> None:
        """See `Stream.send_eof`."""
        with _translated():
            await self._muxed.write(last, end=True)
            await self._muxed.close()

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
        with suppress(MuxedStreamError, MuxedConnUnavailable):  # it has ended already, by the other side
            await action()
        await self._net.remove()
        await trio.lowlevel.checkpoint_if_cancelled()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosedError("the stream is closed on this side")
