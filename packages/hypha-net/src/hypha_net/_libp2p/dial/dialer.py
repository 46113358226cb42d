"""Connect to a peer: an existing connection, its addresses in parallel (Happy Eyeballs), or a circuit by a relay."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, cast

import anyio
from libp2p.connection_types import ConnectionType
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from hypha_net._libp2p.dial.dnsaddr import DnsaddrResolver, ResolvedAddress
from hypha_net._libp2p.dial.happy_eyeballs import ATTEMPT_DELAY, Race, happy_eyeballs, run_staggered
from hypha_net._libp2p.dial.tcp import dial_tcp
from hypha_net._libp2p.dial.upgrade import upgrade
from hypha_net._libp2p.relay.circuit import CircuitConnection
from hypha_net.addresses import CIRCUIT, DNSADDR, Network, is_excluded, is_excluded_host, split_peer
from hypha_net.backoff import Backoff
from hypha_net.errors import AddressError, NetError, RefusedError, StreamClosedError, UnreachableError
from hypha_net.events import DialFinished, Events
from hypha_net.log_throttle import LogThrottle
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.dial")

CIRCUIT_DELAY: Final = 1.0
"""Head start in seconds of direct dials over the first relay, and of each relay over the next."""
LOOK_UP_DELAY: Final = 1.0
"""Seconds after which the directory is queried although known addresses have not failed yet: they may be outdated."""
PEER_PAUSES: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Backoff in seconds of a peer that could not be reached, however often it is requested meanwhile."""
POLL_INTERVAL: Final = 0.05
"""Seconds between checks whether the peer has connected to this node."""
INBOUND_SETTLE_TIME: Final = 1.0
"""Age in seconds at which a connection from the peer ends this node's own attempts.

Not at once: of two nodes that dial each other at the same moment, each would cancel its attempt for the other's.
"""
LOOK_UP_PAUSES: Final = (0.1, 0.2, 0.4, 0.0)
"""Pauses in seconds after look-ups that find nothing: a gateway knows a node only moments after it has joined."""
Outcome = Literal["connected", "refused", "unreachable", "timeout"]


@dataclass(frozen=True, slots=True)
class Routes:
    """Sources of ways to reach a peer; provided by the endpoint."""

    known: Callable[[PeerId], Iterable[bytes]]
    """Addresses that the peer has reported, as multiaddr bytes."""
    look_up: Callable[[PeerId], Awaitable[Iterable[bytes]]]
    """Addresses in the directory. Raises `UnreachableError`."""
    relays: Callable[[], Sequence[PeerId]]
    """Relays to try, in order."""
    open_circuit: Callable[[PeerId, PeerId], Awaitable[CircuitConnection]]
    """Open a circuit through a relay (first argument) to a peer (second). Raises `NetError`."""


@dataclass(slots=True)
class _Attempt:
    """An attempt to connect in progress, shared by all callers that request the same peer."""

    target: str
    """What was requested; a caller that requested something else does not share a failure."""
    done: anyio.Event = field(default_factory=anyio.Event)
    error: NetError | None = None
    """Why it failed; None also if its first caller was cancelled."""


