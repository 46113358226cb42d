"""Lets a job's workers start together: the first slices are handed out when everyone has asked for one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)

START_TIMEOUT: Final = 5.0
"""Seconds that the first slices are held back at most, so that all workers start in the same moment."""


@dataclass(slots=True)
class StartBarrier:
    """Holds first slices back until every worker has asked for one."""

    expected: int
    began: float = 0.0
    """When executors began to start, by anyio's clock."""
    _arrived: set[PeerId] = field(default_factory=set)
    _released: anyio.Event = field(default_factory=anyio.Event)
    _deadline: float | None = None

    async def wait(self, peer: PeerId) -> None:
        """Wait until `peer` may have its slice."""
        if peer not in self._arrived:
            self._arrived.add(peer)
            seconds, count = anyio.current_time() - self.began, len(self._arrived)
            _log.info("worker %s trains after %.1f s (%d of %d)", peer, seconds, count, self.expected)
        if self._deadline is None:
            self._deadline = anyio.current_time() + START_TIMEOUT
        if len(self._arrived) >= self.expected:
            self._released.set()
        with anyio.move_on_after(max(0.0, self._deadline - anyio.current_time())):
            await self._released.wait()
        self._released.set()
