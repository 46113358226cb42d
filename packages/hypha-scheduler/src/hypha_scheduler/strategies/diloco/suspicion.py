"""Suspicion of members of a round: the rhythm of the reports of each. Pure.

Called by `round_deadlines` and `rounds`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypha_scheduler.strategies.silence import low_median, recent


@dataclass(slots=True)
class Rhythm:
    """Durations in seconds between reports of one worker in this run."""

    batches: deque[float] = field(default_factory=recent)
    """Last intervals between reports of batches, of which one may state several; the first one, a warm-up, is replaced
    by the second."""
    sendings: deque[float] = field(default_factory=recent)
    """Last times from the report that it sends its update to the statement of the update."""
    deliveries: deque[float] = field(default_factory=recent)
    """Last times from the report of the last batch to the arrival of the update at the parameter server."""
    merges: deque[float] = field(default_factory=recent)
    """Last times from the end of a round to its report that it has merged the outer update."""
    evaluated_merges: deque[float] = field(default_factory=recent)
    """The same after rounds whose weights are evaluated, which some executors do before they report."""
    is_warm: bool = False
    usual_interval: float = 0.0
    """Median of the last intervals between reports of batches; 0 if there is none."""
    usual_delivery: float = 0.0
    """Median of the last deliveries of updates; 0 if there is none."""

    def batch_took(self, seconds: float) -> None:
        """Note an interval between two reports of batches; none passes between those that arrive at one moment."""
        if seconds <= 0.0:
            return
        if not self.is_warm and self.batches:
            self.batches.clear()
            self.is_warm = True
        self.batches.append(seconds)
        self.usual_interval = low_median(self.batches)

    def delivery_took(self, seconds: float) -> None:
        """Note the time from the last batch to the arrival of the update."""
        self.deliveries.append(seconds)
        self.usual_delivery = low_median(self.deliveries)

    @property
    def longest_batch(self) -> float:
        """Longest of the last intervals between batches; 0 if there is none."""
        return max(self.batches, default=0.0)
