"""Finding the way to a peer: a connection that is there, its addresses all at once, or a circuit through a relay.

Before it: `engine.open_stream`, which needs a connection. After it: `connections`, which makes one at one address.
"""

from __future__ import annotations

import logging
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

from hypha_net._libp2p.dial.dnsaddr import Found, TextRecords
from hypha_net._libp2p.dial.happy_eyeballs import Race, happy_eyeballs, run_staggered
from hypha_net._libp2p.dial.upgrade import STAGGER, dial, upgrade
from hypha_net._libp2p.relay.circuit import CircuitConnection
from hypha_net.addresses import DNSADDR, Network, is_excluded, is_excluded_host, split_peer
from hypha_net.backoff import Backoff
from hypha_net.errors import AddressError, NetError, RefusedError, StreamClosedError, UnreachableError
from hypha_net.events import DialFinished, Events
from hypha_proto.errors import InvalidIdError
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.dialer")

CIRCUIT_DELAY: Final = 1.0
"""Head start in seconds that direct dials have before a relay is asked, and one relay before the next."""
LOOK_UP_DELAY: Final = 1.0
"""Seconds after which the directory is asked although addresses at hand have not failed yet: they may be old."""
PEER_PAUSES: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds for which a peer that could not be reached is left alone, however often it is asked for meanwhile."""
PEEK: Final = 0.05
SETTLED: Final = 1.0
"""Age in seconds at which a connection that the peer has made ends this node's own attempts.

