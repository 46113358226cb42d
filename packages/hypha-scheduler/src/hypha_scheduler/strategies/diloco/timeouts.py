"""Timeouts of the steps of a DiLoCo job, from sizes and measured durations. Pure.

Before anything was measured, a step may take a fixed time and the time of its transfers at `SLOW_RATE`. Later it may
take `FACTOR` times the longest of its last durations, which has the rates of the links in it, and always the time of
its transfers: a worker that joins later may have a slower link than those before. The job's configuration may override
each.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from hypha_scheduler.strategies.silence import SLOW_RATE

FACTOR: Final = 4.0
"""How many times as long as measured a step may take."""
START: Final = 120.0
"""Seconds to start an executor, without the transfer of its model."""
STEP: Final = 60.0
"""Seconds of an outer step, without the transfer of updates."""
MERGE: Final = 60.0
"""Seconds to merge an outer update, without its transfer."""
EVALUATION: Final = 86400.0
"""Seconds to evaluate weights, if nothing says how many samples there are or how fast they are computed."""
_LEAST: Final = 30.0
"""Least timeout in seconds of a step that was measured."""
_RECENT: Final = 16
"""Number of last durations that count."""


def _recent() -> deque[float]:
    return deque(maxlen=_RECENT)


@dataclass(slots=True)
class Timeouts:
    """Timeouts of one job, in seconds."""

    model_bytes: int
    """Size of the weights, of each update and of the outer update."""
    start: float | None = None
    """`rounds.start_timeout`: replaces what is derived."""
    step: float | None = None
    """`rounds.step_timeout`."""
    merge: float | None = None
    """`rounds.merge_timeout`."""
    workers: int = 1
    """Number of workers whose updates share the parameter server's link."""
    starts: deque[float] = field(default_factory=_recent)
    """How long executors took from their dispatch to their first batch."""
    steps: deque[float] = field(default_factory=_recent)
    """How long outer steps took, from the announcement of the members to the record."""
    merges: deque[float] = field(default_factory=_recent)
    """How long workers took to merge an outer update."""

    def start_timeout(self) -> float:
        """Return the time from dispatching an executor to its first batch: libraries, the model, the first slice.

        Never less than what the first one gets, since nothing says how fast the machine of the next one is.
        """
        if self.start is not None:
            return self.start
        return max(START + self._transfers(1), FACTOR * max(self.starts, default=0.0))

    def step_timeout(self) -> float:
        """Return the time of an outer step: each update reaches the parameter server, and the mean the scheduler."""
        return self._timeout(self.step, self.steps, STEP, copies=self.workers + 1)

    def merge_timeout(self) -> float:
        """Return the time until all workers have received and merged an outer update, without evaluating it."""
        return self._timeout(self.merge, self.merges, MERGE, copies=self.workers)

    def _timeout(self, configured: float | None, measured: deque[float], base: float, copies: int) -> float:
        if configured is not None:
            return configured
        if measured:
            return max(_LEAST, FACTOR * max(measured), self._transfers(copies))
        return base + self._transfers(copies)

    def _transfers(self, copies: int) -> float:
        """Return the seconds for `copies` of the model over a slow link."""
        return copies * self.model_bytes / SLOW_RATE
