"""A Hypha node, through the public interface alone: it serves and pulls files, answers and asks, tells and hears."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from benchmarks.children import answer_async, options
from hypha_net import EndpointSettings, open_endpoint, rpc, transfer
from hypha_net.endpoint import Endpoint
from hypha_net.identity import load_identity
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PullRequest

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


class Node:
    """What the parent may ask of it."""

    def __init__(self, endpoint: Endpoint, tasks: anyio.abc.TaskGroup) -> None:
        self._endpoint = endpoint
        self._tasks = tasks
        self._busy: anyio.CancelScope | None = None
        rpc.serve(endpoint, HEALTH_CHECK, self._healthy)

    @staticmethod
    async def _healthy(_peer: PeerId, _request: HealthRequest) -> Health:
        return Health(healthy=True)

    async def offer(self, path: str, digest: str) -> None:
        """Give one file to whoever pulls."""

        async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource:
            return transfer.PullSource(Path(path), digest)

        transfer.serve_pulls(self._endpoint, resolve)

    async def connect(self, address: str) -> float:
        """Connect anew to a peer; seconds."""
        peer = PeerId.parse(address.rsplit("/", 1)[1])
        await self._endpoint.disconnect(peer)
        while peer in self._endpoint.connected_peers():  # noqa: ASYNC110 - it is over in no time
            await anyio.sleep(0.001)
        began = time.perf_counter()
        await self._endpoint.connect(address)
        return time.perf_counter() - began

    async def pull(self, peer: str, digest: str, targets: list[str]) -> float:
        """Pull the file that a peer offers, to several places at once; seconds until all are there."""
        began = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for target in targets:
                tasks.start_soon(self._pull, PeerId.parse(peer), Path(target), digest)
        return time.perf_counter() - began

    async def _pull(self, peer: PeerId, target: Path, digest: str) -> None:
        request = PullRequest(dataset="benchmark", index=0)
        await transfer.pull(self._endpoint, peer, request, target, digest=digest)

    async def keep_pulling(self, peer: str, digest: str, targets: list[str]) -> None:
        """Pull again and again in the background, until `stop`."""

        async def again(target: Path) -> None:
            while True:
                await self._pull(PeerId.parse(peer), target, digest)

        async def all_of_them() -> None:
            with anyio.CancelScope() as self._busy:
                async with anyio.create_task_group() as tasks:
                    for target in targets:
                        tasks.start_soon(again, Path(target))

        self._tasks.start_soon(all_of_them)

    async def stop(self) -> None:
        """End what `keep_pulling` began."""
        if self._busy is not None:
            self._busy.cancel()

    async def ask(self, peer: str, count: int) -> list[float]:
        """Ask for a peer's health, `count` times one after the other; seconds each."""
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
            while not (found := self._circuits()):  # noqa: ASYNC110 - nothing tells
                await anyio.sleep(0.01)
        return found[0]

    def _circuits(self) -> list[str]:
        return [address for address in self._endpoint.addresses if "/p2p-circuit" in address]

    async def hear(self, topic: str) -> None:
        """Join a topic, as gateways do with those of workers, and so pass on what is said there."""
        joined = anyio.Event()

        async def listen() -> None:
            async with self._endpoint.subscribe(topic) as messages:
                joined.set()
                async for _ in messages:
                    pass

        self._tasks.start_soon(listen)
        await joined.wait()

    async def peers(self) -> int:
        """How many peers are connected."""
        return len(self._endpoint.connected_peers())


@asynccontextmanager
async def opened(
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
        endpoint = await stack.enter_async_context(opened(**given))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        node = Node(endpoint, tasks)
        about = {"peer": str(endpoint.peer_id), "address": next(iter(endpoint.addresses), "")}
        deeds = {
            name: getattr(node, name)
            for name in ("offer", "connect", "pull", "keep_pulling", "stop", "ask", "circuit", "hear", "peers")
        }
        await answer_async(about, deeds)
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    anyio.run(main, backend="trio")
