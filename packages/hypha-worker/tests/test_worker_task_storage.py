"""The storage of a job: all its bytes together stay within its lease, and nothing is allocated beyond it."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest

from hypha_net import transfer
from hypha_net.errors import TransferError, TransferRefusedError
from hypha_net.testing import MemoryNetwork
from hypha_proto.job_spec import All, PeersReference, SliceAddress
from hypha_proto.training_reports import Continue, ReportAnswer, ReportTraining
from hypha_proto.transfer import PSEUDO_GRADIENT, PullRequest, PushHeader, Refusal
from hypha_worker import task_storage
from hypha_worker.connectors.peer_files import PeerFiles, WantedFile
from hypha_worker.errors import BridgeError, ExecutionError, StorageExceededError
from hypha_worker.task_storage import TaskStorage
from hypha_worker.work_dir import remove_folder

InLab = Callable[..., Any]


def make(folder: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        (folder / name).write_bytes(b"x" * size)


def test_files_at_any_depth_and_announcements_count_together(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    make(tmp_path / "folder", model=300)
    storage = TaskStorage(tmp_path, 1000)
    storage.reserve(tmp_path / "a", 400)
    make(tmp_path, a=100)  # it arrives, and counts as announced
    storage.reserve(tmp_path / "b", 300)
    with pytest.raises(StorageExceededError, match=r"a file of 1 bytes .*: 1000 of 1000 bytes are used"):
        storage.reserve(tmp_path / "c", 1)
    storage.release(tmp_path / "a")  # it broke off: 100 bytes are there
    storage.reserve(tmp_path / "c", 300)
    with pytest.raises(StorageExceededError):
        storage.reserve(tmp_path / "c", 301)
    (tmp_path / "folder" / "model").unlink()
    storage.reserve(tmp_path / "c", 600)


def test_links_count_once_and_are_not_followed(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    make(tmp_path, outside=5000)
    make(work, file=600)  # the length of a symbolic link is that of its target's path
    os.link(work / "file", work / "again")
    os.symlink(tmp_path / "outside", work / "link")
    os.symlink(tmp_path, work / "folder")
    storage = TaskStorage(work, 1000)
    storage.reserve(work / "a", 100)


def test_an_interrupted_transfer_counts_with_what_it_has(tmp_path: Path) -> None:
    with (tmp_path / ".hypha-blake3-1.part").open("wb") as file:
        file.truncate(1 << 30)
        os.pwrite(file.fileno(), b"x" * 8192, 0)
    TaskStorage(tmp_path, 100_000).reserve(tmp_path / "a", 50_000)


def test_a_job_without_a_work_directory_yet_may_announce(tmp_path: Path) -> None:
    TaskStorage(tmp_path / "none", 1000).reserve(tmp_path / "none" / "a", 1000)


def test_concurrent_announcements_never_exceed_the_limit(tmp_path: Path) -> None:
    storage, granted = TaskStorage(tmp_path, 1000), []

    def announce(number: int) -> None:
        try:
            storage.reserve(tmp_path / f"{number}", 90)
        except StorageExceededError:
            return
        granted.append(number)

    threads = [threading.Thread(target=announce, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(granted) == 11


async def test_slices_that_exceed_the_storage_are_refused_before_they_are_stored(tmp_path: Path) -> None:
    (work := tmp_path / "work").mkdir()

    async def resolve(_peer: Any, _request: PullRequest) -> transfer.PullSource | Refusal:
        return transfer.PullSource(b"x" * (3 << 20))

    network = MemoryNetwork()
    async with network.endpoint("worker") as worker, network.endpoint("data") as data:
        transfer.serve_pulls(data, resolve)
        files = PeerFiles(worker, TaskStorage(work, 8 << 20))
        for index in range(2):
            await files.pull([data.peer_id], WantedFile(SliceAddress(dataset="d", index=index)), work / f"{index}")
        used = sum(path.stat().st_blocks * 512 for path in work.iterdir())
        assert used >= 6 << 20
        with pytest.raises(BridgeError, match=f"{6 << 20} of {8 << 20} bytes are used") as caught:
            await files.pull([data.peer_id], WantedFile(SliceAddress(dataset="d", index=2)), work / "2")
        assert (caught.value.status, caught.value.kind) == (507, "storage-exceeded")
        assert sum(path.stat().st_blocks * 512 for path in work.iterdir()) == used
        (work / "0").unlink()  # the executor has used it
        await files.pull([data.peer_id], WantedFile(SliceAddress(dataset="d", index=2)), work / "2")


async def test_pushes_to_a_job_stay_within_its_lease_together(in_lab: InLab) -> None:
    async with in_lab() as lab:
        await lab.start("time.sleep(60)", cpu=1.0, storage=0.001)
        for number in range(1, 4):
            await lab.push(lab.server, number, os.urandom(300_000))
        with pytest.raises(TransferError, match=r"300000 bytes .* of 1000000 bytes are used"):
            await lab.push(lab.server, 4, os.urandom(300_000))
        stored = sum(path.stat().st_blocks * 512 for path in (lab.folder / "work").rglob("*") if path.is_file())
        assert 900_000 < stored < 1_100_000


async def test_a_job_that_asked_for_no_storage_gets_the_default(in_lab: InLab) -> None:
    """Without a bound, 1 TiB was allocated when a peer announced it."""
    async with in_lab(resources={"cpu": 2.0, "memory": 4.0, "default": {"storage": 0.001}}) as lab:
        spec = lab.aggregate_spec([lab.data.peer_id], [lab.data.peer_id])
        lease = await lab.scheduler.hire(lab.SERVER)
        await lab.scheduler.dispatch(lease, spec)
        path, scheduler = lab.folder / "huge", lab.scheduler.endpoint.peer_id
        with path.open("wb") as file:
            file.truncate(64 << 20)
        digest = f"blake3:{'0' * 64}"
        header = PushHeader(lab.scheduler.sender, 1, PSEUDO_GRADIENT, "update", 64 << 20, digest, scheduler)
        with pytest.raises(TransferRefusedError, match="0 of 1000000 bytes are used"):
            await transfer.push(lab.data, lab.peer, path, header)


FILLS = """
for number in range(30):  # one file of that size would end the job by itself where RLIMIT_FSIZE holds
    with open(os.path.join(work_dir, f"part-{number}"), "wb") as file:
        file.write(bytes(100_000))
