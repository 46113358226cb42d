"""Maps the tensors of a slice to arguments of the model, using the job's input names.

Called by `train.trainer` and `modeling.evaluation` after `data.batches` or `data.preprocess`.
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
"""The label that transformers' losses ignore, but for those of segmentation, which have one of their own."""
_OWN_IGNORED: Final = ("semantic_loss_ignore_index", "loss_ignore_index")
"""Keys of a segmentation model's config with the label that its loss ignores."""


def default_inputs(task: str) -> tuple[str, ...]:
    """Return the names of the tensors that a task's model takes if the job names none."""
    return _IMAGE_INPUTS if "image" in task or "segmentation" in task else _TEXT_INPUTS


class ModelInputs:
    """Converts the arrays of a batch to the arguments of a model.

    Attributes:
        shifted: whether a token's label is the next token, so that a row's first label is unused.
        ignored_label: the label that the model's loss ignores.
        columns: name of the tensor in a slice, by argument.
        required: names of the tensors that a slice must have.
    """

    def __init__(
        self, task: str, input_names: Sequence[str], module: torch.nn.Module, *, labelled: bool = True
    ) -> None:
        """Map tensor names of a slice to arguments.

        Args:
            task: wire name of the task.
            input_names: the job's names, in order; empty for the task's default. A name that is no argument of the
                model's `forward` replaces the task's default name at its position. A model of task `torch` takes the
                names of its `forward`, of which those without a default are required.
            module: the model.
            labelled: whether the model gets labels, to compute a loss.
        """
        parameters = inspect.signature(module.forward).parameters
        self.shifted = task in _SELF_LABELLED
        self.ignored_label = _ignored_label(task, module)
        self._is_torch = task == TORCH
        own = tuple(parameters) if self._is_torch else default_inputs(task)
        named = bool(input_names) and not _are_equal(input_names, own, labelled)
        if self._is_torch:
            optional = {name for name, each in parameters.items() if each.default is not inspect.Parameter.empty}
        else:
            optional = set(_OPTIONAL)
        self._arguments: dict[str, str] = {}
        for place, name in enumerate(input_names or own):
            self._arguments[name if name in parameters or place >= len(own) else own[place]] = name
        if not labelled and (not self._is_torch or "labels" in optional):
            self._arguments.pop("labels", None)
        self._labelled = labelled and not self._is_torch
        self.required = {name for name in self._arguments.values() if named or name not in optional}
        if self._labelled:
            self._arguments.setdefault("labels", "labels")
        self.columns: Mapping[str, str] = self._arguments

    def __call__(self, arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the arguments by name, with labels.

        Raises:
            DataError: the slice lacks a tensor that the model needs.
        """
        missing = sorted(self.required - arrays.keys())
        if missing:
            raise DataError(f"a slice lacks the tensor {missing[0]!r}; it has {sorted(arrays)!r:.300}")
        arguments = {
            argument: torch.from_numpy(arrays[name]).to(device)
            for argument, name in self._arguments.items()
            if name in arrays
        }
        if "labels" not in arguments and self._labelled:
            arguments["labels"] = self._own_labels(arguments, arrays)
        return arguments

    def _own_labels(self, arguments: Mapping[str, torch.Tensor], arrays: Arrays) -> torch.Tensor:
        """Return labels of a text model: the tokens themselves, with padding ignored."""
        if not self.shifted or "input_ids" not in arguments:
            raise DataError(f"a slice lacks the tensor 'labels'; it has {sorted(arrays)!r:.300}")
        labels = arguments["input_ids"].clone()
        if "attention_mask" in arguments:
            labels[arguments["attention_mask"] == 0] = IGNORED_LABEL
        return labels


def _ignored_label(task: str, module: torch.nn.Module) -> int:
    config = getattr(module, "config", None) if "segmentation" in task else None
    return next((int(getattr(config, key)) for key in _OWN_IGNORED if hasattr(config, key)), IGNORED_LABEL)


def _are_equal(names: Sequence[str], own: Sequence[str], labelled: bool) -> bool:
    """Return whether input names are the defaults; a job without labels may leave them out."""
    return tuple(names) == tuple(own) or (not labelled and [*names] == [name for name in own if name != "labels"])
