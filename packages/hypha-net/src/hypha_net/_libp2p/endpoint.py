"""`Libp2pEndpoint`: the `Endpoint` over py-libp2p, assembled from the sub-packages beside it.

An outgoing stream: `streams.outbound` → `dial.dialer` → `dial.upgrade` → `security.tls` → `yamux.session`, then
`streams.multistream_select` and `streams.stream`. An incoming one: py-libp2p's swarm accepts the connection
(`dial.upgrade`), `streams.inbound` negotiates, and `Libp2pEndpoint.handle` runs the handler. Opened by
`hypha_net.open_endpoint`.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final, cast

import anyio
import anyio.abc
import trio
from libp2p.abc import IRawConnection
from libp2p.custom_types import TProtocol
from libp2p.identity.identify_push.identify_push import push_identify_to_peer
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import background_trio_service
from libp2p.tools.anyio_service.api import ManagerAPI
from libp2p.tools.anyio_service.trio_manager import TrioManager
from multiaddr import Multiaddr

from hypha_net._libp2p.bootstrap.gateways import Gateways
from hypha_net._libp2p.bootstrap.record_publisher import RecordPublisher
from hypha_net._libp2p.bootstrap.topic_peers import TopicPeers
from hypha_net._libp2p.compat.host import check_port_free, make_host
from hypha_net._libp2p.compat.logging import adopt_library_logs
from hypha_net._libp2p.compat.notifee import EventNotifee
from hypha_net._libp2p.connected_peers import ConnectedPeers
from hypha_net._libp2p.dial.connection_pruning import ConnectionPruner
from hypha_net._libp2p.dial.dialer import Dialer, Routes, is_direct
from hypha_net._libp2p.dial.dnsaddr import DnsaddrResolver
from hypha_net._libp2p.dial.upgrade import upgrade
from hypha_net._libp2p.gossipsub.setup import make_pubsub, retry_registrations
from hypha_net._libp2p.gossipsub.stream_migration import StreamMigrator
from hypha_net._libp2p.gossipsub.subscriptions import Subscriptions
from hypha_net._libp2p.identify.push import ProtocolAnnouncer
from hypha_net._libp2p.identify.retry import IdentifyRetrier
from hypha_net._libp2p.kad import client
from hypha_net._libp2p.kad.messages import PROTOCOL as KAD_PROTOCOL
from hypha_net._libp2p.kad.server import KadServer, KnownPeer
from hypha_net._libp2p.kad.store import RecordStore
from hypha_net._libp2p.relay.circuit import CircuitConnection
from hypha_net._libp2p.relay.client import RelayClient
from hypha_net._libp2p.relay.dcutr import PROTOCOL as DCUTR
from hypha_net._libp2p.relay.dcutr import HolePuncher
from hypha_net._libp2p.relay.messages import HOP, STOP
from hypha_net._libp2p.relay.server import RelayServer
from hypha_net._libp2p.security.certificate_monitor import CertificateMonitor
from hypha_net._libp2p.security.contexts import TlsContexts
from hypha_net._libp2p.security.tls import SecurityState
from hypha_net._libp2p.streams.inbound import ProtocolHandler
from hypha_net._libp2p.streams.outbound import OutboundStreams
from hypha_net._libp2p.streams.stream import Libp2pStream
from hypha_net._libp2p.yamux.session import YamuxSession
from hypha_net.addresses import CIRCUIT, expand_wildcards, split_peer
from hypha_net.authorization import RoleCheck
from hypha_net.endpoint import GossipMessage, PeerInfo, Record, Stream, StreamHandler, Traffic
from hypha_net.errors import NetError, StreamClosedError, StreamResetError, UnreachableError, first_leaf_error
from hypha_net.events import Events
from hypha_net.identity import Identity
from hypha_net.settings import EndpointSettings
from hypha_proto.ids import PeerId
from hypha_proto.protocols import DATASET_RECORD

_log = logging.getLogger("hypha_net.endpoint")

ANNOUNCE_TIMEOUT: Final = 5.0
CLOSE_TIMEOUT: Final = 1.0
ROUND_TRIP_TIMEOUT: Final = 2.0
"""Age in seconds at which a connection whose peer has answered no ping counts as connected all the same."""


class Libp2pEndpoint:
    """See `hypha_net.endpoint.Endpoint`. Opened by `hypha_net.open_endpoint`."""

    def __init__(self, identity: Identity, settings: EndpointSettings, tasks: anyio.abc.TaskGroup) -> None:
        self._identity = identity
        self._settings = settings
        self._tasks = tasks
        self.events = Events()
        """See `Endpoint.events`."""
        self._records = SecurityState(TlsContexts(identity), self.events)
        self._swarm: Swarm | None = None  # the host asks for addresses during its construction
        self._services: list[ManagerAPI] = []
        self.fault: Exception | None = None
        """The error that ended this endpoint, if a py-libp2p service failed; py-libp2p itself does not raise it."""
        self._relay_client = RelayClient(self, self._accept_circuit, self._announce_addresses)
        self._host = make_host(identity, self._records, settings.max_connections, self._own_addresses)
        self._announcer = ProtocolAnnouncer(self._host, tasks)
        self._swarm = cast(Swarm, self._host.get_network())
        self._swarm.register_notifee(EventNotifee(self.events))
        excluded = [ipaddress.ip_network(entry, strict=False) for entry in settings.exclude_cidr]
        self._dialer = Dialer(self._swarm, excluded, self.events, DnsaddrResolver(settings.name_servers))
        self._peers = ConnectedPeers(self._host, self._dialer)
        self._outbound = OutboundStreams(self._dialer, self._host.peerstore)
        pubsub, router = make_pubsub(self._host, self.events, self._may_publish)
        self._gossip = (pubsub, router)
        self._subscriptions = Subscriptions(pubsub, tasks, self.events)
        self._make_dht()
        self._make_relay()
        self._make_gateways()
        self._pruner = ConnectionPruner(
            self._swarm, self._dialer, StreamMigrator(pubsub), self._relay_client, self._relay_server
        )
        self._roles = RoleCheck(self.peer_id, self._peers.role, self.events, required=settings.require_roles)
        self._certificates = CertificateMonitor(identity, self._peers.live_connections, self._use_identity, self.events)

    def _make_dht(self) -> None:
        is_gateway = self._settings.role == "gateway"
        store = self._record_store = RecordStore(self._settings.state_dir) if is_gateway else None
        server = KadServer(
            self._known_peers,
            store,
            self._dialer.is_shareable,
            may_publish=lambda peer: self.is_authorized(peer, DATASET_RECORD),
        )
        self._dht = client.KadClient(
            self, lambda: self._gateways.connected(), self._identity.key.sign, server if is_gateway else None
        )
        self._publisher = RecordPublisher(self._dht)
        self.handle(KAD_PROTOCOL, server.serve)

    def _make_relay(self) -> None:
        is_gateway = self._settings.role == "gateway"
        self._relay_server = RelayServer(self, self._settings.relay, self.events) if is_gateway else None
        if self._relay_server is not None:
            self.handle(HOP, self._relay_server.serve)
        self._can_reserve = self._settings.relay_circuit and self._relay_server is None
        if self._can_reserve:
            self.handle(STOP, self._relay_client.serve)
        self._puncher = HolePuncher(
            self,
            self.events,
            self._hole_punch_addresses,
            self._peers.addresses,
            self._dialer.filter_dialable,
            self._dialer.dial_known_addresses,
            self._upgrade_direct,
        )
        self.handle(DCUTR, self._puncher.serve)

    def _make_gateways(self) -> None:
        self._topic_peers = TopicPeers(self._dialer, self._dht, self._subscriptions)
        self._gateways = Gateways(
            self._dialer,
            self._publisher,
            self._topic_peers,
            self._relay_client if self._can_reserve else None,
        )
        self._dialer.set_routes(
            Routes(
                known=self._peers.addresses,
                look_up=lambda peer: self._dht.find_addresses(peer, client.ASK_TIMEOUT),
                relays=self._gateways.connected,
                open_circuit=self._relay_client.open_circuit,
            )
        )

    # ---------------------------------------------------------------------------------------------- about itself

    @property
    def peer_id(self) -> PeerId:
        """See `Endpoint.peer_id`."""
        return self._identity.peer_id

    @property
    def addresses(self) -> tuple[str, ...]:
        """See `Endpoint.addresses`."""
        return tuple(f"{address}/p2p/{self.peer_id}" for address in self._own_addresses())

    def _own_addresses(self) -> tuple[str, ...]:
        listeners = () if self._swarm is None else tuple(self._swarm.listeners.values())
        bound = [str(address) for listener in listeners for address in listener.get_addrs()]
        own = (*self._settings.external_addresses, *expand_wildcards(bound), *self._relay_client.addresses)
        return tuple(dict.fromkeys(own))

    @property
    def traffic(self) -> Traffic:
        """See `Endpoint.traffic`."""
        return Traffic(self._records.bytes.sent, self._records.bytes.received)

    # ------------------------------------------------------------------------------------------------ connections

    async def connect(self, address: str, *, timeout: float = 10.0) -> PeerId:
        """See `Endpoint.connect`."""
        with anyio.move_on_after(timeout):
            return await self._dialer.connect(address)
        raise UnreachableError(f"{address} did not answer within {timeout:g} s")

    async def disconnect(self, peer: PeerId) -> None:
        """See `Endpoint.disconnect`."""
        for connection in self._dialer.connections(peer):
            await connection.close()

    def is_direct(self, peer: PeerId) -> bool:
        """Return whether there is a connection to `peer` that is not relayed."""
        connection = self._dialer.connection(peer)
        return connection is not None and is_direct(connection)

    async def connect_peer(self, peer: PeerId, *, timeout: float = 10.0) -> None:
        """See `Endpoint.connect_peer`."""
        is_connected = False
        with anyio.move_on_after(timeout):
            while not is_connected:
                connection = await self._dialer.get_or_connect(peer)
                is_connected = True
                if self.round_trip_time(peer) is None:
                    is_connected = await _wait_for_round_trip(cast(YamuxSession, connection.muxed_conn))
        if not is_connected:
            raise UnreachableError(f"{peer} did not answer within {timeout:g} s")

    def round_trip_time(self, peer: PeerId) -> float | None:
        """See `Endpoint.round_trip_time`; while the connection in use is not measured, that of another to the peer."""
        in_use = self._dialer.connection(peer)
        connections = [] if in_use is None else [in_use, *self._dialer.connections(peer)]
        measured = (cast(YamuxSession, connection.muxed_conn).shortest_round_trip for connection in connections)
        return next((seconds for seconds in measured if seconds is not None), None)

    def direct_connections(self, peer: PeerId) -> frozenset[object]:
        """Return the connections to `peer` that are not relayed."""
        return frozenset(filter(is_direct, self._dialer.connections(peer)))

    def connected_peers(self) -> Mapping[PeerId, PeerInfo]:
        """See `Endpoint.connected_peers`."""
        return {peer: self._peers.info(peer) for peer in self._peers.ids()}

    def is_authorized(self, peer: PeerId, what: str) -> bool:
        """See `Endpoint.is_authorized`."""
        return self._roles.is_authorized(peer, what)

    def _may_publish(self, publisher: PeerId, topic: str) -> bool:
        """Return whether a publisher's gossip is accepted; one that is not connected was checked by its gateway."""
        return self._peers.certificate(publisher) is None or self.is_authorized(publisher, topic)

    def _use_identity(self, identity: Identity, contexts: TlsContexts) -> None:
        """Switch to a reloaded identity."""
        self._identity = identity
        self._records.contexts = contexts
        self._gateways.retry_now()

    async def reload_certificates(self) -> bool:
        """Read certificate, trust bundle and revocation lists now; return False if the old ones stay in use.

        Changed files are also read without this call. Peers that are no longer trusted are disconnected.
        """
        return await self._certificates.reload()

    def _known_peers(self) -> list[KnownPeer]:
        """Return the connected peers for the DHT server."""
        return [KnownPeer(peer, partial(self._shared_addresses, peer)) for peer in self._peers.ids()]

    def _shared_addresses(self, peer: PeerId) -> tuple[bytes, ...]:
        """Return a peer's addresses for others, with circuits through this node if it has a reservation here."""
        own = self._peers.addresses(peer)
        if self._relay_server is None or not self._relay_server.has_reservation(peer):
            return own
        circuits = (Multiaddr(f"{address}/p2p-circuit").to_bytes() for address in self.addresses[:8])
        return tuple(dict.fromkeys((*own, *circuits)))

    async def _announce_addresses(self, peer: PeerId) -> None:
        with anyio.move_on_after(ANNOUNCE_TIMEOUT):
            await push_identify_to_peer(self._host, ID(peer.raw))

    async def _upgrade_direct(self, raw: IRawConnection, peer: PeerId) -> None:
        assert self._swarm is not None
        await upgrade(self._swarm, raw, expected=peer)

    def _hole_punch_addresses(self) -> tuple[str, ...]:
        """Return where a peer behind another NAT might reach this node: observed hosts at the listening ports first."""
        listeners = () if self._swarm is None else tuple(self._swarm.listeners.values())
        ports = [int(str(address).split("/")[4]) for listener in listeners for address in listener.get_addrs()]
        hosts = [self._peers.observed_host(gateway) for gateway in self._gateways.connected()]
        observed = [f"{host}/tcp/{port}" for host in hosts if host is not None for port in ports]
        own = [address for address in self._own_addresses() if CIRCUIT not in address]
        return tuple(dict.fromkeys(observed + own)) if ports else ()

    async def _accept_circuit(self, circuit: CircuitConnection, source: PeerId) -> None:
        assert self._swarm is not None
        try:
            connection = await upgrade(self._swarm, circuit, expected=source)
        except UnreachableError as error:
            _log.debug("circuit from %s not accepted: %s", source, error)
            return
        self._tasks.start_soon(self._puncher.punch, source)
        await cast(YamuxSession, connection.muxed_conn).event_closed.wait()

    # ---------------------------------------------------------------------------------------------------- streams

    async def open_stream(
        self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0, request: bytes | None = None
    ) -> Stream:
        """See `Endpoint.open_stream`."""
        return await self._outbound.open(peer, protocols, request, timeout)

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """See `Endpoint.handle`."""

        async def serve(stream: Libp2pStream) -> None:
            if self.is_authorized(stream.peer, protocol):
                await _run_handler(handler, stream)
            else:
                await stream.reset()

        self._host.set_stream_handler(TProtocol(protocol), ProtocolHandler(serve))
        self._announcer.announce()

    # ----------------------------------------------------------------------------------------------------- gossip

    async def publish(self, topic: str, data: bytes) -> None:
        """See `Endpoint.publish`."""
        self._topic_peers.note_publish(topic)
        await self._subscriptions.publish(topic, data)

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[AsyncIterator[GossipMessage]]:
        """See `Endpoint.subscribe`."""
        return self._subscriptions.subscribe(topic)

    async def connect_subscribers(self, topic: str, *, timeout: float = 1.0) -> None:
        """See `Endpoint.connect_subscribers`."""
        await self._topic_peers.connect(topic, timeout)

    def gateways(self) -> Mapping[str, PeerId | None]:
        """See `Endpoint.gateways`."""
        return {address: self._gateways.connected_at(address) for address in self._settings.gateway_addresses}

    def gateway_failures(self) -> Mapping[str, str]:
        """See `Endpoint.gateway_failures`."""
        return self._gateways.failures

    def topic_peers(self, topic: str) -> frozenset[PeerId]:
        """See `Endpoint.topic_peers`."""
        return self._subscriptions.peers(topic)

    # -------------------------------------------------------------------------------------------------- directory

    async def put_record(self, key: bytes, value: bytes, *, ttl: float = 3600.0) -> None:
        """See `Endpoint.put_record`; `bootstrap.record_publisher` renews the record."""
        await self._publisher.publish(key, value, ttl)

    async def find_records(self, key: bytes, *, timeout: float = 5.0) -> list[Record]:
        """See `Endpoint.find_records`."""
        return await self._dht.find(key, timeout)

    def stored_records(self) -> Iterator[Record]:
        """See `Endpoint.stored_records`."""
        return iter(()) if self._record_store is None else self._record_store.records()

    async def find_peers(self, *, timeout: float = 5.0) -> list[PeerId]:
        """See `Endpoint.find_peers`."""
        return list(await self._dht.closest_peers(timeout))

    # ------------------------------------------------------------------------------------------------------- life

    async def wait_for_gateway(self, timeout: float | None = None) -> None:
        """Wait until a gateway is connected; return at once if the settings name none.

        Raises:
            UnreachableError: no gateway was connected within `timeout` seconds.
        """
        if not self._settings.gateway_addresses:
            return
        with anyio.move_on_after(timeout):
            await self._gateways.wait_connected()
            return
        raise UnreachableError(f"no gateway within {timeout:g} s: {', '.join(self._settings.gateway_addresses)}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen, and stay connected to the gateways, while the context is open."""
        assert self._swarm is not None
        listen = [Multiaddr(split_peer(address)[0]) for address in self._settings.listen_addresses]
        pubsub, router = self._gossip
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._host.run(listen))
            await self._swarm.auto_connector.stop()
            if len(self._swarm.listeners) < len(set(map(str, listen))):
                raise NetError(f"cannot listen on {', '.join(self._settings.listen_addresses)}")
            for service in (router, pubsub):
                self._services.append(await stack.enter_async_context(background_trio_service(service)))
            await pubsub.wait_until_ready()
            self._tasks.start_soon(retry_registrations, pubsub, self._peers.may_speak_gossip)
            self._tasks.start_soon(self._pruner.run)
            self._tasks.start_soon(IdentifyRetrier(self._host).run)
            self._tasks.start_soon(self._gateways.renew_records)
            self._tasks.start_soon(self._topic_peers.run)
            for address in self._settings.gateway_addresses:
                self._tasks.start_soon(self._gateways.keep_connected, address)
            self._tasks.start_soon(self._certificates.run, self._settings.certificate_interval)
            if self._record_store is not None:
                self._tasks.start_soon(self._record_store.save_changes)
            try:
                yield
            finally:
                await self._close()

    async def _close(self) -> None:
        services = (*self._services, cast(Swarm, self._host.get_network()).manager)
        faults = [error for service in services for _, error, _ in cast(TrioManager, service)._errors]
        self.fault = next((fault for fault in faults if isinstance(fault, Exception)), None)
        self._dialer.close()
        self._tasks.cancel_scope.cancel()
        with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):
            async with anyio.create_task_group() as tasks:
                for peer in self._peers.ids():
                    tasks.start_soon(self.disconnect, peer)
        with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):
            await self._host.close()


