"""The attempts at tasks of one job: which runs on which lease, how far it is, and which ended last. No I/O.

Whatever a peer says is looked up here first, so that an operator hears only of its running attempts.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass, field

import anyio

from hypha_proto.commands import CommandAnswer
from hypha_proto.ids import PeerId
from hypha_proto.tasks import TaskSpec
from hypha_scheduler.jobs.task_graph import TaskError
from hypha_scheduler.strategies.base import TaskRef


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt at a task that runs on a lease, or is about to."""

    task: TaskRef
    spec: TaskSpec | None
    """None for one that an earlier run of the scheduler has started, which has neither resources nor outputs."""
    is_stopping: bool = False
    """Whether its worker was told to end it."""
    confirmed: anyio.Event = field(default_factory=anyio.Event)
    """Set when its worker has confirmed the start, or it is over."""
    over: anyio.Event = field(default_factory=anyio.Event)
    commands: int = 0
    """Commands that were sent to it."""
    answers: dict[int, CommandAnswer] = field(default_factory=dict)
    """Answers to commands that nobody has taken yet."""
    answered: anyio.Event = field(default_factory=anyio.Event)
    """Set with each answer, then replaced."""

    def add_answer(self, answer: CommandAnswer) -> None:
        """Keep the answer to a command until it is taken; ignore one to a command that was not sent."""
        if answer.number < self.commands:
            self.answers[answer.number] = answer
            self.answered.set()
            self.answered = anyio.Event()

    def end(self) -> None:
        """Wake everybody who waits for something of it."""
        self.over.set()
        self.confirmed.set()
        self.answered.set()


@dataclass(slots=True)
class Attempts:
    """Attempts at tasks, at most one at a time on each lease."""

    _running: dict[uuid.UUID, Attempt] = field(default_factory=dict)
    """By lease."""
    _newest: defaultdict[uuid.UUID, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """Newest attempt at each task, by lease."""
    _peers: defaultdict[PeerId, set[uuid.UUID]] = field(default_factory=lambda: defaultdict(set))
    """Leases with a running attempt, by peer."""
    _involved: set[PeerId] = field(default_factory=set)
    _former: dict[uuid.UUID, TaskRef] = field(default_factory=dict)
    """Attempt that ended last, by lease."""

    def start(self, task: TaskRef, spec: TaskSpec) -> Attempt:
        """Add an attempt that is about to start.

        Raises:
            TaskError: another one runs on the lease, or this one is not newer than all before it there.
        """
        if (other := self._running.get(task.lease.id)) is not None:
            raise TaskError(f"task {task.name} cannot start: {other.task.name} runs on its lease")
        newest = self._newest[task.lease.id].get(task.name, -1)
        if task.attempt <= newest:
            why = f"attempt {newest} ran on its lease before; attempts at a task grow"
            raise TaskError(f"task {task.name} cannot start as attempt {task.attempt}: {why}")
        return self._add(Attempt(task, spec))

    def adopt(self, task: TaskRef) -> None:
        """Add an attempt that an earlier run of the scheduler has started, and its worker has confirmed."""
        self._add(Attempt(task, spec=None)).confirmed.set()

    def _add(self, attempt: Attempt) -> Attempt:
        task = attempt.task
        self._newest[task.lease.id][task.name] = task.attempt
        self._running[task.lease.id] = attempt
        self._peers[task.lease.peer].add(task.lease.id)
        self._involved.add(task.lease.peer)
        return attempt

    def end(self, task: TaskRef) -> bool:
        """Record the end of an attempt; return whether it was running."""
        attempt = self.get(task)
        if attempt is None:
            return False
        del self._running[task.lease.id]
        self._peers[task.lease.peer].discard(task.lease.id)
        self._former[task.lease.id] = task
        attempt.end()
        return True

    def get(self, task: TaskRef) -> Attempt | None:
        """Return an attempt if it runs."""
        attempt = self._running.get(task.lease.id)
        return attempt if attempt is not None and attempt.task == task else None

    def runs(self, task: TaskRef) -> bool:
        """Return whether an attempt runs."""
        return self.get(task) is not None

    def on(self, lease: uuid.UUID) -> Attempt | None:
        """Return the attempt that runs on a lease."""
        return self._running.get(lease)

    def of_peer(self, peer: PeerId, lease: uuid.UUID | None) -> TaskRef | None:
        """Return the attempt that runs on a lease of a peer."""
        attempt = None if lease is None else self._running.get(lease)
        return attempt.task if attempt is not None and attempt.task.lease.peer == peer else None

    def any_on(self, peer: PeerId) -> TaskRef | None:
        """Return one of the attempts that run on a peer."""
        leases = self._peers.get(peer)
        return self._running[min(leases)].task if leases else None

    def former(self, peer: PeerId, lease: uuid.UUID | None) -> TaskRef | None:
        """Return the attempt that ended last on a lease of a peer."""
        task = None if lease is None else self._former.get(lease)
        return task if task is not None and task.lease.peer == peer else None

    def involves(self, peer: PeerId) -> bool:
        """Return whether an attempt was ever started on a peer."""
        return peer in self._involved

    def runs_on(self, peer: PeerId) -> bool:
        """Return whether an attempt runs on a peer."""
        return bool(self._peers.get(peer))
