"""Gossip validation: signatures, size and rate limits; a hostile peer does not affect the others.

Subscribers of a topic come and go: the node stays in the topic while it has one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.host.exceptions import StreamFailure
from libp2p.network.stream.exceptions import StreamReset
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.rpc_queue import RpcQueue
from multiaddr import Multiaddr
from support.endpoint_helpers import publish_until_heard
from support.gateways import open_gateway, open_node
from support.waiting import until

from hypha_net import instrumentation
from hypha_net._libp2p.dial.tcp import dial_tcp
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net._libp2p.gossipsub import validation
from hypha_net._libp2p.gossipsub.validation import MAX_DATA, MAX_RPC, ORIGIN_BURST, SeenMessages
from hypha_net._libp2p.wire.delimited import write_message
from hypha_net._libp2p.yamux.session import YamuxSession
from hypha_net.endpoint import GossipMessage, Stream
from hypha_net.errors import MessageTooLargeError, NetError
from hypha_net.events import QUEUE, GossipDropped
from hypha_net.pubsub import SubscriptionQueue
from hypha_net.testing import MemoryNetwork
from hypha_proto.ids import PeerId

TOPIC = "test/topic"
MESHSUB = "/meshsub/1.1.0"
PEER_AWAY = ID(PeerId.from_public_key(bytes(32)).raw)


@dataclass
class Star:
    """A gateway, an honest leaf, and a hostile leaf that writes raw RPCs on its gossip stream."""

    gateway: Libp2pEndpoint
    good: Libp2pEndpoint
    evil: Libp2pEndpoint
    stream: Stream
    lost: Counter[str] = field(default_factory=Counter)
    topics: set[str] = field(default_factory=set)
    """Topics of the dropped messages."""
    heard: list[GossipMessage] = field(default_factory=list)
    """Messages that the gateway accepted."""
    number: int = 0

    def message(self, data: bytes = b"x", **changes: Any) -> Any:
        """Make a valid message except for `changes`, signed with the hostile leaf's key."""
        self.number += 1
        fields = {
            "from_id": self.evil.peer_id.raw,
            "seqno": self.number.to_bytes(8, "big"),
            "topicIDs": [TOPIC],
            "data": data,
            **changes,
        }
        made = rpc_pb2.Message(**fields)
        made.signature = self.evil._identity.key.sign(b"libp2p-pubsub:" + made.SerializeToString())
        return made

    async def say(self, *messages: Any) -> None:
        await write_message(self.stream, rpc_pb2.RPC(publish=messages))

    async def check_serves(self) -> None:
        """Check that a message of the honest leaf is accepted."""
        before = len(self.heard)
        await self.good.publish(TOPIC, b"good")
        await until(lambda: any(message.data == b"good" for message in self.heard[before:]))


@asynccontextmanager
async def open_star(authority: Any) -> AsyncIterator[Star]:
    async with (
        open_gateway(authority) as gateway,
        open_node(authority, "good", "worker", gateway=gateway) as good,
        open_node(authority, "evil", "worker", gateway=gateway) as evil,
        gateway.subscribe(TOPIC) as heard,
        good.subscribe(TOPIC),
        anyio.create_task_group() as tasks,
    ):
        for node in (good, evil):
            await node.wait_for_gateway(10)
        made = Star(gateway, good, evil, await evil.open_stream(gateway.peer_id, [MESHSUB]))
        with gateway.events.follow(GossipDropped) as lost:
            tasks.start_soon(_count, lost, made.lost, made.topics)
            tasks.start_soon(_hear, heard, made.heard)
            await until(lambda: gateway.peer_id in good.topic_peers(TOPIC))
            yield made
        tasks.cancel_scope.cancel()


async def _count(lost: Any, into: Counter[str], topics: set[str]) -> None:
    async for event in lost:
        into[event.reason] += 1
        topics.add(event.topic)


async def _hear(messages: AsyncIterator[GossipMessage], into: list[GossipMessage]) -> None:
    while True:
        into.append(await anext(messages))


