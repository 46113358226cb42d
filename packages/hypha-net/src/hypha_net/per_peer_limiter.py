"""How much of one peer is served at a time: what it begins beyond that waits for its turn, and holds up nobody else.

A transfer costs a thread, an open file and two blocks of memory, and half a message the memory for what has come of it,
for as long as the peer likes to take. What waits here costs no more than the muxer's buffers, which are bounded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from hypha_proto.ids import PeerId


@dataclass(slots=True)
class _Entry:
    limiter: anyio.CapacityLimiter
    users: int = 0
    """Those that have their turn or wait for it."""


class PerPeerLimiter:
    """So many at once of each peer, first come, first served."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._peers: dict[PeerId, _Entry] = {}

    @asynccontextmanager
    async def acquire(self, peer: PeerId) -> AsyncIterator[None]:
        """Wait for a turn of `peer`'s, and have it while the context is open."""
        entry = self._peers.setdefault(peer, _Entry(anyio.CapacityLimiter(self._at_once)))
        entry.users += 1
        try:
            async with entry.limiter:
                yield
        finally:
            entry.users -= 1
            if not entry.users:
                del self._peers[peer]