class Dialer:
    """Connections of one endpoint."""

    def __init__(self, swarm: Swarm, excluded: Sequence[Network], events: Events, resolver: DnsaddrResolver) -> None:
        self._swarm = swarm
        self._excluded = excluded
        self._events = events
        self._resolver = resolver
        self._exclusions = LogThrottle(interval=math.inf)
        self._addresses: Backoff[str] = Backoff((0.0,))
        """Addresses that failed recently; they are dialled after the others."""
        self._peers: Backoff[PeerId] = Backoff(PEER_PAUSES)
        self._attempts: dict[PeerId, _Attempt] = {}
        self._routes = Routes(lambda _: (), _no_addresses, lambda: (), _no_circuit)
        self._closed = False
        self._own: bytes = swarm.get_peer_id().to_bytes()
        # py-libp2p's own streams, those of gossip above all, use the same connections and do not dial
        vars(swarm)["_select_connection"] = lambda connections, _peer: select_connection(self._own, connections)
        vars(swarm)["dial_peer"] = _refuse_to_dial

    def set_routes(self, routes: Routes) -> None:
        """Set where to find ways to peers; before that only addresses that callers name are dialled."""
        self._routes = routes

    def close(self) -> None:
        """Start no more attempts and emit no more events."""
        self._closed = True

    def connection(self, peer: PeerId) -> SwarmConn | None:
        """Return the live connection to `peer`, chosen by `select_connection`; None if there is none."""
        alive = [connection for connection in self.connections(peer) if not connection.is_closed]
        return select_connection(self._own, alive) if alive else None

    def connections(self, peer: PeerId) -> list[SwarmConn]:
        """Return every connection to `peer` whose yamux session is established."""
        found = [cast(SwarmConn, connection) for connection in self._swarm.get_connections(ID(peer.raw))]
        return [connection for connection in found if connection.muxed_conn.is_established]

    # -------------------------------------------------------------------------------------------- one address

    async def connect(self, address: str) -> PeerId:
        """See `Endpoint.connect`, without its timeout."""
        if CIRCUIT in address:
            return await self._connect_by_relay(address)
        transport, peer = split_peer(address)
        if peer is not None:
            named = peer
            dial = self._dial_dnsaddr if transport.startswith(DNSADDR) else self._dial_trusted
            await self._single_flight(named, address, lambda: dial(transport, named))
            return named
        if transport.startswith(DNSADDR):
            return await self._connect_dnsaddr(address)
        with self._report_outcome(address):
            connection = await dial_tcp(self._swarm, Multiaddr(transport), None)
        return PeerId(connection.muxed_conn.peer_id.to_bytes())

    async def dial_known_addresses(self, peer: PeerId) -> None:
        """Dial the addresses that a peer has reported, even if a circuit to it exists (DCUtR). Raises `NetError`."""
        addresses = self._advertised_addresses(self._routes.known(peer))
        attempts = [partial(self._dial_advertised, address, peer) for address in addresses]
        await happy_eyeballs(str(peer), ATTEMPT_DELAY, attempts)

    async def connect_to_advertised(self, peer: PeerId, transport: str) -> None:
        """Connect to `peer` at an address that a peer reported, without its ``/p2p/`` part. Raises `NetError`."""
        await self._single_flight(peer, transport, lambda: self._dial_advertised(transport, peer))

    async def _dial_trusted(self, transport: str, peer: PeerId) -> None:
        """Dial an address that the operator or a caller named; ``exclude_cidr`` does not apply."""
        await dial_tcp(self._swarm, Multiaddr(transport), peer)

    async def _dial_advertised(self, transport: str, peer: PeerId) -> None:
        """Dial an address that a peer reported. ``exclude_cidr`` also applies to what a name in it resolves to."""
        try:
            if transport.startswith(DNSADDR):
                await self._dial_dnsaddr(transport, peer)
            else:
                await self._dial_not_excluded(transport, peer)
        except NetError:
            self._addresses.record_failure(transport)
            raise
        self._addresses.record_success(transport)

    async def _dial_not_excluded(self, transport: str, peer: PeerId | None) -> PeerId:
        """Dial an address unless a name in it resolves to excluded addresses only; return who answers."""
        connection = await dial_tcp(
            self._swarm, Multiaddr(transport), peer, lambda host: is_excluded_host(host, self._excluded)
        )
        return PeerId(connection.muxed_conn.peer_id.to_bytes())

    async def _connect_dnsaddr(self, address: str) -> PeerId:
        """Connect to the first peer that answers behind a ``/dnsaddr``."""
        reached: list[PeerId] = []

        async def attempt(found: ResolvedAddress) -> None:
            named = found.peer
            if named is None:
                reached.append(await self._dial_not_excluded(found.transport, None))
                return
            if self.connection(named) is None:
                await self._dial_advertised(found.transport, named)
            reached.append(named)

        with self._report_outcome(address):
            attempts = [partial(attempt, found) for found in await self._resolve(address)]
            await happy_eyeballs(address, ATTEMPT_DELAY, attempts)
        return reached[0]

    async def _dial_dnsaddr(self, transport: str, peer: PeerId) -> None:
        """Dial the addresses of one peer behind a ``/dnsaddr``."""
        address = f"{transport}/p2p/{peer}"
        found = await self._resolve(address)
        attempts = [partial(self._dial_advertised, each.transport, peer) for each in found]
        await happy_eyeballs(address, ATTEMPT_DELAY, attempts)

    async def _resolve(self, address: str) -> list[ResolvedAddress]:
        """Resolve a ``/dnsaddr``, without excluded addresses. Raises `UnreachableError` when none is left."""
        found = await self._resolver.resolve(address)
        allowed = [each for each in found if not is_excluded(each.transport, self._excluded)]
        if not allowed:
            resolved = ", ".join(each.transport for each in found)
            raise UnreachableError(f"{address} leads to {resolved}, left out by exclude_cidr")
        return allowed

    async def _connect_by_relay(self, address: str) -> PeerId:
        relay_address, _, rest = address.partition(CIRCUIT)
        _, relay = split_peer(relay_address)
        try:
            target = PeerId.parse(rest.removeprefix("/p2p/"))
        except InvalidIdError as error:
            raise AddressError(f"{address!r} does not end in /p2p/<the peer behind the relay>: {error}") from None
        if relay is None:
            raise AddressError(f"{address!r} does not name its relay: /p2p/<id> before {CIRCUIT}")
        if self.connection(target) is None:
            await self.connect(relay_address)
            await self._single_flight(target, address, lambda: self._dial_circuit(relay, target))
        return target

    async def _dial_circuit(self, relay: PeerId, target: PeerId) -> None:
        await upgrade(self._swarm, await self._routes.open_circuit(relay, target), expected=target)

    # -------------------------------------------------------------------------------------------------- a peer

    async def get_or_connect(self, peer: PeerId) -> SwarmConn:
        """Return the connection to `peer`; make one if there is none.

        Raises:
            RefusedError: the peer was reached, and one side refused the other.
            UnreachableError: no attempt succeeded.
        """
        while (connection := self.connection(peer)) is None:
            await self._wait_for_backoff(peer)
            await self._single_flight(peer, str(peer), lambda: self._connect_with_backoff(peer))
        return connection

    async def _single_flight(self, peer: PeerId, target: str, connect: Callable[[], Awaitable[None]]) -> None:
        """Run `connect` unless a connection exists; join another caller's attempt if one is in progress."""
        while self.connection(peer) is None:
            if self._closed:
                raise StreamClosedError("the endpoint is shut down")
            if (running := self._attempts.get(peer)) is not None:
                await running.done.wait()
                if running.error is not None and running.target == target:
                    raise type(running.error)(str(running.error)) from running.error
                continue
            attempt = self._attempts[peer] = _Attempt(target)
            try:
                with self._report_outcome(target, peer):
                    await connect()
                return
            except NetError as error:
                if self.connection(peer) is not None:
                    return  # the peer has connected to this node meanwhile
                attempt.error = error
                raise
            finally:
                del self._attempts[peer]
                attempt.done.set()

    @contextmanager
    def _report_outcome(self, target: str, peer: PeerId | None = None) -> Iterator[None]:
        """Emit `DialFinished` with outcome and duration of the attempt in the context."""
        began, reason = anyio.current_time(), ""
        outcome: Outcome = "timeout"
        try:
            yield
            outcome = "connected"
        except NetError as error:
            outcome, reason = "refused" if isinstance(error, RefusedError) else "unreachable", str(error)
            raise
        finally:
            if not self._closed:
                made = None if peer is None else self.connection(peer)
                relayed = CIRCUIT in target if made is None else not is_direct(made)
                self._events.emit(DialFinished(target, outcome, anyio.current_time() - began, relayed, reason))

    async def _wait_for_backoff(self, peer: PeerId) -> None:
        """Wait until a peer that has just failed may be tried again, or has connected to this node."""
        while self.connection(peer) is None and self._peers.remaining(peer):  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(min(POLL_INTERVAL, self._peers.remaining(peer)))

    async def _connect_with_backoff(self, peer: PeerId) -> None:
        try:
            await self._race(peer)
        except NetError:
            self._peers.record_failure(peer)
            raise
        if self.connection(peer) is None:  # it was closed at once
            self._peers.record_failure(peer)
        else:
            self._peers.record_success(peer)

    async def _race(self, peer: PeerId) -> None:
        """Race direct dials against relays, and against a connection that the peer makes."""
        race = Race()
        async with anyio.create_task_group() as watching:
            watching.start_soon(self._watch_for_inbound, peer, race)
            with race.scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._race_direct, peer, race)
                    tasks.start_soon(self._race_relays, peer, race)
            watching.cancel_scope.cancel()
        race.raise_if_failed(str(peer))

    async def _watch_for_inbound(self, peer: PeerId, race: Race) -> None:
        """Win the race when the peer has connected to this node."""

        async def wait_until_settled() -> None:
            since = anyio.current_time()
            while anyio.current_time() - since < INBOUND_SETTLE_TIME:
                await anyio.sleep(POLL_INTERVAL)
                if self.connection(peer) is None:
                    since = anyio.current_time()

        await race.run(wait_until_settled())

    async def _race_direct(self, peer: PeerId, race: Race) -> None:
        """Dial known addresses; query the directory when they have failed, or after `LOOK_UP_DELAY`."""
        known = self._advertised_addresses(self._routes.known(peer))
        async with anyio.create_task_group() as tasks:
            ended = anyio.Event()
            tasks.start_soon(self._dial_known, peer, known, race, ended)
            with anyio.move_on_after(LOOK_UP_DELAY):
                await ended.wait()
            await self._look_up_and_dial(peer, known, race)
        race.direct_failed.set()

    async def _dial_known(self, peer: PeerId, addresses: Sequence[str], race: Race, ended: anyio.Event) -> None:
        await self._dial_all(peer, addresses, race)
        ended.set()

    async def _look_up_and_dial(self, peer: PeerId, tried: Sequence[str], race: Race) -> None:
        """Query the directory until it knows addresses, and dial those that were not `tried`."""
        without_addresses = 0
        for pause in LOOK_UP_PAUSES:
            try:
                answer = list(await self._routes.look_up(peer))
            except UnreachableError as error:
                race.add_failure(error)
                break
            if found := self._advertised_addresses(answer):
                await self._dial_all(peer, [address for address in found if address not in tried], race)
                break
            without_addresses += bool(answer)
            if without_addresses == 2:  # only circuits lead to it; once, its addresses may just not be known yet
                break
            await anyio.sleep(pause)

    async def _dial_all(self, peer: PeerId, addresses: Sequence[str], race: Race) -> None:
        async def attempt(address: str) -> None:
            await race.run(self._dial_advertised(address, peer))

        oldest_failure_first = sorted(addresses, key=self._addresses.last_failure_at)
        await run_staggered([partial(attempt, address) for address in oldest_failure_first], ATTEMPT_DELAY)

    async def _race_relays(self, peer: PeerId, race: Race) -> None:
        """Try relays one after the other when direct dials have failed, or after `CIRCUIT_DELAY`."""
        with anyio.move_on_after(CIRCUIT_DELAY):
            await race.direct_failed.wait()

        async def attempt(relay: PeerId) -> None:
            await race.run(self._dial_circuit(relay, peer))

        relays = [relay for relay in self._routes.relays() if relay != peer]
        await run_staggered([partial(attempt, relay) for relay in relays], CIRCUIT_DELAY)

    # ----------------------------------------------------------------------------------------------- addresses

    def is_shareable(self, address: bytes) -> bool:
        """Return whether a peer's address may be passed on to others: any circuit, and what is not excluded."""
        try:
            text = str(Multiaddr(address))
        except ValueError:
            return False
        return CIRCUIT in text or not is_excluded(text, self._excluded)

    def _advertised_addresses(self, addresses: Iterable[bytes]) -> list[str]:
        """Return those of a peer's reported addresses that are TCP and not excluded; log each excluded one once."""
        made: dict[str, None] = {}
        for raw in addresses:
            try:
                address, _ = split_peer(str(Multiaddr(raw)))
            except (ValueError, NetError):
                continue  # QUIC, circuits and malformed ones: not dialled directly
            if is_excluded(address, self._excluded):
                message = "address %s of a peer is left out by exclude_cidr"
                self._exclusions.log(_log, logging.WARNING, address, message, address)
                continue
            made[address] = None
        return list(made)

    def filter_dialable(self, addresses: Iterable[bytes]) -> list[str]:
        """Return those of a peer's reported addresses that can be dialled without a look-up, without ``/p2p/``."""
        return [address for address in self._advertised_addresses(addresses) if not address.startswith(DNSADDR)]


