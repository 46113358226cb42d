"""`MemoryEndpoint`: what `Endpoint` promises, between objects of one process. See the package's docstring."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
import anyio.abc
import anyio.lowlevel

from hypha_net.authorization import RoleCheck
from hypha_net.endpoint import GossipMessage, PeerInfo, Record, Stream, StreamHandler, Traffic
from hypha_net.errors import AddressError, RefusedError, StreamClosedError, UnreachableError, UnsupportedProtocolError
from hypha_net.events import Connected, Disconnected, Events
from hypha_net.subscription_queue import SubscriptionQueue
from hypha_net.testing.fault_injection import Faults, Links
from hypha_net.testing.memory_stream import MemoryStream, Pipe
from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)

TICK: Final = 0.005
"""Seconds to which the arrival of gossip is rounded up: a publish to hundreds of nodes then takes few wake-ups."""


@dataclass(slots=True)
class MemoryNetwork:
    """Nodes that can reach each other, unless a partition lies between them."""

    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    """Of every link that was not given its own (`degrade`)."""
    links: Links = field(init=False)
    _nodes: dict[PeerId, MemoryEndpoint] = field(default_factory=dict)
    _names: dict[str, MemoryEndpoint] = field(default_factory=dict)
    _topics: dict[str, dict[PeerId, MemoryEndpoint]] = field(default_factory=dict)
    _records: dict[tuple[bytes, PeerId], _Kept] = field(default_factory=dict)
    _puts: int = 0

    def __post_init__(self) -> None:
        self.links = Links(self.seed, self.faults)

    @asynccontextmanager
    async def endpoint(self, name: str) -> AsyncIterator[MemoryEndpoint]:
        """Open an endpoint; its peer id follows from the network's seed and `name`."""
        if name in self._names:
            raise AddressError(f"/memory/{name} is taken by {self._names[name].peer_id}")
        key = random.Random(f"{self.seed}/{name}").randbytes(32)
        async with anyio.create_task_group() as tasks:
            node = MemoryEndpoint(self, PeerId.from_public_key(key), name, tasks)
            self._nodes[node.peer_id] = self._names[name] = node
            try:
                yield node
            finally:
                del self._nodes[node.peer_id], self._names[name]
                self._orphan_records(node.peer_id)
                node.shut_down()
                tasks.cancel_scope.cancel()

    def partition(self, left: PeerId, right: PeerId) -> None:
        """Cut two nodes from each other: streams break, gossip and dials fail until `heal`."""
        self.links.cut(left, right)
        self._drop_cut()

    def heal(self, left: PeerId, right: PeerId) -> None:
        """Undo `partition`."""
        self.links.mend(left, right)

    def divide(self, *islands: Iterable[PeerId]) -> None:
        """Cut the network into islands, and one more of everybody who is not named; without any it is whole again."""
        self.links.divide(islands)
        self._drop_cut()

    def degrade(self, left: PeerId, right: PeerId, faults: Faults | None) -> None:
        """Give one link faults of its own; none: those of the network again."""
        self.links.set(left, right, faults)

    def _drop_cut(self) -> None:
        for node in self.nodes():
            for peer in [peer for peer in node.connected() if not self.links.passes(node.peer_id, peer)]:
                node.drop_peer(peer, "the link is cut")

    def find(self, peer: PeerId, asking: PeerId) -> MemoryEndpoint:
        """The node `peer`, if `asking` can reach it. Raises UnreachableError."""
        node = self._nodes.get(peer)
        if node is None or not self.links.passes(peer, asking):
            raise UnreachableError(f"{peer} cannot be reached")
        return node

    def named(self, name: str) -> MemoryEndpoint | None:
        """The open endpoint of this name."""
        return self._names.get(name)

    def get(self, peer: PeerId) -> MemoryEndpoint | None:
        """The open endpoint of this peer."""
        return self._nodes.get(peer)

    def nodes(self) -> list[MemoryEndpoint]:
        """Every open endpoint."""
        return list(self._nodes.values())

    def in_topic(self, topic: str) -> Mapping[PeerId, MemoryEndpoint]:
        """Who subscribes to a topic."""
        return self._topics.setdefault(topic, {})

    def join(self, topic: str, node: MemoryEndpoint) -> None:
        """A node subscribes."""
        self._topics.setdefault(topic, {})[node.peer_id] = node

    def leave(self, topic: str, node: MemoryEndpoint) -> None:
        """A node's last subscription of a topic ended."""
        self._topics.get(topic, {}).pop(node.peer_id, None)

    def routes(self, topic: str, source: PeerId) -> dict[float, list[MemoryEndpoint]]:
        """Whom a message reaches that is published now, by the seconds that it takes."""
        reached: dict[float, list[MemoryEndpoint]] = {}
        for peer, node in self.in_topic(topic).items():
            if peer == source or not self.links.passes(peer, source):
                continue
            faults = self.links.between(peer, source)
            if not self.links.happens(faults.gossip_loss):
                lag = math.ceil(self.links.lag(faults) / TICK) * TICK
                reached.setdefault(lag, []).append(node)
        return reached

    def store(self, record: Record, publisher: PeerId, ttl: float) -> None:
        """Keep a record; the newest of a publisher replaces its older ones."""
        self._puts += 1
        self._records[(record.key, publisher)] = _Kept(self._puts, record, ttl)

    def _orphan_records(self, publisher: PeerId) -> None:
        """Nobody renews them any more."""
        for (_, owner), kept in self._records.items():
            if owner == publisher:
                kept.ends = anyio.current_time() + kept.ttl

    def lookup(self, key: bytes) -> list[Record]:
        """Records of a key, newest first."""
        now = anyio.current_time()
        for gone in [entry for entry, kept in self._records.items() if kept.ends <= now]:
            del self._records[gone]
        found = [kept for (stored, _), kept in self._records.items() if stored == key]
        return [kept.record for kept in sorted(found, key=lambda kept: -kept.order)]


