"""Measure a model on a file of samples: what `evaluate` runs on the result of a job."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from hypha.accelerate_executor.data import count_samples, read_rows
from hypha.accelerate_executor.errors import DataError, JobError
from hypha.accelerate_executor.inputs import IGNORED_LABEL, ModelInputs
from hypha.accelerate_executor.model import TORCH, load_model
from hypha.accelerate_executor.pieces import count_labels
from hypha.accelerate_executor.trainer import loss_of
from hypha_proto.errors import TensorFileError
from hypha_proto.update import TensorFile

_SHIFTED: Final = frozenset({"causal-lm"})
_ALIKE: Final = frozenset({"masked-lm", "image-classification", "sequence-classification", "token-classification"})


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well a model does."""

    accuracy: float | None
    """Share of labels (of a text model: of tokens) that are predicted; none where a model gives no logits."""
    loss: float
    """Mean loss over labels: cross entropy in nats."""
    samples: int


def evaluate(task: str, model_dir: Path, data: Path, batch_size: int, allowed: Collection[str] = ()) -> Evaluation:
    """Compare a model's predictions with the labels of a safetensors file, in the order of the file.

    Args:
        task: wire name of the task.
        model_dir: the model.
        data: tensors as in a slice.
        batch_size: samples computed at once.
        allowed: modules whose classes a model of task `torch` may name.

    Raises:
        JobError: the task has no accuracy.
        ModelError, DataError: the model or the data is malformed.
    """
    known = _SHIFTED | _ALIKE | {TORCH}
    if task not in known:
        raise JobError(f"--task {task!r} has no accuracy; known are {', '.join(sorted(known))}")
    module = load_model(task, model_dir, allowed=allowed)
    module.eval()
    inputs = ModelInputs(task, (), module)
    right, labelled, loss_sum, compared = 0, 0, 0.0, True
    try:
        with TensorFile(data) as file, torch.inference_mode():
            samples = count_samples(file)
            for begin in range(0, samples, batch_size):
                rows = np.arange(begin, min(samples, begin + batch_size))
                arguments = inputs({name: read_rows(file, name, rows) for name in file.tensors}, torch.device("cpu"))
                output = module(**arguments)
                count = count_labels(arguments, inputs.shifted)
                logits, labels = getattr(output, "logits", None), arguments.get("labels")
                if labels is not None and logits is not None and logits.shape[:-1] == labels.shape:
                    right += _count_right(logits, labels, inputs.shifted)
                else:
                    compared = False
                labelled += count
                loss_sum += float(loss_of(output)) * count
    except TensorFileError as error:
        raise DataError(f"--data {error}") from None
    return Evaluation(right / max(1, labelled) if compared else None, loss_sum / max(1, labelled), samples)


def _count_right(logits: torch.Tensor, labels: torch.Tensor, shifted: bool) -> int:
    """Count right predictions; `shifted` when a token's logits predict the next one."""
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return int(((logits.argmax(-1) == labels) & (labels != IGNORED_LABEL)).sum())
