"""Update files: metadata, and adding an update to a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from hypha_proto.errors import TensorFileError
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo, from_float, to_float32
from hypha_proto.update_file import (
    UpdateMetadata,
    apply_update_to_dir,
    open_update,
    write_update,
)

counts = st.none() | st.integers(0, 2**63 - 1)


@given(counts, counts, st.frozensets(st.text()))
def test_metadata_round_trip(number: int | None, samples: int | None, statistics: frozenset[str]) -> None:
    for integers in (frozenset[str](), frozenset(sorted(statistics)[:1])):
        metadata = UpdateMetadata(number, samples, statistics, integers=integers)
        assert UpdateMetadata.decode(metadata.encode()) == metadata


def test_metadata_as_text() -> None:
    names = frozenset({"n.num_batches_tracked", "n.running_mean"})
    metadata = UpdateMetadata(3, 40, names, integers=frozenset({"n.num_batches_tracked"}))
    assert metadata.encode() == {
        "codec": "fp32",
        "statistics": '["n.num_batches_tracked", "n.running_mean"]',
        "integers": '["n.num_batches_tracked"]',
        "round": "3",
        "samples": "40",
    }
    assert UpdateMetadata(3).encode() == {"codec": "fp32", "statistics": "[]", "round": "3"}


@pytest.mark.parametrize(
    "texts",
    [
        {"codec": "fp3"},
        {"round": "-1"},
        {"round": "1.0"},
        {"round": "²"},
        {"samples": "9" * 30},
        {"samples": str(2**63)},
        {"statistics": "{}"},
        {"statistics": "[1]"},
        {"statistics": "["},
        {"statistics": "[" * 100_000},
        {"integers": "[1]"},
        {"integers": '["a"]'},
        {"integers": '["a"]', "statistics": '["b"]'},
        {"aliases": "["},
        {"aliases": '["a"]'},
        {"aliases": '{"a": 1}'},
    ],
)
def test_malformed_metadata_is_rejected(texts: dict[str, str]) -> None:
    with pytest.raises(TensorFileError, match=next(iter(texts))):
        UpdateMetadata.decode(texts)


def test_file_without_metadata_is_an_update_without_statistics(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(2, "f4")}, tmp_path / "u.safetensors")
    file, metadata = open_update(tmp_path / "u.safetensors")
    assert metadata == UpdateMetadata()
    file.close()


def test_statistics_missing_from_the_file_are_rejected(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(2, "f4")}, tmp_path / "u.safetensors", {"statistics": '["b"]'})
    with pytest.raises(TensorFileError, match="'b'"):
        open_update(tmp_path / "u.safetensors")


@pytest.mark.parametrize("aliases", ['{"b": "c"}', '{"a": "a"}'])
def test_aliases_of_nothing_and_of_a_tensor_itself_are_rejected(aliases: str, tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(2, "f4")}, tmp_path / "u.safetensors", {"aliases": aliases})
    with pytest.raises(TensorFileError, match="no further name of"):
        open_update(tmp_path / "u.safetensors")


def _update(path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    write_update(path, {name: value.shape for name, value in tensors.items()}, tensors.items(), UpdateMetadata(round=1))
    return path


def _model(folder: Path) -> Path:
    folder.mkdir()
    return folder / "model.safetensors"


def test_apply_update_adds_in_float32_and_keeps_the_models_dtypes(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    values = {name: chance.normal(size=(3, 700)).astype("f4") for name in ("f32", "f16", "bf16", "f64", "left")}
    infos = {
        "f32": TensorInfo("F32", (3, 700)),
        "left": TensorInfo("BF16", (3, 700)),
        "f16": TensorInfo("F16", (3, 700)),
        "bf16": TensorInfo("BF16", (3, 700)),
        "f64": TensorInfo("F64", (3, 700)),
        "count": TensorInfo("I64", ()),
    }
    big = 2**40 + 1  # not representable in float32, so the sum must not be computed in it
    model = _model(tmp_path / "model")
    with TensorFileWriter(model, infos, {"format": "pt"}) as writer:
        for name, value in values.items():
            writer.write(name, value)
        writer.write_stored("count", np.array(big, "i8"))
    change = {name: chance.normal(size=(3, 700)).astype("f4") for name in ("f32", "f16", "bf16", "f64")}
    change["count"] = np.array(24.6, "f4")
    old = shutil.copyfile(model, tmp_path / "old.safetensors")
    apply_update_to_dir(model.parent, _update(tmp_path / "u.safetensors", change))
    with TensorFile(old) as before, TensorFile(model) as after:
        assert after.tensors == before.tensors
        assert after.metadata == {"format": "pt"}
        for name in ("f32", "f16", "bf16"):
            dtype = infos[name].dtype
            expected = from_float(to_float32(before.stored(name), dtype) + change[name], dtype)
            np.testing.assert_array_equal(after.stored(name), expected)
        np.testing.assert_array_equal(after.stored("f64"), values["f64"].astype("f8") + change["f64"])
        np.testing.assert_array_equal(after.stored("left"), before.stored("left"))
        assert int(after.stored("count")) == big + 25


def test_apply_update_in_place_and_across_block_boundaries(tmp_path: Path) -> None:
    size = (1 << 19) + 3
    model = _model(tmp_path / "model")
    start = np.arange(size, dtype="f4")
    safetensors.numpy.save_file({"w": start}, model)
    change = np.linspace(-1, 1, size, dtype="f4")
    apply_update_to_dir(model.parent, _update(tmp_path / "u.safetensors", {"w": change}))
    np.testing.assert_array_equal(safetensors.numpy.load_file(model)["w"], start + change)


@pytest.mark.parametrize("name", ["unknown", "w"])
def test_mismatched_update_changes_nothing(tmp_path: Path, name: str) -> None:
    model = _model(tmp_path / "model")
    safetensors.numpy.save_file({"w": np.ones((2, 3), "f4")}, model)
    before = model.read_bytes()
    update = _update(tmp_path / "u.safetensors", {name: np.ones((3, 2), "f4")})
    with pytest.raises(TensorFileError, match=name):
        apply_update_to_dir(model.parent, update)
    assert model.read_bytes() == before


def _sharded(model_dir: Path) -> None:
    model_dir.mkdir()
    safetensors.numpy.save_file({"a": np.ones(2, "f4")}, model_dir / "model-1.safetensors")
    safetensors.numpy.save_file({"b": np.ones(3, "f4")}, model_dir / "model-2.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded_model_is_updated_completely_or_not_at_all(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    _sharded(model_dir)
    listed = sorted(model_dir.iterdir())
    apply_update_to_dir(model_dir, _update(tmp_path / "u.safetensors", {"b": np.full(3, 2, "f4")}))
    assert safetensors.numpy.load_file(model_dir / "model-1.safetensors")["a"].tolist() == [1, 1]
    assert safetensors.numpy.load_file(model_dir / "model-2.safetensors")["b"].tolist() == [3, 3, 3]
    with pytest.raises(TensorFileError, match="'c'"):
        apply_update_to_dir(
            model_dir, _update(tmp_path / "v.safetensors", {"a": np.ones(2, "f4"), "c": np.ones(1, "f4")})
        )
    assert safetensors.numpy.load_file(model_dir / "model-1.safetensors")["a"].tolist() == [1, 1]
    assert sorted(model_dir.iterdir()) == listed
