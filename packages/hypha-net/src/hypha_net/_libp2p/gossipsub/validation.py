"""Validates incoming gossip: new messages, signed by their publisher, within size and rate limits.

Sits between a peer's gossip stream and py-libp2p's router, which forwards what is accepted here. `read_stream` replaces
`Pubsub.continuously_read_stream`, which starts a task for each message without a bound, and `accept` replaces
`Pubsub.push_msg`, whose cache of seen messages is unbounded and which has no limits. Dropped messages are counted,
emitted as events, and logged with decreasing frequency.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, Final, Literal, cast

import trio
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from libp2p.abc import INetStream
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.validators import PUBSUB_SIGNING_PREFIX

from hypha_net._libp2p.streams.stream import Libp2pStream
from hypha_net._libp2p.wire.delimited import MessageReader, TooLongError
from hypha_net._libp2p.yamux.stream import YamuxStream
from hypha_net.errors import StreamClosedError, StreamResetError, TransferError
from hypha_net.events import Events, GossipDropped
from hypha_net.per_peer_limiter import PerPeerLimiter
from hypha_net.token_bucket import KeyedTokenBucket
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.pubsub")

DropReason = Literal["queue", "oversize", "unsigned", "rate", "undecodable", "role", "other"]

MAX_DATA: Final = 64 << 10
"""Bytes of one message's data."""
MAX_RPC: Final = 1 << 20
"""Bytes of one RPC, messages and control together."""
MAX_IDS: Final = 5000
"""Message ids in the control part of one RPC."""
MAX_SEEN: Final = 65_536
ORIGIN_RATE, ORIGIN_BURST = 64.0, 512.0
"""Messages a second, and burst, that are accepted of one publisher."""
FORWARDER_RATE, FORWARDER_BURST = 1024.0, 4096.0
"""The same per forwarding peer, forged messages included: publisher ids cost nothing to make."""
MAX_ORIGINS: Final = 4096
MAX_STREAMS_PER_PEER: Final = 8
"""Gossip streams of one peer that are read, one per connection; further ones wait."""
_MESSAGES_PER_CHECKPOINT: Final = 32
"""Messages that are validated between two checkpoints: a signature takes a tenth of a millisecond."""
_SEQNO_SIZE: Final = 8
"""Bytes of a message's sequence number."""


class SeenMessages:
    """Ids of recent messages, at most `MAX_SEEN`; replaces py-libp2p's `LastSeenCache`, with its interface."""

    def __init__(self, seconds: float, clock: Callable[[], float] = trio.current_time) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, key: bytes) -> bool:
        """Add an id; return False if it is known already."""
        if self.has(key):
            return False
        now = self._clock()
        while self._until and (len(self._until) >= MAX_SEEN or next(iter(self._until.values())) <= now):
            self._until.popitem(last=False)
        self._until[key] = now + self._seconds
        return True

    def has(self, key: bytes) -> bool:
        """Return whether an id was added within the last `seconds`."""
        return self._until.get(key, 0.0) > self._clock()

    def length(self) -> int:
        """Return how many ids are kept."""
        return len(self._until)