@asynccontextmanager
async def run_endpoint(identity: Identity, settings: EndpointSettings) -> AsyncIterator[Libp2pEndpoint]:
    """See `hypha_net.open_endpoint`."""
    for address in (*settings.gateway_addresses, *settings.external_addresses):
        split_peer(address)
    for address in settings.listen_addresses:
        check_port_free(address)
    adopt_library_logs()
    failure: Exception | None = None
    endpoint: Libp2pEndpoint | None = None
    try:
        async with anyio.create_task_group() as tasks:
            endpoint = Libp2pEndpoint(identity, settings, tasks)
            async with endpoint.running():
                try:
                    yield endpoint
                except Exception as error:  # noqa: BLE001 - raised again below, outside the endpoint's task groups
                    failure = error
    except ExceptionGroup:
        if endpoint is None or endpoint.fault is None:
            raise
    if failure is not None:
        raise failure
    if endpoint is not None and endpoint.fault is not None:
        raise NetError(f"the network engine failed: {first_leaf_error(endpoint.fault)!r}") from endpoint.fault


async def _wait_for_round_trip(session: YamuxSession) -> bool:
    """Wait until a new session is measured or the peer owes the answer; return False if it was closed meanwhile."""

    async def wait(event: trio.Event) -> None:
        await event.wait()
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.cancel_scope.deadline = session.started_at + ROUND_TRIP_TIMEOUT
        tasks.start_soon(wait, session.event_round_trip_measured)
        tasks.start_soon(wait, session.event_closed)
    return not session.event_closed.is_set()


async def _run_handler(handler: StreamHandler, stream: Libp2pStream) -> None:
    """Run a stream handler; close the stream when it returns and reset it when it raises, without raising itself."""
    try:
        await handler(stream)
    except (StreamResetError, StreamClosedError) as error:
        _log.debug("%s with %s ended early: %s", stream.protocol, stream.peer, error)
        await stream.reset()
    except NetError as error:
        _log.warning("%s with %s failed: %s", stream.protocol, stream.peer, error)
        await stream.reset()
    except Exception:  # noqa: BLE001 - an error of a handler resets its stream; the node goes on
        _log.exception("handler of %s failed for %s", stream.protocol, stream.peer)
        await stream.reset()
    except BaseException:
        with anyio.CancelScope(shield=True):
            await stream.reset()
        raise
    else:
        await stream.aclose()
