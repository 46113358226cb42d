"""Batch allocation: how many batches each worker processes in a round, from measured throughput. Pure.

A round ends when all workers together have processed a target number of samples. The batches are allocated so that the
updates of all workers arrive at about the same time.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.silence import low_median

_RECENT: Final = 16
"""Number of last measurements that count, at least."""
_RECENT_SECONDS: Final = 1.0
"""Seconds of training that count, at least: of 16 batches of 2 ms the mean is that of a moment."""
_MOST: Final = 512
"""Largest number of measurements that are kept."""
_NEWEST: Final = 5
"""Number of last measurements of which the median decides which others count: a change is noticed after three."""
_SPREAD: Final = 2.0
"""Measurements that are this many times longer or shorter than that median are outliers, or older than a change."""
_MAX_SECONDS: Final = 1e9  # far longer than any round


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """A batch that an executor has reported."""

    samples: int
    seconds: float | None = None
    """Duration as the executor states it, without the wait for data; None if it does not."""
    waited: float = 0.0
    """Seconds for which it has waited for data before, as the executor states it."""

    def bounded(self, batch_size: int, longest: float) -> MeasuredBatch:
        """Return it with at most `batch_size` samples, and with durations of 0 to `longest` seconds."""
        seconds = self.seconds if self.seconds is not None and self.seconds >= 0.0 else None
        return MeasuredBatch(
            min(self.samples, batch_size),
            None if seconds is None else min(seconds, longest),
            min(self.waited, longest) if self.waited >= 0.0 else 0.0,
        )


def seconds_since_first(batches: Sequence[MeasuredBatch]) -> float | None:
    """Return how long before the end of the last batch the first one began; None if some duration is not stated."""
    stated = [batch.seconds for batch in batches if batch.seconds is not None]
    if len(stated) < len(batches):
        return None
    return sum(stated) + sum(batch.waited for batch in batches[1:])


@dataclass(slots=True)
class ThroughputEstimate:
    """Seconds per sample of a worker: the mean of its last batches without outliers, and what passes between them."""

    seconds_per_sample: float | None = None
    observations: int = 0
    _batches: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_MOST))
    """Samples and seconds of the last batches."""
    _gaps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Samples of the last reports, and seconds that passed before each beyond the stated durations of its batches."""
    _is_stated: bool = False
    """Whether the last durations are those that the executor states."""

    def observe(self, samples: int, seconds: float) -> None:
        """Add a measurement. The first is warm-up, replaced by the second; invalid measurements are ignored."""
        self._add(samples, seconds)
        self._update()

    def _add(self, samples: int, seconds: float) -> None:
        if samples <= 0 or not 0.0 <= seconds < _MAX_SECONDS:
            return
        if self.observations == 1:
            self._batches.clear()
        self._batches.append((samples, max(seconds, 1e-9)))
        self.observations += 1

    def observe_report(self, batches: Sequence[MeasuredBatch], interval: float | None, *, begins_round: bool) -> None:
        """Add the batches of one report, by the durations that the executor states, else by the time since the last.

        Args:
            batches: what is reported.
            interval: seconds since the last report, or the begin of the first batch; None if that is not known.
            begins_round: whether these are the first batches of a round; what passes before them is no measure.
        """
        samples = sum(batch.samples for batch in batches)
        stated = [batch.seconds + batch.waited for batch in batches if batch.seconds is not None]
        self._is_stated = len(stated) == len(batches)
        if self._is_stated:
            for batch, seconds in zip(batches, stated, strict=True):
                self._add(batch.samples, seconds)
            self._update()
            if interval is not None and not begins_round:
                self._observe_gap(samples, interval, sum(stated))
        elif interval:
            self.observe(samples, interval)
        elif interval is not None and samples > 0:  # at the same moment as the last report
            _extend_last(self._batches, samples, 0.0)
            self._update()

    def _observe_gap(self, samples: int, interval: float, stated: float) -> None:
        """Note what passed since the last report beyond the stated durations.

        It is negative at times, as reports do not travel equally long. It includes what executors do not state, so that
        one which understates its durations gains nothing.
        """
        if samples <= 0:
            return
        if interval > 0.0:
            self._gaps.append((samples, interval - stated))
        else:
            _extend_last(self._gaps, samples, -stated)
        self._update()

    @property
    def known(self) -> bool:
        """Whether there is a measurement beyond the warm-up, and of what stated durations leave out."""
        return self.observations >= 2 and (bool(self._gaps) or not self._is_stated)

    def _update(self) -> None:
        if not self._batches:
            return
        recent = self._recent()
        measured = [seconds / samples for samples, seconds in recent]
        usual = low_median(measured[:_NEWEST])
        near = usual / _SPREAD, usual * _SPREAD
        counted = [of for of, each in zip(recent, measured, strict=True) if near[0] <= each <= near[1]]
        mean = sum(seconds for _, seconds in counted) / sum(samples for samples, _ in counted)
        gaps = [seconds / samples for samples, seconds in self._gaps]
        self.seconds_per_sample = mean + max(0.0, low_median(gaps) if gaps else 0.0)

    def _recent(self) -> list[tuple[int, float]]:
        """Return the batches that count, the last one first."""
        found: list[tuple[int, float]] = []
        left = _RECENT_SECONDS
        for samples, seconds in reversed(self._batches):
            if len(found) >= _RECENT and left <= 0.0:
                break
            found.append((samples, seconds))
            left -= seconds
        return found


