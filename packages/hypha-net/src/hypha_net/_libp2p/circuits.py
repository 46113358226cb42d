"""A circuit: two streams joined by a relay, and at its ends the raw connection that TLS runs over."""

from __future__ import annotations

from typing import Final

import anyio
from libp2p.abc import IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from multiaddr import Multiaddr

from hypha_net.endpoint import Stream
from hypha_net.errors import StreamClosedError, StreamResetError

_PIECE: Final = 256 << 10
_GONE: Final = (StreamResetError, StreamClosedError)


class CircuitConnection(IRawConnection):
    """A stream to a relay as the raw connection that TLS runs over."""

    def __init__(self, stream: Stream, *, is_initiator: bool) -> None:
        self._circuit = stream
        self.is_initiator = is_initiator

    async def read(self, n: int | None = None) -> bytes:
        """Up to `n` bytes; empty at the clean end."""
        try:
            return await self._circuit.receive_some(n if n is not None and n > 0 else _PIECE)
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


async def join(one: Stream, other: Stream) -> None:
    """Pass on what either stream brings until both have ended; a clean end as one, a reset as a reset."""
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_pass_on, one, other, tasks.cancel_scope)
            tasks.start_soon(_pass_on, other, one, tasks.cancel_scope)
    finally:
        with anyio.CancelScope(shield=True):
            for stream in (one, other):
                await stream.aclose()


async def _pass_on(source: Stream, target: Stream, both: anyio.CancelScope) -> None:
    try:
        while data := await source.receive_some(_PIECE):
            await target.send_all(data)
        await target.send_eof()
    except _GONE:
        for stream in (source, target):
            await stream.reset()
        both.cancel()
