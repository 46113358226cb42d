"""Interface of the secure connection below a yamux session; implemented by `security.tls.TlsConnection`."""

from __future__ import annotations

from typing import Protocol

from libp2p.connection_types import ConnectionType
from multiaddr import Multiaddr


class SecureTransport(Protocol):
    """An encrypted byte stream that decrypts into, and encrypts from, the session's own buffers."""

    is_initiator: bool

    def read_now(self, buffer: memoryview) -> int | None:
        """Fill as much of `buffer` as is available. Return 0 after the peer's clean end, None if nothing is there."""
        ...

    async def wait_readable(self, *, fair: bool = True) -> None:
        """Wait until `read_now` has more to return; with `fair`, let other tasks run even if it has."""
        ...

    async def write(self, data: bytes, body: memoryview | None = None) -> None:
        """Send `data` and then `body`, whole or not at all."""
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...

    def get_transport_addresses(self) -> list[Multiaddr]:
        """Return the connection's addresses."""
        ...

    def get_connection_type(self) -> ConnectionType:
        """Return whether the connection is direct or relayed."""
        ...

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return host and port of the other end, if known."""
        ...
