"""The attempts at tasks of one job: which runs on which lease, and which are over. Pure.

Whatever a peer says is looked up here first, so that an operator hears only of its running attempts. Called by
`runner`.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass, field

from hypha_proto.ids import PeerId
from hypha_scheduler.jobs.task_graph import TaskError
from hypha_scheduler.strategies.base import Lease, TaskRef


@dataclass(slots=True)
class TaskRegister:
    """Attempts at tasks, at most one at a time on each lease."""

    _running: dict[uuid.UUID, TaskRef] = field(default_factory=dict)
    """By lease."""
    _dispatches: defaultdict[uuid.UUID, int] = field(default_factory=lambda: defaultdict(int))
    """Number of dispatches on each lease."""
    _peers: defaultdict[PeerId, set[uuid.UUID]] = field(default_factory=lambda: defaultdict(set))
    """Leases with a running task, by peer."""
    _involved: set[PeerId] = field(default_factory=set)

    def start(self, task: TaskRef) -> int:
        """Record that a task is dispatched; return the number of earlier dispatches on its lease.

        Raises:
            TaskError: another task runs on the lease.
        """
        lease = task.lease
        if lease.id in self._running:
            raise TaskError(f"task {task.name} cannot start: {self._running[lease.id].name} runs on its lease")
        self._running[lease.id] = task
        self._peers[lease.peer].add(lease.id)
        self._involved.add(lease.peer)
        self._dispatches[lease.id] += 1
        return self._dispatches[lease.id] - 1

    def end(self, task: TaskRef) -> bool:
        """Record the end of a task; return whether it was running."""
        if self._running.get(task.lease.id) != task:
            return False
        del self._running[task.lease.id]
        self._peers[task.lease.peer].discard(task.lease.id)
        return True

    def on_lease(self, lease: uuid.UUID, peer: PeerId, dispatch: int | None = None) -> TaskRef | None:
        """Return the task that runs on a lease of `peer`; None if it is of another dispatch than the one named."""
        task = self._running.get(lease)
        if task is None or task.lease.peer != peer:
            return None
        return task if dispatch is None or dispatch == self._dispatches[lease] - 1 else None

    def of_peer(self, peer: PeerId, lease: uuid.UUID | None = None) -> TaskRef | None:
        """Return the running task of a peer that names its lease, or its only one if it names none."""
        if lease is not None:
            return self.on_lease(lease, peer)
        leases = self._peers.get(peer, set())
        return self._running[next(iter(leases))] if len(leases) == 1 else None

    def involves(self, peer: PeerId) -> bool:
        """Return whether a task was ever dispatched to a peer."""
        return peer in self._involved

    def has_task(self, lease: uuid.UUID) -> bool:
        """Return whether a task runs on a lease."""
        return lease in self._running

    def runs(self, task: TaskRef) -> bool:
        """Return whether a task is running."""
        return self._running.get(task.lease.id) == task

    def on(self, lease: Lease) -> TaskRef | None:
        """Return the task that runs on a lease."""
        return self._running.get(lease.id)

    @property
    def running(self) -> tuple[TaskRef, ...]:
        """All running tasks."""
        return tuple(self._running.values())
