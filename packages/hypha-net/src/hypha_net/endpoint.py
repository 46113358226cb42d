"""`Endpoint`: the one interface through which everything above uses the network.

Two implementations: py-libp2p over mutual TLS (`hypha_net._libp2p`, opened by `open_endpoint`), and
`hypha_net.testing.MemoryEndpoint`, the same behaviour in memory. One set of contract tests runs on both.

An endpoint carries bytes only. Messages and files are built on this interface alone: `rpc` (requests), `pubsub` (typed
gossip), `dataset_directory` (datasets by name) and `transfer` (files).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from hypha_net.events import Events
from hypha_proto.ids import PeerId


class Stream(Protocol):
    """A bidirectional byte stream to one peer that can be half-closed."""

    @property
    def peer(self) -> PeerId:
        """The authenticated peer at the other end."""
        ...

    @property
    def protocol(self) -> str:
        """The protocol id that both sides agreed on."""
        ...

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; wait while the peer does not read.

        Raises:
            StreamClosedError: this side has ended or closed the stream.
            StreamResetError: the peer or the connection is gone.
        """
        ...

    async def receive_some(self, max_bytes: int = 65536) -> bytes:
        """Receive 1 to `max_bytes` bytes; return ``b""`` only after the peer's clean end of stream.

        Raises:
            StreamClosedError: this side closed the stream.
            StreamResetError: the peer reset the stream, or its connection is lost.
        """
        ...

    async def receive_into(self, buffer: bytearray | memoryview) -> int:
        """Receive into `buffer` and return the number of bytes; 0 only after the peer's clean end of stream.

        Raises: as `receive_some`.
        """
        ...

    async def send_eof(self, last: bytes = b"") -> None:
        """End the sending side cleanly; receiving goes on. Idempotent without `last`.

        The end is sent together with the last byte of `last`.

        Raises: as `send_all`, for `last`.
        """
        ...

    async def reset(self) -> None:
        """Abort the stream at once; the peer sees `StreamResetError`. Idempotent, never raises."""
        ...

    async def aclose(self) -> None:
        """Close both sides, cleanly unless the stream has failed. Idempotent, never raises."""
        ...


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Serves one incoming stream. The endpoint closes the stream when the handler returns and resets it when it raises."""


async def receive_up_to(stream: Stream, size: int) -> bytes:
    """Receive `size` bytes, fewer if the stream ends before."""
    data = bytearray()
    while len(data) < size and (part := await stream.receive_some(size - len(data))):
        data += part
    return bytes(data)


@dataclass(frozen=True, slots=True)
class GossipMessage:
    """A message of a topic; its signature is verified."""

    source: PeerId
    """The publisher, not the peer that forwarded it."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A record found in the DHT."""

    key: bytes
    value: bytes
    publisher: PeerId | None
    """The peer that put it, if the record names one."""


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
    certificate_name: str | None = None
    """The common name in its certificate (for display, never for deciding)."""


