"""The leases of an inference job and the task that runs on each. Pure; called by `operator`."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from hypha_scheduler.strategies.base import Lease, TaskRef
from hypha_scheduler.strategies.silence import PATIENCE, recent, suspicious_after

FIRST_REPORT: Final = 600.0
"""Seconds for which an executor may compute its first slice until it reports anything; it may load its model first."""
_LEAST: Final = 30.0
"""Least time in seconds for which an executor that computes a slice may report nothing: it may send a part."""


@dataclass(slots=True)
class InferenceWorker:
    """A lease, and the attempt that runs on it."""

    lease: Lease
    name: str
    """Name of its task, which differs for each lease."""
    next_attempt: int
    task: TaskRef | None = None
    failures: int = 0
    """Attempts in a row that failed without a committed part."""
    refused: int = 0
    """Invalid parts that it has sent."""
    got_slice: bool = False
    """Whether its present attempt was assigned a slice."""
    waits_since: float | None = None
    """When its present attempt began to wait for a slice."""
    told_none: bool = False
    """Whether its present attempt was told that there are no more slices for it."""
    is_leaving: bool = False
    """Whether it gets no more work: it drains, or its executor failed here too often."""
    heard_at: float = 0.0
    """When its present attempt was assigned a slice, reported or sent something, the last time."""
    intervals: deque[float] = field(default_factory=recent)
    """Last intervals between these times in its present attempt."""

    def heard(self, now: float) -> None:
        """Note a report of an attempt that computes a slice."""
        self.intervals.append(now - self.heard_at)
        self.heard_at = now

    def silent_until(self, losses: int) -> float:
        """Return until when an attempt that computes a slice may report nothing.

        Before its first report it may take twice as long for each of the `losses` of others with the same slice.
        """
        if not self.intervals:
            return self.heard_at + FIRST_REPORT * 2.0**losses
        return self.heard_at + max(_LEAST, PATIENCE * suspicious_after(max(self.intervals)))

    def begin(self) -> TaskRef:
        """Return the next attempt at its task, which runs from now on."""
        self.task = TaskRef(self.name, self.lease, self.next_attempt)
        self.next_attempt += 1
        self.got_slice = self.told_none = False
        self.waits_since = None
        self.intervals.clear()
        return self.task

    @property
    def works(self) -> bool:
        """Return whether it can be assigned slices."""
        return self.task is not None and not self.is_leaving and not self.told_none


@dataclass(slots=True)
class InferenceWorkers:
    """All leases of one job."""

    first_attempt: int
    """Number of the first attempt at a task."""
    _by_lease: dict[uuid.UUID, InferenceWorker] = field(default_factory=dict)
    _count: int = 0
    """Leases so far; numbers the tasks."""

    def __iter__(self) -> Iterator[InferenceWorker]:
        return iter(self._by_lease.values())

    def add(self, leases: Iterable[Lease]) -> None:
        """Add new leases."""
        for lease in leases:
            self._count += 1
            self._by_lease[lease.id] = InferenceWorker(lease, f"inference-{self._count}", self.first_attempt)

    def remove(self, lease: Lease) -> InferenceWorker | None:
        """Remove a lease that is no longer held."""
        return self._by_lease.pop(lease.id, None)

    def get(self, lease: Lease) -> InferenceWorker | None:
        """Return the worker of a lease, or None if it is not held."""
        return self._by_lease.get(lease.id)

    def running(self, task: TaskRef) -> InferenceWorker | None:
        """Return the worker that runs an attempt, or None."""
        worker = self.get(task.lease)
        return worker if worker is not None and worker.task == task else None

    @property
    def working(self) -> int:
        """Number of workers that can be assigned slices."""
        return sum(worker.works for worker in self)

    @property
    def busy(self) -> int:
        """Number of workers with a task."""
        return sum(worker.task is not None for worker in self)

    def idle(self) -> Sequence[InferenceWorker]:
        """Return the workers without a task, the oldest first."""
        return [worker for worker in self if worker.task is None]
