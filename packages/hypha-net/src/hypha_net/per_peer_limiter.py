"""Concurrency limit per peer: further operations of one peer wait, and do not delay other peers.

As long as a peer takes, a transfer costs a thread, an open file and two blocks of memory, and a partial message costs
its bytes. An operation that waits here costs only yamux receive buffers, which are bounded.
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
    """Tasks that hold a slot or wait for one."""


class PerPeerLimiter:
    """Limits the concurrent operations of each peer; they wait in order of arrival."""

    def __init__(self, max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        self._peers: dict[PeerId, _Entry] = {}

    @asynccontextmanager
    async def acquire(self, peer: PeerId) -> AsyncIterator[None]:
        """Wait for a slot of `peer`, and hold it while the context is open."""
        entry = self._peers.setdefault(peer, _Entry(anyio.CapacityLimiter(self._max_concurrent)))
        entry.users += 1
        try:
            async with entry.limiter:
                yield
        finally:
            entry.users -= 1
            if not entry.users:
                del self._peers[peer]
