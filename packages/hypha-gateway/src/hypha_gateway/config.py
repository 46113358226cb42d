"""The TOML of a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from hypha_net.node.config import DialAddress, ListenAddress, NodeConfig


class GatewayConfig(NodeConfig):
    """Everything a gateway can be told."""

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
        description="Folder for the directory's records, so that a restarted gateway still knows which node has which "
        "dataset. Without it they are in memory only.",
    )

    @field_validator("relay_circuit")
    @classmethod
    def _is_the_relay(cls, value: bool) -> bool:
        if value:
            raise ValueError("a gateway is not reached through a relay: leave it out, or write false")
        return value
