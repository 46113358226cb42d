"""Files by their SHA-256, from holders in an in-memory network: several, bad ones, and none."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import pytest
from anyio.abc import TaskStatus

from hypha_net import content_directory, retries, transfer
from hypha_net.endpoint import Stream
from hypha_net.retries import RetryPolicy
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_net.transfer.framing import receive_message, send_message
from hypha_proto.bridge_api import FetchedFile
from hypha_proto.codec import to_cbor
from hypha_proto.ids import PeerId
from hypha_proto.protocols import PULL
from hypha_proto.transfer import PullAnswer, PullRequest, PullStart, Refusal
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.content_holders import check_sha256
from hypha_worker.connectors.downloads import Downloads
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.errors import BridgeError
from hypha_worker.task_storage import TaskStorage

CONTENT = bytes(range(256)) * 2000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Net:
    network: MemoryNetwork
    worker: MemoryEndpoint
    folder: Path
    access: AccessPolicy
    asked: list[str]
    limit: int = 1 << 20

    async def fetch(self, sha256: str = SHA256) -> FetchedFile:
        storage = TaskStorage(self.folder, self.limit)
        files = PeerFiles(self.worker, storage)
        return await Downloads(self.access, storage, files, timeout=300).from_uri(f"sha256:{sha256}", PurePosixPath())

    @asynccontextmanager
    async def holder(self, name: str, content: bytes | None = CONTENT, digest: str = SHA256) -> AsyncIterator[PeerId]:
        """Announce the content and serve `content` for it, or refuse."""
        async with self.network.endpoint(name) as endpoint:

            async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
                self.asked.append(name)
                assert request.dataset == f"sha256:{SHA256}"
                return (
                    Refusal(reason="not now") if content is None else transfer.PullSource(content, f"sha256:{digest}")
                )

            transfer.serve_pulls(endpoint, resolve)
            await content_directory.announce_content(endpoint, SHA256, len(CONTENT))
            yield endpoint.peer_id

    @asynccontextmanager
    async def leaver(self) -> AsyncIterator[anyio.Event]:
        """Announce the content, and leave when a part of it is sent; yields an event that tells this."""
        left = anyio.Event()

        async def be_there(*, task_status: TaskStatus[None]) -> None:
            sent = anyio.Event()

            async def send_part(stream: Stream) -> None:
                await receive_message(stream)
                start = PullStart(size=len(CONTENT), digest=f"sha256:{SHA256}")
                await send_message(stream, to_cbor(PullAnswer, start))
                await stream.send_all(CONTENT[:1000])
                self.asked.append("leaver")
                sent.set()
                await anyio.sleep_forever()

            async with self.network.endpoint("leaver") as endpoint:
                endpoint.handle(PULL, send_part)
                await content_directory.announce_content(endpoint, SHA256, len(CONTENT))
                task_status.started()
                await sent.wait()
            left.set()

        async with anyio.create_task_group() as tasks:
            await tasks.start(be_there)
            yield left


@pytest.fixture
def open_net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractAsyncContextManager[Net]]:
    monkeypatch.setattr(retries, "NO_HOLDER", RetryPolicy("test", (0.01,) * 3))
    monkeypatch.setattr(retries, "HOLDER", RetryPolicy("test", (0.01,)))
    monkeypatch.setattr(retries, "TRANSFER", RetryPolicy("test", (0.01,)))

    @asynccontextmanager
    async def opened() -> AsyncIterator[Net]:
        network = MemoryNetwork()
        async with network.endpoint("worker") as worker:
            yield Net(network, worker, tmp_path, AccessPolicy(), [])

    return opened


async def test_content_comes_from_a_holder(open_net: Any, tmp_path: Path) -> None:
    async with open_net() as net:
        async with net.holder("one"):
            found = await net.fetch()
        assert (found.size, found.checksum) == (len(CONTENT), f"sha256:{SHA256}")
        assert (tmp_path / found.path).read_bytes() == CONTENT
        assert found.path == f"sha256-{SHA256}"


async def test_a_holder_of_other_content_is_asked_last_from_then_on(
    open_net: Any, tmp_path: Path, recorded: Any
) -> None:
    wrong = CONTENT[:-1] + b"x"
    async with open_net() as net:
        async with net.holder("good"), net.holder("liar", wrong):
            for _ in range(4):
                found = await net.fetch()
                assert (tmp_path / found.path).read_bytes() == CONTENT
                (tmp_path / found.path).unlink()
        counted = [name for name, _, _ in recorded.values if name == "hypha.worker.content.bad"]
        assert len(counted) == net.asked.count("liar") == 1
        assert net.asked.count("good") == 4


@pytest.mark.parametrize(
    ("content", "digest"),
    [
        pytest.param(CONTENT[:-1] + b"x", SHA256, id="other content"),
        pytest.param(CONTENT[:-1], SHA256, id="less of it"),
        pytest.param(b"", SHA256, id="nothing"),
        pytest.param(b"other", hashlib.sha256(b"other").hexdigest(), id="another digest"),
        pytest.param(None, SHA256, id="a refusal"),
    ],
)
async def test_what_no_holder_can_provide_is_named_with_each(
    open_net: Any, tmp_path: Path, content: bytes | None, digest: str
) -> None:
    async with open_net() as net, net.holder("bad", content, digest) as peer:
        with pytest.raises(BridgeError) as caught:
            await net.fetch()
        assert caught.value.status == 502
        assert f"sha256:{SHA256}" in caught.value.detail
        assert str(peer) in caught.value.detail
    assert not list(tmp_path.iterdir())


async def test_content_that_nobody_has_is_not_found(open_net: Any) -> None:
    async with open_net() as net:
        with pytest.raises(BridgeError, match="no peer announces it: provide it with hypha-data provide") as caught:
            await net.fetch()
        assert caught.value.status == 404


async def test_a_holder_that_comes_later_is_found(open_net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_net() as net:
        has_looked, has_come = anyio.Event(), anyio.Event()
        find = content_directory.find_holders

        async def find_and_wait(*arguments: Any) -> Any:
            found = await find(*arguments)
            has_looked.set()
            await has_come.wait()
            return found

        monkeypatch.setattr(content_directory, "find_holders", find_and_wait)
        async with anyio.create_task_group() as tasks:

            async def fetch() -> None:
                assert (await net.fetch()).size == len(CONTENT)
                tasks.cancel_scope.cancel()

            tasks.start_soon(fetch)
            await has_looked.wait()
            async with net.holder("late"):
                has_come.set()
                await anyio.sleep_forever()


async def test_a_holder_that_leaves_midway_is_replaced_by_another(open_net: Any, tmp_path: Path) -> None:
    async with open_net() as net, net.leaver() as left, anyio.create_task_group() as tasks:

        async def fetch() -> None:
            found = await net.fetch()
            assert (tmp_path / found.path).read_bytes() == CONTENT
            tasks.cancel_scope.cancel()

        tasks.start_soon(fetch)
        await left.wait()
        assert not (tmp_path / f"sha256-{SHA256}").exists()
        async with net.holder("another"):
            await anyio.sleep_forever()


async def test_a_record_that_is_none_is_ignored(open_net: Any) -> None:
    async with open_net() as net, net.network.endpoint("strange") as strange:
        for value in (b"", b"{}", b'{"size": -1}', b"\xff", b"[" * 2000, b'{"size": "1"}'):
            await strange.put_record(content_directory.content_key(SHA256), value)
            assert await content_directory.find_holders(net.worker, SHA256) == []


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, SHA256.upper(), SHA256[:-1], SHA256 + "0", f"sha512:{SHA256}"])
def test_what_is_no_digest_is_refused(text: str) -> None:
    with pytest.raises(BridgeError, match="64 lower-case hex digits"):
        check_sha256(text)


@pytest.mark.parametrize("fault", ["none", "one refuses", "one leaves", "one lies"])
async def test_large_content_comes_from_several_holders_at_once(
    open_net: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("hypha_worker.connectors.content_holders.MIN_SIZE", 1)
    monkeypatch.setattr("hypha_worker.connectors.content_holders.PART", 50_000)
    bad = {"none": CONTENT, "one refuses": None, "one lies": CONTENT[:-1] + b"x"}
    async with open_net() as net:
        third = net.holder("three", bad[fault]) if fault in bad else net.leaver()
        async with net.holder("one"), net.holder("two"), third:
            for _ in range(2):
                found = await net.fetch()
                assert (found.size, found.checksum) == (len(CONTENT), f"sha256:{SHA256}")
                assert (tmp_path / found.path).read_bytes() == CONTENT
        assert {"one", "two", "three" if fault in bad else "leaver"} <= set(net.asked)


async def test_a_job_whose_storage_is_too_small_gets_no_part_of_large_content(
    open_net: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_worker.connectors.content_holders.MIN_SIZE", 1)
    async with open_net() as net:
        net.limit = 1000
        async with net.holder("one"), net.holder("two"):
            with pytest.raises(BridgeError) as caught:
                await net.fetch()
            assert caught.value.status == 507
        assert net.asked == []
    assert not list(tmp_path.iterdir())
