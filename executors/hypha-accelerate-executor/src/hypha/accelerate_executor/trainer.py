"""One step of training: a batch goes in, a loss comes out, the parameters have moved.

Before it stands `data`, which makes batches; after it `training`, which reports each. Where a batch's tensors go in the
model is decided here, from the job's input names.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from hypha.accelerate_executor.data import Arrays, Batch
from hypha.accelerate_executor.device import Device
from hypha.accelerate_executor.errors import DataError
from hypha.accelerate_executor.optimizer import InnerOptimizer

_IMAGE_INPUTS: Final = ("pixel_values", "labels")
_TEXT_INPUTS: Final = ("input_ids", "attention_mask", "labels")
_OPTIONAL: Final = frozenset({"attention_mask", "labels"})
_SELF_LABELLED: Final = frozenset({"causal-lm"})
IGNORED_LABEL: Final = -100
"""The label that losses of transformers leave out."""


def default_inputs(task: str) -> tuple[str, ...]:
    """Name the tensors of a slice that a task's model gets when the job names none."""
    return _IMAGE_INPUTS if "image" in task or "segmentation" in task else _TEXT_INPUTS


class ModelInputs:
    """Turns the arrays of a batch into the arguments of a model."""

    def __init__(self, task: str, input_names: Sequence[str], module: torch.nn.Module) -> None:
        """Decide which tensor of a slice goes where.

        Args:
            task: wire name of the task.
            input_names: the job's names, in order; empty for the task's own. A name that the model's `forward` does not
                know stands for the task's own name at that place.
            module: the model.
        """
        own = default_inputs(task)
        accepted = inspect.signature(module.forward).parameters
        named = bool(input_names)
        self._arguments: dict[str, str] = {}
        for place, name in enumerate(input_names or own):
            self._arguments[name if name in accepted or place >= len(own) else own[place]] = name
        self._required = {name for name in self._arguments.values() if named or name not in _OPTIONAL}
        self._arguments.setdefault("labels", "labels")
        self._self_labelled = task in _SELF_LABELLED

    def __call__(self, arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
        """Give the arguments by name, with labels.

        Raises:
            DataError: the slice lacks a tensor that the model needs.
        """
        missing = sorted(self._required - arrays.keys())
        if missing:
            raise DataError(f"a slice lacks the tensor {missing[0]!r}; it holds {sorted(arrays)!r:.300}")
        arguments = {
            argument: torch.from_numpy(arrays[name]).to(device)
            for argument, name in self._arguments.items()
            if name in arrays
        }
        if "labels" not in arguments:
            arguments["labels"] = self._own_labels(arguments, arrays)
        return arguments

    def _own_labels(self, arguments: Mapping[str, torch.Tensor], arrays: Arrays) -> torch.Tensor:
        """Make labels for a model of text: the tokens themselves, but for padding."""
        if not self._self_labelled or "input_ids" not in arguments:
            raise DataError(f"a slice lacks the tensor 'labels'; it holds {sorted(arrays)!r:.300}")
        labels = arguments["input_ids"].clone()
        if "attention_mask" in arguments:
            labels[arguments["attention_mask"] == 0] = IGNORED_LABEL
        return labels


class Trainer:
    """A model and its optimiser."""

    def __init__(self, module: torch.nn.Module, inputs: ModelInputs, optimizer: InnerOptimizer, device: Device) -> None:
        """Take a module that was placed on `device`; `inputs` says how batches become its arguments."""
        self._module = module
        self._inputs = inputs
        self._optimizer = optimizer
        self._device = device

    def step(self, batch: Batch) -> float:
        """Train on one batch.

        Returns:
            The batch's mean loss, before the step.

        Raises:
            DataError: the batch lacks a tensor or does not fit the model, or the loss is not finite.
        """
        arguments = self._inputs(batch.tensors, self._device.torch_device)
        try:
            loss: torch.Tensor = self._module(**arguments).loss
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            shapes = {name: list(value.shape) for name, value in arguments.items()}
            raise DataError(f"the model cannot take a batch of {shapes!r:.300}: {str(error)[:300]}") from error
        value = float(loss.detach())
        if value - value != 0.0:
            raise DataError(f"the loss is {value}: the learning rate may be too high, or a slice holds no numbers")
        self._device.backward(loss)
        self._optimizer.step()
        return value
