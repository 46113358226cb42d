"""What computes results: prepares one row at a time, and computes several together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hypha.accelerate_executor.data.row_errors import RowError
from hypha.accelerate_executor.predict.slices import SliceRows


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a row."""

    values: dict[str, Any]
    """Keys of the result, as JSON."""
    tokens: int = 0
    """Number of generated tokens."""


class PreparedRow(Protocol):
    """A checked row."""

    @property
    def alike(self) -> Hashable:
        """Return what rows that are computed together have in common."""
        ...


class RowComputation(Protocol):
    """A loaded model that computes results.

    Attributes:
        rows_at_once: most rows that `compute` takes; None means that it divides them itself.
    """

    rows_at_once: int | None

    def prepare(self, rows: SliceRows, row: int) -> PreparedRow:
        """Check a row and return what `compute` takes.

        Raises:
            RowError: the row cannot be computed.
        """
        ...

    def compute(
        self, rows: SliceRows, slice_index: int, prepared: Sequence[tuple[int, Any]]
    ) -> Sequence[Result | RowError]:
        """Compute the results of some rows.

        Args:
            rows: the slice.
            slice_index: its index in the dataset.
            prepared: number of each row, and what `prepare` returned for it.
        """
        ...


def pick_device() -> torch.device:
    """Return the device to compute on: an NVIDIA or AMD GPU, an Apple GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
