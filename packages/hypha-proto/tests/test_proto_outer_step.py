"""The outer step, compared with a plain float64 implementation, and with files that do not match."""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.small_disk import limited

from hypha_proto.errors import TensorFileError
from hypha_proto.job_spec import Nesterov
from hypha_proto.outer_step import BLOCK, PART, inspect_update, outer_step
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo
from hypha_proto.update_file import UpdateMetadata, write_update

Arrays = dict[str, NDArray[np.float32]]
SHAPES = {"layer.weight": (300, 700), "layer.bias": (700,), "norm.mean": (5,), "scale": (), "none": (0, 3)}
STATISTICS = frozenset({"norm.mean"})
LAYOUT = UpdateMetadata(statistics=STATISTICS)
PLAIN = UpdateMetadata()
MEAN = Nesterov(learning_rate=1.0, momentum=0.0)
"""Settings whose result is the mean of the updates."""
OUTER = Nesterov(learning_rate=1.0, momentum=0.9)


def random_update(rng: np.random.Generator) -> Arrays:
    return {name: rng.normal(0, 0.01, shape).astype(np.float32) for name, shape in SHAPES.items()}


def write(path: Path, arrays: Arrays, metadata: UpdateMetadata = LAYOUT) -> Path:
    write_update(path, {name: array.shape for name, array in arrays.items()}, arrays.items(), metadata)
    return path


def read(path: Path) -> Arrays:
    with TensorFile(path) as file:
        return {name: file.tensor(name) for name in file.tensors}


