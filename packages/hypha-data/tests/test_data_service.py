"""A data node serves and announces slices that have the digest of the manifest, and files by their SHA-256."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.endpoint_helpers import pull_bytes
from support.waiting import until

from hypha_data import announcer, digest_cache, manifest_watch, slice_resolver, verification
from hypha_data.catalog import open_dataset
from hypha_data.config import DataConfig
from hypha_data.digest_cache import CACHE
from hypha_data.errors import DatasetError
from hypha_data.prepare import prepare_dataset
from hypha_data.provided_files import read_file
from hypha_data.service import serve
from hypha_data.verification import SliceVerifier
from hypha_net import dataset_directory, transfer
from hypha_net.content_directory import content_request, find_holders
from hypha_net.endpoint import Stream
from hypha_net.errors import StreamResetError, TransferRefusedError
from hypha_net.node.lifecycle import Node
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.codec import from_json, to_cbor
from hypha_proto.datasets import MANIFEST, Manifest
from hypha_proto.protocols import PULL
from hypha_proto.transfer import PullRequest

LARGE = 1 << 20
"""Samples of four slices that do not fit into the buffers between two nodes."""


class DataNode:
    """A data node in memory and a worker that pulls from it."""

    def __init__(self, node: Node, worker: MemoryEndpoint, target: Path) -> None:
        self.peer = node.endpoint.peer_id
        self.readiness = node.readiness
        self.worker = worker
        self.target = target

    async def pull(self, index: int) -> bytes:
        """Pull a slice as a worker without a digest of its own would."""
        await transfer.pull(self.worker, self.peer, PullRequest(dataset="digits", index=index), self.target)
        return self.target.read_bytes()

    async def until_ready(self) -> None:
        await until(lambda: self.readiness.is_ready, 60)

    async def announced(self) -> list[dataset_directory.FoundDataset]:
        return await dataset_directory.find_dataset(self.worker, "digits")


@asynccontextmanager
async def serving(**served: Any) -> AsyncIterator[tuple[Node, MemoryEndpoint]]:
    """Run the service of a data node with what its configuration names; yield the node and the endpoint of a worker."""
    pem = Path("no.pem")
    config = DataConfig(
        cert_pem=pem, key_pem=pem, trust_pem=pem, gateway_addresses=["/ip4/192.0.2.1/tcp/4001"], **served
    )
    network = MemoryNetwork()
    async with (
        network.endpoint("data") as endpoint,
        network.endpoint("worker") as worker,
        anyio.create_task_group() as tasks,
    ):
        node = Node(endpoint, tasks)
        tasks.start_soon(serve, config, node)
        yield node, worker
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def running(folder: Path, *, waits: bool = True) -> AsyncIterator[DataNode]:
    """Serve the dataset in `folder`, which is ready if this `waits`."""
    async with serving(dataset_path=folder) as (node, worker):
        started = DataNode(node, worker, folder.parent / "pulled")
        if waits:
            await started.until_ready()
        yield started


def prepared(folder: Path, samples: int = 23) -> Path:
    """Prepare the dataset `digits` of four slices."""
    source = folder / "all.safetensors"
    save_file({"labels": np.arange(samples, dtype=np.int64)}, source)
    prepare_dataset(source, folder / "digits", name="digits", slices=4, seed=0)
    return folder / "digits"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepared(tmp_path)


def slice_file(folder: Path, index: int) -> Path:
    return folder / f"slice-{index:05d}.safetensors"


def corrupt(path: Path) -> bytes:
    """Change one bit of a file, keeping its size and time of modification; return what it contained."""
    before, status = path.read_bytes(), path.stat()
    with path.open("r+b") as file:  # in place: a reader never finds the file shorter
        file.seek(-1, os.SEEK_END)
        file.write(bytes([before[-1] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    return before


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of these tests are only some milliseconds old."""
    monkeypatch.setattr(digest_cache, "SETTLED_NS", 0)
    monkeypatch.setattr(announcer, "RECHECK", 0.02)
    monkeypatch.setattr(announcer, "SETTLE", 0.02)
    monkeypatch.setattr(verification, "RECHECK_INTERVAL", 0.02)
    monkeypatch.setattr(manifest_watch, "POLL_INTERVAL", 0.02)


