"""The momentum that follows from outer updates, against that of the parameter server's outer steps."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hypha_proto.global_model import MOMENTUM, GlobalModel
from hypha_proto.job_spec import Nesterov
from hypha_proto.outer_step import OuterOptimizer, outer_step
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo
from hypha_proto.update_file import UpdateMetadata, write_update

SHAPES = {"weight": (30, 7), "bias": (7,), "scale": (), "running_mean": (5,)}
STATISTICS = frozenset({"running_mean"})
ROUNDS = 20
WEIGHTS = (4.0, 1.0, 2.0, 1.0)


def write(path: Path, arrays: dict[str, NDArray[np.float32]]) -> Path:
    write_update(path, SHAPES, arrays.items(), UpdateMetadata(statistics=STATISTICS))
    return path


def read(path: Path) -> dict[str, NDArray[np.float32]]:
    with TensorFile(path) as file:
        return {name: file.tensor(name) for name in file.tensors}


def start_model(folder: Path, rate: float, momentum: float, nesterov: bool) -> GlobalModel:
    (folder / "model").mkdir()
    infos = {name: TensorInfo("BF16", shape) for name, shape in SHAPES.items()}
    with TensorFileWriter(folder / "model" / "model.safetensors", infos) as writer:
        for name, shape in SHAPES.items():
            writer.write(name, np.zeros(shape))
    optimizer = Nesterov(learning_rate=rate, momentum=momentum, nesterov=nesterov)
    return GlobalModel(folder / "model", folder / "state", optimizer)


def check(folder: Path, rate: float, momentum: float, nesterov: bool, scale: float, seed: int) -> float:
    """Take outer steps and add their updates to a model; its momentum is the server's to the bit.

    Returns:
        The largest difference from the momentum in float64, relative to the largest momentum so far.
    """
    rng, model = np.random.default_rng(seed), start_model(folder, rate, momentum, nesterov)
    worst = largest = 0.0
    exact = {name: np.zeros(shape) for name, shape in SHAPES.items() if name not in STATISTICS}
    for number in range(1, ROUNDS + 1):
        updates = [{n: rng.normal(0, scale, s).astype("f4") for n, s in SHAPES.items()} for _ in WEIGHTS]
        files = [(write(folder / str(i), u), w) for i, (u, w) in enumerate(zip(updates, WEIGHTS, strict=True))]
        step = folder / "outer"
        optimizer = OuterOptimizer(rate, momentum, nesterov)
        outer_step(files, folder / "momentum", step, optimizer, UpdateMetadata(number, None, STATISTICS))
        model.add(step, number)
        of_server, of_scheduler = read(folder / "momentum"), read(model.directory(number) / MOMENTUM)
        assert of_scheduler.keys() == exact.keys()
        for name in exact:
            mean = sum(w * u[name].astype("f8") for w, u in zip(WEIGHTS, updates, strict=True)) / sum(WEIGHTS)
            exact[name] = momentum * exact[name] + mean
            np.testing.assert_array_equal(of_scheduler[name], of_server[name], err_msg=f"{name} in round {number}")
            largest = max(largest, float(np.abs(exact[name]).max()))
            worst = max(worst, float(np.abs(of_scheduler[name] - exact[name]).max()) / largest)
    return worst


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_of_the_literature_settings(tmp_path: Path, nesterov: bool) -> None:
    assert check(tmp_path, 0.7, 0.9, nesterov, 0.01, 5) <= 1e-6


@settings(max_examples=15, deadline=None)
@given(
    rate=st.floats(0.01, 10),
    momentum=st.floats(0.01, 0.99),
    nesterov=st.booleans(),
    scale=st.floats(1e-6, 10),
    seed=st.integers(0, 2**32 - 1),
)
def test_momentum_of_any_settings(rate: float, momentum: float, nesterov: bool, scale: float, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # update and momentum are rounded to float32 in each round: 2 half units in the last place, never damped here
        assert check(Path(folder), rate, momentum, nesterov, scale, seed) <= ROUNDS * 2 * 2**-24 * 1.1


def test_a_learning_rate_of_zero_keeps_the_momentum(tmp_path: Path) -> None:
    update = write(tmp_path / "u", {name: np.ones(shape, "f4") for name, shape in SHAPES.items()})
    for _ in range(2):
        outer_step([(update, 1.0)], tmp_path / "m", tmp_path / "o", OuterOptimizer(0.0, 0.5), UpdateMetadata())
    assert read(tmp_path / "m")["bias"].tolist() == [1.5] * 7