def numbers(shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Return numbers in ±1/64 that depend on no version of a random generator."""
    count = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint64)
    mixed = (count + np.uint64(1 + 1_000_003 * seed)) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(40)).astype("f4") / np.float32(1 << 29) - np.float32(1 / 64)).reshape(shape)


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
    settings = Nesterov(learning_rate=0.7, momentum=0.9, nesterov=nesterov)
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
    outer_step(files, tmp_path / "m", tmp_path / "result", MEAN, LAYOUT)
    for name, values in read(tmp_path / "result").items():
        exact = sum(w * u[name].astype(np.float64) for w, u in zip(weights, updates, strict=True)) / 8.0
        np.testing.assert_array_equal(values, np.asarray(exact, dtype=np.float32), err_msg=name)


GOLDEN = {
    (True, 0.7): "2011c8df363b40a0dbd5ed0079ae935cb6b1df539dd49b25da0737d14ab4fb9b",
    (False, 0.7): "8486c7bd46c4041c8d14f56153d10f7622f6c30e0a94810885858efd34bf8df9",
    (True, 0.0): "f9026b939d1157919617c1d729d4c2567b4a225d3652916e1c66f143748a66f4",
}
"""SHA-256 of the files of three rounds, by Nesterov and learning rate, as one thread computed them."""


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("nesterov", "rate"), GOLDEN)
def test_results_are_those_of_earlier_versions_to_the_bit(
    tmp_path: Path, nesterov: bool, rate: float, threads: int
) -> None:
    """Jobs that were recorded with an earlier version are computed again with this one, and must give the same."""
    shapes = {"weight": (3, 90_001), "bias": (7,), "scale": (), "mean": (5,), "none": (0, 3)}
    digest, metadata = hashlib.sha256(), UpdateMetadata(statistics=frozenset({"mean"}))
    for number in range(3):
        files = []
        for worker, weight in enumerate((3.0, 5.0, 7.0, 0.0)):
            seed = 97 * number + 11 * worker
            update = {name: numbers(shape, seed + place) for place, (name, shape) in enumerate(shapes.items())}
            files.append((write(tmp_path / f"{worker}", update, metadata), weight))
        optimizer = Nesterov(learning_rate=rate, momentum=0.9, nesterov=nesterov)
        about = UpdateMetadata(number, None, metadata.statistics)
        outer_step(files, tmp_path / "momentum", tmp_path / "result", optimizer, about, threads=threads)
        digest.update((tmp_path / "result").read_bytes() + (tmp_path / "momentum").read_bytes())
    assert digest.hexdigest() == GOLDEN[nesterov, rate]


@pytest.mark.parametrize("threads", [2, 5, None])
def test_the_number_of_threads_does_not_change_the_result(tmp_path: Path, threads: int | None) -> None:
    shapes = {"a": (2 * PART + 3,), "b": (BLOCK + 1,), "c": (1,)}
    files = []
    for worker, weight in enumerate((3.0, 1.0)):
        update = {name: numbers(shape, worker) for name, shape in shapes.items()}
        files.append((write(tmp_path / f"{worker}", update, PLAIN), weight))
    for _ in range(2):
        found = []
        for folder, count in ((tmp_path / "one", 1), (tmp_path / "several", threads)):
            folder.mkdir(exist_ok=True)
            step = folder / "m", folder / "result", Nesterov(learning_rate=0.7, momentum=0.9), PLAIN
            outer_step(files, *step, threads=count)
            found.append((folder / "result").read_bytes() + (folder / "m").read_bytes())
        assert found[0] == found[1]


COUNTS = UpdateMetadata(statistics=frozenset({"mean", "count"}), integers=frozenset({"count"}))


def write_counts(path: Path, count: float, metadata: UpdateMetadata = COUNTS) -> Path:
    return write(path, {"count": np.array(count, "f4"), "mean": np.full(3, count, "f4")}, metadata)


def step_counts(folder: Path, files: list[tuple[Path, float]]) -> Arrays:
    outer_step(files, folder / "m", folder / "result", Nesterov(learning_rate=0.7, momentum=0.9), COUNTS)
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
    files = [(write(tmp_path / f"{n}", {"a": np.full(3, n, np.float32)}, PLAIN), 0.0) for n in (1, 3)]
    outer_step(files, tmp_path / "m", tmp_path / "result", MEAN, PLAIN)
    np.testing.assert_array_equal(read(tmp_path / "result")["a"], np.full(3, 2, np.float32))


def test_half_precision_updates_give_a_float32_result(tmp_path: Path) -> None:
    for number, dtype in enumerate(("BF16", "F16")):
        with TensorFileWriter(tmp_path / f"{number}", {"a": TensorInfo(dtype, (4,))}) as writer:
            writer.write("a", np.full(4, 1.5 + number, np.float32))
    files = [(tmp_path / "0", 3.0), (tmp_path / "1", 1.0)]
    outer_step(files, tmp_path / "m", tmp_path / "result", MEAN, PLAIN)
    with TensorFile(tmp_path / "result") as file:
        assert file.tensors["a"] == TensorInfo("F32", (4,))
        np.testing.assert_array_equal(file.tensor("a"), np.full(4, 1.75, np.float32))


def test_a_failed_step_leaves_the_momentum_unchanged(tmp_path: Path) -> None:
    good = write(tmp_path / "good", {"a": np.ones(3, np.float32)}, PLAIN)
    outer_step([(good, 1.0)], tmp_path / "m", tmp_path / "result", OUTER, PLAIN)
    before = (tmp_path / "m").read_bytes()
    other = write(tmp_path / "other", {"a": np.ones(4, np.float32)}, PLAIN)
    with pytest.raises(TensorFileError, match="differ in the shape"):
        outer_step([(good, 1.0), (other, 1.0)], tmp_path / "m", tmp_path / "r", OUTER, LAYOUT)
    assert (tmp_path / "m").read_bytes() == before
    assert not (tmp_path / "r").exists()
    with pytest.raises(ValueError, match="at least one update"):
        outer_step([], tmp_path / "m", tmp_path / "r", OUTER, LAYOUT)
    with pytest.raises(ValueError, match="negative"):
        outer_step([(good, -1.0)], tmp_path / "m", tmp_path / "r", OUTER, LAYOUT)


def test_the_momentum_is_replaced_only_after_the_result(tmp_path: Path) -> None:
    """Otherwise the step could not be taken again: its updates would enter the momentum twice."""
    update = write(tmp_path / "u", {"a": np.ones(3, np.float32)}, PLAIN)
    outer_step([(update, 1.0)], tmp_path / "m", tmp_path / "result", OUTER, PLAIN)
    before = (tmp_path / "m").read_bytes()
    (tmp_path / "folder").mkdir()  # no file can be moved there
    with pytest.raises(OSError, match="folder"):
        outer_step([(update, 1.0)], tmp_path / "m", tmp_path / "folder", OUTER, PLAIN)
    assert (tmp_path / "m").read_bytes() == before


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("reserves", [True, False])
def test_a_full_disk_fails_the_step_and_leaves_nothing_of_it(
    tmp_path: Path, threads: int, reserves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the file size stands in for the disk.

    Where space cannot be reserved, it is reached in the middle, in whichever thread comes first.
    """
    if not reserves:
        monkeypatch.delattr(os, "posix_fallocate")
    update = write(tmp_path / "u", {"a": numbers((2 * PART + 3,), 0)}, PLAIN)
    step = [(update, 1.0)], tmp_path / "m", tmp_path / "result", OUTER, PLAIN
    outer_step(*step)
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with limited(resource.RLIMIT_FSIZE, 3 * PART), pytest.raises(OSError, match="File too large"):
        outer_step(*step, threads=threads)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_a_step_needs_memory_for_a_few_blocks_only(tmp_path: Path) -> None:
    """Private memory is limited to less than a tensor more than there is; a thread's stack may take 8 MiB of it."""
    elements = 12 << 20
    files = []
    for name in ("1", "2"):  # of zeros, as sparse files
        header = json.dumps({"a": {"dtype": "F32", "shape": [elements], "data_offsets": [0, 4 * elements]}}).encode()
        header += b" " * (-len(header) % 8)
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(tmp_path / name, 8 + len(header) + 4 * elements)
        files.append((tmp_path / name, 1.0))
    [used] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:")]
    with limited(resource.RLIMIT_DATA, (int(used.split()[1]) << 10) + (40 << 20)):
        step = tmp_path / "m", tmp_path / "result", OUTER, PLAIN
        outer_step(files, *step, threads=2)
    with TensorFile(tmp_path / "result") as result:
        assert result.tensors == {"a": TensorInfo("F32", (elements,))}


def test_a_momentum_of_another_model_is_refused(tmp_path: Path) -> None:
    update = write(tmp_path / "u", {"a": np.ones(3, np.float32)}, PLAIN)
    cases = [((2,), "a", "m and u differ in the shape of 'a'"), ((3,), "b", "m holds no tensor 'a'")]
    for shape, name, message in cases:
        momentum = write(tmp_path / "m", {name: np.ones(shape, np.float32)}, PLAIN).read_bytes()
        with pytest.raises(TensorFileError, match=message):
            outer_step([(update, 1.0)], tmp_path / "m", tmp_path / "result", OUTER, PLAIN)
        assert (tmp_path / "m").read_bytes() == momentum


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_an_update_with_nan_or_infinity_is_refused(tmp_path: Path, poison: float) -> None:
    values = np.zeros(300_000, np.float32)
    values[299_999] = poison
    with pytest.raises(TensorFileError, match="NaN or infinity"):
        inspect_update(write(tmp_path / "bad", {"a": values}, PLAIN))


@pytest.mark.parametrize("huge", [3e38, -3e38, 1.1e30])
def test_an_update_whose_outer_step_would_overflow_is_refused(tmp_path: Path, huge: float) -> None:
    """A step of 3e38 with momentum is infinite in float32, though the number itself is finite."""
    values = np.zeros(300_000, np.float32)
    values[299_999] = huge
    with pytest.raises(TensorFileError, match=r"tensor 'a' holds a number beyond 1e\+30"):
        inspect_update(write(tmp_path / "huge", {"a": values}, PLAIN))


def test_the_norm_is_that_of_all_tensors_but_statistics(tmp_path: Path) -> None:
    arrays = {"a": np.full((300_000, 2), -0.5, np.float32), "b": np.full(7, 1e25, np.float32), "c": np.ones(9, "f4")}
    about = UpdateMetadata(statistics=frozenset({"b"}))
    assert inspect_update(write(tmp_path / "x", arrays, about)).norm == pytest.approx(math.sqrt(600_000 / 4 + 9))
    large = {"a": np.full(4, 9e29, np.float32)}
    assert inspect_update(write(tmp_path / "large", large, PLAIN)).norm == pytest.approx(1.8e30)


def test_layouts_differ_by_name_shape_dtype_and_statistics(tmp_path: Path) -> None:
    def layout(arrays: Arrays, statistics: frozenset[str] = frozenset()):  # type: ignore[no-untyped-def]
        return inspect_update(write(tmp_path / "x", arrays, UpdateMetadata(statistics=statistics))).layout

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
