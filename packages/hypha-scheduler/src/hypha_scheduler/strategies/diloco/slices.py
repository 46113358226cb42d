"""Slice assignment: each slice of the dataset is used exactly once per epoch, AVAILABLE → ASSIGNED → USED. Pure.

The dataset's manifest lists the slices. A worker requests one, pulls it from a data node, and its executor reports how
many samples it has used. The unused slices of a lost worker become AVAILABLE again. A slice that no provider has as the
manifest describes it is SET_ASIDE for the rest of the job. Called by `operator`.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

_MAX_SLICES: Final = 64
"""Number of slices that a worker may hold regardless of their size; beyond it, at most `_MAX_BATCHES` batches' worth.

Bounds the memory that a worker which never uses its slices can take, but lets a batch consist of many small slices.
"""
_MAX_BATCHES: Final = 4


class SliceState(Enum):
    """State of a slice in an epoch."""

    AVAILABLE = "available"
    ASSIGNED = "assigned"
    USED = "used"
    SET_ASIDE = "set aside"


class LedgerFullError(Exception):
    """A worker holds so many unused slices that it gets no more."""


class NoUsableSliceError(Exception):
    """Every slice was set aside."""


@dataclass(frozen=True, slots=True, order=True)
class Assignment:
    """Slice in one epoch."""

    epoch: int
    """Pass over the dataset, from 0."""
    index: int


@dataclass(slots=True)
class _Epoch:
    number: int
    queue: deque[int]
    """AVAILABLE slices, next first."""
    unused: int
    """Number of slices that are not USED."""


@dataclass(slots=True)
class _AssignedSlice:
    """Slice that is assigned to a worker."""

    assignment: Assignment
    samples_used: int = 0


@dataclass(slots=True)
class _Holder:
    assigned: list[_AssignedSlice] = field(default_factory=list)
    reports_no_slices: bool = False
    """Whether it reports batches without stating the slices they came from."""


class SliceLedger:
    """Assigns the slices of one dataset to workers.

    Epochs overlap: when no slice is AVAILABLE the next epoch starts, so that no worker waits for the last slice of
    another. Slices that a lost worker did not use up are assigned first.
    """

    def __init__(self, samples: Sequence[int | None], seed: int = 0, batch: int = 0) -> None:
        """Start before epoch 0.

        Args:
            samples: number of samples of each slice; None if unknown, then a slice counts as used when its worker
                requests another.
            seed: seed of the order within each epoch.
            batch: samples per batch of a worker.

        Raises:
            ValueError: there are no slices.
        """
        if not samples:
            raise ValueError("a dataset without slices cannot be trained on")
        self._samples = list(samples)
        self._seed = seed
        self._max_unused = _MAX_BATCHES * batch
        self._epochs: dict[int, _Epoch] = {}
        self._next_epoch = 0
        self._holders: dict[Hashable, _Holder] = {}
        self._set_aside: set[int] = set()
        self._newly_used: list[Assignment] = []

    def restore(self, used: Iterable[Assignment]) -> None:
        """Record the slices that an interrupted run has used, before the first is assigned."""
        by_epoch: defaultdict[int, set[int]] = defaultdict(set)
        for assignment in used:
            by_epoch[assignment.epoch].add(assignment.index)
        while self._next_epoch <= max(by_epoch, default=-1):
            epoch = self._open_epoch()
            gone = by_epoch[epoch.number]
            epoch.queue = deque(index for index in epoch.queue if index not in gone)
            epoch.unused = len(epoch.queue)
            if epoch.unused == 0:
                del self._epochs[epoch.number]

    def take_used(self) -> list[Assignment]:
        """Return the slices that became USED since the last call."""
        used, self._newly_used = self._newly_used, []
        return used

    @property
    def usable(self) -> int:
        """Number of slices that were not set aside."""
        return len(self._samples) - len(self._set_aside)

    @property
    def epoch(self) -> int:
        """Newest epoch that has started."""
        return max(0, self._next_epoch - 1)

    def state(self, epoch: int, index: int) -> SliceState:
        """Return the state of a slice: AVAILABLE in epochs that have not started, USED in completed ones."""
        if index in self._set_aside and Assignment(epoch, index) not in self._assigned():
            return SliceState.SET_ASIDE
        opened = self._epochs.get(epoch)
        if opened is None:
            return SliceState.AVAILABLE if epoch >= self._next_epoch else SliceState.USED
        if index in opened.queue:
            return SliceState.AVAILABLE
        return SliceState.ASSIGNED if Assignment(epoch, index) in self._assigned() else SliceState.USED

    def _assigned(self) -> set[Assignment]:
        return {held.assignment for holder in self._holders.values() for held in holder.assigned}

    def held_by(self, worker: Hashable) -> tuple[Assignment, ...]:
        """Return the slices that are ASSIGNED to `worker`, oldest first."""
        holder = self._holders.get(worker)
        return tuple(held.assignment for held in holder.assigned) if holder else ()

    def assign(self, worker: Hashable) -> Assignment:
        """Assign the next slice to `worker`.

        Raises:
            LedgerFullError: the worker holds too many unused slices.
            NoUsableSliceError: every slice was set aside.
        """
        holder = self._holders.setdefault(worker, _Holder())
        for held in [
            h for h in holder.assigned if holder.reports_no_slices or self._samples[h.assignment.index] is None
        ]:
            holder.assigned.remove(held)
            self._use(held.assignment)
        if self._is_full(holder.assigned):
            raise LedgerFullError(f"{len(holder.assigned)} slices were assigned to this worker and not used")
        epoch = next((e for e in self._epochs.values() if e.queue), None) or self._open_epoch()
        assignment = Assignment(epoch.number, epoch.queue.popleft())
        holder.assigned.append(_AssignedSlice(assignment))
        return assignment

    def _is_full(self, assigned: Sequence[_AssignedSlice]) -> bool:
        if len(assigned) < _MAX_SLICES:
            return False
        unused = sum((self._samples[held.assignment.index] or 0) - held.samples_used for held in assigned)
        return unused >= self._max_unused or len(assigned) >= _MAX_SLICES + self._max_unused

    def _open_epoch(self) -> _Epoch:
        if not self.usable:
            raise NoUsableSliceError(f"all {len(self._samples)} slices were set aside")
        order = list(range(len(self._samples)))
        random.Random(f"{self._seed}/{self._next_epoch}").shuffle(order)
        order = [index for index in order if index not in self._set_aside]
        epoch = _Epoch(self._next_epoch, deque(order), len(order))
        self._epochs[epoch.number] = epoch
        self._next_epoch += 1
        return epoch

    def report(self, worker: Hashable, used: Mapping[int, int] | None) -> None:
        """Record how many samples a batch of `worker` took from each slice, or None if the executor does not report it.

        Slices that the worker does not hold are ignored.
        """
        holder = self._holders.setdefault(worker, _Holder())
        if used is None:
            holder.reports_no_slices = True
            return
        holder.reports_no_slices = False
        for index, samples in used.items():
            self._count_samples(holder, index, samples)

    def _count_samples(self, holder: _Holder, index: int, samples: int) -> None:
        """Count used samples of a slice, which the worker may hold in several epochs: the oldest epoch first."""
        copies = sorted((h for h in holder.assigned if h.assignment.index == index), key=lambda h: h.assignment)
        for held in copies:
            size = self._samples[index]
            if size is None:
                return
            taken = min(samples, size - held.samples_used)
            held.samples_used += taken
            samples -= taken
            if held.samples_used >= size:
                holder.assigned.remove(held)
                self._use(held.assignment)
            if samples <= 0:
                return

    def _use(self, assignment: Assignment) -> None:
        self._newly_used.append(assignment)
        epoch = self._epochs[assignment.epoch]
        epoch.unused -= 1
        if epoch.unused == 0:
            del self._epochs[assignment.epoch]

    def release(self, worker: Hashable) -> tuple[Assignment, ...]:
        """Make the unused slices of a lost worker AVAILABLE again, to be assigned first; return them."""
        holder = self._holders.pop(worker, None)
        if holder is None:
            return ()
        returned = []
        for held in holder.assigned:
            if held.assignment.index in self._set_aside:
                self._use(held.assignment)
            else:
                returned.append(held.assignment)
        for assignment in reversed(returned):
            self._epochs[assignment.epoch].queue.appendleft(assignment.index)
        return tuple(returned)

    def set_aside(self, worker: Hashable, index: int, epoch: int | None = None) -> bool:
        """Never assign a slice again, because `worker` cannot get it from any provider.

        Others that hold the slice already may use it.

        Args:
            worker: to whom it is assigned.
            index: the slice.
            epoch: the epoch of the assignment; the oldest one if None.

        Returns:
            Whether the slice was assigned to the worker; if not, nothing changes.
        """
        assigned = self._holders[worker].assigned if worker in self._holders else []
        copies = [h for h in assigned if h.assignment.index == index and epoch in (None, h.assignment.epoch)]
        if not copies:
            return False
        assigned.remove(copies[0])
        self._use(copies[0].assignment)
        self._set_aside.add(index)
        for opened in [each for each in self._epochs.values() if index in each.queue]:
            opened.queue.remove(index)
            self._use(Assignment(opened.number, index))
        return True
