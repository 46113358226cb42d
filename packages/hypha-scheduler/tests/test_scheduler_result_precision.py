"""The weights of a job whose model is stored in 16 bits: executors' own, in float32; the result is their rounding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hypha_proto.job_spec import Nesterov
from hypha_proto.safetensors_io import Array, Float32Array, TensorFile, TensorFileWriter, TensorInfo, from_float
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_proto.weights_digest import digest_weights
from hypha_scheduler.strategies.diloco.result_model import START_MODEL, ResultModel

OUTER = Nesterov(learning_rate=0.7, momentum=0.9)
ROUNDS = 40


def make_model(folder: Path, dtype: str, start: Float32Array) -> Path:
    folder.mkdir()
    with TensorFileWriter(folder / "model.safetensors", {"w": TensorInfo(dtype, start.shape)}) as writer:
        writer.write("w", start)
    return folder


def write(path: Path, number: int, values: Float32Array) -> Path:
    write_update(path, {"w": values.shape}, [("w", values)], UpdateMetadata(round=number))
    return path


def stored(path: Path) -> Array:
    with TensorFile(path) as file:
        return np.array(file.stored("w"))


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
async def test_many_small_updates_give_the_rounding_of_the_workers_weights(tmp_path: Path, dtype: str) -> None:
    rng = np.random.default_rng(3)
    folder = make_model(tmp_path / START_MODEL, dtype, rng.normal(0, 0.5, 3000).astype("f4"))
    with TensorFile(folder / "model.safetensors") as file:
        start = file.tensor("w")
    worker = start.copy()

    result = ResultModel(tmp_path, OUTER)
    for number in range(1, ROUNDS + 1):
        change = rng.normal(1e-4, 1e-5, worker.shape).astype("f4")
        before, worker = worker, worker + change
        advance = await result.advance(write(tmp_path / f"u{number}", number, change), number)
        assert (advance.before, advance.weights) == (
            digest_weights([("w", before)]),
            digest_weights([("w", worker)]),
        )
        await result.commit(number)
        assert (result.round, result.weights) == (number, advance.weights)
    weights = result.weights_file()
    assert weights is not None
    np.testing.assert_array_equal(stored(weights), worker)
    await result.finish()
    assert abs(float(np.mean(worker - start)) - ROUNDS * 1e-4) < 1e-5
    np.testing.assert_array_equal(stored(tmp_path / "model" / "model.safetensors"), from_float(worker, dtype))
