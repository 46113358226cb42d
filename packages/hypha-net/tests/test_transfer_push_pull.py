"""Push and pull of whole files over the network in memory, with and without headers on the wire."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path

import anyio
import pytest
from support.memory_pair import memory_pair

from hypha_net import transfer
from hypha_net.endpoint import Stream
from hypha_net.errors import (
    TransferError,
    TransferRefusedError,
    UnsupportedProtocolError,
)
from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PULL
from hypha_proto.transfer import NO_ROOM, PSEUDO_GRADIENT, PullRequest, PushHeader, Refusal

SCHEDULER = PeerId.from_public_key(bytes(32))


def _header(path: Path, size: int, digest: str) -> PushHeader:
    return PushHeader(AttemptId(uuid.UUID(int=1), "train", 0), 1, PSEUDO_GRADIENT, path.name, size, digest, SCHEDULER)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 3_333_333])
async def test_a_push_is_received_complete(tmp_path: Path, size: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    async with memory_pair() as (a, b):
        arrived = anyio.Event()
        headers: list[PushHeader] = []

        async def on_complete(_size: int, _digest: str) -> None:
            arrived.set()

        async def accept(_peer: PeerId, header: PushHeader) -> transfer.FilePushTarget:
            headers.append(header)
            return transfer.FilePushTarget(target, 1 << 24, on_complete)

        transfer.serve_pushes(b, accept)
        header = _header(source, *await transfer.describe(source))
        assert await transfer.push(a, b.peer_id, source, header) == size
        await arrived.wait()
        assert headers == [header]
    assert target.read_bytes() == source.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]


async def test_an_open_file_is_sent_whatever_takes_its_place(tmp_path: Path) -> None:
    """Two pushes at once read it from their own positions."""
    source, received = tmp_path / "source", list[bytes]()
    content = bytes(range(256)) * 20_000
    source.write_bytes(content)
    async with memory_pair() as (a, b):

        async def accept(_peer: PeerId, header: PushHeader) -> transfer.FilePushTarget:
            target = tmp_path / header.name

            async def on_complete(_size: int, _digest: str) -> None:
                received.append(target.read_bytes())

            return transfer.FilePushTarget(target, 1 << 24, on_complete)

        transfer.serve_pushes(b, accept)
        with source.open("rb", buffering=0) as file:
            source.unlink()
            source.write_bytes(b"other")
            described = await transfer.describe(file)
            async with anyio.create_task_group() as tasks:
                for name in ("first", "second"):
                    header = _header(Path(name), *described)
                    tasks.start_soon(transfer.push, a, b.peer_id, file, header)
    assert received == [content] * 2


@pytest.mark.parametrize(
    ("number", "is_full"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)],
    ids=["full", "quota", "I/O"],
)
async def test_a_refusal_tells_a_full_disk_from_other_errors(tmp_path: Path, number: int, is_full: bool) -> None:
    """The sender may push the same again when there is room."""
    content = b"abc" * 1000
    async with memory_pair() as (a, b):

        async def on_complete(_size: int, _digest: str) -> None:
            raise OSError(number, "cannot be stored", str(tmp_path))

        async def accept(_peer: PeerId, _header: PushHeader) -> transfer.FilePushTarget:
            return transfer.FilePushTarget(tmp_path / "target", 1 << 20, on_complete)

        transfer.serve_pushes(b, accept)
        header = _header(Path("x"), *await transfer.describe(content))
        with pytest.raises(TransferRefusedError, match="cannot be stored") as refused:
            await transfer.push(a, b.peer_id, content, header)
        assert refused.value.reason.startswith(NO_ROOM) is is_full


async def test_refused_and_corrupt_pushes_leave_no_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"abc" * 1000)
    async with memory_pair() as (a, b):
        answer: list[transfer.FilePushTarget | Refusal] = [Refusal(reason="not your round")]

        async def on_complete(_size: int, _digest: str) -> None:
            raise AssertionError("a corrupt file must not arrive")

        async def accept(_peer: PeerId, _header: PushHeader) -> transfer.FilePushTarget | Refusal:
            return answer[0]

        transfer.serve_pushes(b, accept)
        size, digest = await transfer.describe(source)
        with pytest.raises(TransferRefusedError, match="not your round"):
            await transfer.push(a, b.peer_id, source, _header(source, size, digest))
        answer[0] = transfer.FilePushTarget(tmp_path / "target", 100, on_complete)
        with pytest.raises(TransferRefusedError, match="over the limit of 100"):
            await transfer.push(a, b.peer_id, source, _header(source, size, digest))
        answer[0] = transfer.FilePushTarget(tmp_path / "target", 1 << 20, on_complete)
        with pytest.raises(TransferRefusedError, match="digest"):
            await transfer.push(a, b.peer_id, source, _header(source, size, "blake3:" + "0" * 64))
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


async def test_a_pull_receives_the_file(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"slice" * 500_000)
    async with memory_pair() as (a, b):

        async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
            return transfer.PullSource(source) if request.index == 2 else Refusal(reason=f"no slice {request.index}")

        transfer.serve_pulls(b, resolve)
        _, digest = await transfer.describe(source)
        pulled = await transfer.pull(a, b.peer_id, PullRequest(dataset="d", index=2), target, digest=digest)
        assert (pulled.size, pulled.digest) == (2_500_000, digest)
        with pytest.raises(TransferError):
            await transfer.pull(a, b.peer_id, PullRequest(dataset="d", index=3), tmp_path / "none")
        with pytest.raises(TransferError):
            await transfer.pull(a, b.peer_id, PullRequest(dataset="d", index=2), tmp_path / "none", max_bytes=1000)
        with pytest.raises(TransferError):
            await transfer.pull(
                a, b.peer_id, PullRequest(dataset="d", index=2), tmp_path / "none", digest="blake3:" + "0" * 64
            )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source", "target"]
    assert target.read_bytes() == source.read_bytes()


async def test_an_interrupted_pull_is_an_error_and_leaves_no_file(tmp_path: Path) -> None:
    async with memory_pair() as (a, b):

        async def cut(stream: Stream) -> None:
            await stream.send_all(b"half of a slice")
            await stream.reset()

        b.handle(PULL, cut)
        with pytest.raises(TransferError, match="broke off"):
            await transfer.pull(a, b.peer_id, PullRequest(dataset="d", index=2), tmp_path / "target")
        with pytest.raises(UnsupportedProtocolError):
            await transfer.push(a, b.peer_id, tmp_path / "x", _header(tmp_path / "x", 0, "blake3:" + "0" * 64))
    assert list(tmp_path.iterdir()) == []
