"""Flood publishing: send own and validated messages to every peer that subscribes to their topic.

Replaces `GossipSub.publish`, which sends to the mesh alone, so that messages published in the second before a heartbeat
has built it are lost, and which copies and encodes a message for each peer; here it is encoded once.
"""

from __future__ import annotations

import time
from typing import Any, Final, cast

from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub

_QUEUE_FULL: Final = "queue_full"


class EncodedRpc:
    """An RPC that is serialized once for all peers, with the one method that py-libp2p's writer calls."""

    def __init__(self, message: rpc_pb2.Message) -> None:
        self.rpc = rpc_pb2.RPC(publish=[message])
        self._data = self.rpc.SerializeToString()

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name for it
        """Return the serialized RPC."""
        return self._data


class FloodPublisher:
    """Publishes for one endpoint; replaces the router's `publish`."""

    def __init__(self, pubsub: Pubsub, router: GossipSub) -> None:
        self._pubsub = pubsub
        self._router = router
        vars(router)["publish"] = self.publish

    async def publish(self, forwarder: ID, message: rpc_pb2.Message) -> None:
        """Send a valid message to the subscribers of its topic, except `forwarder` and its publisher."""
        self._router.mcache.put(message)
        origin = ID(message.from_id)
        subscribers_of = self._pubsub.peer_topics
        subscribers = {peer for topic in message.topicIDs for peer in subscribers_of.get(topic, ())}
        encoded = EncodedRpc(message)
        for peer in subscribers - {forwarder, origin}:
            queue = self._pubsub.peer_queues.get(peer)
            if queue is not None and not queue.push(cast(Any, encoded)):
                self._router._handle_dropped_rpc(peer, encoded.rpc, _QUEUE_FULL)
        self._queue_for_new_peers(encoded.rpc, {forwarder, origin})

    def _queue_for_new_peers(self, rpc: rpc_pb2.RPC, excluded: set[ID]) -> None:
        """Queue an RPC for peers that have not announced their subscriptions; the router sends it when they have."""
        announced = {peer for peers in self._pubsub.peer_topics.values() for peer in peers}
        for peer in set(self._pubsub.peers) - announced - excluded:
            self._router._prune_pending_messages(peer)
            self._router._pending_messages[peer].append((time.time(), rpc))
