"""Our scheduler among nodes of the Rust network, over real endpoints and the scripted nodes of `support.rust_node`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.authority import Authority
from support.rust_node import RustDataNode, RustGateway, running
from support.waiting import run

from hypha_net import EndpointSettings, open_endpoint, transfer
from hypha_net.endpoint import Endpoint
from hypha_proto.transfer import PullRequest
from hypha_scheduler.datasets.dataset import open_dataset

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@asynccontextmanager
async def scheduler_of(authority: Authority, gateway: str) -> AsyncIterator[Endpoint]:
    """Open a scheduler's endpoint, connected to a gateway."""
    settings = EndpointSettings(listen_addresses=(LOOPBACK,), gateway_addresses=(gateway,))
    async with open_endpoint(authority.identity("scheduler", "scheduler"), settings) as endpoint:
        await endpoint.wait_for_gateway(10)
        yield endpoint


def test_a_dataset_of_a_rust_data_node_has_no_manifest_and_the_node_goes_on(
    authority: Authority, tmp_path: Path
) -> None:
    async def main() -> None:
        gateway = RustGateway(authority.identity("gateway", "gateway"))
        data = RustDataNode(authority.identity("data", "data"), "mnist", [b"first", b"second"])
        async with running(gateway, data):
            await data.announce(gateway)
            async with scheduler_of(authority, gateway.address) as endpoint:
                dataset = await open_dataset(endpoint, "mnist", tmp_path / "manifest.json", timeout=10)
                assert (dataset.provider, dataset.slices) == (data.identity.peer_id, (None, None))
                request = PullRequest(dataset="mnist", index=1)  # a worker's, which finds the node alive
                assert await transfer.pull_bytes(endpoint, data.identity.peer_id, request, max_bytes=100) == b"second"
                assert (data.served, data.log) == ([1], [])

    run(main)
