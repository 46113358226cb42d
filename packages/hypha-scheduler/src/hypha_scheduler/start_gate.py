"""Lets a job's workers start together: the first slices are handed out when everyone has asked for one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_proto.ids import PeerId

START_TOGETHER: Final = 5.0
"""Seconds that the first slices are held back at most, so that all workers start in the same moment."""


@dataclass(slots=True)
class StartGate:
    """Holds first slices back until every worker has asked for one."""

    expected: int
    _asked: set[PeerId] = field(default_factory=set)
    _open: anyio.Event = field(default_factory=anyio.Event)
    _deadline: float | None = None

    async def passed(self, peer: PeerId) -> None:
        """Wait until `peer` may have its slice."""
        self._asked.add(peer)
        if self._deadline is None:
            self._deadline = anyio.current_time() + START_TOGETHER
        if len(self._asked) >= self.expected:
            self._open.set()
        with anyio.move_on_after(max(0.0, self._deadline - anyio.current_time())):
            await self._open.wait()
        self._open.set()