time.sleep(60)
"""
PACED = """
while True:
    post("/status/send", {"status": {"batch_size": 1}})
    time.sleep(0.02)
"""


async def test_a_job_that_fills_its_storage_fails_and_others_go_on(
    in_lab: InLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an executor wrote itself was counted with the next file that it received only."""
    look, reported = TaskStorage._measure_space, threading.Event()

    def look_slowly(storage: TaskStorage) -> int:
        reported.clear()
        assert storage.limit != 1_000_000 or reported.wait(30)  # a blocked event loop takes no report
        return look(storage)

    def answer(_report: ReportTraining) -> ReportAnswer:
        reported.set()
        return Continue()

    async with in_lab() as lab:
        await lab.start(PACED)
        lab.scheduler.answer = answer
        await lab.scheduler.until(lambda: lab.scheduler.reports)
        monkeypatch.setattr(TaskStorage, "_measure_space", look_slowly)
        results = PeersReference(peers=(lab.data.peer_id,), strategy=All())  # two tasks of a job take no files of one
        lease = await lab.start(FILLS, lab.train_spec(results=results), cpu=1.0, storage=0.001)
        end = await lab.scheduler.ended()
        assert end.lease == lease
        assert end.outcome == "failed"
        assert re.search(r"stores \d+ bytes, more than the 1000000 of its lease \(storage\): request more", end.reason)
        assert len(lab.worker.tasks.running) == 1


@pytest.mark.parametrize("kind", ["sparse", "second link", "within"])
def test_what_takes_no_space_does_not_end_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    make(tmp_path, file=1_500_000)
    if kind == "sparse":
        with (tmp_path / "sparse").open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "second link":
        os.link(tmp_path / "file", tmp_path / "again")

    monkeypatch.setattr(anyio, "sleep", AsyncMock(side_effect=TimeoutError))  # the pause after the first look
    with pytest.raises(TimeoutError):
        anyio.run(TaskStorage(tmp_path, 1_000_000).watch, backend="trio")


async def test_a_job_whose_folders_are_too_deep_to_be_looked_at_is_ended(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=folder)
        inner = os.open("d" * 250, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    try:
        with pytest.raises(ExecutionError, match="nested deeper"):
            await TaskStorage(tmp_path, 1000).watch()
    finally:
        remove_folder(tmp_path / ("d" * 250))


async def test_a_job_with_too_many_files_is_ended_and_gets_no_further_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_storage, "MAX_ENTRIES", 5)
    make(tmp_path, **{f"f{number}": 0 for number in range(6)})
    with pytest.raises(StorageExceededError, match="more than 5 files"):
        TaskStorage(tmp_path, 1000).reserve(tmp_path / "a", 0)
    with pytest.raises(ExecutionError, match="more than 5 files"):
        await TaskStorage(tmp_path, 1000).watch()
