"""Scripted nodes that behave like those of the existing Rust network, made of several `wire_peer` connections.

What they do was seen by running the Rust nodes: the gateway is not in the topic of worker requests;
the worker sends its offer only to a scheduler that it is connected to.
They share no code with ours but TLS keys.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import cbor2
import trio

from support.wire_peer import IDENTIFY, Stream, WirePeer, dial, field, fields, speak

API: Final = "/hypha-api/0.0.1"
HEALTH: Final = "/hypha-health/0.0.1"
KAD: Final = "/ipfs/kad/1.0.0"
MESHSUB: Final = "/meshsub/1.1.0"
WORKER_TOPIC: Final = "hypha/worker"
PUT_VALUE, GET_VALUE, ADD_PROVIDER, GET_PROVIDERS, FIND_NODE = range(5)
CLOSEST: Final = 20


class RustNode:
    """A node that listens on loopback, dials, and knows who its neighbours are by identify."""

    def __init__(self, identity: Any) -> None:
        self.identity = identity
        self.address = ""
        """Where it listens, with its peer id."""
        self.handlers: dict[str, Callable[[Stream], Awaitable[None]]] = {}
        self.neighbours: dict[bytes, WirePeer] = {}
        """Connections by peer id."""
        self.listening: dict[bytes, list[bytes]] = {}
        """Addresses of connected peers, as multiaddr bytes, by peer id."""
        self.gates: dict[str, trio.Event] = {}
        """Protocols to which it agrees only once the event is set."""
        self.accepted = 0
        """Connections that others have opened to this node."""
        self._lifetime = trio.CancelScope()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until shut down or cancelled."""
        with self._lifetime:
            async with trio.open_nursery() as self._tasks:
                [listener] = await self._tasks.start(partial(trio.serve_tcp, self._accept, 0, host="127.0.0.1"))
                self.address = f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}/p2p/{self.identity.peer_id}"
                task_status.started()

    def shut_down(self) -> None:
        """End the node and its connections."""
        self._lifetime.cancel()

    @property
    def is_running(self) -> bool:
        """Whether it has not been shut down."""
        return not self._lifetime.cancel_called

    async def connect(self, address: str) -> None:
        """Dial a multiaddr and wait until its node is identified."""
        await self._tasks.start(self._serve, await dial(address), True)

    async def _accept(self, transport: trio.SocketStream) -> None:
        self.accepted += 1
        await self._serve(transport, False)

    async def _serve(
        self, transport: trio.SocketStream, opened: bool, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        about = {"handlers": self.handlers, "addresses": [_multiaddr(self.address)]}
        try:
            async with speak(transport, self.identity, opened=opened, **about) as peer:
                peer.gates = self.gates
                self.neighbours[peer.remote] = peer
                try:
                    await self._identify(peer)
                    task_status.started()
                    await peer.closed.wait()
                finally:
                    if self.neighbours.get(peer.remote) is peer:
                        del self.neighbours[peer.remote]
                        self.listening.pop(peer.remote, None)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, AssertionError):
            pass  # the other side left before it was identified

    async def _identify(self, peer: WirePeer) -> None:
        stream = await peer.open(IDENTIFY)
        told = fields(await stream.message())
        await stream.half_close()
        self.listening[peer.remote] = told.get(2, [])
        await self.connected(peer, {protocol.decode() for protocol in told.get(3, [])})

    async def connected(self, peer: WirePeer, protocols: set[str]) -> None:
        """Do what this kind of node does on a new connection."""


class RustGateway(RustNode):
    """A gateway: knows its neighbours and keeps records, and is in no topic."""

    def __init__(self, identity: Any) -> None:
        super().__init__(identity)
        self.handlers[KAD] = self._answer
        self.records: dict[bytes, bytes] = {}
        self.extra: dict[bytes, list[bytes]] = {}
        """Further peers in its routing table, with their addresses."""
        self.find_nodes = 0
        """Requests for the closest peers so far."""

    async def _answer(self, stream: Stream) -> None:
        try:
            while True:
                asked = fields(await stream.message())
                kind, key = asked.get(1, [0])[0], asked.get(2, [b""])[0]
                if kind == ADD_PROVIDER:
                    continue
                record = b""
                if kind == PUT_VALUE:
                    record = self.records[key] = asked[3][0]
                elif kind == GET_VALUE:
                    record = self.records.get(key, b"")
                self.find_nodes += kind == FIND_NODE
                closer = b"" if kind == PUT_VALUE else self._closest(stream.peer.remote, key)
                answer = field(1, kind) + field(2, key) + (field(3, record) if record else b"") + closer
                await stream.say(answer + field(10, 1))
        except AssertionError:  # the end of the stream
            await stream.half_close()

    def _closest(self, asking: bytes, key: bytes) -> bytes:
        known = {**self.listening, **self.extra}
        target = int.from_bytes(hashlib.sha256(key).digest(), "big")
        nearest = sorted(known, key=lambda raw: int.from_bytes(hashlib.sha256(raw).digest(), "big") ^ target)
        chosen = [raw for raw in nearest if raw != asking][:CLOSEST]
        return b"".join(
            field(8, field(1, raw) + b"".join(field(2, address) for address in known[raw]) + field(3, 1))
            for raw in chosen
        )


