"""How many transfers one peer may have this node serve at a time: the others wait for their turn.

A transfer costs a thread, an open file and two blocks of memory for as long as the peer likes to take.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_net.endpoint import Stream
from hypha_proto.ids import PeerId

AT_ONCE: Final = 32
"""Transfers of one peer, of each direction."""


@dataclass(slots=True)
class _Turns:
    limiter: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(AT_ONCE))
    streams: int = 0
    """Those that are served or wait."""


def in_turn() -> Callable[[Callable[[Stream], Awaitable[None]]], Callable[[Stream], Awaitable[None]]]:
    """What makes handlers serve `AT_ONCE` streams of a peer at a time, all of them together."""
    peers: dict[PeerId, _Turns] = {}

    def limited(handler: Callable[[Stream], Awaitable[None]]) -> Callable[[Stream], Awaitable[None]]:
        async def handle(stream: Stream) -> None:
            turns = peers.setdefault(stream.peer, _Turns())
            turns.streams += 1
            try:
                async with turns.limiter:
                    await handler(stream)
            finally:
                turns.streams -= 1
                if not turns.streams:
                    del peers[stream.peer]

        return handle

    return limited
