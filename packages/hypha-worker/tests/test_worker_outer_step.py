"""The outer step, compared with a plain float64 implementation, and with files that do not match."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hypha_proto.errors import TensorFileError
from hypha_proto.update_file import TensorFile, TensorFileWriter, TensorInfo, UpdateMetadata, write_update
from hypha_worker.executors.parameter_server.outer_step import OuterOptimizer, inspect_update, outer_step

Arrays = dict[str, NDArray[np.float32]]
SHAPES = {"layer.weight": (300, 700), "layer.bias": (700,), "norm.mean": (5,), "scale": (), "none": (0, 3)}
STATISTICS = frozenset({"norm.mean"})
LAYOUT = UpdateMetadata(statistics=STATISTICS)


def random_update(rng: np.random.Generator) -> Arrays:
    return {name: rng.normal(0, 0.01, shape).astype(np.float32) for name, shape in SHAPES.items()}


def write(path: Path, arrays: Arrays, metadata: UpdateMetadata = LAYOUT) -> Path:
    write_update(path, {name: array.shape for name, array in arrays.items()}, arrays.items(), metadata)
    return path


def read(path: Path) -> Arrays:
    with TensorFile(path) as file:
        return {name: file.tensor(name) for name in file.tensors}


def sgd(gradients: list[NDArray[np.float64]], rate: float, momentum: float, nesterov: bool) -> NDArray[np.float64]:
    """Return the sum of the steps of torch.optim.SGD on these gradients, from its definition."""
    buffer, total = None, np.zeros_like(gradients[0])
    for gradient in gradients:
        buffer = gradient.copy() if buffer is None else momentum * buffer + gradient
        total -= rate * (gradient + momentum * buffer if nesterov else buffer)
    return total


@pytest.mark.parametrize("nesterov", [True, False])
def test_twenty_rounds_equal_sgd_in_float64(tmp_path: Path, nesterov: bool) -> None:
    rng, weights = np.random.default_rng(1), (4.0, 1.0, 2.0, 1.0)
    settings = OuterOptimizer(0.7, 0.9, nesterov)
    moved = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    means: dict[str, list[NDArray[np.float64]]] = {name: [] for name in SHAPES}
    for number in range(20):
        files = []
        updates = [random_update(rng) for _ in weights]
        for worker, (update, weight) in enumerate(zip(updates, weights, strict=True)):
            files.append((write(tmp_path / f"{worker}.safetensors", update), weight))
        outer_step(files, tmp_path / "momentum", tmp_path / "result", settings, UpdateMetadata(number, 1, STATISTICS))
        for name, values in read(tmp_path / "result").items():
            moved[name] += values
            mean = sum(w * u[name].astype(np.float64) for w, u in zip(weights, updates, strict=True)) / sum(weights)
            means[name].append(np.asarray(mean))
    for name, history in means.items():
        expected = sum(history) if name in STATISTICS else sgd([-m for m in history], 0.7, 0.9, nesterov)
        assert np.abs(moved[name] - expected).max(initial=0.0) <= 1e-6, name


def test_the_weighted_mean_is_exact_to_float32_rounding(tmp_path: Path) -> None:
    rng, weights = np.random.default_rng(2), (4.0, 1.0, 2.0, 1.0)
    updates = [random_update(rng) for _ in weights]
    files = [(write(tmp_path / f"{n}", update), w) for n, (update, w) in enumerate(zip(updates, weights, strict=True))]
    outer_step(files, tmp_path / "m", tmp_path / "result", OuterOptimizer(1.0, 0.0), LAYOUT)
    for name, values in read(tmp_path / "result").items():
        exact = sum(w * u[name].astype(np.float64) for w, u in zip(weights, updates, strict=True)) / 8.0
        np.testing.assert_array_equal(values, np.asarray(exact, dtype=np.float32), err_msg=name)


COUNTS = UpdateMetadata(statistics=frozenset({"mean", "count"}), integers=frozenset({"count"}))


def write_counts(path: Path, count: float, metadata: UpdateMetadata = COUNTS) -> Path:
    return write(path, {"count": np.array(count, "f4"), "mean": np.full(3, count, "f4")}, metadata)


def step_counts(folder: Path, files: list[tuple[Path, float]]) -> Arrays:
    outer_step(files, folder / "m", folder / "result", OuterOptimizer(0.7, 0.9), COUNTS)
    return read(folder / "result")


def test_integers_are_those_of_the_first_member_that_counts(tmp_path: Path) -> None:
    files = [(write_counts(tmp_path / f"{n}", n), weight) for n, weight in ((9, 0.0), (5, 4.0), (12, 1.0), (3, 3.0))]
    for _ in range(2):  # no momentum
        found = step_counts(tmp_path, files)
        assert float(found["count"]) == 5.0
        assert found["mean"].tolist() == [(5 * 4 + 12 + 3 * 3) / 8] * 3
    idle = [(path, 0.0) for path, _ in files]
    assert float(step_counts(tmp_path, idle)["count"]) == 9.0


def test_integers_that_not_every_member_declares_are_averaged(tmp_path: Path) -> None:
    silent = UpdateMetadata(statistics=COUNTS.statistics)
    files = [(write_counts(tmp_path / "1", 5), 3.0), (write_counts(tmp_path / "2", 1, silent), 1.0)]
    assert float(step_counts(tmp_path, files)["count"]) == 4.0
    assert float(step_counts(tmp_path, files[::-1])["count"]) == 4.0


def test_all_zero_weights_count_equally(tmp_path: Path) -> None:
    files = [(write(tmp_path / f"{n}", {"a": np.full(3, n, np.float32)}, UpdateMetadata()), 0.0) for n in (1, 3)]
    outer_step(files, tmp_path / "m", tmp_path / "result", OuterOptimizer(1.0, 0.0), UpdateMetadata())
    np.testing.assert_array_equal(read(tmp_path / "result")["a"], np.full(3, 2, np.float32))


def test_half_precision_updates_give_a_float32_result(tmp_path: Path) -> None:
    for number, dtype in enumerate(("BF16", "F16")):
        with TensorFileWriter(tmp_path / f"{number}", {"a": TensorInfo(dtype, (4,))}) as writer:
            writer.write("a", np.full(4, 1.5 + number, np.float32))
    files = [(tmp_path / "0", 3.0), (tmp_path / "1", 1.0)]
    outer_step(files, tmp_path / "m", tmp_path / "result", OuterOptimizer(1.0, 0.0), UpdateMetadata())
    with TensorFile(tmp_path / "result") as file:
        assert file.tensors["a"] == TensorInfo("F32", (4,))
        np.testing.assert_array_equal(file.tensor("a"), np.full(4, 1.75, np.float32))


def test_a_failed_step_leaves_the_momentum_unchanged(tmp_path: Path) -> None:
    good = write(tmp_path / "good", {"a": np.ones(3, np.float32)}, UpdateMetadata())
    outer_step([(good, 1.0)], tmp_path / "m", tmp_path / "result", OuterOptimizer(1.0, 0.9), UpdateMetadata())
    before = (tmp_path / "m").read_bytes()
    other = write(tmp_path / "other", {"a": np.ones(4, np.float32)}, UpdateMetadata())
    with pytest.raises(TensorFileError, match="differ in the shape"):
        outer_step([(good, 1.0), (other, 1.0)], tmp_path / "m", tmp_path / "r", OuterOptimizer(1.0, 0.9), LAYOUT)
    assert (tmp_path / "m").read_bytes() == before
    assert not (tmp_path / "r").exists()
    with pytest.raises(ValueError, match="at least one update"):
        outer_step([], tmp_path / "m", tmp_path / "r", OuterOptimizer(1.0, 0.9), LAYOUT)
    with pytest.raises(ValueError, match="negative"):
        outer_step([(good, -1.0)], tmp_path / "m", tmp_path / "r", OuterOptimizer(1.0, 0.9), LAYOUT)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_an_update_with_nan_or_infinity_is_refused(tmp_path: Path, poison: float) -> None:
    values = np.zeros(300_000, np.float32)
    values[299_999] = poison
    with pytest.raises(TensorFileError, match="NaN or infinity"):
        inspect_update(write(tmp_path / "bad", {"a": values}, UpdateMetadata()))


def test_layouts_differ_by_name_shape_dtype_and_statistics(tmp_path: Path) -> None:
    def layout(arrays: Arrays, statistics: frozenset[str] = frozenset()):  # type: ignore[no-untyped-def]
        return inspect_update(write(tmp_path / "x", arrays, UpdateMetadata(statistics=statistics)))

    one, two = np.ones(3, np.float32), np.ones((3, 1), np.float32)
    base = layout({"a": one, "b": one})
    assert base.difference(layout({"a": one, "b": one})) == ""
    assert base.difference(layout({"a": one})) == "tensor 'b' is missing"
    assert base.difference(layout({"a": one, "b": two})) == "tensor 'b' is F32 [3, 1], expected F32 [3]"
    assert base.difference(layout({"a": one, "b": one, "c": one})) == "tensor 'c' is not part of this model"
    assert "running statistics" in base.difference(layout({"a": one, "b": one}, frozenset({"b"})))
    for junk in (b"", b"\xff" * 9, os.urandom(100)):
        (tmp_path / "junk").write_bytes(junk)
        with pytest.raises(TensorFileError):
            inspect_update(tmp_path / "junk")
