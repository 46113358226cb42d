"""The global model on disk: the state of each round in a directory of its own, digests, errors that leave nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hypha_proto.errors import TensorFileError
from hypha_proto.file_digests import digest_directory, digest_file
from hypha_proto.global_model import MOMENTUM, STATE, WEIGHTS, GlobalModel
from hypha_proto.job_spec import Nesterov
from hypha_proto.outer_momentum import derive_momentum
from hypha_proto.safetensors_io import (
    FLOAT_DTYPES,
    Array,
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    from_float,
    to_float32,
)
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_proto.weights_digest import digest_weights

Arrays = dict[str, Array]
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
    "small count": TensorInfo("I32", (2,)),
}
STATISTICS = frozenset({"mean", "count", "small count"})
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
                writer.write(name, np.full(info.shape, BIG if info.dtype == "I64" else 7, "f8"))
    return GlobalModel(folder / "model", folder / "state", OUTER)


def read(path: Path) -> Arrays:
    with TensorFile(path) as file:
        return {
            name: np.array(file.stored(name)) if info.dtype == "I64" else file.tensor(name)
            for name, info in file.tensors.items()
        }


def make_update(path: Path, number: int, layout: dict[str, TensorInfo] = LAYOUT, **changed: Array) -> Path:
    rng = np.random.default_rng(number)
    values = {n: rng.normal(1e-4, 1e-4, i.shape).astype("f4") for n, i in layout.items() if n != "frozen"}
    values |= {n: np.full(layout[n].shape, number + 0.4, "f4") for n in ("count", "small count") if n in values}
    values |= changed
    names = STATISTICS & values.keys()
    shapes = {name: value.shape for name, value in values.items()}
    write_update(path, shapes, values.items(), UpdateMetadata(round=number, statistics=names))
    return path


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def weights(model: GlobalModel, number: int) -> Arrays:
    return read(model.directory(number) / WEIGHTS)


def test_every_name_of_a_tensor_gets_its_weights(tmp_path: Path) -> None:
    layout = {"head": TensorInfo("BF16", (3, 2)), "input": TensorInfo("F32", (3, 2)), "other": TensorInfo("F32", (2,))}
    model = make_model(tmp_path, layout)
    for number in (1, 2):
        change = np.full((3, 2), 0.5, "f4")
        metadata = UpdateMetadata(round=number, aliases={"head": "input"})
        write_update(tmp_path / "u", {"input": (3, 2)}, [("input", change)], metadata)
        model.add(tmp_path / "u", number)
    model.write_model(2, tmp_path / "out")
    start, out = read(tmp_path / "model" / "model.safetensors"), read(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(out["input"], start["input"] + np.float32(0.5) + np.float32(0.5))
    assert np.array_equal(out["head"], to_float32(from_float(out["input"], "BF16"), "BF16"))
    assert np.array_equal(out["other"], start["other"])


@pytest.mark.parametrize(("alias", "words"), [("none", "has no tensor 'none'"), ("other", "has shape")])
def test_alias_that_the_model_does_not_have_is_refused(alias: str, words: str, tmp_path: Path) -> None:
    layout = {"input": TensorInfo("F32", (3, 2)), "other": TensorInfo("F32", (2,))}
    model = make_model(tmp_path, layout)
    write_update(
        tmp_path / "u",
        {"input": (3, 2)},
        [("input", np.ones((3, 2), "f4"))],
        UpdateMetadata(1, aliases={alias: "input"}),
    )
    with pytest.raises(TensorFileError, match=words):
        model.add(tmp_path / "u", 1)


def test_weights_are_the_sum_in_float32_and_the_model_their_rounding(tmp_path: Path) -> None:
    model, start = make_model(tmp_path), digest_directory(tmp_path / "model")
    expected = read(tmp_path / "model" / "model.safetensors")
    expected["small count"] = expected["small count"].astype("i8")
    velocity: Arrays = {}
    for number in range(1, 21):
        update = make_update(tmp_path / "update", number)
        exchanged = read(update).keys()
        before = digest_weights((name, expected[name]) for name in exchanged)
        state = model.add(update, number)
        for name, change in read(update).items():
            if expected[name].dtype == np.dtype("i8"):
                expected[name] = np.rint(expected[name].astype("f8") + change).astype("i8")
            else:
                expected[name] = expected[name] + change
            velocity[name] = derive_momentum(
                change, velocity.get(name, 0.0), Nesterov(learning_rate=0.7, momentum=0.9, nesterov=True)
            )
        assert (state.round, state.before, state.update) == (number, before, digest_file(update))
        assert state.weights == digest_weights((name, expected[name]) for name in exchanged)
        assert model.check(number) == state
    wide = weights(model, 20)
    assert wide.keys() == LAYOUT.keys() - {"frozen"}
    for name, values in wide.items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
    kept = read(model.directory(20) / MOMENTUM)
    assert kept.keys() == velocity.keys() - STATISTICS
    for name, values in kept.items():
        np.testing.assert_array_equal(values, velocity[name], err_msg=name)
    model.write_model(20, tmp_path / "result")
    with TensorFile(tmp_path / "result" / "model.safetensors") as file:
        assert file.metadata == {"format": "pt"}
        assert {name: info.dtype for name, info in file.tensors.items()} == {n: i.dtype for n, i in LAYOUT.items()}
        for name, info in file.tensors.items():
            if info.dtype in FLOAT_DTYPES:
                np.testing.assert_array_equal(file.stored(name), from_float(expected[name], info.dtype), err_msg=name)
        assert int(file.stored("count")) == BIG + sum(range(1, 21))
        assert file.stored("small count").tolist() == [7 + sum(range(1, 21))] * 2
    assert digest_directory(tmp_path / "model") == start


def test_no_momentum_is_kept_without_a_momentum_factor(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    plain = GlobalModel(model.start_dir, tmp_path / "none", Nesterov(learning_rate=1.0, momentum=0.0))
    state = plain.add(make_update(tmp_path / "u", 1), 1)
    assert state.momentum is None
    assert snapshot(plain.state_dir).keys() == {f"round-1/{WEIGHTS}", f"round-1/{STATE}"}
    assert plain.check(1) == state


def test_a_sharded_model_is_rounded_file_by_file(tmp_path: Path) -> None:
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
        model.add(tmp_path / "u", number)
    model.write_model(32, tmp_path / "result")
    for name, file in shards.items():
        with TensorFile(tmp_path / "result" / file) as shard:
            assert to_float32(shard.stored(name), shard.tensors[name].dtype).tolist() == [1 + 2**-7] * 4


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("f32", math.nan, "'f32' contains NaN or infinity"),
        ("bf16", math.inf, "'bf16' contains NaN or infinity"),
        ("count", math.nan, "'count' contains NaN or infinity"),
    ],
)
def test_an_update_with_a_number_that_is_none_leaves_nothing(
    tmp_path: Path, name: str, value: float, what: str
) -> None:
    model = make_model(tmp_path / "run")
    values = np.zeros(LAYOUT[name].shape, "f4")
    values.reshape(-1)[-1] = value
    update = make_update(tmp_path / "u", 1, LAYOUT, **{name: values})
    with pytest.raises(TensorFileError, match=what):
        model.add(update, 1)
    assert not any(model.state_dir.iterdir())


def test_weights_that_would_overflow_are_refused(tmp_path: Path) -> None:
    layout = {"w": TensorInfo("F32", (2,))}
    model = make_model(tmp_path / "run", layout)
    model.add(make_update(tmp_path / "u", 1, layout, w=np.full(2, 3e38, "f4")), 1)
    with pytest.raises(TensorFileError, match="with it, 'w' becomes NaN or infinite"):
        model.add(make_update(tmp_path / "u", 2, layout, w=np.full(2, 3e38, "f4")), 2)
    assert [path.name for path in model.state_dir.iterdir()] == ["round-1"]


def test_updates_that_do_not_fit_leave_nothing(tmp_path: Path) -> None:
    model = make_model(tmp_path / "run")
    model.add(make_update(tmp_path / "u1", 1), 1)
    before = snapshot(tmp_path / "run")
    some = {name: info for name, info in LAYOUT.items() if name != "f32"}
    with pytest.raises(TensorFileError, match="u3: it does not hold the tensors of the updates before"):
        model.add(make_update(tmp_path / "u3", 2, some), 2)
    with pytest.raises(TensorFileError, match="u4: it is of round 9, expected round 2"):
        model.add(make_update(tmp_path / "u4", 9), 2)
    with pytest.raises(TensorFileError, match="the model has no tensor 'x'"):
        model.add(make_update(tmp_path / "u5", 1, {"x": TensorInfo("F32", (1,))}), 1)
    with pytest.raises(TensorFileError, match=f"round-2/{WEIGHTS}: the file is missing"):
        model.add(make_update(tmp_path / "u6", 3), 3)
    shapes = {name: info.shape for name, info in LAYOUT.items() if name != "frozen"}
    none = ((name, np.zeros(shape, "f4")) for name, shape in shapes.items())
    write_update(tmp_path / "u7", shapes, none, UpdateMetadata(round=2))
    with pytest.raises(TensorFileError, match="u7: its statistics are not those of the updates before"):
        model.add(tmp_path / "u7", 2)
    assert snapshot(tmp_path / "run") == before


def test_an_error_while_writing_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(tmp_path / "run")
    model.add(make_update(tmp_path / "u", 1), 1)
    before, write, update = snapshot(tmp_path / "run"), TensorFileWriter.write_stored, make_update(tmp_path / "u2", 2)

    def fail(writer: TensorFileWriter, name: str, stored: Array) -> None:
        if name == "f32" and "momentum" in writer.path.name:
            raise OSError(28, "No space left on device")
        write(writer, name, stored)

    with monkeypatch.context() as patch:
        patch.setattr(TensorFileWriter, "write_stored", fail)
        with pytest.raises(OSError, match="No space left"):
            model.add(update, 2)
    assert snapshot(tmp_path / "run") == before
    assert [path.name for path in model.state_dir.iterdir()] == ["round-1"]
    model.add(update, 2)
    model.check(2)


def test_a_round_can_be_added_again(tmp_path: Path) -> None:
    model, other = make_model(tmp_path / "run"), make_model(tmp_path / "other")
    model.add(make_update(tmp_path / "u", 1, f32=np.ones(7, "f4")), 1)
    again = make_update(tmp_path / "v", 1)
    assert model.add(again, 1) == other.add(again, 1)
    assert snapshot(model.state_dir) == snapshot(other.state_dir)


@pytest.mark.parametrize("name", [WEIGHTS, MOMENTUM, STATE])
def test_state_that_is_missing_damaged_or_of_another_round_is_named(tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path / "run")
    for number in (1, 2):
        model.add(make_update(tmp_path / "u", number), number)
    path = model.directory(2) / name
    content = path.read_bytes()
    path.write_bytes((model.directory(1) / name).read_bytes())
    with pytest.raises(TensorFileError, match=f"round-2/{name}: it is of round 1, expected round 2"):
        model.check(2)
    at = content.index(b'"weights"') + 30 if name == STATE else len(content) - 9
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    damaged = WEIGHTS if name == STATE else name
    with pytest.raises(TensorFileError, match=f"round-2/{damaged}: the file is damaged"):
        model.check(2)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(TensorFileError, match=name):
        model.check(2)
    path.unlink()
    with pytest.raises(TensorFileError, match=f"round-2/{name}: the file is missing"):
        model.check(2)


def test_states_of_other_rounds_are_removed(tmp_path: Path) -> None:
    model = make_model(tmp_path / "run")
    model.remove_others({1})
    for number in (1, 2, 3):
        model.add(make_update(tmp_path / "u", number), number)
    (model.state_dir / ".round-4.part").mkdir()
    (model.state_dir / ".round-4.part" / WEIGHTS).write_bytes(b"half")
    model.remove_others({2})
    assert [path.name for path in model.state_dir.iterdir()] == ["round-2"]
    with pytest.raises(TensorFileError, match="round-3: the directory is missing"):
        model.check(3)


def test_the_digest_of_a_directory_depends_on_names_and_contents(tmp_path: Path) -> None:
    found = []
    for number, (name, text) in enumerate([("a", "1"), ("b", "1"), ("a", "2"), ("a", "1")]):
        folder = tmp_path / str(number) / "sub"
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
        found.append(digest_directory(tmp_path / str(number)))
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_momentum_of_a_first_step_is_the_mean_of_the_updates() -> None:
    mean = np.array([1.0, -2.0, 0.5], "f4")
    nesterov = np.float32(0.7) * (mean + np.float32(0.9) * mean)
    found = derive_momentum(nesterov, 0.0, Nesterov(learning_rate=0.7, momentum=0.9, nesterov=True))
    np.testing.assert_allclose(found, mean, rtol=3e-7)
    classical = derive_momentum(
        np.float32(0.5) * mean, mean * 100, Nesterov(learning_rate=0.5, momentum=0.9, nesterov=False)
    )
    np.testing.assert_array_equal(classical, mean)
    assert math.isinf(
        derive_momentum(np.array([3e38], "f4"), 0.0, Nesterov(learning_rate=0.1, momentum=0.0, nesterov=False))[0]
    )
