"""Our side of the conversations that the Rust peer has in `src/streams.rs`, and a gateway as its daemon."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc

from hypha_local.processes import script
from hypha_net import EndpointSettings, open_endpoint
from hypha_net._libp2p.endpoint import Libp2pEndpoint
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import StreamResetError, UnreachableError
from hypha_net.identity import load_identity
from hypha_proto.ids import PeerId

ECHO, SINK = "/interop/echo/1", "/interop/sink/1"
SOURCE, RESET = "/interop/source/1", "/interop/reset/1"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
_CHUNK = 64 << 10
_ROWS = [bytes(low ^ row for low in range(256)) for row in range(256)]
_CYCLE = b"".join(_ROWS[(high ^ high >> 8) & 0xFF] for high in range(1 << 16))


def pattern(offset: int, size: int) -> bytes:
    """The bytes that `streams.rs` makes."""
    start = offset % len(_CYCLE)
    part = _CYCLE[start : start + size]
    return part if len(part) == size else part + pattern(0, size - len(part))


async def check(stream: Stream, seen: int = 0) -> int:
    """Read the pattern, but for what was seen of it, to the clean end; how many bytes came in all."""
    while data := await stream.receive_some(_CHUNK):
        assert data == pattern(seen, len(data)), f"wrong bytes behind {seen}"
        seen += len(data)
    return seen


async def fill(stream: Stream, size: int, sent: int = 0) -> None:
    """Send so much of the pattern, but for what was sent of it."""
    for at in range(sent, size, _CHUNK):
        await stream.send_all(pattern(at, min(_CHUNK, size - at)))


async def exactly(stream: Stream, size: int) -> bytes:
    """So many bytes."""
    data = b""
    while len(data) < size:
        part = await stream.receive_some(size - len(data))
        assert part, f"ended after {data!r}"
        data += part
    return data


def serve(endpoint: Endpoint) -> None:
    """Serve what the Rust peer serves."""

    async def echo(stream: Stream) -> None:
        while data := await stream.receive_some():
            await stream.send_all(data)
        await stream.send_eof()

    async def sink(stream: Stream) -> None:
        await stream.send_all((await check(stream)).to_bytes(8, "little"))
        await stream.send_eof()

    async def source(stream: Stream) -> None:
        await fill(stream, int.from_bytes(await exactly(stream, 8), "little"))
        await stream.send_eof()

    async def reset(stream: Stream) -> None:
        await exactly(stream, 1)
        await stream.reset()

    for protocol, handler in {ECHO: echo, SINK: sink, SOURCE: source, RESET: reset}.items():
        endpoint.handle(protocol, handler)


async def send(endpoint: Endpoint, peer: PeerId, size: int) -> int:
    """Send so many bytes, half-close, and hear how many came."""
    stream = await endpoint.open_stream(peer, [SINK])
    await fill(stream, size)
    await stream.send_eof()
    seen = int.from_bytes(await exactly(stream, 8), "little")
    assert await stream.receive_some() == b""
    await stream.aclose()
    return seen


async def receive(endpoint: Endpoint, peer: PeerId, size: int) -> int:
    """Ask for so many bytes, half-closed, and check them."""
    stream = await endpoint.open_stream(peer, [SOURCE])
    await stream.send_all(size.to_bytes(8, "little"))
    await stream.send_eof()
    seen = await check(stream)
    await stream.aclose()
    return seen


async def many(endpoint: Endpoint, peer: PeerId, count: int, size: int) -> int:
    """Have so many streams open at once, then pass `size` bytes through each; on how many they came back."""
    streams = [await _opened(endpoint, peer) for _ in range(count)]
    whole = 0

    async def pass_through(stream: Stream) -> None:
        nonlocal whole
        await fill(stream, size, 1)
        await stream.send_eof()
        seen = await check(stream, 1)
        whole += seen == size
        await stream.aclose()

    async with anyio.create_task_group() as tasks:
        for stream in streams:
            tasks.start_soon(pass_through, stream)
    return whole


async def _opened(endpoint: Endpoint, peer: PeerId) -> Stream:
    """A stream through which a byte has passed; libp2p-stream drops one that comes before it took the last."""
    for _ in range(5):
        try:
            stream = await endpoint.open_stream(peer, [ECHO])
            await fill(stream, 1)
            assert await exactly(stream, 1) == pattern(0, 1)
        except (UnreachableError, StreamResetError) as error:
            print("dropped by libp2p-stream, and opened again:", error)
            continue
        return stream
    raise AssertionError("five streams one after the other were dropped")


def files(prefix: Path) -> tuple[Path, Path, Path]:
    """A node's certificate, key and trust bundle."""
    certificate, key, trust = (prefix.with_name(f"{prefix.name}-{end}.pem") for end in ("cert", "key", "trust"))
    return certificate, key, trust


@asynccontextmanager
async def leaf(prefix: Path, *gateways: str, **settings: object) -> AsyncIterator[Libp2pEndpoint]:
    """An endpoint in this process that listens and serves, met with its gateways."""
    made = EndpointSettings(**{"listen_addresses": (LOOPBACK,), "gateway_addresses": gateways, **settings})  # type: ignore[arg-type]
    async with open_endpoint(load_identity(*files(prefix)), made) as endpoint:
        serve(endpoint)
        with anyio.fail_after(20):
            while gateways and not endpoint.connected_peers():
                await anyio.sleep(0.02)
        yield endpoint


@dataclass
class Gateway:
    """`hypha-gateway run` as a process; it may be killed and started again."""

    prefix: Path
    port: int
    extra: str = ""
    """More TOML."""
    process: anyio.abc.Process | None = None

    @property
    def id(self) -> PeerId:
        """Its peer id."""
        return load_identity(*files(self.prefix)).peer_id

    @property
    def address(self) -> str:
        """Where it listens, with its peer id."""
        return f"/ip4/127.0.0.1/tcp/{self.port}/p2p/{self.id}"

    async def start(self) -> None:
        """Start it and wait until its port answers."""
        config = self.prefix.with_name(f"{self.prefix.name}.toml")
        certificate, key, trust = files(self.prefix)
        config.write_text(
            f"cert_pem = {json.dumps(str(certificate))}\nkey_pem = {json.dumps(str(key))}\n"
            f'trust_pem = {json.dumps(str(trust))}\nlisten_addresses = ["/ip4/127.0.0.1/tcp/{self.port}"]\n'
            f"state_dir = {json.dumps(str(self.prefix.parent))}\nexclude_cidr = []\n{self.extra}"
        )
        log = self.prefix.with_name(f"{self.prefix.name}.log").open("a")
        self.process = await anyio.open_process(
            [script("hypha-gateway"), "run", "--config", str(config)], stdout=subprocess.DEVNULL, stderr=log
        )
        log.close()
        with anyio.fail_after(30):
            while True:
                assert self.process.returncode is None, self.log
                try:
                    await (await anyio.connect_tcp("127.0.0.1", self.port)).aclose()
                    return
                except OSError:
                    await anyio.sleep(0.05)

    @property
    def log(self) -> str:
        """What it has logged."""
        return self.prefix.with_name(f"{self.prefix.name}.log").read_text()

    async def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def gateway(prefix: Path, port: int, extra: str = "") -> AsyncIterator[Gateway]:
    """A running gateway."""
    made = Gateway(prefix, port, extra)
    try:
        await made.start()
        yield made
    finally:
        with anyio.CancelScope(shield=True):
            await made.kill()
