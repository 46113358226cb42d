"""Downloads from web servers, a Hub, both of which may stall, and S3 buckets, from servers on this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from blake3 import blake3
from support.fake_http_server import answers, served
from support.fake_s3 import SECRET, s3_client, s3_server

from hypha_net.connectors.s3_client import S3Client, S3Settings
from hypha_net.connectors.s3_source import s3_uri
from hypha_proto.bridge_api import FetchedFile
from hypha_proto.job_spec import All, HuggingFaceReference, PeersReference
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.downloads import Downloads
from hypha_worker.content_cache import ContentCache, SchedulerCache
from hypha_worker.errors import BridgeError
from hypha_worker.task_storage import TaskStorage

FILES = {
    "/file.bin": b"content",
    "/big.bin": b"x" * 5000,
    "/org/model/resolve/main/altered.bin": b"altered",
    "/org/model/resolve/main/config.json": b'{"a": 1}',
    "/org/model/resolve/v2/model.safetensors": b"weights",
}
FAULTS = {
    "/org/model/resolve/main/busy": (503, b'{"error": "Try again later"}'),
    "/org/model/resolve/main/list": (500, b'["not", "an object"]'),
    "/org/model/resolve/main/binary": (500, b'"\xff"'),
    "/org/model/resolve/main/number": (500, b'{"errors": [1]}'),
    "/org/model/resolve/main/nothing": (204, b""),
    "/org/model/resolve/main/unmoved": (304, b""),
}
ACCESS = AccessPolicy(hosts=("127.0.0.1",))


@dataclass
class Web:
    url: str
    tokens: list[str | None] = field(default_factory=list)
    agents: list[str | None] = field(default_factory=list)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    web = Web("")

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        web.tokens.append(request.headers.get("authorization"))
        web.agents.append(request.headers.get("user-agent"))
        if request.path.startswith("/to/"):
            return 302, {"location": request.path[4:]}, b""
        if request.path in FAULTS:
            status, content = FAULTS[request.path]
            return status, {}, content
        found = FILES.get(request.path)
        if found is None:
            return 404, {"x-error-code": "EntryNotFound"}, b""
        stated = b"other" if "altered" in request.path else found
        return 200, {"etag": f'"{hashlib.sha256(stated).hexdigest()}"', "x-repo-commit": "0" * 40}, found

    with served(answers(answer)) as web.url:
        monkeypatch.setenv("HF_ENDPOINT", web.url)
        yield web


async def bring(url: str, folder: Path) -> Path:
    storage = TaskStorage(folder, 1000)
    found = await Downloads(ACCESS, storage, timeout=10).from_uri(url, PurePosixPath())
    path = folder / found.path
    assert found.checksum == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert found.size == path.stat().st_size
    return path


async def refused(call: Awaitable[object]) -> tuple[int, str]:
    with pytest.raises(BridgeError) as caught:
        await call
    return caught.value.status, caught.value.detail


async def test_a_file_is_downloaded_from_an_allowed_host_also_by_redirect(web: Web, tmp_path: Path) -> None:
    assert (await bring(f"{web.url}/file.bin", tmp_path)).read_bytes() == b"content"
    assert (await bring(f"{web.url}/to//file.bin", tmp_path)).read_bytes() == b"content"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.bin"]


async def test_forbidden_or_missing_files_are_refused_and_leave_nothing(web: Web, tmp_path: Path) -> None:
    for url, status, told in (
        (f"{web.url}/none.bin", 404, "404"),
        (f"{web.url}/big.bin", 507, "0 of 1000 bytes are used"),
        (f"{web.url}/to/http://10.0.0.1/x", 403, "10.0.0.1"),
        (f"{web.url}/to/to/again", 502, "redirects"),
        ("http://localhost/x", 403, "connectors.hosts"),
        ("ftp://127.0.0.1/x", 400, "value: 'ftp://127.0.0.1/x' is not an http"),
        ("http://[/x", 400, "value: 'http://[/x' is no URL"),
        ("http://127.0.0.1:1/x", 502, "Connect"),
    ):
        found, detail = await refused(bring(url, tmp_path))
        assert (found, told in detail) == (status, True), (url, found, detail)
    assert list(tmp_path.iterdir()) == []


async def hub(tmp_path: Path, access: AccessPolicy = ACCESS, limit: int = 1000, **changes: object) -> list[Path]:
    fields = {"repository": "org/model", "filenames": ("config.json",), "token": "hf_secret"}
    reference = HuggingFaceReference(**(fields | changes))  # type: ignore[arg-type]
    storage = TaskStorage(tmp_path, limit)
    found = await Downloads(access, storage, timeout=20).from_hub(reference, PurePosixPath())
    assert all(file.metadata["origin"].startswith("org/model@") for file in found)
    return [tmp_path / file.path for file in found]


async def test_files_of_a_repository_keep_their_names_and_only_the_token_of_the_job_is_used(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_machine")
    [config] = await hub(tmp_path)
    assert json.loads(config.read_bytes()) == {"a": 1}
    assert config == tmp_path / "config.json"
    assert "Bearer hf_secret" in web.tokens
    [weights] = await hub(tmp_path, revision="v2", filenames=("model.safetensors",), token=None)
    assert weights.read_bytes() == b"weights"
    assert web.tokens == ["Bearer hf_secret", None]
    assert all(agent and re.match(r"hypha-worker/[\d.]+; hf_hub/\d", agent) for agent in web.agents), web.agents


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("busy", "Try again later"),
        ("list", "status 500"),
        ("binary", "status 500"),
        ("number", "status 500"),
        ("nothing", "status 204"),
        ("unmoved", "status 304"),
    ],
)
async def test_answers_other_than_a_file_are_reported(web: Web, tmp_path: Path, name: str, told: str) -> None:
    status, detail = await refused(hub(tmp_path, filenames=(name,)))
    assert (status, told in detail, "\n" in detail) == (502, True, False), detail
    assert list(tmp_path.iterdir()) == []


async def test_proxies_of_the_environment_are_not_used(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    [config] = await hub(tmp_path)
    assert json.loads(config.read_bytes()) == {"a": 1}


async def test_forbidden_invalid_or_too_large_repositories_are_refused(web: Web, tmp_path: Path) -> None:
    for changes, status in (
        ({"access": AccessPolicy(repositories=("mine/*",))}, 403),
        ({"filenames": ()}, 400),
        ({"filenames": ("none.json",)}, 404),
        ({"limit": 3}, 507),
        ({"filenames": ("altered.bin",)}, 502),
        ({"repository": "not a repository"}, 400),
        ({"repository": "org/model.git"}, 400),
    ):
        found, detail = await refused(hub(tmp_path, **changes))  # type: ignore[arg-type]
        assert found == status, detail


InLab = Callable[..., Any]

COUNT = 44
"""Downloads of one job; anyio runs 40 threads at once by default."""
STALLS = f"""
import threading
def stall(number):
    post("/resources/fetch", {{"resource": config["model"]["artifact"], "path": f"in-{{number}}"}})
