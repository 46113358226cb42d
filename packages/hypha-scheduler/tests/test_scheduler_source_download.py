"""Models, preprocessors and datasets by `s3`, `uri` and `dht`: fetched by the scheduler, and named to the workers."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

import anyio
import msgspec
import pytest
from huggingface_hub import snapshot_download
from pydantic import ValidationError
from support.fake_hf_hub import Hub, hub_server
from support.fake_http_server import files, served
from support.fake_s3 import SECRET, s3_server
from support.stored_model import weights

from hypha_net import content_directory, transfer
from hypha_net.connectors.s3_client import S3Settings
from hypha_net.testing import MemoryNetwork
from hypha_proto.codec import to_json
from hypha_proto.datasets import Manifest, SliceEntry
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import PeersReference, UriReference
from hypha_proto.tasks import FileSource, S3Source, UriSource
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.artifacts import Artifact, ArtifactCopies
from hypha_scheduler.jobs.config import DatasetTable, JobTable, ModelTable, PreprocessorTable
from hypha_scheduler.jobs.context import JobHost, RunnerContext
from hypha_scheduler.jobs.source_download import SourceAccess, SourceDownloads, source_access
from hypha_scheduler.jobs.source_tables import S3Table
from hypha_scheduler.strategies.base import SliceToUse
from hypha_scheduler.strategies.inference.restore import describe_artifact
from hypha_scheduler.strategies.inference.specs import _resource
from hypha_scheduler.strategies.tasks.config import TasksJob
from hypha_scheduler.strategies.tasks.graph import TaskGraph
from hypha_scheduler.strategies.tasks.strategy import _with_locations

PEER = PeerId.from_public_key(bytes(32))
TOKEN = "hf_PrivateToken0123456789"
FILES = {"config.json": b'{"model_type": "x"}', "model.safetensors": weights(size=25_000)}
WEB = source_access(("127.0.0.0/8",), S3Settings())
"""Access to the servers of the tests."""


def packed(contents: dict[str, bytes]) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        for name, content in contents.items():
            info = tarfile.TarInfo(f"model/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return found.getvalue()


ARCHIVE = packed(FILES)
SHA256 = hashlib.sha256(ARCHIVE).hexdigest()


def open_model(
    folder: Path,
    source: dict[str, Any],
    access: SourceAccess | None = None,
    *,
    unchanged: bool = True,
    holder: bytes | None = None,
) -> Artifact:
    """Open a model at a scheduler of an in-memory network; `holder` is what another peer has under `SHA256`."""
    table = ModelTable.model_validate({"type": "causal-lm", **source})

    async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource | Refusal:
        return transfer.PullSource(holder or b"", f"sha256:{SHA256}")

    async def main() -> Artifact | JobFailedError:
        async with AsyncExitStack() as stack:
            network = MemoryNetwork()
            endpoint = await stack.enter_async_context(network.endpoint("scheduler"))
            if holder is not None:
                other = await stack.enter_async_context(network.endpoint("holder"))
                transfer.serve_pulls(other, resolve)
                await content_directory.announce_content(other, SHA256, len(holder))
            downloads = SourceDownloads(endpoint, access or SourceAccess())
            with anyio.fail_after(60):
                try:
                    return await ArtifactCopies(uuid.UUID(int=5), PEER, downloads=downloads).open(
                        table, "model", folder, unchanged=unchanged
                    )
                except JobFailedError as error:
                    return error

    found = anyio.run(main, backend="trio")
    if isinstance(found, JobFailedError):
        raise found
    return found


def open_source_dataset(folder: Path, source: dict[str, Any], check: Callable[[RunnerContext, Any], None]) -> None:
    """Have a job open a dataset of a table, and `check` what it has then."""

    folder.mkdir(exist_ok=True)

    async def main() -> JobFailedError | None:
        async with MemoryNetwork().endpoint("scheduler") as endpoint, anyio.create_task_group() as tasks:
            host = JobHost(endpoint, folder, access=WEB)
            job, job_id = JobTable(type="any"), uuid.UUID(int=5)
            runner: Any = SimpleNamespace(host=host, job=job, job_id=job_id, directory=folder, tasks=tasks)
            context = RunnerContext(runner)
            try:
                dataset = await context.open_dataset(DatasetTable.model_validate(source), timeout=1)
            except JobFailedError as error:
                return error
            check(context, dataset)
            context.remove_served_copies()
            return None

    found = anyio.run(main, backend="trio")
    if found is not None:
        raise found


def slices_in(folder: Path, **changes: Any) -> dict[str, bytes]:
    """Write the files of a prepared dataset of two slices, whose second entry in the manifest is changed."""
    files = {f"slice-{number}.safetensors": weights(size=1000 * (number + 1)) for number in range(2)}
    entries = [
        SliceEntry(file=name, samples=10, size=len(content), digest=f"sha256:{hashlib.sha256(content).hexdigest()}")
        for name, content in files.items()
    ]
    entries[1] = msgspec.structs.replace(entries[1], **changes)
    files["manifest.json"] = to_json(Manifest, Manifest(dataset="digits", slices=tuple(entries)))
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def stored(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    contents = {"/model.tar": ARCHIVE, "/preprocessor_config.json": b"{}", "/torn.tar": ARCHIVE[:50_000]}
    with served(files(lambda path: (contents.get(path.partition("?")[0]), {}))) as url:
        yield url


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server("models", {"dir/a b.tar": ARCHIVE}) as url:
        yield url


# ------------------------------------------------------------------------------------------------------------- sources


def test_a_model_at_a_url_is_unpacked_here_and_workers_get_the_url(tmp_path: Path, web: str) -> None:
    found = open_model(tmp_path / "copy", {"uri": f"{web}/model.tar"}, WEB)
    assert (found.reference, found.files) == (UriReference(value=f"{web}/model.tar"), ())
    assert stored(tmp_path / "copy") == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    again = open_model(tmp_path / "copy", {"uri": "http://gone.invalid/model.tar"}, WEB)
    assert isinstance(again.reference, PeersReference), "the copy is served, and not fetched again"


def test_a_model_by_its_digest_comes_from_a_peer(tmp_path: Path) -> None:
    found = open_model(tmp_path / "copy", {"dht": SHA256}, holder=ARCHIVE)
    assert found.reference == UriReference(value=f"sha256:{SHA256}")
    assert stored(tmp_path / "copy") == FILES


def test_a_model_in_a_bucket_is_named_by_bucket_and_key(tmp_path: Path, s3: str) -> None:
    access = source_access((), S3Settings(s3, "us-east-1", "id", SECRET))
    found = open_model(tmp_path / "copy", {"s3": {"bucket": "models", "key": "dir/a b.tar"}}, access)
    assert found.reference == UriReference(value="s3://models/dir/a%20b.tar")
    assert stored(tmp_path / "copy") == FILES


def test_workers_get_a_presigned_url_that_needs_no_keys(tmp_path: Path, s3: str) -> None:
    access = source_access((), S3Settings(s3, "us-east-1", "id", SECRET))
    source = {"s3": {"bucket": "models", "key": "dir/a b.tar", "presigned": True}}
    found = open_model(tmp_path / "copy", source, access, unchanged=False)
    assert isinstance(found.reference, UriReference)
    url = found.reference.value
    assert parse_qs(urlsplit(url).query)["X-Amz-Expires"] == ["604800"]
    assert SECRET not in url
    with urlopen(url, timeout=30) as answer:
        assert answer.read() == ARCHIVE
    assert not (tmp_path / "copy").exists()
    assert "X-Amz" not in json.dumps(describe_artifact(found))


def test_a_served_model_needs_no_access_of_the_workers(tmp_path: Path, web: str) -> None:
    for unchanged in (True, False):
        folder = tmp_path / str(unchanged)
        found = open_model(folder, {"uri": f"{web}/model.tar", "serve": True}, WEB, unchanged=unchanged)
        assert isinstance(found.reference, PeersReference)
        assert found.reference.filenames == tuple(FILES)
        assert stored(folder) == FILES


async def test_one_file_of_a_preprocessor_needs_no_archive(tmp_path: Path, web: str) -> None:
    table = PreprocessorTable.model_validate({"uri": f"{web}/preprocessor_config.json"})
    async with MemoryNetwork().endpoint("scheduler") as endpoint:
        downloads = SourceDownloads(endpoint, WEB)
        found = await ArtifactCopies(uuid.UUID(int=5), PEER, downloads=downloads).open(
            table, "preprocessor", tmp_path / "copy", unchanged=True
        )
    assert found.reference == UriReference(value=f"{web}/preprocessor_config.json")
    assert stored(tmp_path / "copy") == {"preprocessor_config.json": b"{}"}


def test_tasks_of_an_inference_job_name_the_uri_or_the_shared_path() -> None:
    assert _resource("model", UriReference(value="s3://b/k.tar")).uri == UriSource("s3://b/k.tar")
    assert _resource("model", UriReference(value="file:///mnt/a%20b")).file == FileSource("/mnt/a b")


# -------------------------------------------------------------------------------------------------------------- faults


def refused(folder: Path, source: dict[str, Any], access: SourceAccess | None = None, **keys: Any) -> str:
    with pytest.raises(JobFailedError) as caught:
        open_model(folder / "copy", source, access, **keys)
    assert list(folder.iterdir()) == []
    assert SECRET not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("none.tar", "answered with status 404"),
        ("torn.tar?token=s3cr3t-0f-th3-0wn3r", r"torn.tar\?\*\*\* cannot be used"),
    ],
)
def test_what_cannot_be_fetched_or_unpacked_is_named(tmp_path: Path, web: str, path: str, told: str) -> None:
    with pytest.raises(JobFailedError, match=f"^model.uri: .*{told}") as caught:
        open_model(tmp_path / "copy", {"uri": f"{web}/{path}"}, WEB)
    assert SECRET not in str(caught.value)
    assert not (tmp_path / "copy").exists()


def test_private_networks_are_refused_unless_they_are_listed(tmp_path: Path, web: str) -> None:
    told = refused(tmp_path, {"uri": f"{web}/model.tar"})
    assert "model.uri: host '127.0.0.1'" in told
    assert "scheduler.connectors.networks" in told


def test_s3_without_a_service_and_presigning_without_keys_are_refused(tmp_path: Path, s3: str) -> None:
    source: dict[str, Any] = {"s3": {"bucket": "models", "key": "x"}}
    assert "set scheduler.connectors.s3_region or s3_endpoint" in refused(tmp_path, source)
    access = source_access((), S3Settings(s3, "us-east-1", "id", SECRET))
    assert "model.s3: s3://models/x: NoSuchKey" in refused(tmp_path, source, access)
    source["s3"]["presigned"] = True
    told = refused(tmp_path, source, source_access((), S3Settings(s3, "us-east-1")), unchanged=False)
    assert "model.s3.presigned: this scheduler has no keys to sign with" in told


def test_content_that_nobody_has_or_that_is_other_content_is_refused(tmp_path: Path) -> None:
    assert "no peer announces it: provide it with hypha-data provide" in refused(tmp_path, {"dht": SHA256})
    assert f"sha256:{SHA256}: none of its holders" in refused(tmp_path, {"dht": SHA256}, holder=b"other")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ({"dht": "abc"}, "not the 64 hex digits"),
        ({"uri": "ftp://host/x"}, "must be a URL that starts with"),
        ({"s3": {"bucket": "A", "key": "x"}}, "s3.bucket"),
        ({"s3": {"bucket": "models"}}, "s3.key"),
        ({"dht": SHA256, "path": "model"}, "set one of repository, path, file, s3, uri, dht"),
        ({"dht": SHA256, "filenames": ["a"]}, "the archive that dht names: leave it out"),
    ],
)
def test_tables_that_name_no_file_are_refused(source: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ModelTable.model_validate({"type": "causal-lm", **source})


class _Context:
    """What `_with_locations` uses of the scheduler."""

    async def presign(self, table: S3Table) -> str:
        return f"https://signed/{table.bucket}/{table.key}"


async def test_tasks_get_presigned_urls_where_the_job_wants_them() -> None:
    s3 = {"bucket": "models", "key": "a"}
    resources = [{"name": "signed", "s3": {**s3, "presigned": True}}, {"name": "plain", "s3": s3}]
    table = {"type": "tasks", "tasks": [{"name": "t", "driver": {"x": {}}, "resources": resources}]}
    graph = TaskGraph(TasksJob.model_validate(table))
    context: Any = _Context()

    signed, plain = (await _with_locations(graph, context)).tasks["t"].spec(0).resources
    assert (signed.s3, signed.uri) == (None, UriSource("https://signed/models/a"))
    assert (plain.s3, plain.uri) == (S3Source(bucket="models", key="a"), None)


# ------------------------------------------------------------------------------------------------------------ datasets


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server({}, TOKEN) as hub:
        hub.repository, hub.kind = "org/digits", "datasets"
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


@pytest.mark.parametrize("kind", ["path", "file", "uri", "file URL", "repository", "repository in the cache"])
def test_slices_of_a_dataset_from_elsewhere_are_served_here(
    tmp_path: Path, kind: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = slices_in(tmp_path / "digits")
    hub.files = {**contents, "README.md": b"# Digits", "data/train.parquet": b"PAR1"}
    archive = tmp_path / "digits.tar"
    archive.write_bytes(packed(contents))

    def check(context: RunnerContext, dataset: Any) -> None:
        assert (dataset.name, dataset.samples) == (f"{uuid.UUID(int=5)}/dataset", [10, 10])
        assert (tmp_path / "job" / "manifest.json").read_bytes() == contents["manifest.json"]
        assert context.reaches(dataset.name)
        for index in range(2):
            assigned = context.address(dataset.name, SliceToUse(0, index))
            assert (assigned.data_provider, assigned.others) == (context.scheduler, None)
            served = context.resolve(PullRequest(dataset=dataset.name, index=assigned.index))
            assert isinstance(served, transfer.PullSource)
            assert isinstance(served.source, Path)
            content = served.source.read_bytes()
            assert assigned.digest == f"sha256:{hashlib.sha256(content).hexdigest()}"

    with served(files(lambda _: (archive.read_bytes(), {}))) as url:
        sources = {"path": tmp_path / "digits", "file": tmp_path / "digits", "uri": f"{url}/digits.tar"}
        value = str(sources.get(kind, archive.as_uri()))
        source = {kind if kind in sources else "uri": value}
        if kind.startswith("repository"):
            source = {"repository": hub.repository, "revision": "v2", "token": TOKEN}
        if kind == "repository in the cache":
            keys = {"revision": "v2", "token": TOKEN, "cache_dir": tmp_path / "cache", "endpoint": hub.url}
            snapshot_download(hub.repository, repo_type="dataset", **keys)
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
            hub.seen.clear()
        open_source_dataset(tmp_path / "job", source, check)
    fetched = {path.rpartition("/")[2] for _, path, _, _ in hub.seen if "/resolve/" in path}
    assert fetched == (set(contents) if kind == "repository" else set())
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"size": 7}, "lists 'slice-1.safetensors' of 7 bytes, which is not there"),
        ({"file": "other.safetensors"}, "lists 'other.safetensors' of"),
        ({"file": "../job/secret"}, r"lists '\.\./job/secret' of"),
        ({"samples": 0}, "has 2 slices, 1 of them empty"),
    ],
)
def test_a_folder_that_is_not_as_its_manifest_says_is_refused(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    slices_in(tmp_path / "digits", **changes)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "secret").write_bytes(b"x")
    with pytest.raises(JobFailedError, match=rf"^dataset\.path: .*/digits holds no dataset: its manifest.*{why}"):
        open_source_dataset(tmp_path / "job", {"path": str(tmp_path / "digits")}, lambda *_: pytest.fail("opened"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"manifest.json": None}, "has no manifest.json at its root: upload the folder that hypha-data prepare wrote"),
        ({"manifest.json": b"{}"}, "holds no dataset: its manifest.json: "),
        ({"slice-1.safetensors": None}, "holds no dataset: its manifest.json lists 'slice-1.safetensors' of"),
    ],
)
def test_a_repository_that_is_no_prepared_dataset_is_refused(
    tmp_path: Path, hub: Hub, changes: dict[str, bytes | None], why: str
) -> None:
    contents = {**slices_in(tmp_path / "digits"), **changes}
    hub.files = {name: content for name, content in contents.items() if content is not None}
    source = {"repository": hub.repository, "token": TOKEN}
    with pytest.raises(JobFailedError, match=rf"^dataset\.repository: org/digits {re.escape(why)}") as caught:
        open_source_dataset(tmp_path / "job", source, lambda *_: pytest.fail("opened"))
    assert TOKEN not in str(caught.value)


def test_a_dataset_has_one_source_and_a_manifest(tmp_path: Path) -> None:
    wrongs: list[dict[str, str]] = [{}, {"dataset": "digits", "path": "digits"}, {"evaluation": "test"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="set one of dataset, repository, path, file, s3, uri, dht"):
            DatasetTable.model_validate(wrong)
    with pytest.raises(ValueError, match=r"s3\.presigned: workers get the slices from this scheduler"):
        DatasetTable.model_validate({"s3": {"bucket": "data", "key": "a.tar", "presigned": True}})
    assert DatasetTable.model_validate({"dataset": "digits", "evaluation": "test"}).announced == ("digits", "test")
    [line] = DatasetTable.model_validate({"path": str(tmp_path)}).missing_files()
    assert line.startswith(f"dataset.path: {tmp_path} holds no manifest.json at the scheduler; hypha-data prepare")
    with pytest.raises(JobFailedError, match=r"^dataset\.path: .* holds no dataset: .*manifest\.json"):
        open_source_dataset(tmp_path, {"path": str(tmp_path)}, lambda *_: pytest.fail("opened"))
