"""Evaluations of a job's weights: the mean over the workers that evaluate a round, and which round is best. Pure.

Each worker evaluates the merged weights on its share of the evaluation dataset, while the others train on. So the
shares of a round arrive at any time; a round counts as evaluated when the first result of a later one arrives.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

_MAX_SAMPLES: Final = 1 << 53


@dataclass(frozen=True, slots=True)
class WeightsQuality:
    """Quality of the weights after a round."""

    loss: float
    """Mean loss of the workers' results, weighted by samples."""
    accuracy: float | None
    """Mean accuracy likewise; None if no worker reports one."""
    samples: int


@dataclass(slots=True)
class Evaluations:
    """Evaluations by round."""

    _results: dict[int, WeightsQuality] = field(default_factory=dict)

    def add(self, round_number: int, loss: float, accuracy: float | None, samples: float) -> None:
        """Add the result of one worker, which `is_evaluation`; an accuracy outside 0 to 1 is left out."""
        if accuracy is not None and not 0 <= accuracy <= 1:
            accuracy = None
        new = WeightsQuality(loss, accuracy, int(samples))
        known = self._results.get(round_number)
        self._results[round_number] = new if known is None else _mean(known, new)

    def of(self, round_number: int) -> WeightsQuality | None:
        """Return the evaluation of a round so far."""
        return self._results.get(round_number)

    @property
    def newest(self) -> int:
        """Return the last round of which a result has arrived, 0 without any; the rounds before it are evaluated."""
        return max(self._results, default=0)

    def best(self, rounds: Iterable[int]) -> int | None:
        """Return the round with the lowest loss among `rounds`, the later one if they are equal; None if none has one.

        Accuracy decides nothing: it is the same for many different weights.
        """
        found = {number: self._results[number] for number in rounds if number in self._results}
        return min(found, key=lambda number: (found[number].loss, -number), default=None)

    def forget(self, kept: Collection[int]) -> None:
        """Drop the evaluations of other rounds before the newest."""
        newest = self.newest
        self._results = {n: result for n, result in self._results.items() if n in kept or n >= newest}

    def record(self) -> dict[str, Any]:
        """Return the evaluations as a JSON object."""
        return {str(number): asdict(result) for number, result in sorted(self._results.items())}

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> Evaluations:
        """Return what `record` has written.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is malformed.
        """
        found = cls()
        for number, result in record.items():
            if not is_evaluation(float(result["loss"]), result["samples"]):
                raise ValueError(f"the evaluation of round {number} is not one")
            found.add(int(number), result["loss"], result["accuracy"], result["samples"])
        return found


def is_evaluation(loss: float, samples: float) -> bool:
    """Return whether the numbers of a worker's result make sense."""
    return math.isfinite(loss) and 1 <= samples <= _MAX_SAMPLES


def _mean(first: WeightsQuality, second: WeightsQuality) -> WeightsQuality:
    samples = first.samples + second.samples
    loss = (first.loss * first.samples + second.loss * second.samples) / samples
    if first.accuracy is None or second.accuracy is None:
        accuracy = second.accuracy if first.accuracy is None else first.accuracy
    else:
        accuracy = (first.accuracy * first.samples + second.accuracy * second.samples) / samples
    return WeightsQuality(loss, accuracy, samples)