for number in range({COUNT}):
    threading.Thread(target=stall, args=(number,), daemon=True).start()
time.sleep(60)
"""
GIVES_UP = """
import os
import threading
def give_up(number):
    bridge = Bridge("bridge")
    body = json.dumps({"resource": config["model"]["artifact"], "path": f"in-{number}"})
    bridge.connect()
    bridge.request("POST", "/resources/fetch", body, {"content-type": "application/json"})
    while not os.path.exists("go"):
        time.sleep(0.01)
    bridge.close()
threads = [threading.Thread(target=give_up, args=(number,)) for number in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
post("/status/send", {"status": {"batch_size": 1}})
other = dict(config["model"]["artifact"], filenames=["other.json"])
status, files = post("/resources/fetch", {"resource": other, "path": "other"})
assert status == 200
"""


@dataclass
class StallingHub:
    """A Hub whose ``config.json`` begins and never ends."""

    stalled: int = 0
    """Downloads that wait now."""
    most: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def change(self, by: int) -> None:
        with self._lock:
            self.stalled += by
            self.most = max(self.most, self.stalled)


@pytest.fixture
def stalling_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StallingHub]:
    stalling_hub = StallingHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.begin(5000)

        def do_GET(self) -> None:
            if not self.path.endswith("/config.json"):
                self.begin(2)
                self.wfile.write(b"{}")
                return
            self.begin(5000)
            self.wfile.write(b"x")
            self.wfile.flush()
            stalling_hub.change(1)
            self.connection.settimeout(60)
            with suppress(ConnectionResetError):  # a client that closes with "x" unread resets the connection
                self.connection.recv(1)  # until the client closes
            stalling_hub.change(-1)
            self.close_connection = True

        def begin(self, size: int) -> None:
            self.send_response(200)
            for name, value in (("etag", '"e"'), ("x-repo-commit", "0" * 40), ("content-length", str(size))):
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with served(Handler) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield stalling_hub


async def test_stalled_downloads_of_one_job_hold_up_no_other(in_lab: InLab, stalling_hub: StallingHub) -> None:
    async with in_lab() as lab:
        first = await lab.start(STALLS)
        await lab.scheduler.until(lambda: stalling_hub.stalled >= 8)
        others = PeersReference(peers=(lab.data.peer_id,), strategy=All())
        second = await lab.start("pass", lab.train_spec(results=others))
        end = await lab.scheduler.ended()
        assert (end.lease, end.outcome) == (second, "finished")
        assert stalling_hub.stalled == 8, "they still wait"
        await lab.scheduler.release(lab.peer, first)
        assert (await lab.scheduler.ended()).lease == first
        await lab.scheduler.until(lambda: stalling_hub.stalled == 0)
        assert lab.left_behind() == []
        assert stalling_hub.most == 8


async def test_a_download_whose_executor_gave_up_gives_its_place_back(in_lab: InLab, stalling_hub: StallingHub) -> None:
    async with in_lab() as lab:
        await lab.start(GIVES_UP)
        await lab.scheduler.until(lambda: stalling_hub.stalled >= 8)
        lab.let_all_go()
        await lab.scheduler.until(lambda: lab.scheduler.reports)
        await lab.scheduler.until(lambda: stalling_hub.stalled == 0)
        assert (await lab.scheduler.ended()).outcome == "finished"
        assert stalling_hub.most == 8


CONTENT = bytes(range(256)) * (3 << 12)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server("models", {"dir/a b.bin": CONTENT, "empty": b"", "größe": b"x"}) as url:
        yield url


def policy(endpoint: str, **changes: str | None) -> AccessPolicy:
    keys: dict[str, Any] = {"region": "us-east-1", "access_key": "id", "secret_key": SECRET, **changes}
    return AccessPolicy(buckets=("models", "missing"), s3=S3Client(S3Settings(endpoint, **keys)))


async def fetch_object(
    folder: Path, access: AccessPolicy, key: str = "dir/a b.bin", bucket: str = "models", limit: int = 10 << 20
) -> FetchedFile:
    storage = TaskStorage(folder, limit)
    url = s3_uri(bucket, key)
    return await Downloads(access, storage, timeout=30).from_uri(url, PurePosixPath(), "x")


async def refused_object(*arguments: Any, **keys: Any) -> tuple[int, str]:
    status, detail = await refused(fetch_object(*arguments, **keys))
    assert SECRET not in detail
    assert "\n" not in detail
    assert not list(arguments[0].iterdir())
    return status, detail


@pytest.mark.parametrize(("key", "content"), [("dir/a b.bin", CONTENT), ("empty", b""), ("größe", b"x")])
async def test_an_object_is_downloaded(endpoint: str, tmp_path: Path, key: str, content: bytes) -> None:
    found = await fetch_object(tmp_path, policy(endpoint), key)
    assert (tmp_path / "x").read_bytes() == content
    assert (found.size, found.checksum) == (len(content), f"blake3:{blake3(content).hexdigest()}")


async def test_an_object_is_named_by_a_uri(endpoint: str, tmp_path: Path) -> None:
    storage, url = TaskStorage(tmp_path, 10 << 20), "s3://models/dir/a%20b.bin"
    found = await Downloads(policy(endpoint), storage).from_uri(url, PurePosixPath())
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
    found, detail = await refused_object(tmp_path, policy(endpoint), key, bucket)
    assert (found, told in detail) == (status, True), detail


async def test_an_object_is_bounded_by_the_storage_of_the_job(endpoint: str, tmp_path: Path) -> None:
    assert (await refused_object(tmp_path, policy(endpoint), limit=1 << 20))[0] == 507


async def test_a_service_that_does_not_answer_is_named(tmp_path: Path) -> None:
    status, detail = await refused_object(tmp_path, policy("http://127.0.0.1:1"))
    assert (status, "http://127.0.0.1:1" in detail, "connectors.s3_endpoint" in detail) == (502, True, True), detail


async def test_credentials_and_proxies_of_the_environment_are_not_used(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "AWS_PROXY_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-this-machine")  # without its secret, obstore fails if it reads it
    monkeypatch.setenv("AWS_REGION", "nowhere")
    assert (await fetch_object(tmp_path, policy(endpoint))).size == len(CONTENT)


async def test_a_key_that_the_owner_may_not_read_is_denied_in_words(endpoint: str, tmp_path: Path) -> None:
    status, detail = await refused_object(tmp_path, policy(endpoint, access_key=None, secret_key=None))
    assert (status, "s3://models/dir" in detail, "connectors.s3_access_key" in detail) == (403, True, True), detail


async def test_an_object_in_the_cache_is_asked_for_and_not_sent_again(
    endpoint: str, tmp_path: Path, cache: ContentCache
) -> None:
    client = s3_client(endpoint)
    client.put_object(Bucket="models", Key="changing", Body=b"one")

    async def fetched() -> bytes:
        storage = TaskStorage(tmp_path / "job", 1000, SchedulerCache(cache, "a"))
        await Downloads(policy(endpoint), storage).from_uri("s3://models/changing", PurePosixPath(), "x")
        return (tmp_path / "job" / "x").read_bytes()

    (tmp_path / "job").mkdir()
    assert await fetched() == b"one"
    [kept] = (cache.folder / "objects").iterdir()
    used = kept.stat().st_mtime_ns
    assert await fetched() == b"one"
    assert kept.stat().st_mtime_ns > used
    client.put_object(Bucket="models", Key="changing", Body=b"two")
    assert await fetched() == b"two"


def test_secrets_are_in_no_representation() -> None:
    assert SECRET not in repr(policy("http://127.0.0.1:1"))
    assert SECRET not in repr(S3Settings("http://x", None, "id", SECRET))


async def test_an_object_at_another_presigned_url_is_taken_from_the_cache(
    endpoint: str, tmp_path: Path, cache: ContentCache
) -> None:
    client = policy(endpoint).s3
    urls = [client.presign("models", "dir/a b.bin", timedelta(hours=hours)) for hours in (1, 2)]
    (tmp_path / "job").mkdir()
    used = []

    for url in urls:
        storage = TaskStorage(tmp_path / "job", 10 << 20, SchedulerCache(cache, "a"))
        found = await Downloads(ACCESS, storage).from_uri(url, PurePosixPath())
        assert (tmp_path / "job" / found.path).read_bytes() == CONTENT
        assert "X-Amz-Signature" not in found.metadata["source"]
        used.append([path.stat().st_mtime_ns for path in (cache.folder / "objects").iterdir()])
    assert len(used[1]) == 1
    assert used[1] > used[0]
