"""What of others' gossip comes in: new messages that their origin has signed, not too large and not too many.

Between a peer's gossip stream and py-libp2p's router, which passes on what is taken here: `read` stands in for
`Pubsub.continuously_read_stream` (a task for each message, without bound) and `take` for `Pubsub.push_msg` (a cache of
seen messages without bound, no limits). Whatever is dropped is counted, told as an event, and logged now and then.
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
"""Bytes of messages and control that a peer may send at once."""
MAX_IDS: Final = 5000
"""Message ids in the control part of one such."""
MAX_SEEN: Final = 65_536
ORIGIN_RATE, ORIGIN_BURST = 64.0, 512.0
"""Messages a second, and at once, that are taken of one origin."""
FORWARDER_RATE, FORWARDER_BURST = 1024.0, 4096.0
"""The same of one neighbour, forgeries included, whoever they are of: ids of origins cost nothing to make."""
MAX_ORIGINS: Final = 4096
STREAMS_AT_ONCE: Final = 8
"""Gossip streams of one peer that are read: one a connection; the others wait."""
_IN_A_ROW: Final = 32
"""Messages that are judged before others have their turn: a signature takes a tenth of a millisecond."""
_NUMBER: Final = 8
"""Bytes of a message's sequence number."""


class SeenMessages:
    """Ids of messages of the last while, at most `MAX_SEEN`; stands in for py-libp2p's `LastSeenCache`."""

    def __init__(self, seconds: float, clock: Callable[[], float] = trio.current_time) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, key: bytes) -> bool:
        """Note an id; false if it is known."""
        if self.has(key):
            return False
        now = self._clock()
        while self._until and (len(self._until) >= MAX_SEEN or next(iter(self._until.values())) <= now):
            self._until.popitem(last=False)
        self._until[key] = now + self._seconds
        return True

    def has(self, key: bytes) -> bool:
        """Whether an id was noted not long ago."""
        return self._until.get(key, 0.0) > self._clock()

    def length(self) -> int:
        """How many ids are kept."""
        return len(self._until)


