"""Dialling and accepting: raw connection, mutual TLS, yamux, registration with py-libp2p's swarm.

`_accept` replaces `Swarm._do_handle_inbound_connection`, which holds one of a fixed number of tokens for the swarm's
whole life instead of the connection's. `dial` replaces `Swarm.dial_peer` and `host.connect`, which know one address,
sleep after success and block a peer for a minute after a failure. A test fails when the source of what is replaced
changes.
"""

from __future__ import annotations

import logging
import types
from typing import Any, Final, cast

import trio
from libp2p.abc import IRawConnection
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
from multiaddr import Multiaddr

from hypha_net._libp2p.muxer import Muxer
from hypha_net._libp2p.security import TlsConnection
from hypha_net.errors import RefusedError, UnreachableError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.connections")

UPGRADE_TIMEOUT: Final = 15.0
_FAMILIES: Final = {"dns4": trio.socket.AF_INET, "dns6": trio.socket.AF_INET6}
PATCHED_METHOD: Final = "_do_handle_inbound_connection"


class YamuxMultistream(MuxerMultistream):
    """Negotiates yamux and makes our muxer, where the stock class names its own."""

    async def new_conn(self, conn: Any, peer_id: ID) -> Muxer:
        """Agree on yamux and start a muxer on the connection."""
        await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        return Muxer(conn, peer_id)


def patch_swarm(swarm: Swarm) -> None:
    """Make this one swarm accept connections our way."""
    setattr(swarm, PATCHED_METHOD, types.MethodType(_accept, swarm))


async def _accept(swarm: Swarm, read_write_closer: Any, _address: Multiaddr, _failure: Any) -> None:
    """Serve an inbound connection as long as it lives."""
    raw = RawConnection(read_write_closer, False)
    try:
        connection = await upgrade(swarm, raw, expected=None)
    except UnreachableError as error:
        _log.debug("inbound connection from %s not taken: %s", raw.get_remote_address(), error)
        return
    await connection.muxed_conn.event_closed.wait()  # type: ignore[attr-defined]


async def dial(swarm: Swarm, address: Multiaddr, expected: PeerId | None) -> SwarmConn:
    """Dial one TCP address.

    Raises:
        RefusedError: certificates do not fit, or another peer than `expected` is there.
        UnreachableError: nobody answers.
    """
    _, kind, host, _, port = str(address).split("/")[:5]
    try:
        stream = await _open(kind, host, int(port))
    except OSError as error:
        raise UnreachableError(f"{address}: {_root_cause(error)}") from error
    return await upgrade(swarm, RawConnection(TrioTCPStream(stream), True), expected=expected)


async def _open(kind: str, host: str, port: int) -> trio.SocketStream:
    """A TCP connection; a name is looked up as the system does it, which py-libp2p's own resolver does not.

    Raises:
        OSError: there is no such name, or nobody answers at any of its addresses.
    """
    if kind not in _FAMILIES:
        return await trio.open_tcp_stream(host, port)
    found = await trio.socket.getaddrinfo(host, port, family=_FAMILIES[kind], type=trio.socket.SOCK_STREAM)
    failures: list[OSError] = []
    for *_, place in found:
        try:
            return await trio.open_tcp_stream(str(place[0]), port)
        except OSError as error:
            failures.append(error)
    raise failures[0]


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
                raise RefusedError(f"{secured.certificate} answers where {expected} was expected")
            # a probe, which does not listen, may show the certificate of the very node that it asks
            if peer == swarm.self_id and raw.is_initiator and swarm.listeners:
                raise RefusedError("this is the node itself")
            muxed = await swarm.upgrader.upgrade_connection(secured, peer)
            if not swarm.get_connections(peer):
                _forget_identify(swarm, peer)
            connection = await swarm.add_conn(muxed, direction="outbound" if raw.is_initiator else "inbound")
            registered = True
            return connection
    except HandshakeFailure as error:
        raise RefusedError(str(error)) from error
    except (BaseLibp2pError, MultiselectError, MultiselectClientError, IOException, OSError) as error:
        if secured is not None and secured.refusal is not None:
            raise RefusedError(secured.refusal) from error
        raise UnreachableError(_root_cause(error)) from error
    except trio.TooSlowError as error:
        raise UnreachableError(f"no handshake within {UPGRADE_TIMEOUT:g} s") from error
    finally:
        if not registered:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await (raw if secured is None else secured).close()


def secured(connection: SwarmConn) -> TlsConnection:
    """The encrypted connection under a connection that carries streams."""
    return cast(TlsConnection, cast(Muxer, connection.muxed_conn)._conn)


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


def _root_cause(error: BaseException) -> str:
    """The first cause that has words."""
    while True:
        if isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        elif isinstance(error, OSError) and error.strerror:
            return error.strerror
        else:
            return str(error) or type(error).__name__
