"""Models and preprocessors that a worker has fetched as one file."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from hypha.accelerate_executor.errors import ModelError
from hypha.accelerate_executor.modeling.archive import unpacked, unpacked_files
from hypha.accelerate_executor.modeling.hf import model_directory


def pack(folder: Path, target: Path) -> Path:
    with tarfile.open(target, "w") as archive:
        archive.add(folder, folder.name)
    return target


def make_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    return folder


@pytest.mark.parametrize("name", ["model.tar", "sha256-00ff", "model"])
def test_an_archive_becomes_the_directory_of_its_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "fetched").mkdir()
    archive = pack(make_model(tmp_path / "resnet"), tmp_path / "fetched" / name)
    folder = model_directory(unpacked_files([archive]))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in (tmp_path / "fetched").iterdir()] == [name]
    assert unpacked(folder) == folder


def test_several_files_and_other_files_stay(tmp_path: Path) -> None:
    model = make_model(tmp_path / "resnet")
    paths = sorted(model.iterdir())
    assert unpacked_files(paths) == paths
    assert unpacked_files(paths[:1]) == paths[:1]
    assert unpacked(model) == model


def test_an_archive_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    archive = pack(make_model(tmp_path / "resnet"), tmp_path / "model.tar")
    archive.write_bytes(archive.read_bytes()[:2048])
    with pytest.raises(ModelError, match=r"model\.tar cannot be unpacked: it .*(cut off|damaged)"):
        unpacked(archive)


def test_an_archive_of_a_process_that_was_killed_is_unpacked_by_the_next_one(tmp_path: Path) -> None:
    pack(make_model(tmp_path / "resnet"), tmp_path / ".model.tar")
    half = tmp_path / ".model.part"
    half.mkdir()
    (half / "config.json").write_text("{")
    folder = unpacked(tmp_path / "model")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "config.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "resnet"]