class MessageValidator:
    """Reads and judges what peers say, for one endpoint."""

    def __init__(
        self,
        pubsub: Pubsub,
        router: GossipSub,
        events: Events,
        seen_seconds: float,
        may_speak: Callable[[PeerId, str], bool],
    ) -> None:
        self._pubsub = pubsub
        self._may_speak = may_speak
        """Whether an origin's role lets it publish on a topic."""
        self._router = router
        self._events = events
        self._own = PeerId(pubsub.my_id.to_bytes())
        self._origins = KeyedTokenBucket[PeerId](ORIGIN_RATE, ORIGIN_BURST, MAX_ORIGINS)
        self._forwarders = KeyedTokenBucket[PeerId](FORWARDER_RATE, FORWARDER_BURST, MAX_ORIGINS)
        self._lost: Counter[DropReason] = Counter()
        self._turns = PerPeerLimiter(STREAMS_AT_ONCE)
        pubsub.seen_messages.stop()  # a thread, and a cache that grows with every message
        vars(pubsub).update(
            seen_messages=SeenMessages(seen_seconds), continuously_read_stream=self.read, push_msg=self.take
        )
        self._drop = router._handle_dropped_rpc
        vars(router)["_handle_dropped_rpc"] = self._dropped

    async def read(self, net_stream: INetStream) -> None:
        """Read a peer's gossip until its stream ends; one that breaks the rules is not listened to any longer."""
        stream = Libp2pStream(
            cast(YamuxStream, cast(NetStream, net_stream).muxed_stream), str(net_stream.get_protocol())
        )
        async with self._turns.acquire(stream.peer):
            await self._read(stream)

    async def _read(self, stream: Libp2pStream) -> None:
        peer = ID(stream.peer.raw)
        messages = MessageReader(stream, rpc_pb2.RPC, MAX_RPC)
        try:
            while (rpc := await messages.next()) is not None:
                await self._handle(peer, rpc)
                await trio.lowlevel.checkpoint()  # thousands may have come at once
        except TransferError as error:
            self.lose("", "oversize" if isinstance(error, TooLongError) else "undecodable", stream.peer, stream.peer)
            _log.warning("gossip of %s is not listened to any more: %s", stream.peer, error)
            await stream.reset()
            self._pubsub._handle_dead_peer(peer)
        except (StreamResetError, StreamClosedError) as error:
            _log.debug("gossip of %s ended: %s", stream.peer, error)
        except Exception:  # noqa: BLE001 - what a peer says breaks its stream, never the node
            _log.exception("gossip of %s is not listened to any more", stream.peer)
            await stream.reset()
            self._pubsub._handle_dead_peer(peer)

    async def _handle(self, peer: ID, rpc: Any) -> None:
        _check_text(rpc)
        for number, message in enumerate(rpc.publish):
            if number % _IN_A_ROW == _IN_A_ROW - 1:
                await trio.lowlevel.checkpoint()
            await self.take(peer, message)
        if len(rpc.subscriptions) <= self._pubsub.max_subscriptions_per_rpc:
            for subscription in rpc.subscriptions:
                self._pubsub.handle_subscription(peer, subscription)
        if not rpc.HasField("control"):
            return
        control = rpc.control
        ids = sum(len(each.messageIDs) for part in (control.ihave, control.iwant, control.idontwant) for each in part)
        entries = len(control.graft) + len(control.prune) + len(control.ihave) + len(control.iwant)
        if ids + entries > MAX_IDS:
            self.lose("", "oversize", None, PeerId(peer.to_bytes()))
            return
        # where peers are is identify's to say; py-libp2p forgets addresses from here after two hours
        rpc.ClearField("senderRecord")
        self._keep_known_topics(control)
        await self._router.handle_rpc(rpc, peer)

    def _keep_known_topics(self, control: Any) -> None:
        """Leave of a peer's PRUNEs what concerns topics here, and no peers to dial.

        py-libp2p remembers every topic that it reads there for ever, and dials who is named, whatever is excluded.
        """
        known = [each for each in control.prune if each.topicID in self._pubsub.topic_ids]
        for each in known:
            each.ClearField("peers")
        kept = [type(each).FromString(each.SerializeToString()) for each in known]
        del control.prune[:]
        control.prune.extend(kept)

    async def take(self, forwarder: ID, message: Any) -> None:
        """Judge one message, and hand it to subscribers and to the router that passes it on."""
        key = message.from_id + message.seqno
        if forwarder.to_bytes() == self._own.raw:
            self._pubsub.seen_messages.add(key)
            await self._router.publish(forwarder, message)
            return
        if not self._pubsub._is_subscribed_to_msg(message) or self._pubsub.seen_messages.has(key):
            return
        neighbour = PeerId(forwarder.to_bytes())
        origin, loss = self._judge(neighbour, message)
        if loss is not None:
            topic = message.topicIDs[0] if len(message.topicIDs) == 1 else ""  # one that this node is in
            self.lose(topic[:80], loss, origin, neighbour)
            return
        self._pubsub.seen_messages.add(key)
        self._pubsub.notify_subscriptions(message)
        await self._router.publish(forwarder, message)

    def _judge(self, forwarder: PeerId, message: Any) -> tuple[PeerId | None, DropReason | None]:
        """Who a message is of, once that is proven, and why it is not taken, if it is not.

        Only what is proven counts against an origin: else whoever forges its name could silence it. Against the
        neighbour everything counts that it makes this node verify.
        """
        if len(message.data) > MAX_DATA:
            return None, "oversize"
        try:
            origin = PeerId(message.from_id)
        except InvalidIdError:
            return None, "unsigned"
        if origin == self._own or len(message.seqno) != _NUMBER or len(message.topicIDs) != 1:
            return None, "other"
        if not self._forwarders.has_token(forwarder) or not self._origins.has_token(origin):
            return None, "rate"
        self._forwarders.take(forwarder)  # an honest neighbour passes on nothing that it has not verified itself
        if not _is_signed(origin, message):
            return None, "unsigned"
        self._origins.take(origin)
        return origin, None if self._may_speak(origin, message.topicIDs[0]) else "role"

    def lose(self, topic: str, reason: DropReason, source: PeerId | None, forwarder: PeerId) -> None:
        """Count a message that is dropped; the log tells the first, the tenth, the hundredth and so on."""
        self._lost[reason] += 1
        self._events.emit(GossipDropped(topic, reason, source))
        count = self._lost[reason]
        if str(count).rstrip("0") == "1":
            _log.warning("gossip dropped (%s), %d so far; this one came from %s", reason, count, forwarder)

    def _dropped(self, peer: ID, rpc: Any, reason: str) -> None:
        """A peer takes messages more slowly than they come: those that found no room in its queue are lost for it."""
        for message in rpc.publish:
            self.lose(message.topicIDs[0][:80] if message.topicIDs else "", "queue", None, PeerId(peer.to_bytes()))
        self._drop(peer, rpc, reason)


def _check_text(rpc: Any) -> None:
    """Topics are text; protobuf hands other bytes out as they are, and fails where they are written again.

    Raises:
        TransferError: one is not.
    """
    control = rpc.control
    topics = [each.topicid for each in rpc.subscriptions]
    topics += [each.topicID for part in (control.graft, control.prune, control.ihave) for each in part]
    topics += [topic for message in rpc.publish for topic in message.topicIDs]
    if not all(isinstance(topic, str) for topic in topics):
        raise TransferError("a topic that is not text")


def _is_signed(origin: PeerId, message: Any) -> bool:
    bare = rpc_pb2.Message(
        from_id=message.from_id, data=message.data, seqno=message.seqno, topicIDs=message.topicIDs
    ).SerializeToString()
    try:
        key = Ed25519PublicKey.from_public_bytes(origin.public_key)
        key.verify(message.signature, PUBSUB_SIGNING_PREFIX.encode() + bare)
    except (InvalidSignature, ValueError):
        return False
    return True
