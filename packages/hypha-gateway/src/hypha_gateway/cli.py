"""Command line `hypha-gateway`: the commands of every daemon."""

from __future__ import annotations

from collections.abc import Iterator

from hypha_gateway.config import GatewayConfig
from hypha_gateway.service import serve
from hypha_net.node.checks import Check, check_folder
from hypha_net.node.cli import Program


def _checks(config: GatewayConfig, _live: bool) -> Iterator[Check]:
    if config.state_dir is not None:
        yield from check_folder("state_dir", config.state_dir)


main = Program(
    "hypha-gateway",
    lambda: GatewayConfig,
    serve,
    role="gateway",
    example={"state_dir": "gateway-state"},
    checks=_checks,
).cli()
