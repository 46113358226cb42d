"""A peer among peers: the one interface through which everything above talks to the network.

Two implementations stand behind it: py-libp2p over mutual TLS (`hypha_net._libp2p`, opened by `open_endpoint`) and
`hypha_net.testing.MemoryEndpoint`, the same behaviour in memory. Both pass one set of contract tests.

An endpoint knows bytes only. What the bytes mean is the business of the rooms beside this one: `requests` (ask one),
`gossip` (tell many), `directory` (find) and `transfer` (move files), which are built on this interface alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from hypha_net.events import Events
from hypha_proto.ids import PeerId


class Stream(Protocol):
    """One bidirectional byte stream to one peer, half-closable."""

    @property
    def peer(self) -> PeerId:
        """The authenticated peer at the other end."""
        ...

    @property
    def protocol(self) -> str:
        """The protocol id that both sides agreed on."""
        ...

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; waits as long as the peer does not read.

        Raises:
            StreamClosedError: this side has ended or closed the stream.
            StreamResetError: the peer or the connection is gone.
        """
        ...

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        """Receive 1 to `max_bytes` bytes; ``b""`` only after the peer's clean end of stream.

        Raises:
            StreamClosedError: this side closed the stream.
            StreamResetError: the peer reset the stream, or its connection broke off.
        """
        ...

    async def receive_into(self, buffer: bytearray | memoryview) -> int:
        """Receive at least 1 byte and at most as many as fit into `buffer`; 0 only after the peer's clean end.

        Raises: as `receive_some`.
        """
        ...

    async def send_eof(self, last: bytes = b"") -> None:
        """End the sending side cleanly; receiving goes on. Idempotent without `last`.

        The end goes with the last byte of `last`: a peer that has seen the one has seen the other.

        Raises: as `send_all`, for `last`.
        """
        ...

    async def reset(self) -> None:
        """Break the stream off at once; the peer sees `StreamResetError`. Idempotent, never raises."""
        ...

    async def aclose(self) -> None:
        """Close both sides: cleanly if sending has ended or nothing is wrong. Idempotent, never raises."""
        ...


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Serves one incoming stream. The endpoint closes the stream when it returns and resets it when it raises."""


@dataclass(frozen=True, slots=True)
class GossipMessage:
    """One message of a topic, signature verified."""

    source: PeerId
    """Who published it (not who forwarded it)."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A value found in the directory."""

    key: bytes
    value: bytes
    publisher: PeerId | None
    """Who put it there, if the record says so."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes on the wire since the endpoint opened: transport payload of TCP, TLS and framing included."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """What is known about a connected peer."""

    peer_id: PeerId
    addresses: tuple[str, ...] = ()
    """Where it says it listens, as multiaddrs without the ``/p2p/`` part."""
    agent: str = ""
    """Its identify agent version, such as ``hypha-python/0.1.0``."""
    protocols: frozenset[str] = field(default_factory=frozenset)
    certificate_not_after: float | None = None
    """End of its certificate's validity, seconds since the epoch (for display, never for deciding)."""
    role: str | None = None
    """The role in its certificate (``gateway``, ``worker``, …), if it has one."""


class Endpoint(Protocol):
    """A node's presence in the network. Methods may be called from any task of the event loop that opened it."""

    @property
    def peer_id(self) -> PeerId:
        """Who this endpoint is."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs at which it can be dialled now, each ending in ``/p2p/<peer id>``, relay circuits included."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Bytes sent and received so far."""
        ...

    @property
    def events(self) -> Events:
        """What happens to this endpoint, for whoever follows."""
        ...

    async def connect(self, address: str, *, timeout: float = 10.0) -> PeerId:
        """Connect to a multiaddr, with or without ``/p2p/``; at once if a named peer is connected already.

        Raises:
            AddressError: the address cannot be dialled by any node.
            RefusedError: TLS or the peer id does not fit; the message says which certificate and why.
            UnreachableError: nobody answered there within `timeout` seconds.
        """
        ...

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to `peer`. No error if there is none."""
        ...

    def connected_peers(self) -> Mapping[PeerId, PeerInfo]:
        """The peers connected right now."""
        ...

    async def open_stream(
        self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0, request: bytes | None = None
    ) -> Stream:
        """Open a stream to `peer`, connecting first if need be (direct, from what the DHT knows, or by relay).

        `protocols` are offered in order; the stream's `protocol` is the first that the peer speaks. A `request` is all
        that this side has to say: it is sent, and its sending side ended, without waiting for the peer to agree where
        it is known to speak the protocol.

        Raises:
            UnreachableError: the peer cannot be reached within `timeout` seconds.
            UnsupportedProtocolError: it speaks none of `protocols`.
        """
        ...

    def is_authorized(self, peer: PeerId, what: str) -> bool:
        """Whether a peer of that role may send `what` (a name of `hypha_proto.protocols.SENDERS`) to this endpoint.

        A refusal is told as an event, and logged. Peers without a role may send everything unless roles are required.
        """
        ...

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Serve incoming streams of `protocol` with `handler`; a second call for one protocol replaces the first."""
        ...

    def unhandle(self, protocol: str) -> None:
        """Stop serving `protocol`; streams that are open stay. No error if it was not served."""
        ...

    async def publish(self, topic: str, data: bytes) -> None:
        """Tell everyone who subscribes to `topic`. Delivery is at most once, and none if no peer is in the topic."""
        ...

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[AsyncIterator[GossipMessage]]:
        """Receive what others publish on `topic` while the context is open (own messages do not come back).

        The topic is joined on entering. Messages wait in a bounded queue (1,024); when it is full the oldest are
        dropped and counted in the log.
        """
        ...

    def topic_peers(self, topic: str) -> frozenset[PeerId]:
        """Connected peers that are known to subscribe to `topic`."""
        ...

    async def put_record(self, key: bytes, value: bytes, *, ttl: float = 3600.0) -> None:
        """Store a record in the directory with this endpoint as its publisher; a newer put replaces an older.

        Raises:
            UnreachableError: no directory server took it.
        """
        ...

    async def find_records(self, key: bytes, *, timeout: float = 5.0) -> list[Record]:
        """Look a key up; best answer first, empty when nobody knows it.

        Raises:
            UnreachableError: no directory server could be asked.
        """
        ...

    async def find_peers(self, *, timeout: float = 5.0) -> list[PeerId]:
        """Some peers of the network, connected to this endpoint or not: up to 20 of each directory server's.

        Raises:
            UnreachableError: no directory server could be asked.
        """
        ...
