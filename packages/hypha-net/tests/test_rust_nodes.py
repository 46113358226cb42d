"""Our nodes in a network of Rust nodes: what those were seen to do, by scripted nodes (`support.rust_node`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio
from support.rust_node import PULL, RustDataNode, RustGateway, RustNode, running
from support.waiting import run, until

from hypha_net import EndpointSettings, open_endpoint, transfer
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net.errors import TransferRefusedError
from hypha_proto.transfer import PullRequest

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@asynccontextmanager
async def leaf_of(authority: Any, gateway: str) -> AsyncIterator[Libp2pEndpoint]:
    """Open one of our endpoints, connected to a gateway."""
    settings = EndpointSettings(listen_addresses=(LOOPBACK,), gateway_addresses=(gateway,))
    async with open_endpoint(authority.identity("leaf", "scheduler"), settings) as leaf:
        await leaf.wait_for_gateway(10)
        yield leaf


def negotiated(node: RustNode, peer: Libp2pEndpoint) -> list[str]:
    """Return the protocols that `peer` has proposed to a scripted node."""
    connection = node.neighbours.get(peer.peer_id.raw)
    return [] if connection is None else connection.negotiated


# -------------------------------------------------------------------------------------------------------------- pulls


def test_an_old_data_node_survives_a_request_for_its_manifest(authority: Any, tmp_path: Path) -> None:
    async def main() -> None:
        gateway = RustGateway(authority.identity("gateway", "gateway"))
        data = RustDataNode(authority.identity("data", "data"), "mnist", [b"first", b"second"])
        async with running(gateway, data):
            await data.announce(gateway)
            async with leaf_of(authority, gateway.address) as leaf:
                peer = data.identity.peer_id
                for _ in range(3):
                    manifest = PullRequest(dataset="mnist", index=0, name="manifest")
                    with pytest.raises(TransferRefusedError, match="slices only"):
                        await transfer.pull(leaf, peer, manifest, tmp_path / "manifest")
                    with pytest.raises(TransferRefusedError, match="slices only"):
                        await transfer.pull_bytes(leaf, peer, manifest, max_bytes=100)
                await transfer.pull(leaf, peer, PullRequest(dataset="mnist", index=1), tmp_path / "slice")
                assert (tmp_path / "slice").read_bytes() == b"second"
                assert data.is_running
                assert data.log == []

    run(main)


def test_an_old_data_node_survives_a_pull_that_is_cancelled(authority: Any, tmp_path: Path) -> None:
    """The header is in the same frame as the proposal: at no moment has the stream been opened without it."""

    async def main() -> None:
        gateway = RustGateway(authority.identity("gateway", "gateway"))
        data = RustDataNode(authority.identity("data", "data"), "mnist", [b"first"])
        gate = trio.Event()
        data.gates[PULL] = gate
        async with running(gateway, data):
            await data.announce(gateway)
            async with leaf_of(authority, gateway.address) as leaf:
                async with anyio.create_task_group() as tasks:
                    request = PullRequest(dataset="mnist", index=0)
                    tasks.start_soon(transfer.pull, leaf, data.identity.peer_id, request, tmp_path / "slice")
                    await until(lambda: PULL in negotiated(data, leaf))
                    tasks.cancel_scope.cancel()
                gate.set()
                await until(lambda: data.served or data.log)
                assert data.served == [0]
                assert data.is_running

    run(main)
