"""The global model on disk: float32 weights beside a model of 16 bits, the momentum, and errors that change nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hypha_proto.errors import TensorFileError
from hypha_proto.global_model import MOMENTUM, WEIGHTS, GlobalModel
from hypha_proto.job_spec import Nesterov
from hypha_proto.outer_momentum import derive_momentum
from hypha_proto.safetensors_io import (
    FLOAT_DTYPES,
    Float32Array,
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    from_float,
    to_float32,
)
from hypha_proto.update_file import UpdateMetadata, write_update

Arrays = dict[str, Float32Array]
OUTER = Nesterov(learning_rate=0.7, momentum=0.9)
LONG = (1 << 18) + 5
"""More elements than a block has."""
LAYOUT = {
    "bf16": TensorInfo("BF16", (LONG,)),
    "f16": TensorInfo("F16", (3, 5)),
    "f32": TensorInfo("F32", (7,)),
    "f64": TensorInfo("F64", (4,)),
    "count": TensorInfo("I64", ()),
    "frozen": TensorInfo("BF16", (2,)),
    "mean": TensorInfo("BF16", (3,)),
    "none": TensorInfo("BF16", (0, 2)),
}
STATISTICS = frozenset({"mean", "count"})
BIG = 2**40 + 1
"""Count that float32 cannot represent."""


def make_model(folder: Path, layout: dict[str, TensorInfo] = LAYOUT, seed: int = 0) -> GlobalModel:
    rng = np.random.default_rng(seed)
    (folder / "model").mkdir(parents=True)
    with TensorFileWriter(folder / "model" / "model.safetensors", layout, {"format": "pt"}) as writer:
        for name, info in layout.items():
            if info.dtype in FLOAT_DTYPES:
                writer.write(name, rng.normal(0, 0.5, info.shape))
            else:
                writer.write_stored(name, np.array(BIG, "i8"))
    return GlobalModel(folder / "model", folder / "state", OUTER)


def read(path: Path) -> Arrays:
    with TensorFile(path) as file:
        return {name: file.tensor(name) for name in file.tensors}


def model_file(model: GlobalModel) -> Path:
    return model.model_dir / "model.safetensors"


def make_update(path: Path, number: int, layout: dict[str, TensorInfo] = LAYOUT) -> Path:
    rng = np.random.default_rng(number)
    values = {n: rng.normal(1e-4, 1e-4, i.shape).astype("f4") for n, i in layout.items() if n != "frozen"}
    if "count" in values:
        values["count"] = np.array(number + 0.4, "f4")
    names = STATISTICS & values.keys()
    shapes = {name: value.shape for name, value in values.items()}
    write_update(path, shapes, values.items(), UpdateMetadata(round=number, statistics=names))
    return path


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_weights_are_the_sum_in_float32_and_the_model_their_rounding(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    expected = read(model_file(model))
    velocity: Arrays = {}
    for number in range(1, 21):
        update = make_update(tmp_path / "update", number)
        model.add([update], number)
        for name, change in read(update).items():
            expected[name] = expected[name] + change
            velocity[name] = derive_momentum(
                change, velocity.get(name, 0.0), learning_rate=0.7, momentum=0.9, nesterov=True
            )
    wide = read(model.state_dir / WEIGHTS / "model.safetensors")
    assert wide.keys() == {"bf16", "f16", "mean", "none"}
    for name, values in wide.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
    with TensorFile(model_file(model)) as file:
        assert file.metadata == {"format": "pt"}
        assert {name: info.dtype for name, info in file.tensors.items()} == {n: i.dtype for n, i in LAYOUT.items()}
        for name, info in file.tensors.items():
            if name != "count":
                np.testing.assert_array_equal(file.stored(name), from_float(expected[name], info.dtype), err_msg=name)
        assert int(file.stored("count")) == BIG + sum(range(1, 21))
    kept = read(model.state_dir / MOMENTUM)
    assert kept.keys() == velocity.keys() - STATISTICS
    for name, values in kept.items():
        np.testing.assert_array_equal(values, velocity[name], err_msg=name)


def test_updates_added_together_equal_those_added_one_by_one(tmp_path: Path) -> None:
    single, together = make_model(tmp_path / "single"), make_model(tmp_path / "together")
    updates = [make_update(tmp_path / f"u{number}", number) for number in range(1, 8)]
    for number, update in enumerate(updates, 1):
        single.add([update], number)
    together.add(updates[:4], 1)
    together.add(updates[4:], 5)
    assert snapshot(tmp_path / "single") == snapshot(tmp_path / "together")


def test_a_float32_model_is_not_stored_twice(tmp_path: Path) -> None:
    model = make_model(tmp_path, {"w": TensorInfo("F32", (9,)), "v": TensorInfo("F64", (2,))})
    update = make_update(tmp_path / "u", 1, {"w": TensorInfo("F32", (9,)), "v": TensorInfo("F32", (2,))})
    model.add([update], 1)
    assert snapshot(model.state_dir).keys() == {MOMENTUM}
    plain = GlobalModel(model.model_dir, tmp_path / "none", Nesterov(learning_rate=1.0, momentum=0.0))
    plain.add([update], 1)
    assert not plain.state_dir.exists()


def test_each_file_of_a_sharded_model_has_its_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}
    for name, file in shards.items():
        with TensorFileWriter(folder / file, {name: TensorInfo("F32" if name == "c" else "BF16", (4,))}) as writer:
            writer.write(name, np.ones(4, "f4"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    model = GlobalModel(folder, tmp_path / "state", OUTER)
    small = {name: np.full(4, 2**-12, "f4") for name in shards}
    for number in range(1, 1 + 2**5):
        write_update(tmp_path / "u", dict.fromkeys(shards, (4,)), small.items(), UpdateMetadata())
        model.add([tmp_path / "u"], number)
    for name, file in shards.items():
        with TensorFile(folder / file) as shard:
            assert to_float32(shard.stored(name), shard.tensors[name].dtype).tolist() == [1 + 2**-7] * 4
    found = {f"{WEIGHTS}/model-1.safetensors", f"{WEIGHTS}/model-2.safetensors", MOMENTUM}
    assert snapshot(model.state_dir).keys() == found


@pytest.mark.parametrize("lacking", [MOMENTUM, f"{WEIGHTS}/model.safetensors"])
def test_a_missing_file_or_one_of_another_round_is_an_error_that_changes_nothing(tmp_path: Path, lacking: str) -> None:
    model = make_model(tmp_path / "run")
    model.add([make_update(tmp_path / "u", 1)], 1)
    before = snapshot(tmp_path / "run")
    with pytest.raises(TensorFileError, match="it is of round 1, expected round 2"):
        model.add([make_update(tmp_path / "u", 3)], 3)
    assert snapshot(tmp_path / "run") == before
    (model.state_dir / lacking).unlink()
    with pytest.raises(TensorFileError, match=f"{lacking}: the file is missing, so nothing can be added after round 1"):
        model.add([make_update(tmp_path / "u", 2)], 2)


def test_state_of_an_earlier_run_does_not_count_in_round_one(tmp_path: Path) -> None:
    used, fresh = make_model(tmp_path / "used"), make_model(tmp_path / "fresh")
    start = model_file(used).read_bytes()
    used.add([make_update(tmp_path / f"u{number}", number) for number in (1, 2)], 1)
    model_file(used).write_bytes(start)
    for model in (used, fresh):
        model.add([make_update(tmp_path / "v", 9)], 1)
    assert snapshot(tmp_path / "used") == snapshot(tmp_path / "fresh")


def test_updates_with_other_tensors_change_nothing(tmp_path: Path) -> None:
    model = make_model(tmp_path / "run")
    model.add([make_update(tmp_path / "u1", 1)], 1)
    before = snapshot(tmp_path / "run")
    some = {name: info for name, info in LAYOUT.items() if name != "f32"}
    good, other = make_update(tmp_path / "u2", 2), make_update(tmp_path / "u3", 3, some)
    with pytest.raises(TensorFileError, match="u3 and u2 differ in tensors or statistics"):
        model.add([good, other], 2)
    with pytest.raises(TensorFileError, match=r"momentum.safetensors: it does not hold the tensors of the update"):
        model.add([other], 2)
    with pytest.raises(TensorFileError, match="the model has no tensor 'x'"):
        model.add([make_update(tmp_path / "u4", 2, {"x": TensorInfo("F32", (1,))})], 2)
    assert snapshot(tmp_path / "run") == before


def test_an_error_while_writing_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "run")
    model.add([make_update(tmp_path / "u", 1)], 1)
    before, write = snapshot(tmp_path / "run"), TensorFileWriter.write_stored

    def fail(writer: TensorFileWriter, name: str, stored: Float32Array) -> None:
        if name == "f32" and "momentum" in writer.path.name:
            raise OSError(28, "No space left on device")
        write(writer, name, stored)

    monkeypatch.setattr(TensorFileWriter, "write_stored", fail)
    with pytest.raises(OSError, match="No space left"):
        model.add([make_update(tmp_path / "u", 2)], 2)
    assert snapshot(tmp_path / "run") == before


def test_momentum_of_a_first_step_is_the_mean_of_the_updates() -> None:
    mean = np.array([1.0, -2.0, 0.5], "f4")
    nesterov = np.float32(0.7) * (mean + np.float32(0.9) * mean)
    found = derive_momentum(nesterov, 0.0, learning_rate=0.7, momentum=0.9, nesterov=True)
    np.testing.assert_allclose(found, mean, rtol=3e-7)
    classical = derive_momentum(np.float32(0.5) * mean, mean * 100, learning_rate=0.5, momentum=0.9, nesterov=False)
    np.testing.assert_array_equal(classical, mean)
    assert math.isinf(derive_momentum(np.array([3e38], "f4"), 0.0, learning_rate=0.1, momentum=0.0, nesterov=False)[0])
