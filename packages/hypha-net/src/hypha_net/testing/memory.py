"""`MemoryEndpoint`: what `Endpoint` promises, between objects of one process. See the package's docstring."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.abc
import anyio.lowlevel

from hypha_net.endpoint import GossipMessage, PeerInfo, Record, Stream, StreamHandler, Traffic
from hypha_net.errors import AddressError, RefusedError, StreamClosedError, UnreachableError, UnsupportedProtocolError
from hypha_net.events import Connected, Disconnected, Events
from hypha_net.inbox import Inbox
from hypha_net.testing.pipes import MemoryStream, Pipe
from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Faults:
    """What goes wrong between nodes, changeable while the network runs."""

    delay: float = 0.0
    """Seconds that opening a stream, every write and every gossip delivery take."""
    jitter: float = 0.0
    """Up to so many seconds more for a gossip delivery, so that messages overtake each other."""
    gossip_loss: float = 0.0
    """Share of gossip deliveries that are lost."""


@dataclass(slots=True)
class MemoryNetwork:
    """Nodes that can reach each other, unless a partition lies between them."""

    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    _nodes: dict[PeerId, MemoryEndpoint] = field(default_factory=dict)
    _records: dict[tuple[bytes, PeerId], tuple[int, Record]] = field(default_factory=dict)
    _cut: set[frozenset[PeerId]] = field(default_factory=set)
    _random: random.Random = field(init=False)
    _clock: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @asynccontextmanager
    async def endpoint(self, name: str) -> AsyncIterator[MemoryEndpoint]:
        """Open an endpoint; its peer id follows from the network's seed and `name`."""
        key = random.Random(f"{self.seed}/{name}").randbytes(32)
        async with anyio.create_task_group() as tasks:
            node = MemoryEndpoint(self, PeerId.from_public_key(key), name, tasks)
            self._nodes[node.peer_id] = node
            try:
                yield node
            finally:
                del self._nodes[node.peer_id]
                node.shut_down()
                tasks.cancel_scope.cancel()

    def partition(self, left: PeerId, right: PeerId) -> None:
        """Cut two nodes from each other: streams break, gossip and dials fail until `heal`."""
        self._cut.add(frozenset((left, right)))
        if left in self._nodes and right in self._nodes:
            self._nodes[left].drop_peer(right, "the link is cut")

    def heal(self, left: PeerId, right: PeerId) -> None:
        """Undo `partition`."""
        self._cut.discard(frozenset((left, right)))

    def find(self, peer: PeerId, asking: PeerId) -> MemoryEndpoint:
        """The node `peer`, if `asking` can reach it. Raises UnreachableError."""
        node = self._nodes.get(peer)
        if node is None or frozenset((peer, asking)) in self._cut:
            raise UnreachableError(f"{peer} cannot be reached")
        return node

    def nodes(self) -> list[MemoryEndpoint]:
        """Every open endpoint."""
        return list(self._nodes.values())

    def deliver(self, topic: str, message: GossipMessage) -> None:
        """Hand a message to everyone in the topic whom its source can reach, subject to the faults."""
        for node in self.nodes():
            lost = self._random.random() < self.faults.gossip_loss
            late = self.faults.delay + self._random.random() * self.faults.jitter
            reachable = frozenset((node.peer_id, message.source)) not in self._cut
            if reachable and not lost and node.peer_id != message.source:
                node.take_gossip(topic, message, late)

    def store(self, record: Record, publisher: PeerId) -> None:
        """Keep a record; the newest of a publisher replaces its older ones."""
        self._clock += 1
        self._records[(record.key, publisher)] = (self._clock, record)

    def lookup(self, key: bytes) -> list[Record]:
        """Records of a key, newest first."""
        found = [entry for (stored, _), entry in self._records.items() if stored == key]
        return [record for _, record in sorted(found, key=lambda entry: -entry[0])]


