"""Results of rows, and which rows a model can compute together.

A row's result must not depend on those beside it. Some models ignore the mask of the padding, or the positions of what
it masks. Two rows computed together and alone show it; where they differ by more than rounding, the rows of a batch
have to be alike.
"""

from __future__ import annotations

import enum
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a row."""

    values: dict[str, Any]
    """Keys of the result, as JSON."""
    tokens: int = 0
    """Number of generated tokens."""


def pick_device() -> torch.device:
    """Return the device to compute on: an NVIDIA or AMD GPU, an Apple GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


logger = logging.getLogger(__name__)

_Row = TypeVar("_Row")
_TOLERANCE: Final = 1e-4
"""Largest difference of two outputs by rounding in float32, as a fraction of the largest output."""
_LOW_TOLERANCE: Final = 2e-2
"""The same in float16 and bfloat16."""


class Sharing(enum.Enum):
    """Which rows may be in one batch."""

    ANY = "rows of any length share a batch"
    EQUAL = "only rows of equal length share a batch: beside longer ones the model's outputs differ"
    NONE = "each row is computed alone: beside others the model's outputs differ"


def find_sharing(
    outputs: Callable[[Sequence[_Row]], torch.Tensor], rows: Sequence[_Row], length: Callable[[_Row], int]
) -> Sharing:
    """Return which rows a model can compute together; the log says so.

    Args:
        outputs: computes rows, of any lengths, together; the first dimension of what it returns is the rows.
        rows: two or more, of different lengths, and two of the same.
        length: returns the number of tokens of a row.
    """
    ordered = sorted(rows, key=length)
    equal = next((pair for pair in itertools.pairwise(ordered) if length(pair[0]) == length(pair[1])), None)
    if ordered and is_alone_as_together(outputs, (ordered[0], ordered[-1])):
        found = Sharing.ANY
    else:
        found = Sharing.EQUAL if equal is not None and is_alone_as_together(outputs, equal) else Sharing.NONE
    logger.info(found.value)
    return found


def is_alone_as_together(outputs: Callable[[Sequence[_Row]], torch.Tensor], rows: Sequence[_Row]) -> bool:
    """Return whether a model's outputs for rows are the same together and alone, but for rounding."""
    try:
        alone = torch.cat([outputs([row]) for row in rows])
        together = outputs(rows)
    except Exception as error:  # noqa: BLE001 – the rows of the job show the same error alone
        logger.info("rows together: %s: %s", type(error).__name__, error)
        return False
    tolerance = _TOLERANCE if together.dtype in (torch.float32, torch.float64) else _LOW_TOLERANCE
    difference, largest = (together - alone).abs().max(), alone.abs().max()
    return together.shape == alone.shape and bool(difference <= tolerance * largest)
