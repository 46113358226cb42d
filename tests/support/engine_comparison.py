"""Our endpoint and unmodified py-libp2p behind one interface, to compare their behaviour.

Run as a program, ``python engine_comparison.py ours|stock FOLDER HANDLER``, it is a node in a separate process that
prints its address and serves until its standard input is closed. `FOLDER` holds `Authority.files("server")`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import anyio
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import IOException
from libp2p.network.config import ConnectionConfig
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from libp2p.stream_muxer.exceptions import MuxedConnError, MuxedStreamError
from multiaddr import Multiaddr

from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net.endpoint import Stream
from hypha_net.errors import NetError
from hypha_net.identity import load_identity

LISTEN = "/ip4/127.0.0.1/tcp/0"
PROTOCOL = "/test/engines/1"


class BrokenError(Exception):
    """A stream or a connection failed."""


class Pipe(Protocol):
    """A stream of either engine."""

    async def write(self, data: bytes) -> None: ...

    async def read(self) -> bytes:
        """Read some bytes; empty at what the engine takes for the peer's half-close."""
        ...

    async def end(self) -> None: ...

    async def reset(self) -> None: ...


Handler = Callable[[Pipe], Awaitable[None]]


class Node(Protocol):
    """A node of either engine."""

    address: str
    swarm: Any

    async def reach(self, *addresses: str) -> None:
        """Connect to the peer at these addresses."""
        ...

    async def leave(self, address: str) -> None:
        """Close all connections to the peer at an address."""
        ...

    async def open(self, address: str) -> Pipe: ...

    def serve(self, handler: Handler) -> None: ...

    def know(self, address: str) -> None:
        """Remember an address of a peer, without connecting."""
        ...


class Engine(Protocol):
    """Opens nodes."""

    name: str

    def node(
        self, name: str, *, listen: str | None = LISTEN, max_connections: int = 100
    ) -> AbstractAsyncContextManager[Node]: ...


# ---------------------------------------------------------------------------------------------------------------- ours


class OurPipe:
    """A stream of our endpoint."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except NetError as error:
            raise BrokenError(str(error)) from error

    async def read(self) -> bytes:
        try:
            return await self._stream.receive_some()
        except NetError as error:
            raise BrokenError(str(error)) from error

    async def end(self) -> None:
        await self._stream.send_eof()

    async def reset(self) -> None:
        await self._stream.reset()


class OurNode:
    """A node with our endpoint."""

    def __init__(self, endpoint: Libp2pEndpoint) -> None:
        self._endpoint = endpoint
        self.swarm: Any = endpoint._swarm
        self.address = next(iter(endpoint.addresses), "")

    async def reach(self, *addresses: str) -> None:
        for address in addresses:
            self.know(address)
        with anyio.fail_after(10):
            await self._endpoint._dialer.get_or_connect(_our_peer(addresses[0]))

    async def leave(self, address: str) -> None:
        await self._endpoint.disconnect(_our_peer(address))

    async def open(self, address: str) -> Pipe:
        try:
            return OurPipe(await self._endpoint.open_stream(_our_peer(address), [PROTOCOL]))
        except NetError as error:
            raise BrokenError(str(error)) from error

    def serve(self, handler: Handler) -> None:
        async def handle(stream: Stream) -> None:
            await handler(OurPipe(stream))

        self._endpoint.handle(PROTOCOL, handle)

    def know(self, address: str) -> None:
        _know(self._endpoint._host, address)


class Ours:
    """The engine of `hypha_net`."""

    name = "ours"

    def __init__(self, files: Callable[[str], tuple[Path, Path, Path]]) -> None:
        self._files = files

    @asynccontextmanager
    async def node(self, name: str, *, listen: str | None = LISTEN, max_connections: int = 100) -> AsyncIterator[Node]:
        listens = () if listen is None else (listen,)
        settings = EndpointSettings(listen_addresses=listens, max_connections=max_connections, relay_circuit=False)
        async with open_endpoint(load_identity(*self._files(name)), settings) as endpoint:
            yield OurNode(endpoint)


def _our_peer(address: str) -> Any:
    from hypha_proto.ids import PeerId

    return PeerId.parse(address.rsplit("/p2p/", 1)[1])


# --------------------------------------------------------------------------------------------------------------- stock


class StockPipe:
    """A stream of py-libp2p."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.write(data)
        except (IOException, MuxedStreamError, MuxedConnError) as error:
            raise BrokenError(str(error)) from error

    async def read(self) -> bytes:
        try:
            return bytes(await self._stream.read(65536))
        except StreamEOF:
            return b""
        except (IOException, MuxedStreamError, MuxedConnError) as error:
            raise BrokenError(str(error)) from error

    async def end(self) -> None:
        await self._stream.close_write()

    async def reset(self) -> None:
        await self._stream.reset()


