"""Circuits of circuit relay v2: the relay's copying between two streams, and the raw connection at both ends.

`CircuitRelay` runs in the relay (`server`). `CircuitConnection` makes the stream to the relay a raw connection, over
which the two nodes run TLS and yamux as over TCP (`client`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Protocol

import anyio
from libp2p.abc import IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from multiaddr import Multiaddr

from hypha_net._libp2p.streams.stream import Libp2pStream
from hypha_net.buffer_pool import release_buffer
from hypha_net.endpoint import Stream
from hypha_net.errors import StreamClosedError, StreamResetError
from hypha_proto.ids import PeerId

_MAX_READ: Final = 256 << 10
_STREAM_FAILURES: Final = (StreamResetError, StreamClosedError)


class RelayEndpoint(Protocol):
    """The part of the endpoint that relay client and server use."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """See `Endpoint.addresses`."""
        ...

    def direct_connections(self, peer: PeerId) -> frozenset[object]:
        """Return the connections to `peer` that are not relayed."""
        ...

    async def open_stream(self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0) -> Stream:
        """See `Endpoint.open_stream`."""
        ...


def _prepare(stream: Stream) -> None:
    if isinstance(stream, Libp2pStream):
        stream.carry_circuit()


async def _next_part(stream: Stream) -> memoryview:
    """Return the next bytes of a stream, without a copy where the stream can hand over its buffer."""
    if isinstance(stream, Libp2pStream):
        return await stream.receive_part()
    return memoryview(await stream.receive_some(_MAX_READ))


class CircuitConnection(IRawConnection):
    """A stream to a relay as the raw connection that TLS runs over."""

    def __init__(self, stream: Stream, *, is_initiator: bool) -> None:
        self._circuit = stream
        _prepare(stream)
        self.is_initiator = is_initiator

    async def read(self, n: int | None = None) -> bytes:
        """Read up to `n` bytes; empty at a clean end."""
        try:
            return await self._circuit.receive_some(n if n is not None and n > 0 else _MAX_READ)
        except _STREAM_FAILURES as error:
            raise ConnectionClosedError(f"the circuit closed: {error}") from error

    async def read_part(self) -> memoryview:
        """Read what has arrived without a copy; return the buffer by `release_buffer`. Empty at a clean end."""
        try:
            return await _next_part(self._circuit)
        except _STREAM_FAILURES as error:
            raise ConnectionClosedError(f"the circuit closed: {error}") from error

    async def write(self, data: bytes) -> None:
        """Send all of `data`."""
        try:
            await self._circuit.send_all(data)
        except _STREAM_FAILURES as error:
            raise ConnectionClosedError(f"the circuit closed: {error}") from error

    async def close(self) -> None:
        """Close the circuit."""
        await self._circuit.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return None: only the relay knows the address of the other end."""
        return None

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Return no addresses."""
        return []

    def get_connection_type(self) -> ConnectionType:
        """Return `RELAYED`."""
        return ConnectionType.RELAYED


Outcome = Literal["done", "bytes", "duration", "failed"]


class CircuitRelay:
    """Copies between two streams in both directions until both have ended.

    A clean end is forwarded as a clean end, a reset as a reset. A circuit that exceeds a limit is reset on both sides.
    """

    def __init__(
        self, one: Stream, other: Stream, max_bytes: int | None = None, max_seconds: float | None = None
    ) -> None:
        """Join two streams for at most `max_bytes` in each direction and `max_seconds`; None means unlimited."""
        self._streams = (one, other)
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self.outcome: Outcome | None = None
        """How the circuit ended; None while it runs."""
        self.moved = 0
        """Bytes in both directions so far."""

    async def run(self) -> None:
        """Copy until both streams have ended; if cancelled, close both."""
        one, other = self._streams
        for stream in self._streams:
            _prepare(stream)
        try:
            with anyio.move_on_after(self._max_seconds) as limit:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._copy, one, other, tasks.cancel_scope)
                    tasks.start_soon(self._copy, other, one, tasks.cancel_scope)
                self.outcome = self.outcome or "done"
            if limit.cancelled_caught:
                await self._reset_both("duration")
        finally:
            self.outcome = self.outcome or "failed"
            with anyio.CancelScope(shield=True):
                for stream in self._streams:
                    await stream.aclose()

    async def _copy(self, source: Stream, target: Stream, circuit: anyio.CancelScope) -> None:
        copied = 0
        try:
            while data := await _next_part(source):
                copied += len(data)
                if self._max_bytes is not None and copied > self._max_bytes:
                    await self._reset_both("bytes")
                    circuit.cancel()
                    return
                await target.send_all(data)
                self.moved += len(data)
                release_buffer(data)
            await target.send_eof()
        except _STREAM_FAILURES:
            await self._reset_both("failed")
            circuit.cancel()

    async def _reset_both(self, outcome: Outcome) -> None:
        self.outcome = self.outcome or outcome  # errors that follow from the resets do not count
        for stream in self._streams:
            await stream.reset()
