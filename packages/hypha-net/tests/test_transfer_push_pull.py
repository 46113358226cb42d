"""Push and pull of whole files over the network in memory, with and without headers on the wire."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path

import anyio
import pytest
from support.memory_pair import memory_pair

from hypha_net import transfer
from hypha_net.errors import (
    TransferRefusedError,
)
from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.transfer import NO_ROOM, PSEUDO_GRADIENT, PushHeader

SCHEDULER = PeerId.from_public_key(bytes(32))


def _header(path: Path, size: int, digest: str) -> PushHeader:
    return PushHeader(AttemptId(uuid.UUID(int=1), "train", 0), 1, PSEUDO_GRADIENT, path.name, size, digest, SCHEDULER)


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