async def test_messages_over_a_publishers_rate_are_dropped_and_counted_and_others_accepted(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "ORIGIN_RATE", 0.001)
    async with open_star(authority) as star:
        await star.say(star.message())
        await until(lambda: [message.source for message in star.heard] == [star.evil.peer_id])
        for _ in range(20):
            await star.say(*(star.message() for _ in range(100)))
        await star.check_serves()
        await until(lambda: star.lost["rate"] == 2001 - ORIGIN_BURST, 30)
        assert sum(message.source == star.evil.peer_id for message in star.heard) == ORIGIN_BURST


async def test_forged_messages_are_dropped_without_counting_against_the_publisher(authority: Any, caplog: Any) -> None:
    async with open_star(authority) as star:
        unsigned = star.message(b"unsigned")
        unsigned.ClearField("signature")
        forged = star.message(b"forged", from_id=star.good.peer_id.raw)
        with_key = star.message(b"with key", from_id=star.good.peer_id.raw)
        with_key.key = b"\x08\x01\x12\x20" + star.evil.peer_id.public_key
        changed = star.message(b"changed")
        changed.data += b"!"
        nobody = star.message(b"nobody", from_id=b"\x12\x20" + bytes(32))
        await star.say(unsigned, forged, with_key, changed, nobody)
        await star.say(*(star.message(b"forged", from_id=star.good.peer_id.raw) for _ in range(int(2 * ORIGIN_BURST))))
        await star.check_serves()
        await until(lambda: star.lost["unsigned"] == 5 + 2 * ORIGIN_BURST)
        assert {message.source for message in star.heard} == {star.good.peer_id}
    told = [record.getMessage() for record in caplog.records if "unsigned" in record.getMessage()]
    assert len(told) == 4  # the 1st, 10th, 100th and 1000th


async def test_malformed_messages_are_dropped(authority: Any) -> None:
    async with open_star(authority) as star:
        await star.say(
            star.message(seqno=bytes(1000)),
            star.message(topicIDs=[TOPIC, "another"]),
            star.message(from_id=star.gateway.peer_id.raw),
        )
        await until(lambda: star.lost["other"] == 3)
        await star.say(star.message(topicIDs=["another"]))  # the gateway does not subscribe to it
        again = star.message()
        await star.say(again, again)
        await until(lambda: bool(star.heard))
        await star.check_serves()
        assert len([message for message in star.heard if message.source == star.evil.peer_id]) == 1
        assert star.lost == {"other": 3}


async def test_oversize_messages_are_dropped_and_an_oversize_rpc_resets_the_stream(authority: Any) -> None:
    async with open_star(authority) as star:
        await star.say(star.message(bytes(MAX_DATA)), star.message(bytes(MAX_DATA + 1)))
        await until(lambda: star.lost["oversize"] == 1 and len(star.heard) == 1)
        control = rpc_pb2.RPC()
        control.control.ihave.add(topicID=TOPIC, messageIDs=[b"00"] * (validation.MAX_IDS + 1))
        await write_message(star.stream, control)
        await until(lambda: star.lost["oversize"] == 2)
        await star.check_serves()
        await star.stream.send_all(b"\xff\xff\xff\x7f" + bytes(1000))
        await until(lambda: star.lost["oversize"] == 3)
        await star.check_serves()
        with pytest.raises(MessageTooLargeError, match=str(MAX_DATA)):
            await star.good.publish(TOPIC, bytes(MAX_DATA + 1))
        assert MAX_RPC < 1 << 28


@pytest.mark.parametrize(
    "rubbish", [b"\x05\xff\xff\xff\xff\xff", b"\xff" * 11, os.urandom(600)], ids=["pb", "len", "?"]
)
async def test_undecodable_gossip_resets_only_its_stream(authority: Any, rubbish: bytes, caplog: Any) -> None:
    async with open_star(authority) as star:
        await star.stream.send_all(rubbish)
        await star.stream.send_eof()
        await star.check_serves()
        again = await star.evil.open_stream(star.gateway.peer_id, [MESHSUB])
        await write_message(again, rpc_pb2.RPC(publish=[star.message(b"again")]))
        await until(lambda: any(message.data == b"again" for message in star.heard))
        await again.aclose()
    assert "Traceback" not in caplog.text


