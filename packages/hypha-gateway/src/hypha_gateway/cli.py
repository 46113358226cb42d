"""Command line `hypha-gateway`: the commands of every daemon."""

from __future__ import annotations

from hypha_gateway.config import GatewayConfig
from hypha_gateway.service import serve
from hypha_net.node.cli import daemon_cli

main = daemon_cli("hypha-gateway", GatewayConfig, serve, role="gateway", example={"state_dir": "gateway-state"})