def is_direct(connection: SwarmConn) -> bool:
    """Return whether a connection does not run through a relay."""
    return connection.muxed_conn.get_connection_type() != ConnectionType.RELAYED


def select_connection(own: bytes, connections: Sequence[SwarmConn]) -> SwarmConn:
    """Return which of several connections to one peer to use; the peer selects the same one.

    A direct connection before a circuit, then one dialled by the peer with the smaller id, then the newest: a peer that
    dials again has lost its previous connection.

    Args:
        own: this node's id.
        connections: at least one, in the order in which they were made.
    """
    if len(connections) == 1:
        return connections[0]

    def rank(connection: SwarmConn) -> tuple[bool, bool]:
        muxed = connection.muxed_conn
        return is_direct(connection), (own < muxed.peer_id.to_bytes()) == bool(muxed.is_initiator)

    return max(reversed(connections), key=rank)


async def _refuse_to_dial(peer: ID) -> list[SwarmConn]:
    """Replace `Swarm.dial_peer`, which would dial any reported address, excluded or not, to open a stream."""
    raise SwarmException(f"{PeerId(peer.to_bytes())} is not connected")


async def _no_addresses(_peer: PeerId) -> Iterable[bytes]:
    return ()


async def _no_circuit(relay: PeerId, _peer: PeerId) -> CircuitConnection:
    raise UnreachableError(f"{relay} is no relay")
