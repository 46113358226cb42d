"""Has identify asked again where it failed, or where the peer may have come back as another.

py-libp2p asks once in the life of a peer's connections, with ten seconds for the answer: who was stopped meanwhile,
came back within a tenth of a second, or before its old connection was given up, stayed unknown, or known at an address
where it is no more, for as long as it was connected.
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
"""Seconds between looks at who is not identified."""
PAUSES: Final = (2.0, 5.0, 10.0, 30.0)
"""Seconds for which a peer is left alone after it was asked in vain."""
AT_ONCE: Final = 32


class Identifying:
    """Looks after what one host knows of its peers."""

    def __init__(self, host: BasicHost) -> None:
        self._host = host
        self._swarm = cast(Swarm, host.get_network())
        self._failed: Backoff[ID] = Backoff(PAUSES)
        self._asking: set[ID] = set()

    async def run(self) -> None:
        """Until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.sleep(INTERVAL)
                for peer in self._unknown():
                    if len(self._asking) < AT_ONCE:
                        self._asking.add(peer)
                        tasks.start_soon(self._ask, peer)

    def _unknown(self) -> Iterable[ID]:
        for peer, found in list(self._swarm.connections.items()):
            muxers = [cast(YamuxSession, each.muxed_conn) for each in found if each.muxed_conn.is_established]
            at_work = peer in self._asking or peer in self._host._identify_inflight
            if muxers and not at_work and not self._failed.remaining(peer):
                began = max(muxer.began for muxer in muxers)
                if identified_at(self._host.peerstore, peer) < began <= anyio.current_time() - INTERVAL:
                    yield peer

    async def _ask(self, peer: ID) -> None:
        before = anyio.current_time()
        try:
            await self._host._identify_peer(peer, reason="again")
            if identified_at(self._host.peerstore, peer) < before:
                self._failed.record_failure(peer)
        finally:
            self._asking.discard(peer)
