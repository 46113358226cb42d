"""Client side of circuit relay v2: reservations at gateways, and circuits out of and into this node.

Implements https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md for nodes that cannot be dialled. The node
keeps a reservation at each of its gateways (`RelayClient.keep_reservation`), through which others reach it: the
dialling node asks the gateway (`RelayClient.open_circuit`), the gateway (`server`) offers the circuit to the reserved
node, which accepts it (`RelayClient.serve`, the stop protocol).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
from multiaddr import Multiaddr

from hypha_net._libp2p.relay.circuit import CircuitConnection, RelayEndpoint
from hypha_net._libp2p.relay.messages import (
    HOP,
    MAX_MESSAGE,
    MESSAGE_TIMEOUT,
    HopKind,
    HopMessage,
    Status,
    StopKind,
    StopMessage,
    parse_peer_id,
    status_name,
)
from hypha_net._libp2p.wire.delimited import read_message, write_message
from hypha_net.addresses import split_peer
from hypha_net.backoff import jittered
from hypha_net.endpoint import Stream
from hypha_net.errors import (
    NetError,
    NotReservedError,
    StreamClosedError,
    StreamResetError,
    TransferError,
    UnreachableError,
)
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.relay")

MAX_RENEWAL_INTERVAL: Final = 1800.0
"""Seconds after which a reservation is renewed at the latest."""
MIN_RENEWAL_INTERVAL_BY_CLOCK: Final = 30.0
"""Shortest renewal interval in seconds where the relay states only the expiry time: the clocks may differ by hours."""
RETRY_PAUSES: Final = (1.0, 3.0, 10.0, 30.0)
"""Seconds between attempts at a reservation that is refused or not answered, each with jitter; the last repeats."""
_STREAM_FAILURES: Final = (StreamResetError, StreamClosedError, TransferError)


class RelayClient:
    """Holds this node's reservations, opens circuits to other nodes, and accepts theirs."""

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
        """Sends a gateway this node's addresses; other implementations learn circuit addresses in no other way."""
        self._clock = clock
        self._held: dict[PeerId, tuple[str, ...]] = {}
        """Gateways at which this node has a reservation, with the relay addresses that they stated."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Circuit addresses at which this node can be dialled now, without its own ``/p2p/``."""
        # a reservation ends with its connection, which may just have closed
        held = [stated for gateway, stated in self._held.items() if self._endpoint.direct_connections(gateway)]
        return tuple(f"{address}/p2p-circuit" for stated in held for address in stated)

    async def refresh_reservation(self, gateway: PeerId) -> None:
        """Renew the reservation at `gateway`, if there is one, so that it depends on all current connections.

        Raises:
            NetError: it may still depend on one of them.
        """
        if gateway in self._held:
            await self._request_reservation(gateway)

    async def keep_reservation(self, gateway: PeerId) -> None:
        """Hold a reservation at `gateway` until cancelled; retry with growing pauses where it is refused."""
        failures = 0
        try:
            while True:
                try:
                    pause = await self._reserve(gateway)
                    failures = 0
                except NetError as error:
                    _log.info("no relay reservation at gateway %s: %s", gateway, error)
                    self._held.pop(gateway, None)
                    pause = jittered(RETRY_PAUSES, failures)
                    failures += 1
                await anyio.sleep(pause)
        finally:
            self._held.pop(gateway, None)

    async def _reserve(self, gateway: PeerId) -> float:
        """Reserve or renew; return the seconds until the next renewal."""
        reservation = await self._request_reservation(gateway)
        stated: dict[str, None] = {}
        for raw in reservation.addrs[:32]:
            try:
                transport, relay = split_peer(str(Multiaddr(bytes(raw))))
            except (ValueError, NetError):
                continue
            if relay in (None, gateway):
                stated[f"{transport}/p2p/{gateway}"] = None
        if not stated:
            _log.info("gateway %s granted a relay reservation without an address", gateway)
        known, self._held[gateway] = self._held.get(gateway), tuple(stated)
        if known != tuple(stated):
            await self._announce(gateway)
        return self._until_renewal(reservation)

    async def _request_reservation(self, gateway: PeerId) -> Any:
        stream, answer = await self._request(gateway, HopMessage(type=HopKind.RESERVE))
        await stream.aclose()
        if answer.status != Status.OK:
            raise UnreachableError(status_name(answer.status))
        return answer.reservation

    def _until_renewal(self, reservation: Any) -> float:
        """Return half of a reservation's lifetime in seconds; by the clock only where the relay states no lifetime."""
        if reservation.lifetime:
            return float(min(MAX_RENEWAL_INTERVAL, max(1.0, reservation.lifetime / 2)))
        left = reservation.expire - self._clock() if reservation.expire else MAX_RENEWAL_INTERVAL
        return float(min(MAX_RENEWAL_INTERVAL, max(MIN_RENEWAL_INTERVAL_BY_CLOCK, left / 2)))

    async def open_circuit(self, relay: PeerId, peer: PeerId) -> CircuitConnection:
        """Open a circuit through `relay` to `peer`.

        Raises:
            NetError: the relay cannot be reached, does not relay, or cannot reach the peer.
        """
        request = HopMessage(type=HopKind.CONNECT)
        request.peer.id = peer.raw
        stream, answer = await self._request(relay, request)
        if answer.status != Status.OK:
            await stream.aclose()
            kind = NotReservedError if answer.status == Status.NO_RESERVATION else UnreachableError
            raise kind(f"relay {relay} cannot reach {peer}: {status_name(answer.status)}")
        return CircuitConnection(stream, is_initiator=True)

    async def _request(self, relay: PeerId, request: Any) -> tuple[Stream, Any]:
        """Send a hop request; return the stream, which may become a circuit, and the answer."""
        stream = await self._endpoint.open_stream(relay, [HOP], timeout=MESSAGE_TIMEOUT)
        answered = False
        try:
            with anyio.fail_after(MESSAGE_TIMEOUT):
                await write_message(stream, request)
                answer = await read_message(stream, HopMessage, MAX_MESSAGE)
            if answer is None or answer.type != HopKind.STATUS:
                raise UnreachableError(f"relay {relay}: unexpected answer")
            answered = True
        except _STREAM_FAILURES as error:
            raise UnreachableError(f"relay {relay}: {error}") from error
        except TimeoutError:
            raise UnreachableError(f"relay {relay} did not answer within {MESSAGE_TIMEOUT:g} s") from None
        finally:
            if not answered:
                with anyio.CancelScope(shield=True):
                    await stream.reset()
        return stream, answer

    async def serve(self, stream: Stream) -> None:
        """Accept a circuit that a gateway offers, if it holds our reservation, and serve it until it closes."""
        try:
            with anyio.fail_after(MESSAGE_TIMEOUT):
                request = await read_message(stream, StopMessage, MAX_MESSAGE)
        except (TransferError, TimeoutError) as error:
            _log.warning("circuit offer of %s dropped: %s", stream.peer, str(error) or "too slow")
            await stream.reset()
            return
        source = None if request is None else parse_peer_id(request.peer.id)
        if source is None or request.type != StopKind.CONNECT or stream.peer not in self._held:
            _log.warning("circuit offered by %s refused", stream.peer)
            refused = Status.MALFORMED_MESSAGE if source is None else Status.PERMISSION_DENIED
            await write_message(stream, StopMessage(type=StopKind.STATUS, status=refused))
            return
        await write_message(stream, StopMessage(type=StopKind.STATUS, status=Status.OK))
        await self._accept(CircuitConnection(stream, is_initiator=False), source)
