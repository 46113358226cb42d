"""DCUtR: replaces a relayed connection by a direct one through NATs, by hole punching.

Implements ``/libp2p/dcutr`` (https://github.com/libp2p/specs/blob/master/relay/DCUtR.md). The node that accepted a
circuit (`HolePuncher.punch`, called by `endpoint`) first dials the other directly. If that fails, both exchange
addresses over the circuit and dial at the same moment from their listening ports, so that each NAT takes the other's
packets for answers (`HolePuncher.serve` is the other side). Streams that are open on the circuit stay there, new ones
use the direct connection, and `dial.connection_pruning` closes the unused circuit. Where it fails, the circuit stays
in use.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, Protocol

import anyio
import trio
from libp2p.abc import IRawConnection
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from multiaddr import Multiaddr

from hypha_net._libp2p.wire.delimited import read_message, write_message
from hypha_net._libp2p.wire.protobuf import BYTES, INT32, message_classes
from hypha_net.endpoint import Stream
from hypha_net.errors import NetError, UnsupportedProtocolError
from hypha_net.events import Events, HolePunched
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.dcutr")

PROTOCOL: Final = "/libp2p/dcutr"
CONNECT, SYNC = 100, 300
MAX_MESSAGE: Final = 4096
ATTEMPTS: Final = 3
MAX_ADDRESSES: Final = 8
TIMEOUT: Final = 10.0
"""Seconds within which the other side must have sent its message."""
IDENTIFY_TIMEOUT: Final = 2.0
DIRECT_TIMEOUT: Final = 2.0
PUNCH_TIMEOUT: Final = 4.0
"""Seconds for the simultaneous open: time for two SYN retransmissions of the kernel."""
REFUSED_PAUSE: Final = 0.02
"""Seconds after which a refused connection is tried again; 1.5 times as long each time, up to `MAX_REFUSED_PAUSE`.

