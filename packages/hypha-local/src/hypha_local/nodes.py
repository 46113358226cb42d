"""Starts the nodes of a planned network and waits until they are healthy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import anyio

from hypha_local.errors import ProcessFailedError
from hypha_local.network_layout import Folders, NodePlan
from hypha_local.probe import wait_until_healthy
from hypha_local.processes import LocalProcess, Processes, script

START_TIMEOUT: Final = 60.0
"""Seconds for all nodes to become healthy."""


def start_node(processes: Processes, folders: Folders, node: NodePlan) -> LocalProcess:
    """Start a node from its TOML file."""
    config = folders.configuration / f"{node.name}.toml"
    return processes.start(node.name, [script(node.program), "run", "--config", str(config)])


async def wait_for_health(processes: Processes, identity: Path, nodes: Sequence[NodePlan]) -> None:
    """Wait until every node reports that it is healthy; fail at once if one of them exits."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(processes.watch, [node.name for node in nodes])
        with anyio.move_on_after(START_TIMEOUT) as scope:
            await wait_until_healthy(identity, [node.address for node in nodes])
        tasks.cancel_scope.cancel()
    if scope.cancelled_caught:
        raise ProcessFailedError(f"not every node was healthy within {START_TIMEOUT:g} s; see {nodes[0].name}'s log")
