"""Settings of an endpoint; imports nothing of the libp2p implementation, so that both sides may import it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hypha_net.bandwidth import BandwidthLimits


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """How much a gateway carries for nodes that nobody can dial."""

    max_reservations: int = 1024
    max_circuits: int = 4096
    max_circuits_per_peer: int = 128
    """Circuits that one peer has asked for."""
    max_bytes: int | None = None
    """Bytes of a circuit in each direction; none: as many as it takes."""
    max_duration: float | None = None
    """Seconds that a circuit lasts; none: as long as both ends keep it."""
    reservation_lifetime: float = 3600.0
    """Seconds after which a place has to be asked for again; it ends before that when its peer leaves."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """How an endpoint is present in the network; the keys of a daemon's configuration."""

    listen_addresses: tuple[str, ...] = ()
    external_addresses: tuple[str, ...] = ()
    gateway_addresses: tuple[str, ...] = ()
    exclude_cidr: tuple[str, ...] = ()
    relay_circuit: bool = True
    role: Literal["gateway", "node"] = "node"
    max_connections: int = 1024
    state_dir: Path | None = None
    """Where a gateway keeps the directory's records over restarts."""
    relay: RelayLimits = RelayLimits()
    """What a gateway carries at most."""
    rates: BandwidthLimits = field(default_factory=BandwidthLimits)
    """How fast files may move."""
    name_servers: tuple[tuple[str, int], ...] = ()
    """Address and port of those that are asked what a ``/dnsaddr`` stands for; none: the system's."""
    require_roles: bool = False
    """Whether a peer whose certificate names no role is refused what only some roles may send."""
    certificate_interval: float = 5.0
    """Seconds between looks at the certificate files and at the chains of live connections. A change of the files
    counts when they look the same twice."""
