"""py-libp2p's host, made with our transport and muxer, and what of it has to be replaced or turned off."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Final, cast

from libp2p import new_host
from libp2p.custom_types import TProtocol
from libp2p.host import basic_host
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify import identify as identify_module
from libp2p.identity.identify_push import identify_push as push_module
from libp2p.network.config import ConnectionConfig
from libp2p.network.swarm import Swarm
from multiaddr import Multiaddr

from hypha_net._libp2p.compat.multiselect_limits import contain
from hypha_net._libp2p.dial.upgrade import YamuxMultistream, patch_swarm
from hypha_net._libp2p.identify.peer_metadata import store_identify
from hypha_net._libp2p.security.tls import TLS_PROTOCOL, SecurityRecords, TlsTransport, libp2p_key_pair
from hypha_net._libp2p.streams.inbound import NEGOTIATE_TIMEOUT, Inbound
from hypha_net._libp2p.yamux.session import PROTOCOL, YamuxSession
from hypha_net.addresses import DNSADDR, split_peer
from hypha_net.errors import AddressError, NetError
from hypha_net.events import Events
from hypha_net.identity import Identity
from hypha_proto.protocols import IDENTIFY_VERSION

_LISTEN: Final = "/ip4/0.0.0.0/tcp/4001"


def make_host(
    identity: Identity, records: SecurityRecords, max_connections: int, own_addresses: Callable[[], Sequence[str]]
) -> BasicHost:
    """A host that speaks mutual TLS and our yamux, and reports `own_addresses` (without ``/p2p/``) to peers."""
    for module in (basic_host, push_module):
        vars(module)["update_peerstore_from_identify"] = store_identify
    identify_module.PROTOCOL_VERSION = IDENTIFY_VERSION
    identify_module.AGENT_VERSION = f"hypha-python/{version('hypha-net')}"
    host = new_host(
        key_pair=libp2p_key_pair(identity),
        sec_opt={TLS_PROTOCOL: TlsTransport(identity, records)},
        muxer_opt={TProtocol(PROTOCOL): cast(Any, YamuxSession)},
        connection_config=ConnectionConfig(
            max_connections=max_connections,
            min_connections=0,
            low_watermark=0,
            high_watermark=max_connections,
            max_connections_per_peer=8,
        ),
        disable_identify_address_discovery=True,
        negotiate_timeout=NEGOTIATE_TIMEOUT,
    )
    # py-libp2p's own cuts a circuit's address at its first /p2p/, which makes it the relay's
    vars(host)["get_addrs"] = lambda: [Multiaddr(f"{address}/p2p/{identity.peer_id}") for address in own_addresses()]
    contain()
    inbound = Inbound(cast(BasicHost, host).multiselect.handlers)
    _prepare(cast(Swarm, host.get_network()), records.events, inbound)
    return cast(BasicHost, host)


def _prepare(swarm: Swarm, events: Events, inbound: Inbound) -> None:
    swarm.set_resource_manager(None)  # its limits per peer and second fit public swarms
    swarm.upgrader.muxer_multistream = YamuxMultistream(inbound.serve)
    vars(swarm.auto_connector)["maybe_connect"] = _dial_nobody
    patch_swarm(swarm, events)


async def _dial_nobody() -> None:
    """Instead of the automatic dials to everyone in the peerstore."""


def check_port_free(address: str) -> None:
    """Listeners share a port silently (SO_REUSEPORT): bind it once without, which fails when it is taken.

    Raises:
        NetError: another program has the port, or this machine does not have the address, or it is none of a machine.
    """
    if address.startswith(DNSADDR):
        raise AddressError(f"listen_addresses {address}: a name stands for many addresses; write one such as {_LISTEN}")
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
