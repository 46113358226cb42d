"""Fixtures of this package's tests: a certificate hierarchy, and networks of either endpoint implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest
from support.authority import Authority
from support.gateways import LOOPBACK, Opener, open_gateway

from hypha_net import EndpointSettings, open_endpoint
from hypha_net.endpoint import Endpoint
from hypha_net.testing import MemoryNetwork


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Return the organisation that all nodes trust."""
    return Authority(tmp_path / "acme")


@pytest.fixture
def foreign_authority(tmp_path: Path) -> Authority:
    """Return an organisation that only its own nodes trust."""
    return Authority(tmp_path / "other", "other")


@asynccontextmanager
async def _open_memory(count: int) -> AsyncIterator[list[Endpoint]]:
    network = MemoryNetwork(seed=count)
    async with AsyncExitStack() as stack:
        nodes: list[Endpoint] = [await stack.enter_async_context(network.endpoint(f"n{i}")) for i in range(count)]
        for leaf in nodes[1:]:
            await leaf.connect(nodes[0].addresses[0])
        yield nodes


def _libp2p_opener(authority: Authority) -> Opener:
    @asynccontextmanager
    async def opened(count: int) -> AsyncIterator[list[Endpoint]]:
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(open_gateway(authority))
            settings = EndpointSettings(listen_addresses=(LOOPBACK,), gateway_addresses=(gateway.addresses[0],))
            nodes: list[Endpoint] = [gateway]
            for index in range(1, count):
                node = await stack.enter_async_context(open_endpoint(authority.identity(f"n{index}"), settings))
                with anyio.fail_after(15):
                    await node.wait_for_gateway()
                nodes.append(node)
            yield nodes

    return opened


@pytest.fixture(params=["memory", "libp2p"])
def opener(request: pytest.FixtureRequest, authority: Authority) -> Opener:
    """Return a function that opens N endpoints of either implementation; the first is the gateway of the others."""
    return _open_memory if request.param == "memory" else _libp2p_opener(authority)


@pytest.fixture
def libp2p_opener(authority: Authority) -> Opener:
    """Return a function as `opener` does, for the py-libp2p implementation only."""
    return _libp2p_opener(authority)
