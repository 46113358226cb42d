"""Starts the nodes of a planned network and waits until they are healthy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread

from hypha_local.certificates import peer_names, write_certificates
from hypha_local.display import Display
from hypha_local.errors import ProcessFailedError
from hypha_local.network_layout import SPARE, Folders, NodePlan
from hypha_local.processes import LocalProcess, Processes, script
from hypha_net import open_endpoint
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, RefusedError
from hypha_net.identity import load_identity
from hypha_net.rpc import call
from hypha_net.settings import EndpointSettings
from hypha_proto.health import HEALTH_CHECK, HealthRequest

START_TIMEOUT: Final = 60.0
"""Seconds for all nodes to become healthy."""
PAUSE: Final = 0.1
"""Seconds between two health checks of a node."""


def start_node(processes: Processes, folders: Folders, node: NodePlan) -> LocalProcess:
    """Start a node from its TOML file."""
    config = folders.configuration / f"{node.name}.toml"
    return processes.start(node.name, [script(node.program), "run", "--config", str(config)])


async def start_network(
    processes: Processes,
    folders: Folders,
    nodes: Sequence[NodePlan],
    display: Display,
    make_data: Callable[[], Awaitable[None]],
) -> None:
    """Create certificates and data; start every node except the scheduler and the spare worker, and wait for them.

    Args:
        processes: where they are started.
        folders: the run directory, with configuration files.
        nodes: all nodes.
        display: shows that they are healthy.
        make_data: makes the datasets, while the other nodes start.
    """
    identity = await anyio.to_thread.run_sync(write_certificates, folders.certificates, nodes)
    display.names = peer_names(folders.certificates, nodes)
    data, others = nodes[1], [node for node in nodes if node.role in ("gateway", "worker") and node.name != SPARE]
    for node in others:
        start_node(processes, folders, node)
    await make_data()
    start_node(processes, folders, data)
    await wait_for_health(processes, identity, [*others, data])
    display.step(f"{len(others) + 1} nodes up and healthy: " + ", ".join(node.name for node in (*others, data)))


async def wait_for_health(processes: Processes, identity: Path, nodes: Sequence[NodePlan]) -> None:
    """Wait until every node reports that it is healthy; fail at once if one of them exits."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(processes.watch, [node.name for node in nodes])
        with anyio.move_on_after(START_TIMEOUT) as scope:
            await wait_until_healthy(identity, [node.address for node in nodes])
        tasks.cancel_scope.cancel()
    if scope.cancelled_caught:
        raise ProcessFailedError(f"not every node was healthy within {START_TIMEOUT:g} s; see {nodes[0].name}'s log")


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