async def test_arbitrary_control_messages_do_no_harm(authority: Any, caplog: Any) -> None:
    async with open_star(authority) as star:
        rpc = rpc_pb2.RPC()
        for text in ("", "no such topic", "\0" * 5000):
            rpc.subscriptions.add(subscribe=True, topicid=text)
            rpc.control.graft.add(topicID=text)
            rpc.control.prune.add(topicID=text, backoff=(1 << 64) - 1).peers.add(peerID=b"?", signedPeerRecord=b"?")
            rpc.control.ihave.add(topicID=text, messageIDs=[b"", b"zz", b"\xff\xfe", b"00"])
            rpc.control.iwant.add(messageIDs=[b"", b"zz", b"\xff"])
            rpc.control.idontwant.add(messageIDs=[b"", b"zz"])
        await write_message(star.stream, rpc)
        await star.check_serves()
    assert "Traceback" not in caplog.text


async def test_gossip_continues_on_a_second_connection_when_the_first_closes(authority: Any) -> None:
    """As after a long suspension of a gateway: its leaves reconnect before it notices that they had left."""
    async with open_star(authority) as star, star.good.subscribe(TOPIC) as back:
        old = star.good._dialer.connections(star.gateway.peer_id)
        assert len(old) == 1
        await dial_tcp(star.good._swarm, Multiaddr(star.gateway.addresses[0].partition("/p2p/")[0]), None)
        await until(lambda: len(star.gateway._dialer.connections(star.good.peer_id)) == 2)
        await anyio.wait_all_tasks_blocked()
        await old[0].close()
        await until(lambda: len(star.gateway._dialer.connections(star.good.peer_id)) == 1)
        await until(lambda: star.gateway.peer_id in star.good.topic_peers(TOPIC))
        await until(lambda: star.good.peer_id in star.gateway.topic_peers(TOPIC))
        await publish_until_heard(star.gateway, TOPIC, b"to the leaf", back)
        before = len(star.heard)
        with anyio.fail_after(10):
            while not any(message.data == b"to the gateway" for message in star.heard[before:]):
                await star.good.publish(TOPIC, b"to the gateway")
                await anyio.sleep(0.2)


@pytest.mark.nightly
async def test_a_failed_gossip_stream_is_opened_again(authority: Any, monkeypatch: Any) -> None:
    async with open_star(authority) as star:
        router = star.gateway._gossip[0]
        leaf = ID(star.good.peer_id.raw)
        async with star.good.subscribe(TOPIC) as back:
            await router.peers[leaf].reset()
            await said_back(star, back, b"after a reset")

            async def too_slow(*_: Any) -> Any:
                raise StreamFailure("negotiating took too long")

            with monkeypatch.context() as patched:
                patched.setattr(router.host, "new_stream", too_slow)
                router._handle_dead_peer(leaf)
                await anyio.sleep(0.5)
                assert leaf not in router.peers
            await until(lambda: leaf in router.peers)
            router.handle_subscription(leaf, rpc_pb2.RPC.SubOpts(subscribe=True, topicid=TOPIC))
            await said_back(star, back, b"after a failure")


async def test_a_topic_joined_during_a_peers_registration_is_announced_to_it(authority: Any, monkeypatch: Any) -> None:
    async with (
        open_gateway(authority) as gateway,
        open_node(authority, "leaf", "worker") as leaf,
        anyio.create_task_group() as tasks,
    ):
        router = gateway._gossip[0]
        open_stream, joined = router.host.new_stream, anyio.Event()

        async def hear() -> None:
            async with gateway.subscribe(TOPIC) as messages:
                joined.set()
                await anext(messages)

        async def slowly(peer: ID, protocols: Any) -> Any:
            stream = await open_stream(peer, protocols)
            write = stream.write

            async def write_later(data: bytes) -> None:
                tasks.start_soon(hear)  # the list of topics was made before this one
                await joined.wait()
                await write(data)
                monkeypatch.setattr(stream, "write", write)

            monkeypatch.setattr(stream, "write", write_later)
            return stream

        monkeypatch.setattr(router.host, "new_stream", slowly)
        await leaf.connect(gateway.addresses[0])
        await until(lambda: gateway.peer_id in leaf.topic_peers(TOPIC))
        tasks.cancel_scope.cancel()


