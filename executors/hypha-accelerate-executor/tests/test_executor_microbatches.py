"""`micro_batch` of a job: fewer samples at once, and the update of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypha.accelerate_executor import training
from hypha.accelerate_executor.data.microbatches import split_batch
from hypha.accelerate_executor.train.trainer import Trainer
from hypha_proto.update_file import open_update

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]

TEXT = {"task": "causal-lm", "artifact": {"type": "uri", "value": "x"}, "input-names": []}
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
def run(make_worker: Callable[..., Any], llama: Path, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that trains one round of a language model on rows of different lengths."""
    chance, path = np.random.default_rng(0), tmp_path / "rows.safetensors"
    tokens = chance.integers(0, 64, (90, 12)).astype("i4")
    mask = (np.arange(12) < chance.integers(2, 13, (90, 1))).astype("u1")
    safetensors.numpy.save_file({"input_ids": tokens, "attention_mask": mask}, path)

    def train(**config: Any) -> Any:
        worker = make_worker(rounds=1, batches=5, model_dir=llama, slices=[path])
        arguments = worker.arguments(model=TEXT, optimizer=OPTIMIZER, batch_size=8, term=1, **config)
        assert training.main([*arguments, "--timeout", "20"]) == 0
        return worker

    return train


def _update(worker: Any) -> dict[str, Any]:
    file, _ = open_update(worker.updates[0])
    with file:
        return {name: np.array(file.tensor(name)) for name in file.tensors}


def test_the_update_is_that_of_the_whole_batch(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, compute = [], Trainer.loss

    def record(trainer: Trainer, given: Any) -> Any:
        sizes.append(len(given["input_ids"]))
        return compute(trainer, given)

    monkeypatch.setattr(Trainer, "loss", record)
    whole, parts = run(), run(micro_batch=3)
    assert sizes == [8] * 5 + [2, 3, 3] * 5
    ours, theirs = _update(parts), _update(whole)
    assert max(np.abs(value).max() for value in theirs.values()) > 1e-3
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], atol=2e-6, rtol=0, err_msg=name)


def test_it_is_stated_with_the_update(run: Callable[..., Any]) -> None:
    assert run(micro_batch=4).sent[0]["contribution"]["micro_batch"] == 4
    assert "micro_batch" not in run().sent[0]["contribution"]


def test_none_is_refused(make_worker: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    assert training.main(make_worker().arguments(micro_batch=0)) == 2
    assert "micro_batch must be at least 1" in caplog.text