Not at once: two nodes that dial each other at the same moment would each give up its own for the other's.
"""
LOOK_UPS: Final = (0.1, 0.2, 0.4, 0.0)
"""Pauses in seconds after look-ups that find nothing: a gateway knows a node only moments after it has joined."""
CIRCUIT: Final = "/p2p-circuit"
Outcome = Literal["connected", "refused", "unreachable", "timeout"]


@dataclass(frozen=True, slots=True)
class Routes:
    """Where a dialer learns how to reach a peer."""

    known: Callable[[PeerId], Iterable[bytes]]
    """Addresses at hand, as multiaddr bytes."""
    look_up: Callable[[PeerId], Awaitable[Iterable[bytes]]]
    """Addresses that the directory knows. Raises `UnreachableError`."""
    relays: Callable[[], Sequence[PeerId]]
    """Relays to try."""
    open_circuit: Callable[[PeerId, PeerId], Awaitable[CircuitConnection]]
    """A circuit through a relay to a peer. Raises `NetError`."""


@dataclass(slots=True)
class _Flight:
    """One attempt to connect, shared by all who want it; without an error when its first caller gave up."""

    address: str
    """What was asked for: who asked for something else does not share a failure."""
    done: anyio.Event = field(default_factory=anyio.Event)
    error: NetError | None = None


class Dialer:
    """The connections of one endpoint."""

    def __init__(self, swarm: Swarm, excluded: Sequence[Network], events: Events, names: TextRecords) -> None:
        self._swarm = swarm
        self._excluded = excluded
        self._events = events
        self._names = names
        self._told: set[str] = set()
        self._addresses: Backoff[str] = Backoff((0.0,))
        """Which addresses failed lately: they are dialled after the others."""
        self._peers: Backoff[PeerId] = Backoff(PEER_PAUSES)
        self._flights: dict[PeerId, _Flight] = {}
        self.routes = Routes(lambda _: (), _nothing, lambda: (), _no_circuit)
        self.closed = False
        own = swarm.get_peer_id().to_bytes()
        self._own: bytes = own
        # py-libp2p's own streams, gossip above all, go where ours go, and to nobody who is not connected
        vars(swarm)["_select_connection"] = lambda connections, _peer: select_connection(own, connections)
        vars(swarm)["dial_peer"] = _dial_nobody

    def connection(self, peer: PeerId) -> SwarmConn | None:
        """A living connection to `peer`, of several the one that is `preferred` at both ends."""
        alive = [connection for connection in self.connections(peer) if not connection.is_closed]
        return select_connection(self._own, alive) if alive else None

    def connections(self, peer: PeerId) -> list[SwarmConn]:
        """Every connection to `peer` whose muxer lives."""
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
            dial_it = self._dial_listed if transport.startswith(DNSADDR) else self._dial
            await self._once(named, address, lambda: dial_it(transport, named))
            return named
        if transport.startswith(DNSADDR):
            return await self._connect_listed(address)
        with self._telling(address):
            connection = await dial(self._swarm, Multiaddr(transport), None)
        return PeerId(connection.muxed_conn.peer_id.to_bytes())

    async def dial_known(self, peer: PeerId) -> None:
        """Dial what a peer has reported, also where a circuit leads to it. Raises `NetError` when nobody answers."""
        addresses = self._dialable(self.routes.known(peer))
        await happy_eyeballs(str(peer), STAGGER, [partial(self._dial_reported, address, peer) for address in addresses])

    async def connect_reported(self, peer: PeerId, transport: str) -> None:
        """Connect to `peer` at an address that a peer reported, without its ``/p2p/`` part. Raises `NetError`."""
        await self._once(peer, transport, lambda: self._dial_reported(transport, peer))

    async def _dial(self, transport: str, peer: PeerId) -> None:
        """Dial an address that the operator or a caller named."""
        await dial(self._swarm, Multiaddr(transport), peer)

    async def _dial_reported(self, transport: str, peer: PeerId) -> None:
        """Dial an address that a peer reported; a name in it is held to the same exclusions as an address."""
        try:
            if transport.startswith(DNSADDR):
                await self._dial_listed(transport, peer)
            else:
                await self._dial_allowed(transport, peer)
        except NetError:
            self._addresses.record_failure(transport)
            raise
        self._addresses.record_success(transport)

    async def _dial_allowed(self, transport: str, peer: PeerId | None) -> PeerId:
        """Dial what others have written: no name in it may lead to an excluded address."""
        made = await dial(self._swarm, Multiaddr(transport), peer, lambda host: is_excluded_host(host, self._excluded))
        return PeerId(made.muxed_conn.peer_id.to_bytes())

    async def _connect_listed(self, address: str) -> PeerId:
        """Connect to whichever peer is the first of those that a ``/dnsaddr`` leads to."""
        reached: list[PeerId] = []

        async def attempt(found: Found) -> None:
            named = found.peer
            if named is None:
                reached.append(await self._dial_allowed(found.transport, None))
                return
            if self.connection(named) is None:
                await self._dial_reported(found.transport, named)
            reached.append(named)

        with self._telling(address):
            await happy_eyeballs(address, STAGGER, [partial(attempt, found) for found in await self._listed(address)])
        return reached[0]

    async def _dial_listed(self, transport: str, peer: PeerId) -> None:
        """Dial the addresses of one peer that a ``/dnsaddr`` leads to."""
        address = f"{transport}/p2p/{peer}"
        found = await self._listed(address)
        await happy_eyeballs(address, STAGGER, [partial(self._dial_reported, each.transport, peer) for each in found])

    async def _listed(self, address: str) -> list[Found]:
        """What a ``/dnsaddr`` stands for, without what is excluded. Raises `UnreachableError` when nothing is left."""
        found = await self._names.find(address)
        allowed = [each for each in found if not is_excluded(each.transport, self._excluded)]
        if not allowed:
            leads = ", ".join(each.transport for each in found)
            raise UnreachableError(f"{address} leads to {leads}, left out by exclude_cidr")
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
            await self._once(target, address, lambda: self._dial_circuit(relay, target))
        return target

    async def _dial_circuit(self, relay: PeerId, target: PeerId) -> None:
        await upgrade(self._swarm, await self.routes.open_circuit(relay, target), expected=target)

    # -------------------------------------------------------------------------------------------------- a peer

    async def ensure(self, peer: PeerId) -> SwarmConn:
        """The connection to `peer`, made if need be.

        Raises:
            RefusedError: it was reached, and one side refused the other.
            UnreachableError: there is no way to it.
        """
        while (connection := self.connection(peer)) is None:
            await self._leave_alone(peer)
            await self._once(peer, str(peer), lambda: self._find(peer))
        return connection

    async def _once(self, peer: PeerId, address: str, attempt: Callable[[], Awaitable[None]]) -> None:
        """Run `attempt` unless there is a connection, or somebody else's attempt brings one."""
        while self.connection(peer) is None:
            if self.closed:
                raise StreamClosedError("the endpoint is shut down")
            if (flight := self._flights.get(peer)) is not None:
                await flight.done.wait()
                if flight.error is not None and flight.address == address:
                    raise type(flight.error)(str(flight.error)) from flight.error
                continue
            flight = self._flights[peer] = _Flight(address)
            try:
                with self._telling(address, peer):
                    await attempt()
                return
            except NetError as error:
                if self.connection(peer) is not None:
                    return  # it has come by itself meanwhile
                flight.error = error
                raise
            finally:
                del self._flights[peer]
                flight.done.set()

    @contextmanager
    def _telling(self, address: str, peer: PeerId | None = None) -> Iterator[None]:
        """Emit how an attempt ended, and after how long."""
        began, reason = anyio.current_time(), ""
        outcome: Outcome = "timeout"
        try:
            yield
            outcome = "connected"
        except NetError as error:
            outcome, reason = "refused" if isinstance(error, RefusedError) else "unreachable", str(error)
            raise
        finally:
            if not self.closed:
                made = None if peer is None else self.connection(peer)
                relayed = CIRCUIT in address if made is None else not is_direct(made)
                self._events.emit(DialFinished(address, outcome, anyio.current_time() - began, relayed, reason))

    async def _leave_alone(self, peer: PeerId) -> None:
        """Wait while a peer that has just failed is to be left alone; one that comes by itself ends that."""
        while self.connection(peer) is None and self._peers.remaining(peer):  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(min(PEEK, self._peers.remaining(peer)))

    async def _find(self, peer: PeerId) -> None:
        try:
            await self._find_and_dial(peer)
        except NetError:
            self._peers.record_failure(peer)
            raise
        if self.connection(peer) is None:  # it was over at once
            self._peers.record_failure(peer)
        else:
            self._peers.record_success(peer)

    async def _find_and_dial(self, peer: PeerId) -> None:
        race = Race()
        async with anyio.create_task_group() as watching:
            watching.start_soon(self._may_come, peer, race)
            async with anyio.create_task_group() as tasks:
                race.scope = tasks.cancel_scope
                tasks.start_soon(self._go_direct, peer, race)
                tasks.start_soon(self._go_by_relay, peer, race)
            watching.cancel_scope.cancel()
        race.check(str(peer))

    async def _may_come(self, peer: PeerId, race: Race) -> None:
        """End the race for a peer that has come by itself."""

        async def come() -> None:
            since = anyio.current_time()
            while anyio.current_time() - since < SETTLED:
                await anyio.sleep(PEEK)
                if self.connection(peer) is None:
                    since = anyio.current_time()

        await race.run(come())

    async def _go_direct(self, peer: PeerId, race: Race) -> None:
        tried = self._dialable(self.routes.known(peer))
        async with anyio.create_task_group() as tasks:
            ended = anyio.Event()
            tasks.start_soon(self._dial_known, peer, tried, race, ended)
            with anyio.move_on_after(LOOK_UP_DELAY):
                await ended.wait()
            await self._look_up_and_dial(peer, tried, race)
        race.direct_failed.set()

    async def _dial_known(self, peer: PeerId, addresses: Sequence[str], race: Race, ended: anyio.Event) -> None:
        await self._dial_all(peer, addresses, race)
        ended.set()

    async def _look_up_and_dial(self, peer: PeerId, tried: Sequence[str], race: Race) -> None:
        hidden = 0
        for pause in LOOK_UPS:
            try:
                answer = list(await self.routes.look_up(peer))
            except UnreachableError as error:
                race.failures.append(error)
                break
            if found := self._dialable(answer):
                await self._dial_all(peer, [address for address in found if address not in tried], race)
                break
            hidden += bool(answer)
            if hidden == 2:  # only circuits lead to it; the first time its addresses may just not be known yet
                break
            await anyio.sleep(pause)

    async def _dial_all(self, peer: PeerId, addresses: Sequence[str], race: Race) -> None:
        async def attempt(address: str) -> None:
            await race.run(self._dial_reported(address, peer))

        promising = sorted(addresses, key=self._addresses.last_failure_at)
        await run_staggered([partial(attempt, address) for address in promising], STAGGER)

    async def _go_by_relay(self, peer: PeerId, race: Race) -> None:
        with anyio.move_on_after(CIRCUIT_DELAY):
            await race.direct_failed.wait()

        async def attempt(relay: PeerId) -> None:
            await race.run(self._dial_circuit(relay, peer))

        relays = [relay for relay in self.routes.relays() if relay != peer]
        await run_staggered([partial(attempt, relay) for relay in relays], CIRCUIT_DELAY)

    def passes_on(self, address: bytes) -> bool:
        """Whether a peer's address is told to others: circuits are, and what the operator does not exclude."""
        try:
            text = str(Multiaddr(address))
        except ValueError:
            return False
        return CIRCUIT in text or not is_excluded(text, self._excluded)

    def _dialable(self, addresses: Iterable[bytes]) -> list[str]:
        """Reported addresses that are TCP and not excluded; what is excluded is logged once."""
        made: dict[str, None] = {}
        for raw in addresses:
            try:
                address, _ = split_peer(str(Multiaddr(raw)))
            except (ValueError, NetError):
                continue  # QUIC, circuits and rubbish: nothing that is dialled directly
            if is_excluded(address, self._excluded):
                if address not in self._told and len(self._told) < 4096:
                    self._told.add(address)
                    _log.warning("address %s of a peer is left out by exclude_cidr", address)
                continue
            made[address] = None
        return list(made)

    def dialable(self, addresses: Iterable[bytes]) -> list[str]:
        """Those of a peer's reported addresses that may be dialled as they are, as text without ``/p2p/``."""
        return [address for address in self._dialable(addresses) if not address.startswith(DNSADDR)]


