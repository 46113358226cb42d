"""Start barrier: delays the first workers of a job until all are ready, so that they start together.

Pure; called by `operator`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)

START_TIMEOUT: Final = 5.0
"""Maximum time in seconds for which the first workers are delayed."""


@dataclass(slots=True)
class StartBarrier:
    """Barrier that releases all workers once each has arrived, or `START_TIMEOUT` seconds after the first."""

    expected: int
    """Number of workers."""
    began: float = 0.0
    """Time at which executors were started."""
    _arrived: set[PeerId] = field(default_factory=set)
    _released: bool = False
    _deadline: float | None = None

    def remaining(self, peer: PeerId, now: float) -> float:
        """Record that a worker has arrived; return how many seconds it waits at most, 0 after the release."""
        if peer not in self._arrived:
            self._arrived.add(peer)
            seconds, count = now - self.began, len(self._arrived)
            _log.info("worker %s is ready after %.1f s (%d of %d)", peer, seconds, count, self.expected)
        if self._deadline is None:
            self._deadline = now + START_TIMEOUT
        if len(self._arrived) >= self.expected or now >= self._deadline:
            self._released = True
        return 0.0 if self._released else self._deadline - now