async def said_back(star: Star, heard: AsyncIterator[GossipMessage], text: bytes) -> None:
    """Wait until the gateway's gossip stream was replaced, without a publish, and a message on it arrives."""
    router = star.gateway._gossip[0]
    leaf = ID(star.good.peer_id.raw)
    await until(lambda: leaf in router.peers and not router.peers[leaf].muxed_stream.is_finished)  # type: ignore[attr-defined]
    await publish_until_heard(star.gateway, TOPIC, text, heard)


async def test_messages_of_invented_publishers_count_against_the_forwarder(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "FORWARDER_BURST", 20.0)
    monkeypatch.setattr(validation, "FORWARDER_RATE", 0.001)
    async with open_star(authority) as star:
        await star.say(*(made_up(n) for n in range(100)))
        await until(lambda: star.lost["rate"] == 80)
        await star.check_serves()
        assert sum(message.data == b"made up" for message in star.heard) == 20


async def test_forged_messages_count_against_the_forwarder_and_over_its_rate_are_not_verified(
    authority: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "FORWARDER_BURST", 20.0)
    monkeypatch.setattr(validation, "FORWARDER_RATE", 0.001)
    async with open_star(authority) as star:
        await star.say(*(star.message(from_id=star.good.peer_id.raw) for _ in range(100)))
        await until(lambda: star.lost.total() >= 100)
        assert star.lost["unsigned"] == 20
        await star.check_serves()


async def test_unknown_topics_are_not_remembered(authority: Any) -> None:
    async with open_star(authority) as star:
        rpc = rpc_pb2.RPC()
        for number in range(1000):
            rpc.control.prune.add(topicID=f"made up {number}", backoff=1 << 60)
            rpc.control.graft.add(topicID=f"made up {number}")
        await write_message(star.stream, rpc)
        await star.say(star.message(b"after"))
        await until(lambda: any(message.data == b"after" for message in star.heard))
        _, router = star.gateway._gossip
        assert set(router.back_off) <= {TOPIC}
        assert {topic for tracked in router.graft_flood_tracking.values() for topic in tracked} <= {TOPIC}
        await star.say(star.message(topicIDs=["made up", TOPIC]))
        await until(lambda: star.lost["other"] == 1)
        assert "made up" not in star.topics


async def test_peers_suggested_in_a_prune_are_not_dialled(authority: Any) -> None:
    """Their addresses would bypass `exclude_cidr`; peers are found through the DHT."""
    async with open_star(authority) as star:
        dialled: list[Any] = []

        async def dial(found: Any) -> None:
            dialled.append(found)

        vars(star.gateway._host)["connect"] = dial
        rpc = rpc_pb2.RPC()
        away = PEER_AWAY
        star.gateway._host.peerstore.add_addrs(away, [Multiaddr("/ip4/10.0.0.1/tcp/1")], 60)
        rpc.control.prune.add(topicID=TOPIC).peers.add(peerID=away.to_bytes())
        await write_message(star.stream, rpc)
        await star.say(star.message(b"after"))
        await until(lambda: any(message.data == b"after" for message in star.heard))
        assert not dialled


def made_up(number: int) -> Any:
    key = Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))
    origin = PeerId.from_public_key(key.public_key().public_bytes_raw())
    made = rpc_pb2.Message(from_id=origin.raw, seqno=bytes(8), topicIDs=[TOPIC], data=b"made up")
    made.signature = key.sign(b"libp2p-pubsub:" + made.SerializeToString())
    return made


async def test_messages_dropped_for_a_slow_subscriber_emit_events() -> None:
    network = MemoryNetwork()
    async with network.endpoint("a") as a:
        inbox = SubscriptionQueue(TOPIC, a.events)
        with a.events.follow(GossipDropped) as lost:
            for n in range(QUEUE + 1):
                inbox.put(GossipMessage(a.peer_id, b"%d" % n))
            assert await anext(aiter(lost)) == GossipDropped(TOPIC, "queue", a.peer_id)
        assert (await anext(inbox)).data == b"1"


def test_seen_messages_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_SEEN", 3)
    now = [0.0]
    seen = SeenMessages(120, lambda: now[0])
    assert [seen.add(key) for key in (b"a", b"b", b"b", b"c", b"d")] == [True, True, False, True, True]
    assert (seen.length(), seen.has(b"a"), seen.has(b"d")) == (3, False, True)
    now[0] = 121
    assert not seen.has(b"d")
    assert seen.add(b"e")
    assert seen.length() == 1


