"""Files from peers: data nodes that are away, that refuse, or that have wrong content; full disks, unusable slices."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from blake3 import blake3

from hypha_net import retries, rpc, transfer
from hypha_net.retries import RetryPolicy
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.datasets import DATA, DataRequest, NotFound, SliceAssigned, UnusableSlice
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import SliceAddress
from hypha_proto.leases import SAY_GOODBYE, Goodbye, GoodbyeReceived
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.transfer import PullRequest, Refusal
from hypha_worker.connectors.peer_files import PeerFiles, WantedFile, check_tensor_file
from hypha_worker.errors import BridgeError, DiskFaultError, UnusableFileError
from hypha_worker.service import open_worker
from hypha_worker.task_storage import TaskStorage


async def until_retried(caplog: pytest.LogCaptureFixture) -> None:
    """Wait until a pull has failed once and is to be repeated."""
    while "retrying in" not in caplog.text:
        await anyio.sleep(0.01)


GOOD, WRONG = b"x" * 1000, b"y" * 1000
DIGEST = f"blake3:{blake3(GOOD).hexdigest()}"
ADDRESS = SliceAddress(dataset="digits", index=3)
WANTED = WantedFile(ADDRESS, DIGEST)


@dataclass
class Nodes:
    """A worker's files, and data nodes with content of their own."""

    files: PeerFiles
    first: MemoryEndpoint
    second: MemoryEndpoint
    folder: Path
    asked: list[PeerId] = field(default_factory=list)

    @property
    def peers(self) -> list[PeerId]:
        return [self.first.peer_id, self.second.peer_id]

    @property
    def target(self) -> Path:
        return self.folder / "got"

    def serve(self, node: MemoryEndpoint, content: bytes) -> None:
        """Let a node announce `DIGEST` and send other content, as one whose file has changed since its start."""

        async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource:
            self.asked.append(node.peer_id)
            return transfer.PullSource(content, DIGEST)

        transfer.serve_pulls(node, resolve)

    def refuse(self, node: MemoryEndpoint, reason: str) -> None:
        async def resolve(_peer: PeerId, _request: PullRequest) -> Refusal:
            self.asked.append(node.peer_id)
            return Refusal(reason=reason)

        transfer.serve_pulls(node, resolve)


@asynccontextmanager
async def open_nodes(folder: Path) -> AsyncIterator[Nodes]:
    network = MemoryNetwork()
    async with network.endpoint("worker") as worker, network.endpoint("a") as first, network.endpoint("b") as second:
        yield Nodes(PeerFiles(worker, TaskStorage(folder, 1 << 20)), first, second, folder)


@pytest.fixture
def with_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractAsyncContextManager[Nodes]]:
    """Return a function that opens nodes, with long pauses for those that are away, which nothing must wait for."""
    for name in ("NO_PROVIDER", "WRONG_CONTENT"):
        monkeypatch.setattr(retries, name, RetryPolicy("test", (60.0,)))
    return lambda: open_nodes(tmp_path)


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_restarting_data_node_is_retried_and_a_refusal_is_final(
    with_nodes: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, comes_back: bool
) -> None:
    monkeypatch.setattr(retries, "NO_PROVIDER", RetryPolicy("test", (0.05,) * 1000))
    async with with_nodes() as nodes, anyio.create_task_group() as tasks:

        async def serve() -> None:
            await until_retried(caplog)  # the node is reachable, and does not serve files yet
            if comes_back:
                nodes.serve(nodes.first, GOOD)
            else:
                nodes.refuse(nodes.first, "not here any more")

        tasks.start_soon(serve)
        if comes_back:
            _, peer = await nodes.files.pull(nodes.peers[:1], WantedFile(ADDRESS), nodes.target)
            assert (peer, nodes.target.read_bytes()) == (nodes.first.peer_id, GOOD)
        else:
            with pytest.raises(BridgeError, match="not here any more"):
                await nodes.files.pull(nodes.peers[:1], WantedFile(ADDRESS), nodes.target)


async def test_a_node_with_wrong_content_is_asked_once_and_the_next_one_after_it(with_nodes: Any) -> None:
    async with with_nodes() as nodes:
        nodes.serve(nodes.first, WRONG)
        nodes.serve(nodes.second, GOOD)
        _, peer = await nodes.files.pull(nodes.peers, WANTED, nodes.target)
        assert peer == nodes.second.peer_id
        assert nodes.target.read_bytes() == GOOD
        assert nodes.asked == nodes.peers


async def test_a_file_that_no_node_has_as_announced_is_an_error_at_once_that_names_each(with_nodes: Any) -> None:
    async with with_nodes() as nodes:
        nodes.serve(nodes.first, WRONG)
        nodes.refuse(nodes.second, "slice 3 is not what was announced")
        with pytest.raises(UnusableFileError, match="digits/3 cannot be used") as caught:
            await nodes.files.pull(nodes.peers, WANTED, nodes.target)
        first, second = (caught.value.failures[peer] for peer in nodes.peers)
        assert "the digest is" in first
        assert "not what was announced" in second
        assert nodes.asked == nodes.peers
        assert not nodes.target.exists()


