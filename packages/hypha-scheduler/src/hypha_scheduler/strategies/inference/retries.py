"""Retries of slices: whether one that was not computed is assigned again, and to whom, or the job fails. Pure.

A slice is assigned again after each attempt that failed at it, and after each loss of its worker, as often as the
limits here say. Others that did not fail at it come first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hypha_net.retries import RetryPolicy
from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.avoidance import Avoidance
from hypha_scheduler.strategies.base import DatasetView, Effects, TaskRef
from hypha_scheduler.strategies.inference.slice_assignments import SliceAssignments
from hypha_scheduler.strategies.inference.specs import ROLE
from hypha_scheduler.strategies.inference.workers import InferenceWorker, InferenceWorkers

LOST_SLICE: Final = RetryPolicy("a slice of batch inference was lost with its worker", (0.0,) * 9)
MAX_FAILURES: Final = 3
"""Attempts that fail at one slice until the job fails, and attempts that fail before their first slice."""
MAX_BARREN: Final = 10
"""Attempts of all workers that fail one after the other without a committed part until the job fails."""


@dataclass(slots=True)
class SliceRetries:
    """What has failed at the slices of one job."""

    dataset: DatasetView
    slices: SliceAssignments
    workers: InferenceWorkers
    avoidance: Avoidance
    failures: Counter[int] = field(default_factory=Counter)
    """Attempts that failed at a slice."""
    losses: Counter[int] = field(default_factory=Counter)
    """Attempts whose lease was lost while they computed a slice."""
    unusable: Counter[int] = field(default_factory=Counter)
    """How often no data node could provide a slice."""
    failed_at: defaultdict[int, set[PeerId]] = field(default_factory=lambda: defaultdict(set))
    """Workers by the slices at which they failed, were lost, or reported that nobody provides them."""
    barren: int = 0
    """Failed attempts since the last committed part."""
    _failed_starts: int = 0
    """Attempts that failed before any slice was assigned."""

    def count_failure(self, worker: InferenceWorker, held: Sequence[int], reason: str) -> str | None:
        """Count a failed attempt; return why the job fails, or None if its slices are assigned again.

        The first of the slices that it held is the one that it computed.
        """
        self.barren += 1
        if held and (failure := self.count_slice_failure(held[0], reason)) is not None:
            return failure
        if not worker.got_slice and self.slices.assigned_rows == 0:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILURES and not self.workers.working:
                return f"the executor failed {MAX_FAILURES} times before it asked for a slice; the last: {reason}"
        if self.barren >= MAX_BARREN and not self.slices.held and not self.workers.working:
            return f"{MAX_BARREN} attempts failed one after the other; the last: {reason}"
        return None

    def count_slice_failure(self, index: int, reason: str) -> str | None:
        """Count a failure at a slice; return why the job fails."""
        self.failures[index] += 1
        others = [worker.lease.peer for worker in self.workers if worker.works]
        if self.failures[index] < MAX_FAILURES or self.avoidance.may_be_at_fault(ROLE, self.failed_at[index], others):
            return None
        what = f"{self.dataset.describe(index)} of dataset {self.dataset.name!r}"
        return f"{what} failed {MAX_FAILURES} times; the last: {reason}"

    def count_loss(self, index: int, reason: str) -> str | None:
        """Count a worker that was lost while it computed a slice; return why the job fails."""
        self.losses[index] += 1
        if self.losses[index] <= LOST_SLICE.times:
            return None
        what = self.dataset.describe(index)
        return f"{self.losses[index]} workers were lost while they computed {what}; the last: {reason}"

    def count_unusable(self, task: TaskRef, index: int, providers: Mapping[str, str]) -> str | None:
        """Count that no data node could provide a slice, each with its reason; return why the job fails."""
        self.unusable[index] += 1
        self.failed_at[index].add(task.lease.peer)
        if self.unusable[index] < MAX_FAILURES or self._may_take_other(index):
            return None
        reasons = "; ".join(f"data node {peer}: {reason}" for peer, reason in providers.items())
        what = f"{self.dataset.describe(index)} of dataset {self.dataset.name!r}"
        return f"{what} is not to be had: {reasons}; restore it there, then resume the job"

    def avoid_worker(self, task: TaskRef, held: Sequence[int], reason: str, now: float) -> Effects:
        """Assign the slice that was computed to others from now on; exclude a worker at which attempts fail in a row.

        Each attempt counts, also at the same slice: others compute that one if there are any.
        """
        peer = task.lease.peer
        for index in held[:1]:
            self.failed_at[index].add(peer)
        return self.avoidance.record_failure(ROLE, peer, None, reason, now)

    # ---------------------------------------------------------------------------------------------------- who is next

    def may_take(self, task: TaskRef, index: int) -> bool:
        """Return whether a slice may be assigned to a worker: others that did not fail at it come first."""
        return not self._avoids(task.lease.peer, index) or not self._is_other(index)

    def _may_take_other(self, index: int) -> bool:
        """Return whether there is a worker that has not failed at a slice, beside one at most that has."""
        return self._is_other(index) and len(self.failed_at[index]) < 2

    def _is_other(self, index: int) -> bool:
        return any(worker.works and not self._avoids(worker.lease.peer, index) for worker in self.workers)

    def _avoids(self, peer: PeerId, index: int) -> bool:
        if peer in self.failed_at.get(index, ()):
            return True
        return self.failures[index] >= MAX_FAILURES and not self.avoidance.is_proven(ROLE, peer)
