"""Splits a batch over processes and micro-batches so that the update equals that of the whole batch; no I/O.

The loss of a batch is a mean over its labels. A micro-batch's mean loss is weighted by its share of the labels, so
that the weighted sum is the batch's mean even if micro-batches have different numbers of labels (padding).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hypha.accelerate_executor.data.model_inputs import IGNORED_LABEL


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of a batch that are computed together."""

    arguments: Mapping[str, torch.Tensor]
    weight: float
    """Factor on this micro-batch's mean loss: its share of the batch's labels."""


def split_batch(
    arguments: Mapping[str, torch.Tensor],
    processes: int,
    micro: int,
    shifted: bool,
    at_once: int | None = None,
    ignored: int = IGNORED_LABEL,
) -> list[list[MicroBatch]]:
    """Split a batch into `micro` micro-batches for each of `processes`, rows in order and sizes as equal as possible.

    All processes get the same number, because they compute in lockstep; a process without rows gets rows of another
    with weight 0. A single process gets only micro-batches with a weight. Of a batch without labels nobody gets any.

    Args:
        arguments: tensors whose first dimension is the samples.
        processes: number of processes that share the batch.
        micro: micro-batches that each process computes in sequence.
        shifted: whether a row's first label is unused.
        at_once: largest number of rows that all processes together compute at once; a batch with more has as many times
            `micro` micro-batches as it is larger. None means no limit.
        ignored: the label that the loss ignores.
    """
    samples = _rows(arguments)
    if not count_labels(arguments, shifted, ignored):
        return [[] for _ in range(processes)]
    if at_once is not None:
        micro *= max(1, -(-samples // at_once))
    wanted = processes * micro
    if wanted == 1:
        return [[MicroBatch(arguments, 1.0)]]
    bounds = [samples * number // wanted for number in range(wanted + 1)]
    parts = [{name: value[begin:end] for name, value in arguments.items()} for begin, end in itertools.pairwise(bounds)]
    counts = [count_labels(part, shifted, ignored) for part in parts]
    whole = sum(counts)
    filling = max(zip(counts, parts, strict=True), key=lambda pair: (pair[0], _rows(pair[1])))[1]
    micro_batches = [
        MicroBatch(part if count else filling, count / whole) for part, count in zip(parts, counts, strict=True)
    ]
    if processes == 1:
        return [[micro_batch for micro_batch in micro_batches if micro_batch.weight > 0]]
    return [micro_batches[begin : begin + micro] for begin in range(0, wanted, micro)]


def count_labels(arguments: Mapping[str, torch.Tensor], shifted: bool, ignored: int = IGNORED_LABEL) -> int:
    """Count the labels that the loss averages over: integers that are not ignored, else all numbers, else samples."""
    return int(_counted(arguments, shifted, ignored).sum())


def count_labelled(arguments: Mapping[str, torch.Tensor], shifted: bool, ignored: int = IGNORED_LABEL) -> int:
    """Count the samples that have such a label."""
    return int(_counted(arguments, shifted, ignored).flatten(1).any(1).sum())


def _counted(arguments: Mapping[str, torch.Tensor], shifted: bool, ignored: int) -> torch.Tensor:
    """Return whether the loss counts each label: booleans with the samples in the first of at least two dimensions."""
    labels = arguments.get("labels")
    if labels is None:
        return torch.ones(_rows(arguments), 1, dtype=torch.bool)
    if labels.ndim < 2:
        labels = labels[:, None]
    elif shifted:
        labels = labels[:, 1:]
    return torch.ones_like(labels, dtype=torch.bool) if labels.is_floating_point() else labels != ignored


def _rows(arguments: Mapping[str, torch.Tensor]) -> int:
    return len(next(iter(arguments.values())))
