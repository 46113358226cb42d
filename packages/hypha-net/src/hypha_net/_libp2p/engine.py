"""`Libp2pEndpoint`: py-libp2p's host with our connections, and the tasks that keep it in the network."""

from __future__ import annotations

import ipaddress
import logging
import random
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from typing import Any, Final, cast

import anyio
import anyio.abc
import trio
from libp2p import new_host
from libp2p.abc import INetStream, IPeerStore
from libp2p.custom_types import TProtocol
from libp2p.host import basic_host
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify import identify as identify_module
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.update import update_peerstore_from_identify
from libp2p.io.exceptions import IOException
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.stream_muxer.exceptions import MuxedConnError, MuxedStreamError
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from hypha_net._libp2p import kad
from hypha_net._libp2p.connections import YamuxMultistream, dial, patch_swarm
from hypha_net._libp2p.gossip import make_pubsub
from hypha_net._libp2p.kad_messages import PROTOCOL as KAD_PROTOCOL
from hypha_net._libp2p.muxer import PROTOCOL as YAMUX_PROTOCOL
from hypha_net._libp2p.muxer import Muxer
from hypha_net._libp2p.security import TLS_PROTOCOL, SecurityRecords, TlsTransport, libp2p_key_pair
from hypha_net._libp2p.streams import Libp2pStream
from hypha_net._libp2p.subscriptions import Subscriptions
from hypha_net.addresses import expand_wildcards, is_excluded, split_peer
from hypha_net.endpoint import GossipMessage, PeerInfo, Record, Stream, StreamHandler, Traffic
from hypha_net.errors import (
    NetError,
    RefusedError,
    StreamClosedError,
    StreamResetError,
    UnreachableError,
    UnsupportedProtocolError,
)
from hypha_net.identity import Identity
from hypha_net.open import EndpointSettings
from hypha_proto.ids import PeerId
from hypha_proto.protocol import IDENTIFY_VERSION

_log = logging.getLogger("hypha_net.endpoint")

