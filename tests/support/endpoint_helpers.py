"""What many tests of the network have endpoints say to each other: handlers, readers, and gossip until it is heard."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio

from hypha_net.endpoint import Endpoint, GossipMessage, Stream


async def read_all(stream: Stream) -> bytes:
    """Everything until the other side's half-close."""
    data = bytearray()
    while part := await stream.receive_some():
        data += part
    return bytes(data)


async def echo(stream: Stream) -> None:
    """A handler that sends back what came, once the other side has half-closed."""
    await stream.send_all(await read_all(stream))


async def echo_at_once(stream: Stream) -> None:
    """A handler that sends back each part as it comes."""
    while part := await stream.receive_some():
        await stream.send_all(part)


async def publish_until_heard(
    node: Endpoint, topic: str, data: bytes, heard: AsyncIterator[GossipMessage], seconds: float = 10
) -> None:
    """Publish again and again, as what is said before a mesh stands is lost; the next that is heard must be it."""
    with anyio.fail_after(seconds):
        while True:
            await node.publish(topic, data)
            with anyio.move_on_after(0.5):
                assert (await anext(heard)).data == data
                return