@dataclass(slots=True)
class _Kept:
    """A record in the directory; ends `ttl` seconds after its publisher's end, which renews it until then."""

    order: int
    record: Record
    ttl: float
    ends: float = math.inf


class MemoryEndpoint:
    """An `Endpoint` of a `MemoryNetwork`; opened by `MemoryNetwork.endpoint`."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId, name: str, tasks: anyio.abc.TaskGroup) -> None:
        self._network = network
        self._peer_id = peer_id
        self._name = name
        self._tasks = tasks
        self._handlers: dict[str, StreamHandler] = {}
        self._streams: dict[PeerId, list[MemoryStream]] = {}
        self._inboxes: dict[str, list[SubscriptionQueue]] = {}
        self._finished_sent = 0
        self._open = True
        self.events = Events()
        """See `Endpoint.events`."""
        self.role: str | None = None
        """The role that its certificate names; may be set while nobody talks to it."""
        self._roles = RoleCheck(peer_id, self._role_of, self.events)

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
        found = self._network.named(parts[2])
        if found is None:
            raise UnreachableError(f"nobody is at {address}")
        if len(parts) == 5 and parts[4] != str(found.peer_id):
            raise RefusedError(f"at {address} is {found.peer_id}, another peer than the one named")
        await self._link(found.peer_id, timeout)
        return found.peer_id

    async def _link(self, peer: PeerId, timeout: float) -> MemoryEndpoint:
        faults = self._network.links.between(self._peer_id, peer)
        with anyio.move_on_after(timeout) as scope:
            await anyio.sleep(self._network.links.lag(faults))
        if scope.cancelled_caught:
            raise UnreachableError(f"{peer} did not answer within {timeout:g} s")
        if not self._open:
            raise StreamClosedError("the endpoint is shut down")
        node = self._network.find(peer, self._peer_id)
        if peer not in self._streams and self._network.links.happens(faults.refuse_rate):
            raise UnreachableError(f"{peer} did not answer this time")
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
        other = self._network.get(peer)
        if other is not None and self._peer_id in other._streams:
            other.drop_peer(self._peer_id, reason)

    def connected_peers(self) -> Mapping[PeerId, PeerInfo]:
        """See `Endpoint.connected_peers`."""
        known = {peer: node for peer in self._streams if (node := self._network.get(peer)) is not None}
        return {
            peer: PeerInfo(peer, node.addresses, "hypha-memory", frozenset(node._handlers))
            for peer, node in known.items()
        }

    def connected(self) -> list[PeerId]:
        """The ids of the peers connected right now."""
        return list(self._streams)

    async def open_stream(
        self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0, request: bytes | None = None
    ) -> Stream:
        """See `Endpoint.open_stream`."""
        node = await self._link(peer, timeout)
        protocol = next((p for p in protocols if p in node._handlers), None)
        if protocol is None:
            raise UnsupportedProtocolError(f"{peer} speaks none of {', '.join(protocols)}")
        there, back = Pipe(self._wait_for(peer)), Pipe(node._wait_for(self._peer_id))
        ours = MemoryStream(peer, protocol, back, there)
        self._keep(peer, ours)
        node._keep(self._peer_id, theirs := MemoryStream(self._peer_id, protocol, there, back))
        node._tasks.start_soon(node._serve, theirs)
        if request is not None:
            try:
                await ours.send_eof(request)
            except BaseException:
                await ours.reset()
                raise
        return ours

    def _wait_for(self, peer: PeerId) -> Callable[[], Awaitable[None]]:
        """What each write to `peer` goes through before it arrives."""

        async def wait() -> None:
            links = self._network.links
            faults = links.between(self._peer_id, peer)
            if links.happens(faults.break_rate):
                self.drop_peer(peer, "the connection broke off")
            await anyio.sleep(links.lag(faults))

        return wait

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

    def is_authorized(self, peer: PeerId, what: str) -> bool:
        """See `Endpoint.is_authorized`."""
        return self._roles.is_authorized(peer, what)

    def _role_of(self, peer: PeerId) -> str | None:
        node = self._network.get(peer)
        return None if node is None else node.role

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """See `Endpoint.handle`."""
        self._handlers[protocol] = handler

    def unhandle(self, protocol: str) -> None:
        """See `Endpoint.unhandle`."""
        self._handlers.pop(protocol, None)

    async def publish(self, topic: str, data: bytes) -> None:
        """See `Endpoint.publish`."""
        await anyio.lowlevel.checkpoint()
        message = GossipMessage(self._peer_id, bytes(data))
        routes = self._network.routes(topic, self._peer_id)
        for node in routes.pop(0.0, []):
            node.take_gossip(topic, message)
        if routes:
            self._tasks.start_soon(self._spread, topic, message, routes)

    @staticmethod
    async def _spread(topic: str, message: GossipMessage, routes: dict[float, list[MemoryEndpoint]]) -> None:
        """Deliver what takes time; what is still on its way when this node ends is lost."""
        begun = anyio.current_time()
        for lag in sorted(routes):
            await anyio.sleep_until(begun + lag)  # or at once: a busy machine may be late
            for node in routes[lag]:
                node.take_gossip(topic, message)

    def take_gossip(self, topic: str, message: GossipMessage) -> None:
        """Put a message into the queues of this node's subscriptions."""
        for inbox in self._inboxes.get(topic, []):
            inbox.put(message)

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[AsyncIterator[GossipMessage]]:
        """See `Endpoint.subscribe`."""
        return self._subscription(topic)

    @asynccontextmanager
    async def _subscription(self, topic: str) -> AsyncIterator[AsyncIterator[GossipMessage]]:
        inbox = SubscriptionQueue(topic, self.events)
        inboxes = self._inboxes.setdefault(topic, [])
        inboxes.append(inbox)
        self._network.join(topic, self)
        try:
            yield inbox
        finally:
            inboxes.remove(inbox)
            if not inboxes:
                self._network.leave(topic, self)

    def topic_peers(self, topic: str) -> frozenset[PeerId]:
        """See `Endpoint.topic_peers`; everyone in the topic counts as connected here."""
        return frozenset(self._network.in_topic(topic)) - {self._peer_id}

    async def put_record(self, key: bytes, value: bytes, *, ttl: float = 3600.0) -> None:
        """See `Endpoint.put_record`; it ends `ttl` seconds after this endpoint."""
        await anyio.sleep(self._network.faults.delay)
        self._network.store(Record(key, value, self._peer_id), self._peer_id, ttl)

    async def find_records(self, key: bytes, *, timeout: float = 5.0) -> list[Record]:
        """See `Endpoint.find_records`."""
        await anyio.sleep(self._network.faults.delay)
        return self._network.lookup(key)

    async def find_peers(self, *, timeout: float = 5.0) -> list[PeerId]:
        """See `Endpoint.find_peers`."""
        await anyio.sleep(self._network.faults.delay)
        return [node.peer_id for node in self._network.nodes() if node is not self][:20]

    def shut_down(self) -> None:
        """Break everything off, as a closed process would."""
        self._open = False
        for peer in list(self._streams):
            self.drop_peer(peer, "the peer shut down")
