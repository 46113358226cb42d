"""Measure a model on a file of samples: what `evaluate` runs on the result of a job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from hypha.accelerate_executor.data.batches import Arrays, count_samples, read_rows
from hypha.accelerate_executor.data.microbatches import count_labels
from hypha.accelerate_executor.data.model_inputs import IGNORED_LABEL, ModelInputs
from hypha.accelerate_executor.errors import DataError, JobError
from hypha.accelerate_executor.modeling.hf import TORCH, load_model
from hypha.accelerate_executor.train.trainer import loss_of
from hypha_proto.errors import TensorFileError
from hypha_proto.update_file import TensorFile

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
    try:
        return measure(module, ModelInputs(task, (), module), [data], batch_size, torch.device("cpu"))
    except DataError as error:
        raise DataError(f"--data {error}") from None


def measure(
    module: torch.nn.Module,
    inputs: ModelInputs,
    files: Sequence[Path],
    batch_size: int,
    place: torch.device,
    preprocess: Callable[[Arrays], Arrays] | None = None,
    raw: Collection[str] = (),
) -> Evaluation:
    """Measure a model that is loaded; it is left as it was, in training or not.

    Args:
        module: the model, at `place`.
        inputs: make its arguments of the tensors of a file.
        files: safetensors files.
        batch_size: samples computed at once.
        place: where it computes.
        preprocess: applied to the tensors before.
        raw: tensors whose integers stay as they are stored: what `preprocess` takes.

    Raises:
        DataError: a file is malformed.
    """
    sums, training = _Sums(), module.training
    module.eval()
    try:
        with torch.inference_mode():
            for path in files:
                with TensorFile(path) as file:
                    samples = count_samples(file)
                    for begin in range(0, samples, batch_size):
                        rows = np.arange(begin, min(samples, begin + batch_size))
                        arrays: Arrays = {name: read_rows(file, name, rows, name in raw) for name in file.tensors}
                        sums.add(module, inputs, preprocess(arrays) if preprocess else arrays, place)
                    sums.samples += samples
    except TensorFileError as error:
        raise DataError(f"{error}") from None
    finally:
        module.train(training)
    return sums.evaluation()


@dataclass(slots=True)
class _Sums:
    """What was counted so far."""

    right: int = 0
    labelled: int = 0
    loss: float = 0.0
    samples: int = 0
    compared: bool = True

    def add(self, module: torch.nn.Module, inputs: ModelInputs, arrays: Arrays, place: torch.device) -> None:
        arguments = inputs(arrays, place)
        output = module(**arguments)
        count = count_labels(arguments, inputs.shifted)
        logits, labels = getattr(output, "logits", None), arguments.get("labels")
        if labels is not None and logits is not None and logits.shape[:-1] == labels.shape:
            self.right += _count_right(logits, labels, inputs.shifted)
        else:
            self.compared = False
        self.labelled += count
        self.loss += float(loss_of(output)) * count

    def evaluation(self) -> Evaluation:
        labels = max(1, self.labelled)
        return Evaluation(self.right / labels if self.compared else None, self.loss / labels, self.samples)


def _count_right(logits: torch.Tensor, labels: torch.Tensor, shifted: bool) -> int:
    """Count right predictions; `shifted` when a token's logits predict the next one."""
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return int(((logits.argmax(-1) == labels) & (labels != IGNORED_LABEL)).sum())
