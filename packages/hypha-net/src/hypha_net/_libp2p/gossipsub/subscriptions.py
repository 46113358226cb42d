"""Topic subscriptions of one endpoint: several local subscribers may share a topic."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
from libp2p.abc import ISubscriptionAPI
from libp2p.peer.id import ID
from libp2p.pubsub.pubsub import Pubsub

from hypha_net._libp2p.gossipsub.validation import MAX_DATA
from hypha_net.endpoint import GossipMessage
from hypha_net.errors import MessageTooLargeError
from hypha_net.events import Events
from hypha_net.pubsub import SubscriptionQueue
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.pubsub")


class Subscriptions:
    """The topic subscriptions of one endpoint."""

    def __init__(self, pubsub: Pubsub, tasks: anyio.abc.TaskGroup, events: Events) -> None:
        self._pubsub = pubsub
        self._events = events
        self._tasks = tasks
        self._queues: dict[str, list[SubscriptionQueue]] = {}
        self._locks: dict[str, anyio.Lock] = {}
        self._own: bytes = pubsub.my_id.to_bytes()

    def topics(self) -> list[str]:
        """Return the topics with local subscribers."""
        return [topic for topic, queues in self._queues.items() if queues]

    def peers(self, topic: str) -> frozenset[PeerId]:
        """Return the connected peers that subscribe to a topic."""
        found = self._pubsub.peer_topics.get(topic, set())
        return frozenset(PeerId(peer.to_bytes()) for peer in found if peer in self._pubsub.peers)

    def has_announced_topics(self, peer: PeerId) -> bool:
        """Return whether the peer has announced a subscription."""
        raw = ID(peer.raw)
        return raw in self._pubsub.peers and any(raw in peers for peers in self._pubsub.peer_topics.values())

    async def publish(self, topic: str, data: bytes) -> None:
        """Publish to the topic. Raises `MessageTooLargeError` for a message that every peer would drop."""
        if len(data) > MAX_DATA:
            raise MessageTooLargeError(f"{len(data)} bytes exceed the limit of a gossip message, {MAX_DATA}")
        await self._pubsub.publish(topic, data)

    @asynccontextmanager
    async def subscribe(self, topic: str) -> AsyncIterator[SubscriptionQueue]:
        """Receive the messages of a topic; the first local subscriber joins it, the last leaves it."""
        queue = SubscriptionQueue(topic, self._events)
        queues = self._queues.setdefault(topic, [])
        queues.append(queue)
        try:
            await self._join_or_leave(topic)
            yield queue
        finally:
            queues.remove(queue)
            with anyio.move_on_after(1, shield=True):
                await self._join_or_leave(topic)

    async def _join_or_leave(self, topic: str) -> None:
        """Subscribe to a topic while it has local subscribers.

        Changes are serialized: of two at once peers could receive the older last, and would send this node nothing.
        """
        async with self._locks.setdefault(topic, anyio.Lock()):
            wanted, joined = bool(self._queues[topic]), topic in self._pubsub.topic_ids
            with anyio.CancelScope(shield=True):  # does not wait for peers
                if wanted and not joined:
                    subscription = await self._pubsub.subscribe(topic)
                    self._tasks.start_soon(self._distribute, topic, subscription)
                elif joined and not wanted:
                    await self._pubsub.unsubscribe(topic)

    async def _distribute(self, topic: str, subscription: ISubscriptionAPI) -> None:
        async for message in subscription:
            if message.from_id == self._own:
                continue
            try:
                received = GossipMessage(PeerId(message.from_id), bytes(message.data))
            except InvalidIdError as error:
                _log.warning("gossip dropped: publisher id is not supported: %s", error)
                continue
            for queue in self._queues.get(topic, []):
                queue.put(received)
