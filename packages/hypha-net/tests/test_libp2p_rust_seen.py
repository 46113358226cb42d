"""What real rust-libp2p was seen to do (tests/interop), held here byte for byte where there is no Rust."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from scripted_peer import FIN, Stream, dial, speak

from hypha_net import EndpointSettings, open_endpoint, transfer
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PullRequest

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PULL = "/hypha-tensor-stream/pull"


def run(main: Callable[[], Awaitable[None]], limit: float = 30) -> None:
    async def bounded() -> None:
        with anyio.fail_after(limit):
            await main()

    anyio.run(bounded, backend="trio")


async def until_connected(node: Any, peer: PeerId) -> None:
    with anyio.fail_after(10):
        while peer not in node.connected_peers():
            await anyio.sleep(0.01)


@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_a_slice_that_is_given_before_another_frame_comes_is_whole(
    authority: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    frames: list[tuple[bytes, int]] = []
    take = Stream.take

    def noting(stream: Stream, data: bytes, flags: int) -> None:
        frames.append((bytes(data), flags))
        take(stream, data, flags)

    monkeypatch.setattr(Stream, "take", noting)

    async def give_at_once(stream: Stream) -> None:
        """As rust-yamux drops a stream: FIN where the end came with the header, a reset where it did not."""
        length = int.from_bytes(await stream.exactly(8), "little")
        header = await stream.exactly(length)
        [flags] = [flags for data, flags in frames if data.endswith(header)]
        await stream.send_all(bytes(size))
        await (stream.half_close() if flags & FIN else stream.reset())
        frames.clear()

    async def main() -> None:
        identity = authority.identity("rust", "data")
        async with (
            open_endpoint(authority.identity("leaf", "worker"), EndpointSettings(listen_addresses=(LOOPBACK,))) as leaf,
            speak(await dial(leaf.addresses[0]), identity, handlers={PULL: give_at_once}),
        ):
            await until_connected(leaf, identity.peer_id)
            for index in range(5):
                request = PullRequest(dataset="mnist", index=index)
                pulled = await transfer.pull(leaf, identity.peer_id, request, tmp_path / f"slice{index}")
                assert pulled.size == size

    run(main)