class MemoryEndpoint:
    """An `Endpoint` of a `MemoryNetwork`; opened by `MemoryNetwork.endpoint`."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId, name: str, tasks: anyio.abc.TaskGroup) -> None:
        self._network = network
        self._peer_id = peer_id
        self._name = name
        self._tasks = tasks
        self._handlers: dict[str, StreamHandler] = {}
        self._streams: dict[PeerId, list[MemoryStream]] = {}
        self._inboxes: dict[str, list[Inbox]] = {}
        self._finished_sent = 0
        self._open = True
        self.events = Events()
        """See `Endpoint.events`."""

    @property
    def peer_id(self) -> PeerId:
        """See `Endpoint.peer_id`."""
        return self._peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """See `Endpoint.addresses`."""
        return (f"/memory/{self._name}/p2p/{self._peer_id}",)

    @property
    def traffic(self) -> Traffic:
        """Bytes that streams carried; the other side's count is this side's other half."""
        sent = self._finished_sent + sum(s.sent for streams in self._streams.values() for s in streams)
        return Traffic(sent=sent)

    async def connect(self, address: str, *, timeout: float = 10.0) -> PeerId:
        """See `Endpoint.connect`."""
        parts = address.split("/")
        if len(parts) < 3 or parts[1] != "memory":
            raise AddressError(f"{address!r} is not an address of this network (/memory/<name>)")
        found = [node for node in self._network.nodes() if node._name == parts[2]]
        if not found:
            raise UnreachableError(f"nobody is at {address}")
        if len(parts) == 5 and parts[4] != str(found[0].peer_id):
            raise RefusedError(f"at {address} is {found[0].peer_id}, another peer than the one named")
        await self._link(found[0].peer_id, timeout)
        return found[0].peer_id

    async def _link(self, peer: PeerId, timeout: float) -> MemoryEndpoint:
        with anyio.move_on_after(timeout) as scope:
            await anyio.sleep(self._network.faults.delay)
        if scope.cancelled_caught:
            raise UnreachableError(f"{peer} did not answer within {timeout:g} s")
        if not self._open:
            raise StreamClosedError("the endpoint is shut down")
        node = self._network.find(peer, self._peer_id)
        if peer not in self._streams:
            self._streams[peer] = []
            self.events.emit(Connected(peer, "outbound"))
        if self._peer_id not in node._streams:
            node._streams[self._peer_id] = []
            node.events.emit(Connected(self._peer_id, "inbound"))
        return node

    async def disconnect(self, peer: PeerId) -> None:
        """See `Endpoint.disconnect`."""
        self.drop_peer(peer, "the connection was closed")
        await anyio.lowlevel.checkpoint()

    def drop_peer(self, peer: PeerId, reason: str) -> None:
        """Break every stream between this node and `peer`, and forget the connection on both sides."""
        if peer in self._streams:
            self.events.emit(Disconnected(peer, reason))
        for stream in self._streams.pop(peer, []):
            self._finished_sent += stream.sent
            stream.break_off(reason)
        other = next((node for node in self._network.nodes() if node.peer_id == peer), None)
        if other is not None and self._peer_id in other._streams:
            other.drop_peer(self._peer_id, reason)

    def connected_peers(self) -> Mapping[PeerId, PeerInfo]:
        """See `Endpoint.connected_peers`."""
        known = {node.peer_id: node for node in self._network.nodes()}
        return {
            peer: PeerInfo(peer, known[peer].addresses, "hypha-memory", frozenset(known[peer]._handlers))
            for peer in self._streams
            if peer in known
        }

    async def open_stream(self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0) -> Stream:
        """See `Endpoint.open_stream`."""
        node = await self._link(peer, timeout)
        protocol = next((p for p in protocols if p in node._handlers), None)
        if protocol is None:
            raise UnsupportedProtocolError(f"{peer} speaks none of {', '.join(protocols)}")
        there, back = Pipe(self._network.faults.delay), Pipe(self._network.faults.delay)
        ours = MemoryStream(peer, protocol, back, there)
        self._keep(peer, ours)
        node._keep(self._peer_id, theirs := MemoryStream(self._peer_id, protocol, there, back))
        node._tasks.start_soon(node._serve, theirs)
        return ours

    def _keep(self, peer: PeerId, stream: MemoryStream) -> None:
        streams = self._streams[peer]
        self._finished_sent += sum(s.sent for s in streams if s.finished)
        streams[:] = [s for s in streams if not s.finished]
        streams.append(stream)

    async def _serve(self, stream: MemoryStream) -> None:
        try:
            await self._handlers[stream.protocol](stream)
        except Exception:  # noqa: BLE001 - a handler's fault breaks its stream, never the node
            _log.exception("serving %s for %s failed", stream.protocol, stream.peer)
            await stream.reset()
        else:
            await stream.aclose()

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """See `Endpoint.handle`."""
        self._handlers[protocol] = handler

    def unhandle(self, protocol: str) -> None:
        """See `Endpoint.unhandle`."""
        self._handlers.pop(protocol, None)

    async def publish(self, topic: str, data: bytes) -> None:
        """See `Endpoint.publish`."""
        await anyio.lowlevel.checkpoint()
        self._network.deliver(topic, GossipMessage(self._peer_id, bytes(data)))

    def take_gossip(self, topic: str, message: GossipMessage, late: float) -> None:
        """Put a message into the queues of this node's subscriptions, `late` seconds from now."""
        for inbox in self._inboxes.get(topic, []):
            if late > 0:
                self._tasks.start_soon(_after, late, inbox.put, message)
            else:
                inbox.put(message)

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[AsyncIterator[GossipMessage]]:
        """See `Endpoint.subscribe`."""
        return self._subscription(topic)

    @asynccontextmanager
    async def _subscription(self, topic: str) -> AsyncIterator[AsyncIterator[GossipMessage]]:
        inbox = Inbox()
        self._inboxes.setdefault(topic, []).append(inbox)
        try:
            yield inbox
        finally:
            self._inboxes[topic].remove(inbox)

    def topic_peers(self, topic: str) -> frozenset[PeerId]:
        """See `Endpoint.topic_peers`; everyone in the topic counts as connected here."""
        return frozenset(n.peer_id for n in self._network.nodes() if n._inboxes.get(topic) and n is not self)

    async def put_record(self, key: bytes, value: bytes, *, ttl: float = 3600.0) -> None:
        """See `Endpoint.put_record`; records of this network do not expire."""
        await anyio.sleep(self._network.faults.delay)
        self._network.store(Record(key, value, self._peer_id), self._peer_id)

    async def find_records(self, key: bytes, *, timeout: float = 5.0) -> list[Record]:
        """See `Endpoint.find_records`."""
        await anyio.sleep(self._network.faults.delay)
        return self._network.lookup(key)

    def shut_down(self) -> None:
        """Break everything off, as a closed process would."""
        self._open = False
        for peer in list(self._streams):
            self.drop_peer(peer, "the peer shut down")


async def _after(seconds: float, action: Callable[[GossipMessage], None], message: GossipMessage) -> None:
    await anyio.sleep(seconds)
    action(message)