def is_direct(connection: SwarmConn) -> bool:
    """Whether a connection does not run through a relay."""
    return connection.muxed_conn.get_connection_type() != ConnectionType.RELAYED


def select_connection(own: bytes, connections: Sequence[SwarmConn]) -> SwarmConn:
    """Which of several connections to one peer is used; the peer comes to the same.

    A direct one before a circuit, then what the peer with the smaller id has dialled, then the newest: whoever dials
    again has lost what it had.

    Args:
        own: this node's id.
        connections: at least one, in the order in which they came about.
    """
    if len(connections) == 1:
        return connections[0]

    def rank(connection: SwarmConn) -> tuple[bool, bool]:
        muxed = connection.muxed_conn
        return is_direct(connection), (own < muxed.peer_id.to_bytes()) == bool(muxed.is_initiator)

    return max(reversed(connections), key=rank)


async def _dial_nobody(peer: ID) -> list[SwarmConn]:
    """Instead of dials to whatever a peer has reported, excluded or not, while a stream to it is opened."""
    raise SwarmException(f"{PeerId(peer.to_bytes())} is not connected")


async def _nothing(_peer: PeerId) -> Iterable[bytes]:
    return ()


async def _no_circuit(relay: PeerId, _peer: PeerId) -> CircuitConnection:
    raise UnreachableError(f"{relay} is no relay")
