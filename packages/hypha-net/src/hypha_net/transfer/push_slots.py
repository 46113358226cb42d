"""Slots for incoming pushes: a repeated push replaces an earlier one that hangs.

The connection of the earlier push is usually dead, but this node may notice that half a minute after the peer. Until
then the file would be locked, and the push could not be resumed.
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

_TAKEOVER_TIMEOUT: Final = 5.0
"""Seconds that an interrupted push may take to release its slot."""

SlotKey = tuple[PeerId, str]
"""Identifies what only one push of a peer at a time may write."""


@dataclass(slots=True, eq=False)
class _Holder:
    """Push that holds or waits for a slot."""

    sequence: int
    """A later push has a higher number."""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    released: anyio.Event = field(default_factory=anyio.Event)


class PushSlots:
    """Slots of all pushes that one endpoint is receiving."""

    def __init__(self) -> None:
        self._holders: dict[SlotKey, _Holder] = {}
        self._sequence = itertools.count()

    @asynccontextmanager
    async def hold(self, key: SlotKey, what: str) -> AsyncIterator[Callable[[], None]]:
        """Hold a slot; the push that holds it is cancelled first.

        Yields a function that releases the slot early: when everything is received, another push must not cancel its
        processing.

        Raises:
            TransferInterruptedError: another push of the same peer took over.
        """
        holder = _Holder(next(self._sequence))
        while (before := self._holders.get(key)) is not None:
            if before.sequence > holder.sequence:  # both have waited for the same push
                raise TransferInterruptedError(f"{key[0]} has started this push again")
            await self._interrupt(key, before, what)
        self._holders[key] = holder

        def release() -> None:
            holder.released.set()
            if self._holders.get(key) is holder:
                del self._holders[key]

        try:
            with holder.scope:
                yield release
            if holder.scope.cancelled_caught:
                raise TransferInterruptedError(f"{key[0]} has started this push again")
        finally:
            release()

    async def _interrupt(self, key: SlotKey, before: _Holder, what: str) -> None:
        _log.info("%s pushes %s again: cancelling its earlier push", key[0], what)
        before.scope.cancel()
        with anyio.move_on_after(_TAKEOVER_TIMEOUT):
            await before.released.wait()
        if self._holders.get(key) is before:
            del self._holders[key]
