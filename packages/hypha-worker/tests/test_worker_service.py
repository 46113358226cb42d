"""The start of a worker: readiness, and the removal of work directories that a killed worker has left."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.waiting import until

from hypha_net import pubsub
from hypha_net.node.lifecycle import Node
from hypha_net.testing import MemoryNetwork
from hypha_proto.offers import WORKER_REQUESTS
from hypha_worker.executors.process.process_tree import TOKEN_VARIABLE, make_token
from hypha_worker.service import open_worker, serve
from hypha_worker.work_dir import remove_folder, work_dir_key


async def test_a_worker_is_ready_when_a_peer_is_on_its_topic(tmp_path: Path, make_config: Any) -> None:
    network = MemoryNetwork()
    async with (
        network.endpoint("worker") as endpoint,
        network.endpoint("gateway") as gateway,
        anyio.create_task_group() as tasks,
    ):
        node = Node(endpoint, tasks)
        tasks.start_soon(serve, make_config(tmp_path), node)
        await until(lambda: "hypha/worker" in (node.readiness.reason or ""), 60)
        assert not node.readiness.is_ready
        await gateway.connect(endpoint.addresses[0])
        async with pubsub.subscribe(gateway, WORKER_REQUESTS):
            await until(lambda: node.readiness.is_ready, 60)
        tasks.cancel_scope.cancel()


async def test_a_worker_whose_topic_has_peers_logs_no_waiting(on_site: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hypha_net.node.health"):
        async with on_site() as site:
            assert site.node.readiness.is_ready
    assert [record.getMessage() for record in caplog.records if "ready" in record.getMessage()] == ["ready"]


@pytest.fixture
def start_worker(tmp_path: Path, make_config: Any) -> Callable[..., None]:
    """Return a function that runs a worker, and meanwhile another function."""

    def start(meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        async def main() -> None:
            with anyio.fail_after(30):
                async with (
                    MemoryNetwork().endpoint("worker") as endpoint,
                    open_worker(make_config(tmp_path), endpoint),
                ):
                    if meanwhile is not None:
                        await meanwhile()

        anyio.run(main, backend="trio")

    return start


@pytest.fixture
def left_process() -> Iterator[Callable[[Path], subprocess.Popen[bytes]]]:
    """Return a function that starts a process as of a job in a work directory."""
    started: list[subprocess.Popen[bytes]] = []

    def start(work_dir: Path) -> subprocess.Popen[bytes]:
        environment = os.environ | {TOKEN_VARIABLE: make_token(work_dir)}
        started.append(subprocess.Popen(["sleep", "60"], env=environment, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def test_executors_that_outlived_their_worker_are_ended(
    tmp_path: Path, start_worker: Any, left_process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own, of_another = left_process(tmp_path / "work"), left_process(tmp_path / "other")
    start_worker()
    assert own.poll() is not None
    assert of_another.poll() is None
    assert f"ending processes {own.pid}, left by a worker that was killed" in caplog.text


def test_executors_of_a_worker_that_runs_are_not_ended(
    tmp_path: Path, start_worker: Any, left_process: Any, make_config: Any
) -> None:
    async def start_second() -> None:
        process = left_process(tmp_path / "work")
        async with MemoryNetwork().endpoint("second") as endpoint, open_worker(make_config(tmp_path), endpoint):
            assert process.poll() is None

    start_worker(start_second)


@pytest.mark.parametrize("name", ["hypha", "outputs", "incoming"])
def test_folders_of_jobs_are_removed(tmp_path: Path, start_worker: Any, name: str) -> None:
    folder = tmp_path / "work" / f"{name}-{uuid.uuid4()}"
    (folder / "sub").mkdir(parents=True)
    (kept := tmp_path / "work" / "logs").mkdir()
    start_worker()
    assert not folder.exists()
    assert kept.exists()


def test_folders_of_sockets_are_removed(tmp_path: Path, start_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        left = [Path(temporary, f"hypha-{work_dir_key(tmp_path / name)}-x") for name in ("work", "other")]
        for folder in left:
            folder.mkdir()
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(folder / "a.sock"))

        async def look() -> None:
            assert len(os.listdir(temporary)) == 2, "another worker's and this one's"

        start_worker(look)
        assert [folder.exists() for folder in left] == [False, True]
        assert list(Path(temporary).iterdir()) == left[1:]


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "keep").write_text("kept")
    return folder


def test_links_are_removed_and_what_they_lead_to_stays(tmp_path: Path, outside: Path) -> None:
    folder = tmp_path / "job"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "file").write_text("x")
    (folder / "link").symlink_to(outside)
    (folder / "a" / "b" / "link").symlink_to(outside)
    (folder / "a" / "b").chmod(0)
    remove_folder(folder)
    assert not folder.exists()
    assert (outside / "keep").read_text() == "kept"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(
    tmp_path: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    folder = tmp_path / "job"
    victim = folder.joinpath(*["deep"] * (depth - 1), "victim")
    victim.mkdir(parents=True)
    original: Any = os.open

    def swap_and_open(path: str, *arguments: Any, **more: Any) -> int:
        if path == "victim":
            parent = more["dir_fd"]
            os.rmdir(path, dir_fd=parent)
            os.symlink(outside, path, dir_fd=parent)
        descriptor: int = original(path, *arguments, **more)
        return descriptor

    monkeypatch.setattr(os, "open", swap_and_open)
    remove_folder(folder)
    assert (outside / "keep").read_text() == "kept"
    assert "cannot be removed completely" in caplog.text


def test_a_link_in_place_of_the_folder_is_left(tmp_path: Path, outside: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "job"
    folder.symlink_to(outside)
    remove_folder(folder)
    assert (outside / "keep").read_text() == "kept"
    assert "is a symbolic link" in caplog.text