Without jitter, unlike other retries: both sides must dial at the same time."""
MAX_REFUSED_PAUSE: Final = 0.5
HolePunch: Any = message_classes(
    "hypha.dcutr", "proto2", {"HolePunch": [("type", 1, INT32, False, ""), ("addresses", 2, BYTES, True, "")]}
)["HolePunch"]

Outcome = Literal["direct", "failed", "unsupported"]
Upgrade = Callable[[IRawConnection, PeerId], Awaitable[None]]
"""Secures and registers a raw connection to a peer. Raises `NetError`."""


class DcutrEndpoint(Protocol):
    """The part of the endpoint that hole punching uses."""

    def is_direct(self, peer: PeerId) -> bool:
        """Return whether there is a connection to `peer` that is not relayed."""
        ...

    async def open_stream(self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0) -> Stream:
        """See `Endpoint.open_stream`."""
        ...


class HolePuncher:
    """Both sides of DCUtR, for one endpoint."""

    def __init__(
        self,
        endpoint: DcutrEndpoint,
        events: Events,
        candidates: Callable[[], Sequence[str]],
        known: Callable[[PeerId], Iterable[bytes]],
        dialable: Callable[[Iterable[bytes]], list[str]],
        dial_known: Callable[[PeerId], Awaitable[None]],
        upgrade: Upgrade,
    ) -> None:
        self._endpoint = endpoint
        self._events = events
        self._candidates = candidates
        """Multiaddrs at which others might reach this node; the first have the port to dial from."""
        self._known = known
        """The addresses that a peer reported by identify."""
        self._dialable = dialable
        """Filters a peer's addresses for those that may be dialled."""
        self._dial_known = dial_known
        """Dials the reported addresses, host names included. Raises `NetError` when none answers."""
        self._upgrade = upgrade
        self._serving: set[PeerId] = set()

    async def punch(self, peer: PeerId) -> None:
        """Try to connect directly to `peer`, to which there is a relayed connection; emit the outcome."""
        began = anyio.current_time()
        with anyio.move_on_after(IDENTIFY_TIMEOUT):  # py-libp2p has no event for identify
            while not self._known(peer):  # noqa: ASYNC110
                await anyio.sleep(0.05)
        outcome = await self._connect_directly(peer)
        if outcome is not None:
            self._events.emit(HolePunched(peer, outcome, anyio.current_time() - began))
            _log.info("direct connection to %s: %s", peer, outcome)

    async def _connect_directly(self, peer: PeerId) -> Outcome | None:
        if self._endpoint.is_direct(peer):
            return None
        with anyio.move_on_after(DIRECT_TIMEOUT), suppress(NetError):
            await self._dial_known(peer)
        for _ in range(ATTEMPTS):
            if self._endpoint.is_direct(peer):
                return "direct"
            try:
                theirs, delay = await self._exchange(peer)
            except UnsupportedProtocolError:
                return "unsupported"
            except (NetError, TimeoutError) as error:
                _log.debug("addresses were not exchanged with %s: %s", peer, str(error) or "no answer")
                return "failed"
            await anyio.sleep(delay)
            # after a simultaneous open one side must be the TLS server: the one that accepted the circuit
            await self._dial_all(theirs, peer, self._listening_port(), False, PUNCH_TIMEOUT)
        return "direct" if self._endpoint.is_direct(peer) else "failed"

    async def _exchange(self, peer: PeerId) -> tuple[list[str], float]:
        """Exchange addresses and send SYNC; return theirs, and half the round-trip time in seconds."""
        stream = await self._endpoint.open_stream(peer, [PROTOCOL], timeout=TIMEOUT)
        try:
            with anyio.fail_after(TIMEOUT):
                sent = anyio.current_time()
                await write_message(stream, self._connect_message())
                theirs = self._parse_connect(await read_message(stream, HolePunch, MAX_MESSAGE))
                round_trip = anyio.current_time() - sent
                await write_message(stream, HolePunch(type=SYNC))
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
        return theirs, round_trip / 2

    async def serve(self, stream: Stream) -> None:
        """Serve the other side: exchange addresses, and dial when SYNC arrives."""
        peer = stream.peer
        if peer in self._serving:  # one at a time: each makes this node dial addresses that the peer names
            await stream.reset()
            return
        self._serving.add(peer)
        try:
            await self._serve(stream, peer)
        except (NetError, TimeoutError) as error:
            _log.info("hole punch with %s failed: %s", peer, str(error) or "too slow")
            await stream.reset()
        finally:
            self._serving.discard(peer)

    async def _serve(self, stream: Stream, peer: PeerId) -> None:
        with anyio.fail_after(TIMEOUT):
            theirs = self._parse_connect(await read_message(stream, HolePunch, MAX_MESSAGE))
            await write_message(stream, self._connect_message())
            sync = await read_message(stream, HolePunch, MAX_MESSAGE)
        if sync is not None and sync.type == SYNC and not self._endpoint.is_direct(peer):
            await self._dial_all(theirs, peer, self._listening_port(), True, PUNCH_TIMEOUT)

    def _connect_message(self) -> Any:
        own = [Multiaddr(address).to_bytes() for address in self._own_addresses()[:MAX_ADDRESSES]]
        return HolePunch(type=CONNECT, addresses=own)

    def _own_addresses(self) -> list[str]:
        return [address for address in self._candidates() if address.split("/")[1] in ("ip4", "ip6")]

    def _parse_connect(self, message: Any) -> list[str]:
        if message is None or message.type != CONNECT:
            raise NetError("a hole punch must begin with CONNECT")
        theirs = self._dialable(bytes(address) for address in message.addresses[:MAX_ADDRESSES])
        # a host name may resolve to an excluded address
        return [address for address in theirs if address.split("/")[1] in ("ip4", "ip6")]

    def _listening_port(self) -> int | None:
        ports = [int(address.split("/")[4]) for address in self._own_addresses()]
        return ports[0] if ports else None

    async def _dial_all(
        self, addresses: Sequence[str], peer: PeerId, port: int | None, initiator: bool, timeout: float
    ) -> None:
        """Dial all addresses at once; return when one is connected, or after `timeout` seconds."""

        async def attempt(address: str) -> None:
            try:
                stream = await _simultaneous_open(address, port)
                await self._upgrade(RawConnection(TrioTCPStream(stream), initiator), peer)
                tasks.cancel_scope.cancel()
            except (OSError, NetError) as error:
                _log.debug("%s at %s: %s", peer, address, error)

        with anyio.move_on_after(timeout):
            async with anyio.create_task_group() as tasks:
                for address in addresses[:MAX_ADDRESSES]:
                    tasks.start_soon(attempt, address)


async def _simultaneous_open(address: str, port: int | None) -> trio.SocketStream:
    """Open a TCP connection from `port`; retry until cancelled when refused: the peer is not ready then.

    Raises:
        OSError: the address cannot be reached; without a port, also when refused.
    """
    _, kind, host, _, remote = address.split("/")[:5]
    family = trio.socket.AF_INET6 if kind == "ip6" else trio.socket.AF_INET
    pause = REFUSED_PAUSE
    while True:
        sock = trio.socket.socket(family, trio.socket.SOCK_STREAM)
        connected = False
        try:
            sock.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
            if port is not None:
                sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)
                sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEPORT, 1)
                await sock.bind(("", port))
            await sock.connect((host, int(remote)))
            connected = True
            return trio.SocketStream(sock)
        except OSError as error:
            if port is None or error.errno not in (errno.ECONNREFUSED, errno.ECONNRESET):
                raise
        finally:
            if not connected:
                sock.close()
        await anyio.sleep(pause)
        pause = min(1.5 * pause, MAX_REFUSED_PAUSE)
