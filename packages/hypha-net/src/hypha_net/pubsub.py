"""Typed publish/subscribe over gossipsub: encodes and decodes the messages of a `Topic`.

Messages that cannot be decoded are dropped, counted and logged. Both implementations of `Endpoint.subscribe` queue the
messages of a local subscriber in a `SubscriptionQueue`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from hypha_net import instrumentation
from hypha_net.endpoint import Endpoint, GossipMessage
from hypha_net.events import DroppingQueue, Events, GossipDropped
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.protocols import Topic

_log = logging.getLogger(__name__)

T = TypeVar("T")


async def publish(endpoint: Endpoint, topic: Topic[T], message: T) -> None:
    """Publish a message to the subscribers of `topic`. Raises `EncodeError` if it is not of the topic's type."""
    await endpoint.publish(topic.name, topic.encode(instrumentation.with_trace(message)))


@asynccontextmanager
async def subscribe(endpoint: Endpoint, topic: Topic[T]) -> AsyncIterator[AsyncIterator[tuple[PeerId, T]]]:
    """Receive the messages of others on `topic`, as (publisher, message), while the context is open."""
    async with endpoint.subscribe(topic.name) as messages:
        yield _decoded(endpoint, messages, topic)


async def _decoded(
    endpoint: Endpoint, messages: AsyncIterator[GossipMessage], topic: Topic[T]
) -> AsyncIterator[tuple[PeerId, T]]:
    dropped = 0
    async for message in messages:
        try:
            decoded = topic.decode(message.data)
        except DecodeError as error:
            dropped += 1
            endpoint.events.emit(GossipDropped(topic.name, "undecodable", message.source))
            _log.warning("message %d dropped on %s, from %s: %s", dropped, topic.name, message.source, error)
            continue
        yield message.source, decoded


class SubscriptionQueue(DroppingQueue[GossipMessage]):
    """Messages for one subscriber; the number of those that are dropped is logged."""

    def __init__(self, topic: str, events: Events) -> None:
        """Make an empty queue; dropped messages are emitted to `events`."""
        super().__init__()
        self._topic = topic
        self._events = events

    def put(self, item: GossipMessage) -> GossipMessage | None:
        """Queue a message; never waits."""
        if (oldest := super().put(item)) is not None:
            self._events.emit(GossipDropped(self._topic, "queue", oldest.source))
            if str(self.dropped).rstrip("0") == "1":  # the first, the tenth, the hundredth and so on
                _log.warning("%d gossip messages of %s dropped: the subscriber is too slow", self.dropped, self._topic)
        return oldest
