"""Runs a test case with two connected endpoints in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from hypha_net.testing import MemoryEndpoint, MemoryNetwork


def run_with_pair(case: Callable[[MemoryEndpoint, MemoryEndpoint], Awaitable[None]], timeout: float = 20) -> None:
    """Run `case` under trio with the endpoints ``a`` and ``b``, within `timeout` seconds."""

    async def main() -> None:
        network = MemoryNetwork(seed=3)
        with anyio.fail_after(timeout):
            async with network.endpoint("a") as a, network.endpoint("b") as b:
                await case(a, b)

    anyio.run(main, backend="trio")
