"""Evaluates a model on files of samples; run by `evaluate`, and by `diloco.round_evaluation` after rounds."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch

from hypha.accelerate_executor.data.microbatches import count_labelled, count_labels
from hypha.accelerate_executor.data.model_inputs import ModelInputs
from hypha.accelerate_executor.data.preprocess import BatchPreprocessor, load_preprocessor
from hypha.accelerate_executor.data.samples import Arrays, open_samples
from hypha.accelerate_executor.errors import DataError, JobError
from hypha.accelerate_executor.modeling.hf import TORCH, load_model
from hypha.accelerate_executor.train.trainer import loss_of
from hypha_proto.errors import TensorFileError
from hypha_proto.job_spec import PREPROCESSOR_INPUTS
from hypha_proto.safetensors_io import TensorFile

logger = logging.getLogger(__name__)

_ROOM: Final = 3
"""A GPU needs as many times the size of the weights in free memory for a copy to be evaluated while it trains."""
_SHIFTED: Final = frozenset({"causal-lm"})
_ALIKE: Final = frozenset({"masked-lm", "image-classification", "sequence-classification", "token-classification"})


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """Quality of a model on a dataset."""

    accuracy: float | None
    """Fraction of labels (for a text model, tokens) predicted correctly; None without labels or logits."""
    loss: float | None
    """Mean loss over labels: cross entropy in nats; None if no sample has a label."""
    samples: int
    labelled: int
    """Samples with a label; the others count neither for accuracy nor for loss."""


def evaluate(
    task: str,
    model_dir: Path,
    data: Path,
    batch_size: int,
    allowed: Collection[str] = (),
    preprocessor: Path | None = None,
) -> EvaluatedModel:
    """Compare a model's predictions with the labels of a safetensors file, or of all in a folder, in file order.

    Args:
        task: wire name of the task.
        model_dir: directory of the model.
        data: safetensors file with tensors as in a slice, or a folder of such files.
        batch_size: samples per batch.
        allowed: modules whose classes models of task `torch` may use.
        preprocessor: directory of a tokenizer for the tensor ``text``, or of an image processor for ``image``.

    Raises:
        JobError: accuracy is not defined for the task.
        ModelError, DataError: the model or the data is malformed.
    """
    known = _SHIFTED | _ALIKE | {TORCH}
    if task not in known:
        raise JobError(f"--task {task!r} has no accuracy; tasks with one are {', '.join(sorted(known))}")
    module = load_model(task, model_dir, allowed=allowed)
    inputs, cpu = ModelInputs(task, (), module), torch.device("cpu")
    try:
        files = _data_files(data)
        process = None if preprocessor is None else _find_preprocessor(preprocessor, files[0], module)
        raw = frozenset(() if process is None else process.columns)
        return Subject(module, inputs, cpu, process, raw).measure(files, batch_size)
    except DataError as error:
        raise DataError(f"--data {error}") from None


def _data_files(data: Path) -> list[Path]:
    files = sorted(data.glob("[!.]*.safetensors")) if data.is_dir() else [data]
    if not files:
        raise DataError(f"{data}: holds no *.safetensors; name a folder of slices, or a file")
    return files


def _find_preprocessor(folder: Path, data: Path, module: torch.nn.Module) -> BatchPreprocessor:
    """Load the preprocessor that fits the tensors of a file."""
    try:
        with TensorFile(data) as file:
            kinds = [kind for kind, columns in PREPROCESSOR_INPUTS.items() if columns and columns[0] in file.tensors]
    except TensorFileError as error:
        raise DataError(f"{error}") from None
    if not kinds:
        names = ", ".join(columns[0] for columns in PREPROCESSOR_INPUTS.values() if columns)
        raise DataError(f"{data}: has no tensor for --preprocessor ({names}); leave it out")
    return load_preprocessor(kinds[0], folder, PREPROCESSOR_INPUTS[kinds[0]], module)


@dataclass(frozen=True, slots=True)
class Subject:
    """A module that can be evaluated."""

    module: torch.nn.Module
    inputs: ModelInputs
    place: torch.device
    preprocess: Callable[[Arrays], Arrays] | None = None
    """Applied to the tensors first; not the one of the training loop, since tokenizers serve one thread at a time."""
    raw: frozenset[str] = frozenset()
    """Tensors whose integers are kept as stored: inputs of `preprocess`."""
    may_copy: bool = True
    """Whether a copy of the module works as it does: not if its layers are distributed over devices."""

    def measure(self, files: Sequence[Path], batch_size: int, limit: int | None = None) -> EvaluatedModel:
        """Evaluate the module on files; its training mode is restored.

        Args:
            files: slices.
            batch_size: samples per batch.
            limit: number of batches to take from each file; None for all.

        Raises:
            DataError: a file is malformed.
        """
        sums, training = _Totals(), self.module.training
        self.module.eval()
        try:
            with torch.inference_mode():
                for path in files:
                    with closing(open_samples(path)) as file:
                        samples = file.count if limit is None else min(file.count, limit * batch_size)
                        for begin in range(0, samples, batch_size):
                            arrays = file.read(np.arange(begin, min(samples, begin + batch_size)), self.raw)
                            sums.add(self, self.preprocess(arrays) if self.preprocess else arrays)
                        sums.samples += samples
        finally:
            self.module.train(training)
        return sums.evaluation()

    def copy(self) -> Subject | None:
        """Return a copy of the module with its present weights; None if there can be none or no memory for it."""
        if not self.may_copy or not _has_room(self.module, self.place):
            return None
        try:
            return replace(self, module=copy.deepcopy(self.module))
        except (RuntimeError, TypeError, NotImplementedError) as error:  # also when memory is exhausted
            logger.info("the model cannot be copied: %s", error)
            return None

    def draws_random_numbers(self, files: Sequence[Path], batch_size: int) -> bool:
        """Return whether evaluating a batch draws from the generators that training uses, too."""
        before = _generator_states(self.place)
        self.measure(files[:1], batch_size, 1)
        return _generator_states(self.place) != before


def _has_room(module: torch.nn.Module, place: torch.device) -> bool:
    """Return whether a GPU has memory for another copy of a module; in main memory, that is not asked."""
    if place.type != "cuda":
        return True
    size = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    unused = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    return torch.cuda.mem_get_info(place)[0] + unused >= _ROOM * size


def _generator_states(place: torch.device) -> tuple[object, ...]:
    """Return the states of all global generators, to compare them."""
    states: list[object] = [torch.get_rng_state().numpy().tobytes(), repr(np.random.get_state()), random.getstate()]
    if place.type == "cuda":
        states.append(torch.cuda.get_rng_state(place).numpy().tobytes())
    return tuple(states)


@dataclass(slots=True)
class _Totals:
    """Running totals."""

    right: int = 0
    labels: int = 0
    labelled: int = 0
    loss: float = 0.0
    samples: int = 0
    compared: bool = True

    def add(self, subject: Subject, arrays: Arrays) -> None:
        inputs = subject.inputs
        arguments = inputs(arrays, subject.place)
        count = count_labels(arguments, inputs.shifted, inputs.ignored_label)
        if not count:
            return  # transformers' loss would be NaN
        output = subject.module(**arguments)
        logits, labels = getattr(output, "logits", None), arguments.get("labels")
        if labels is not None and logits is not None and logits.shape[:-1] == labels.shape:
            self.right += _count_correct(logits, labels, inputs)
        else:
            self.compared = False
        self.labels += count
        self.labelled += count_labelled(arguments, inputs.shifted, inputs.ignored_label)
        self.loss += float(loss_of(output)) * count

    def evaluation(self) -> EvaluatedModel:
        if not self.labels:
            return EvaluatedModel(None, None, self.samples, 0)
        accuracy = self.right / self.labels if self.compared else None
        return EvaluatedModel(accuracy, self.loss / self.labels, self.samples, self.labelled)


def _count_correct(logits: torch.Tensor, labels: torch.Tensor, inputs: ModelInputs) -> int:
    """Count correct predictions."""
    if inputs.shifted:  # a token's logits predict the next token
        logits, labels = logits[:, :-1], labels[:, 1:]
    return int(((logits.argmax(-1) == labels) & (labels != inputs.ignored_label)).sum())
