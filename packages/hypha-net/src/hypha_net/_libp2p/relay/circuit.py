"""A circuit: two streams joined by a relay, and at its ends the raw connection that TLS runs over."""

from __future__ import annotations

from typing import Final, Literal

import anyio
from libp2p.abc import IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from multiaddr import Multiaddr

from hypha_net._libp2p.streams.stream import Libp2pStream
from hypha_net._libp2p.yamux.buffer_pool import release_buffer
from hypha_net.endpoint import Stream
from hypha_net.errors import StreamClosedError, StreamResetError

_PIECE: Final = 256 << 10
_GONE: Final = (StreamResetError, StreamClosedError)


def _prepare(stream: Stream) -> None:
    if isinstance(stream, Libp2pStream):
        stream.carry_circuit()


async def _next_part(stream: Stream) -> memoryview:
    """What comes next on a stream, in the buffer that it came in where the stream gives that away."""
    if isinstance(stream, Libp2pStream):
        return await stream.receive_part()
    return memoryview(await stream.receive_some(_PIECE))


class CircuitConnection(IRawConnection):
    """A stream to a relay as the raw connection that TLS runs over."""

    def __init__(self, stream: Stream, *, is_initiator: bool) -> None:
        self._circuit = stream
        _prepare(stream)
        self.is_initiator = is_initiator

    async def read(self, n: int | None = None) -> bytes:
        """Up to `n` bytes; empty at the clean end."""
        try:
            return await self._circuit.receive_some(n if n is not None and n > 0 else _PIECE)
        except _GONE as error:
            raise ConnectionClosedError(f"the circuit broke off: {error}") from error

    async def read_part(self) -> memoryview:
        """Return the next part without a copy, for `buffer_pool.release_buffer`; empty at the clean end."""
        try:
            return await _next_part(self._circuit)
        except _GONE as error:
            raise ConnectionClosedError(f"the circuit broke off: {error}") from error

    async def write(self, data: bytes) -> None:
        """Send all of `data`."""
        try:
            await self._circuit.send_all(data)
        except _GONE as error:
            raise ConnectionClosedError(f"the circuit broke off: {error}") from error

    async def close(self) -> None:
        """End the circuit."""
        await self._circuit.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        """None: the other end's address is the relay's to know."""
        return None

    def get_transport_addresses(self) -> list[Multiaddr]:
        """None."""
        return []

    def get_connection_type(self) -> ConnectionType:
        """Relayed."""
        return ConnectionType.RELAYED


Outcome = Literal["done", "bytes", "duration", "failed"]


class CircuitRelay:
    """Two streams that a relay joins: what either brings is passed on until both have ended.

    A clean end is passed on as one, a reset as a reset. A circuit that goes over a limit is reset on both sides.
    """

    def __init__(
        self, one: Stream, other: Stream, max_bytes: int | None = None, max_seconds: float | None = None
    ) -> None:
        """Join two streams: at most `max_bytes` in each direction, `max_seconds` in all; none is without a limit."""
        self._streams = (one, other)
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self.outcome: Outcome | None = None
        """How it ended, once it has."""
        self.moved = 0
        """Bytes in both directions so far."""

    async def carry(self) -> None:
        """Pass on until the end; cancelled, it ends both sides."""
        one, other = self._streams
        for stream in self._streams:
            _prepare(stream)
        try:
            with anyio.move_on_after(self._max_seconds) as time:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._pass_on, one, other, tasks.cancel_scope)
                    tasks.start_soon(self._pass_on, other, one, tasks.cancel_scope)
                self.outcome = self.outcome or "done"
            if time.cancelled_caught:
                await self._break_off("duration")
        finally:
            self.outcome = self.outcome or "failed"
            with anyio.CancelScope(shield=True):
                for stream in self._streams:
                    await stream.aclose()

    async def _pass_on(self, source: Stream, target: Stream, both: anyio.CancelScope) -> None:
        passed = 0
        try:
            while data := await _next_part(source):
                passed += len(data)
                if self._max_bytes is not None and passed > self._max_bytes:
                    await self._break_off("bytes")
                    both.cancel()
                    return
                await target.send_all(data)
                self.moved += len(data)
                release_buffer(data)
            await target.send_eof()
        except _GONE:
            await self._break_off("failed")
            both.cancel()

    async def _break_off(self, outcome: Outcome) -> None:
        self.outcome = self.outcome or outcome  # what comes of the resets does not count
        for stream in self._streams:
            await stream.reset()
