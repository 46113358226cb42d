"""The peers an endpoint is connected to: certificates, roles, what identify reported, and live connections.

Read-only view over the dialer's connections and py-libp2p's peerstore.
"""

from __future__ import annotations

import functools
from typing import Final

from libp2p.host.basic_host import BasicHost
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from hypha_net._libp2p.dial.dialer import Dialer
from hypha_net._libp2p.dial.upgrade import tls_connection_of
from hypha_net._libp2p.gossipsub.setup import PROTOCOLS as GOSSIP_PROTOCOLS
from hypha_net._libp2p.identify.peer_metadata import (
    agent_version,
    listen_addresses,
    observed_host,
    supported_protocols,
)
from hypha_net._libp2p.security.certificate_monitor import LiveConnection
from hypha_net.endpoint import PeerInfo
from hypha_net.identity import CertificateInfo
from hypha_proto.ids import PeerId

_GOSSIP: Final = frozenset(GOSSIP_PROTOCOLS)


class ConnectedPeers:
    """The connected peers of one endpoint."""

    def __init__(self, host: BasicHost, dialer: Dialer) -> None:
        self._host = host
        self._dialer = dialer

    def ids(self) -> list[PeerId]:
        """Return the peers with a live connection."""
        peers = [PeerId(raw.to_bytes()) for raw in list(self._host.get_network().connections)]
        return [peer for peer in peers if self._dialer.connection(peer) is not None]

    def live_connections(self) -> list[LiveConnection]:
        """Return every live connection, for the certificate monitor."""
        pairs = [(peer, connection) for peer in self.ids() for connection in self._dialer.connections(peer)]
        return [LiveConnection(peer, tls_connection_of(each).chain, each.close) for peer, each in pairs]

    def certificate(self, peer: PeerId) -> CertificateInfo | None:
        """Return the certificate of a connected peer."""
        connection = self._dialer.connection(peer)
        return None if connection is None else tls_connection_of(connection).certificate

    def role(self, peer: PeerId) -> str | None:
        """Return the role in a connected peer's certificate, if it has one."""
        certificate = self.certificate(peer)
        return None if certificate is None else certificate.role

    def addresses(self, peer: PeerId) -> tuple[bytes, ...]:
        """Return the addresses at which a peer says it listens, as multiaddr bytes."""
        return listen_addresses(self._host.peerstore, ID(peer.raw))

    def observed_host(self, peer: PeerId) -> str | None:
        """Return this node's own host as `peer` sees it, such as ``/ip4/203.0.113.7``."""
        return observed_host(self._host.peerstore, ID(peer.raw))

    def may_speak_gossip(self, peer: ID) -> bool:
        """Return whether a peer speaks gossipsub, or has not identified yet."""
        known = supported_protocols(self._host.peerstore, peer)
        return not known or not known.isdisjoint(_GOSSIP)

    def info(self, peer: PeerId) -> PeerInfo:
        """Describe a peer for `Endpoint.connected_peers`."""
        store, raw = self._host.peerstore, ID(peer.raw)
        certificate = self.certificate(peer)
        return PeerInfo(
            peer,
            tuple(map(_address_text, listen_addresses(store, raw))),
            agent_version(store, raw),
            supported_protocols(store, raw),
            certificate.not_after if certificate else None,
            certificate.role if certificate else None,
            certificate.subject if certificate else None,
        )


@functools.lru_cache(1024)  # taking one apart costs more than all else that is said of a peer
def _address_text(address: bytes) -> str:
    return str(Multiaddr(address))
