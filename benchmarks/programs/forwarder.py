"""Reference for the relay: forwards TLS to TLS with asyncio streams."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from benchmarks.children import options, reply
from hypha_net.identity import load_identity

CHUNK = 256 << 10


async def main() -> None:
    given = options()
    files = given["files"]
    identity = load_identity(Path(files["cert"]), Path(files["key"]), Path(files["trust"]))
    client = identity.client_context()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(CHUNK):
                writer.write(data)
                await writer.drain()
        except (OSError, asyncio.CancelledError):
            return  # one side has closed, or the benchmark has ended
        finally:
            writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward = await asyncio.open_connection("127.0.0.1", given["port"], ssl=client, limit=CHUNK)
        await asyncio.gather(pump(reader, onward[1]), pump(onward[0], writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=identity.server_context(), limit=CHUNK)
    reply({"result": {"port": server.sockets[0].getsockname()[1]}})
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)  # no clean-up of streams needed


asyncio.run(main())
