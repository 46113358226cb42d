"""Who is writing where: a push that is begun anew takes over from the one that hangs.

Its connection is dead, most often: the node may notice that half a minute after the peer, and until then the file
would be locked, and what came of it out of reach.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_net.transfer.framing import TransferInterruptedError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.transfer")

_TAKE_OVER: Final = 5.0
"""Seconds that a broken push may take to let go of its place when the peer is back with it."""

Place = tuple[PeerId, str]
"""What one push of a peer's at a time writes."""


@dataclass(slots=True, eq=False)
class _Holder:
    """A push that is writing."""

    arrival: int
    """The later one has the higher number."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    gone: anyio.Event = field(default_factory=anyio.Event)


class PushSlots:
    """The pushes that one endpoint is taking."""

    def __init__(self) -> None:
        self._by_place: dict[Place, _Holder] = {}
        self._arrivals = itertools.count()

    @asynccontextmanager
    async def holding(self, place: Place, what: str) -> AsyncIterator[Callable[[], None]]:
        """Hold a place; the push that holds it is given up first.

        Yields what lets go of it: all has come, and what is done with it now is not given up for another push.

        Raises:
            BrokenOffError: another push of the peer's took over.
        """
        holder = _Holder(next(self._arrivals))
        while (before := self._by_place.get(place)) is not None:
            if before.arrival > holder.arrival:  # both have waited for the one before them
                raise TransferInterruptedError(f"{place[0]} pushes anew")
            await self._take_over(place, before, what)
        self._by_place[place] = holder

        def let_go() -> None:
            holder.gone.set()
            if self._by_place.get(place) is holder:
                del self._by_place[place]

        try:
            with holder.scope:
                yield let_go
            if holder.scope.cancelled_caught:
                raise TransferInterruptedError(f"{place[0]} pushes anew")
        finally:
            let_go()

    async def _take_over(self, place: Place, before: _Holder, what: str) -> None:
        _log.info("%s pushes %s: the push before it is given up", place[0], what)
        before.scope.cancel()
        with anyio.move_on_after(_TAKE_OVER):
            await before.gone.wait()
        if self._by_place.get(place) is before:
            del self._by_place[place]
