"""Topics: several local subscribers of one topic, and who else is in it."""

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
from hypha_net.subscription_queue import SubscriptionQueue
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.pubsub")


class Subscriptions:
    """The topics of one endpoint."""

    def __init__(self, pubsub: Pubsub, tasks: anyio.abc.TaskGroup, events: Events) -> None:
        self._pubsub = pubsub
        self._events = events
        self._tasks = tasks
        self._inboxes: dict[str, list[SubscriptionQueue]] = {}
        self._turns: dict[str, anyio.Lock] = {}
        self._own: bytes = pubsub.my_id.to_bytes()

    def topics(self) -> list[str]:
        """Topics that this endpoint is in."""
        return [topic for topic, inboxes in self._inboxes.items() if inboxes]

    def peers(self, topic: str) -> frozenset[PeerId]:
        """Connected peers that are in a topic."""
        found = self._pubsub.peer_topics.get(topic, set())
        return frozenset(PeerId(peer.to_bytes()) for peer in found if peer in self._pubsub.peers)

    def heard_from(self, peer: PeerId) -> bool:
        """Whether the peer has said which topics it is in."""
        raw = ID(peer.raw)
        return raw in self._pubsub.peers and any(raw in peers for peers in self._pubsub.peer_topics.values())

    async def publish(self, topic: str, data: bytes) -> None:
        """Publish to everyone in the topic. Raises `MessageTooLargeError` for what every peer would drop."""
        if len(data) > MAX_DATA:
            raise MessageTooLargeError(f"{len(data)} bytes are over the limit of gossip, {MAX_DATA}")
        await self._pubsub.publish(topic, data)

    @asynccontextmanager
    async def subscribe(self, topic: str) -> AsyncIterator[SubscriptionQueue]:
        """Join a topic, if this endpoint is not in it yet, and receive its messages."""
        inbox = SubscriptionQueue(topic, self._events)
        inboxes = self._inboxes.setdefault(topic, [])
        inboxes.append(inbox)
        try:
            await self._join_or_leave(topic)
            yield inbox
        finally:
            inboxes.remove(inbox)
            with anyio.move_on_after(1, shield=True):
                await self._join_or_leave(topic)

    async def _join_or_leave(self, topic: str) -> None:
        """Be in a topic as long as it has readers.

        One change at a time: of two that overlap peers could hear the older last, and would tell this node nothing.
        """
        async with self._turns.setdefault(topic, anyio.Lock()):
            wanted, joined = bool(self._inboxes[topic]), topic in self._pubsub.topic_ids
            with anyio.CancelScope(shield=True):  # nothing in it waits for a peer
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
                made = GossipMessage(PeerId(message.from_id), bytes(message.data))
            except InvalidIdError as error:
                _log.warning("gossip of an unknown kind of peer dropped: %s", error)
                continue
            for inbox in self._inboxes.get(topic, []):
                inbox.put(made)
