"""Staying in the network: connections to the gateways are kept, and all that hangs on them is made anew.

A gateway that is met gets this node's records, is asked for a place as a relay, and, where it does not forward the
topics this node is in (the gateways of other implementations do not), for the neighbours that do.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import anyio
import anyio.abc
from libp2p.network.connection.swarm_connection import SwarmConn

from hypha_net._libp2p.dial.dialer import Dialer
from hypha_net._libp2p.dial.upgrade import secured
from hypha_net._libp2p.gossipsub.subscriptions import Subscriptions
from hypha_net._libp2p.kad.client import ASK_TIMEOUT, KadClient
from hypha_net._libp2p.relay.client import RelayClient
from hypha_net._libp2p.yamux.session import YamuxSession
from hypha_net.addresses import split_peer
from hypha_net.backoff import jittered
from hypha_net.errors import NetError, RefusedError, StreamClosedError, UnreachableError
from hypha_net.log_throttle import OutageLogSchedule
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.gateways")

CONNECT_TIMEOUT: Final = 10.0
BACKOFF: Final = (0.2, 0.5, 1.0, 2.0, 3.0)
"""Seconds between attempts at a gateway that does not answer, each with jitter; the last repeats: a node is back within
5 s of its gateway's return, and a thousand nodes are 300 attempts a second at one that is gone."""
REFUSED_BACKOFF: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""The same where one side refuses the other, which takes a person to mend; reloading certificates ends the pause."""
LASTING: Final = 5.0
"""Seconds after which a connection to a gateway counts as a success."""
RECORD_INTERVAL: Final = 600.0
"""Seconds after which records are put again at the latest; a third of the shortest life if that is less."""
NEIGHBOUR_INTERVAL: Final = 30.0
NEIGHBOUR_TIMEOUT: Final = 3.0
NEIGHBOURS_AT_ONCE: Final = 8
HEARD_TIMEOUT: Final = 2.0


@dataclass(slots=True)
class _Own:
    value: bytes
    ttl: float
    put_at: float
    """When it was last put at all gateways, or should have been."""

    @property
    def due_at(self) -> float:
        return self.put_at + min(RECORD_INTERVAL, max(0.5, self.ttl / 3))


class OwnRecords:
    """What this node has published, to be put again."""

    def __init__(self, directory: KadClient) -> None:
        self._directory = directory
        self._records: dict[bytes, _Own] = {}
        self._added = anyio.Event()
        self._turns: dict[bytes, anyio.Lock] = {}
        """A key's puts one after the other: else an older value could arrive after a newer one, and win."""

    async def put(self, key: bytes, value: bytes, ttl: float) -> None:
        """Publish a record, and keep it published."""
        self._records[key] = _Own(value, ttl, anyio.current_time())
        self._added.set()
        await self._put_again(key, None)

    async def _put_again(self, key: bytes, among: Sequence[PeerId] | None) -> None:
        async with self._turns.setdefault(key, anyio.Lock()):
            own = self._records[key]
            await self._directory.put(key, own.value, own.ttl, among)

    async def announce_to(self, gateway: PeerId) -> None:
        """Put all of them at one gateway."""
        await self._announce(list(self._records), [gateway])

    async def renew(self) -> None:
        """Put those that are due again, at every gateway."""
        now = anyio.current_time()
        due = [key for key, own in self._records.items() if own.due_at <= now]
        for key in due:
            self._records[key].put_at = now
        await self._announce(due, None)

    async def _announce(self, keys: Iterable[bytes], among: Sequence[PeerId] | None) -> None:
        for key in keys:
            try:
                await self._put_again(key, among)
            except UnreachableError as error:
                _log.warning("record %r is not announced: %s", key[:60], error)

    async def until_due(self) -> None:
        """Sleep until a record has to be put again; one that is added meanwhile may have to be sooner."""
        while True:
            left = min((own.due_at for own in self._records.values()), default=float("inf")) - anyio.current_time()
            if left <= 0:
                return
            self._added = anyio.Event() if self._added.is_set() else self._added
            with anyio.move_on_after(left):
                await self._added.wait()


