"""Settings of an endpoint: `EndpointSettings` and `RelayLimits`.

Imports nothing of `_libp2p`, so that the daemons' configuration can import it. `node.lifecycle` fills it from the
configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hypha_net.bandwidth import BandwidthLimits


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Limits of a gateway as a relay."""

    max_reservations: int = 1024
    max_circuits: int = 4096
    max_circuits_per_peer: int = 128
    """Maximum number of circuits that one peer may open."""
    max_bytes: int | None = None
    """Maximum number of bytes of a circuit in each direction; None means unlimited."""
    max_duration: float | None = None
    """Maximum duration of a circuit in seconds; None means unlimited."""
    reservation_lifetime: float = 3600.0
    """Seconds after which a reservation expires unless renewed; it ends earlier when its peer disconnects."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Settings of an endpoint, named like the keys of a daemon's configuration."""

    listen_addresses: tuple[str, ...] = ()
    external_addresses: tuple[str, ...] = ()
    gateway_addresses: tuple[str, ...] = ()
    exclude_cidr: tuple[str, ...] = ()
    relay_circuit: bool = True
    role: Literal["gateway", "node"] = "node"
    max_connections: int = 1024
    state_dir: Path | None = None
    """Folder in which a gateway saves DHT records, to restore them after a restart."""
    relay: RelayLimits = RelayLimits()
    """Limits of a gateway as a relay."""
    rates: BandwidthLimits = field(default_factory=BandwidthLimits)
    """Bandwidth limits of file transfers."""
    name_servers: tuple[tuple[str, int], ...] = ()
    """Address and port of the DNS servers that resolve ``/dnsaddr``; empty: the system's."""
    require_roles: bool = False
    """Whether peers without a role in their certificate may not send what is restricted to some roles."""
    certificate_interval: float = 5.0
    """Seconds between two checks of the certificate files and of live connections' chains. Changed files are read when
    two checks in a row find them in the same state."""
