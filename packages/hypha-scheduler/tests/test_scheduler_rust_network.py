"""Our scheduler among nodes of the Rust network, over real endpoints and the scripted nodes of `support.rust_node`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from support.authority import Authority
from support.rust_node import WORKER_TOPIC, RustDataNode, RustGateway, RustWorker, running
from support.waiting import run, until

from hypha_net import EndpointSettings, open_endpoint, rpc, transfer
from hypha_net.endpoint import Endpoint
from hypha_proto.ids import PeerId
from hypha_proto.offers import OFFER, OfferReceived, TrainExecutor, WorkerOffer, WorkerSpec
from hypha_proto.resources import Resources
from hypha_proto.transfer import PullRequest
from hypha_scheduler.allocation.allocator import Allocator
from hypha_scheduler.allocation.auction import RoleRequest
from hypha_scheduler.allocation.leases import HeldLeases
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
                dataset = await open_dataset(endpoint, "mnist", tmp_path / "manifest.json", timeout=60)
                assert (dataset.provider, dataset.slices) == (data.identity.peer_id, (None, None))
                request = PullRequest(dataset="mnist", index=1)  # a worker's, which finds the node alive
                assert await transfer.pull_bytes(endpoint, data.identity.peer_id, request, max_bytes=100) == b"second"
                assert (data.served, data.log) == ([1], [])

    run(main, 60)


async def allocate(endpoint: Endpoint, count: int) -> set[PeerId]:
    """Look for `count` training workers within 60 s; return those whose leases are held."""
    spec = WorkerSpec(resources=Resources(cpu=1), executor=(TrainExecutor(name="t"),))
    wanted = (RoleRequest("train", spec, bid=100, max_price=100, count=count),)
    async with anyio.create_task_group() as tasks:
        allocator = Allocator(endpoint, wanted, HeldLeases(), {"train": count}, 60, tasks)

        async def take(peer: PeerId, offer: WorkerOffer) -> OfferReceived:
            allocator.add_offer(peer, offer)
            return OfferReceived()

        rpc.serve(endpoint, OFFER, take)
        return {offer.peer for offer in await allocator.allocate()}


def test_rust_workers_behind_a_rust_gateway_are_placed(authority: Authority) -> None:
    """The gateway is in no topic and the scheduler joins none; it has to look for the workers."""

    async def main() -> None:
        gateway = RustGateway(authority.identity("gateway", "gateway"))
        workers = [RustWorker(authority.identity(f"worker{number}", "worker")) for number in range(2)]
        async with running(gateway, *workers):
            for worker in workers:
                await worker.connect(gateway.address)
            async with scheduler_of(authority, gateway.address) as endpoint:
                assert await allocate(endpoint, 2) == {worker.identity.peer_id for worker in workers}
                assert [len(worker.renewed) for worker in workers] == [1, 1]
                assert [worker.dial_failures for worker in workers] == [0, 0]

    run(main, 60)


def test_rust_workers_behind_our_gateway_are_placed(authority: Authority) -> None:
    """The gateway forwards requests, and a worker answers those of connected schedulers only."""

    async def main() -> None:
        settings = EndpointSettings(listen_addresses=(LOOPBACK,), role="gateway")
        worker = RustWorker(authority.identity("worker", "worker"))
        async with (
            open_endpoint(authority.identity("gateway", "gateway"), settings) as gateway,
            gateway.subscribe(WORKER_TOPIC),
            running(worker),
        ):
            await worker.connect(gateway.addresses[0])
            identified = gateway.connected_peers
            await until(lambda: worker.identity.peer_id in gateway.topic_peers(WORKER_TOPIC))
            await until(lambda: identified()[worker.identity.peer_id].addresses)
            async with scheduler_of(authority, gateway.addresses[0]) as endpoint:
                await until(lambda: gateway.peer_id in endpoint.topic_peers(WORKER_TOPIC))
                assert await allocate(endpoint, 1) == {worker.identity.peer_id}
                assert (worker.requests, worker.dial_failures) == (1, 0)

    run(main, 60)
