"""Several nodes of one network in one process: they hear a topic, and any of them may speak."""

from __future__ import annotations

import logging
import time
from contextlib import AsyncExitStack
from typing import Any

import anyio

from benchmarks.children import answer_async, options
from benchmarks.programs.node import opened
from benchmarks.setting import TOPIC


class Leaves:
    """What the parent may ask of them."""

    def __init__(self, endpoints: list[Any]) -> None:
        self._endpoints = endpoints
        self._heard: list[float] = []

    async def hear(self, endpoint: Any, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with endpoint.subscribe(TOPIC) as messages:
            task_status.started()
            async for message in messages:
                self._heard.append(time.monotonic() - float(message.data))

    async def ready(self) -> bool:
        """Whether each knows somebody who hears the topic."""
        return all(endpoint.topic_peers(TOPIC) for endpoint in self._endpoints)

    async def speak(self) -> None:
        """One of them tells everybody what time it is."""
        await self._endpoints[0].publish(TOPIC, str(time.monotonic()).encode())

    async def heard(self) -> list[float]:
        """Seconds on the way of each message that came since the last call."""
        heard, self._heard = self._heard, []
        return heard


async def main() -> None:
    given = options()
    async with AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(opened(files, given["gateway"])) for files in given["nodes"]]
        leaves = Leaves(endpoints)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        if given.get("topic"):
            for endpoint in endpoints:
                await tasks.start(leaves.hear, endpoint)
        await answer_async({}, {name: getattr(leaves, name) for name in ("ready", "speak", "heard")})
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    anyio.run(main, backend="trio")
