"""Several leaf nodes in one process: all subscribe to a topic, and the first one publishes."""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack
from typing import Any

import anyio

from benchmarks.children import options, serve_commands_async
from benchmarks.programs.node import open_node
from benchmarks.run import TOPIC


class Leaves:
    """Commands of the parent."""

    def __init__(self, endpoints: list[Any]) -> None:
        self._endpoints = endpoints
        self._delivery_times: list[float] = []

    async def subscribe(self, endpoint: Any, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with endpoint.subscribe(TOPIC) as messages:
            task_status.started()
            async for message in messages:
                self._delivery_times.append(time.monotonic() - float(message.data))

    async def ready(self) -> bool:
        """Return whether every node knows a subscriber of the topic."""
        return all(endpoint.topic_peers(TOPIC) for endpoint in self._endpoints)

    async def publish(self) -> None:
        """Publish the current time from the first node."""
        await self._endpoints[0].publish(TOPIC, str(time.monotonic()).encode())

    async def take_delivery_times(self) -> list[float]:
        """Return the delivery times in seconds since the last call."""
        times, self._delivery_times = self._delivery_times, []
        return times


async def main() -> None:
    given = options()
    async with AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(open_node(files, given["gateway"])) for files in given["nodes"]]
        leaves = Leaves(endpoints)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        if given.get("topic"):
            for endpoint in endpoints:
                await tasks.start(leaves.subscribe, endpoint)
        await serve_commands_async(
            {}, {name: getattr(leaves, name) for name in ("ready", "publish", "take_delivery_times")}
        )
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    anyio.run(main, backend="trio")
