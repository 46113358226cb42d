"""Where gossip waits for its reader: a bounded queue that both endpoints put a topic's messages into."""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

import anyio

from hypha_net.endpoint import GossipMessage

_log = logging.getLogger("hypha_net.gossip")

SIZE: Final = 1024


class Inbox:
    """Messages for one subscriber; when it is full the oldest are dropped and counted in the log."""

    def __init__(self) -> None:
        self._messages: deque[GossipMessage] = deque()
        self._arrived = anyio.Event()
        self._dropped = 0

    def put(self, message: GossipMessage) -> None:
        """Add a message; never waits."""
        if len(self._messages) == SIZE:
            self._messages.popleft()
            self._dropped += 1
            _log.warning("%d gossip messages dropped: the reader is too slow", self._dropped)
        self._messages.append(message)
        self._arrived.set()

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> GossipMessage:
        while not self._messages:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._messages.popleft()
