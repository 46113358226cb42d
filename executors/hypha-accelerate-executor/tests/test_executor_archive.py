"""Models and preprocessors that a worker has fetched as one file."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from support.stored_model import write_model

from hypha.accelerate_executor.errors import ModelError
from hypha.accelerate_executor.modeling.archive import unpacked, unpacked_files
from hypha.accelerate_executor.modeling.hf import model_directory


def pack(folder: Path, target: Path) -> Path:
    with tarfile.open(target, "w") as archive:
        archive.add(folder, folder.name)
    return target


@pytest.mark.parametrize("name", ["model.tar", "sha256-00ff", "model"])
def test_an_archive_becomes_the_directory_of_its_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "fetched").mkdir()
    archive = pack(write_model(tmp_path / "resnet"), tmp_path / "fetched" / name)
    folder = model_directory(unpacked_files([archive], is_model=True))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in (tmp_path / "fetched").iterdir()] == [name]
    assert unpacked(folder, is_model=True) == folder


def test_several_files_and_other_files_stay(tmp_path: Path) -> None:
    model = write_model(tmp_path / "resnet")
    paths = sorted(model.iterdir())
    assert unpacked_files(paths, is_model=True) == paths
    assert unpacked_files(paths[:1], is_model=True) == paths[:1]
    assert unpacked(model, is_model=True) == model


def test_an_archive_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    archive = pack(write_model(tmp_path / "resnet"), tmp_path / "model.tar")
    archive.write_bytes(archive.read_bytes()[:2048])
    with pytest.raises(ModelError, match=r"model\.tar cannot be unpacked: it .*(cut off|damaged)"):
        unpacked(archive, is_model=True)


def test_an_archive_of_a_process_that_was_killed_is_unpacked_by_the_next_one(tmp_path: Path) -> None:
    pack(write_model(tmp_path / "resnet"), tmp_path / ".model.tar")
    half = tmp_path / ".model.part"
    half.mkdir()
    (half / "config.json").write_text("{")
    folder = unpacked(tmp_path / "model", is_model=True)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "plain"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "resnet"]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_model", [False, True])
def test_what_does_not_belong_to_the_model_is_removed(tmp_path: Path, is_packed: bool, is_model: bool) -> None:
    model = write_model(tmp_path / "bert", ["a"], ["b"])
    for name in ("._model.safetensors", "adapter_config.json", "consolidated.safetensors", "tokenizer.json"):
        (model / name).write_text("{}")
    write_model(model / "checkpoint-5")
    weights = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)} | {"model.safetensors.index.json"}
    folder = unpacked(pack(model, tmp_path / "model.tar") if is_packed else model, is_model=is_model)
    expected = {"config.json", "tokenizer.json"} | (weights if is_model else set())
    assert {path.name for path in folder.iterdir()} == expected


def test_a_fault_in_a_fetched_folder_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "bert")
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"bert: model\.safetensors is a Git LFS pointer"):
        unpacked(model, is_model=True)