class Endpoint(Protocol):
    """A node's interface to the network. Methods may be called from any task of the event loop that opened it."""

    @property
    def peer_id(self) -> PeerId:
        """The peer id of this endpoint."""
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
        """The events of this endpoint, for subscribers."""
        ...

    async def connect(self, address: str, *, timeout: float = 10.0) -> PeerId:
        """Connect to a multiaddr and return its peer; return at once if it names a peer that is connected.

        Raises:
            AddressError: the address is malformed or of an unsupported kind.
            RefusedError: TLS failed or the peer id differs; the message names the certificate and the reason.
            UnreachableError: no peer answered there within `timeout` seconds.
        """
        ...

    async def connect_peer(self, peer: PeerId, *, timeout: float = 10.0) -> None:
        """Connect to `peer` as `open_stream` does, and measure the round trip; return at once if both are done.

        A peer that answers no ping within 2 s counts as connected; its `round_trip_time` stays None.

        Raises:
            UnreachableError: the peer cannot be reached within `timeout` seconds.
        """
        ...

    def round_trip_time(self, peer: PeerId) -> float | None:
        """Return the shortest round trip measured on the connection to `peer`, in seconds, end to end if relayed.

        None without a connection, or before the first measurement, which begins when a connection is established. While
        a new connection is not measured, returns the value of the previous one, if that is still open.
        """
        ...

    async def disconnect(self, peer: PeerId) -> None:
        """Close every connection to `peer`. No error if there is none."""
        ...

    def connected_peers(self) -> Mapping[PeerId, PeerInfo]:
        """Return the peers that are connected now."""
        ...

    async def open_stream(
        self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0, request: bytes | None = None
    ) -> Stream:
        """Open a stream to `peer`; connect first if necessary (to known addresses, those in the DHT, or by relay).

        `protocols` are offered in order; the stream's `protocol` is the first that the peer speaks. With a `request`,
        that is all this side sends: the stream is half-closed after it, and where the peer is known to speak the
        protocol, the request is sent without waiting for the negotiation.

        Raises:
            UnreachableError: the peer cannot be reached within `timeout` seconds.
            UnsupportedProtocolError: it speaks none of `protocols`.
        """
        ...

    def is_authorized(self, peer: PeerId, what: str) -> bool:
        """Return whether a peer's role allows it to send `what` (a name of `ALLOWED_SENDERS`) to this endpoint.

        A refusal is emitted as an event, and logged. Peers without a role may send everything unless roles are
        required.
        """
        ...

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """Serve incoming streams of `protocol` with `handler`; replaces an earlier handler of the protocol."""
        ...

    async def publish(self, topic: str, data: bytes) -> None:
        """Publish to the subscribers of `topic`. Each receives the message at most once.

        Also does what `connect_subscribers` does, in the background.
        """
        ...

    async def connect_subscribers(self, topic: str, *, timeout: float = 1.0) -> None:
        """Connect to those subscribers of `topic` that would not receive what this node publishes otherwise.

        A gateway that is not in the topic does not forward its messages, so the other peers of such gateways are
        dialled. Returns when they have been dialled, or after `timeout` seconds (the rest continues in the background);
        at once if that was done lately. Raises nothing: `topic_peers` returns who is connected.
        """
        ...

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[AsyncIterator[GossipMessage]]:
        """Receive what others publish on `topic` while the context is open (own messages are not delivered).

        The topic is joined on entering. Messages wait in a bounded queue (1,024); when it is full the oldest are
        dropped, and their number is logged.
        """
        ...

    def gateways(self) -> Mapping[str, PeerId | None]:
        """Return the gateways of the settings by address, each with its peer if it is connected now."""
        ...

    def gateway_failures(self) -> Mapping[str, str]:
        """Return why the last attempt at a gateway has failed, by the addresses of those that are not connected."""
        ...

    def topic_peers(self, topic: str) -> frozenset[PeerId]:
        """Return the connected peers that are known to subscribe to `topic`."""
        ...

    async def put_record(self, key: bytes, value: bytes, *, ttl: float = 3600.0) -> None:
        """Store a record in the DHT with this endpoint as its publisher; it replaces the previous one of this key.

        Raises:
            UnreachableError: no gateway stored it.
        """
        ...

    async def find_records(self, key: bytes, *, timeout: float = 5.0) -> list[Record]:
        """Look up a key: one record per publisher, the newest first; empty when there is none.

        Raises:
            UnreachableError: no gateway answered.
        """
        ...

    def stored_records(self) -> Iterator[Record]:
        """Yield the records that this endpoint stores for the network and that have not expired: none unless a gateway.

        A publisher's signed record has its own key and the signature before its value (`hypha_proto.signed_records`).
        Records that are stored or expire during the iteration may be missing or not.
        """
        ...

    async def find_peers(self, *, timeout: float = 5.0) -> list[PeerId]:
        """Return peers of the network, connected to this endpoint or not: up to 20 from each gateway.

        Raises:
            UnreachableError: no gateway answered.
        """
        ...