NEGOTIATE_TIMEOUT: Final = 10
CLOSE_TIMEOUT: Final = 2.0
STAGGER: Final = 0.25
"""Seconds between dials to further addresses of one peer while the earlier ones have not answered."""
BACKOFF: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds between attempts at a gateway, each with jitter; the last repeats."""
RECORD_INTERVAL: Final = 600.0
AGENT: Final = "agent_version"


class Libp2pEndpoint:
    """See `hypha_net.endpoint.Endpoint`. Opened by `hypha_net.open_endpoint`."""

    def __init__(self, identity: Identity, settings: EndpointSettings, tasks: anyio.abc.TaskGroup) -> None:
        self._identity = identity
        self._settings = settings
        self._tasks = tasks
        self._records = SecurityRecords()
        self._excluded = [ipaddress.ip_network(entry, strict=False) for entry in settings.exclude_cidr]
        self._host = self._make_host()
        self._swarm = cast(Swarm, self._host.get_network())
        self.pubsub, self.router = make_pubsub(self._host)
        self._subscriptions = Subscriptions(self.pubsub, tasks)
        store = kad.RecordStore(settings.state_dir) if settings.role == "gateway" else None
        self._server = kad.DirectoryServer(self._known_peers, store)
        self._directory = kad.DirectoryClient(self, self._connected_gateways)
        self._gateways: dict[str, PeerId] = {}
        self._own_records: dict[bytes, tuple[bytes, float]] = {}
        self._dials: dict[PeerId, trio.Event] = {}
        self._gateway_found = trio.Event()
        self._refused_excluded: set[str] = set()
        self._closed = False
        self.handle(KAD_PROTOCOL, self._server.serve)

    def _make_host(self) -> BasicHost:
        vars(basic_host)["update_peerstore_from_identify"] = _remember_identify
        identify_module.PROTOCOL_VERSION = IDENTIFY_VERSION
        identify_module.AGENT_VERSION = f"hypha-python/{version('hypha-net')}"
        limit = self._settings.max_connections
        host = new_host(
            key_pair=libp2p_key_pair(self._identity),
            sec_opt={TLS_PROTOCOL: TlsTransport(self._identity, self._records)},
            muxer_opt={TProtocol(YAMUX_PROTOCOL): cast(Any, Muxer)},
            connection_config=ConnectionConfig(
                max_connections=limit, min_connections=0, low_watermark=0, high_watermark=limit
            ),
            disable_identify_address_discovery=True,
            addrs_factory=lambda _candidates: [Multiaddr(address) for address in self._own_addresses()],
            negotiate_timeout=NEGOTIATE_TIMEOUT,
        )
        swarm = cast(Swarm, host.get_network())
        swarm.set_resource_manager(None)  # its limits per peer and second fit public swarms
        swarm.upgrader.muxer_multistream = YamuxMultistream({TProtocol(YAMUX_PROTOCOL): cast(Any, Muxer)})
        swarm._inbound_limiter = trio.CapacityLimiter(limit)
        patch_swarm(swarm)
        return cast(BasicHost, host)

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
        if not hasattr(self, "_swarm"):  # the host asks once while it is made
            return self._settings.external_addresses
        bound = [str(address) for listener in self._swarm.listeners.values() for address in listener.get_addrs()]
        return tuple(dict.fromkeys((*self._settings.external_addresses, *expand_wildcards(bound))))

    @property
    def traffic(self) -> Traffic:
        """See `Endpoint.traffic`."""
        return Traffic(self._records.bytes.sent, self._records.bytes.received)

    # ------------------------------------------------------------------------------------------------ connections

    async def connect(self, address: str, *, timeout: float = 10.0) -> PeerId:
        """See `Endpoint.connect`."""
        transport, peer = split_peer(address)
        if peer is not None and self._connection(peer) is not None:
            return peer
        with anyio.move_on_after(timeout) as scope:
            connection = await dial(self._swarm, Multiaddr(transport), peer)
        if scope.cancelled_caught:
            raise UnreachableError(f"{address} did not answer within {timeout:g} s")
        return PeerId(connection.muxed_conn.peer_id.to_bytes())

    async def disconnect(self, peer: PeerId) -> None:
        """See `Endpoint.disconnect`."""
        for connection in self._swarm.get_connections(ID(peer.raw)):
            await connection.close()

    def connected_peers(self) -> Mapping[PeerId, PeerInfo]:
        """See `Endpoint.connected_peers`."""
        found = {}
        for raw in list(self._swarm.connections):
            peer = PeerId(raw.to_bytes())
            if self._connection(peer) is not None:
                found[peer] = self._describe(raw, peer)
        return found

    def _describe(self, raw: ID, peer: PeerId) -> PeerInfo:
        certificate = self._records.certificates.get(peer)
        try:
            agent = str(self._host.peerstore.get(raw, AGENT))
        except (PeerStoreError, KeyError):
            agent = ""
        try:
            protocols = frozenset(self._host.peerstore.get_protocols(raw))
        except (PeerStoreError, KeyError):
            protocols = frozenset()
        return PeerInfo(
            peer,
            tuple(str(Multiaddr(address)) for address in self._peer_addresses(raw)),
            agent,
            protocols,
            certificate.not_after if certificate else None,
            certificate.role if certificate else None,
        )

    def _peer_addresses(self, raw: ID) -> tuple[bytes, ...]:
        try:
            return tuple(address.to_bytes() for address in self._host.peerstore.addrs(raw))
        except (PeerStoreError, KeyError):
            return ()

    def _known_peers(self) -> list[kad.KnownPeer]:
        raws = list(self._swarm.connections)
        return [kad.KnownPeer(PeerId(raw.to_bytes()), self._peer_addresses(raw)) for raw in raws]

    def _connection(self, peer: PeerId) -> SwarmConn | None:
        for connection in self._swarm.get_connections(ID(peer.raw)):
            muxed = cast(SwarmConn, connection).muxed_conn
            if muxed.is_established and not connection.is_closed:
                return cast(SwarmConn, connection)
        return None

    async def _ensure_connected(self, peer: PeerId, timeout: float) -> SwarmConn:
        """The connection to `peer`; simultaneous callers share one dial."""
        while (connection := self._connection(peer)) is None:
            if self._closed:
                raise StreamClosedError("the endpoint is shut down")
            if peer in self._dials:
                await self._dials[peer].wait()
                if (connection := self._connection(peer)) is not None:
                    return connection
                raise UnreachableError(f"{peer} cannot be reached")
            self._dials[peer] = trio.Event()
            try:
                await self._find_and_dial(peer, timeout)
            finally:
                self._dials.pop(peer).set()
        return connection

    async def _find_and_dial(self, peer: PeerId, timeout: float) -> None:
        addresses = [bytes(address) for address in self._peer_addresses(ID(peer.raw))]
        if not addresses:
            addresses = await self._directory.find_addresses(peer, min(timeout, kad.ASK_TIMEOUT))
        dialable = self._dialable(addresses)
        if not dialable:
            raise UnreachableError(f"no address of {peer} is known")
        failures: list[str] = []
        done = trio.Event()

        async def attempt(address: str, delay: float) -> None:
            with anyio.move_on_after(delay):
                await done.wait()
            if done.is_set():
                return
            try:
                await dial(self._swarm, Multiaddr(address), peer)
                done.set()
                tasks.cancel_scope.cancel()
            except UnreachableError as error:
                failures.append(str(error))

        async with anyio.create_task_group() as tasks:
            for index, address in enumerate(dialable):
                tasks.start_soon(attempt, address, index * STAGGER)
        if not done.is_set():
            raise UnreachableError(f"{peer} cannot be reached: " + "; ".join(failures))

    def _dialable(self, addresses: Sequence[bytes]) -> list[str]:
        """Reported addresses that are TCP and not excluded; what is excluded is logged once."""
        made: dict[str, None] = {}
        for raw in addresses:
            try:
                address, _ = split_peer(str(Multiaddr(raw)))
            except (ValueError, NetError):
                continue  # QUIC, circuits and rubbish: nothing that is dialled directly
            if is_excluded(address, self._excluded):
                if address not in self._refused_excluded and len(self._refused_excluded) < 4096:
                    self._refused_excluded.add(address)
                    _log.warning("address %s of a peer is left out by exclude_cidr", address)
                continue
            made[address] = None
        return list(made)

    # ---------------------------------------------------------------------------------------------------- streams

    async def open_stream(self, peer: PeerId, protocols: Sequence[str], *, timeout: float = 10.0) -> Stream:
        """See `Endpoint.open_stream`."""
        with anyio.move_on_after(timeout) as scope:
            connection = await self._ensure_connected(peer, timeout)
            return await self._negotiate(connection, peer, protocols)
        assert scope.cancelled_caught
        raise UnreachableError(f"{peer} did not answer within {timeout:g} s")

    async def _negotiate(self, connection: SwarmConn, peer: PeerId, protocols: Sequence[str]) -> Stream:
        try:
            stream = await connection.new_stream()
        except (MuxedConnError, MuxedStreamError) as error:
            raise UnreachableError(f"{peer}: {error}") from error
        agreed = False
        try:
            selected = await self._host.multiselect_client.select_one_of(
                [TProtocol(protocol) for protocol in protocols], MultiselectCommunicator(stream), NEGOTIATE_TIMEOUT
            )
            stream.set_protocol(selected)
            agreed = True
        except MultiselectClientError as error:
            if self._connection(peer) is None:
                raise UnreachableError(f"{peer}: the connection broke off") from error
            raise UnsupportedProtocolError(f"{peer} speaks none of {', '.join(protocols)}") from error
        except (IOException, MuxedConnError, MuxedStreamError) as error:
            raise UnreachableError(f"{peer}: {error}") from error
        finally:
            if not agreed:
                with anyio.CancelScope(shield=True):
                    await stream.reset()
        return Libp2pStream(stream)

    def handle(self, protocol: str, handler: StreamHandler) -> None:
        """See `Endpoint.handle`."""

        async def serve(net_stream: INetStream) -> None:
            stream = Libp2pStream(net_stream)
            try:
                await handler(stream)
            except (StreamResetError, StreamClosedError) as error:
                _log.debug("%s with %s ended early: %s", protocol, stream.peer, error)
                await stream.reset()
            except Exception:  # noqa: BLE001 - a handler's fault breaks its stream, never the node
                _log.exception("serving %s for %s failed", protocol, stream.peer)
                await stream.reset()
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await stream.reset()
                raise
            else:
                await stream.aclose()

        self._host.set_stream_handler(TProtocol(protocol), serve)

    def unhandle(self, protocol: str) -> None:
        """See `Endpoint.unhandle`."""
        self._host.remove_stream_handler(TProtocol(protocol))

    # ----------------------------------------------------------------------------------------------------- gossip

    async def publish(self, topic: str, data: bytes) -> None:
        """See `Endpoint.publish`."""
        await self._subscriptions.publish(topic, data)

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[AsyncIterator[GossipMessage]]:
        """See `Endpoint.subscribe`."""
        return self._subscriptions.subscribe(topic)

    def topic_peers(self, topic: str) -> frozenset[PeerId]:
        """See `Endpoint.topic_peers`."""
        return self._subscriptions.peers(topic)

    # -------------------------------------------------------------------------------------------------- directory

    async def put_record(self, key: bytes, value: bytes, *, ttl: float = 3600.0) -> None:
        """See `Endpoint.put_record`; put again whenever a gateway is met anew."""
        self._own_records[key] = (value, ttl)
        await self._directory.put(key, value, ttl)

    async def find_records(self, key: bytes, *, timeout: float = 5.0) -> list[Record]:
        """See `Endpoint.find_records`."""
        return await self._directory.find(key, timeout)

    def _connected_gateways(self) -> list[PeerId]:
        return [peer for peer in dict.fromkeys(self._gateways.values()) if self._connection(peer) is not None]

    # --------------------------------------------------------------------------------------------------- gateways

    async def wait_for_gateway(self) -> None:
        """Wait until a gateway is connected."""
        await self._gateway_found.wait()

    async def _keep_gateway(self, address: str) -> None:
        """Stay connected to the gateway at `address`, with growing pauses between attempts that fail."""
        failures = 0
        while True:
            try:
                peer = await self.connect(address)
            except NetError as error:
                pause = BACKOFF[min(failures, len(BACKOFF) - 1)] * random.uniform(0.75, 1.25)
                level = logging.ERROR if isinstance(error, RefusedError) else logging.WARNING
                _log.log(level, "gateway %s: %s; again in %.1f s", address, error, pause)
                failures += 1
                await anyio.sleep(pause)
                continue
            failures = 0
            self._gateways[address] = peer
            _log.info("connected to gateway %s at %s", peer, address)
            self._gateway_found.set()
            await self._announce_own_records()
            await self._meet_neighbours(peer)
            await self._wait_for_loss(peer)
            _log.warning("gateway %s at %s is lost", peer, address)

    async def _announce_own_records(self) -> None:
        for key, (value, ttl) in list(self._own_records.items()):
            try:
                await self._directory.put(key, value, ttl)
            except UnreachableError as error:
                _log.warning("record %r is not announced: %s", key[:60], error)

    async def _meet_neighbours(self, gateway: PeerId) -> None:
        """Dial peers that the gateway knows when it is not itself in our topics: then it forwards no gossip."""
        with anyio.move_on_after(2.0):  # gossipsub has no event for "a peer has said what it subscribes to"
            while not self._subscriptions.heard_from(gateway):  # noqa: ASYNC110
                await anyio.sleep(0.05)
        wanted = self._subscriptions.topics()
        if not wanted or any(gateway in self.topic_peers(topic) for topic in wanted):
            return
        try:
            neighbours = await self._directory.neighbours(kad.ASK_TIMEOUT)
        except UnreachableError as error:
            _log.info("no neighbours learnt: %s", error)
            return
        for peer, addresses in neighbours.items():
            for address in self._dialable(addresses):
                try:
                    await self.connect(f"{address}/p2p/{peer}", timeout=3.0)
                    break
                except NetError as error:
                    _log.debug("neighbour %s: %s", peer, error)

    async def _wait_for_loss(self, peer: PeerId) -> None:
        while (connection := self._connection(peer)) is not None:
            with anyio.move_on_after(RECORD_INTERVAL):
                await cast(Muxer, connection.muxed_conn).event_closed.wait()
            if not connection.muxed_conn.is_closed:
                await self._announce_own_records()

    # ------------------------------------------------------------------------------------------------------- life

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen and keep the gateways while the context is open."""
        listen = [Multiaddr(split_peer(address)[0]) for address in self._settings.listen_addresses]
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._host.run(listen))
            await self._swarm.auto_connector.stop()
            if len(self._swarm.listeners) < len(set(map(str, listen))):
                raise NetError(f"cannot listen on {', '.join(self._settings.listen_addresses)}")
            await stack.enter_async_context(background_trio_service(self.router))
            await stack.enter_async_context(background_trio_service(self.pubsub))
            await self.pubsub.wait_until_ready()
            for address in self._settings.gateway_addresses:
                self._tasks.start_soon(self._keep_gateway, address)
            try:
                yield
            finally:
                self._closed = True
                self._tasks.cancel_scope.cancel()
                with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):
                    await self._close_connections()
                with anyio.move_on_after(CLOSE_TIMEOUT, shield=True):
                    await self._host.close()

    async def _close_connections(self) -> None:
        async with anyio.create_task_group() as tasks:
            for connections in list(self._swarm.connections.values()):
                for connection in list(connections):
                    tasks.start_soon(connection.close)