async def test_every_slice_is_announced_and_served(folder: Path, tmp_path: Path) -> None:
    async with running(folder) as node:
        [found] = await node.announced()
        assert (found.provider, found.record.num_slices) == (node.peer, 4)
        request = PullRequest(dataset="digits", index=0, name="manifest")
        await transfer.pull(node.worker, node.peer, request, node.target, digest=found.record.manifest)
        manifest: Manifest = from_json(Manifest, node.target.read_bytes())
        for index, entry in enumerate(manifest.slices):
            assert len(await node.pull(index)) == entry.size
            assert len(load_file(node.target)["labels"]) == entry.samples
        for wrong in (
            PullRequest(dataset="digits", index=4),
            PullRequest(dataset="other", index=0),
            PullRequest(dataset="digits", index=0, name="../../etc/passwd"),
        ):
            with pytest.raises(TransferRefusedError):
                await transfer.pull(node.worker, node.peer, wrong, tmp_path / "none")


async def test_a_rewritten_slice_is_refused_until_it_is_restored(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hypha_data")
    async with running(folder) as node:
        expected = await node.pull(1)
        await until(lambda: "4 of 4 slices match" in caplog.text)  # all are checked once after the start
        before = corrupt(slice_file(folder, 1))
        for _ in range(3):
            with pytest.raises(TransferRefusedError, match="slice 1 of digits is not what was announced"):
                await node.pull(1)
        await node.pull(0)
        slice_file(folder, 1).write_bytes(before)
        assert await node.pull(1) == expected
    [error] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "dataset digits, slice 1 is not served" in error
    assert str(slice_file(folder, 1)) in error
    assert re.search(r"expected blake3:\w{64}, found blake3:\w{64}", error)
    assert f"restore the file; or, if it is meant to be so, remove {folder / MANIFEST} and restart" in error
    assert "matches again and is served" in caplog.text


@pytest.mark.parametrize("damage", ["rewritten", "newer", "shorter", "removed", "directory"])
async def test_after_a_restart_a_damaged_slice_is_not_served(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, path = open_dataset("digits", folder), slice_file(folder, 1)
    _damage(path, damage)
    async with running(folder) as node:
        [found] = await node.announced()
        assert found.record.manifest == before.digest, "the changed bytes are announced"
        with pytest.raises(TransferRefusedError, match="not what was announced"):
            await node.pull(1)
        await node.pull(2)
    assert f"dataset digits, slice 1 is not served: {path}" in caplog.text


def _damage(path: Path, damage: str) -> None:
    if damage in ("removed", "directory"):
        path.unlink()
        if damage == "directory":
            path.mkdir()
        return
    corrupt(path)
    if damage == "newer":
        os.utime(path)
    elif damage == "shorter":
        os.truncate(path, 100)


async def test_withheld_slices_are_announced_as_such_until_they_are_restored(folder: Path) -> None:
    before = corrupt(slice_file(folder, 2))
    async with running(folder) as node:
        await until_withheld(node, (2,))
        [found] = await node.announced()
        assert found.record.num_slices == 4
        slice_file(folder, 2).write_bytes(before)
        await until_withheld(node, None)  # although nobody asks for it


async def until_withheld(node: DataNode, expected: tuple[int, ...] | None) -> None:
    while [found.record.withheld for found in await node.announced()] != [expected]:
        await anyio.sleep(0.01)


async def test_a_dataset_without_a_usable_slice_is_announced_when_one_is_restored(folder: Path) -> None:
    before = [corrupt(slice_file(folder, index)) for index in range(4)]
    async with running(folder, waits=False) as node:
        while not node.readiness.reason or "none of its 4 slices" not in node.readiness.reason:
            await anyio.sleep(0.01)
        assert await node.announced() == []
        slice_file(folder, 3).write_bytes(before[3])
        await node.until_ready()
        assert len(await node.announced()) == 1
        await node.pull(3)


@pytest.mark.parametrize("replace", [False, True])
async def test_a_slice_that_changes_while_it_is_sent_is_cut_off(
    tmp_path: Path, replace: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The puller learns of it at once, and not only from the digest."""
    folder = prepared(tmp_path, LARGE)
    path = slice_file(folder, 1)
    async with running(folder) as node:
        stream = await request_slice(node, 1)
        assert await stream.receive_some(1000)
        if replace:
            (other := path.with_suffix(".new")).write_bytes(b"other")
            other.replace(path)
        else:
            corrupt(path)
        with pytest.raises(StreamResetError):
            while await stream.receive_some(1 << 20):
                pass
    assert "slice 1 of digits changed while it was sent" in caplog.text
    assert re.search(r"slice 1 is not served: .*expected blake3:\w+, found blake3:\w+", caplog.text)


async def test_a_slice_is_not_cut_off_when_only_other_files_change(tmp_path: Path) -> None:
    folder = prepared(tmp_path, LARGE)
    async with running(folder) as node:
        corrupt(slice_file(folder, 2))
        assert await node.pull(1) == slice_file(folder, 1).read_bytes()


async def test_a_slice_is_served_while_another_one_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, reading = threading.Event(), digest_cache.DigestCache.read

    def slow(cache: digest_cache.DigestCache, path: Path, on_read: digest_cache.OnRead) -> object:
        assert path != slice_file(folder, 0) or release.wait(20)
        return reading(cache, path, on_read)

    monkeypatch.setattr(digest_cache.DigestCache, "read", slow)
    async with running(folder, waits=False) as node, anyio.create_task_group() as tasks:
        tasks.start_soon(node.pull, 0)
        for index in (1, 2, 3):
            request = PullRequest(dataset="digits", index=index)
            await pull_bytes(node.worker, node.peer, request, max_bytes=1 << 20)
        release.set()


async def test_a_request_waits_until_its_dataset_is_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal would be final for the worker, whose data node may have been restarted a moment ago."""
    (folder / MANIFEST).unlink()
    release, reading = threading.Event(), digest_cache.DigestCache.read

    def slow(cache: digest_cache.DigestCache, path: Path, on_read: digest_cache.OnRead) -> object:
        assert release.wait(20)
        return reading(cache, path, on_read)

    monkeypatch.setattr(digest_cache.DigestCache, "read", slow)
    async with running(folder, waits=False) as node:
        await anyio.wait_all_tasks_blocked()
        with monkeypatch.context() as patched:
            patched.setattr(slice_resolver, "OPEN_TIMEOUT", 0.01)
            stream = await request_slice(node, 0)
            with pytest.raises(StreamResetError):
                await stream.receive_some(1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.pull, 0)
            await anyio.wait_all_tasks_blocked()
            release.set()


async def request_slice(node: DataNode, index: int) -> Stream:
    """Request a slice; return the stream that it comes on, before the answer was read."""
    stream = await node.worker.open_stream(node.peer, [PULL])
    request = to_cbor(PullRequest, PullRequest(dataset="digits", index=index))
    await stream.send_all(len(request).to_bytes(8, "little") + request)
    await stream.send_eof()
    return stream


async def verified(folder: Path, *, verify: bool = False) -> SliceVerifier:
    verifier = SliceVerifier(await anyio.to_thread.run_sync(lambda: open_dataset("digits", folder, verify=verify)))
    await verifier.verify_all()
    return verifier


async def test_a_restart_reads_only_what_has_changed(folder: Path) -> None:
    assert (await verified(folder)).files_read == 4
    assert (await verified(folder)).files_read == 0
    before = corrupt(slice_file(folder, 2))
    changed = await verified(folder)
    assert (changed.files_read, changed.withheld) == (1, {2})
    again = await verified(folder)
    assert (again.files_read, again.withheld) == (0, {2})
    slice_file(folder, 2).write_bytes(before)
    restored = await verified(folder)
    assert (restored.files_read, restored.withheld) == (1, frozenset())


async def test_verify_reads_everything_again(folder: Path) -> None:
    """The cache may be wrong about a disk that has lost bytes without a write."""
    path = slice_file(folder, 2)
    await verified(folder)
    good = path.stat()
    corrupt(path)
    cache, bad = folder / CACHE, path.stat()
    remembered = json.loads(cache.read_bytes())
    [entry] = [entry for entry in remembered["files"] if entry["file"] == path.name]
    assert (entry["changed_ns"], entry["inode"]) == (good.st_ctime_ns, good.st_ino)
    entry["changed_ns"] = bad.st_ctime_ns
    cache.write_text(json.dumps(remembered))
    assert (await verified(folder)).withheld == frozenset()
    checked = await verified(folder, verify=True)
    assert (checked.files_read, checked.withheld) == (4, {2})


async def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next change may get the same times."""
    monkeypatch.setattr(digest_cache, "SETTLED_NS", 3_600_000_000_000)
    folder = prepared(tmp_path)
    for _ in range(2):
        verifier = await verified(folder)
        assert (verifier.files_read, verifier.withheld) == (4, frozenset())


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"files":[{"file":"a","digest":7}]}'])
async def test_an_unusable_cache_is_ignored(folder: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (folder / CACHE).write_bytes(content)
    assert (await verified(folder)).files_read == 4
    assert (await verified(folder)).files_read == 0
    assert f"{folder / CACHE} cannot be used" in caplog.text


async def test_a_folder_that_cannot_be_written_to_is_served(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / CACHE).mkdir()  # also for root, who may write anywhere
    assert (await verified(folder)).withheld == frozenset()
    assert "cannot be written, so every start reads all slices again" in caplog.text


def prepare_again(folder: Path, slices: int) -> Manifest:
    """Prepare the dataset anew, with another number of slices."""
    return prepare_dataset(folder.parent / "all.safetensors", folder, name="digits", slices=slices, seed=1, force=True)


async def until_announced(node: DataNode, slices: int) -> None:
    while [each.record.num_slices for each in await node.announced()] != [slices]:
        await anyio.sleep(0.01)


async def test_a_dataset_that_is_prepared_again_is_announced_without_a_restart(folder: Path) -> None:
    async with running(folder) as node:
        [before] = await node.announced()
        await anyio.to_thread.run_sync(prepare_again, folder, 6)
        await until_announced(node, 6)
        [after] = await node.announced()
        assert after.record.manifest != before.record.manifest
        assert after.record.seq > before.record.seq
        assert after.record.withheld is None
        request = PullRequest(dataset="digits", index=0, name="manifest")
        await transfer.pull(node.worker, node.peer, request, node.target, digest=after.record.manifest)
        assert await node.pull(5) == slice_file(folder, 5).read_bytes()


@pytest.mark.parametrize("fault", ["not json", "missing slice"])
async def test_a_broken_new_manifest_leaves_the_old_one_served(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, find = prepared(tmp_path), manifest_watch.find_manifest
    looks: list[Path] = []
    monkeypatch.setattr(manifest_watch, "find_manifest", lambda path: (looks.append(path), find(path))[1])
    written = (folder / MANIFEST).read_bytes()
    content = json.loads(written)
    extra = {**content["slices"][0], "file": "slice-00009.safetensors"}
    broken = b"{" if fault == "not json" else json.dumps({**content, "slices": [*content["slices"], extra]}).encode()

    def warnings() -> list[str]:
        return [line.getMessage() for line in caplog.records if "the earlier one stays" in line.getMessage()]

    async with running(folder) as node:
        [before] = await node.announced()
        (tmp_path / "new").write_bytes(broken)
        (tmp_path / "new").replace(folder / MANIFEST)
        await until(lambda: warnings(), 60)
        seen = len(looks)
        await until(lambda: len(looks) >= seen + 4, 60)
        assert await node.pull(3) == slice_file(folder, 3).read_bytes()
        assert await node.announced() == [before]
        assert len(warnings()) == 1
        assert str(folder / MANIFEST) in warnings()[0]
        if fault == "missing slice":  # which arrives late
            (tmp_path / "late").write_bytes(slice_file(folder, 0).read_bytes())
            (tmp_path / "late").replace(folder / "slice-00009.safetensors")
        else:
            await anyio.to_thread.run_sync(prepare_again, folder, 5)
        await until_announced(node, 5)


CONTENT = bytes(range(256)) * 100
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@asynccontextmanager
async def providing(*files: Path) -> AsyncIterator[tuple[Node, MemoryEndpoint]]:
    async with serving(provide=list(files)) as (node, worker):
        await until(lambda: node.readiness.is_ready, 60)
        yield node, worker


async def test_a_file_is_announced_and_pulled_by_its_digest(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(CONTENT)
    (tmp_path / "again").write_bytes(CONTENT)
    async with providing(tmp_path / "model", tmp_path / "again") as (node, worker):
        [holder] = await find_holders(worker, SHA256)
        assert (holder.peer, holder.size) == (node.endpoint.peer_id, len(CONTENT))
        target, digest = tmp_path / "pulled", f"sha256:{SHA256}"
        pulled = await transfer.pull(worker, holder.peer, content_request(SHA256), target, digest=digest)
        assert pulled == transfer.PullResult(len(CONTENT), digest)
        for wrong in (
            content_request("0" * 64),
            PullRequest(dataset=f"sha256:{SHA256}", index=1),
            PullRequest(dataset=f"sha256:{SHA256}", index=0, name="manifest"),
        ):
            with pytest.raises(TransferRefusedError, match="no content"):
                await transfer.pull(worker, holder.peer, wrong, target)
    assert (tmp_path / "pulled").read_bytes() == CONTENT


async def test_a_file_that_has_changed_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(CONTENT)
    async with providing(tmp_path / "model") as (node, worker):
        os.truncate(tmp_path / "model", 10)
        with pytest.raises(TransferRefusedError, match="has changed here"):
            await transfer.pull(worker, node.endpoint.peer_id, content_request(SHA256), tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


@pytest.mark.parametrize("name", ["none", "folder", "pipe"])
def test_what_is_no_file_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DatasetError, match=name):
        read_file(tmp_path / name, lambda _count: None)
