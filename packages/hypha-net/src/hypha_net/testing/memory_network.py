"""`MemoryNetwork` and `MemoryEndpoint`: the `Endpoint` protocol between objects of one process.

`memory_stream` carries bytes, `fault_injection` decides what fails. See the package's docstring for an example.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio
import anyio.abc
import anyio.lowlevel

from hypha_net.authorization import RoleCheck
from hypha_net.endpoint import GossipMessage, PeerInfo, Record, Stream, StreamHandler, Traffic
from hypha_net.errors import (
    AddressError,
    NotRunningError,
    RefusedError,
    StreamClosedError,
    UnreachableError,
    UnsupportedProtocolError,
)
from hypha_net.events import Connected, Disconnected, Events
from hypha_net.pubsub import SubscriptionQueue
from hypha_net.testing.fault_injection import Faults, Links
from hypha_net.testing.memory_stream import MemoryStream, Pipe
from hypha_net.testing.processor import Processor
from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)

TICK: Final = 0.005
"""Seconds to which the arrival of gossip is rounded up, so that a publish to hundreds of nodes needs few wake-ups."""


@dataclass(slots=True)
class MemoryNetwork:
    """Network of nodes that can reach each other unless a partition separates them."""

    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    """Faults of every link without its own (`degrade`)."""
    processing: float = 0.0
    """Seconds of the receiver's processor that each delivery takes: a gossip message, or a write to a stream."""
    links: Links = field(init=False)
    _nodes: dict[PeerId, MemoryEndpoint] = field(default_factory=dict)
    _names: dict[str, MemoryEndpoint] = field(default_factory=dict)
    _topics: dict[str, dict[PeerId, MemoryEndpoint]] = field(default_factory=dict)
    _records: dict[tuple[bytes, PeerId], _StoredRecord] = field(default_factory=dict)
    _puts: int = 0

    def __post_init__(self) -> None:
        self.links = Links(self.seed, self.faults)

    @asynccontextmanager
    async def endpoint(self, name: str) -> AsyncIterator[MemoryEndpoint]:
        """Open an endpoint; its peer id is derived from the network's seed and `name`."""
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
                self._expire_records_of(node.peer_id)
                node.shut_down()
                tasks.cancel_scope.cancel()

    def partition(self, left: PeerId, right: PeerId) -> None:
        """Separate two nodes: streams break, gossip and dials fail until `heal`."""
        self.links.cut(left, right)
        self._drop_blocked_connections()

    def heal(self, left: PeerId, right: PeerId) -> None:
        """Undo `partition`."""
        self.links.restore(left, right)

    def divide(self, *islands: Iterable[PeerId]) -> None:
        """Divide the network into islands, plus one of all nodes not named; without arguments undo it."""
        self.links.divide(islands)
        self._drop_blocked_connections()

    def degrade(self, left: PeerId, right: PeerId, faults: Faults | None) -> None:
        """Set the faults of one link; None restores the network's."""
        self.links.set(left, right, faults)

    def _drop_blocked_connections(self) -> None:
        for node in self.nodes():
            for peer in [peer for peer in node.connected() if not self.links.is_open(node.peer_id, peer)]:
                node.drop_peer(peer, "the link is cut")

    def find(self, peer: PeerId, asking: PeerId) -> MemoryEndpoint:
        """Return the endpoint of `peer`; raise UnreachableError if `asking` cannot reach it."""
        if not self.links.is_open(peer, asking):
            raise UnreachableError(f"{peer} cannot be reached")
        node = self._nodes.get(peer)
        if node is None:
            raise NotRunningError(f"{peer} is not running")
        return node

    def named(self, name: str) -> MemoryEndpoint | None:
        """Return the open endpoint of this name, or None."""
        return self._names.get(name)

    def get(self, peer: PeerId) -> MemoryEndpoint | None:
        """Return the open endpoint of this peer, or None."""
        return self._nodes.get(peer)

    def nodes(self) -> list[MemoryEndpoint]:
        """Return all open endpoints."""
        return list(self._nodes.values())

    def subscribers(self, topic: str) -> Mapping[PeerId, MemoryEndpoint]:
        """Return the subscribers of a topic."""
        return self._topics.setdefault(topic, {})

    def join(self, topic: str, node: MemoryEndpoint) -> None:
        """Add a subscriber."""
        self._topics.setdefault(topic, {})[node.peer_id] = node

    def leave(self, topic: str, node: MemoryEndpoint) -> None:
        """Remove a subscriber."""
        self._topics.get(topic, {}).pop(node.peer_id, None)

    def routes(self, topic: str, source: PeerId) -> dict[float, list[MemoryEndpoint]]:
        """Draw the receivers of a message published now, by their delay in seconds."""
        reached: dict[float, list[MemoryEndpoint]] = {}
        for peer, node in self.subscribers(topic).items():
            if peer == source or not self.links.is_open(peer, source):
                continue
            faults = self.links.between(peer, source)
            if not self.links.occurs(faults.gossip_loss):
                delay = math.ceil(self.links.draw_delay(faults) / TICK) * TICK
                reached.setdefault(delay, []).append(node)
        return reached

    def store(self, record: Record, publisher: PeerId, ttl: float) -> None:
        """Store a record in place of an older one of the same key and publisher."""
        self._puts += 1
        self._records[(record.key, publisher)] = _StoredRecord(self._puts, record, ttl)

    def _expire_records_of(self, publisher: PeerId) -> None:
        """Let records expire after their time to live, since their publisher no longer renews them."""
        for (_, owner), stored in self._records.items():
            if owner == publisher:
                stored.expires_at = anyio.current_time() + stored.ttl

    def records(self) -> list[Record]:
        """Return all records, in the order in which they were stored."""
        self._remove_expired()
        return [stored.record for stored in sorted(self._records.values(), key=lambda stored: stored.order)]

    def _remove_expired(self) -> None:
        now = anyio.current_time()
        for gone in [entry for entry, stored in self._records.items() if stored.expires_at <= now]:
            del self._records[gone]

    def lookup(self, key: bytes) -> list[Record]:
        """Return the records of a key, newest first."""
        self._remove_expired()
        found = [stored for (record_key, _), stored in self._records.items() if record_key == key]
        return [stored.record for stored in sorted(found, key=lambda stored: -stored.order)]


