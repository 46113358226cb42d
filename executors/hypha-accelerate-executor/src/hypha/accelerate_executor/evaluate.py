"""Measure a model on a file of samples: what `evaluate` runs on the result of a job."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from hypha.accelerate_executor.data import count_samples, read_rows
from hypha.accelerate_executor.errors import DataError, JobError
from hypha.accelerate_executor.inputs import IGNORED_LABEL, ModelInputs
from hypha.accelerate_executor.model import load_model
from hypha_proto.errors import TensorFileError
from hypha_proto.update import TensorFile

_SHIFTED: Final = frozenset({"causal-lm"})
_ALIKE: Final = frozenset({"masked-lm", "image-classification", "sequence-classification", "token-classification"})


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well a model does."""

    accuracy: float
    """Share of labels (of a text model: of tokens) that are predicted."""
    loss: float
    """Mean loss over labels: cross entropy in nats."""
    samples: int


def evaluate(task: str, model_dir: Path, data: Path, batch_size: int) -> Evaluation:
    """Compare a model's predictions with the labels of a safetensors file, in the order of the file.

    Args:
        task: wire name of the task.
        model_dir: the model.
        data: tensors as in a slice.
        batch_size: samples computed at once.

    Raises:
        JobError: the task has no accuracy.
        ModelError, DataError: the model or the data is malformed.
    """
    if task not in _SHIFTED | _ALIKE:
        raise JobError(f"--task {task!r} has no accuracy; known are {', '.join(sorted(_SHIFTED | _ALIKE))}")
    module = load_model(task, model_dir)
    module.eval()
    inputs = ModelInputs(task, (), module)
    correct = labelled = 0
    loss_sum = 0.0
    try:
        with TensorFile(data) as file, torch.inference_mode():
            samples = count_samples(file)
            for begin in range(0, samples, batch_size):
                rows = np.arange(begin, min(samples, begin + batch_size))
                arguments = inputs({name: read_rows(file, name, rows) for name in file.tensors}, torch.device("cpu"))
                output = module(**arguments)
                right, count = _compare(output.logits, arguments["labels"], task in _SHIFTED)
                correct, labelled = correct + right, labelled + count
                loss_sum += float(output.loss) * count
    except TensorFileError as error:
        raise DataError(f"--data {error}") from None
    return Evaluation(correct / max(1, labelled), loss_sum / max(1, labelled), samples)


def _compare(logits: torch.Tensor, labels: torch.Tensor, shifted: bool) -> tuple[int, int]:
    """Count right predictions and labels; `shifted` when a token's logits predict the next one."""
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    counted = labels != IGNORED_LABEL
    right = (logits.argmax(-1) == labels) & counted
    return int(right.sum()), int(counted.sum())
