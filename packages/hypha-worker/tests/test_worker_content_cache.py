"""The cache of fetched content: what further jobs get from it, eviction, damage, and what jobs cannot do to it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import pytest
from blake3 import blake3
from support.fake_http_server import answers, served

from hypha_net import transfer
from hypha_net.testing import MemoryNetwork
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import HuggingFaceReference, SliceAddress
from hypha_proto.tasks import PeersSource, TaskResource, UriSource
from hypha_proto.transfer import PullRequest, Refusal
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.downloads import Downloads
from hypha_worker.connectors.peer_files import PeerFiles, WantedFile
from hypha_worker.content_cache import CacheError, ContentCache, SchedulerCache
from hypha_worker.task_storage import TaskStorage

ACCESS = AccessPolicy(hosts=("127.0.0.1",))
BIG = 1 << 30


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def put(cache: ContentCache, content: bytes, scheduler: str = "a", digest: str = "") -> str:
    """Add content to the cache; return its digest."""
    digest = digest or sha256(content)
    path = cache.folder / ".." / "new"
    path.write_bytes(content)
    key = SchedulerCache(cache, scheduler).key("digest", digest)
    in_thread(cache.put, key, path, digest)
    return digest


def take(cache: ContentCache, digest: str, scheduler: str = "a") -> bytes | None:
    target = cache.folder / ".." / "taken"
    target.unlink(missing_ok=True)
    key = SchedulerCache(cache, scheduler).key("digest", digest)
    size = in_thread(cache.take, key, target, lambda _path, _size: None)
    assert (size is None) == (not target.exists())
    return None if size is None else target.read_bytes()


def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    return anyio.run(anyio.to_thread.run_sync, function, *arguments)


def objects(cache: ContentCache) -> list[Path]:
    return list((cache.folder / "objects").iterdir())


def test_the_least_recently_used_is_evicted_also_after_a_restart(tmp_path: Path) -> None:
    cache = ContentCache(tmp_path / "cache", 250)
    cache.open()
    digests = [put(cache, bytes([number]) * 100) for number in range(2)]
    os.utime(tmp_path / "cache" / "objects" / digests[1].replace(":", "-"), (1, 1))
    assert take(cache, digests[0]) == bytes(100)
    cache.close()
    cache = ContentCache(tmp_path / "cache", 250)
    cache.open()
    digests.append(put(cache, b"\x02" * 100))
    assert [take(cache, digest) for digest in digests] == [bytes(100), None, b"\x02" * 100]
    assert put(cache, b"x" * 251)
    assert take(cache, sha256(b"x" * 251)) is None
    assert len(objects(cache)) == 2
    cache.close()
    cache = ContentCache(tmp_path / "cache", 100)
    cache.open()
    assert len(objects(cache)) == 1
    assert len(list((tmp_path / "cache" / "keys").iterdir())) == 1


def test_the_cache_tells_what_it_does(tmp_path: Path, recorded: Any) -> None:
    cache = ContentCache(tmp_path / "cache", 150)
    cache.open()
    assert take(cache, put(cache, bytes(100))) == bytes(100)
    put(cache, b"x" * 60)
    found = [(name.removeprefix("hypha.worker.cache."), value) for name, value, _ in recorded.values]
    assert [each for each in found if each[0] != "size"] == [("hits", 1), ("io", 100), ("evictions", 1)]
    assert found[-1] == ("size", 60)


def test_what_is_damaged_is_removed_and_not_handed_out(cache: ContentCache) -> None:
    digest = put(cache, b"content")
    [path] = objects(cache)
    path.chmod(0o600)
    path.write_bytes(b"CONTENT")
    assert take(cache, digest) is None
    assert not objects(cache)
    assert take(cache, put(cache, b"content")) == b"content"
    objects(cache)[0].unlink()
    assert take(cache, digest) is None


def test_content_with_another_digest_is_not_kept(cache: ContentCache) -> None:
    put(cache, b"content", digest=sha256(b"other"))
    put(cache, b"content", digest="md5:0")
    assert not objects(cache)


def test_a_copy_is_no_link_to_the_cache(cache: ContentCache, tmp_path: Path) -> None:
    digest = put(cache, b"content")
    assert take(cache, digest) == b"content"
    (tmp_path / "taken").write_bytes(b"changed")
    assert objects(cache)[0].stat().st_nlink == 1
    assert objects(cache)[0].stat().st_mode & 0o777 == 0o400
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert take(cache, digest) == b"content"


def test_what_one_scheduler_has_fetched_is_not_handed_to_another(cache: ContentCache) -> None:
    digest = put(cache, b"content")
    assert take(cache, digest, "b") is None
    put(cache, b"content", "b")
    assert take(cache, digest, "b") == b"content"
    assert len(objects(cache)) == 1


def test_a_full_disk_leaves_the_cache_as_it_was(
    cache: ContentCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    digest = put(cache, b"content")

    def full(*_arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hypha_worker.content_cache.copy_range", full)
    put(cache, b"more")
    assert "No space left on device; free some space there" in caplog.text
    monkeypatch.undo()
    assert not list((cache.folder / "incoming").iterdir())
    assert len(objects(cache)) == 1
    assert take(cache, digest) == b"content"
    assert take(cache, put(cache, b"x" * 10)) == b"x" * 10


def test_a_folder_is_used_by_one_worker_at_a_time(cache: ContentCache) -> None:
    with pytest.raises(CacheError, match="used by another worker"):
        ContentCache(cache.folder, BIG).open()
    cache.close()
    ContentCache(cache.folder, BIG).open()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"cache\.path .*/file/cache: Not a directory"):
        ContentCache(tmp_path / "file" / "cache", BIG).open()


@pytest.mark.parametrize("left", [b"", b"[]", b"{}", b'{"object": 1, "version": ""}', b'{"object": "../x"}', b"\xff"])
def test_what_else_lies_in_the_folder_does_no_harm(tmp_path: Path, left: bytes) -> None:
    cache = ContentCache(tmp_path / "cache", BIG)
    cache.open()
    digest = put(cache, b"content")
    cache.close()
    (cache.folder / "objects" / "other").write_bytes(left)
    (cache.folder / "keys" / ("0" * 64)).write_bytes(left)
    cache.open()
    assert take(cache, digest) == b"content"
    assert not (cache.folder / "keys" / ("0" * 64)).exists()


# ----------------------------------------------------------------------------------------------------------- sources


@contextmanager
def counting_server(bodies: dict[str, bytes], sent: list[str]) -> Iterator[str]:
    """Serve files with an ETag to a client that asks with conditions; `sent` gets the path of each body."""

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        body = bodies[request.path]
        etag = f'"{hashlib.sha256(body).hexdigest()}"'
        if request.headers.get("if-none-match") == etag:
            return 304, {"etag": etag}, b""
        if request.command == "GET":
            sent.append(request.path)
        return 200, {"etag": etag}, body

    with served(answers(answer)) as url:
        yield url


async def in_jobs(cache: ContentCache, *jobs: Callable[[TaskStorage], Awaitable[Path]]) -> list[bytes]:
    """Run each function with the storage of a job of its own; return the contents of the files that they return."""
    found = []
    for number, job in enumerate(jobs):
        work_dir = cache.folder.parent / f"hypha-{number}"
        work_dir.mkdir(exist_ok=True)
        storage = TaskStorage(work_dir, 1000, SchedulerCache(cache, "a"))
        found.append((work_dir / await job(storage)).read_bytes())
    return found


async def test_a_url_is_fetched_again_only_when_its_content_has_changed(cache: ContentCache) -> None:
    bodies, sent = {"/a": b"one"}, list[str]()

    async def job(storage: TaskStorage) -> Path:
        return Path((await Downloads(ACCESS, storage).from_uri(f"{url}/a", PurePosixPath())).path)

    with counting_server(bodies, sent) as url:
        assert await in_jobs(cache, job, job) == [b"one", b"one"]
        assert sent == ["/a"]
        bodies["/a"] = b"two"
        assert await in_jobs(cache, job, job) == [b"two", b"two"]
        assert sent == ["/a", "/a"]
        for path in objects(cache):
            path.unlink()
        assert await in_jobs(cache, job) == [b"two"]
        assert sent == ["/a"] * 3
        shutil.rmtree(cache.folder)
        assert await in_jobs(cache, job, job, job) == [b"two"] * 3
        assert sent == ["/a"] * 4
        assert len(objects(cache)) == 1


async def test_a_model_of_the_hub_is_fetched_once(cache: ContentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    path, sent = "/org/model/resolve/main/model.safetensors", list[str]()
    reference = HuggingFaceReference(repository="org/model", filenames=("model.safetensors",))

    async def job(storage: TaskStorage) -> Path:
        [found] = await Downloads(ACCESS, storage).from_hub(reference, PurePosixPath())
        return Path(found.path)

    with counting_server({path: b"weights"}, sent) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        assert await in_jobs(cache, job, job) == [b"weights", b"weights"]
        assert sent == [path]


SLICE = bytes(range(256)) * (16 << 10)


async def test_a_file_of_peers_is_pulled_once_with_and_without_a_known_digest(
    cache: ContentCache, tmp_path: Path
) -> None:
    digest = f"blake3:{blake3(SLICE).hexdigest()}"

    network, sent = MemoryNetwork(), []
    async with network.endpoint("worker") as worker, network.endpoint("peer") as peer:

        async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource | Refusal:
            return transfer.PullSource(SLICE, digest)

        transfer.serve_pulls(peer, resolve)
        await worker.connect(peer.addresses[0])
        for number, known in enumerate([digest, digest, None, None]):
            (work_dir := tmp_path / f"hypha-{number}").mkdir()
            storage = TaskStorage(work_dir, 5 << 20, SchedulerCache(cache, f"scheduler {number // 2}"))
            before, wanted = peer.traffic.sent, WantedFile(SliceAddress(dataset="numbers", index=0), known)
            found = await PeerFiles(worker, storage).fetch([peer.peer_id], wanted, PurePosixPath("x"))
            assert (found.size, found.checksum) == (len(SLICE), digest)
            assert (work_dir / "x").read_bytes() == SLICE
            sent.append(peer.traffic.sent - before)
    first, again, asked, asked_again = sent
    assert again == 0
    assert min(first, asked) >= len(SLICE)
    assert asked_again < len(SLICE) / 2  # what was on its way when the worker had read the header


async def test_the_second_task_of_a_worker_fetches_nothing_again(in_task_lab: Any, tmp_path: Path) -> None:
    served: list[int] = []
    sent: list[str] = []
    with counting_server({"/a": b"page"}, sent) as url:
        async with in_task_lab(
            connectors={"hosts": ["127.0.0.1"]}, cache={"path": str(tmp_path / "cache"), "max_size": 1.0}
        ) as (lab, tasks, lease):

            async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
                served.append(request.index)
                content = b"slice %d" % request.index
                return transfer.PullSource(content, f"blake3:{blake3(content).hexdigest()}")

            transfer.serve_pulls(lab.data, resolve)
            copy = "open('out', 'wb').write(open('resources/one', 'rb').read())"
            code = f"{copy}; import os; os.truncate('resources/one', 0)"
            for name in ("t", "u"):
                page = TaskResource(name="page", uri=UriSource(f"{url}/a"))
                resources = (TaskResource(name="one", peers=PeersSource((lab.data.peer_id,), "numbers", 4)), page)
                tasks.start(lease, name, code, outputs={"out": "out"}, resources=resources)
                finished = await tasks.success(name)
                assert finished.outputs[0].files[0].digest == f"blake3:{blake3(b'slice 4').hexdigest()}"
    assert sent == ["/a"]
    assert len(served) == 3  # the digest, the file; then the digest alone
