"""Hypha node that uses the public interface only: serves and pulls files, sends and answers requests, subscribes."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from benchmarks.children import options, serve_commands_async
from hypha_net import EndpointSettings, content_directory, open_endpoint, rpc, transfer
from hypha_net.endpoint import Endpoint
from hypha_net.identity import load_identity
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PullRequest

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


class Node:
    """Commands of the parent."""

    def __init__(self, endpoint: Endpoint, tasks: anyio.abc.TaskGroup) -> None:
        self._endpoint = endpoint
        self._tasks = tasks
        self._busy: anyio.CancelScope | None = None
        self._provided: dict[str, tuple[Path, str]] = {}
        rpc.serve(endpoint, HEALTH_CHECK, self._healthy)

    @staticmethod
    async def _healthy(_peer: PeerId, _request: HealthRequest) -> Health:
        return Health(healthy=True)

    async def offer(self, path: str, digest: str) -> None:
        """Serve one file to every peer."""

        async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource:
            return transfer.PullSource(Path(path), digest)

        transfer.serve_pulls(self._endpoint, resolve)

    async def provide(self, path: str, sha256: str, size: int, rate: int | None = None) -> None:
        """Announce a file by its SHA-256 and serve it, with at most `rate` bytes a second if given."""
        self._provided[content_directory.content_request(sha256).dataset] = (Path(path), f"sha256:{sha256}")

        async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource:
            return transfer.PullSource(*self._provided[request.dataset])

        transfer.limit_bandwidth(self._endpoint, transfer.BandwidthLimits(upload=rate))
        if len(self._provided) == 1:
            transfer.serve_pulls(self._endpoint, resolve)
        await content_directory.announce_content(self._endpoint, sha256, size)

    async def connect(self, address: str) -> float:
        """Reconnect to a peer; return the seconds."""
        peer = PeerId.parse(address.rsplit("/", 1)[1])
        await self._endpoint.disconnect(peer)
        while peer in self._endpoint.connected_peers():  # noqa: ASYNC110 - takes milliseconds
            await anyio.sleep(0.001)
        began = time.perf_counter()
        await self._endpoint.connect(address)
        return time.perf_counter() - began

    async def pull(self, peer: str, digest: str, targets: list[str]) -> float:
        """Pull the file that a peer offers to several targets concurrently; return the seconds."""
        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for target in targets:
                tasks.start_soon(self._pull, PeerId.parse(peer), Path(target), digest)
        return time.perf_counter() - began

    async def _pull(self, peer: PeerId, target: Path, digest: str) -> None:
        request = PullRequest(dataset="benchmark", index=0)
        await transfer.pull(self._endpoint, peer, request, target, digest=digest)

    async def keep_pulling(self, peer: str, digest: str, targets: list[str]) -> None:
        """Pull repeatedly in the background, until `stop`."""

        async def pull_forever(target: Path) -> None:
            while True:
                await self._pull(PeerId.parse(peer), target, digest)

        async def pull_all_forever() -> None:
            with anyio.CancelScope() as self._busy:
                async with anyio.create_task_group() as tasks:
                    for target in targets:
                        tasks.start_soon(pull_forever, Path(target))

        self._tasks.start_soon(pull_all_forever)

    async def stop(self) -> None:
        """Stop the transfers of `keep_pulling`."""
        if self._busy is not None:
            self._busy.cancel()

    async def ask(self, peer: str, count: int) -> list[float]:
        """Request a peer's health `count` times in sequence; return the seconds of each."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            await rpc.call(self._endpoint, PeerId.parse(peer), HEALTH_CHECK, HealthRequest(), timeout=30)
            times.append(time.perf_counter() - began)
            await anyio.sleep(0.002)
        return times

    async def circuit(self) -> str:
        """Wait for an address through the gateway's relay."""
        with anyio.fail_after(30):
            while not (found := self._circuits()):  # noqa: ASYNC110 - no event signals it
                await anyio.sleep(0.01)
        return found[0]

    def _circuits(self) -> list[str]:
        return [address for address in self._endpoint.addresses if "/p2p-circuit" in address]

    async def subscribe(self, topic: str) -> None:
        """Join a topic, and so forward its messages, as gateways do with the workers' topic."""
        joined = anyio.Event()

        async def listen() -> None:
            async with self._endpoint.subscribe(topic) as messages:
                joined.set()
                async for _ in messages:
                    pass

        self._tasks.start_soon(listen)
        await joined.wait()

    async def peers(self) -> int:
        """Return the number of connected peers."""
        return len(self._endpoint.connected_peers())


@asynccontextmanager
async def open_node(
    files: dict[str, str], gateway: str | None = None, role: str = "", listen: bool = True
) -> AsyncIterator[Any]:
    identity = load_identity(Path(files["cert"]), Path(files["key"]), Path(files["trust"]))
    settings = EndpointSettings(
        listen_addresses=(LOOPBACK,) if listen else (),
        gateway_addresses=(gateway,) if gateway else (),
        role="gateway" if role == "gateway" else "node",
    )
    async with open_endpoint(identity, settings) as endpoint:
        await endpoint.wait_for_gateway(30)
        yield endpoint


async def main() -> None:
    given = options()
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(open_node(**given))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        node = Node(endpoint, tasks)
        about = {"peer": str(endpoint.peer_id), "address": next(iter(endpoint.addresses), "")}
        names = "offer", "provide", "connect", "pull", "keep_pulling", "stop", "ask", "circuit", "subscribe", "peers"
        await serve_commands_async(about, {name: getattr(node, name) for name in names})
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    anyio.run(main, backend="trio")
