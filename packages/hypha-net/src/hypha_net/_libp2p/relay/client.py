"""Circuits through a gateway, for nodes that nobody can dial: ``/libp2p/circuit/relay/0.2.0``, both of its halves.

A node keeps a place at its gateways (`RelayClient.keep_reservation`); from then on others reach it there: the dialling
node asks the gateway (`RelayClient.open_circuit`), the gateway asks the reserved one (`RelayHop.serve`), which answers
(`RelayClient.serve`), and bytes pass in both directions (`circuits.Circuit`). TLS and yamux run end to end inside, so
the gateway sees ciphertext only. The stock hop lets reservations outlive their peers, passes no close on, and knows
circuits by peer, so that ending one ends another.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import anyio
from multiaddr import Multiaddr

from hypha_net._libp2p.relay.circuit import CircuitConnection, CircuitRelay
from hypha_net._libp2p.relay.messages import (
    HOP,
    MAX_MESSAGE,
    STOP,
    HopKind,
    HopMessage,
    Status,
    StopKind,
    StopMessage,
    status_name,
)
from hypha_net._libp2p.wire.delimited import read_message, write_message
from hypha_net.addresses import split_peer
from hypha_net.backoff import jittered
from hypha_net.endpoint import Stream
from hypha_net.errors import NetError, StreamClosedError, StreamResetError, TransferError, UnreachableError
from hypha_net.events import CircuitEnded, Events
from hypha_net.settings import RelayLimits
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.relay")

RENEWAL: Final = 1800.0
"""Seconds after which a node asks for its place again at the latest."""
SHORTEST: Final = 30.0
"""Seconds after which it asks again at the earliest where only clocks tell, which may be hours apart."""
TIMEOUT: Final = 10.0
RETRY: Final = (1.0, 3.0, 10.0, 30.0)
"""Seconds between attempts at a reservation that is refused or not answered, each with jitter; the last repeats."""
SWEEP_EVERY: Final = 1.0
"""Seconds between two looks through all places for those that have ended, unless there is no room."""
_GONE: Final = (StreamResetError, StreamClosedError, TransferError)


class RelayEndpoint(Protocol):
    """What relaying needs of the endpoint."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """See `Endpoint.addresses`."""
        ...

    def direct_connections(self, peer: PeerId) -> frozenset[object]:
        """The connections to `peer` that are not relayed."""
        ...

    async def open_stream(self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0) -> Stream:
        """See `Endpoint.open_stream`."""
        ...


@dataclass(frozen=True, slots=True)
class _Reservation:
    """A place: until when, and by which of its peer's connections it was asked for."""

    expires: float
    """Seconds of the local monotonic clock."""
    connections: frozenset[object]