def open_streams(node: Libp2pEndpoint, peer: PeerId) -> int:
    return sum(len(cast(YamuxSession, each.muxed_conn)._streams) for each in node._dialer.connections(peer))


async def test_repeated_protocol_errors_of_a_peer_leave_no_open_streams(authority: Any) -> None:
    async with open_star(authority) as star:
        evil, gateway = star.evil, star.gateway
        await star.check_serves()
        before = open_streams(gateway, evil.peer_id)
        for _ in range(20):
            stream = await evil.open_stream(gateway.peer_id, [MESHSUB])
            with suppress(NetError):
                await stream.send_all(b"\x03\xff\xff\xff")
                await stream.receive_some()
            await stream.reset()
            await until(lambda: ID(evil.peer_id.raw) in gateway._gossip[0].peers)
        await until(lambda: open_streams(gateway, evil.peer_id) <= before + 1)
        await star.check_serves()


async def test_an_unresponsive_peer_has_one_pending_registration(authority: Any) -> None:
    async with open_star(authority) as star:
        router, peer = star.gateway._gossip[0], ID(star.evil.peer_id.raw)
        waiting: list[ID] = []

        async def never(asked: ID) -> None:
            waiting.append(asked)
            await anyio.sleep_forever()

        await until(lambda: peer in router.peers)
        router._handle_new_peer._register = never
        router._handle_dead_peer(peer)
        before = router.manager.stats.tasks.pending_count
        for _ in range(20):
            router.manager.run_task(router._handle_new_peer_with_retry, peer)
        await until(lambda: waiting)
        await anyio.wait_all_tasks_blocked()
        assert waiting == [peer]
        assert router.manager.stats.tasks.pending_count < before + 5
        await star.check_serves()


async def test_the_failure_of_a_replaced_stream_does_not_remove_the_peer(authority: Any) -> None:
    async with open_star(authority) as star:
        router, peer = star.gateway._gossip[0], ID(star.good.peer_id.raw)
        await until(lambda: peer in router.peers)
        stream = router.peers[peer]

        class Broken:
            muxed_conn = stream.muxed_conn

            async def write(self, _data: bytes) -> None:
                raise StreamReset("it broke off")

        queue = RpcQueue()
        queue.push(rpc_pb2.RPC(), priority=True)
        await router.handle_sending_messages(peer, Broken(), queue)
        assert router.peers[peer] is stream
        await star.check_serves()


TRACE = f"00-{'1' * 32}-{'2' * 16}-01"


async def test_a_subscription_during_the_last_ones_end_is_announced_to_peers(authority: Any) -> None:
    async with open_gateway(authority) as gateway, open_node(authority, "node") as node:
        await node.connect(gateway.addresses[0])
        async with gateway.subscribe("here"):
            await until(lambda: gateway.peer_id in node.topic_peers("here"))

        async def leave(topic: str) -> None:
            async with node.subscribe(topic):
                pass

        async def stay(topic: str) -> None:
            async with node.subscribe(topic):
                await anyio.sleep_forever()

        topics = [f"topic {number}" for number in range(20)]
        async with anyio.create_task_group() as tasks:  # the order in which tasks run is random
            for topic in topics:
                tasks.start_soon(leave, topic)
                tasks.start_soon(stay, topic)
            await anyio.wait_all_tasks_blocked()
            async with node.subscribe("last"):  # announced after all others
                await until(lambda: node.peer_id in gateway.topic_peers("last"))
                assert all(node.peer_id in gateway.topic_peers(topic) for topic in topics)
            tasks.cancel_scope.cancel()
        await until(lambda: not any(map(gateway.topic_peers, topics)))


async def test_a_peers_request_is_not_part_of_the_trace_of_the_dial(authority: Any) -> None:
    served: list[str | None] = []

    async def handle(_stream: Stream) -> None:
        with instrumentation.serving("test", object()):
            served.append(instrumentation.current_traceparent())

    async with open_gateway(authority) as gateway, open_node(authority, "node") as node:
        node.handle("/test/1", handle)
        with instrumentation.attached(TRACE):
            await node.connect(gateway.addresses[0])
        stream = await gateway.open_stream(node.peer_id, ["/test/1"])
        await until(lambda: bool(served))
        await stream.aclose()
    assert served == [None]
