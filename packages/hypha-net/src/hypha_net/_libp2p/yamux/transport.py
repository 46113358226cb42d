"""What a muxer stands on: a connection that is secure already."""

from __future__ import annotations

from typing import Protocol

from libp2p.connection_types import ConnectionType
from multiaddr import Multiaddr


class SecureTransport(Protocol):
    """What the muxer needs of the secure connection below: no copies between the two."""

    is_initiator: bool

    def read_now(self, buffer: memoryview) -> int | None:
        """Fill as much of `buffer` as is there; 0 after the peer's clean end, none if there is nothing now."""
        ...

    async def more(self) -> None:
        """Wait for more to read."""
        ...

    async def write(self, data: bytes, body: memoryview | None = None) -> None:
        """Send `data` and then `body`, whole or not at all."""
        ...

    async def close(self) -> None:
        """End it."""
        ...

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Its addresses."""
        ...

    def get_connection_type(self) -> ConnectionType:
        """Direct or relayed."""
        ...

    def get_remote_address(self) -> tuple[str, int] | None:
        """Where the other end is, if that is known."""
        ...
