"""Dialling and accepting: raw connection, mutual TLS, yamux, registration with py-libp2p's swarm.

`_accept` replaces `Swarm._do_handle_inbound_connection`, which holds one of a fixed number of tokens for the swarm's
whole life instead of the connection's; here there is no end of tokens, and `max_connections` is looked at before a
handshake. `dial` replaces `Swarm.dial_peer` and `host.connect`, which know one address, sleep after success and block a
peer for a minute after a failure. A test fails when the source of what is replaced changes.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import math
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import trio
from libp2p.abc import INetConn, INetwork, IRawConnection
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.security.exceptions import HandshakeFailure
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.tools.anyio_service.exceptions import LifecycleError
from multiaddr import Multiaddr

from hypha_net._libp2p.compat.notifee import SilentNotifee
from hypha_net._libp2p.dial.happy_eyeballs import run_staggered
from hypha_net._libp2p.security.tls import TLS_PROTOCOL, TlsConnection, shown_address
from hypha_net._libp2p.yamux.receive_buffer import Unread
from hypha_net._libp2p.yamux.session import PROTOCOL, YamuxSession
from hypha_net._libp2p.yamux.stream import YamuxStream
from hypha_net.error_causes import describe_root_cause
from hypha_net.errors import RefusedError, UnreachableError
from hypha_net.events import Events, PeerRejected
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.connections")

UPGRADE_TIMEOUT: Final = 15.0
MAX_STRANGERS: Final = 1024
MAX_STRANGERS_OF_HOST: Final = 256
"""Connections in their handshake, of all and of one host; whoever comes beyond that is closed and tries again."""
REGISTER_TIMEOUT: Final = 15
"""Seconds that a stream waits for its connection to be registered."""
STAGGER: Final = 0.25
"""Seconds between dials to further addresses of one peer while the earlier ones have not answered."""
_FAMILIES: Final = {
    "dns": trio.socket.AF_UNSPEC,
    "dns4": trio.socket.AF_INET,
    "dns6": trio.socket.AF_INET6,
}
PATCHED_METHOD: Final = "_do_handle_inbound_connection"


class YamuxMultistream(MuxerMultistream):
    """Negotiates yamux and makes our muxer, where the stock class names its own."""

    def __init__(self, serve: Callable[[YamuxStream], Awaitable[None]]) -> None:
        """The streams that peers open go to `serve`."""
        super().__init__({TProtocol(PROTOCOL): cast(Any, YamuxSession)})
        self._serve = serve
        self._unread: WeakValueDictionary[ID, Unread] = WeakValueDictionary()
        self.registrations = RegistrationBarrier()

    async def new_conn(self, conn: Any, peer_id: ID) -> YamuxSession:
        """Agree on yamux and start a muxer on the connection."""
        await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        known = trio.Event()
        muxer = YamuxSession(conn, peer_id, self._once(known), self._unread.setdefault(peer_id, Unread()))
        self.registrations.expected[muxer] = known
        return muxer

    def _once(self, known: trio.Event) -> Callable[[YamuxStream], Awaitable[None]]:
        """Serve a connection's streams once the swarm has the connection.

        A peer may ask as soon as it has finished its own half of the handshake. Who it is, which role it has and
        whether it came through a relay is told of the swarm's connections only.
        """

        async def serve(stream: YamuxStream) -> None:
            # by the second: where this process was stopped, all of the time has run out as it goes on
            for _ in range(0 if known.is_set() else REGISTER_TIMEOUT):
                with trio.move_on_after(1.0):
                    await known.wait()
                    break
            if not known.is_set():  # the connection did not come about
                await stream.reset()
                return
            await self._serve(stream)

        return serve


class RegistrationBarrier(SilentNotifee):
    """Tells of a connection that the swarm has it, before others are told."""

    def __init__(self) -> None:
        self.expected: WeakKeyDictionary[Any, trio.Event] = WeakKeyDictionary()

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        """A connection is up."""
        known = self.expected.pop(conn.muxed_conn, None)
        if known is not None:
            known.set()


class HandshakeLimiter:
    """Connections that have not shown who they are: so many of all, and of one host, are heard at once.

    They take no place from nodes: py-libp2p counts them among those, and as many sockets that say nothing as there are
    places would lock every node out.
    """

    def __init__(self) -> None:
        self._hosts: Counter[str] = Counter()
        self._turned_away = 0

    def turn_away(self, raw: RawConnection, why: str) -> None:
        """Count one that is not heard; the log tells the first, the tenth, the hundredth and so on."""
        self._turned_away += 1
        if str(self._turned_away).rstrip("0") == "1":
            where = shown_address(raw)
            _log.warning("connection from %s not taken: %s; %d so far", where, why, self._turned_away)

    @contextmanager
    def one_more(self, host: str) -> Iterator[bool]:
        """Whether one more of `host` is heard; it counts inside."""
        heard = self._hosts.total() < MAX_STRANGERS and self._hosts[host] < MAX_STRANGERS_OF_HOST
        if not heard:
            yield False
            return
        self._hosts[host] += 1
        try:
            yield True
        finally:
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]


def _host_of(raw: RawConnection) -> str:
    """Where a connection comes from, which py-libp2p does not tell of IPv6; empty when that is not known any more."""
    try:
        name = cast(TrioTCPStream, raw.stream).stream.socket.getpeername()
    except OSError:
        return ""
    return network_of(name[0].partition("%")[0])


def network_of(host: str) -> str:
    """An IP address, and of IPv6 the part that a network is given, within which it may choose."""
    address = ipaddress.ip_address(host)
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))


def patch_swarm(swarm: Swarm, events: Events) -> None:
    """Make this one swarm, which has our muxer, accept connections our way."""
    multistream = swarm.upgrader.muxer_multistream
    assert isinstance(multistream, YamuxMultistream)
    swarm.register_notifee(multistream.registrations)
    swarm._inbound_limiter = trio.CapacityLimiter(math.inf)  # see `_Strangers`
    strangers = HandshakeLimiter()

    async def accept(self: Swarm, read_write_closer: Any, _address: Multiaddr, _failure: Any) -> None:
        await _accept(self, read_write_closer, events, strangers)

    setattr(swarm, PATCHED_METHOD, types.MethodType(accept, swarm))


async def _accept(swarm: Swarm, read_write_closer: Any, events: Events, strangers: HandshakeLimiter) -> None:
    """Serve an inbound connection as long as it lives."""
    raw = RawConnection(read_write_closer, False)
    try:
        with strangers.one_more(_host_of(raw)) as heard:
            full = len(swarm.get_connections()) >= swarm.connection_config.max_connections
            if full or not heard:
                strangers.turn_away(raw, "max_connections are there" if full else "too many are in their handshake")
                await raw.close()
                return
            connection = await upgrade(swarm, raw, expected=None)
    except _StrangerError as error:
        _log.info("connection from %s not taken: %s", shown_address(raw), error)
        events.emit(PeerRejected(None, "protocol", str(error)))
        return
    except UnreachableError as error:
        level = logging.DEBUG if isinstance(error, RefusedError) else logging.INFO  # a refusal is told by `security`
        _log.log(level, "connection from %s not taken: %s", shown_address(raw), error)
        return
    await connection.muxed_conn.event_closed.wait()  # type: ignore[attr-defined]


async def dial(
    swarm: Swarm, address: Multiaddr, expected: PeerId | None, excludes: Callable[[str], bool] = lambda _host: False
) -> SwarmConn:
    """Dial one TCP address.

    Args:
        excludes: tells the IP addresses that a name must not lead to.

    Raises:
        RefusedError: certificates do not fit, or another peer than `expected` is there.
        UnreachableError: nobody answers.
    """
    _, kind, host, _, port = str(address).split("/")[:5]
    try:
        stream = await _open(kind, host, int(port), excludes)
    except OSError as error:
        raise UnreachableError(f"{address}: {describe_root_cause(error)}") from error
    return await upgrade(swarm, RawConnection(TrioTCPStream(stream), True), expected=expected)


async def _open(kind: str, host: str, port: int, excludes: Callable[[str], bool]) -> trio.SocketStream:
    """A TCP connection; a name is looked up as the system does it, which py-libp2p's own resolver does not.

    Raises:
        OSError: there is no such name, or nobody answers at any of its addresses.
        UnreachableError: it leads to excluded addresses only.
    """
    if kind not in _FAMILIES:
        return await trio.open_tcp_stream(host, port)
    found = await trio.socket.getaddrinfo(host, port, family=_FAMILIES[kind], type=trio.socket.SOCK_STREAM)
    named = list(dict.fromkeys(str(place[0]) for *_, place in found))
    allowed = [each for each in named if not excludes(each)]
    if not allowed:
        raise UnreachableError(f"the name {host} of a peer leads to {', '.join(named)}, left out by exclude_cidr")
    return await _open_first(allowed, port)


async def _open_first(hosts: Sequence[str], port: int) -> trio.SocketStream:
    """The first connection that comes about to one of several addresses. Raises `OSError` when none does."""
    opened: list[trio.SocketStream] = []
    failures: list[OSError] = []

    async def attempt(host: str) -> None:
        try:
            opened.append(await trio.open_tcp_stream(host, port))
            race.cancel()
        except OSError as error:
            failures.append(error)

    try:
        with trio.CancelScope() as race:
            await run_staggered([functools.partial(attempt, host) for host in hosts], STAGGER)
        await trio.lowlevel.checkpoint_if_cancelled()
    except BaseException:
        for stream in opened:
            await trio.aclose_forcefully(stream)
        raise
    for late in opened[1:]:
        await trio.aclose_forcefully(late)
    if not opened:
        raise failures[0]
    return opened[0]


async def upgrade(swarm: Swarm, raw: IRawConnection, *, expected: PeerId | None) -> SwarmConn:
    """Secure, multiplex and register a raw connection; it is closed when that fails.

    Raises:
        RefusedError: one side does not accept the other.
        UnreachableError: the other side does not speak our protocols, or went away.
    """
    secured: TlsConnection | None = None
    registered = False
    try:
        with trio.fail_after(UPGRADE_TIMEOUT):
            secured = await _secure(swarm, raw)
            peer = secured.get_remote_peer()
            if expected is not None and peer.to_bytes() != expected.raw:
                raise RefusedError(f"{secured.certificate} answers where {expected} was expected: correct the address")
            # a probe, which does not listen, may show the certificate of the very node that it asks
            if peer == swarm.self_id and raw.is_initiator and swarm.listeners:
                raise RefusedError("this is the node itself")
            muxed = await swarm.upgrader.upgrade_connection(secured, peer)
        if not swarm.get_connections(peer):
            _forget_identify(swarm, peer)
        # waits for this node only, so it has no deadline: the peer takes the connection for made, and a process that
        # was stopped here would give it up as it goes on
        connection = await swarm.add_conn(muxed, direction="outbound" if raw.is_initiator else "inbound")
        if connection.is_closed or muxed.is_closed:  # before it was listed, so that its end has not taken it off
            swarm.remove_conn(connection)
            raise UnreachableError("the connection broke off as it was made")
        registered = True
        return connection
    except HandshakeFailure as error:
        raise RefusedError(str(error)) from error
    except (MultiselectError, MultiselectClientError) as error:
        if secured is None and not is_cut(error):
            raise _StrangerError(
                f"it does not speak {TLS_PROTOCOL}, TLS with certificates on both sides: no Hypha node is there"
            ) from error
        raise _broken_off(raw, secured, error) from error
    except (BaseLibp2pError, IOException, OSError) as error:
        raise _broken_off(raw, secured, error) from error
    except LifecycleError as error:  # the swarm takes no more connections
        raise UnreachableError("this node is ending") from error
    except trio.TooSlowError as error:
        raise UnreachableError(f"no handshake within {UPGRADE_TIMEOUT:g} s") from error
    except UnreachableError:
        raise
    except Exception as error:
        _log.exception("the connection with %s broke off", shown_address(raw))
        raise UnreachableError(f"the connection broke off: {describe_root_cause(error)}") from error
    finally:
        if not registered:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await (raw if secured is None else secured).close()


class _StrangerError(RefusedError):
    """The other side is no Hypha node."""


def _broken_off(raw: IRawConnection, secured: TlsConnection | None, error: Exception) -> UnreachableError:
    """What to say of a connection that ended while it was made."""
    if secured is None:
        hint = "it ended the connection before a handshake; is it full? " if raw.is_initiator and is_cut(error) else ""
        return UnreachableError(f"{hint}({describe_root_cause(error)})" if hint else describe_root_cause(error))
    if secured.refusal is not None:
        return RefusedError(secured.refusal)
    return UnreachableError(
        f"{secured.certificate} ended the connection before it was used; does it expect another peer here, "
        f"or is it full? ({describe_root_cause(error)})"
    )


def secured(connection: SwarmConn) -> TlsConnection:
    """The encrypted connection under a connection that carries streams."""
    return cast(TlsConnection, cast(YamuxSession, connection.muxed_conn)._conn)


def _forget_identify(swarm: Swarm, peer: ID) -> None:
    """Have a peer that comes back asked anew: it may have restarted at another address, with other protocols."""
    if swarm.peerstore.has_peer(peer):
        swarm.peerstore.clear_protocol_data(peer)


async def _secure(swarm: Swarm, raw: IRawConnection) -> TlsConnection:
    multistream = swarm.upgrader.security_multistream
    if raw.is_initiator:
        secured = await multistream.secure_outbound(raw, swarm.self_id)
    else:
        secured = await multistream.secure_inbound(raw)
    assert isinstance(secured, TlsConnection)
    return secured


def is_cut(error: BaseException) -> bool:
    """Whether an error comes of a connection that ended or a peer that says nothing, rather than of what it said."""
    if "timed out" in str(error) or "read timeout" in str(error):  # py-libp2p has one error for all
        return True
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, IOException | OSError):
            return True
        cause = cause.__cause__
    return False
