"""Private repositories fetched by a worker's bridge and by a scheduler with unmodified `huggingface_hub`."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from huggingface_hub import snapshot_download
from support.fake_hf_hub import COMMIT, ENDLESS_BYTES, SIGNATURE, Hub, hub_server
from support.stored_model import weights, write_model

from hypha_local.processes import script
from hypha_net.testing import MemoryNetwork
from hypha_net.transfer import PullSource
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import HuggingFaceReference, PeersReference
from hypha_proto.transfer import PullRequest
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.artifacts import Artifact, ArtifactCopies
from hypha_scheduler.jobs.config import ArtifactTable, JobTable, ModelTable, PreprocessorTable
from hypha_scheduler.jobs.context import JobHost, RunnerContext
from hypha_scheduler.strategies.inference.restore import describe_artifact
from hypha_scheduler.strategies.tasks.config import TasksJob
from hypha_scheduler.strategies.tasks.operator import TasksOperator
from hypha_scheduler.strategies.tasks.strategy import TasksStrategy
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.downloads import Downloads
from hypha_worker.errors import BridgeError
from hypha_worker.task_storage import TaskStorage

TOKEN = "hf_PrivateToken0123456789"
WEIGHTS = weights(size=6 << 20)  # huggingface_hub writes partial downloads in chunks of 10 MiB
FILES = {
    "config.json": b'{"a": 1}',
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "sub/more.safetensors": b"more",
}
PEER = PeerId.parse("12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server(FILES, TOKEN) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield hub


def by_worker(folder: Path, *names: str, token: str | None = TOKEN, revision: str | None = "v2") -> list[Path]:
    reference = HuggingFaceReference(repository="org/model", revision=revision, filenames=names, token=token)

    async def main() -> list[Path]:
        storage = TaskStorage(folder, 1 << 26)
        found = await Downloads(AccessPolicy(), storage, timeout=60).from_hub(reference, PurePosixPath())
        return [folder / file.path for file in found]

    return anyio.run(main, backend="trio")


def by_scheduler(folder: Path, **keys: str) -> HuggingFaceReference:
    """Return where workers fetch a model themselves, with the token."""
    table = {"repository": "org/model", "type": "vision-classification", "token": TOKEN, "serve": False, **keys}

    async def main() -> HuggingFaceReference:
        model = ModelTable.model_validate(table)
        start = await ArtifactCopies(uuid.UUID(int=5), PEER).open(model, "model", folder)
        assert isinstance(start.reference, HuggingFaceReference)
        return start.reference

    return anyio.run(main, backend="trio")


def check_tokens(hub: Hub) -> None:
    """Check that the token was sent to the hub and to no other host."""
    assert {token for _, path, token, _ in hub.seen if "org/model" in path} == {f"Bearer {TOKEN}"}
    assert {token for _, path, token, _ in hub.seen if "org/model" not in path} <= {None}
    assert {token for _, _, token, _ in hub.seen_elsewhere} == {None}


def test_a_worker_follows_redirects_and_resumes_interrupted_transfers(hub: Hub, tmp_path: Path) -> None:
    config, weights, more = by_worker(tmp_path, "config.json", "model.safetensors", "sub/more.safetensors")
    assert json.loads(config.read_bytes()) == {"a": 1}
    assert weights.read_bytes() == WEIGHTS
    assert more.read_bytes() == b"more"
    assert more == (tmp_path / "sub/more.safetensors").resolve()
    assert len([asked for asked in hub.ranges if asked != "bytes=0-"]) >= 1, "nothing was resumed"
    check_tokens(hub)
    assert all("/resolve/v2/" in path for _, path, _, _ in hub.seen if "org/model" in path)


def test_a_scheduler_fetches_one_commit_and_no_pickle_files(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = by_scheduler(tmp_path / "model", revision="v2")
    assert (reference.revision, reference.token) == (COMMIT, TOKEN)
    assert reference.filenames == ("config.json", "model.safetensors")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == WEIGHTS
    assert not list(tmp_path.rglob("*.bin"))
    assert [asked for asked in hub.ranges if asked != "bytes=0-"], hub.seen_elsewhere
    assert "Trying to resume download" in caplog.text
    assert SIGNATURE not in caplog.text
    check_tokens(hub)
    paths = [path for _, path, _, _ in hub.seen]
    assert all(f"/resolve/{COMMIT}/" in path for path in paths if "/resolve/" in path)
    assert all(TOKEN.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_scheduler_fetches_what_the_index_names_and_checks_it(hub: Hub, tmp_path: Path) -> None:
    model = write_model(tmp_path / "start", ["a"], ["b"])
    (model / "chat_template.jinja").write_text("{{ messages }}")
    used = {path.name: path.read_bytes() for path in model.iterdir()}
    beside = ("consolidated.safetensors", "._model.safetensors", "adapter_config.json", "onnx/config.json", "model.py")
    hub.files = {**used, **dict.fromkeys(beside, b"?")}
    assert by_scheduler(tmp_path / "model").filenames == tuple(sorted(used))
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == used
    hub.files["config.json"] = b"version https://git-lfs.github.com/spec/v1"
    with pytest.raises(JobFailedError, match=r"^model\.repository: org/model: config\.json is a Git LFS pointer"):
        by_scheduler(tmp_path / "other")


def test_a_dataset_is_prepared_by_its_name(hub: Hub, tmp_path: Path) -> None:
    rows = gzip.compress(b"text,label\nfine,good\ndull,bad\n")
    hub.kind = "datasets"
    hub.files = {
        "data/train-0.csv.gz": rows,
        "data/test-0.csv": b"text,label\npoor,bad\n",
        "README.md": b"",
        "x.py": b"",
    }
    variables = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_CACHE": str(tmp_path / "cache")}
    words = ["prepare", "org/model", "--out", str(tmp_path / "out"), "--text", "text", "--label", "label"]
    done = subprocess.run(
        [script("hypha-data"), *words],
        env=os.environ | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 samples in 2 slices" in done.stdout
    assert "labels: 0 bad, 1 good" in done.stdout
    fetched = {path.rpartition("/")[2] for method, path, _, _ in hub.seen if method == "GET" and "/resolve/" in path}
    assert fetched == {"train-0.csv.gz", "test-0.csv"}


@pytest.mark.parametrize("revision", [None, "v2", COMMIT])
def test_offline_the_cache_of_the_hub_is_used(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    cache = tmp_path / "cache"
    snapshot_download("org/model", revision=revision, token=TOKEN, cache_dir=cache, endpoint=hub.url)
    hub.seen.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    keys = {} if revision is None else {"revision": revision}
    reference = by_scheduler(tmp_path / "model", **keys)
    assert (reference.revision, reference.filenames) == (COMMIT, ("config.json", "model.safetensors"))
    (tmp_path / "work").mkdir()
    [weights] = by_worker(tmp_path / "work", "model.safetensors", revision=COMMIT)
    assert weights.read_bytes() == (tmp_path / "model" / "model.safetensors").read_bytes() == WEIGHTS
    assert not weights.is_symlink()
    assert hub.seen == []


def test_offline_what_the_cache_lacks_is_named(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    why = r"org/model is not in the hub's cache at revision v2, and HF_HUB_OFFLINE is set: download it there first"
    with pytest.raises(JobFailedError, match=rf"^model\.repository: {why}"):
        by_scheduler(tmp_path / "model", revision="v2")
    with pytest.raises(BridgeError, match="HF_HUB_OFFLINE is set for this worker: let the scheduler serve"):
        by_worker(tmp_path, "config.json")
    assert hub.seen == []


TABLES: dict[str, tuple[type[ArtifactTable], dict[str, Any]]] = {
    "model": (ModelTable, {"type": "vision-classification"}),
    "preprocessor": (PreprocessorTable, {"filenames": ["config.json"]}),
    "resource": (ArtifactTable, {"filenames": ["config.json"]}),
}


def served_by_scheduler(folder: Path, kind: str = "model", token: str | None = TOKEN) -> Artifact:
    table, more = TABLES[kind]
    source = table.model_validate({"repository": "org/model", "revision": "v2", "token": token, **more})

    async def main() -> Artifact:
        return await ArtifactCopies(uuid.UUID(int=5), PEER).open(source, kind, folder)

    return anyio.run(main, backend="trio")


@pytest.mark.parametrize("kind", TABLES)
def test_a_scheduler_serves_a_repository_without_its_token(hub: Hub, tmp_path: Path, kind: str) -> None:
    found = served_by_scheduler(tmp_path / "copy", kind)
    reference = found.reference
    assert isinstance(reference, PeersReference)
    names = ("config.json", "model.safetensors") if kind == "model" else ("config.json",)
    assert (reference.peers, reference.filenames) == ((PEER,), names)
    for index, name in enumerate(names):
        if kind == "model":
            (tmp_path / "copy" / name).write_bytes(b"trained")
        source = found.resolve(PullRequest(dataset="", index=index))
        assert isinstance(source, PullSource)
        assert isinstance(source.source, Path)
        assert source.source.read_bytes() == FILES[name], "what is served is not what the job changes"
    assert found.origin == HuggingFaceReference(repository="org/model", revision=COMMIT, filenames=names)
    assert TOKEN not in repr(found)


@pytest.mark.parametrize("kind", TABLES)
def test_a_scheduler_serves_what_only_its_own_token_reads(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert isinstance(served_by_scheduler(tmp_path / "private", kind, token=None).reference, PeersReference)
    hub.token = None
    reference = served_by_scheduler(tmp_path / "public", kind, token=None).reference
    assert isinstance(reference, HuggingFaceReference)
    assert reference.token is None


def test_a_job_of_tasks_serves_private_files_without_its_token(hub: Hub, tmp_path: Path) -> None:
    """Each repository is downloaded once, and not again when the job goes on; nothing is left when it has ended."""
    private: dict[str, Any] = {"repository": "org/model", "filenames": ["config.json"], "token": TOKEN}
    handed = {**private, "serve": False}
    resources = [{"name": name, "huggingface": hub} for name, hub in (("a", private), ("b", private), ("c", handed))]
    job = TasksJob.model_validate(
        {"type": "tasks", "tasks": [{"name": "t", "driver": {"x": {}}, "resources": resources}]}
    )

    async def open_job(interrupted: bool) -> None:
        async with MemoryNetwork().endpoint("scheduler") as endpoint, anyio.create_task_group() as tasks:
            about = {"job": JobTable(type="any"), "job_id": uuid.UUID(int=5), "directory": tmp_path, "tasks": tasks}
            runner: Any = SimpleNamespace(host=JobHost(endpoint, tmp_path), **about)
            context = RunnerContext(runner)
            with suppress(InterruptedError):
                async with TasksStrategy().open(job, context, ()) as operator:
                    assert isinstance(operator, TasksOperator)
                    first, second, third = operator.graph.tasks["t"].spec(0).resources
                    assert third.huggingface is not None
                    assert third.huggingface.token == TOKEN
                    for resource in (first, second):
                        source = resource.peers
                        assert source is not None
                        assert (source.peers, source.filenames) == ((endpoint.peer_id,), ("config.json",))
                        found = context.resolve(PullRequest(dataset=source.dataset, index=source.index))
                        assert isinstance(found, PullSource)
                        assert isinstance(found.source, Path)
                        assert found.source.read_bytes() == FILES["config.json"]
                    if interrupted:
                        raise InterruptedError

    anyio.run(open_job, True, backend="trio")
    assert [path for _, path, _, _ in hub.seen].count(f"/org/model/resolve/{COMMIT}/config.json") == 2  # HEAD and GET
    hub.seen.clear()
    anyio.run(open_job, False, backend="trio")
    assert hub.seen == []
    assert not list(tmp_path.rglob("config.json"))


@pytest.mark.parametrize("serve", [False, True])
async def test_a_job_that_leaves_its_files_unchanged_has_a_copy_of_them(hub: Hub, tmp_path: Path, serve: bool) -> None:
    """Workers get the same commit, from the hub or from the scheduler; after a restart always from the scheduler."""
    table = {"repository": "org/model", "revision": "v2", "token": TOKEN, "serve": serve}
    model = ModelTable.model_validate({**table, "type": "vision-classification"})
    tokenizer = PreprocessorTable.model_validate({**table, "filenames": ["config.json"]})
    job = uuid.UUID(int=5)
    for again in (False, True):
        start = await ArtifactCopies(job, PEER).open(model, "model", tmp_path / "model", unchanged=True)
        found = await ArtifactCopies(job, PEER).open(tokenizer, "preprocessor", tmp_path / "tokenizer", unchanged=True)

        for artifact, names in ((start, ("config.json", "model.safetensors")), (found, ("config.json",))):
            reference = artifact.reference
            if serve or again:
                assert isinstance(reference, PeersReference)
            else:
                assert isinstance(reference, HuggingFaceReference)
                assert (reference.revision, reference.token) == (COMMIT, TOKEN)
            assert tuple(sorted(reference.filenames)) == names
        hub.seen.clear()
    assert hub.seen == [], "nothing is downloaded again"
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == WEIGHTS
    assert (tmp_path / "tokenizer" / "config.json").read_bytes() == FILES["config.json"]


def test_a_resumed_job_knows_the_commit_of_a_model_that_is_served(hub: Hub, tmp_path: Path) -> None:
    names = ["config.json", "model.safetensors"]
    expected = {"repository": "org/model", "revision": COMMIT, "files": names}
    assert describe_artifact(served_by_scheduler(tmp_path / "served")) == expected
    assert describe_artifact(Artifact(by_scheduler(tmp_path / "hub", revision="v2"))) == expected


async def test_a_file_that_the_repository_lacks_is_named(hub: Hub, tmp_path: Path) -> None:
    table = {"repository": "org/model", "type": "vision-classification", "token": TOKEN, "filenames": ["a.json"]}
    with pytest.raises(JobFailedError, match=r"model\.filenames: org/model has no a\.json"):
        await ArtifactCopies(uuid.UUID(int=5), PEER).open(ModelTable.model_validate(table), "model", tmp_path)


@pytest.mark.parametrize("token", ["hf_WrongToken", None])
def test_a_rejected_token_is_reported_but_not_shown(
    token: str | None, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(BridgeError) as worker:
        by_worker(tmp_path / "w", "config.json", token=token)
    with pytest.raises(JobFailedError) as scheduler:
        by_scheduler(tmp_path / "s", **({"token": token} if token else {"token": "hf_WrongToken"}))
    for text in (worker.value.detail, str(scheduler.value)):
        assert "401" in text
        assert "hf_WrongToken" not in text
        assert "org/model" in text


def test_missing_files_are_named(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=r"none\.json does not exist at revision v2") as fault:
        by_worker(tmp_path, "none.json")
    assert fault.value.status == 404
    with pytest.raises(BridgeError, match="v9"):
        by_worker(tmp_path, "config.json", revision="v9")
    with pytest.raises(JobFailedError, match="v9"):
        by_scheduler(tmp_path / "s", revision="v9")


def test_a_missing_repository_is_reported_with_the_reason_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    hub.repository = "org/other"
    with pytest.raises(BridgeError, match=r"Repository Not Found for url: .*/resolve/v2/config\.json") as fault:
        by_worker(tmp_path, "config.json")
    assert fault.value.status == 502


def test_a_worker_bounds_a_file_whose_size_the_hub_does_not_state(hub: Hub, tmp_path: Path) -> None:
    hub.endless = ("config.json",)
    with pytest.raises(BridgeError, match="exceeds this job's storage") as fault:
        by_worker(tmp_path, "config.json")
    assert fault.value.status == 507
    assert hub.streamed < ENDLESS_BYTES
    assert not list(tmp_path.rglob("*.part"))


def test_a_scheduler_bounds_files_whose_size_the_hub_does_not_state(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_scheduler.jobs.hub_download.MAX_UNSTATED", 24 << 20)
    hub.endless = ("config.json", "model.safetensors")
    with pytest.raises(JobFailedError, match=r"config\.json: the hub states no size, and it has more than \d+ bytes"):
        by_scheduler(tmp_path / "model")
    assert hub.streamed < ENDLESS_BYTES
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 24 << 20]


def test_a_scheduler_takes_no_more_of_a_file_than_the_hub_stated(hub: Hub, tmp_path: Path) -> None:
    hub.endless, hub.stated = ("config.json",), 1000
    with pytest.raises(JobFailedError, match=r"config\.json: the hub stated 1000 bytes, and sends more"):
        by_scheduler(tmp_path / "model")
    assert hub.streamed < ENDLESS_BYTES


def test_a_scheduler_downloads_nothing_that_its_disk_has_no_room_for(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_scheduler.jobs.source_download.RESERVE", 1 << 60)
    with pytest.raises(JobFailedError, match=r"org/model has \d+ bytes, and the disk has room for 0"):
        by_scheduler(tmp_path / "model")
    assert not hub.seen_elsewhere


def test_an_unreachable_hub_fails_a_job_in_one_line(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(JobFailedError, match="org/model cannot be fetched"):
        by_scheduler(tmp_path / "s")
    with pytest.raises(BridgeError) as fault:
        by_worker(tmp_path, "config.json")
    assert fault.value.status == 502
