"""Batch allocation: how many batches each worker processes in a round, from measured throughput. Pure.

A round ends when all workers together have processed a target number of samples. The batches are allocated so that all
workers finish at about the same time. Called by `rounds`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.ids import PeerId

SMOOTHING: Final = 0.3
"""Weight of the newest measurement in the exponential moving average."""
_BISECTIONS: Final = 60
_MAX_SECONDS: Final = 1e9  # far longer than any round


@dataclass(slots=True)
class ThroughputEstimate:
    """Exponential moving average of the seconds per sample of a worker, measured by the scheduler's clock."""

    seconds_per_sample: float | None = None
    observations: int = 0

    def observe(self, samples: int, seconds: float) -> None:
        """Add a measurement. The first is warm-up, replaced by the second; invalid measurements are ignored."""
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
    """Progress of one worker in a round."""

    peer: PeerId
    batch_size: int
    """Samples per batch."""
    done: int = 0
    """Samples processed in this round."""
    batch_seconds: float | None = None
    """Seconds per batch; None if unknown, then only `min_batches` are expected of the worker."""
    next_at: float = 0.0
    """Time at which its next batch is complete."""
    min_batches: int = 0
    """Minimum number of further batches."""
    is_finished: bool = False
    """Whether the worker gets no more batches in this round."""

    def batches_until(self, finish: float) -> int:
        """Return how many more batches are complete at the time `finish`."""
        if self.is_finished:
            return 0
        if self.batch_seconds is None or finish < self.next_at:
            return self.min_batches
        return max(self.min_batches, math.floor((finish - self.next_at) / self.batch_seconds + 1e-9) + 1)

    def finish_after(self, batches: int) -> float:
        """Return the time at which `batches` more batches are complete."""
        if self.batch_seconds is None or batches == 0:
            return self.next_at
        return self.next_at + (batches - 1) * self.batch_seconds


@dataclass(frozen=True, slots=True)
class BatchAllocation:
    """Number of further batches of each worker."""

    batches: dict[PeerId, int] = field(default_factory=dict)
    finish: float = 0.0
    """Time at which the last batch is complete."""
    samples: int = 0
    """Samples of the whole round once all batches are complete."""


def allocate_batches(workers: Sequence[WorkerProgress], target: int) -> BatchAllocation:
    """Allocate the rest of a round so that all workers finish at about the same time.

    Finds by bisection the earliest time at which the batches complete by then contain `target` samples, then removes
    the latest surplus batches. The round exceeds `target` by less than one batch, except for minimum batches.
    """
    missing = target - sum(s.done for s in workers)
    finish = _finish(workers, missing)
    batches = {s.peer: s.batches_until(finish) for s in workers}
    extra = sum(batches[s.peer] * s.batch_size for s in workers) - missing

    def has_surplus(worker: WorkerProgress) -> bool:
        return batches[worker.peer] > worker.min_batches and not worker.is_finished and extra >= worker.batch_size

    while surplus := [worker for worker in workers if has_surplus(worker)]:  # one by one: several may end at once
        latest = max(surplus, key=lambda s: s.finish_after(batches[s.peer]))
        batches[latest.peer] -= 1
        extra -= latest.batch_size
    return BatchAllocation(
        batches,
        max((s.finish_after(batches[s.peer]) for s in workers if batches[s.peer]), default=0.0),
        target + extra,
    )


def _finish(workers: Sequence[WorkerProgress], missing: int) -> float:
    """Return the earliest time at which `missing` more samples are complete."""
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
