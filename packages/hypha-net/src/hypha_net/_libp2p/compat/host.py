"""Make py-libp2p's host with our TLS, yamux and stream handling, and replace or disable parts of it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Final, cast

from libp2p.custom_types import TProtocol
from libp2p.host import basic_host
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify import identify as identify_module
from libp2p.identity.identify_push import identify_push as push_module
from libp2p.network.config import ConnectionConfig
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from hypha_net._libp2p.compat.multiselect_limits import limit_multiselect_lines
from hypha_net._libp2p.compat.swarm import YamuxMultistream, patch_swarm
from hypha_net._libp2p.identify.peer_metadata import AGENT, store_identify
from hypha_net._libp2p.security.tls import TLS_PROTOCOL, SecurityState, TlsTransport, libp2p_key_pair
from hypha_net._libp2p.streams.inbound import NEGOTIATE_TIMEOUT, InboundStreams
from hypha_net._libp2p.yamux.session import PROTOCOL, YamuxSession
from hypha_net.addresses import DNSADDR, split_peer
from hypha_net.errors import AddressError, NetError
from hypha_net.events import Events
from hypha_net.identity import Identity
from hypha_proto.protocols import IDENTIFY_VERSION

_LISTEN: Final = "/ip4/0.0.0.0/tcp/4001"


def make_host(
    identity: Identity, records: SecurityState, max_connections: int, own_addresses: Callable[[], Sequence[str]]
) -> BasicHost:
    """Make a host that speaks mutual TLS and our yamux, and reports `own_addresses` (without ``/p2p/``) to peers."""
    for module in (basic_host, push_module):
        vars(module)["update_peerstore_from_identify"] = store_identify
    identify_module.PROTOCOL_VERSION = IDENTIFY_VERSION
    identify_module.AGENT_VERSION = f"{AGENT}/{version('hypha-net')}"
    swarm = _build_swarm(identity, records, max_connections)
    host = BasicHost(swarm, negotiate_timeout=NEGOTIATE_TIMEOUT, disable_identify_address_discovery=True)
    # py-libp2p's own method cuts a circuit's address at its first /p2p/, which makes it the relay's
    vars(host)["get_addrs"] = lambda: [Multiaddr(f"{address}/p2p/{identity.peer_id}") for address in own_addresses()]
    limit_multiselect_lines()
    _prepare(swarm, records.events, InboundStreams(host.multiselect.handlers))
    return host


def _build_swarm(identity: Identity, records: SecurityState, max_connections: int) -> Swarm:
    """Build the swarm that `libp2p.new_swarm` builds from these settings; that function needs all of py-libp2p.

    There is no resource manager: its limits per peer and second are made for public swarms.
    """
    keys = libp2p_key_pair(identity)
    peer = ID.from_pubkey(keys.public_key)
    peerstore = PeerStore()
    peerstore.add_key_pair(peer, keys)
    upgrader = TransportUpgrader(
        {TLS_PROTOCOL: TlsTransport(identity, records)}, {TProtocol(PROTOCOL): cast(Any, YamuxSession)}
    )
    config = ConnectionConfig(
        max_connections=max_connections,
        min_connections=0,
        low_watermark=0,
        high_watermark=max_connections,
        max_connections_per_peer=8,
    )
    return Swarm(peer, peerstore, upgrader, [TCP()], connection_config=config)


def _prepare(swarm: Swarm, events: Events, inbound: InboundStreams) -> None:
    swarm.upgrader.muxer_multistream = YamuxMultistream(inbound.serve)
    vars(swarm.auto_connector)["maybe_connect"] = _dial_nobody
    patch_swarm(swarm, events)


async def _dial_nobody() -> None:
    """Replace the auto-connector, which dials every peer in the peerstore."""


def check_port_free(address: str) -> None:
    """Check that a listen address can be bound. Listeners use SO_REUSEPORT, which would share a port silently.

    Raises:
        NetError: another program uses the port, or the address is not one of this machine.
        AddressError: it is a ``/dnsaddr``.
    """
    if address.startswith(DNSADDR):
        raise AddressError(f"listen_addresses {address}: a name may have many addresses; write one such as {_LISTEN}")
    _, kind, host, _, port = split_peer(address)[0].split("/")
    if port == "0":
        return
    family = socket.AF_INET6 if kind == "ip6" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except OSError as error:
        raise NetError(f"listen_addresses {address}: {error.strerror}; another program uses the port?") from error
