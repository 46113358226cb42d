"""`Stream` over a muxed stream, with the library's errors translated."""

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
    """See `hypha_net.endpoint.Stream`."""

    def __init__(self, muxed: YamuxStream, protocol: str) -> None:
        self._muxed = muxed
        self._protocol = protocol
        self._closed = False
        self._peer = PeerId(muxed.muxer.peer_id.to_bytes())

    @property
    def peer(self) -> PeerId:
        """See `Stream.peer`."""
        return self._peer

    @property
    def protocol(self) -> str:
        """See `Stream.protocol`."""
        return self._protocol

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
        """Like `receive_some` without a limit and without a copy; `inflow.give_back` takes the buffer back."""
        self._check_open()
        try:
            return await self._muxed.read_part()
        except MuxedStreamEOF:
            return memoryview(b"")
        except (MuxedStreamError, MuxedConnUnavailable) as error:
            raise _translated(error) from error

    def carry_circuit(self) -> None:
        """Have more under way: what takes a circuit passes through three processes, which wait for each other."""
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
        with suppress(MuxedStreamError, MuxedConnUnavailable):  # it has ended already, by the other side
            await action()
        await trio.lowlevel.checkpoint_if_cancelled()

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosedError("the stream is closed on this side")
