"""What the swarm notices of connections, told as the endpoint's events."""

from __future__ import annotations

from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.connection_types import ConnectionType
from multiaddr import Multiaddr

from hypha_net.events import Connected, Disconnected, Events
from hypha_proto.ids import PeerId


class SilentNotifee(INotifee):
    """Notices nothing: for those who want to know of one thing only."""

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        """A connection is up."""

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        """A connection is gone."""

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None:
        """Streams are their users' business."""

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None:
        """Streams are their users' business."""

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None:
        """Listeners are the engine's own."""

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None:
        """Listeners are the engine's own."""


class EventNotifee(SilentNotifee):
    """Registered with the swarm; emits an event for each connection that comes or goes."""

    def __init__(self, events: Events) -> None:
        self._events = events

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        """A connection is up."""
        muxed = conn.muxed_conn
        peer = PeerId(muxed.peer_id.to_bytes())
        relayed = muxed.get_connection_type() == ConnectionType.RELAYED
        self._events.emit(Connected(peer, "outbound" if muxed.is_initiator else "inbound", relayed))

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        """A connection is gone."""
        muxed = conn.muxed_conn
        self._events.emit(Disconnected(PeerId(muxed.peer_id.to_bytes()), getattr(muxed, "end_reason", "")))
