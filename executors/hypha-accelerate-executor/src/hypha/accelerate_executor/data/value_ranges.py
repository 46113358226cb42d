"""Checks the labels and tokens of a batch before the model uses them, and names where a wrong one is stored.

Called by `train.trainer`. Torch's loss reports only the value, on a GPU not even that, and aborts the process there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from hypha.accelerate_executor.data.batches import Batch
from hypha.accelerate_executor.data.model_inputs import IGNORED_LABEL, vocabulary_size
from hypha.accelerate_executor.errors import DataError

_CLASSIFICATION: Final = frozenset(
    {"image-classification", "video-classification", "audio-classification", "sequence-classification",
     "token-classification"}
)  # fmt: skip
_LANGUAGE_MODELS: Final = frozenset({"causal-lm", "masked-lm", "seq2-seq-lm"})


def value_limits(task: str, module: torch.nn.Module) -> dict[str, int]:
    """Return, for arguments of the model that are numbers of classes or tokens, how many of them there are.

    Args:
        task: wire name.
        module: the model; its config is read. Models of task ``torch`` state no limits.
    """
    config = getattr(module, "config", None)
    limits: dict[str, int] = {}
    vocabulary = vocabulary_size(module)
    if vocabulary is not None:
        limits["input_ids"] = vocabulary
        if task in _LANGUAGE_MODELS:
            limits["labels"] = vocabulary
    classes, problem = getattr(config, "num_labels", None), getattr(config, "problem_type", None)
    is_single = task in _CLASSIFICATION and problem in (None, "single_label_classification")
    if is_single and isinstance(classes, int) and classes > 1:  # with one it is a regression
        limits["labels"] = classes
    return limits


def check_values(
    arguments: Mapping[str, torch.Tensor], limits: Mapping[str, int], columns: Mapping[str, str], batch: Batch
) -> None:
    """Check that labels and tokens are below their limits.

    Args:
        arguments: the model's arguments, on the CPU, with the rows of `batch`.
        limits: as `value_limits` returns them.
        columns: name of the tensor in a slice, by argument.
        batch: names the row's origin.

    Raises:
        DataError: one is not; the message names dataset, slice, row, column, value and the valid range.
    """
    for name, limit in limits.items():
        values = arguments.get(name)
        if values is None or values.is_floating_point() or not values.numel():
            continue
        if _are_within(values, limit):
            continue
        wrong = (values < 0) | (values >= limit)
        if name == "labels":
            wrong &= values != IGNORED_LABEL
        if bool(wrong.any()):
            place = wrong.nonzero()[0].tolist()
            raise DataError(_describe(name, columns.get(name, name), int(values[tuple(place)]), limit, place, batch))


def _are_within(values: torch.Tensor, limit: int) -> bool:
    """Return whether all values are from 0 to below the limit, in one pass: this is asked for every batch."""
    lowest, highest = torch.aminmax(values)
    return int(lowest) >= 0 and int(highest) < limit


def _describe(name: str, column: str, value: int, limit: int, place: list[int], batch: Batch) -> str:
    position = f", position {', '.join(map(str, place[1:]))}" if len(place) > 1 else ""
    ignored = f", or {IGNORED_LABEL} for none" if name == "labels" else ""
    kind = "token" if name == "input_ids" else "label"
    return (
        f"{batch.describe_row(place[0])}, column {column!r}{position}: {value} is not a {kind} of this model, "
        f"which takes 0 to {limit - 1}{ignored}; correct the dataset, or train a model with more {kind}s"
    )