async def _remember_identify(peerstore: IPeerStore, peer_id: ID, message: Identify) -> None:
    """What py-libp2p keeps of an identify message, and the agent, which it drops."""
    peerstore.put(peer_id, AGENT, message.agent_version[:200])
    await update_peerstore_from_identify(peerstore, peer_id, message)


def _check_port_free(address: str) -> None:
    """Listeners share a port silently (SO_REUSEPORT): bind it once without, which fails when it is taken."""
    parts = split_peer(address)[0].split("/")
    if parts[4] == "0":
        return
    family = socket.AF_INET6 if parts[1] == "ip6" else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((parts[2], int(parts[4])))
        except OSError as error:
            raise NetError(f"listen_addresses {address}: {error.strerror}; another program uses the port?") from error


@asynccontextmanager
async def run_engine(identity: Identity, settings: EndpointSettings) -> AsyncIterator[Libp2pEndpoint]:
    """See `hypha_net.open_endpoint`."""
    for address in (*settings.gateway_addresses, *settings.external_addresses):
        split_peer(address)
    for address in settings.listen_addresses:
        _check_port_free(address)
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        endpoint = Libp2pEndpoint(identity, settings, tasks)
        async with endpoint.running():
            try:
                yield endpoint
            except Exception as error:  # noqa: BLE001 - raised again below, out of the engine's task groups
                failure = error
    if failure is not None:
        raise failure