@dataclass(slots=True)
class _StoredRecord:
    """Record in the directory; expires `ttl` seconds after its publisher has closed, which renews it until then."""

    order: int
    record: Record
    ttl: float
    expires_at: float = math.inf


class MemoryEndpoint:
    """`Endpoint` of a `MemoryNetwork`; opened by `MemoryNetwork.endpoint`."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerId, name: str, tasks: anyio.abc.TaskGroup) -> None:
        self._network = network
        self.peer_id = peer_id
        self._name = name
        self._tasks = tasks
        self._handlers: dict[str, StreamHandler] = {}
        self._streams: dict[PeerId, list[MemoryStream]] = {}
        self._prune_at: dict[PeerId, int] = {}
        self._queues: dict[str, list[SubscriptionQueue]] = {}
        self._finished_sent = 0
        self._open = True
        self.processor = Processor(network.processing)
        """Counts what is delivered to this node, and delays it (`MemoryNetwork.processing`)."""
        self.events = Events()
        """See `Endpoint.events`."""
        self.role: str | None = None
        """Role named in its certificate; set it before the endpoint is connected."""
        self.gateway_peers: dict[str, PeerId | None] = {}
        """What `gateways` returns; there are none unless a test sets some."""
        self.gateway_errors: dict[str, str] = {}
        """What `gateway_failures` returns."""
        self._roles = RoleCheck(peer_id, self._role_of, self.events)

    @property
    def addresses(self) -> tuple[str, ...]:
        """See `Endpoint.addresses`."""
        return (f"/memory/{self._name}/p2p/{self.peer_id}",)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent on streams; received bytes are counted at the sending endpoint."""
        sent = self._finished_sent + sum(s.sent for streams in self._streams.values() for s in streams)
        return Traffic(sent=sent)

    async def connect(self, address: str, *, timeout: float = 10.0) -> PeerId:
        """See `Endpoint.connect`."""
        parts = address.split("/")
        if len(parts) < 3 or parts[1] != "memory":
            raise AddressError(f"{address!r} is not an address of this network (/memory/<name>)")
        found = self._network.named(parts[2])
        if found is None:
            raise UnreachableError(f"no endpoint has the address {address}")
        if len(parts) == 5 and parts[4] != str(found.peer_id):
            raise RefusedError(f"at {address} is {found.peer_id}, another peer than the one named")
        await self._connect_to(found.peer_id, timeout)
        return found.peer_id

    async def _connect_to(self, peer: PeerId, timeout: float) -> MemoryEndpoint:
        faults = self._network.links.between(self.peer_id, peer)
        with anyio.move_on_after(timeout) as scope:
            await anyio.sleep(self._network.links.draw_delay(faults))
        if scope.cancelled_caught:
            raise UnreachableError(f"{peer} did not answer within {timeout:g} s")
        if not self._open:
            raise StreamClosedError("the endpoint is shut down")
        node = self._network.find(peer, self.peer_id)
        if peer not in self._streams and self._network.links.occurs(faults.refuse_rate):
            raise UnreachableError(f"{peer} did not answer this time")
        if peer not in self._streams:
            self._streams[peer] = []
            self.events.emit(Connected(peer, "outbound"))
        if self.peer_id not in node._streams:
            node._streams[self.peer_id] = []
            node.events.emit(Connected(self.peer_id, "inbound"))
        return node

    async def connect_peer(self, peer: PeerId, *, timeout: float = 10.0) -> None:
        """See `Endpoint.connect_peer`."""
        if peer not in self._streams:
            await self._connect_to(peer, timeout)

    def round_trip_time(self, peer: PeerId) -> float | None:
        """See `Endpoint.round_trip_time`: twice the delay of the link, without jitter."""
        return 2 * self._network.links.between(self.peer_id, peer).delay if peer in self._streams else None

    async def disconnect(self, peer: PeerId) -> None:
        """See `Endpoint.disconnect`."""
        self.drop_peer(peer, "the connection was closed")
        await anyio.lowlevel.checkpoint()

    def drop_peer(self, peer: PeerId, reason: str) -> None:
        """Abort every stream between this node and `peer`, and remove the connection on both sides."""
        if peer in self._streams:
            self.events.emit(Disconnected(peer, reason))
        for stream in self._streams.pop(peer, []):
            self._finished_sent += stream.sent
            stream.abort(reason)
        other = self._network.get(peer)
        if other is not None and self.peer_id in other._streams:
            other.drop_peer(self.peer_id, reason)

    def connected_peers(self) -> Mapping[PeerId, PeerInfo]:
        """See `Endpoint.connected_peers`."""
        known = {peer: node for peer in self._streams if (node := self._network.get(peer)) is not None}
        return {
            peer: PeerInfo(peer, node.addresses, "hypha-memory", frozenset(node._handlers))
            for peer, node in known.items()
        }

    def connected(self) -> list[PeerId]:
        """Return the ids of the currently connected peers."""
        return list(self._streams)

    async def open_stream(
        self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0, request: bytes | None = None
    ) -> Stream:
        """See `Endpoint.open_stream`; over a standing connection a `request` arrives after one delay of the link."""
        await anyio.lowlevel.checkpoint()
        if request is not None and peer in self._streams:
            node = self._network.find(peer, self.peer_id)
        else:
            node = await self._connect_to(peer, timeout)
        protocol = next((p for p in protocols if p in node._handlers), None)
        if protocol is None:
            raise UnsupportedProtocolError(f"{peer} speaks none of {', '.join(protocols)}")
        there, back = Pipe(self._write_delay(peer)), Pipe(node._write_delay(self.peer_id))
        ours = MemoryStream(peer, protocol, back, there)
        self._track(peer, ours)
        node._track(self.peer_id, theirs := MemoryStream(self.peer_id, protocol, there, back))
        node._tasks.start_soon(node._serve, theirs)
        if request is not None:
            await self._send_request(ours, request, timeout)
        return ours

    @staticmethod
    async def _send_request(stream: MemoryStream, request: bytes, timeout: float) -> None:
        try:
            with anyio.fail_after(timeout):
                await stream.send_eof(request)
        except TimeoutError:
            await stream.reset()
            raise UnreachableError(f"{stream.peer} did not answer within {timeout:g} s") from None
        except BaseException:
            await stream.reset()
            raise

    def _write_delay(self, peer: PeerId) -> Callable[[], Awaitable[None]]:
        """Return the delay and possible break of each write to `peer`."""

        async def wait() -> None:
            links = self._network.links
            faults = links.between(self.peer_id, peer)
            if links.occurs(faults.break_rate):
                self.drop_peer(peer, "the connection broke off")
            await anyio.sleep(links.draw_delay(faults))
            if (receiver := self._network.get(peer)) is not None:
                await receiver.processor.handle(self.peer_id)

        return wait

    def _track(self, peer: PeerId, stream: MemoryStream) -> None:
        """Add a stream; remove finished ones whenever the number has doubled, which keeps the cost constant."""
        streams = self._streams[peer]
        if len(streams) >= self._prune_at.get(peer, 0):
            self._finished_sent += sum(s.sent for s in streams if s.is_finished)
            streams[:] = [s for s in streams if not s.is_finished]
            self._prune_at[peer] = 2 * len(streams) + 8
        streams.append(stream)

    async def _serve(self, stream: MemoryStream) -> None:
        try:
            await self._handlers[stream.protocol](stream)
        except Exception:  # noqa: BLE001 - an error in a handler resets its stream, never ends the node
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

    async def publish(self, topic: str, data: bytes) -> None:
        """See `Endpoint.publish`."""
        await anyio.lowlevel.checkpoint()
        message = GossipMessage(self.peer_id, bytes(data))
        routes = self._network.routes(topic, self.peer_id)
        for node in routes.pop(0.0, []):
            node.deliver(topic, message)
        if routes:
            self._tasks.start_soon(self._deliver_delayed, topic, message, routes)

    @staticmethod
    async def _deliver_delayed(topic: str, message: GossipMessage, routes: dict[float, list[MemoryEndpoint]]) -> None:
        """Deliver a message after each delay; what is undelivered when this node closes is lost."""
        begun = anyio.current_time()
        for delay in sorted(routes):
            await anyio.sleep_until(begun + delay)  # or at once: a busy machine may be late
            for node in routes[delay]:
                node.deliver(topic, message)

    def deliver(self, topic: str, message: GossipMessage) -> None:
        """Put a message into the queues of this node's subscriptions, once its processor has handled it."""
        if self.processor.is_instant:
            self.processor.handled += 1
            self._enqueue(topic, message)
        else:
            self._tasks.start_soon(self._process, topic, message)

    async def _process(self, topic: str, message: GossipMessage) -> None:
        await self.processor.handle(message.source)
        self._enqueue(topic, message)

    def _enqueue(self, topic: str, message: GossipMessage) -> None:
        for queue in self._queues.get(topic, []):
            queue.put(message)

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[AsyncIterator[GossipMessage]]:
        """See `Endpoint.subscribe`."""
        return self._subscription(topic)

    @asynccontextmanager
    async def _subscription(self, topic: str) -> AsyncIterator[AsyncIterator[GossipMessage]]:
        queue = SubscriptionQueue(topic, self.events)
        queues = self._queues.setdefault(topic, [])
        queues.append(queue)
        self._network.join(topic, self)
        try:
            yield queue
        finally:
            queues.remove(queue)
            if not queues:
                self._network.leave(topic, self)

    async def connect_subscribers(self, topic: str, *, timeout: float = 1.0) -> None:
        """See `Endpoint.connect_subscribers`; here every subscriber receives what is published, connected or not."""
        await anyio.lowlevel.checkpoint()

    def gateways(self) -> Mapping[str, PeerId | None]:
        """See `Endpoint.gateways`."""
        return dict(self.gateway_peers)

    def gateway_failures(self) -> Mapping[str, str]:
        """See `Endpoint.gateway_failures`."""
        return self.gateway_errors

    def topic_peers(self, topic: str) -> frozenset[PeerId]:
        """See `Endpoint.topic_peers`; all subscribers count as connected here."""
        return frozenset(self._network.subscribers(topic)) - {self.peer_id}

    async def put_record(self, key: bytes, value: bytes, *, ttl: float = 3600.0) -> None:
        """See `Endpoint.put_record`; it expires `ttl` seconds after this endpoint is closed."""
        await anyio.sleep(self._network.faults.delay)
        self._network.store(Record(key, value, self.peer_id), self.peer_id, ttl)

    async def find_records(self, key: bytes, *, timeout: float = 5.0) -> list[Record]:
        """See `Endpoint.find_records`."""
        await anyio.sleep(self._network.faults.delay)
        return self._network.lookup(key)

    def stored_records(self) -> Iterator[Record]:
        """See `Endpoint.stored_records`; here every endpoint has all records of the network, as a gateway would."""
        return iter(self._network.records())

    async def find_peers(self, *, timeout: float = 5.0) -> list[PeerId]:
        """See `Endpoint.find_peers`."""
        await anyio.sleep(self._network.faults.delay)
        return [node.peer_id for node in self._network.nodes() if node is not self][:20]

    def shut_down(self) -> None:
        """Abort all connections, as the end of the process would."""
        self._open = False
        for peer in list(self._streams):
            self.drop_peer(peer, "the peer shut down")
