"""Trains on local files with plain AdamW, without rounds and without a network; run by `train-alone`.

The baseline for a job: what one worker reaches alone with its share of the data. Model, batches, inputs and optimizer
are those of a job, so that only the exchange of updates differs.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hypha.accelerate_executor.bridge.client import Fetched
from hypha.accelerate_executor.data.batches import Batches
from hypha.accelerate_executor.data.model_inputs import ModelInputs, value_limits
from hypha.accelerate_executor.diloco.metrics import RoundTally
from hypha.accelerate_executor.distributed.accelerator import CpuBackend, trained_parameters
from hypha.accelerate_executor.errors import JobError
from hypha.accelerate_executor.modeling.hf import load_model
from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer
from hypha.accelerate_executor.train.trainer import Trainer
from hypha_proto.job_spec import Adam


def train_locally(
    task: str,
    model_dir: Path,
    slices: Sequence[Path],
    out: Path,
    *,
    learning_rate: float,
    batch_size: int,
    steps: int,
    seed: int,
) -> float | None:
    """Train a model on slices, repeating them as needed, and save it.

    Args:
        task: wire name of the task.
        model_dir: start model, not modified.
        slices: safetensors files, not modified.
        out: directory for the trained model.
        learning_rate: constant learning rate of AdamW.
        batch_size: samples per step.
        steps: number of steps.
        seed: decides the order of samples.

    Returns:
        The mean loss over all samples, each computed before its step; None if no batch has labels.

    Raises:
        JobError: `out` is not empty.
        ModelError, DataError: the model or a slice is malformed.
    """
    if out.exists() and any(out.iterdir()):
        raise JobError(f"--out {out} exists and is not an empty directory")
    torch.manual_seed(seed)
    module = load_model(task, model_dir)
    device = CpuBackend()
    optimizer = InnerOptimizer(trained_parameters(module), Adam(learning_rate=learning_rate))
    trainer = Trainer(module, ModelInputs(task, (), module), optimizer, device, limits=value_limits(task, module))
    tally = RoundTally()
    with tempfile.TemporaryDirectory(prefix="hypha-alone-") as scratch:
        batches = Batches(_endless(slices, Path(scratch)), batch_size, seed)
        for batch in itertools.islice(batches, steps):
            tally.add(trainer.step(batch), batch.samples, 0.0)
        batches.close()
    module.save_pretrained(out)  # type: ignore[operator]
    return tally.metrics(1).metrics.get("loss")


def _endless(slices: Sequence[Path], scratch: Path) -> Callable[[int], list[Fetched]]:
    """Return a function that provides copies of the slices in turn, because used slices are deleted."""
    numbers = itertools.count()

    def fetch(_count: int) -> list[Fetched]:
        epoch, index = divmod(next(numbers), len(slices))
        folder = scratch / f"{epoch}-{index}"
        folder.mkdir()
        copy = Path(shutil.copy(slices[index], folder))
        return [Fetched(copy, {"slice": str(index), "epoch": str(epoch)})]

    return fetch
