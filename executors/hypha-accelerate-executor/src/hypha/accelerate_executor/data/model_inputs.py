"""Which tensors of a slice become which arguments of the model, from the job's input names.

Between `data` (or `preprocess`) and the model itself; `trainer` and `evaluate` call it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from hypha.accelerate_executor.data.batches import Arrays
from hypha.accelerate_executor.errors import DataError
from hypha.accelerate_executor.modeling.hf import TORCH

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
    """Turns the arrays of a batch into the arguments of a model.

    Attributes:
        shifted: whether a token's label is that of the next one, so that a row's first label is not used.
    """

    def __init__(self, task: str, input_names: Sequence[str], module: torch.nn.Module) -> None:
        """Decide which tensor of a slice goes where.

        Args:
            task: wire name of the task.
            input_names: the job's names, in order; empty for the task's own. A name that the model's `forward` does not
                know stands for the task's own name at that place. A model of task `torch` has the names of its
                `forward`, of which those without a default are needed.
            module: the model.
        """
        parameters = inspect.signature(module.forward).parameters
        self.shifted = task in _SELF_LABELLED
        self._is_torch = task == TORCH
        own = tuple(parameters) if self._is_torch else default_inputs(task)
        named = bool(input_names) and tuple(input_names) != own
        if self._is_torch:
            optional = {name for name, each in parameters.items() if each.default is not inspect.Parameter.empty}
        else:
            optional = set(_OPTIONAL)
        self._arguments: dict[str, str] = {}
        for place, name in enumerate(input_names or own):
            self._arguments[name if name in parameters or place >= len(own) else own[place]] = name
        self._required = {name for name in self._arguments.values() if named or name not in optional}
        if not self._is_torch:
            self._arguments.setdefault("labels", "labels")

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
        if "labels" not in arguments and not self._is_torch:
            arguments["labels"] = self._own_labels(arguments, arrays)
        return arguments

    def _own_labels(self, arguments: Mapping[str, torch.Tensor], arrays: Arrays) -> torch.Tensor:
        """Make labels for a model of text: the tokens themselves, but for padding."""
        if not self.shifted or "input_ids" not in arguments:
            raise DataError(f"a slice lacks the tensor 'labels'; it holds {sorted(arrays)!r:.300}")
        labels = arguments["input_ids"].clone()
        if "attention_mask" in arguments:
            labels[arguments["attention_mask"] == 0] = IGNORED_LABEL
        return labels
