"""Configuration of a gateway (TOML)."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from hypha_net.node.config.models import DialAddress, ListenAddress, NodeConfig, Section


class RelayConfig(Section):
    """``[relay]``: limits of relaying for nodes that cannot be dialled. The defaults are those of `RelayLimits`."""

    max_reservations: int = Field(
        default=1024, ge=0, description="Nodes that may hold a reservation at this gateway at the same time."
    )
    max_circuits: int = Field(default=4096, ge=0, description="Circuits through this gateway at the same time.")
    max_circuits_per_peer: int = Field(
        default=128, ge=1, description="Circuits that one peer may have requested at the same time."
    )
    max_bytes: int | None = Field(
        default=None, ge=1, description="Bytes of one circuit in each direction; unlimited if left out."
    )
    max_duration: float | None = Field(
        default=None, ge=1, allow_inf_nan=False, description="Seconds that a circuit lasts; unlimited if left out."
    )
    reservation_lifetime: float = Field(
        default=3600.0,
        ge=60,
        allow_inf_nan=False,
        description="Seconds after which a reservation expires; nodes renew it after half of that.",
    )


class GatewayConfig(NodeConfig):
    """Configuration of a gateway."""

    needs_gateway: ClassVar[bool] = False

    listen_addresses: list[ListenAddress] = Field(
        default=["/ip4/0.0.0.0/tcp/4001"],
        description="Multiaddrs to listen on; the nodes of the network name this port.",
    )
    gateway_addresses: list[DialAddress] = Field(
        default=[], description="Multiaddrs of the network's other gateways, with or without /p2p/<id>."
    )
    relay_circuit: bool = Field(
        default=False, description="A gateway is the relay and needs none itself: leave this false."
    )
    state_dir: Path | None = Field(
        default=None,
        description="Folder for the DHT records, so that a restarted gateway still knows which node has which dataset. "
        "Without it they are kept in memory only.",
    )

    relay: RelayConfig = Field(default=RelayConfig(), description="Limits of this gateway's relay.")

    @field_validator("relay_circuit")
    @classmethod
    def _is_the_relay(cls, value: bool) -> bool:
        if value:
            raise ValueError("a gateway is not reached through a relay: leave it out, or write false")
        return value
