"""Open the real endpoint. py-libp2p is imported here, when it is needed, and nowhere earlier: it costs a second."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hypha_net.rates import Rates, limit_rates

if TYPE_CHECKING:
    from hypha_net._libp2p.engine import Libp2pEndpoint
    from hypha_net.identity import Identity


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
    rates: Rates = field(default_factory=Rates)
    """How fast files may move."""
    require_roles: bool = False
    """Whether a peer whose certificate names no role is refused what only some roles may send."""
    certificate_interval: float = 5.0
    """Seconds between looks at the certificate files and at the chains of live connections. A change of the files
    counts when they look the same twice."""


@asynccontextmanager
async def open_endpoint(identity: Identity, settings: EndpointSettings) -> AsyncIterator[Libp2pEndpoint]:
    """Listen, connect to the gateways and stay connected while the context is open.

    Must run under trio. Gateways are dialled in the background, again and again: use `wait_for_gateway` to wait.

    Raises:
        AddressError: an address cannot be used.
        NetError: a listening port is taken.
    """
    from hypha_net._libp2p.engine import run_engine

    async with run_engine(identity, settings) as endpoint:
        limit_rates(endpoint, settings.rates)
        yield endpoint