class RustWorker(RustNode):
    """A worker: offers `resources` for every request, to schedulers that are connected; grants every renewal."""

    def __init__(self, identity: Any, resources: dict[str, float] | None = None, price: float = 50.0) -> None:
        super().__init__(identity)
        self.resources = resources or {"gpu": 0.0, "cpu": 4.0, "storage": 10.0, "memory": 8.0}
        self.price = price
        self.requests = 0
        """Requests that arrived by gossip."""
        self.dial_failures = 0
        """Offers that were not sent, for want of a connection."""
        self.offers = 0
        """Offers that a scheduler has taken note of."""
        self.renewed: list[bytes] = []
        """Leases that were renewed."""
        self._seen: set[bytes] = set()
        self.handlers.update({MESHSUB: self._hear, API: self._serve_api, HEALTH: self._serve_health})

    async def _identify(self, peer: WirePeer) -> None:
        stream = await peer.open(IDENTIFY)
        told = fields(await stream.message())
        await stream.half_close()
        self.listening[peer.remote] = told.get(2, [])
        await self.connected(peer, {protocol.decode() for protocol in told.get(3, [])})

    async def connected(self, peer: WirePeer, protocols: set[str]) -> None:
        """Announce the topic."""
        if MESHSUB in protocols:
            self._tasks.start_soon(self._subscribe, peer)

    async def _subscribe(self, peer: WirePeer) -> None:
        try:
            stream = await peer.open(MESHSUB)
            await stream.say(field(1, field(1, 1) + field(2, WORKER_TOPIC.encode())))
        except (AssertionError, trio.BrokenResourceError, trio.ClosedResourceError):
            return  # the connection is gone

    async def _hear(self, stream: Stream) -> None:
        while True:
            try:
                messages = fields(await stream.message()).get(2, [])
            except AssertionError:
                return
            for message in map(fields, messages):
                if message[4] == [WORKER_TOPIC.encode()]:
                    with suppress(cbor2.CBORDecodeError):
                        await self._offer(message[1][0], cbor2.loads(message[2][0]))

    async def _offer(self, scheduler: bytes, request: dict[str, Any]) -> None:
        if request["id"] in self._seen:
            return
        self._seen.add(request["id"])
        self.requests += 1
        peer = self.neighbours.get(scheduler)
        if peer is None:
            self.dial_failures += 1  # OutboundFailure::DialFailure
            return
        offer = {
            "id": hashlib.sha256(request["id"] + self.identity.peer_id.raw).digest()[:16],
            "request_id": request["id"],
            "price": self.price,
            "resources": self.resources,
            "timeout": _time(0.5),
        }
        stream = await peer.open(API)
        await stream.send_all(cbor2.dumps({"WorkerOffer": offer}))
        await stream.half_close()
        self.offers += cbor2.loads(await stream.read_all()) == {"WorkerOffer": {}}

    async def _serve_api(self, stream: Stream) -> None:
        [(name, request)] = cbor2.loads(await stream.read_all()).items()
        assert name == "RenewLease"
        self.renewed.append(request["id"])
        answer = {"RenewLease": {"Renewed": {"id": request["id"], "timeout": _time(10)}}}
        await stream.send_all(cbor2.dumps(answer))
        await stream.half_close()

    async def _serve_health(self, stream: Stream) -> None:
        await stream.read_all()
        await stream.send_all(cbor2.dumps({"healthy": True}))
        await stream.half_close()


def _time(seconds: float) -> dict[str, int]:
    return {"secs_since_epoch": int(time.time() + seconds), "nanos_since_epoch": 0}


def _multiaddr(address: str) -> bytes:
    """Encode ``/ip4/<host>/tcp/<port>``; a ``/p2p/`` part is left out."""
    host, port = address.split("/")[2], int(address.split("/")[4])
    return bytes((4, *map(int, host.split(".")), 6)) + port.to_bytes(2, "big")


@asynccontextmanager
async def running(*nodes: RustNode) -> AsyncIterator[None]:
    """Run nodes while the context is open."""
    async with trio.open_nursery() as tasks:
        for node in nodes:
            await tasks.start(node.run)
        try:
            yield
        finally:
            for node in nodes:
                node.shut_down()
            tasks.cancel_scope.cancel()
