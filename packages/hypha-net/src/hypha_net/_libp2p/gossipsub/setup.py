"""Sets up gossipsub so that a message reaches every subscriber, also through a single hub.

With py-libp2p's defaults a hub's mesh is pruned to a dozen peers, and messages of a pruned leaf are lost; here every
peer of a topic is in the mesh, and the seen cache ends loops. Sequence numbers start at the time of the start, so that
the messages of a restarted node are not taken for old ones. Also keeps peers registered where py-libp2p gives up.
Installs `validation` and `flood_publish`.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Final, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import trio
from libp2p.abc import IHost, INetConn, INetwork
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.peer.peerstore import env_to_send_in_RPC
from libp2p.pubsub import gossipsub as gossipsub_module
from libp2p.pubsub import pubsub as pubsub_module
from libp2p.pubsub import rpc_queue
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service.trio_manager import TrioManager

from hypha_net._libp2p.compat.notifee import SilentNotifee
from hypha_net._libp2p.gossipsub.flood_publish import FloodPublisher
from hypha_net._libp2p.gossipsub.validation import MessageValidator
from hypha_net._libp2p.yamux.stream import YamuxStream
from hypha_net.events import Events
from hypha_proto.ids import PeerId

PROTOCOLS: Final = (TProtocol("/meshsub/1.1.0"), TProtocol("/meshsub/1.0.0"))
DEGREE: Final = 1024
QUEUE_SIZE: Final = 1024
SEEN_SECONDS: Final = 120
ENVELOPE_SECONDS: Final = 10.0
CHECK_INTERVAL: Final = 2.0


_ENVELOPES: Final[WeakKeyDictionary[IHost, tuple[float, bytes]]] = WeakKeyDictionary()


def _signed_addresses(host: IHost) -> tuple[bytes, bool]:
    """Return the signed peer record for an RPC, from a cache: signing each time is a third of a delivery's cost."""
    until, envelope = _ENVELOPES.get(host, (0.0, b""))
    if until < time.monotonic():
        envelope, _ = env_to_send_in_RPC(host)
        _ENVELOPES[host] = (time.monotonic() + ENVELOPE_SECONDS, envelope)
    return envelope, False


def make_pubsub(
    host: IHost, events: Events, may_publish: Callable[[PeerId, str], bool] = lambda _publisher, _topic: True
) -> tuple[Pubsub, GossipSub]:
    """Make a pubsub and its router on `host`; the endpoint runs both as services.

    Args:
        may_publish: returns whether a publisher may publish on a topic.
    """
    for module in (pubsub_module, gossipsub_module):
        vars(module)["env_to_send_in_RPC"] = _signed_addresses
    # both drop messages silently when full, and py-libp2p's size is 32
    pubsub_module.SUBSCRIPTION_CHANNEL_SIZE = QUEUE_SIZE
    # by default a service fails at its thousandth task; every peer has one, so the endpoint would fail
    TrioManager.__init__.__defaults__ = (sys.maxsize, None)
    rpc_queue.RpcQueue.__init__.__defaults__ = (QUEUE_SIZE, *rpc_queue.RpcQueue.__init__.__defaults__[1:])  # type: ignore[index]
    router = GossipSub(
        protocols=PROTOCOLS,
        degree=DEGREE,
        degree_low=DEGREE,
        degree_high=2 * DEGREE,
        heartbeat_initial_delay=0.1,
        heartbeat_interval=1,
        prune_back_off=1,
        unsubscribe_back_off=1,
        adaptive_gossip_enabled=False,
        spam_protection_enabled=False,
        eclipse_protection_enabled=False,
    )
    pubsub = Pubsub(host, router, seen_ttl=SEEN_SECONDS, strict_signing=True)
    pubsub.counter = time.time_ns()
    MessageValidator(pubsub, router, events, SEEN_SECONDS, may_publish)
    FloodPublisher(pubsub, router)
    registration = _PeerRegistration(pubsub)
    vars(pubsub).update(_handle_new_peer=registration, _handle_new_peer_with_retry=registration.register_with_retry)
    vars(pubsub)["_handle_dead_peer"] = functools.partial(_remove_peer_stream, pubsub, pubsub._handle_dead_peer)
    host.get_network().register_notifee(_StreamReopener(pubsub))
    return pubsub, router


