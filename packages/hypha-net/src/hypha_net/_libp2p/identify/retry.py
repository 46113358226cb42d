"""Repeats identify where it failed, or where a peer may have reconnected as another process.

py-libp2p asks once, when a peer's first connection is made, with a timeout of ten seconds. A peer that was suspended
then, or that reconnected before its old connection was dropped, would stay unknown, or known at addresses that are no
longer valid, for as long as it is connected. Started by `endpoint`; what is stored is `peer_metadata`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

import anyio
import anyio.abc
from libp2p.host.basic_host import BasicHost
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID

from hypha_net._libp2p.identify.peer_metadata import identified_at
from hypha_net._libp2p.yamux.session import YamuxSession
from hypha_net.backoff import Backoff

INTERVAL: Final = 2.0
"""Seconds between two searches for peers that are not identified."""
PAUSES: Final = (2.0, 5.0, 10.0, 30.0)
"""Seconds between attempts at a peer that does not answer; the last repeats."""
MAX_CONCURRENT: Final = 32


class IdentifyRetrier:
    """Repeats identify for the peers of one host."""

    def __init__(self, host: BasicHost) -> None:
        self._host = host
        self._swarm = cast(Swarm, host.get_network())
        self._backoff: Backoff[ID] = Backoff(PAUSES)
        self._in_progress: set[ID] = set()

    async def run(self) -> None:
        """Repeat identify where it is due, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(INTERVAL)
                for peer in self._due():
                    if len(self._in_progress) < MAX_CONCURRENT:
                        self._in_progress.add(peer)
                        tasks.start_soon(self._identify, peer)

    def _due(self) -> Iterable[ID]:
        """Yield the peers whose newest connection is older than `INTERVAL` and not identified."""
        for peer, connections in list(self._swarm.connections.items()):
            muxers = [cast(YamuxSession, each.muxed_conn) for each in connections if each.muxed_conn.is_established]
            in_progress = peer in self._in_progress or peer in self._host._identify_inflight
            if muxers and not in_progress and not self._backoff.remaining(peer):
                began = max(muxer.started_at for muxer in muxers)
                if identified_at(self._host.peerstore, peer) < began <= anyio.current_time() - INTERVAL:
                    yield peer

    async def _identify(self, peer: ID) -> None:
        before = anyio.current_time()
        try:
            await self._host._identify_peer(peer, reason="again")
            if identified_at(self._host.peerstore, peer) < before:
                self._backoff.record_failure(peer)
        finally:
            self._in_progress.discard(peer)
