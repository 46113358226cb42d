"""Handlers and readers of an endpoint's streams that many tests of the network need."""

from __future__ import annotations

from hypha_net.endpoint import Stream


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
