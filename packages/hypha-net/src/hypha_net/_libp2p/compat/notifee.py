"""Notifees of py-libp2p's swarm: turn its notifications of connections into the endpoint's events.

A notifee is libp2p's observer of a network. Registered by the endpoint and by `compat.swarm`.
"""

from __future__ import annotations

from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.connection_types import ConnectionType
from multiaddr import Multiaddr

from hypha_net.events import Connected, Disconnected, Events
from hypha_proto.ids import PeerId


class SilentNotifee(INotifee):
    """Ignores every notification; a base for notifees that handle only some."""

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        """Ignore a new connection."""

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        """Ignore the end of a connection."""

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None:
        """Ignore a new stream."""

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None:
        """Ignore the end of a stream."""

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None:
        """Ignore a new listener."""

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None:
        """Ignore the end of a listener."""


class EventNotifee(SilentNotifee):
    """Emits `Connected` and `Disconnected` for each connection."""

    def __init__(self, events: Events) -> None:
        self._events = events

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        """Emit `Connected`."""
        muxed = conn.muxed_conn
        peer = PeerId(muxed.peer_id.to_bytes())
        relayed = muxed.get_connection_type() == ConnectionType.RELAYED
        self._events.emit(Connected(peer, "outbound" if muxed.is_initiator else "inbound", relayed))

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        """Emit `Disconnected`, with the reason if known."""
        muxed = conn.muxed_conn
        self._events.emit(Disconnected(PeerId(muxed.peer_id.to_bytes()), getattr(muxed, "end_reason", "")))
