"""How a batch is divided over processes and micro-batches so that the update stays that of the whole batch; pure.

The loss of a batch is a mean over its labels. A piece's own mean counts by its share of those labels, so that the sum
over pieces is the mean over the batch also where pieces hold different numbers of labels (padding).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hypha.accelerate_executor.data.model_inputs import IGNORED_LABEL


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of a batch that are computed at once."""

    arguments: Mapping[str, torch.Tensor]
    weight: float
    """Factor on this piece's mean loss: its share of the batch's labels."""


def split_batch(
    arguments: Mapping[str, torch.Tensor], processes: int, micro: int, shifted: bool
) -> list[list[MicroBatch]]:
    """Divide a batch into `micro` pieces for each of `processes`, of rows in order and as equal as can be.

    All processes get as many pieces, for they compute in step; one for whom nothing is left gets rows of another with
    weight 0. A single process gets only pieces that count.

    Args:
        arguments: tensors whose first dimension is the samples.
        processes: how many share the batch.
        micro: pieces that each of them computes one after the other.
        shifted: whether a row's first label is not used.
    """
    wanted = processes * micro
    if wanted == 1:
        return [[MicroBatch(arguments, 1.0)]]
    samples = _rows(arguments)
    bounds = [samples * number // wanted for number in range(wanted + 1)]
    parts = [{name: value[begin:end] for name, value in arguments.items()} for begin, end in itertools.pairwise(bounds)]
    counts = [count_labels(part, shifted) for part in parts]
    whole = max(1, sum(counts))
    filling = max(zip(counts, parts, strict=True), key=lambda pair: (pair[0], _rows(pair[1])))[1]
    pieces = [MicroBatch(part if count else filling, count / whole) for part, count in zip(parts, counts, strict=True)]
    if processes == 1:
        return [[piece for piece in pieces if piece.weight > 0] or pieces[-1:]]
    return [pieces[begin : begin + micro] for begin in range(0, wanted, micro)]


def count_labels(arguments: Mapping[str, torch.Tensor], shifted: bool) -> int:
    """Count the labels that a loss is the mean of: integers that are not ignored, else all numbers, else samples."""
    labels = arguments.get("labels")
    if labels is None:
        return _rows(arguments)
    if shifted and labels.ndim > 1:
        labels = labels[:, 1:]
    return labels.numel() if labels.is_floating_point() else int((labels != IGNORED_LABEL).sum())


def _rows(arguments: Mapping[str, torch.Tensor]) -> int:
    return len(next(iter(arguments.values())))