async def test_a_file_that_is_too_short_is_unusable(with_nodes: Any) -> None:
    async with with_nodes() as nodes:
        nodes.serve(nodes.first, GOOD[:500])
        with pytest.raises(UnusableFileError):
            await nodes.files.pull(nodes.peers[:1], WANTED, nodes.target)
        assert len(nodes.asked) == 1


async def test_a_node_that_is_away_is_waited_for_when_the_other_has_wrong_content(
    with_nodes: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "WRONG_CONTENT", RetryPolicy("test", (0.2, 0.2, 0.2)))
    async with with_nodes() as nodes:
        nodes.serve(nodes.first, WRONG)
        with pytest.raises(UnusableFileError) as caught:  # the second never serves: not waited for to the end
            await nodes.files.pull(nodes.peers, WANTED, nodes.target)
        assert set(caught.value.failures) == set(nodes.peers)
        assert nodes.asked == nodes.peers[:1]
        caplog.clear()

        async def serve_later() -> None:
            await until_retried(caplog)
            nodes.serve(nodes.second, GOOD)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_later)
            _, peer = await nodes.files.pull(nodes.peers, WANTED, nodes.target)
        assert peer == nodes.second.peer_id


async def test_a_node_that_does_not_serve_the_dataset_yet_is_asked_again(
    with_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "NO_PROVIDER", RetryPolicy("test", (0.1, 0.1)))
    async with with_nodes() as nodes:
        opened = anyio.Event()

        async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
            nodes.asked.append(nodes.first.peer_id)
            if request.name == "manifest":
                opened.set()
                return Refusal(reason="no dataset 'digits' here")
            return transfer.PullSource(GOOD) if opened.is_set() else Refusal(reason="no dataset 'digits' here")

        transfer.serve_pulls(nodes.first, resolve)
        await nodes.files.pull(nodes.peers[:1], WantedFile(ADDRESS, DIGEST, is_slice=True), nodes.target)
        assert nodes.target.read_bytes() == GOOD
        assert len(nodes.asked) == 3  # slice, manifest, slice


async def test_a_node_that_serves_the_dataset_and_refuses_a_slice_is_asked_once(with_nodes: Any) -> None:
    async with with_nodes() as nodes:

        async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
            nodes.asked.append(nodes.first.peer_id)
            return transfer.PullSource(b"{}") if request.name == "manifest" else Refusal(reason="not as announced")

        transfer.serve_pulls(nodes.first, resolve)
        with pytest.raises(UnusableFileError, match="not as announced"):
            await nodes.files.pull(nodes.peers[:1], WantedFile(ADDRESS, DIGEST, is_slice=True), nodes.target)
        assert len(nodes.asked) == 2


