"""Stock py-libp2p with its own TLS and yamux: one peer that serves a file, or one that fetches it."""

from __future__ import annotations

import logging
import time
from typing import Any

import trio
from blake3 import blake3
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.tls.transport import PROTOCOL_ID, TLSTransport
from libp2p.stream_muxer.exceptions import MuxedStreamEOF
from multiaddr import Multiaddr

from benchmarks.children import serve_commands_async

PROTOCOL = TProtocol("/benchmark/file/1")
BLOCK = 64 << 10


class TransferPeer:
    """One end of a transfer."""

    def __init__(self, host: Any) -> None:
        self._host = host
        self._peer: Any = None

    async def offer(self, path: str) -> str:
        """Serve a file; return the address."""

        async def give(stream: Any) -> None:
            with open(path, "rb", buffering=0) as file:  # noqa: ASYNC230 - so does the reference
                while block := file.read(BLOCK):
                    await stream.write(block)
            await stream.close()

        self._host.set_stream_handler(PROTOCOL, give)
        return str(self._host.get_addrs()[0])

    async def connect(self, address: str) -> None:
        """Connect to the serving peer."""
        info = info_from_p2p_addr(Multiaddr(address))
        self._peer = info.peer_id
        await self._host.connect(info)

    async def take(self, target: str, digest: str) -> float:
        """Fetch the file once; return the seconds."""
        began = time.perf_counter()
        stream = await self._host.new_stream(self._peer, [PROTOCOL])
        hasher = blake3()
        with open(target, "xb", buffering=0) as file:  # noqa: ASYNC230 - so does the reference
            while block := await _read(stream):
                hasher.update(block)
                file.write(block)
        assert f"blake3:{hasher.hexdigest()}" == digest
        return time.perf_counter() - began


async def _read(stream: Any) -> bytes:
    try:
        return bytes(await stream.read(BLOCK))
    except (StreamEOF, MuxedStreamEOF):
        return b""


async def main() -> None:
    keys = create_new_key_pair()
    host = new_host(key_pair=keys, sec_opt={PROTOCOL_ID: TLSTransport(keys)})
    peer = TransferPeer(host)
    async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        commands: dict[str, Any] = {"offer": peer.offer, "connect": peer.connect, "take": peer.take}
        await serve_commands_async({}, commands)


logging.disable(logging.ERROR)
trio.run(main)
