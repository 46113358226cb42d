"""Behaviour of rust-libp2p that was observed in tests/interop, reproduced byte for byte without Rust."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from blake3 import blake3
from support.waiting import run, until
from support.wire_peer import FIN, Stream, dial, speak

from hypha_net import EndpointSettings, open_endpoint, transfer
from hypha_net.errors import TransferError, UnreachableError
from hypha_proto.ids import PeerId
from hypha_proto.transfer import PSEUDO_GRADIENT, PullRequest, PushHeader

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PULL, PUSH = "/hypha-tensor-stream/pull", "/hypha-tensor-stream/push"


@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_a_slice_sent_before_the_requests_last_frame_is_complete(
    authority: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    frames: list[tuple[bytes, int]] = []
    take = Stream.take

    def noting(stream: Stream, data: bytes, flags: int) -> None:
        frames.append((bytes(data), flags))
        take(stream, data, flags)

    monkeypatch.setattr(Stream, "take", noting)

    async def give_at_once(stream: Stream) -> None:
        """Drop a stream as rust-yamux does: FIN if the peer's end came with the header, otherwise a reset."""
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
            await until(lambda: identity.peer_id in leaf.connected_peers())
            for index in range(5):
                request = PullRequest(dataset="mnist", index=index)
                pulled = await transfer.pull(leaf, identity.peer_id, request, tmp_path / f"slice{index}")
                assert pulled.size == size

    run(main)


class Dropping:
    """Behaves as libp2p-stream: the first `drops` streams arrive before they are accepted and are dropped."""

    def __init__(self, drops: int) -> None:
        self.drops = drops
        self.asked = 0
        self.taken: list[bytes] = []

    def is_dropped(self) -> bool:
        self.asked += 1
        return self.asked <= self.drops

    async def give(self, stream: Stream) -> None:
        if self.is_dropped():
            await stream.reset()
            return
        await stream.exactly(int.from_bytes(await stream.exactly(8), "little"))
        await stream.send_all(b"slice")
        await stream.half_close()

    async def take(self, stream: Stream) -> None:
        if self.is_dropped():
            await stream.reset()
            return
        self.taken.append(await stream.read_all())
        await stream.half_close()


@asynccontextmanager
async def old_peer(authority: Any, dropping: Dropping) -> AsyncIterator[tuple[Any, PeerId]]:
    identity = authority.identity("rust", "data")
    handlers = {PULL: dropping.give, PUSH: dropping.take}
    async with (
        open_endpoint(authority.identity("leaf", "worker"), EndpointSettings(listen_addresses=(LOOPBACK,))) as leaf,
        speak(await dial(leaf.addresses[0]), identity, handlers=handlers),
    ):
        await until(lambda: identity.peer_id in leaf.connected_peers())
        yield leaf, identity.peer_id


@pytest.mark.parametrize("drops", [0, 2, 3])
def test_a_stream_dropped_unread_by_an_old_peer_is_reopened_twice(authority: Any, tmp_path: Path, drops: int) -> None:
    async def main() -> None:
        dropping = Dropping(drops)
        async with old_peer(authority, dropping) as (leaf, peer):
            pull = transfer.pull(leaf, peer, PullRequest(dataset="mnist", index=0), tmp_path / "slice")
            if drops > 2:
                with pytest.raises((TransferError, UnreachableError)):
                    await pull
            else:
                assert (await pull).size == 5
            assert dropping.asked == min(drops, 2) + 1

    run(main)


@pytest.mark.parametrize("drops", [0, 2, 3])
def test_a_push_is_complete_if_an_old_peer_ends_the_stream_but_not_if_it_resets_it(
    authority: Any, tmp_path: Path, drops: int
) -> None:
    (tmp_path / "update").write_bytes(b"update")
    digest = f"blake3:{blake3(b'update').hexdigest()}"
    header = PushHeader(job_id=UUID(int=1), round=1, kind=PSEUDO_GRADIENT, name="update", size=6, digest=digest)

    async def main() -> None:
        dropping = Dropping(drops)
        async with old_peer(authority, dropping) as (leaf, peer):
            push = transfer.push(leaf, peer, tmp_path / "update", header)
            if drops > 2:
                with pytest.raises((TransferError, UnreachableError)):
                    await push
                assert dropping.taken == []
            else:
                await push
                assert dropping.taken == [b"update"]

    run(main)
