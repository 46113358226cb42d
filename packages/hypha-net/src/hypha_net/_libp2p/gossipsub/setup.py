"""Gossipsub set up so that a publish reaches everyone, also through one hub.

The stock settings prune a hub's mesh to a dozen peers, and a pruned leaf's publishes go nowhere: here every peer of a
topic is in the mesh, and loops end at the seen-cache. Message numbers start at the time, so that a restarted node's
first messages are not taken for old ones. What comes in from others goes through `gossip_intake`.
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
QUEUE: Final = 1024
SEEN_SECONDS: Final = 120
ENVELOPE_SECONDS: Final = 10.0
CHECK_INTERVAL: Final = 2.0


_ENVELOPES: Final[WeakKeyDictionary[IHost, tuple[float, bytes]]] = WeakKeyDictionary()


def _signed_addresses(host: IHost) -> tuple[bytes, bool]:
    """What py-libp2p sends along with every message; it makes it anew each time, a third of a delivery's cost."""
    until, envelope = _ENVELOPES.get(host, (0.0, b""))
    if until < time.monotonic():
        envelope, _ = env_to_send_in_RPC(host)
        _ENVELOPES[host] = (time.monotonic() + ENVELOPE_SECONDS, envelope)
    return envelope, False


def make_pubsub(
    host: IHost, events: Events, may_speak: Callable[[PeerId, str], bool] = lambda _origin, _topic: True
) -> tuple[Pubsub, GossipSub]:
    """A pubsub and its router on `host`; both are services that the engine runs.

    `may_speak` says whether an origin may publish on a topic.
    """
    for module in (pubsub_module, gossipsub_module):
        vars(module)["env_to_send_in_RPC"] = _signed_addresses
    # both are dropped from silently when they are full, and their stock size is 32
    pubsub_module.SUBSCRIPTION_CHANNEL_SIZE = QUEUE
    # a service ends with its thousandth task, and every peer has one: with it the endpoint
    TrioManager.__init__.__defaults__ = (sys.maxsize, None)
    rpc_queue.RpcQueue.__init__.__defaults__ = (QUEUE, *rpc_queue.RpcQueue.__init__.__defaults__[1:])  # type: ignore[index]
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
    MessageValidator(pubsub, router, events, SEEN_SECONDS, may_speak)
    FloodPublisher(pubsub, router)
    registration = _Registration(pubsub)
    vars(pubsub).update(_handle_new_peer=registration, _handle_new_peer_with_retry=registration.keep_trying)
    vars(pubsub)["_handle_dead_peer"] = functools.partial(_give_up, pubsub, pubsub._handle_dead_peer)
    host.get_network().register_notifee(_Rejoining(pubsub))
    return pubsub, router


class _Registration:
    """Registers a peer once at a time, and tells it what it misses.

    py-libp2p asks whether a peer is registered, and waits before it registers it: of two that do so at once, after a
    quick return say, the second replaced the first's queue, whose task then waited for it for good. And what this node
    joins between the list of its topics and the end of the registration was told to everybody else.
    """

    def __init__(self, pubsub: Pubsub) -> None:
        self._pubsub = pubsub
        self._register = pubsub._handle_new_peer
        self._try = pubsub._handle_new_peer_with_retry
        self._locks: WeakValueDictionary[ID, trio.Lock] = WeakValueDictionary()
        self._tried: set[ID] = set()

    async def keep_trying(self, peer: ID, timeout: float | None = None) -> None:
        """Register a peer unless somebody is at it: a peer with many connections would have a task wait for each."""
        if peer in self._tried:
            return
        self._tried.add(peer)
        try:
            await self._try(peer, timeout)
        finally:
            self._tried.discard(peer)

    async def __call__(self, peer: ID) -> None:
        lock = self._locks.setdefault(peer, trio.Lock())
        async with lock:
            before = self._pubsub.peers.get(peer)
            told = set(self._pubsub.topic_ids)
            await self._register(peer)
            if self._pubsub.peers.get(peer) is not before:
                self._tell(peer, told)

    def _tell(self, peer: ID, told: set[str]) -> None:
        now = set(self._pubsub.topic_ids)
        changes = [
            rpc_pb2.RPC.SubOpts(subscribe=topic in now, topicid=topic) for topic in sorted(told ^ now)
        ]  # perhaps a second time, which changes nothing
        queue = self._pubsub.peer_queues.get(peer)
        if changes and queue is not None:
            queue.push(rpc_pb2.RPC(subscriptions=changes), priority=True)


class _Rejoining(SilentNotifee):
    """Moves the gossip of a peer to its other connection when the one that carried it is gone.

    A peer may be back before its old connection is given up, and py-libp2p keeps to the stream that it has: it would
    tell the peer nothing any more, not even what it subscribes to.
    """

    def __init__(self, pubsub: Pubsub) -> None:
        self._pubsub = pubsub

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        """A connection is gone."""
        peer = conn.muxed_conn.peer_id
        stream = self._pubsub.peers.get(peer)
        if stream is None or stream.muxed_conn is not conn.muxed_conn:
            return
        self._pubsub._handle_dead_peer(peer)


def _give_up(pubsub: Pubsub, forget: Callable[[ID], None], peer: ID) -> None:
    """Give up the gossip stream to a peer, and open it again if the peer is connected: its subscriptions still hold."""
    topics = [topic for topic, peers in pubsub.peer_topics.items() if peer in peers]
    stream = pubsub.peers.get(peer)
    forget(peer)
    if stream is not None:
        _drop(cast(NetStream, stream))
    if pubsub._peer_is_connected(peer):  # it has said there what it subscribes to, and will not say it again
        for topic in topics:
            pubsub.handle_subscription(peer, rpc_pb2.RPC.SubOpts(subscribe=True, topicid=topic))


def _drop(stream: NetStream) -> None:
    """Break off a stream that nobody writes on any more: py-libp2p leaves it open, as long as its connection lives."""
    cast(YamuxStream, stream.muxed_stream).reset_now()
    if stream.swarm_conn is not None:
        stream.swarm_conn.remove_stream(stream)


async def keep_registered(pubsub: Pubsub, speaks: Callable[[ID], bool]) -> None:
    """Have the gossip with connected peers set up anew where it failed or broke off, until cancelled.

    py-libp2p gives a peer up when one negotiation takes too long, and sees a broken stream only when it has something
    to say: on a busy machine a leaf would stay deaf for as long as it is connected.

    Args:
        speaks: whether a peer speaks gossip, as far as is known.
    """
    while True:
        await trio.sleep(CHECK_INTERVAL)
        for peer in [peer for peer in pubsub.peers if not pubsub._peer_is_connected(peer)]:
            pubsub._handle_dead_peer(peer)  # it was gone before its gossip was set up, which nobody told
        for peer in list(pubsub.host.get_network().connections):
            stream = pubsub.peers.get(peer)
            if stream is None and speaks(peer) and pubsub._peer_is_connected(peer):
                pubsub._schedule_peer_stream_retry(peer)
            elif stream is not None and cast(YamuxStream, stream.muxed_stream).is_finished:  # type: ignore[attr-defined]
                pubsub._handle_dead_peer(peer)
