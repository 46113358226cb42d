"""Keeps the connections to the gateways, and restores what depends on them after each reconnection.

A gateway that connects is given this node's records (`record_publisher`), and asked for a relay reservation
(`relay.client`) and for peers that this node has to connect to (`topic_peers`). Started by `endpoint`.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Final, cast

import anyio
from libp2p.network.connection.swarm_connection import SwarmConn

from hypha_net._libp2p.bootstrap.record_publisher import RecordPublisher
from hypha_net._libp2p.bootstrap.topic_peers import TopicPeers
from hypha_net._libp2p.dial.dialer import Dialer
from hypha_net._libp2p.dial.upgrade import tls_connection_of
from hypha_net._libp2p.relay.client import RelayClient
from hypha_net._libp2p.yamux.session import YamuxSession
from hypha_net.addresses import split_peer
from hypha_net.backoff import jittered
from hypha_net.errors import NetError, RefusedError, StreamClosedError
from hypha_net.log_throttle import OutageLogSchedule
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.gateways")

CONNECT_TIMEOUT: Final = 10.0
BACKOFF: Final = (0.2, 0.5, 1.0, 2.0, 3.0)
"""Seconds between attempts at a gateway that does not answer, each with jitter; the last repeats: a node reconnects
within 5 s of its gateway's return, and a thousand nodes make 300 attempts a second at a gateway that is down."""
REFUSED_BACKOFF: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
"""The same where one side refuses the other, which an operator has to fix; reloaded certificates end the pause."""
STABLE_AFTER: Final = 5.0
"""Seconds after which a connection to a gateway resets its backoff."""


class Gateways:
    """The gateways of one endpoint."""

    def __init__(
        self,
        dialer: Dialer,
        publisher: RecordPublisher,
        topic_peers: TopicPeers,
        relay: RelayClient | None,
    ) -> None:
        """Make it for one endpoint; without `relay` no reservations are requested."""
        self._dialer = dialer
        self._publisher = publisher
        self._topic_peers = topic_peers
        self._relay = relay
        self._peer_at: dict[str, PeerId] = {}
        """The gateway that was last connected at each address."""
        self.failures: dict[str, str] = {}
        """Why the last attempt has failed, by the addresses of the gateways that are not connected."""
        self._outages: dict[str, OutageLogSchedule] = {}
        self._connected = anyio.Event()
        self._retry = anyio.Event()

    def connected(self) -> list[PeerId]:
        """Return the gateways that are connected now."""
        return [peer for peer in dict.fromkeys(self._peer_at.values()) if self._dialer.connection(peer) is not None]

    def connected_at(self, address: str) -> PeerId | None:
        """Return the gateway that is connected at an address now, or None."""
        peer = self._peer_at.get(address)
        return peer if peer is not None and self._dialer.connection(peer) is not None else None

    def retry_now(self) -> None:
        """End the pauses after failed attempts, because their cause may be gone; further failures are logged again."""
        self._outages.clear()
        self._retry.set()
        self._retry = anyio.Event()

    async def _pause(self, seconds: float) -> None:
        with anyio.move_on_after(max(BACKOFF[0] * random.random(), seconds)):
            await self._retry.wait()

    async def wait_connected(self) -> None:
        """Wait until a gateway is connected."""
        while not self.connected():
            await self._connected.wait()

    async def renew_records(self) -> None:
        """Renew this node's records when they are due, until cancelled."""
        while True:
            await self.wait_connected()
            await self._publisher.wait_until_due()
            if self.connected():
                await self._publisher.renew_due()

    async def keep_connected(self, address: str) -> None:
        """Stay connected to the gateway at `address` until cancelled, with growing pauses after failures."""
        failures = 0
        while True:
            peer = await self._connect(address, failures)
            if peer is None:
                failures += 1
                continue
            self._peer_at[address] = peer
            self._connected.set()
            self._connected = anyio.Event()
            self.failures.pop(address, None)
            outage = self._outages.pop(address, None)
            after = "" if outage is None else f", after {outage.seconds:.0f} s without it"
            _log.info("connected to gateway %s at %s%s", peer, address, after)
            self._check_role(peer, address)
            connected_at = anyio.current_time()
            await self._run_while_connected(peer)
            _log.warning("gateway %s at %s disconnected", peer, address)
            if anyio.current_time() - connected_at >= STABLE_AFTER:
                failures = 0
            else:  # a gateway that shuts down accepts connections and drops them again
                await self._pause(jittered(BACKOFF, failures))
                failures += 1

    async def _connect(self, address: str, failures: int) -> PeerId | None:
        """Connect and return the gateway; on failure wait, counted from the beginning of the attempt: then None."""
        began = anyio.current_time()
        try:
            with anyio.fail_after(CONNECT_TIMEOUT):
                return await self._dialer.connect(address)
        except StreamClosedError:  # this endpoint is closing
            pause = BACKOFF[-1]
        except (NetError, TimeoutError) as error:
            refused = isinstance(error, RefusedError)
            pause = jittered(REFUSED_BACKOFF if refused else BACKOFF, failures)
            self._log_outage(address, error, pause)
        await self._pause(began + pause - anyio.current_time())
        return None

    def _log_outage(self, address: str, error: Exception, pause: float) -> None:
        refused = isinstance(error, RefusedError)
        reason = str(error).removeprefix(f"{split_peer(address)[0]}: ") or f"no answer within {CONNECT_TIMEOUT:g} s"
        self.failures[address] = reason
        due = self._outages.setdefault(address, OutageLogSchedule()).is_due("refused" if refused else "silent")
        level = logging.DEBUG if not due else logging.ERROR if refused else logging.WARNING
        _log.log(level, "gateway %s: %s; again in %.1f s", address, reason, pause)

    def _check_role(self, peer: PeerId, address: str) -> None:
        connection = self._dialer.connection(peer)
        certificate = None if connection is None else tls_connection_of(connection).certificate
        if certificate is not None and certificate.role not in (None, "gateway"):
            _log.error(
                "gateway_addresses %s: %s has the role %s; list gateways only", address, certificate, certificate.role
            )

    async def _run_while_connected(self, gateway: PeerId) -> None:
        """Run the tasks that depend on a gateway until it disconnects."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._publisher.publish_to, gateway)
            tasks.start_soon(self._topic_peers.use_gateway, gateway)
            if self._relay is not None:
                tasks.start_soon(self._relay.keep_reservation, gateway)
            await _wait_disconnected(gateway, self._dialer.connection)
            tasks.cancel_scope.cancel()


async def _wait_disconnected(peer: PeerId, connection_to: Callable[[PeerId], SwarmConn | None]) -> None:
    while (connection := connection_to(peer)) is not None:
        await cast(YamuxSession, connection.muxed_conn).event_closed.wait()