class MessageValidator:
    """Reads and validates the gossip of all peers, for one endpoint."""

    def __init__(
        self,
        pubsub: Pubsub,
        router: GossipSub,
        events: Events,
        seen_seconds: float,
        may_publish: Callable[[PeerId, str], bool],
    ) -> None:
        self._pubsub = pubsub
        self._may_publish = may_publish
        """Tells whether a publisher's role allows it to publish on a topic."""
        self._router = router
        self._events = events
        self._own = PeerId(pubsub.my_id.to_bytes())
        self._publisher_rate = KeyedTokenBucket[PeerId](ORIGIN_RATE, ORIGIN_BURST, MAX_ORIGINS)
        self._forwarder_rate = KeyedTokenBucket[PeerId](FORWARDER_RATE, FORWARDER_BURST, MAX_ORIGINS)
        self._drop_counts: Counter[DropReason] = Counter()
        self._stream_limiter = PerPeerLimiter(MAX_STREAMS_PER_PEER)
        pubsub.seen_messages.stop()  # it runs a thread, and grows with every message
        vars(pubsub).update(
            seen_messages=SeenMessages(seen_seconds), continuously_read_stream=self.read_stream, push_msg=self.accept
        )
        self._router_drop = router._handle_dropped_rpc
        vars(router)["_handle_dropped_rpc"] = self._on_queue_full

    async def read_stream(self, net_stream: INetStream) -> None:
        """Read a peer's gossip until its stream ends; reset the stream when it violates the protocol."""
        stream = Libp2pStream(
            cast(YamuxStream, cast(NetStream, net_stream).muxed_stream), str(net_stream.get_protocol())
        )
        async with self._stream_limiter.acquire(stream.peer):
            await self._read(stream)

    async def _read(self, stream: Libp2pStream) -> None:
        peer = ID(stream.peer.raw)
        messages = MessageReader(stream, rpc_pb2.RPC, MAX_RPC)
        try:
            while (rpc := await messages.next()) is not None:
                await self._handle(peer, rpc)
                await trio.lowlevel.checkpoint()  # thousands may be buffered
        except TransferError as error:
            self._count_drop(
                "", "oversize" if isinstance(error, TooLongError) else "undecodable", stream.peer, stream.peer
            )
            _log.warning("gossip stream of %s was reset: %s", stream.peer, error)
            await stream.reset()
            self._pubsub._handle_dead_peer(peer)
        except (StreamResetError, StreamClosedError) as error:
            _log.debug("gossip of %s ended: %s", stream.peer, error)
        except Exception:  # noqa: BLE001 - an error with one peer ends its stream; the node goes on
            _log.exception("gossip stream of %s was reset", stream.peer)
            await stream.reset()
            self._pubsub._handle_dead_peer(peer)

    async def _handle(self, peer: ID, rpc: Any) -> None:
        _check_topics(rpc)
        for number, message in enumerate(rpc.publish):
            if number % _MESSAGES_PER_CHECKPOINT == _MESSAGES_PER_CHECKPOINT - 1:
                await trio.lowlevel.checkpoint()
            await self.accept(peer, message)
        if len(rpc.subscriptions) <= self._pubsub.max_subscriptions_per_rpc:
            for subscription in rpc.subscriptions:
                self._pubsub.handle_subscription(peer, subscription)
        if not rpc.HasField("control"):
            return
        control = rpc.control
        ids = sum(len(each.messageIDs) for part in (control.ihave, control.iwant, control.idontwant) for each in part)
        entries = len(control.graft) + len(control.prune) + len(control.ihave) + len(control.iwant)
        if ids + entries > MAX_IDS:
            self._count_drop("", "oversize", None, PeerId(peer.to_bytes()))
            return
        # identify is the source of addresses; py-libp2p forgets addresses from here after two hours
        rpc.ClearField("senderRecord")
        self._keep_known_topics(control)
        await self._router.handle_rpc(rpc, peer)

    def _keep_known_topics(self, control: Any) -> None:
        """Remove unknown topics and suggested peers from PRUNE messages.

        py-libp2p remembers every topic that it reads there for ever, and dials the suggested peers without regard to
        `exclude_cidr`.
        """
        known = [each for each in control.prune if each.topicID in self._pubsub.topic_ids]
        for each in known:
            each.ClearField("peers")
        kept = [type(each).FromString(each.SerializeToString()) for each in known]
        del control.prune[:]
        control.prune.extend(kept)

    async def accept(self, forwarder: ID, message: Any) -> None:
        """Validate one message; deliver it to local subscribers and forward it through the router."""
        key = message.from_id + message.seqno
        if forwarder.to_bytes() == self._own.raw:
            self._pubsub.seen_messages.add(key)
            await self._router.publish(forwarder, message)
            return
        if not self._pubsub._is_subscribed_to_msg(message) or self._pubsub.seen_messages.has(key):
            return
        forwarding = PeerId(forwarder.to_bytes())
        publisher, reason = self._validate(forwarding, message)
        if reason is not None:
            topic = message.topicIDs[0] if len(message.topicIDs) == 1 else ""  # this node subscribes to it
            self._count_drop(topic, reason, publisher, forwarding)
            return
        self._pubsub.seen_messages.add(key)
        self._pubsub.notify_subscriptions(message)
        await self._router.publish(forwarder, message)

    def _validate(self, forwarder: PeerId, message: Any) -> tuple[PeerId | None, DropReason | None]:
        """Return the publisher, once its signature is verified, and the reason to drop the message, if there is one.

        Only verified messages count against a publisher's rate: otherwise forged messages could silence it. Against the
        forwarder's rate every verification counts.
        """
        if len(message.data) > MAX_DATA:
            return None, "oversize"
        try:
            publisher = PeerId(message.from_id)
        except InvalidIdError:
            return None, "unsigned"
        if publisher == self._own or len(message.seqno) != _SEQNO_SIZE or len(message.topicIDs) != 1:
            return None, "other"
        if not self._forwarder_rate.has_token(forwarder) or not self._publisher_rate.has_token(publisher):
            return None, "rate"
        self._forwarder_rate.take(forwarder)  # an honest peer forwards only messages that it has verified
        if not _is_signed(publisher, message):
            return None, "unsigned"
        self._publisher_rate.take(publisher)
        return publisher, None if self._may_publish(publisher, message.topicIDs[0]) else "role"

    def _count_drop(self, topic: str, reason: DropReason, source: PeerId | None, forwarder: PeerId) -> None:
        """Count a dropped message; log the first, the tenth, the hundredth and so on of each reason."""
        self._drop_counts[reason] += 1
        self._events.emit(GossipDropped(topic, reason, source))
        count = self._drop_counts[reason]
        if str(count).rstrip("0") == "1":
            _log.warning("gossip dropped (%s), %d so far; the last was forwarded by %s", reason, count, forwarder)

    def _on_queue_full(self, peer: ID, rpc: Any, reason: str) -> None:
        """Count messages that a peer misses because its outgoing queue is full; installed as `_handle_dropped_rpc`."""
        for message in rpc.publish:
            topic = message.topicIDs[0] if message.topicIDs else ""
            self._count_drop(topic, "queue", None, PeerId(peer.to_bytes()))
        self._router_drop(peer, rpc, reason)


def _check_topics(rpc: Any) -> None:
    """Check that topics are text: protobuf decodes other bytes as bytes, and fails where they are encoded again.

    Raises:
        TransferError: a topic is not text.
    """
    control = rpc.control
    topics = [each.topicid for each in rpc.subscriptions]
    topics += [each.topicID for part in (control.graft, control.prune, control.ihave) for each in part]
    topics += [topic for message in rpc.publish for topic in message.topicIDs]
    if not all(isinstance(topic, str) for topic in topics):
        raise TransferError("a topic is not text")


def _is_signed(publisher: PeerId, message: Any) -> bool:
    unsigned = rpc_pb2.Message(
        from_id=message.from_id, data=message.data, seqno=message.seqno, topicIDs=message.topicIDs
    ).SerializeToString()
    try:
        key = Ed25519PublicKey.from_public_bytes(publisher.public_key)
        key.verify(message.signature, PUBSUB_SIGNING_PREFIX.encode() + unsigned)
    except (InvalidSignature, ValueError):
        return False
    return True