def fail_to_allocate(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(os, "posix_fallocate", fail)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
async def test_a_disk_that_is_full_or_fails_is_an_error_at_once_that_names_the_path(
    with_nodes: Any, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    fail_to_allocate(monkeypatch, OSError(code, os.strerror(code)))
    async with with_nodes() as nodes:
        nodes.serve(nodes.first, GOOD)
        nodes.serve(nodes.second, GOOD)
        with pytest.raises(DiskFaultError) as caught:
            await nodes.files.pull(nodes.peers, WANTED, nodes.target)
        assert str(nodes.folder) in caught.value.detail
        assert os.strerror(code) in caught.value.detail
        assert nodes.asked == nodes.peers[:1]


async def test_another_error_of_the_system_is_not_blamed_on_the_disk(
    with_nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_allocate(monkeypatch, FileNotFoundError(errno.ENOENT, "no such folder"))
    async with with_nodes() as nodes:
        nodes.serve(nodes.first, GOOD)
        with pytest.raises(FileNotFoundError):
            await nodes.files.pull(nodes.peers, WANTED, nodes.target)


@pytest.mark.usefixtures("quick_retries")
async def test_a_slice_without_a_digest_must_be_a_safetensors_file(with_nodes: Any) -> None:
    empty = b"\x02\0\0\0\0\0\0\0{}"
    async with with_nodes() as nodes:
        for node, content in ((nodes.first, b""), (nodes.second, empty)):

            async def resolve(_peer: PeerId, _request: PullRequest, content: bytes = content) -> transfer.PullSource:
                return transfer.PullSource(content)

            transfer.serve_pulls(node, resolve)
        _, peer = await nodes.files.pull(nodes.peers, WantedFile(ADDRESS, check=check_tensor_file), nodes.target)
        assert peer == nodes.second.peer_id
        with pytest.raises(UnusableFileError, match="not a safetensors file"):
            await nodes.files.pull(nodes.peers[:1], WantedFile(ADDRESS, check=check_tensor_file), nodes.target)


InLab = Callable[..., Any]
FETCH = """
status, answer = post("/resources/fetch", {"resource": config["data"], "path": "slices"})
print("ERROR executor: %d %s" % (status, answer), flush=True)
"""


def serve(lab: Any, usable: set[int]) -> list[DataRequest]:
    """Let the scheduler assign slices 0, 1, …, of which the data node has only `usable` ones; return the requests."""
    requests: list[DataRequest] = []
    digest = f"blake3:{blake3(b'slice').hexdigest()}"

    async def assign(_peer: Any, request: DataRequest) -> SliceAssigned | NotFound:
        requests.append(request)
        return SliceAssigned(data_provider=lab.data.peer_id, index=len(requests) - 1, epoch=4, digest=digest)

    async def resolve(_peer: Any, request: PullRequest) -> transfer.PullSource | Refusal:
        if request.index in usable or request.name == "manifest":
            return transfer.PullSource(b"slice", digest)
        return Refusal(reason=f"slice {request.index} is not what was announced")

    rpc.serve(lab.scheduler.endpoint, DATA, assign)
    transfer.serve_pulls(lab.data, resolve)
    return requests


async def test_the_next_slice_takes_the_place_of_an_unusable_one_which_is_reported(in_lab: InLab) -> None:
    async with in_lab() as lab:
        requests = serve(lab, {2})
        await lab.start(FETCH + "sys.exit(0 if answer[0]['metadata']['slice'] == '2' else 1)")
        end = await lab.scheduler.ended()
        assert end.outcome == "finished", end
        assert requests[0].unusable is None
        reports = [request.unusable for request in requests[1:]]
        assert [(report.index, report.epoch) for report in reports if report] == [(0, 4), (1, 4)]
        assert len({request.id for request in requests}) == 3
        for report in reports:
            assert isinstance(report, UnusableSlice)
            [failure] = report.failures
            assert failure.provider == lab.data.peer_id
            assert "not what was announced" in failure.reason


async def test_a_fetch_ends_when_every_slice_is_unusable(in_lab: InLab) -> None:
    async with in_lab() as lab:
        requests = serve(lab, set())
        await lab.start(FETCH + "sys.exit(0 if status == 502 else 1)")
        end = await lab.scheduler.ended()
        assert end.outcome == "finished", end
        assert len(requests) == 1 + retries.UNUSABLE_SLICE.times


async def test_a_full_disk_gives_the_work_back_at_once(
    in_lab: InLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "NO_PROVIDER", RetryPolicy("test", (60.0,)))
    fail_to_allocate(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with caplog.at_level(logging.ERROR, "hypha_worker.tasks.task_run"):
        async with in_lab() as lab:
            serve(lab, {0})
            lease = await lab.start(FETCH + "time.sleep(60)")
            end = await lab.scheduler.ended()
            assert end.outcome == "cancelled"
            assert str(lab.folder / "work") in end.reason
            assert "No space left on device" in end.reason
            assert "free some space there" in end.reason
            assert await lab.scheduler.release(lab.peer, lease)
            assert lab.worker.lease_manager.free.resources.cpu == 2.0
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "is given back to its scheduler" in record.getMessage()
    assert "No space left on device" in record.getMessage()


async def test_an_outer_update_that_finds_no_room_gives_the_work_back(
    in_lab: InLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_allocate(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    async with in_lab() as lab:
        await lab.start("time.sleep(60)")
        with pytest.raises(transfer.TransferRefusedError, match="no room"):
            await lab.push(lab.server, 1, b"update")
        end = await lab.scheduler.ended()
        assert end.outcome == "cancelled"
        assert str(lab.folder / "work") in end.reason
        assert "No space left on device" in end.reason


@pytest.mark.parametrize("knows", [True, False])
async def test_a_worker_that_shuts_down_says_goodbye_for_its_leases(
    make_config: Any, in_lab: InLab, knows: bool
) -> None:
    heard: list[tuple[Any, Goodbye]] = []
    only = ExecutorDescriptor("train", "only")

    async def goodbye(peer: Any, message: Goodbye) -> GoodbyeReceived:
        heard.append((peer, message))
        return GoodbyeReceived()

    async with in_lab() as lab:
        if knows:
            rpc.serve(lab.scheduler.endpoint, SAY_GOODBYE, goodbye)
        executor = {"class": "train", "name": "only", "runtime": "process", "cmd": sys.executable}
        config = make_config(lab.folder / "second", executors=[executor])
        async with lab.network.endpoint("second") as endpoint:
            async with open_worker(config, endpoint):
                leases = {await lab.scheduler.hire(only), await lab.scheduler.hire(only)}
            assert [peer for peer, _ in heard] == ([endpoint.peer_id] if knows else [])
            assert all(set(message.leases) == leases for _, message in heard)
            assert all(message.reason == "the worker is shutting down" for _, message in heard)
