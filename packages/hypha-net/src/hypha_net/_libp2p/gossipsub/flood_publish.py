"""Passing gossip on: what `gossip_intake` has taken, and what this node says itself, to everyone in the topic.

Stands in for `GossipSub.publish`, which serves the mesh alone, so that what is said in the second before a heartbeat
has made it goes nowhere, and which copies, measures and encodes a message anew for each peer. Here that is done once.
"""

from __future__ import annotations

import time
from typing import Any, Final, cast

from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub

_FULL: Final = "queue_full"


class Encoded:
    """A message on its way to many; what py-libp2p's writer needs of an RPC."""

    def __init__(self, message: rpc_pb2.Message) -> None:
        self.rpc = rpc_pb2.RPC(publish=[message])
        self._data = self.rpc.SerializeToString()

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name for it
        """Its bytes."""
        return self._data


class FloodPublisher:
    """The way out, for one endpoint."""

    def __init__(self, pubsub: Pubsub, router: GossipSub) -> None:
        self._pubsub = pubsub
        self._router = router
        vars(router)["publish"] = self.publish

    async def publish(self, forwarder: ID, message: rpc_pb2.Message) -> None:
        """Send a message that has been judged to those in its topic, but not to where it comes from."""
        self._router.mcache.put(message)
        origin = ID(message.from_id)
        known = self._pubsub.peer_topics
        there = {peer for topic in message.topicIDs for peer in known.get(topic, ())}
        encoded = Encoded(message)
        for peer in there - {forwarder, origin}:
            queue = self._pubsub.peer_queues.get(peer)
            if queue is not None and not queue.push(cast(Any, encoded)):
                self._router._handle_dropped_rpc(peer, encoded.rpc, _FULL)
        self._keep_for_newcomers(encoded.rpc, {forwarder, origin})

    def _keep_for_newcomers(self, rpc: rpc_pb2.RPC, besides: set[ID]) -> None:
        """Peers that have not said what they subscribe to get it when they have."""
        spoken = {peer for peers in self._pubsub.peer_topics.values() for peer in peers}
        for peer in set(self._pubsub.peers) - spoken - besides:
            self._router._prune_pending_messages(peer)
            self._router._pending_messages[peer].append((time.time(), rpc))
