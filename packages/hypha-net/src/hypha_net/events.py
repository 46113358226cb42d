"""Events of an endpoint: connections, dials, transfers, dropped gossip, circuits.

`Endpoint.events` is an `Events`. Each event is emitted once, by the module in which it happens, and counted by
telemetry. Every follower has a bounded queue of its own, so a slow follower never delays the network.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

import anyio

from hypha_net import instrumentation
from hypha_proto.ids import PeerId

_log = logging.getLogger(__name__)

T = TypeVar("T")

QUEUE: Final = 1024
"""Maximum number of events or messages that wait for one consumer."""

_CONNECTIONS: Final = instrumentation.Counter("hypha.connections", "{connection}", "Connections that began or ended.")
_DIALS: Final = instrumentation.Counter("hypha.dials", "{dial}", "Attempts to reach a peer, by outcome and route.")
_DIAL_TIME: Final = instrumentation.Histogram("hypha.dial.duration", "s", "Time that an attempt to reach a peer took.")
_REFUSED: Final = instrumentation.Counter("hypha.peers.refused", "{peer}", "Peers that this node refused, by reason.")
_TRANSFERS: Final = instrumentation.Counter("hypha.transfers", "{transfer}", "Files moved between peers, by outcome.")
_LOST: Final = instrumentation.Counter("hypha.gossip.lost", "{message}", "Gossip messages dropped here, by reason.")
_CIRCUITS: Final = instrumentation.Counter(
    "hypha.relay.circuits", "{circuit}", "Circuits through this relay, by outcome."
)
_PUNCHED: Final = instrumentation.Counter(
    "hypha.hole_punches", "{attempt}", "Attempts at a direct way past NAT, by outcome."
)


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection to `peer` was established."""

    peer: PeerId
    direction: Literal["inbound", "outbound"]
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection to `peer` was closed; there may be others."""

    peer: PeerId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class DialFinished:
    """An attempt to reach a peer ended."""

    address: str
    """The multiaddr, or the peer id if the dialer chose the address."""
    outcome: Literal["connected", "refused", "unreachable", "timeout"]
    seconds: float
    relayed: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PeerRejected:
    """This node refused a peer or its message, or closed its connection: revoked, expired, wrong role and so on."""

    peer: PeerId | None
    reason: Literal["revoked", "expired", "untrusted", "role", "limit", "protocol", "other"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Transferred:
    """Progress of a file transfer: emitted when it begins, at most every second while it runs, and when it ends."""

    peer: PeerId
    name: str
    direction: Literal["sent", "received"]
    state: Literal["begun", "moving", "done", "failed"]
    done: int
    """Bytes transferred so far, those of earlier attempts included."""
    size: int | None = None
    """Total bytes, if known."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GossipDropped:
    """This node dropped gossip messages."""

    topic: str
    reason: Literal["queue", "oversize", "unsigned", "rate", "undecodable", "role", "other"]
    source: PeerId | None = None


@dataclass(frozen=True, slots=True)
class CircuitEnded:
    """A circuit that this node relayed ended, or was refused."""

    source: PeerId
    target: PeerId | None
    outcome: Literal["done", "refused", "bytes", "duration", "failed"]
    moved: int = 0
    """Bytes in both directions."""


@dataclass(frozen=True, slots=True)
class HolePunched:
    """An attempt to replace a relayed connection by a direct one ended."""

    peer: PeerId
    outcome: Literal["direct", "failed", "unsupported"]
    seconds: float


Event = (
    Connected | Disconnected | DialFinished | PeerRejected | Transferred | GossipDropped | CircuitEnded | HolePunched
)


class DroppingQueue(Generic[T]):
    """What waits for one consumer, in order; of more than `QUEUE` items the oldest are dropped.

    The iteration ends after `end`.
    """

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._changed = anyio.Event()
        self._ended = False
        self.dropped = 0
        """Number of items dropped because the queue was full."""

    def put(self, item: T) -> T | None:
        """Queue an item; never waits. Return the one that is dropped for it."""
        oldest = None
        if len(self._waiting) == QUEUE:
            self.dropped += 1
            oldest = self._waiting.popleft()
        self._waiting.append(item)
        self._changed.set()
        return oldest

    def end(self) -> None:
        """End the iteration once the queued items are consumed."""
        self._ended = True
        self._changed.set()

    def __aiter__(self) -> DroppingQueue[T]:
        return self

    async def __anext__(self) -> T:
        while not self._waiting:
            if self._ended:
                raise StopAsyncIteration
            self._changed = anyio.Event()
            await self._changed.wait()
        return self._waiting.popleft()


class EventFollower(DroppingQueue[Event]):
    """The events of one follower."""

    def __init__(self, kinds: tuple[type[Event], ...]) -> None:
        super().__init__()
        self.kinds = kinds
        """Those that it gets; empty: all."""


class Events:
    """Distributes an endpoint's events to telemetry and to followers."""

    def __init__(self) -> None:
        self._followers: list[EventFollower] = []

    def emit(self, event: Event) -> None:
        """Count an event and queue it for every follower; never waits, never raises."""
        _count(event)
        for follower in self._followers:
            if not follower.kinds or isinstance(event, follower.kinds):
                follower.put(event)

    @contextmanager
    def follow(self, *kinds: type[Event]) -> Iterator[EventFollower]:
        """Receive events of `kinds`, by default all, while the context is open."""
        follower = EventFollower(kinds)
        self._followers.append(follower)
        try:
            yield follower
        finally:
            self._followers.remove(follower)
            follower.end()


def _count(event: Event) -> None:
    match event:
        case Connected(direction=direction, relayed=relayed):
            _CONNECTIONS.add(1, {"hypha.change": "up", "hypha.direction": direction, "hypha.relayed": relayed})
        case Disconnected():
            _CONNECTIONS.add(1, {"hypha.change": "down"})
        case DialFinished(outcome=outcome, relayed=relayed, seconds=seconds):
            _DIALS.add(1, {"hypha.outcome": outcome, "hypha.relayed": relayed})
            _DIAL_TIME.record(seconds, {"hypha.outcome": outcome})
        case PeerRejected(reason=reason):
            _REFUSED.add(1, {"hypha.reason": reason})
        case Transferred(state=state, direction=direction):
            if state in ("done", "failed"):
                _TRANSFERS.add(1, {"hypha.outcome": state, "hypha.direction": direction})
        case GossipDropped(reason=reason, topic=topic):
            _LOST.add(1, {"hypha.reason": reason, "messaging.destination.name": topic})
        case CircuitEnded(outcome=outcome):
            _CIRCUITS.add(1, {"hypha.outcome": outcome})
        case HolePunched(outcome=outcome):
            _PUNCHED.add(1, {"hypha.outcome": outcome})
