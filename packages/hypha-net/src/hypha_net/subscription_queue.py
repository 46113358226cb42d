"""The bounded queue between gossip and a local subscriber, used by both endpoint implementations."""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

import anyio

from hypha_net.endpoint import GossipMessage
from hypha_net.events import Events, GossipDropped

_log = logging.getLogger("hypha_net.pubsub")

SIZE: Final = 1024
"""Messages that wait for one subscriber."""


class SubscriptionQueue:
    """Messages for one subscriber; when it is full, the oldest are dropped, and their number is logged."""

    def __init__(self, topic: str = "", events: Events | None = None) -> None:
        """Make an empty queue; dropped messages are emitted to `events`, if given."""
        self._topic = topic
        self._events = events
        self._messages: deque[GossipMessage] = deque()
        self._arrived = anyio.Event()
        self._dropped = 0

    def put(self, message: GossipMessage) -> None:
        """Queue a message; never waits."""
        if len(self._messages) == SIZE:
            oldest = self._messages.popleft()
            self._dropped += 1
            if self._events is not None:
                self._events.emit(GossipDropped(self._topic, "queue", oldest.source))
            if str(self._dropped).rstrip("0") == "1":  # the first, the tenth, the hundredth and so on
                _log.warning("%d gossip messages of %s dropped: the subscriber is too slow", self._dropped, self._topic)
        self._messages.append(message)
        self._arrived.set()

    def __aiter__(self) -> SubscriptionQueue:
        return self

    async def __anext__(self) -> GossipMessage:
        while not self._messages:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._messages.popleft()
