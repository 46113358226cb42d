"""Who trains on what: each slice of the dataset exactly once an epoch, AVAILABLE → ASSIGNED → USED. Pure.

Before this room: the data node's manifest says which slices there are. After it: the worker pulls what it was given
from the data node, and its executor reports how many samples of it were used.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

_MAX_SLICES: Final = 64
"""Slices that one worker may hold whatever their size; beyond that, as many as make `_MAX_BATCHES` batches.

One that hoards them cannot make the ledger grow, and batches of many small slices are filled all the same.
"""
_MAX_BATCHES: Final = 4


class SliceState(Enum):
    """How a slice of an epoch stands."""

    AVAILABLE = "available"
    ASSIGNED = "assigned"
    USED = "used"


class LedgerFullError(Exception):
    """A worker was given so many slices without using them that it gets no more."""


@dataclass(frozen=True, slots=True, order=True)
class Assignment:
    """One slice in one pass over the dataset."""

    epoch: int
    """From 0."""
    index: int


@dataclass(slots=True)
class _Epoch:
    number: int
    queue: deque[int]
    """Slices that are AVAILABLE, next first."""
    unused: int


@dataclass(slots=True)
class _AssignedSlice:
    """A slice that a worker has."""

    assignment: Assignment
    samples_used: int = 0


@dataclass(slots=True)
class _Holder:
    assigned: list[_AssignedSlice] = field(default_factory=list)
    reports_no_slices: bool = False
    """It reports batches without saying which slices they came from."""


class SliceLedger:
    """Hands out the slices of one dataset.

    Epochs overlap: when no slice is AVAILABLE the next epoch opens, so that nobody waits for another's last slice.
    Slices that a lost worker had and did not use up are the first to be handed out again.
    """

    def __init__(self, samples: Sequence[int | None], seed: int = 0, batch: int = 0) -> None:
        """Begin before epoch 0.

        Args:
            samples: samples of each slice; none where unknown (then a slice is used at its holder's next request).
            seed: decides the order within every epoch.
            batch: samples of a worker's batch, which is reported when all of it was used.

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

    @property
    def epoch(self) -> int:
        """The newest epoch that has begun."""
        return max(0, self._next_epoch - 1)

    def state(self, epoch: int, index: int) -> SliceState:
        """How a slice stands. Epochs that have not begun are AVAILABLE, those that are over are USED."""
        opened = self._epochs.get(epoch)
        if opened is None:
            return SliceState.AVAILABLE if epoch >= self._next_epoch else SliceState.USED
        if index in opened.queue:
            return SliceState.AVAILABLE
        return SliceState.ASSIGNED if Assignment(epoch, index) in self._assigned() else SliceState.USED

    def _assigned(self) -> set[Assignment]:
        return {held.assignment for holder in self._holders.values() for held in holder.assigned}

    def held_by(self, worker: Hashable) -> tuple[Assignment, ...]:
        """What `worker` has ASSIGNED, oldest first."""
        holder = self._holders.get(worker)
        return tuple(held.assignment for held in holder.assigned) if holder else ()

    def assign(self, worker: Hashable) -> Assignment:
        """Give `worker` the next slice.

        Raises:
            LedgerFullError: it holds so many that something must be wrong with it.
        """
        holder = self._holders.setdefault(worker, _Holder())
        for held in [
            h for h in holder.assigned if holder.reports_no_slices or self._samples[h.assignment.index] is None
        ]:
            holder.assigned.remove(held)
            self._use(held.assignment)
        if self._is_full(holder.assigned):
            raise LedgerFullError(f"{len(holder.assigned)} slices were given to this worker and not used")
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
        order = list(range(len(self._samples)))
        random.Random(f"{self._seed}/{self._next_epoch}").shuffle(order)
        epoch = _Epoch(self._next_epoch, deque(order), len(order))
        self._epochs[epoch.number] = epoch
        self._next_epoch += 1
        return epoch

    def report(self, worker: Hashable, used: Mapping[int, int] | None) -> None:
        """Note what a batch of `worker` took: slice index to samples; none when the executor does not say.

        Indexes that the worker does not hold are ignored.
        """
        holder = self._holders.setdefault(worker, _Holder())
        if used is None:
            holder.reports_no_slices = True
            return
        holder.reports_no_slices = False
        for index, samples in used.items():
            self._count_samples(holder, index, samples)

    def _count_samples(self, holder: _Holder, index: int, samples: int) -> None:
        """Count samples on the holder's copies of a slice, the one of the oldest epoch first."""
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
        epoch = self._epochs[assignment.epoch]
        epoch.unused -= 1
        if epoch.unused == 0:
            del self._epochs[assignment.epoch]

    def release(self, worker: Hashable) -> tuple[Assignment, ...]:
        """A worker is gone: what it had and did not use up is AVAILABLE again, first in line. Returns those slices."""
        holder = self._holders.pop(worker, None)
        if holder is None:
            return ()
        for held in reversed(holder.assigned):
            self._epochs[held.assignment.epoch].queue.appendleft(held.assignment.index)
        return tuple(held.assignment for held in holder.assigned)
