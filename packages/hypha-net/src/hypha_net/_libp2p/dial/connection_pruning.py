"""One connection to each peer: of several, both ends use the same one, and the others go when nothing uses them.

Two nodes that dial each other at the same moment have two connections, and a hole punch leaves a direct one beside the
circuit. Which of them is used is `dialer.preferred`'s to say, which comes to the same at both ends. What is open on
another stays there to its end; gossip, which has none, is moved (`gossip_moves`). A connection that carried nothing for
a while is closed by the side that dialled it, and a circuit with it leaves its place at the relay; our own place at a
relay moves before that, the peer's here holds its connection. What the other side
dialled is the other side's: implementations that keep two connections keep theirs.
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
from hypha_net._libp2p.yamux.stream import YamuxStream
from hypha_net.errors import NetError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.connections")

INTERVAL: Final = 0.5
"""Seconds between looks at who is connected more than once."""
GRACE: Final = 3.0
"""Seconds without a stream and without a byte of the peer after which a connection that is not used is closed."""
PROVEN: Final = PING_INTERVAL + 5.0
"""Seconds within which the one that is kept must have brought something: a living one is asked before that."""


class ConnectionPruner:
    """Looks after the connections of one endpoint."""

    def __init__(
        self, swarm: Swarm, dialer: Dialer, gossip: StreamMigrator, relay: RelayClient, hop: RelayServer | None
    ) -> None:
        self._swarm = swarm
        self._dialer = dialer
        self._gossip = gossip
        self._relay = relay
        self._hop = hop

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await anyio.sleep(INTERVAL)
            async with anyio.create_task_group() as tasks:
                for raw in [raw for raw, found in self._swarm.connections.items() if len(found) > 1]:
                    tasks.start_soon(self._merge, PeerId(raw.to_bytes()))

    async def _merge(self, peer: PeerId) -> None:
        kept = self._dialer.connection(peer)
        if kept is None:
            return
        await self._gossip.follow(ID(peer.raw), kept)
        for other in self._dialer.connections(peer):
            if self._dialer.connection(peer) is not kept:
                return  # it was lost meanwhile
            if self._may_go(peer, other, kept) and await self._settled(peer) and self._may_go(peer, other, kept):
                kind = "connection" if is_direct(other) else "circuit"
                _log.info("a second %s to %s is closed: nothing uses it", kind, peer)
                await other.close()

    async def _settled(self, peer: PeerId) -> bool:
        """Whether no place of ours at `peer` rests on one of its connections alone."""
        try:
            await self._relay.refresh_reservation(peer)
        except NetError as error:
            _log.debug("the place at %s stays where it is: %s", peer, error)
            return False
        return True

    def _may_go(self, peer: PeerId, connection: SwarmConn, kept: SwarmConn) -> bool:
        now = trio.current_time()
        muxer = cast(YamuxSession, connection.muxed_conn)
        return (
            connection is not kept
            and not connection.is_closed
            and muxer.is_initiator
            and now - muxer._heard >= GRACE
            and now - cast(YamuxSession, kept.muxed_conn)._heard <= PROVEN
            and not is_used(connection)
            and not (self._hop is not None and self._hop.depends_on_connection(peer, connection))
        )


def is_used(connection: SwarmConn) -> bool:
    """Whether streams are open on a connection: served here, or opened here and not closed on both sides.

    What the peer opened and nobody serves any more may stay half open, as does what was closed here with no wish to
    read on.
    """
    muxer = cast(YamuxSession, connection.muxed_conn)
    if connection.get_streams() or muxer._serving:
        return True
    opened = [stream for number, stream in muxer._streams.items() if number % 2 == muxer._next_id % 2]
    return any(not _is_done_with(stream) for stream in opened)


def _is_done_with(stream: YamuxStream) -> bool:
    return stream.over or (stream._ended_here and stream._discarding)