class Gateways:
    """The gateways of one endpoint."""

    def __init__(
        self, dialer: Dialer, directory: KadClient, subscriptions: Subscriptions, relay: RelayClient | None
    ) -> None:
        self._dialer = dialer
        self._directory = directory
        self._subscriptions = subscriptions
        self._relay = relay
        self._met: dict[str, PeerId] = {}
        self._away: dict[str, OutageLogSchedule] = {}
        self._changed = anyio.Event()
        self._retry = anyio.Event()
        self.records = OwnRecords(directory)

    def connected(self) -> list[PeerId]:
        """Gateways that are connected now."""
        return [peer for peer in dict.fromkeys(self._met.values()) if self._dialer.connection(peer) is not None]

    def try_now(self) -> None:
        """End the pauses after failed attempts, because their reason may be gone; what still fails is told."""
        self._away.clear()
        self._retry.set()
        self._retry = anyio.Event()

    async def _pause(self, seconds: float) -> None:
        with anyio.move_on_after(max(BACKOFF[0] * random.random(), seconds)):
            await self._retry.wait()

    async def wait(self) -> None:
        """Wait until one is connected."""
        while not self.connected():
            await self._changed.wait()

    async def renew_records(self) -> None:
        """Put this node's records again in time, until cancelled; a gateway that is met gets them by itself."""
        while True:
            await self.wait()
            await self.records.until_due()
            if self.connected():
                await self.records.renew()

    async def keep(self, address: str) -> None:
        """Stay connected to the gateway at `address` until cancelled, with growing pauses after failures."""
        failures = 0
        while True:
            peer = await self._connect(address, failures)
            if peer is None:
                failures += 1
                continue
            self._met[address] = peer
            self._changed.set()
            self._changed = anyio.Event()
            away = self._away.pop(address, None)
            after = "" if away is None else f", after {away.seconds:.0f} s without it"
            _log.info("connected to gateway %s at %s%s", peer, address, after)
            self._check_role(peer, address)
            met_at = anyio.current_time()
            await self._stay(peer)
            _log.warning("gateway %s at %s is lost", peer, address)
            if anyio.current_time() - met_at >= LASTING:
                failures = 0
            else:  # one that takes everybody and drops them again, as it does while it ends, is left in peace, too
                await self._pause(jittered(BACKOFF, failures))
                failures += 1

    async def _connect(self, address: str, failures: int) -> PeerId | None:
        """Who the gateway is; none after a failure and a pause, which counts from when the attempt began."""
        began = anyio.current_time()
        try:
            with anyio.fail_after(CONNECT_TIMEOUT):
                return await self._dialer.connect(address)
        except StreamClosedError:  # this endpoint is closing
            pause = BACKOFF[-1]
        except (NetError, TimeoutError) as error:
            refused = isinstance(error, RefusedError)
            pause = jittered(REFUSED_BACKOFF if refused else BACKOFF, failures)
            self._tell_away(address, error, pause)
        await self._pause(began + pause - anyio.current_time())
        return None

    def _tell_away(self, address: str, error: Exception, pause: float) -> None:
        refused = isinstance(error, RefusedError)
        reason = str(error).removeprefix(f"{split_peer(address)[0]}: ") or f"no answer within {CONNECT_TIMEOUT:g} s"
        due = self._away.setdefault(address, OutageLogSchedule()).is_due("refused" if refused else "silent")
        level = logging.DEBUG if not due else logging.ERROR if refused else logging.WARNING
        _log.log(level, "gateway %s: %s; again in %.1f s", address, reason, pause)

    def _check_role(self, peer: PeerId, address: str) -> None:
        connection = self._dialer.connection(peer)
        certificate = None if connection is None else secured(connection).certificate
        if certificate is not None and certificate.role not in (None, "gateway"):
            _log.error(
                "gateway_addresses %s: %s is a %s's; name gateways there", address, certificate, certificate.role
            )

    async def _stay(self, gateway: PeerId) -> None:
        """Do what hangs on a gateway for as long as it is connected."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.records.announce_to, gateway)
            tasks.start_soon(self._meet_neighbours, gateway)
            if self._relay is not None:
                tasks.start_soon(self._relay.keep_reservation, gateway)
            await _until_lost(gateway, self._dialer.connection)
            tasks.cancel_scope.cancel()

    async def _meet_neighbours(self, gateway: PeerId) -> None:
        """Dial peers that the gateway knows, as long as it is not itself in our topics and so forwards nothing."""
        while True:
            with anyio.move_on_after(HEARD_TIMEOUT):  # there is no event for "a peer has said what it subscribes to"
                while not self._subscriptions.heard_from(gateway):  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            wanted = self._subscriptions.topics()
            if wanted and not any(gateway in self._subscriptions.peers(topic) for topic in wanted):
                await self._dial_neighbours()
            await anyio.sleep(NEIGHBOUR_INTERVAL if wanted else HEARD_TIMEOUT)

    async def _dial_neighbours(self) -> None:
        try:
            neighbours = await self._directory.closest_peers(ASK_TIMEOUT)
        except UnreachableError as error:
            _log.info("no neighbours learnt: %s", error)
            return
        turns = anyio.CapacityLimiter(NEIGHBOURS_AT_ONCE)
        async with anyio.create_task_group() as tasks:
            for peer, addresses in neighbours.items():
                tasks.start_soon(self._dial_neighbour, peer, addresses, turns)

    async def _dial_neighbour(self, peer: PeerId, addresses: Iterable[bytes], turns: anyio.CapacityLimiter) -> None:
        async with turns:
            for address in self._dialer.dialable(addresses):
                try:
                    with anyio.fail_after(NEIGHBOUR_TIMEOUT):
                        await self._dialer.connect_reported(peer, address)
                    return
                except (NetError, TimeoutError) as error:
                    _log.debug("neighbour %s at %s: %s", peer, address, error)


async def _until_lost(peer: PeerId, connection_to: Callable[[PeerId], SwarmConn | None]) -> None:
    while (connection := connection_to(peer)) is not None:
        await cast(YamuxSession, connection.muxed_conn).event_closed.wait()
