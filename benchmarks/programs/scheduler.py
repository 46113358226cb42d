"""Scheduler that places jobs and releases their leases at once, with an endpoint of its own for each."""

from __future__ import annotations

import logging
from typing import Any

import anyio

from benchmarks.children import options, serve_commands_async
from benchmarks.programs.node import open_node
from benchmarks.simulation.job import Demand, place_job
from hypha_scheduler.allocation.leases import HeldLeases


class Scheduler:
    """Commands of the parent."""

    def __init__(self, node: dict[str, Any]) -> None:
        self._node = node

    async def place(self, leases: int) -> float:
        """Place a job; return the seconds from its first request until all leases were held."""
        async with open_node(**self._node) as endpoint, place_job(endpoint, Demand(leases - 1), HeldLeases()) as placed:
            if placed.failure:
                raise TimeoutError(placed.failure)
            return placed.seconds


async def main() -> None:
    await serve_commands_async({}, {"place": Scheduler(options()).place})


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    anyio.run(main, backend="trio")
