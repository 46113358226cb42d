"""Evaluates a model on files of samples; run by `evaluate` and between rounds."""

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
    """Quality of a model on a dataset."""

    accuracy: float | None
    """Fraction of labels (for a text model, tokens) predicted correctly; None if the model returns no logits."""
    loss: float
    """Mean loss over labels: cross entropy in nats."""
    samples: int


def evaluate(task: str, model_dir: Path, data: Path, batch_size: int, allowed: Collection[str] = ()) -> Evaluation:
    """Compare a model's predictions with the labels of a safetensors file, in file order.

    Args:
        task: wire name of the task.
        model_dir: directory of the model.
        data: safetensors file with tensors as in a slice.
        batch_size: samples per batch.
        allowed: modules whose classes models of task `torch` may use.

    Raises:
        JobError: accuracy is not defined for the task.
        ModelError, DataError: the model or the data is malformed.
    """
    known = _SHIFTED | _ALIKE | {TORCH}
    if task not in known:
        raise JobError(f"--task {task!r} has no accuracy; tasks with one are {', '.join(sorted(known))}")
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
    """Evaluate a loaded model; its training mode is restored.

    Args:
        module: the model, on the device `place`.
        inputs: maps the tensors of a file to arguments.
        files: safetensors files.
        batch_size: samples per batch.
        place: device of the model.
        preprocess: applied to the tensors first.
        raw: tensors whose integers are kept as stored: inputs of `preprocess`.

    Raises:
        DataError: a file is malformed.
    """
    sums, training = _Totals(), module.training
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
class _Totals:
    """Running totals."""

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
            self.right += _count_correct(logits, labels, inputs.shifted)
        else:
            self.compared = False
        self.labelled += count
        self.loss += float(loss_of(output)) * count

    def evaluation(self) -> Evaluation:
        labels = max(1, self.labelled)
        return Evaluation(self.right / labels if self.compared else None, self.loss / labels, self.samples)


def _count_correct(logits: torch.Tensor, labels: torch.Tensor, shifted: bool) -> int:
    """Count correct predictions; `shifted` if a token's logits predict the next token."""
    if shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return int(((logits.argmax(-1) == labels) & (labels != IGNORED_LABEL)).sum())
