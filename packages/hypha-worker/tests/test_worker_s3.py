"""Objects of S3 buckets, from moto's server on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from blake3 import blake3
from support.fake_s3 import SECRET, s3_client, s3_server

from hypha_net.connectors.s3_client import S3Client, S3Settings
from hypha_proto.bridge_api import FetchedFile
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.downloads import download_from_s3, download_from_uri
from hypha_worker.content_cache import ContentCache, SchedulerCache
from hypha_worker.errors import BridgeError
from hypha_worker.task_storage import TaskStorage

CONTENT = bytes(range(256)) * (3 << 12)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server("models", {"dir/a b.bin": CONTENT, "empty": b"", "größe": b"x"}) as url:
        yield url


def policy(endpoint: str, **changes: str | None) -> AccessPolicy:
    keys: dict[str, Any] = {"region": "us-east-1", "access_key": "id", "secret_key": SECRET, **changes}
    return AccessPolicy(buckets=("models", "missing"), s3=S3Client(S3Settings(endpoint, **keys)))


async def fetch(
    folder: Path, access: AccessPolicy, key: str = "dir/a b.bin", bucket: str = "models", limit: int = 10 << 20
) -> FetchedFile:
    storage = TaskStorage(folder, limit)
    return await download_from_s3(bucket, key, PurePosixPath("x"), access, storage=storage, timeout=30)


async def refused(*arguments: Any, **keys: Any) -> tuple[int, str]:
    with pytest.raises(BridgeError) as caught:
        await fetch(*arguments, **keys)
    assert SECRET not in caught.value.detail
    assert "\n" not in caught.value.detail
    assert not list(arguments[0].iterdir())
    return caught.value.status, caught.value.detail


@pytest.mark.parametrize(("key", "content"), [("dir/a b.bin", CONTENT), ("empty", b""), ("größe", b"x")])
async def test_an_object_is_downloaded(endpoint: str, tmp_path: Path, key: str, content: bytes) -> None:
    found = await fetch(tmp_path, policy(endpoint), key)
    assert (tmp_path / "x").read_bytes() == content
    assert (found.size, found.checksum) == (len(content), f"blake3:{blake3(content).hexdigest()}")


async def test_an_object_is_named_by_a_uri(endpoint: str, tmp_path: Path) -> None:
    storage, url = TaskStorage(tmp_path, 10 << 20), "s3://models/dir/a%20b.bin"
    found = await download_from_uri(url, PurePosixPath(), policy(endpoint), storage=storage)
    assert (tmp_path / found.path).read_bytes() == CONTENT
    assert found.metadata["source"] == "s3://models/dir/a%20b.bin"


@pytest.mark.parametrize(
    ("key", "bucket", "status", "told"),
    [
        ("none", "models", 404, "s3://models/none: NoSuchKey"),
        ("x", "missing", 404, "s3://missing/x: NoSuchBucket"),
        ("x", "others", 403, "connectors.buckets"),
        ("a//b", "models", 400, "empty parts"),
        ("../a", "models", 400, "'..'"),
        ("", "models", 400, "1 to 1024 bytes"),
        ("x" * 1025, "models", 400, "1 to 1024 bytes"),
    ],
)
async def test_what_cannot_be_had_is_named(
    endpoint: str, tmp_path: Path, key: str, bucket: str, status: int, told: str
) -> None:
    found, detail = await refused(tmp_path, policy(endpoint), key, bucket)
    assert (found, told in detail) == (status, True), detail


async def test_an_object_is_bounded_by_the_storage_of_the_job(endpoint: str, tmp_path: Path) -> None:
    assert (await refused(tmp_path, policy(endpoint), limit=1 << 20))[0] == 507


async def test_a_service_that_does_not_answer_is_named(tmp_path: Path) -> None:
    status, detail = await refused(tmp_path, policy("http://127.0.0.1:1"))
    assert (status, "http://127.0.0.1:1" in detail, "connectors.s3_endpoint" in detail) == (502, True, True), detail


async def test_credentials_and_proxies_of_the_environment_are_not_used(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "AWS_PROXY_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-this-machine")  # without its secret, obstore fails if it reads it
    monkeypatch.setenv("AWS_REGION", "nowhere")
    assert (await fetch(tmp_path, policy(endpoint))).size == len(CONTENT)


async def test_a_key_that_the_owner_may_not_read_is_denied_in_words(endpoint: str, tmp_path: Path) -> None:
    status, detail = await refused(tmp_path, policy(endpoint, access_key=None, secret_key=None))
    assert (status, "s3://models/dir" in detail, "connectors.s3_access_key" in detail) == (403, True, True), detail


async def test_an_object_in_the_cache_is_asked_for_and_not_sent_again(endpoint: str, tmp_path: Path) -> None:
    cache = ContentCache(tmp_path / "cache", 1 << 30)
    cache.open()
    client = s3_client(endpoint)
    client.put_object(Bucket="models", Key="changing", Body=b"one")

    async def fetched() -> bytes:
        storage = TaskStorage(tmp_path / "job", 1000, SchedulerCache(cache, "a"))
        await download_from_s3("models", "changing", PurePosixPath("x"), policy(endpoint), storage=storage)
        return (tmp_path / "job" / "x").read_bytes()

    (tmp_path / "job").mkdir()
    assert await fetched() == b"one"
    [kept] = (cache.folder / "objects").iterdir()
    used = kept.stat().st_mtime_ns
    assert await fetched() == b"one"
    assert kept.stat().st_mtime_ns > used
    client.put_object(Bucket="models", Key="changing", Body=b"two")
    assert await fetched() == b"two"
    cache.close()


def test_secrets_are_in_no_representation() -> None:
    assert SECRET not in repr(policy("http://127.0.0.1:1"))
    assert SECRET not in repr(S3Settings("http://x", None, "id", SECRET))


async def test_an_object_at_another_presigned_url_is_taken_from_the_cache(endpoint: str, tmp_path: Path) -> None:
    cache = ContentCache(tmp_path / "cache", 1 << 30)
    cache.open()
    client = policy(endpoint).s3
    urls = [client.presign("models", "dir/a b.bin", timedelta(hours=hours)) for hours in (1, 2)]
    (tmp_path / "job").mkdir()
    used = []

    for url in urls:
        storage = TaskStorage(tmp_path / "job", 10 << 20, SchedulerCache(cache, "a"))
        found = await download_from_uri(url, PurePosixPath(), AccessPolicy(hosts=("127.0.0.1",)), storage=storage)
        assert (tmp_path / "job" / found.path).read_bytes() == CONTENT
        assert "X-Amz-Signature" not in found.metadata["source"]
        used.append([path.stat().st_mtime_ns for path in (cache.folder / "objects").iterdir()])
    assert len(used[1]) == 1
    assert used[1] > used[0]
    cache.close()
