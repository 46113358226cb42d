"""Two connected endpoints in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypha_net.testing import MemoryEndpoint, MemoryNetwork


@asynccontextmanager
async def memory_pair() -> AsyncIterator[tuple[MemoryEndpoint, MemoryEndpoint]]:
    """Open the endpoints ``a`` and ``b``."""
    network = MemoryNetwork(seed=3)
    async with network.endpoint("a") as a, network.endpoint("b") as b:
        yield a, b