class RelayHop:
    """The gateway's half: one request a stream, one answer, then perhaps a circuit."""

    def __init__(
        self,
        endpoint: RelayEndpoint,
        limits: RelayLimits,
        events: Events,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._endpoint = endpoint
        self._limits = limits
        self._events = events
        self._wall_clock = wall_clock
        """Says when a place ends, to those who ask; what ends it here is time that has passed."""
        self._reservations: dict[PeerId, _Reservation] = {}
        self._swept = float("-inf")
        self._circuits: Counter[PeerId] = Counter()

    def has_reservation(self, peer: PeerId) -> bool:
        """Whether `peer` may be connected to; a reservation ends with its time or with the connection it came by."""
        reservation = self._reservations.get(peer)
        if reservation is None:
            return False
        gone = reservation.connections.isdisjoint(self._endpoint.direct_connections(peer))
        if reservation.expires <= anyio.current_time() or gone:
            del self._reservations[peer]
            return False
        return True

    def rests_on(self, peer: PeerId, connection: object) -> bool:
        """Whether `peer` loses its place with this connection."""
        if not self.has_reservation(peer):
            return False
        others = self._endpoint.direct_connections(peer) - {connection}
        return self._reservations[peer].connections.isdisjoint(others)

    async def serve(self, stream: Stream) -> None:
        """Answer one hop request."""
        try:
            with anyio.fail_after(TIMEOUT):
                request = await read_message(stream, HopMessage, MAX_MESSAGE)
        except (TransferError, TimeoutError) as error:
            _log.warning("hop request of %s dropped: %s", stream.peer, str(error) or "too slow")
            await stream.reset()
            return
        if request is None:
            return
        if request.type == HopKind.RESERVE:
            await write_message(stream, self._reserve(stream.peer))
        elif request.type == HopKind.CONNECT:
            await self._connect(stream, request)
        else:
            await write_message(stream, _status(Status.UNEXPECTED_MESSAGE))

    def _reserve(self, peer: PeerId) -> Any:
        """A place for the connection's peer, whatever peer the message names; a renewal always succeeds."""
        connections = self._endpoint.direct_connections(peer)
        if not connections:
            return _status(Status.PERMISSION_DENIED)
        if not self.has_reservation(peer):
            self._drop_ended()
            if len(self._reservations) >= self._limits.max_reservations:
                _log.warning("no place left for %s: %d are taken", peer, len(self._reservations))
                return _status(Status.RESERVATION_REFUSED)
        lifetime = self._limits.reservation_lifetime
        self._reservations[peer] = _Reservation(anyio.current_time() + lifetime, connections)
        answer = _status(Status.OK)
        answer.reservation.expire = int(self._wall_clock() + lifetime)
        answer.reservation.lifetime = max(1, int(lifetime))
        answer.reservation.addrs.extend(Multiaddr(address).to_bytes() for address in self._endpoint.addresses)
        self._add_limit(answer)
        return answer

    def _drop_ended(self) -> None:
        """Forget places that nobody has asked about since they ended: they hold connections that are gone."""
        full, now = len(self._reservations) >= self._limits.max_reservations, anyio.current_time()
        if full or now >= self._swept + SWEEP_EVERY:
            self._swept = now
            for peer in list(self._reservations):
                self.has_reservation(peer)

    def _add_limit(self, message: Any) -> None:
        """Say what a circuit may cost; what is left out is unlimited."""
        if self._limits.max_bytes is not None:
            message.limit.data = self._limits.max_bytes
        if self._limits.max_duration is not None:
            message.limit.duration = max(1, int(self._limits.max_duration))

    async def _connect(self, stream: Stream, request: Any) -> None:
        source, target = stream.peer, _peer_id(request.peer.id)
        refusal = self._refusal(source, target)
        if refusal is not None or target is None:
            self._events.emit(CircuitEnded(source, target, "refused"))
            await write_message(stream, _status(refusal or Status.MALFORMED_MESSAGE))
            return
        self._circuits[source] += 1
        try:
            onward = await self._ask(target, source)
            if onward is None:
                self._events.emit(CircuitEnded(source, target, "refused"))
                await write_message(stream, _status(Status.CONNECTION_FAILED))
                return
            await self._carry(stream, onward, target)
        finally:
            self._circuits[source] -= 1
            if self._circuits[source] <= 0:
                del self._circuits[source]

    async def _carry(self, stream: Stream, onward: Stream, target: PeerId) -> None:
        circuit = CircuitRelay(stream, onward, self._limits.max_bytes, self._limits.max_duration)
        answered = False
        try:
            answer = _status(Status.OK)
            self._add_limit(answer)
            await write_message(stream, answer)
            answered = True
            await circuit.carry()
        finally:
            if not answered:
                with anyio.CancelScope(shield=True):
                    await onward.reset()
            self._events.emit(CircuitEnded(stream.peer, target, circuit.outcome or "failed", circuit.moved))

    def _refusal(self, source: PeerId, target: PeerId | None) -> Status | None:
        if target is None:
            return Status.MALFORMED_MESSAGE
        if not self._endpoint.direct_connections(source):
            return Status.PERMISSION_DENIED
        if not self.has_reservation(target):
            return Status.NO_RESERVATION
        full = self._circuits.total() >= self._limits.max_circuits
        if full or self._circuits[source] >= self._limits.max_circuits_per_peer:
            _log.warning("no circuit left for %s, which has %d", source, self._circuits[source])
            return Status.RESOURCE_LIMIT_EXCEEDED
        return None

    async def _ask(self, target: PeerId, source: PeerId) -> Stream | None:
        """Ask a reserved peer whether it takes the circuit; none if it does not."""
        onward: Stream | None = None
        accepted = False
        try:
            with anyio.fail_after(TIMEOUT):
                onward = await self._endpoint.open_stream(target, [STOP], timeout=TIMEOUT)
                request = StopMessage(type=StopKind.CONNECT)
                request.peer.id = source.raw
                self._add_limit(request)
                await write_message(onward, request)
                answer = await read_message(onward, StopMessage, MAX_MESSAGE)
            accepted = answer is not None and answer.type == StopKind.STATUS and answer.status == Status.OK
        except (NetError, TimeoutError) as error:
            _log.info("%s takes no circuit from %s: %s", target, source, str(error) or "no answer")
        finally:
            if onward is not None and not accepted:
                with anyio.CancelScope(shield=True):
                    await onward.reset()
        return onward if accepted else None


class RelayClient:
    """The node's half: a place at each gateway, circuits out of it and into it."""

    def __init__(
        self,
        endpoint: RelayEndpoint,
        accept: Callable[[CircuitConnection, PeerId], Awaitable[None]],
        announce: Callable[[PeerId], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._endpoint = endpoint
        self._accept = accept
        self._announce = announce
        """Tells a gateway this node's addresses; those of other implementations learn circuits in no other way."""
        self._clock = clock
        self._held: dict[PeerId, tuple[str, ...]] = {}

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where circuits lead to this node now, without its own ``/p2p/``."""
        # a place ends with its connection, which may just have ended
        held = [named for gateway, named in self._held.items() if self._endpoint.direct_connections(gateway)]
        return tuple(f"{address}/p2p-circuit" for named in held for address in named)

    async def settle(self, gateway: PeerId) -> None:
        """Have a place that is held at `gateway` rest on all connections that there are now.

        Raises:
            NetError: it may still rest on one of them.
        """
        if gateway not in self._held:
            return
        stream, answer = await self._ask(gateway, HopMessage(type=HopKind.RESERVE))
        await stream.aclose()
        if answer.status != Status.OK:
            raise UnreachableError(status_name(answer.status))

    async def keep_reservation(self, gateway: PeerId) -> None:
        """Hold a place at `gateway` until cancelled; a gateway that is no relay is left alone."""
        failures = 0
        try:
            while True:
                try:
                    pause = await self._reserve(gateway)
                    failures = 0
                except NetError as error:
                    _log.info("no place at gateway %s as a relay: %s", gateway, error)
                    self._held.pop(gateway, None)
                    pause = jittered(RETRY, failures)
                    failures += 1
                await anyio.sleep(pause)
        finally:
            self._held.pop(gateway, None)

    async def _reserve(self, gateway: PeerId) -> float:
        """Reserve or renew; seconds until the next renewal."""
        stream, answer = await self._ask(gateway, HopMessage(type=HopKind.RESERVE))
        await stream.aclose()
        if answer.status != Status.OK:
            raise UnreachableError(status_name(answer.status))
        named: dict[str, None] = {}
        for raw in answer.reservation.addrs[:32]:
            try:
                transport, relay = split_peer(str(Multiaddr(bytes(raw))))
            except (ValueError, NetError):
                continue
            if relay in (None, gateway):
                named[f"{transport}/p2p/{gateway}"] = None
        if not named:
            _log.info("gateway %s relays to this node, but says not at which address", gateway)
        known, self._held[gateway] = self._held.get(gateway), tuple(named)
        if known != tuple(named):
            await self._announce(gateway)
        return self._until_renewal(answer.reservation)

    def _until_renewal(self, reservation: Any) -> float:
        """Seconds that are half of a place's life; by the clock only where the relay names no more than its end."""
        if reservation.lifetime:
            return float(min(RENEWAL, max(1.0, reservation.lifetime / 2)))
        left = reservation.expire - self._clock() if reservation.expire else RENEWAL
        return float(min(RENEWAL, max(SHORTEST, left / 2)))

    async def open_circuit(self, relay: PeerId, peer: PeerId) -> CircuitConnection:
        """A circuit through `relay` to `peer`.

        Raises:
            NetError: the relay cannot be reached, is none, or has no way to the peer.
        """
        request = HopMessage(type=HopKind.CONNECT)
        request.peer.id = peer.raw
        stream, answer = await self._ask(relay, request)
        if answer.status != Status.OK:
            await stream.aclose()
            raise UnreachableError(f"relay {relay} has no way to {peer}: {status_name(answer.status)}")
        return CircuitConnection(stream, is_initiator=True)

    async def _ask(self, relay: PeerId, request: Any) -> tuple[Stream, Any]:
        """Ask a relay; the stream, which may become a circuit, and the answer."""
        stream = await self._endpoint.open_stream(relay, [HOP], timeout=TIMEOUT)
        answered = False
        try:
            with anyio.fail_after(TIMEOUT):
                await write_message(stream, request)
                answer = await read_message(stream, HopMessage, MAX_MESSAGE)
            if answer is None or answer.type != HopKind.STATUS:
                raise UnreachableError(f"relay {relay}: its answer makes no sense")
            answered = True
        except _GONE as error:
            raise UnreachableError(f"relay {relay}: {error}") from error
        except TimeoutError:
            raise UnreachableError(f"relay {relay} did not answer within {TIMEOUT:g} s") from None
        finally:
            if not answered:
                with anyio.CancelScope(shield=True):
                    await stream.reset()
        return stream, answer

    async def serve(self, stream: Stream) -> None:
        """Take a circuit that a gateway offers, if it holds our reservation, and serve it as long as it lives."""
        try:
            with anyio.fail_after(TIMEOUT):
                request = await read_message(stream, StopMessage, MAX_MESSAGE)
        except (TransferError, TimeoutError) as error:
            _log.warning("stop request of %s dropped: %s", stream.peer, str(error) or "too slow")
            await stream.reset()
            return
        source = None if request is None else _peer_id(request.peer.id)
        if source is None or request.type != StopKind.CONNECT or stream.peer not in self._held:
            _log.warning("a circuit offered by %s is not taken", stream.peer)
            refused = Status.MALFORMED_MESSAGE if source is None else Status.PERMISSION_DENIED
            await write_message(stream, StopMessage(type=StopKind.STATUS, status=refused))
            return
        await write_message(stream, StopMessage(type=StopKind.STATUS, status=Status.OK))
        await self._accept(CircuitConnection(stream, is_initiator=False), source)


def _status(status: Status) -> Any:
    return HopMessage(type=HopKind.STATUS, status=status)


def _peer_id(raw: bytes) -> PeerId | None:
    try:
        return PeerId(bytes(raw))
    except InvalidIdError:
        return None
