"""Artifacts of a job: copies of the start model and the preprocessor, and files that are served."""

from __future__ import annotations

import errno
import json
import shutil
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from pydantic import ValidationError
from support.stored_model import write_model

from hypha_net.transfer import PullSource
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import PeersReference, UriReference
from hypha_proto.tasks import OutputPath
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.artifacts import Artifact, ArtifactCopies
from hypha_scheduler.jobs.config import ArtifactTable, ModelTable, PreprocessorTable
from hypha_scheduler.jobs.model_files import missing_files
from hypha_scheduler.jobs.resource_locations import ServedFiles, checked_location
from hypha_scheduler.jobs.specs import task_spec

PEER = PeerId.from_public_key(bytes(32))
JOB_ID = uuid.UUID(int=5)


async def open_artifact(table: ArtifactTable, copy: Path, name: str = "model", **how: bool) -> Artifact:
    return await ArtifactCopies(JOB_ID, PEER).open(table, name, copy, **how)


def make_model(folder: Path) -> Path:
    write_model(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return folder


async def test_local_model_is_copied_and_its_files_are_served(tmp_path: Path) -> None:
    source = make_model(tmp_path / "start")
    model = ModelTable(path=source, type="vision-classification")
    start = await open_artifact(model, tmp_path / "copy")
    assert isinstance(start.reference, PeersReference)
    assert start.reference.filenames == ("config.json", "model.safetensors")
    found = start.resolve(PullRequest(dataset=f"{JOB_ID}/model", index=1))
    assert isinstance(found, PullSource)
    assert found.source == source / "model.safetensors"
    assert isinstance(start.resolve(PullRequest(dataset=f"{JOB_ID}/model", index=2)), Refusal)
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["config.json", "model.safetensors"]


async def test_a_model_on_a_shared_file_system_is_copied_and_read_by_the_executors(tmp_path: Path) -> None:
    source = make_model(tmp_path / "start")
    table = ModelTable(file=source, type="vision-classification")
    start = await open_artifact(table, tmp_path / "copy")
    assert (start.reference, start.files) == (UriReference(value=source.as_uri()), ())
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["config.json", "model.safetensors"]
    named = ModelTable(file=source, type="vision-classification", filenames=("config.json", "model.safetensors"))
    for served, unchanged in ((table.model_copy(update={"serve": True}), False), (table, True), (named, False)):
        copy = tmp_path / f"served-{unchanged}"
        start = await open_artifact(served, copy, unchanged=unchanged)
        assert isinstance(start.reference, PeersReference)
        assert start.reference.filenames == ("config.json", "model.safetensors")
    opened = await open_artifact(PreprocessorTable(file=source), tmp_path / "preprocessor", "preprocessor")
    assert opened.reference == UriReference(value=source.as_uri())
    assert missing_files(ModelTable(file=source, type="vision-classification")) == []
    [line] = missing_files(ModelTable(file=tmp_path / "none", type="vision-classification"))
    assert str(tmp_path / "none") in line
    for wrong in (Path("model"), Path("/a/../b")):
        with pytest.raises(ValidationError, match="is not an absolute path"):
            ModelTable(file=wrong, type="vision-classification")


async def test_a_model_that_an_earlier_run_has_changed_is_copied_again(tmp_path: Path) -> None:
    source, copy = make_model(tmp_path / "start"), tmp_path / "copy"
    for _ in range(2):
        await open_artifact(ModelTable(path=source, type="vision-classification"), copy)
        assert (copy / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
        (copy / "model.safetensors").write_bytes(b"trained")


async def test_local_preprocessor_is_copied_and_its_files_are_served(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.md"):
        (source / name).write_text("{}")
    opened = await open_artifact(PreprocessorTable(path=source), tmp_path / "copy", "preprocessor")
    (source / "tokenizer.json").write_text("changed since")
    assert isinstance(opened.reference, PeersReference)
    assert opened.reference.filenames == ("tokenizer.json", "tokenizer_config.json")
    found = opened.resolve(PullRequest(dataset=f"{JOB_ID}/preprocessor", index=0))
    assert isinstance(found, PullSource)
    assert isinstance(found.source, Path)
    assert found.source.read_text() == "{}"
    with pytest.raises(JobFailedError, match=r"missing\.json"):
        lacking = PreprocessorTable(path=source, filenames=("missing.json",))
        await open_artifact(lacking, tmp_path / "other", "preprocessor")


async def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    model = ModelTable(path=tmp_path, type="vision-classification")
    with pytest.raises(JobFailedError, match=r"there is no config\.json, .*: save_pretrained writes it"):
        await open_artifact(model, tmp_path / "copy")


async def test_a_model_that_the_job_leaves_unchanged_is_served_from_its_copy(tmp_path: Path) -> None:
    source, copy = make_model(tmp_path / "start"), tmp_path / "copy"

    async def served(table: ModelTable) -> dict[str, bytes]:
        start = await open_artifact(table, copy, unchanged=True)
        assert isinstance(start.reference, PeersReference)
        found = {}
        for name, file in zip(start.reference.filenames, start.files, strict=True):
            assert file.source == copy / name
            found[name] = await anyio.Path(copy / name).read_bytes()
        return found

    table = ModelTable(path=source, type="vision-classification")
    first = await served(table)
    assert first.keys() == {"config.json", "model.safetensors"}
    (source / "config.json").write_text("changed since")
    assert await served(table) == first
    assert await served(ModelTable(path=tmp_path / "gone", type="vision-classification")) == first


async def test_a_model_that_cannot_be_copied_completely_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, copy = make_model(tmp_path / "start"), tmp_path / "copy"
    copied = shutil.copyfile

    def fail(source: Path, target: Path) -> object:
        if target.name == "model.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return copied(source, target)

    monkeypatch.setattr("shutil.copyfile", fail)
    table = ModelTable(path=source, type="vision-classification")
    with pytest.raises(JobFailedError, match="No space left on device"):
        await open_artifact(table, copy, unchanged=True)
    assert [path.name for path in tmp_path.iterdir()] == ["start"]


def served(files: dict[str, Path | bytes]) -> ServedFiles:
    context: Any = SimpleNamespace(job_id=uuid.UUID(int=7), scheduler=PEER)
    return ServedFiles(context, "results", files)


def test_the_files_are_located_here_and_served_as_they_are_requested(tmp_path: Path) -> None:
    files = served({"a.json": b"{}", "deep/b.bin": tmp_path / "b"})
    answer, _ = checked_location((files.location(), ()))
    assert answer.pull is not None
    assert [(file.path, file.peers) for file in answer.pull.files] == [("a.json", (PEER,)), ("deep/b.bin", (PEER,))]
    found = [files.resolve(PullRequest(dataset=file.dataset, index=file.index)) for file in answer.pull.files]
    assert found == [PullSource(b"{}"), PullSource(tmp_path / "b")]


def test_other_files_are_refused() -> None:
    files = served({"a": b"1"})
    for wrong in (
        PullRequest(dataset=files.dataset, index=1),
        PullRequest(dataset=f"{uuid.UUID(int=8)}/results", index=0),
        PullRequest(dataset="digits", index=0),
    ):
        assert isinstance(files.resolve(wrong), Refusal)


def test_a_resource_without_files_is_located_and_empty() -> None:
    answer = served({}).location()
    assert answer.pull is not None
    assert answer.pull.files == ()


def test_a_task_names_its_resources_and_outputs() -> None:
    spec = task_spec("shell/bash", {"input": "data", "n": 3}, resources=("data",), outputs={"best": "out/best"})
    assert (spec.executor, json.loads(spec.settings)) == ("shell/bash", {"input": "data", "n": 3})
    [resource] = spec.resources
    assert resource.name == "data"
    assert resource.result is not None
    assert spec.outputs == (OutputPath(name="best", path="out/best"),)
    assert task_spec("shell/bash", {}).resources == ()