class StockNode:
    """A host of py-libp2p."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self.swarm: Any = host.get_network()
        self.address = next((str(address) for address in host.get_addrs()), "")

    async def reach(self, *addresses: str) -> None:
        peer = info_from_p2p_addr(Multiaddr(addresses[0])).peer_id
        bare = [Multiaddr(address.split("/p2p/")[0]) for address in addresses]
        await self._host.connect(PeerInfo(peer, bare))

    async def leave(self, address: str) -> None:
        await self._host.disconnect(info_from_p2p_addr(Multiaddr(address)).peer_id)

    async def open(self, address: str) -> Pipe:
        peer = info_from_p2p_addr(Multiaddr(address)).peer_id
        try:
            return StockPipe(await self._host.new_stream(peer, [TProtocol(PROTOCOL)]))
        except (IOException, MuxedStreamError, MuxedConnError) as error:
            raise BrokenError(str(error)) from error

    def serve(self, handler: Handler) -> None:
        async def handle(stream: Any) -> None:
            await handler(StockPipe(stream))

        self._host.set_stream_handler(TProtocol(PROTOCOL), handle)

    def know(self, address: str) -> None:
        _know(self._host, address)


class Stock:
    """py-libp2p as built by `new_host`."""

    name = "stock"

    @asynccontextmanager
    async def node(self, name: str, *, listen: str | None = LISTEN, max_connections: int = 100) -> AsyncIterator[Node]:
        config = ConnectionConfig(
            max_connections=max_connections, min_connections=0, low_watermark=1, high_watermark=max_connections
        )
        host = new_host(key_pair=create_new_key_pair(os.urandom(32)), connection_config=config)
        async with host.run([] if listen is None else [Multiaddr(listen)]):
            yield StockNode(host)


def _know(host: Any, address: str) -> None:
    info = info_from_p2p_addr(Multiaddr(address))
    known = host.peerstore.addrs(info.peer_id) if host.peerstore.has_peer(info.peer_id) else []
    host.peerstore.add_addrs(ID(info.peer_id.to_bytes()), [*known, *info.addrs], 600)


# ------------------------------------------------------------------------------------------------------------- program


async def read_all(pipe: Pipe) -> bytes:
    """Read until what the engine takes for the end."""
    data = bytearray()
    while part := await pipe.read():
        data += part
    return bytes(data)


async def echo(pipe: Pipe) -> None:
    """Echo everything after the remote half-close."""
    await pipe.write(await read_all(pipe))
    await pipe.end()


async def die(pipe: Pipe) -> None:
    """Send a part, then kill this process before the rest."""
    await pipe.read()
    await pipe.write(b"x" * 1000)
    await anyio.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


async def hold(pipe: Pipe) -> None:
    """Read nothing if asked to hold; otherwise echo."""
    first = await pipe.read()
    if first.startswith(b"hold"):
        await anyio.sleep_forever()
    await pipe.write(first + await read_all(pipe))
    await pipe.end()


async def late(pipe: Pipe) -> None:
    """Start reading after half a minute and send back the number of bytes."""
    await anyio.sleep(31)
    await pipe.write(str(len(await read_all(pipe))).encode())
    await pipe.end()


HANDLERS: dict[str, Handler] = {"echo": echo, "die": die, "hold": hold, "late": late}


async def _serve(engine: Engine, handler: Handler) -> None:
    async with engine.node("server") as node:
        node.serve(handler)
        print(node.address, flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


def _main(kind: str, folder: str, handler: str) -> None:
    files = tuple(Path(folder, f"server-{part}.pem") for part in ("cert", "key", "trust"))
    engine: Engine = Stock() if kind == "stock" else Ours(lambda _name: (files[0], files[1], files[2]))
    anyio.run(_serve, engine, HANDLERS[handler], backend="trio")


if __name__ == "__main__":
    _main(*sys.argv[1:])
