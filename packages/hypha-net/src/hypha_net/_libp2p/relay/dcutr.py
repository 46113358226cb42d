"""A direct way past NAT for two nodes that a relay has brought together: ``/libp2p/dcutr``.

After `relay`: the node that took a circuit (`punch`) first dials the other directly; when that fails both tell each
other where they might be reached, and dial at the same moment from the ports that they listen on, so that each NAT
takes the other's packets for answers (`serve` is the other half). What is open on the circuit stays there; streams
opened later take the direct way, and a circuit that nothing uses any more is closed (`merging`). Where it does not
work, everything goes on through the relay.
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

_log = logging.getLogger("hypha_net.punching")

PROTOCOL: Final = "/libp2p/dcutr"
CONNECT, SYNC = 100, 300
MAX_MESSAGE: Final = 4096
ATTEMPTS: Final = 3
MAX_ADDRESSES: Final = 8
TIMEOUT: Final = 10.0
"""Seconds for a message of the other side."""
IDENTIFY_TIMEOUT: Final = 2.0
DIRECT_TIMEOUT: Final = 2.0
PUNCH_TIMEOUT: Final = 4.0
"""Seconds in which packets sent at the same moment meet, or do not: time for two of the kernel's repetitions."""
REFUSED_PAUSE: Final = 0.02
"""Seconds after which a closed door is knocked at again: half as long again each time, up to `LONGEST_PAUSE`."""
LONGEST_PAUSE: Final = 0.5
HolePunch: Any = message_classes(
    "hypha.dcutr", "proto2", {"HolePunch": [("type", 1, INT32, False, ""), ("addresses", 2, BYTES, True, "")]}
)["HolePunch"]

Outcome = Literal["direct", "failed", "unsupported"]
Upgrade = Callable[[IRawConnection, PeerId], Awaitable[None]]
"""Secures and registers a raw connection to a peer. Raises `NetError`."""


class DcutrEndpoint(Protocol):
    """What punching needs of the endpoint."""

    def is_direct(self, peer: PeerId) -> bool:
        """Whether there is a connection to `peer` that is not relayed."""
        ...

    async def open_stream(self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0) -> Stream:
        """See `Endpoint.open_stream`."""
        ...


class HolePuncher:
    """Both halves, for one endpoint."""

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
        """Where others might reach this node, as multiaddrs; the first have the port to punch from."""
        self._known = known
        """Where a peer says that it listens, once identify has told."""
        self._dialable = dialable
        """Those of a peer's addresses that may be dialled."""
        self._dial_known = dial_known
        """Dials those, names included. Raises `NetError` when nobody answers."""
        self._upgrade = upgrade
        self._serving: set[PeerId] = set()

    async def punch(self, peer: PeerId) -> None:
        """Find a direct way to `peer`, to which there is a relayed connection; tells how it went."""
        began = anyio.current_time()
        with anyio.move_on_after(IDENTIFY_TIMEOUT):  # there is no event for it
            while not self._known(peer):  # noqa: ASYNC110
                await anyio.sleep(0.05)
        outcome = await self._try(peer)
        if outcome is not None:
            self._events.emit(HolePunched(peer, outcome, anyio.current_time() - began))
            _log.info("a direct way to %s: %s", peer, outcome)

    async def _try(self, peer: PeerId) -> Outcome | None:
        if self._endpoint.is_direct(peer):
            return None
        with anyio.move_on_after(DIRECT_TIMEOUT), suppress(NetError):
            await self._dial_known(peer)
        for _ in range(ATTEMPTS):
            if self._endpoint.is_direct(peer):
                return "direct"
            try:
                theirs, half_way = await self._exchange(peer)
            except UnsupportedProtocolError:
                return "unsupported"
            except (NetError, TimeoutError) as error:
                _log.debug("no addresses exchanged with %s: %s", peer, str(error) or "no answer")
                return "failed"
            await anyio.sleep(half_way)
            # the one that took the circuit plays the listener: of two that both dial, one must
            await self._dial_all(theirs, peer, self._port(), False, PUNCH_TIMEOUT)
        return "direct" if self._endpoint.is_direct(peer) else "failed"

    async def _exchange(self, peer: PeerId) -> tuple[list[str], float]:
        """Tell our addresses, hear theirs, and give the word; with the seconds that it is on its way."""
        stream = await self._endpoint.open_stream(peer, [PROTOCOL], timeout=TIMEOUT)
        try:
            with anyio.fail_after(TIMEOUT):
                sent = anyio.current_time()
                await write_message(stream, self._connect())
                theirs = self._read(await read_message(stream, HolePunch, MAX_MESSAGE))
                travel = anyio.current_time() - sent
                await write_message(stream, HolePunch(type=SYNC))
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
        return theirs, travel / 2

    async def serve(self, stream: Stream) -> None:
        """The other half: tell our addresses, and dial at the word."""
        peer = stream.peer
        if peer in self._serving:  # one at a time: each knocks at doors that the peer names
            await stream.reset()
            return
        self._serving.add(peer)
        try:
            await self._serve(stream, peer)
        except (NetError, TimeoutError) as error:
            _log.info("no hole punch with %s: %s", peer, str(error) or "too slow")
            await stream.reset()
        finally:
            self._serving.discard(peer)

    async def _serve(self, stream: Stream, peer: PeerId) -> None:
        with anyio.fail_after(TIMEOUT):
            theirs = self._read(await read_message(stream, HolePunch, MAX_MESSAGE))
            await write_message(stream, self._connect())
            word = await read_message(stream, HolePunch, MAX_MESSAGE)
        if word is not None and word.type == SYNC and not self._endpoint.is_direct(peer):
            await self._dial_all(theirs, peer, self._port(), True, PUNCH_TIMEOUT)

    def _connect(self) -> Any:
        own = [Multiaddr(address).to_bytes() for address in self._own()[:MAX_ADDRESSES]]
        return HolePunch(type=CONNECT, addresses=own)

    def _own(self) -> list[str]:
        return [address for address in self._candidates() if address.split("/")[1] in ("ip4", "ip6")]

    def _read(self, message: Any) -> list[str]:
        if message is None or message.type != CONNECT:
            raise NetError("a hole punch begins with CONNECT")
        theirs = self._dialable(bytes(address) for address in message.addresses[:MAX_ADDRESSES])
        return [address for address in theirs if address.split("/")[1] in ("ip4", "ip6")]  # a name may lead anywhere

    def _port(self) -> int | None:
        ports = [int(address.split("/")[4]) for address in self._own()]
        return ports[0] if ports else None

    async def _dial_all(
        self, addresses: Sequence[str], peer: PeerId, port: int | None, initiator: bool, timeout: float
    ) -> None:
        """Dial all at once; returns when one has become a connection, or after `timeout` seconds."""

        async def attempt(address: str) -> None:
            try:
                stream = await _meet(address, port)
                await self._upgrade(RawConnection(TrioTCPStream(stream), initiator), peer)
                tasks.cancel_scope.cancel()
            except (OSError, NetError) as error:
                _log.debug("%s at %s: %s", peer, address, error)

        with anyio.move_on_after(timeout):
            async with anyio.create_task_group() as tasks:
                for address in addresses[:MAX_ADDRESSES]:
                    tasks.start_soon(attempt, address)


async def _meet(address: str, port: int | None) -> trio.SocketStream:
    """A TCP connection from `port`; who is refused has come too early, and tries again until cancelled.

    Raises:
        OSError: nobody can be reached there from here; without a port, also when refused.
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
        pause = min(1.5 * pause, LONGEST_PAUSE)
