"""Samples that are computed at once: as the job says, by the memory of the lease, and by trial on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypha.accelerate_executor import training
from hypha.accelerate_executor.data.batches import Batch
from hypha.accelerate_executor.data.microbatches import split_batch
from hypha.accelerate_executor.distributed.accelerator import CpuBackend
from hypha.accelerate_executor.distributed.process_group import SingleProcess
from hypha.accelerate_executor.modeling.torch import write_torch_model
from hypha.accelerate_executor.options import ModelFiles, OwnerOptions
from hypha.accelerate_executor.train import micro_batch_size
from hypha.accelerate_executor.train.micro_batch_size import MicroBatchSizer, double_while, fitting_samples
from hypha.accelerate_executor.train.trainer import Trainer
from hypha.accelerate_executor.training_setup import Setup, build_setup
from hypha_proto.bridge_api import MEMORY_VARIABLE

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]

GIBIBYTE = 1 << 30
NET = """
import torch

class Net(torch.nn.Module):
    largest = 1 << 30
    seen = []

    def __init__(self, normalized=False):
        super().__init__()
        self.layer = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8) if normalized else torch.nn.Identity()
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        Net.seen.append(len(x))
        if len(x) > Net.largest:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.drop(self.norm(self.layer(x))).square().mean()
"""


@given(st.integers(-100, 10_000), st.integers(0, 100), st.integers(1, 2), st.integers(2, 300))
def test_the_samples_that_are_computed_to_fit_do_fit_and_twice_as_many_do_not(
    free: int, per_sample: int, least: int, at_most: int
) -> None:
    found = fitting_samples(free, per_sample, least, at_most)
    assert least <= found <= at_most
    assert found == least or found * per_sample <= free
    assert found == at_most or min(2 * found, at_most) * per_sample > free or 2 * found > at_most


@given(st.integers(1, 300), st.integers(1, 2), st.integers(2, 300))
def test_doubling_ends_at_the_first_size_that_does_not_fit(capacity: int, least: int, at_most: int) -> None:
    tried: list[int] = []

    def fits(samples: int) -> bool:
        tried.append(samples)
        return samples <= capacity

    found = double_while(fits, least, at_most)
    assert found == least or found <= capacity
    assert found == at_most or tried[-1] > capacity
    assert max(tried) <= at_most
    assert len(tried) <= 10


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the class `Net` of an installed module, on whose instances no more than `largest` rows can be computed."""
    (tmp_path / "limited_net.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "limited_net", raising=False)
    import limited_net  # type: ignore[import-not-found]

    return limited_net.Net


@pytest.fixture
def set_up(net: Any, make_worker: Callable[..., Any], tmp_path: Path) -> Callable[..., Setup]:
    def make(**arguments: Any) -> Setup:
        write_torch_model("limited_net:Net", arguments, 0, tmp_path / "model")
        config = training.read_settings(make_worker().job(task="torch", inputs=["x"]))
        options = OwnerOptions(frozenset({"limited_net"}))
        return build_setup(config, options, ModelFiles(tmp_path / "model"), CpuBackend(), SingleProcess())

    return make


def sizer(setup: Setup, memory: int | None = None) -> MicroBatchSizer:
    return MicroBatchSizer(setup.trainer, setup.module, setup.optimizer, CpuBackend(), memory=memory)


def rows(count: int) -> Batch:
    return Batch({"x": np.random.default_rng(0).normal(size=(count, 4)).astype("f4")}, count)


@pytest.mark.parametrize(("largest", "found"), [(1, 1), (5, 4), (8, 8), (15, 8), (16, 16), (99, 16)])
def test_a_device_is_filled_until_its_memory_ends(
    net: Any, set_up: Callable[..., Setup], largest: int, found: int
) -> None:
    setup, net.largest = set_up(), largest
    before = {name: value.clone() for name, value in setup.module.state_dict().items()}
    assert sizer(setup).find(rows(16), 16) == found
    assert max(net.seen) <= 16
    assert all(parameter.grad is None for parameter in setup.module.parameters())
    assert not setup.optimizer.adamw.state
    assert all(torch.equal(value, before[name]) for name, value in setup.module.state_dict().items())


def test_a_batch_with_fewer_samples_is_repeated(net: Any, set_up: Callable[..., Setup]) -> None:
    setup, net.largest = set_up(), 9
    assert sizer(setup).find(rows(3), 16) == 8


def test_another_error_is_no_end_of_memory(
    net: Any, set_up: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = set_up()

    def fail(_module: Any, _x: Any) -> Any:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(net, "forward", fail)
    assert sizer(setup).find(rows(16), 16) == 16, "training says what is wrong, with the whole batch"


def test_a_model_that_cannot_take_one_sample_gets_two(net: Any, set_up: Callable[..., Setup]) -> None:
    setup = set_up(normalized=True)
    before = {name: value.clone() for name, value in setup.module.named_buffers()}
    net.largest = 3
    assert sizer(setup).find(rows(16), 16) == 2
    assert sizer(setup, memory=1).find(rows(16), 16) == 2
    assert all(torch.equal(value, before[name]) for name, value in setup.module.named_buffers())


def test_memory_of_a_lease_is_never_filled_to_find_its_end(net: Any, set_up: Callable[..., Setup]) -> None:
    setup = set_up()
    assert sizer(setup, memory=64 * GIBIBYTE).find(rows(16), 16) == 16
    assert max(net.seen) == 1


@pytest.fixture
def train(make_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that trains a round of the digits model in a lease with some memory."""

    def run(memory: int | None, **config: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.delenv(MEMORY_VARIABLE, raising=False)
            if memory is not None:
                patch.setenv(MEMORY_VARIABLE, str(memory))
            worker = make_worker(rounds=1, batches=3)
            assert training.main(worker.arguments(**({"term": 1} | config))) == 0
        return worker

    return run


def test_memory_that_suffices_changes_no_bit(train: Callable[..., Any]) -> None:
    enough, unlimited = train(64 * GIBIBYTE), train(None)
    ours, theirs = enough.update(0)[0], unlimited.update(0)[0]
    assert all(np.array_equal(value, theirs[name]) for name, value in ours.items())
    assert "micro_batch" not in enough.sent[0]["contribution"]
    assert [found["micro_batch"] for found in enough.metrics] == [16.0]


def test_a_lease_with_little_memory_computes_fewer_samples_at_once_and_says_so(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(micro_batch_size, "resident_bytes", lambda: GIBIBYTE)
    worker = train(GIBIBYTE)
    assert [sent["contribution"]["micro_batch"] for sent in worker.sent] == [1]
    assert {sent["contribution"]["batch_size"] for sent in worker.sent} == {16}
    first, *rounds = worker.metrics
    assert first == {"micro_batch": 1.0}
    assert worker.reports[0] == {"metrics": {"round": 1, "metrics": first}}, "it comes before the first batch"
    assert [found["micro_batch"] for found in rounds] == [1.0]
    assert "request more" in caplog.text


def test_the_limit_of_the_job_is_not_exceeded(train: Callable[..., Any]) -> None:
    worker = train(64 * GIBIBYTE, micro_batch=4)
    assert [sent["contribution"]["micro_batch"] for sent in worker.sent] == [4]
    assert [found["micro_batch"] for found in worker.metrics] == [4.0]


def test_a_scheduler_without_terms_gets_no_early_report(
    train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch_size, "resident_bytes", lambda: GIBIBYTE)
    assert [found["micro_batch"] for found in train(GIBIBYTE, term=None).metrics] == [1.0]


@pytest.mark.parametrize("text", ["", "0", "1.5"])
def test_memory_that_is_no_number_of_bytes_is_refused(
    make_worker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, fails: Callable[..., str], text: str
) -> None:
    monkeypatch.setenv(MEMORY_VARIABLE, text)
    said = fails(training.main, make_worker().arguments(), 2)
    assert f"{MEMORY_VARIABLE}={text!r} is not a number of bytes, 1 or more" in said


OPTIMIZER = {"learning-rate": 3e-3, "epsilon": 1e-3}


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 40))
def test_all_processes_together_compute_no_more_samples_at_once(
    samples: int, processes: int, micro: int, at_once: int
) -> None:
    parts = split_batch({"x": torch.arange(samples)}, processes, micro, False, max(at_once, processes))
    rows = [[part.arguments["x"].tolist() for part in each if part.weight] for each in parts]
    assert sorted(row for each in rows for part in each for row in part) == list(range(samples))
    for together in zip(*parts, strict=False):
        assert sum(len(part.arguments["x"]) for part in together if part.weight) <= max(at_once, processes)


@pytest.fixture
def run(make_worker: Callable[..., Any], llama: Path, text_slices: list[Path]) -> Callable[..., Any]:
    """Return a function that trains one round of a language model on rows of different lengths."""

    def train(**config: Any) -> Any:
        worker = make_worker(rounds=1, batches=5, model_dir=llama, slices=text_slices)
        arguments = worker.arguments(task="causal-lm", optimizer=OPTIMIZER, batch_size=8, term=1, **config)
        assert training.main([*arguments, "--timeout", "20"]) == 0
        return worker

    return train


def test_the_update_is_that_of_the_whole_batch(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, compute = [], Trainer.loss

    def record(trainer: Trainer, given: Any) -> Any:
        sizes.append(len(given["input_ids"]))
        return compute(trainer, given)

    monkeypatch.setattr(Trainer, "loss", record)
    whole, parts = run(), run(micro_batch=3)
    assert sizes == [8] * 5 + [2, 3, 3] * 5
    ours, theirs = parts.update(0)[0], whole.update(0)[0]
    assert max(np.abs(value).max() for value in theirs.values()) > 1e-3
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], atol=2e-6, rtol=0, err_msg=name)
