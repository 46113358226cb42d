"""Finds updates that are much larger than others. Pure.

AdamW bounds each step by the learning rate, so the norm of an update grows at most in proportion to its samples. An
update is an outlier if its norm exceeds `FACTOR` times what the others in its round lead to expect, and `FACTOR` times
what the last rounds do: whole rounds may grow together, as while the learning rate warms up, and one worker may train
alone. Small updates are no outliers, since they do no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from hypha_proto.ids import PeerId

FACTOR: Final = 10.0
"""How many times the expected norm an update may have."""
_ROUNDS: Final = 8
"""Number of last rounds that count."""


@dataclass(frozen=True, slots=True)
class UpdateNorm:
    """Euclidean norm of an update over a number of samples."""

    norm: float
    samples: float

    def over(self, samples: float) -> float:
        """Return the norm to expect of an update over `samples`, if this one is an example."""
        return self.norm * max(1.0, samples / max(1.0, self.samples))


@dataclass(slots=True)
class UpdateNorms:
    """Norms of the updates in the last rounds of one job."""

    _rounds: deque[tuple[UpdateNorm, ...]] = field(default_factory=lambda: deque(maxlen=_ROUNDS))

    def add_round(self, norms: Iterable[UpdateNorm]) -> None:
        """Take the updates that were averaged in a round."""
        self._rounds.append(tuple(norms))

    def find_outliers(self, norms: Mapping[PeerId, UpdateNorm]) -> dict[PeerId, str]:
        """Return which updates of a round are outliers, and why."""
        last = [known for known_round in self._rounds for known in known_round]
        found = {}
        for peer, update in norms.items():
            others = [other for sender, other in norms.items() if sender != peer]
            expected = [norm for norm in (_expect(update, others), _expect(update, last)) if norm is not None]
            if expected and update.norm > FACTOR * max(expected):
                compared = " and ".join(f"{norm:.3g}" for norm in expected)
                found[peer] = (
                    f"its norm {update.norm:.3g} is over {FACTOR:g} times that of other updates, for which {compared} "
                    "is usual"
                )
        return found


def _expect(update: UpdateNorm, known: Iterable[UpdateNorm]) -> float | None:
    """Return the norm to expect of an update by others; None if none of them has changed anything."""
    norms = [other.over(update.samples) for other in known if other.norm > 0.0]
    return median(norms) if norms else None
