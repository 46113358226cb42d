"""Stream handlers, readers, transfers, gossip helpers and connected pairs for tests with endpoints."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio

from hypha_net import transfer
from hypha_net.endpoint import Endpoint, GossipMessage, Stream
from hypha_net.events import Event, EventFollower
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PSEUDO_GRADIENT, PullRequest, PushHeader

Kind = TypeVar("Kind", bound=Event)


async def next_event(events: EventFollower, kind: type[Kind]) -> Kind:
    """Return the next event of a follower, which must be of this kind."""
    event = await anext(events)
    assert isinstance(event, kind)
    return event


async def read_all(stream: Stream) -> bytes:
    """Read until the remote side half-closes."""
    data = bytearray()
    while part := await stream.receive_some():
        data += part
    return bytes(data)


async def echo(stream: Stream) -> None:
    """Echo all received bytes once the remote side has half-closed."""
    await stream.send_all(await read_all(stream))


async def echo_at_once(stream: Stream) -> None:
    """Echo each chunk as it arrives."""
    while part := await stream.receive_some():
        await stream.send_all(part)


async def publish_until_heard(
    node: Endpoint, topic: str, data: bytes, heard: AsyncIterator[GossipMessage], seconds: float = 10
) -> None:
    """Publish repeatedly until received, because messages sent before the mesh is built are lost."""
    with anyio.fail_after(seconds):
        while True:
            await node.publish(topic, data)
            with anyio.move_on_after(0.5):
                assert (await anext(heard)).data == data
                return


@asynccontextmanager
async def memory_pair() -> AsyncIterator[tuple[MemoryEndpoint, MemoryEndpoint]]:
    """Open the endpoints ``a`` and ``b``."""
    network = MemoryNetwork(seed=3)
    async with network.endpoint("a") as a, network.endpoint("b") as b:
        yield a, b


def push_header(size: int, digest: str, name: str = "update", task: str = "train") -> PushHeader:
    """Return the header of a push of a task."""
    attempt = AttemptId(uuid.UUID(int=1), task, 0)
    return PushHeader(attempt, 1, PSEUDO_GRADIENT, name, size, digest, PeerId.from_public_key(bytes(32)))


def accept_pushes(node: Endpoint, folder: Path, slot: str | None = None) -> list[Path]:
    """Accept pushes into a folder under their names; return the list of the complete files."""
    folder.mkdir(exist_ok=True)
    landed: list[Path] = []

    async def accept(_peer: PeerId, header: PushHeader) -> transfer.FilePushTarget:
        path = folder / header.name

        async def on_complete(_size: int, _digest: str) -> None:
            landed.append(path)

        return transfer.FilePushTarget(path, 1 << 30, on_complete, slot=slot)

    transfer.serve_pushes(node, accept)
    return landed


async def pull_bytes(endpoint: Endpoint, peer: PeerId, request: PullRequest, **options: Any) -> bytes:
    """Pull a file with the options of `transfer.pull`, and return its content."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pulled"
        await transfer.pull(endpoint, peer, request, path, **options)
        return path.read_bytes()
