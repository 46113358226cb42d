"""TCP forwarder in front of nodes of this machine: every byte arrives some time later, in both directions.

Listens at `FRONT` on the ports on which the nodes listen at 127.0.0.1. Nothing else of a link is imitated: neither its
rate nor losses.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import anyio
import anyio.abc
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from benchmarks.children import options, serve_commands_async

FRONT = "127.0.0.2"
"""Address under which the nodes are reached through the forwarder."""
BEHIND = "127.0.0.1"
CHUNK = 64 << 10
IN_FLIGHT = 1024
"""Chunks that are on their way in one direction of a connection; then reading waits."""
Chunk = tuple[float, bytes]
"""When it is to arrive, and its bytes."""


class DelayedLinks:
    """Forwards connections to ports of this machine.

    Attributes:
        carried: bytes that were forwarded.
    """

    def __init__(self, delay: float) -> None:
        """Delay every byte by so many seconds."""
        self.carried = 0
        self._delay = delay

    async def forward(self, port: int, incoming: anyio.abc.SocketStream) -> None:
        """Forward one connection until either side closes it."""
        async with incoming:
            try:
                async with await anyio.connect_tcp(BEHIND, port) as onward, anyio.create_task_group() as tasks:
                    tasks.start_soon(self._pump, incoming, onward)
                    tasks.start_soon(self._pump, onward, incoming)
            except OSError:
                return  # nobody listens there, as behind a real link: the connection is closed

    async def _pump(self, source: anyio.abc.SocketStream, sink: anyio.abc.SocketStream) -> None:
        put, get = anyio.create_memory_object_stream[Chunk](IN_FLIGHT)
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read, source, put)
                await self._write(get, sink)

    async def _read(self, source: anyio.abc.SocketStream, put: MemoryObjectSendStream[Chunk]) -> None:
        async with put:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:
                    data = await source.receive(CHUNK)
                    await put.send((anyio.current_time() + self._delay, data))

    async def _write(self, get: MemoryObjectReceiveStream[Chunk], sink: anyio.abc.SocketStream) -> None:
        with suppress(anyio.BrokenResourceError):  # the sink's reader has gone: so has the connection
            async with get:
                async for due, data in get:
                    await anyio.sleep_until(due)
                    await sink.send(data)
                    self.carried += len(data)
                await sink.send_eof()


async def main() -> None:
    given = options()
    links = DelayedLinks(given["delay"])

    async def carried() -> int:
        return links.carried

    async with anyio.create_task_group() as tasks:
        for port in given["ports"]:
            listener = await anyio.create_tcp_listener(local_host=FRONT, local_port=port)
            tasks.start_soon(listener.serve, partial(links.forward, port))
        await serve_commands_async({}, {"carried": carried})
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main)
