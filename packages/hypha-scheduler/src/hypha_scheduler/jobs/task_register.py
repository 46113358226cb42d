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


@dataclass(frozen=True, slots=True)
class _Running:
    task: TaskRef
    dispatch: int
    """Number of earlier dispatches on the lease."""
    keep_lease: bool
    is_streamed: bool


@dataclass(slots=True)
class TaskRegister:
    """Attempts at tasks, at most one at a time on each lease."""

    _running: dict[uuid.UUID, _Running] = field(default_factory=dict)
    """By lease."""
    _used: defaultdict[uuid.UUID, set[tuple[str, int]]] = field(default_factory=lambda: defaultdict(set))
    """Names and attempts that were dispatched, by lease."""
    _earlier: defaultdict[uuid.UUID, int] = field(default_factory=lambda: defaultdict(int))
    """Number of dispatches before the adopted one, by lease."""
    _newest: defaultdict[uuid.UUID, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """Newest attempt at each task that was started by a stream, by lease."""
    _peers: defaultdict[PeerId, set[uuid.UUID]] = field(default_factory=lambda: defaultdict(set))
    """Leases with a running task, by peer."""
    _involved: set[PeerId] = field(default_factory=set)
    _former: dict[uuid.UUID, TaskRef] = field(default_factory=dict)
    """Task that ended last, by lease."""

    def start(self, task: TaskRef, *, keep_lease: bool = False, is_streamed: bool = False) -> int:
        """Record that a task is dispatched; return the number of earlier dispatches on its lease.

        Args:
            is_streamed: whether its lease's stream tells of it (`task_streams`), and no other message; then attempts at
                it grow on a lease, which always stays when it ends.

        Raises:
            TaskError: another task runs on the lease, or this attempt at the task was dispatched on it before.
        """
        lease = task.lease
        if lease.id in self._running:
            raise TaskError(f"task {task.name} cannot start: {self._running[lease.id].task.name} runs on its lease")
        used = self._used[lease.id]
        if (task.name, task.attempt) in used:
            why = f"attempt {task.attempt} ran on its lease before; give each attempt a number of its own"
            raise TaskError(f"task {task.name} cannot start: {why}")
        if is_streamed:
            self._check_newest(task)
        number = len(used) + self._earlier[lease.id]
        used.add((task.name, task.attempt))
        self._running[lease.id] = _Running(task, number, keep_lease or is_streamed, is_streamed)
        self._peers[lease.peer].add(lease.id)
        self._involved.add(lease.peer)
        return number

    def _check_newest(self, task: TaskRef) -> None:
        newest = self._newest[task.lease.id]
        if task.attempt <= newest.get(task.name, -1):
            why = f"attempt {newest[task.name]} ran on its lease before; attempts at a task grow"
            raise TaskError(f"task {task.name} cannot start as attempt {task.attempt}: {why}")
        newest[task.name] = task.attempt

    def adopt(self, task: TaskRef, dispatch: int, *, keep_lease: bool) -> None:
        """Record a task that an earlier run of the scheduler has dispatched; `dispatch` is what `start` returned."""
        lease = task.lease
        self._used[lease.id].add((task.name, task.attempt))
        self._earlier[lease.id] = dispatch
        self._running[lease.id] = _Running(task, dispatch, keep_lease, is_streamed=False)
        self._peers[lease.peer].add(lease.id)
        self._involved.add(lease.peer)

    def end(self, task: TaskRef) -> bool:
        """Record the end of a task; return whether it was running."""
        if not self.runs(task):
            return False
        del self._running[task.lease.id]
        self._peers[task.lease.peer].discard(task.lease.id)
        self._former[task.lease.id] = task
        return True

    def dispatched(self, lease: uuid.UUID, peer: PeerId, dispatch: int | None) -> TaskRef | None:
        """Return the task that runs on a lease of `peer` if it is of this dispatch; None means the first one."""
        running = self._running.get(lease)
        if running is None or running.task.lease.peer != peer or running.is_streamed:
            return None
        if running.dispatch != (dispatch or 0):
            return None
        return running.task

    def of_peer(self, peer: PeerId, lease: uuid.UUID | None = None) -> TaskRef | None:
        """Return the running task of a peer that names its lease, or its only one if it names none."""
        if lease is None:
            leases = self._peers.get(peer, set())
            return self._running[next(iter(leases))].task if len(leases) == 1 else None
        running = self._running.get(lease)
        return None if running is None or running.task.lease.peer != peer else running.task

    def streamed_on(self, peer: PeerId) -> TaskRef | None:
        """Return any of the running tasks of a peer that its stream tells of."""
        running = (self._running[lease] for lease in sorted(self._peers.get(peer, ())))
        return next((found.task for found in running if found.is_streamed), None)

    def former(self, peer: PeerId, lease: uuid.UUID | None) -> TaskRef | None:
        """Return the task of a peer that ended last on a lease that it names."""
        task = None if lease is None else self._former.get(lease)
        return None if task is None or task.lease.peer != peer else task

    def involves(self, peer: PeerId) -> bool:
        """Return whether a task was ever dispatched to a peer."""
        return peer in self._involved

    def runs_on(self, peer: PeerId) -> bool:
        """Return whether a task runs on a peer."""
        return bool(self._peers.get(peer))

    def has_task(self, lease: uuid.UUID) -> bool:
        """Return whether a task runs on a lease."""
        return lease in self._running

    def runs(self, task: TaskRef) -> bool:
        """Return whether a task is running."""
        running = self._running.get(task.lease.id)
        return running is not None and running.task == task

    def keeps_lease(self, task: TaskRef) -> bool:
        """Return whether the lease of a running task stays when the task ends by itself."""
        running = self._running.get(task.lease.id)
        return running is not None and running.task == task and running.keep_lease

    def is_streamed(self, task: TaskRef) -> bool:
        """Return whether a task is running that its lease's stream tells of."""
        running = self._running.get(task.lease.id)
        return running is not None and running.task == task and running.is_streamed

    def dispatches_before(self, task: TaskRef) -> int:
        """Return the number of dispatches on the lease of a running task before its own."""
        return self._running[task.lease.id].dispatch

    def dispatch_of(self, task: TaskRef) -> int | None:
        """Return the number by which a running task was dispatched; None if its dispatch stated none."""
        running = self._running[task.lease.id]
        return running.dispatch if running.keep_lease or running.dispatch else None

    def on(self, lease: Lease) -> TaskRef | None:
        """Return the task that runs on a lease."""
        running = self._running.get(lease.id)
        return None if running is None else running.task

    @property
    def running(self) -> tuple[TaskRef, ...]:
        """All running tasks."""
        return tuple(running.task for running in self._running.values())
