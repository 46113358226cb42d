"""Prune surplus connections: of several to one peer both ends use the same one, and unused others are closed.

Two nodes that dial each other at the same moment have two connections, and a hole punch leaves a direct one beside the
circuit. `dial.dialer.select_connection` chooses the one to use, with the same result at both ends. Streams on another
connection stay there to their end, except gossip, which has no end: `gossipsub.stream_migration` moves it. A
connection that carried nothing for a while is closed by the side that dialled it; a circuit is then no longer carried
by the relay. A reservation of ours that depends on the connection is refreshed over another one first; one of the
peer's here keeps its connection open. The side that did not dial never closes, since other implementations may use
two connections deliberately.

Run by the endpoint.
"""

from __future__ import annotations

import logging
from typing import Final, cast

import anyio
import trio
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID

from hypha_net._libp2p.dial.dialer import Dialer, is_direct
from hypha_net._libp2p.gossipsub.stream_migration import StreamMigrator
from hypha_net._libp2p.relay.client import RelayClient
from hypha_net._libp2p.relay.server import RelayServer
from hypha_net._libp2p.yamux.session import PING_INTERVAL, YamuxSession
from hypha_net.errors import NetError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.dial")

INTERVAL: Final = 0.5
"""Seconds between looks for peers with several connections."""
GRACE: Final = 3.0
"""Seconds without a stream and without a byte from the peer after which a surplus connection is closed."""
ALIVE_WITHIN: Final = PING_INTERVAL + 5.0
"""Seconds within which the connection that is kept must have received something: a living one is pinged before."""


class ConnectionPruner:
    """Prunes the connections of one endpoint."""

    def __init__(
        self, swarm: Swarm, dialer: Dialer, gossip: StreamMigrator, relay: RelayClient, hop: RelayServer | None
    ) -> None:
        self._swarm = swarm
        self._dialer = dialer
        self._gossip = gossip
        self._relay = relay
        self._hop = hop

    async def run(self) -> None:
        """Prune until cancelled."""
        while True:
            await anyio.sleep(INTERVAL)
            async with anyio.create_task_group() as tasks:
                for raw in [raw for raw, found in self._swarm.connections.items() if len(found) > 1]:
                    tasks.start_soon(self._prune, PeerId(raw.to_bytes()))

    async def _prune(self, peer: PeerId) -> None:
        kept = self._dialer.connection(peer)
        if kept is None:
            return
        await self._gossip.follow(ID(peer.raw), kept)
        for other in self._dialer.connections(peer):
            if self._dialer.connection(peer) is not kept:
                return  # it was lost meanwhile
            if not self._can_close(peer, other, kept) or not await self._refresh_reservation(peer):
                continue
            if self._can_close(peer, other, kept):
                kind = "connection" if is_direct(other) else "circuit"
                _log.info("closing an unused second %s to %s", kind, peer)
                await other.close()

    async def _refresh_reservation(self, peer: PeerId) -> bool:
        """Return whether no reservation of ours at `peer` depends on one of its connections alone."""
        try:
            await self._relay.refresh_reservation(peer)
        except NetError as error:
            _log.debug("the reservation at %s stays on its connection: %s", peer, error)
            return False
        return True

    def _can_close(self, peer: PeerId, connection: SwarmConn, kept: SwarmConn) -> bool:
        now = trio.current_time()
        session = cast(YamuxSession, connection.muxed_conn)
        return (
            connection is not kept
            and not connection.is_closed
            and session.is_initiator
            and now - session.last_received_at >= GRACE
            and now - cast(YamuxSession, kept.muxed_conn).last_received_at <= ALIVE_WITHIN
            and not is_used(connection)
            and not (self._hop is not None and self._hop.depends_on_connection(peer, connection))
        )


def is_used(connection: SwarmConn) -> bool:
    """Return whether streams are in use on a connection; see `YamuxSession.has_streams_in_use`."""
    return bool(connection.get_streams()) or cast(YamuxSession, connection.muxed_conn).has_streams_in_use()
