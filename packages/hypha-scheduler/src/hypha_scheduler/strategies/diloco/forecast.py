"""How fast is everyone, and how many batches does that make? Pure arithmetic over measured speeds.

`rounds` feeds it with what executors report. The question it answers: a round ends when all workers together have
processed a number of samples; how many batches does each do so that they finish near the same moment?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.ids import PeerId

SMOOTHING: Final = 0.3
"""Weight of the newest measurement in the exponential mean."""
_BISECTIONS: Final = 60
_MAX_SECONDS: Final = 1e9  # seconds; far beyond any round


@dataclass(slots=True)
class ThroughputEstimate:
    """Exponential mean of the seconds that one sample takes, measured by the scheduler's own clock."""

    seconds_per_sample: float | None = None
    observations: int = 0

    def observe(self, samples: int, seconds: float) -> None:
        """Add one measurement. The very first is warm-up and gives way to the second; empty ones do not count."""
        if samples <= 0 or not 0.0 <= seconds < _MAX_SECONDS:
            return
        measured = max(seconds, 1e-9) / samples
        if self.seconds_per_sample is None or self.observations == 1:
            self.seconds_per_sample = measured
        else:
            self.seconds_per_sample += SMOOTHING * (measured - self.seconds_per_sample)
        self.observations += 1

    @property
    def known(self) -> bool:
        """Whether there is a measurement beyond the warm-up."""
        return self.observations >= 2


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Where one worker stands in a round."""

    peer: PeerId
    batch_size: int
    """Samples of a batch."""
    done: int = 0
    """Samples processed in this round."""
    batch_seconds: float | None = None
    """Seconds a batch takes; none when unknown: then it is counted on for `owed` batches only."""
    next_at: float = 0.0
    """When its next batch is complete."""
    min_batches: int = 0
    """Batches it does in any case."""
    is_finished: bool = False
    """Its share is settled: no more batches."""

    def batches_until(self, finish: float) -> int:
        """How many more batches are complete at `finish`."""
        if self.is_finished:
            return 0
        if self.batch_seconds is None or finish < self.next_at:
            return self.min_batches
        return max(self.min_batches, math.floor((finish - self.next_at) / self.batch_seconds + 1e-9) + 1)

    def finish_after(self, batches: int) -> float:
        """When the last of `batches` more batches is complete."""
        if self.batch_seconds is None or batches == 0:
            return self.next_at
        return self.next_at + (batches - 1) * self.batch_seconds


@dataclass(frozen=True, slots=True)
class BatchAllocation:
    """How many more batches each worker does, and when the last is complete."""

    batches: dict[PeerId, int] = field(default_factory=dict)
    finish: float = 0.0
    samples: int = 0
    """Samples of the whole round when everyone has done its share."""


def allocate_batches(workers: Sequence[WorkerProgress], target: int) -> BatchAllocation:
    """Share the rest of a round so that everyone finishes near the same moment.

    Finds the earliest time at which the batches that are then complete make `target` samples, and takes away the
    latest batches that are not needed. The round exceeds `target` by less than one batch, apart from `owed` ones.
    """
    missing = target - sum(s.done for s in workers)
    finish = _finish(workers, missing)
    batches = {s.peer: s.batches_until(finish) for s in workers}
    extra = sum(batches[s.peer] * s.batch_size for s in workers) - missing

    def is_spare(worker: WorkerProgress) -> bool:
        return batches[worker.peer] > worker.min_batches and not worker.is_finished and extra >= worker.batch_size

    while spare := [worker for worker in workers if is_spare(worker)]:  # one by one: many may end together
        latest = max(spare, key=lambda s: s.finish_after(batches[s.peer]))
        batches[latest.peer] -= 1
        extra -= latest.batch_size
    return BatchAllocation(
        batches,
        max((s.finish_after(batches[s.peer]) for s in workers if batches[s.peer]), default=0.0),
        target + extra,
    )


def _finish(workers: Sequence[WorkerProgress], missing: int) -> float:
    """The earliest time at which `missing` more samples are complete."""
    able = [s for s in workers if s.batch_seconds is not None and not s.is_finished]
    if not able:
        return 0.0

    def complete(at: float) -> int:
        return sum(s.batches_until(at) * s.batch_size for s in workers)

    low = min(s.next_at for s in able)
    span = min(s.batch_seconds or 0.0 for s in able)
    if complete(low - span) >= missing:
        return low - span
    while complete(low + span) < missing and span < _MAX_SECONDS:
        span *= 2
    high = low + span
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if complete(middle) >= missing else (middle, high)
    return high
