"""Processor time of a simulated node: one delivery after the other, with senders in turn.

`memory_network` charges it for every gossip message and every write that a node receives, so that a simulation shows
what a node's load costs. Senders take turns as the reading tasks of their connections do in a real node.
"""

from __future__ import annotations

from collections import deque

import anyio

from hypha_proto.ids import PeerId


class Processor:
    """Handles one delivery at a time; each takes the same time."""

    def __init__(self, seconds: float) -> None:
        """Make an idle processor that needs `seconds` per delivery; with 0 it only counts them."""
        self._seconds = seconds
        self._busy = False
        self._waiting: dict[PeerId, deque[anyio.Event]] = {}
        self.handled = 0
        """Number of deliveries so far."""

    @property
    def is_instant(self) -> bool:
        """Whether deliveries take no time."""
        return self._seconds <= 0

    async def handle(self, sender: PeerId) -> None:
        """Wait until a delivery of `sender` has had its turn and used its processor time."""
        self.handled += 1
        if self.is_instant:
            return
        await self._wait_for_turn(sender)
        try:
            await anyio.sleep(self._seconds)
        finally:
            self._start_next()

    async def _wait_for_turn(self, sender: PeerId) -> None:
        if not self._busy:
            self._busy = True
            return
        turn = anyio.Event()
        self._waiting.setdefault(sender, deque()).append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():
                self._start_next()
            else:
                self._withdraw(sender, turn)
            raise

    def _withdraw(self, sender: PeerId, turn: anyio.Event) -> None:
        turns = self._waiting[sender]
        turns.remove(turn)
        if not turns:
            del self._waiting[sender]

    def _start_next(self) -> None:
        if not self._waiting:
            self._busy = False
            return
        sender = next(iter(self._waiting))
        turns = self._waiting.pop(sender)
        turns.popleft().set()
        if turns:
            self._waiting[sender] = turns  # last in line
