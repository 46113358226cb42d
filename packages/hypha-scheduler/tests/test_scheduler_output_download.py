"""Outputs of tasks fetched from the workers that hold them: whole or not at all, whatever the worker serves."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from support.endpoint_helpers import memory_pair

from hypha_net import retries, transfer
from hypha_net.errors import ContentMismatchError, NetError, NoSpaceError, TransferError, TransferRefusedError
from hypha_net.retries import RetryPolicy
from hypha_net.testing import MemoryEndpoint
from hypha_proto.ids import PeerId
from hypha_proto.tasks import StoredFile, StoredOutput
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.jobs.output_download import download_output

DATASET = "unguessable"
CONTENT = {"weights.bin": bytes(range(256)) * 8192, "conf/a.json": b"{}", "conf/b/empty": b""}


class Holder:
    """Worker with stored files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[str] = []
        self.requests: list[int] = []
        self.refusals = 0
        """Requests of each file that are refused or broken off before one is served."""
        self.on_request: Callable[[PullRequest], Awaitable[None]] | None = None

    async def output(self, content: dict[str, bytes], name: str = "model") -> StoredOutput:
        files = []
        for path, data in content.items():
            place = self.folder / "store" / (path or "single")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
            self.files.append(path or "single")
            size, digest = await transfer.describe(place)
            files.append(StoredFile(path=path, size=size, digest=digest))
        return StoredOutput(name=name, dataset=DATASET, files=tuple(files))

    async def serve(self, _peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
        self.requests.append(request.index)
        if request.dataset != DATASET:
            return Refusal(reason="no such output")
        if self.on_request is not None:
            await self.on_request(request)
        return transfer.PullSource(self.folder / "store" / self.files[request.index])


@asynccontextmanager
async def open_holder(folder: Path) -> AsyncIterator[tuple[MemoryEndpoint, MemoryEndpoint, Holder]]:
    async with memory_pair() as (a, b):
        holder = Holder(folder)
        transfer.serve_pulls(b, holder.serve)
        yield a, b, holder
        assert not list((folder / "got").glob(".*")), "something incomplete is left"


def found(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_files_and_folders_appear_whole(tmp_path: Path) -> None:
    async with open_holder(tmp_path) as (a, b, holder):
        got = tmp_path / "got"
        size = await download_output(a, await holder.output(CONTENT), b.peer_id, got / "folder")
        assert size == sum(map(len, CONTENT.values()))
        assert found(got / "folder") == CONTENT
        holder.files.clear()
        assert await download_output(a, await holder.output({"": b"text"}), b.peer_id, got / "x" / "file.txt") == 4
        assert (got / "x" / "file.txt").read_bytes() == b"text"
        assert await download_output(a, await holder.output({}), b.peer_id, got / "empty") == 0
        assert list((got / "empty").iterdir()) == []


async def test_many_files_are_pulled(tmp_path: Path) -> None:
    content = {f"{number % 7}/{number}": str(number).encode() for number in range(100)}
    async with open_holder(tmp_path) as (a, b, holder):
        await download_output(a, await holder.output(content), b.peer_id, tmp_path / "got" / "folder")
        assert found(tmp_path / "got" / "folder") == content
        assert sorted(holder.requests) == list(range(100))


async def test_another_content_than_announced_is_counted_and_an_error_that_names_the_file(
    tmp_path: Path, recorded: Any
) -> None:
    async with open_holder(tmp_path) as (a, b, holder):
        output = await holder.output(CONTENT)
        (tmp_path / "store" / "conf" / "a.json").write_bytes(b"[]")
        with pytest.raises(ContentMismatchError) as caught:
            await download_output(a, output, b.peer_id, tmp_path / "got" / "folder")
        assert f"file 'conf/a.json' of output 'model' at {b.peer_id} is not what its worker reported" in str(
            caught.value
        )
        assert holder.requests.count(1) == 1
        assert recorded.total("hypha.scheduler.outputs.refused") == 1
        assert not (tmp_path / "got" / "folder").exists()


async def test_a_smaller_size_than_stored_is_refused(tmp_path: Path) -> None:
    async with open_holder(tmp_path) as (a, b, holder):
        output = await holder.output({"": b"text"})
        [file] = output.files
        for size in (3, 5):
            false = StoredOutput(
                name="model", dataset=DATASET, files=(StoredFile(path="", size=size, digest=file.digest),)
            )
            with pytest.raises(TransferError):
                await download_output(a, false, b.peer_id, tmp_path / "got" / "file")
            assert not (tmp_path / "got" / "file").exists()


async def test_a_holder_that_no_longer_has_it_is_asked_once(tmp_path: Path) -> None:
    async with open_holder(tmp_path) as (a, b, holder):
        output = await holder.output({"": b"text"})
        gone = StoredOutput(name="model", dataset="another", files=output.files)
        with pytest.raises(TransferRefusedError, match=r"file 'model' of output 'model'.*no such output"):
            await download_output(a, gone, b.peer_id, tmp_path / "got" / "file")
        assert holder.requests == [0]


async def test_target_and_space_are_checked_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_holder(tmp_path) as (a, b, holder):
        output, target = await holder.output({"": b"text"}), tmp_path / "got" / "file"
        target.parent.mkdir()
        target.symlink_to("nowhere")
        with pytest.raises(FileExistsError):
            await download_output(a, output, b.peer_id, target)
        target.unlink()
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=3))
        with pytest.raises(NoSpaceError, match="4 bytes are to be stored, and 3 are free"):
            await download_output(a, output, b.peer_id, target)
        assert holder.requests == []


async def test_a_cancelled_download_leaves_nothing(tmp_path: Path) -> None:
    async with open_holder(tmp_path) as (a, b, holder):
        output, asked = await holder.output(CONTENT), anyio.Event()

        async def hang(request: PullRequest) -> None:
            if request.index == 1:
                asked.set()
                await anyio.sleep_forever()

        holder.on_request = hang
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(download_output, a, output, b.peer_id, tmp_path / "got" / "folder")
            await asked.wait()
            tasks.cancel_scope.cancel()
        assert list((tmp_path / "got").iterdir()) == []


async def test_an_unreachable_holder_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "OUTPUT", RetryPolicy("test", (0.0, 0.0)))
    nobody = PeerId.from_public_key(bytes(32))
    async with open_holder(tmp_path) as (a, b, holder):
        output, tries = await holder.output({"": b"text"}), 0
        open_stream = a.open_stream

        async def open_late(peer: PeerId, protocols: list[str], **settings: object) -> object:
            nonlocal tries
            tries += 1
            return await open_stream(b.peer_id if tries == 3 else nobody, protocols)

        monkeypatch.setattr(a, "open_stream", open_late)
        assert await download_output(a, output, b.peer_id, tmp_path / "got" / "file") == 4
        tries = 10
        with pytest.raises(NetError):
            await download_output(a, output, b.peer_id, tmp_path / "got" / "other")
        assert tries == 13
