"""Start barrier: delays the first slices until all workers of a job have requested one, so that they start together."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)

START_TIMEOUT: Final = 5.0
"""Maximum time in seconds for which the first slices are delayed."""


@dataclass(slots=True)
class StartBarrier:
    """Barrier that releases all workers once each has arrived, or `START_TIMEOUT` seconds after the first."""

    expected: int
    """Number of workers."""
    began: float = 0.0
    """Time by anyio's clock at which executors were started."""
    _arrived: set[PeerId] = field(default_factory=set)
    _released: anyio.Event = field(default_factory=anyio.Event)
    _deadline: float | None = None

    async def wait(self, peer: PeerId) -> None:
        """Wait until the barrier is released."""
        if peer not in self._arrived:
            self._arrived.add(peer)
            seconds, count = anyio.current_time() - self.began, len(self._arrived)
            _log.info("worker %s is ready after %.1f s (%d of %d)", peer, seconds, count, self.expected)
        if self._deadline is None:
            self._deadline = anyio.current_time() + START_TIMEOUT
        if len(self._arrived) >= self.expected:
            self._released.set()
        with anyio.move_on_after(max(0.0, self._deadline - anyio.current_time())):
            await self._released.wait()
        self._released.set()