class _PeerRegistration:
    """Serializes the registration of each peer, and sends it the subscriptions that changed meanwhile.

    py-libp2p checks whether a peer is registered, and waits before it registers it. Of two registrations at once, as
    after a quick reconnection, the second replaced the first's queue, whose task then waited for ever. Topics that this
    node joined during the registration were announced to all other peers only.
    """

    def __init__(self, pubsub: Pubsub) -> None:
        self._pubsub = pubsub
        self._register = pubsub._handle_new_peer
        self._register_with_retry = pubsub._handle_new_peer_with_retry
        self._locks: WeakValueDictionary[ID, trio.Lock] = WeakValueDictionary()
        self._in_progress: set[ID] = set()

    async def register_with_retry(self, peer: ID, timeout: float | None = None) -> None:
        """Register a peer unless that is in progress: otherwise a task would wait for each of its connections."""
        if peer in self._in_progress:
            return
        self._in_progress.add(peer)
        try:
            await self._register_with_retry(peer, timeout)
        finally:
            self._in_progress.discard(peer)

    async def __call__(self, peer: ID) -> None:
        lock = self._locks.setdefault(peer, trio.Lock())
        async with lock:
            before = self._pubsub.peers.get(peer)
            announced = set(self._pubsub.topic_ids)
            await self._register(peer)
            if self._pubsub.peers.get(peer) is not before:
                self._announce_changes(peer, announced)

    def _announce_changes(self, peer: ID, announced: set[str]) -> None:
        now = set(self._pubsub.topic_ids)
        changes = [
            rpc_pb2.RPC.SubOpts(subscribe=topic in now, topicid=topic) for topic in sorted(announced ^ now)
        ]  # a repeated announcement has no effect
        queue = self._pubsub.peer_queues.get(peer)
        if changes and queue is not None:
            queue.push(rpc_pb2.RPC(subscriptions=changes), priority=True)


class _StreamReopener(SilentNotifee):
    """Reopens a peer's gossip stream on another connection when the connection of the stream closes.

    A peer may reconnect before its old connection is dropped. py-libp2p keeps the old stream, and would send the peer
    nothing any more, not even this node's subscriptions.
    """

    def __init__(self, pubsub: Pubsub) -> None:
        self._pubsub = pubsub

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        """Remove the stream on a closed connection."""
        peer = conn.muxed_conn.peer_id
        stream = self._pubsub.peers.get(peer)
        if stream is None or stream.muxed_conn is not conn.muxed_conn:
            return
        self._pubsub._handle_dead_peer(peer)


def _remove_peer_stream(pubsub: Pubsub, forget: Callable[[ID], None], peer: ID) -> None:
    """Remove the gossip stream to a peer; if the peer is connected, keep its subscriptions for the next stream."""
    topics = [topic for topic, peers in pubsub.peer_topics.items() if peer in peers]
    stream = pubsub.peers.get(peer)
    forget(peer)
    if stream is not None:
        _reset_stream(cast(NetStream, stream))
    if pubsub._peer_is_connected(peer):  # it will not announce them again
        for topic in topics:
            pubsub.handle_subscription(peer, rpc_pb2.RPC.SubOpts(subscribe=True, topicid=topic))


def _reset_stream(stream: NetStream) -> None:
    """Reset an abandoned stream, which py-libp2p leaves open as long as its connection lives."""
    cast(YamuxStream, stream.muxed_stream).reset_now()
    if stream.swarm_conn is not None:
        stream.swarm_conn.remove_stream(stream)


async def retry_registrations(pubsub: Pubsub, may_speak_gossip: Callable[[ID], bool]) -> None:
    """Register connected peers again whose gossip stream failed, until cancelled.

    py-libp2p gives a peer up when one negotiation takes too long, and notices a broken stream only when it writes to
    it: on a busy machine a leaf would receive nothing for as long as it is connected.

    Args:
        may_speak_gossip: returns whether a peer speaks gossipsub, or may speak it as far as is known.
    """
    while True:
        await trio.sleep(CHECK_INTERVAL)
        for peer in [peer for peer in pubsub.peers if not pubsub._peer_is_connected(peer)]:
            pubsub._handle_dead_peer(peer)  # it disconnected before its registration ended, which has no event
        for peer in list(pubsub.host.get_network().connections):
            stream = pubsub.peers.get(peer)
            if stream is None and may_speak_gossip(peer) and pubsub._peer_is_connected(peer):
                pubsub._schedule_peer_stream_retry(peer)
            elif stream is not None and cast(YamuxStream, stream.muxed_stream).is_finished:  # type: ignore[attr-defined]
                pubsub._handle_dead_peer(peer)
