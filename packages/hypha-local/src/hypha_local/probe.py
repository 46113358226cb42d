"""Health probe: waits until nodes report that they are healthy, using an identity of this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio

from hypha_net import open_endpoint
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, RefusedError
from hypha_net.identity import load_identity
from hypha_net.rpc import call
from hypha_net.settings import EndpointSettings
from hypha_proto.health import HEALTH_CHECK, HealthRequest

PAUSE: Final = 0.1
"""Seconds between two health checks of a node."""


async def wait_until_healthy(identity: Path, addresses: Sequence[str]) -> None:
    """Wait until the nodes at all addresses report that they are healthy.

    Args:
        identity: path prefix of this process's certificate: ``<identity>-cert.pem`` and so on.
        addresses: multiaddresses of the nodes.

    Raises:
        RefusedError: a node rejects this process's certificate.
    """
    prefix = str(identity)
    own = load_identity(Path(f"{prefix}-cert.pem"), Path(f"{prefix}-key.pem"), Path(f"{prefix}-trust.pem"))
    async with (
        open_endpoint(own, EndpointSettings(listen_addresses=(), relay_circuit=False)) as endpoint,
        anyio.create_task_group() as tasks,
    ):
        for address in addresses:
            tasks.start_soon(_wait, endpoint, address)


async def _wait(endpoint: Endpoint, address: str) -> None:
    while True:
        try:
            peer = await endpoint.connect(address, timeout=5.0)
            health = await call(endpoint, peer, HEALTH_CHECK, HealthRequest(), timeout=5.0)
        except RefusedError:
            raise
        except NetError:
            health = None
        if health is not None and health.healthy:
            return
        await anyio.sleep(PAUSE)
