"""Stream handlers, readers and gossip helpers for tests with endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio

from hypha_net.endpoint import Endpoint, GossipMessage, Stream


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