def _extend_last(measured: deque[tuple[int, float]], samples: int, seconds: float) -> None:
    """Add samples and seconds to the last measurement, if there is one."""
    if measured:
        before, took = measured.pop()
        measured.append((before + samples, took + seconds))


@dataclass(slots=True)
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
    delivery_seconds: float = 0.0
    """Seconds from its last batch until its update has arrived."""

    def batches_until(self, finish: float) -> int:
        """Return after how many more batches its update arrives at the time `finish` at the latest."""
        if self.is_finished:
            return 0
        left = finish - self.next_at - self.delivery_seconds
        if self.batch_seconds is None or left < 0.0:
            return self.min_batches
        return max(self.min_batches, math.floor(left / self.batch_seconds + 1e-9) + 1)

    def finish_after(self, batches: int) -> float:
        """Return the time at which its update arrives if `batches` more batches precede it."""
        if self.batch_seconds is None or batches == 0:
            return self.next_at + self.delivery_seconds
        return self.next_at + (batches - 1) * self.batch_seconds + self.delivery_seconds


@dataclass(frozen=True, slots=True)
class BatchAllocation:
    """Number of further batches of each worker."""

    batches: Mapping[PeerId, int] = field(default_factory=dict)
    finish: float = 0.0
    """Time at which the last update arrives."""
    samples: int = 0
    """Samples of the whole round once all batches are complete."""


def allocate_batches(workers: Sequence[WorkerProgress], target: int) -> BatchAllocation:
    """Allocate the rest of a round so that the updates of all workers arrive at about the same time.

    Starts from what is certainly complete when the last update arrives, and adds the batches that are complete next
    until there are `target` samples. The round exceeds `target` by less than one batch, except for minimum batches.
    """
    missing = target - sum(worker.done for worker in workers)
    finish = _earliest_finish(workers, missing)
    counts = [worker.batches_until(finish) for worker in workers]
    missing -= sum(count * worker.batch_size for count, worker in zip(counts, workers, strict=True))
    missing = _add_next(workers, counts, missing)
    extra = _remove_surplus(workers, counts, -missing)
    ends = (worker.finish_after(count) for worker, count in zip(workers, counts, strict=True) if count)
    batches = {worker.peer: count for worker, count in zip(workers, counts, strict=True)}
    return BatchAllocation(batches, max(ends, default=0.0), target + extra)


def _earliest_finish(workers: Sequence[WorkerProgress], missing: int) -> float:
    """Return a time before which `missing` more samples cannot be complete, as if batches could be divided.

    That is a sum of functions of the time, each constant until a worker's minimum is complete and linear from then on.
    """
    slopes, samples = [], 0.0
    for worker in workers:
        if worker.is_finished:
            continue
        samples += worker.min_batches * worker.batch_size
        if worker.batch_seconds is not None:
            begin = worker.next_at + worker.delivery_seconds + (worker.min_batches - 1) * worker.batch_seconds
            slopes.append((begin, worker.batch_size / worker.batch_seconds))
    slopes.sort()
    finish, rate = -math.inf, 0.0
    for begin, slope in slopes:
        if rate and samples + rate * (begin - finish) >= missing:
            break
        samples += rate * (begin - finish) if rate else 0.0
        finish, rate = begin, rate + slope
    return finish + max(0.0, missing - samples) / rate if rate else finish


def _add_next(workers: Sequence[WorkerProgress], counts: list[int], missing: int) -> int:
    """Add the batches that are complete next until no samples are missing; return how many still are."""
    if missing <= 0:
        return missing
    following = [
        (worker.finish_after(counts[number] + 1), number)
        for number, worker in enumerate(workers)
        if worker.batch_seconds is not None and not worker.is_finished
    ]
    heapq.heapify(following)
    while following and missing > 0:
        number = following[0][1]
        counts[number] += 1
        missing -= workers[number].batch_size
        heapq.heapreplace(following, (workers[number].finish_after(counts[number] + 1), number))
    return missing


def _remove_surplus(workers: Sequence[WorkerProgress], counts: list[int], extra: int) -> int:
    """Remove the latest batches that `extra` samples more than the target allow; return what is left of them."""

    def is_surplus(number: int) -> bool:
        worker = workers[number]
        return counts[number] > worker.min_batches and not worker.is_finished and extra >= worker.batch_size

    while extra > 0 and (surplus := [number for number in range(len(workers)) if is_surplus(number)]):
        latest = max(surplus, key=lambda number: workers[number].finish_after(counts[number]))
        counts[latest] -= 1
        extra -= workers[latest].batch_size
    return extra
