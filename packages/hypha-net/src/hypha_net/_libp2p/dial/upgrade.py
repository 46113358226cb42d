"""Upgrade a raw connection: mutual TLS, yamux, registration with py-libp2p's swarm.

The same for connections that this node dials (`dial.tcp`), accepts (`dial.listener`) and gets through a relay
(`dial.dialer`, `endpoint`). Steps: https://github.com/libp2p/specs/blob/master/connections/README.md
"""

from __future__ import annotations

import logging
from typing import Final, cast

import trio
from libp2p.abc import IRawConnection
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import IOException
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError, MultiselectError
from libp2p.security.exceptions import HandshakeFailure
from libp2p.tools.anyio_service.exceptions import LifecycleError

from hypha_net._libp2p.security.tls import TLS_PROTOCOL, TlsConnection, describe_address
from hypha_net._libp2p.yamux.session import YamuxSession
from hypha_net.errors import RefusedError, UnreachableError, describe_root_cause
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.dial")

UPGRADE_TIMEOUT: Final = 15.0
_CLOSED_NURSERY: Final = "Nursery is closed"
"""What trio says of a task group that is ending: that of the swarm, before the swarm's state says that it ends."""


class ForeignNodeError(RefusedError):
    """The other side does not speak Hypha's security protocol."""


async def upgrade(swarm: Swarm, raw: IRawConnection, *, expected: PeerId | None) -> SwarmConn:
    """Secure, multiplex and register a raw connection; close it if that fails.

    Raises:
        RefusedError: one side does not accept the other's certificate, or another peer than `expected` answers.
        UnreachableError: the other side does not speak our protocols, or the connection broke off.
    """
    secured: TlsConnection | None = None
    registered = False
    try:
        with trio.fail_after(UPGRADE_TIMEOUT):
            secured = await _secure(swarm, raw)
            peer = secured.get_remote_peer()
            if expected is not None and peer.to_bytes() != expected.raw:
                raise RefusedError(f"{secured.certificate} answers where {expected} was expected: correct the address")
            # a probe, which has no listeners, may use the certificate of the very node that it asks
            if peer == swarm.self_id and raw.is_initiator and swarm.listeners:
                raise RefusedError("this is the node itself")
            muxed = await swarm.upgrader.upgrade_connection(secured, peer)
        if not swarm.get_connections(peer):
            _forget_identify(swarm, peer)
        # without a deadline, as it waits for this node only: the peer considers the connection established, and a
        # process that was suspended here would find the deadline passed
        connection = await swarm.add_conn(muxed, direction="outbound" if raw.is_initiator else "inbound")
        if connection.is_closed or muxed.is_closed:  # it ended before it was listed, so its end did not remove it
            swarm.remove_conn(connection)
            raise UnreachableError("the connection broke off as it was made")
        registered = True
        return connection
    except HandshakeFailure as error:
        raise RefusedError(str(error)) from error
    except (MultiselectError, MultiselectClientError) as error:
        if secured is None and not is_disconnect(error):
            raise ForeignNodeError(
                f"it does not speak {TLS_PROTOCOL}, TLS with certificates on both sides: no Hypha node is there"
            ) from error
        raise _disconnected(raw, secured, error) from error
    except (BaseLibp2pError, IOException, OSError) as error:
        raise _disconnected(raw, secured, error) from error
    except LifecycleError as error:  # the swarm accepts no more connections
        raise UnreachableError("this node is shutting down") from error
    except trio.TooSlowError as error:
        raise UnreachableError(f"no handshake within {UPGRADE_TIMEOUT:g} s") from error
    except UnreachableError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and _CLOSED_NURSERY in str(error):
            raise UnreachableError("this node is shutting down") from error
        _log.exception("unexpected error while connecting with %s", describe_address(raw))
        raise UnreachableError(f"the connection broke off: {describe_root_cause(error)}") from error
    finally:
        if not registered:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + 1):
                await (raw if secured is None else secured).close()


def tls_connection_of(connection: SwarmConn) -> TlsConnection:
    """Return the TLS connection below a registered connection."""
    return cast(TlsConnection, cast(YamuxSession, connection.muxed_conn).transport)


def is_disconnect(error: BaseException) -> bool:
    """Return whether an error comes from a connection that ended or a silent peer, not from what the peer sent."""
    if "timed out" in str(error) or "read timeout" in str(error):  # py-libp2p has one error class for all
        return True
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, IOException | OSError):
            return True
        cause = cause.__cause__
    return False


def _disconnected(raw: IRawConnection, secured: TlsConnection | None, error: Exception) -> UnreachableError:
    """Return the error for a connection that ended during the upgrade."""
    cause = describe_root_cause(error)
    if secured is None:
        if raw.is_initiator and is_disconnect(error):
            return UnreachableError(f"it ended the connection before a handshake; is it full? ({cause})")
        return UnreachableError(cause)
    if secured.refusal is not None:
        return RefusedError(secured.refusal)
    return UnreachableError(
        f"{secured.certificate} ended the connection before it was used; does it expect another peer here, "
        f"or is it full? ({cause})"
    )


def _forget_identify(swarm: Swarm, peer: ID) -> None:
    """Forget what identify reported: the peer may have restarted at another address, with other protocols."""
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
