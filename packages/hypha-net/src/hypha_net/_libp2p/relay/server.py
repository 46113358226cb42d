"""Server side of circuit relay v2, the hop protocol: a gateway's reservations and circuits.

Implements https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md. Replaces py-libp2p's relay, whose
reservations outlive their peers, which does not forward a stream's end, and which identifies circuits by peer, so that
closing one closes another. TLS and yamux run end to end inside a circuit: the gateway sees ciphertext only. The other
side is `client`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import anyio
from multiaddr import Multiaddr

from hypha_net._libp2p.relay.circuit import CircuitRelay, RelayEndpoint
from hypha_net._libp2p.relay.messages import (
    MAX_MESSAGE,
    MESSAGE_TIMEOUT,
    STOP,
    HopKind,
    HopMessage,
    Status,
    StopKind,
    StopMessage,
    parse_peer_id,
)
from hypha_net._libp2p.wire.delimited import read_message, write_message
from hypha_net.endpoint import Stream
from hypha_net.errors import NetError, TransferError
from hypha_net.events import CircuitEnded, Events
from hypha_net.settings import RelayLimits
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.relay")

SWEEP_EVERY: Final = 1.0
"""Seconds between two sweeps for expired reservations; a full relay sweeps with every request."""


@dataclass(frozen=True, slots=True)
class _Reservation:
    """A reservation: its expiry, and the connections of its peer at the time of the request."""

    expires: float
    """Seconds of the local monotonic clock."""
    connections: frozenset[object]


class RelayServer:
    """Serves reservations and circuits: one request per stream, one answer, then perhaps a circuit."""

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
        """For the expiry that peers are told; reservations expire here by the monotonic clock."""
        self._reservations: dict[PeerId, _Reservation] = {}
        self._last_sweep = float("-inf")
        self._circuits: Counter[PeerId] = Counter()

    def has_reservation(self, peer: PeerId) -> bool:
        """Return whether circuits to `peer` are possible.

        A reservation ends with its lifetime, or with the last of the connections that it was requested on.
        """
        reservation = self._reservations.get(peer)
        if reservation is None:
            return False
        disconnected = reservation.connections.isdisjoint(self._endpoint.direct_connections(peer))
        if reservation.expires <= anyio.current_time() or disconnected:
            del self._reservations[peer]
            return False
        return True

    def depends_on_connection(self, peer: PeerId, connection: object) -> bool:
        """Return whether `peer` would lose its reservation if `connection` closed."""
        if not self.has_reservation(peer):
            return False
        others = self._endpoint.direct_connections(peer) - {connection}
        return self._reservations[peer].connections.isdisjoint(others)

    async def serve(self, stream: Stream) -> None:
        """Answer one hop request."""
        try:
            with anyio.fail_after(MESSAGE_TIMEOUT):
                request = await read_message(stream, HopMessage, MAX_MESSAGE)
        except (TransferError, TimeoutError) as error:
            _log.warning("relay request of %s dropped: %s", stream.peer, str(error) or "too slow")
            await stream.reset()
            return
        if request is None:
            return
        if request.type == HopKind.RESERVE:
            await write_message(stream, self._reserve(stream.peer))
        elif request.type == HopKind.CONNECT:
            await self._connect(stream, request)
        else:
            await write_message(stream, _status_message(Status.UNEXPECTED_MESSAGE))

    def _reserve(self, peer: PeerId) -> Any:
        """Grant the stream's peer a reservation and return the answer; a renewal always succeeds.

        The peer that the message names is ignored.
        """
        connections = self._endpoint.direct_connections(peer)
        if not connections:
            return _status_message(Status.PERMISSION_DENIED)
        if not self.has_reservation(peer):
            self._sweep_expired()
            if len(self._reservations) >= self._limits.max_reservations:
                _log.warning(
                    "reservation of %s refused: limit reached (max_reservations=%d)",
                    peer,
                    self._limits.max_reservations,
                )
                return _status_message(Status.RESERVATION_REFUSED)
        lifetime = self._limits.reservation_lifetime
        self._reservations[peer] = _Reservation(anyio.current_time() + lifetime, connections)
        answer = _status_message(Status.OK)
        answer.reservation.expire = int(self._wall_clock() + lifetime)
        answer.reservation.lifetime = max(1, int(lifetime))
        answer.reservation.addrs.extend(Multiaddr(address).to_bytes() for address in self._endpoint.addresses)
        self._add_limit(answer)
        return answer

    def _sweep_expired(self) -> None:
        """Remove expired reservations, which would keep closed connections in memory."""
        full, now = len(self._reservations) >= self._limits.max_reservations, anyio.current_time()
        if full or now >= self._last_sweep + SWEEP_EVERY:
            self._last_sweep = now
            for peer in list(self._reservations):
                self.has_reservation(peer)

    def _add_limit(self, message: Any) -> None:
        """Add the limits of a circuit to a message; an absent limit means unlimited."""
        if self._limits.max_bytes is not None:
            message.limit.data = self._limits.max_bytes
        if self._limits.max_duration is not None:
            message.limit.duration = max(1, int(self._limits.max_duration))

    async def _connect(self, stream: Stream, request: Any) -> None:
        source, target = stream.peer, parse_peer_id(request.peer.id)
        refusal = self._refusal_status(source, target)
        if refusal is not None or target is None:
            self._events.emit(CircuitEnded(source, target, "refused"))
            await write_message(stream, _status_message(refusal or Status.MALFORMED_MESSAGE))
            return
        self._circuits[source] += 1
        try:
            onward = await self._open_stop_stream(target, source)
            if onward is None:
                self._events.emit(CircuitEnded(source, target, "refused"))
                await write_message(stream, _status_message(Status.CONNECTION_FAILED))
                return
            await self._run_circuit(stream, onward, target)
        finally:
            self._circuits[source] -= 1
            if self._circuits[source] <= 0:
                del self._circuits[source]

    async def _run_circuit(self, stream: Stream, onward: Stream, target: PeerId) -> None:
        circuit = CircuitRelay(stream, onward, self._limits.max_bytes, self._limits.max_duration)
        answered = False
        try:
            answer = _status_message(Status.OK)
            self._add_limit(answer)
            await write_message(stream, answer)
            answered = True
            await circuit.run()
        finally:
            if not answered:
                with anyio.CancelScope(shield=True):
                    await onward.reset()
            self._events.emit(CircuitEnded(stream.peer, target, circuit.outcome or "failed", circuit.moved))

    def _refusal_status(self, source: PeerId, target: PeerId | None) -> Status | None:
        if target is None:
            return Status.MALFORMED_MESSAGE
        if not self._endpoint.direct_connections(source):
            return Status.PERMISSION_DENIED
        if not self.has_reservation(target):
            return Status.NO_RESERVATION
        full = self._circuits.total() >= self._limits.max_circuits
        if full or self._circuits[source] >= self._limits.max_circuits_per_peer:
            _log.warning("circuit of %s refused: limit reached; it has %d circuits", source, self._circuits[source])
            return Status.RESOURCE_LIMIT_EXCEEDED
        return None

    async def _open_stop_stream(self, target: PeerId, source: PeerId) -> Stream | None:
        """Offer the circuit to the reserved peer by the stop protocol; return the stream, or None if it declines."""
        onward: Stream | None = None
        accepted = False
        try:
            with anyio.fail_after(MESSAGE_TIMEOUT):
                onward = await self._endpoint.open_stream(target, [STOP], timeout=MESSAGE_TIMEOUT)
                request = StopMessage(type=StopKind.CONNECT)
                request.peer.id = source.raw
                self._add_limit(request)
                await write_message(onward, request)
                answer = await read_message(onward, StopMessage, MAX_MESSAGE)
            accepted = answer is not None and answer.type == StopKind.STATUS and answer.status == Status.OK
        except (NetError, TimeoutError) as error:
            _log.info("%s did not accept a circuit from %s: %s", target, source, str(error) or "no answer")
        finally:
            if onward is not None and not accepted:
                with anyio.CancelScope(shield=True):
                    await onward.reset()
        return onward if accepted else None


def _status_message(status: Status) -> Any:
    return HopMessage(type=HopKind.STATUS, status=status)
