"""Circuits through a gateway, for nodes that nobody can dial: ``/libp2p/circuit/relay/0.2.0``, both of its halves.

A node keeps a place at its gateways (`RelayClient.keep_reservation`); from then on others reach it there: the dialling
node asks the gateway (`RelayClient.open_circuit`), the gateway asks the reserved one (`RelayHop.serve`), which answers
(`RelayClient.serve`), and bytes pass in both directions (`circuits.join`). TLS and yamux run end to end inside, so the
gateway sees ciphertext only. The stock hop lets reservations outlive their peers, passes no close on, and knows
circuits by peer, so that ending one ends another.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import anyio
from multiaddr import Multiaddr

from hypha_net._libp2p.circuits import CircuitConnection, join
from hypha_net._libp2p.framing import read_message, write_message
from hypha_net._libp2p.relay_messages import (
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
from hypha_net.addresses import split_peer
from hypha_net.endpoint import Stream
from hypha_net.errors import NetError, StreamClosedError, StreamResetError, TransferError, UnreachableError
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.relay")

MAX_RESERVATIONS: Final = 1024
MAX_CIRCUITS: Final = 4096
MAX_CIRCUITS_OF_PEER: Final = 128
RESERVATION: Final = 3600.0
"""Seconds that a reservation holds; it ends before that when its peer leaves."""
TIMEOUT: Final = 10.0
RETRY: Final = 30.0
"""Seconds after a reservation was refused before it is asked for again."""
_GONE: Final = (StreamResetError, StreamClosedError, TransferError)


class RelayEndpoint(Protocol):
    """What relaying needs of the endpoint."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """See `Endpoint.addresses`."""
        ...

    def is_direct(self, peer: PeerId) -> bool:
        """Whether there is a connection to `peer` that is not relayed."""
        ...

    async def open_stream(self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0) -> Stream:
        """See `Endpoint.open_stream`."""
        ...


class RelayHop:
    """The gateway's half: one request a stream, one answer, then perhaps a circuit."""

    def __init__(self, endpoint: RelayEndpoint, clock: Callable[[], float] = time.time) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._reservations: dict[PeerId, float] = {}
        self._circuits: Counter[PeerId] = Counter()

    def has_reservation(self, peer: PeerId) -> bool:
        """Whether `peer` may be connected to; a reservation ends with its time or with the peer's connection."""
        expires = self._reservations.get(peer)
        if expires is not None and (expires <= self._clock() or not self._endpoint.is_direct(peer)):
            del self._reservations[peer]
            return False
        return expires is not None

    async def serve(self, stream: Stream) -> None:
        """Answer one hop request."""
        try:
            with anyio.fail_after(TIMEOUT):
                request = await read_message(stream, HopMessage, MAX_MESSAGE)
        except (TransferError, TimeoutError) as error:
            _log.warning("hop request of %s dropped: %s", stream.peer, error or "too slow")
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
        if not self._endpoint.is_direct(peer):
            return _status(Status.PERMISSION_DENIED)
        if not self.has_reservation(peer) and len(self._reservations) >= MAX_RESERVATIONS:
            for other in list(self._reservations):
                self.has_reservation(other)
            if len(self._reservations) >= MAX_RESERVATIONS:
                _log.warning("no place left for %s: %d are taken", peer, len(self._reservations))
                return _status(Status.RESERVATION_REFUSED)
        self._reservations[peer] = expires = self._clock() + RESERVATION
        answer = _status(Status.OK)
        answer.reservation.expire = int(expires)
        answer.reservation.addrs.extend(Multiaddr(address).to_bytes() for address in self._endpoint.addresses)
        return answer

    async def _connect(self, stream: Stream, request: Any) -> None:
        target = _peer_id(request.peer.id)
        refusal = self._refusal(stream.peer, target)
        if refusal is not None or target is None:
            await write_message(stream, _status(refusal or Status.MALFORMED_MESSAGE))
            return
        self._circuits[stream.peer] += 1
        try:
            onward = await self._ask(target, stream.peer)
            if onward is None:
                await write_message(stream, _status(Status.CONNECTION_FAILED))
                return
            await self._carry(stream, onward)
        finally:
            self._circuits[stream.peer] -= 1
            if self._circuits[stream.peer] <= 0:
                del self._circuits[stream.peer]

    @staticmethod
    async def _carry(stream: Stream, onward: Stream) -> None:
        joined = False
        try:
            await write_message(stream, _status(Status.OK))
            joined = True
            await join(stream, onward)
        finally:
            if not joined:
                with anyio.CancelScope(shield=True):
                    await onward.reset()

    def _refusal(self, source: PeerId, target: PeerId | None) -> Status | None:
        if target is None:
            return Status.MALFORMED_MESSAGE
        if not self._endpoint.is_direct(source):
            return Status.PERMISSION_DENIED
        if not self.has_reservation(target):
            return Status.NO_RESERVATION
        if self._circuits[source] >= MAX_CIRCUITS_OF_PEER or self._circuits.total() >= MAX_CIRCUITS:
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
                await write_message(onward, request)
                answer = await read_message(onward, StopMessage, MAX_MESSAGE)
            accepted = answer is not None and answer.type == StopKind.STATUS and answer.status == Status.OK
        except (NetError, TimeoutError) as error:
            _log.info("%s takes no circuit from %s: %s", target, source, error or "no answer")
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
        return tuple(f"{address}/p2p-circuit" for held in self._held.values() for address in held)

    async def keep_reservation(self, gateway: PeerId) -> None:
        """Hold a place at `gateway` until cancelled; a gateway that is no relay is left alone."""
        try:
            while True:
                try:
                    pause = await self._reserve(gateway)
                except NetError as error:
                    _log.info("no place at gateway %s as a relay: %s", gateway, error)
                    self._held.pop(gateway, None)
                    pause = RETRY
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
        left = answer.reservation.expire - self._clock() if answer.reservation.expire else RESERVATION
        return min(RESERVATION / 2, max(RETRY, left / 2))

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
            _log.warning("stop request of %s dropped: %s", stream.peer, error or "too slow")
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
