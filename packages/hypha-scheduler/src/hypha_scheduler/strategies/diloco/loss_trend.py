"""Recognises a loss that explodes over rounds, and which weights were good before. Pure.

A loss explodes in a round if it exceeds `FACTOR` times that of the first round, or `FACTOR` if that is less than 1 (one
nat of a cross-entropy): smaller losses may vary by more. One such round may be an accident, from which training
recovers; after `ROUNDS` in succession, or if none is left to recover in, the weights are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FACTOR: Final = 3.0
ROUNDS: Final = 3


@dataclass(slots=True)
class LossTrend:
    """Losses of the recorded rounds of one job."""

    first: float | None = None
    """Loss of the first round that has one."""
    last: float | None = None
    """Loss of the last round that has one."""
    good: int = 0
    """Last round with whose weights the round after it began and had a good loss; 0 for the start model."""
    exploded: int = 0
    """Number of last rounds in succession in which the loss exploded."""

    def add(self, number: int, loss: float | None) -> None:
        """Take the mean loss of a round, while it was trained; None if nobody has reported one."""
        if loss is None:
            return
        self.first, self.last = loss if self.first is None else self.first, loss
        if loss > FACTOR * max(self.first, 1.0):
            self.exploded += 1
        else:
            self.good, self.exploded = number - 1, 0

    def is_lost(self, *, is_last: bool) -> bool:
        """Return whether the job should end; `is_last` says that no further round follows."""
        return self.exploded >= ROUNDS or (is_last and self.exploded > 0)
