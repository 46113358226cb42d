"""The attempts at tasks of one job: which runs on which lease, how far it is, and which is the newest. No I/O.

Whatever a peer says is looked up here first, so that an operator hears only of its running attempts.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass, field

import anyio
import msgspec

from hypha_proto.attempt_id import AttemptId
from hypha_proto.commands import CommandAnswer
from hypha_proto.ids import PeerId
from hypha_proto.tasks import TaskSpec
from hypha_scheduler.jobs.resource_locations import peer_reason
from hypha_scheduler.strategies.base import TaskRef


class AttemptError(Exception):
    """An attempt cannot start; an error of the strategy."""


@dataclass(slots=True, eq=False)
class Attempt:
    """An attempt at a task that runs on a lease, or is about to."""

    task: TaskRef
    spec: TaskSpec | None
    """None for one that an earlier run of the scheduler has started, which has neither resources nor outputs."""
    is_stopping: bool = False
    """Whether its worker was told to end it."""
    confirmed: anyio.Event = field(default_factory=anyio.Event)
    """Set when its worker has confirmed the start, or it has ended."""
    ended: anyio.Event = field(default_factory=anyio.Event)
    commands: int = 0
    """Commands that were sent to it."""
    answers: dict[int, CommandAnswer] = field(default_factory=dict)
    """Answers to commands that nobody has taken yet."""
    answered: anyio.Event = field(default_factory=anyio.Event)
    """Set with each answer, then replaced."""

    def add_answer(self, answer: CommandAnswer) -> None:
        """Keep the answer to a command until it is taken; ignore one to a command that was not sent."""
        if answer.number < self.commands:
            self.answers[answer.number] = msgspec.structs.replace(answer, reason=peer_reason(answer.reason))
            self.answered.set()
            self.answered = anyio.Event()

    def end(self) -> None:
        """Wake everybody who waits for something of it."""
        self.ended.set()
        self.confirmed.set()
        self.answered.set()


@dataclass(slots=True)
class AttemptRegister:
    """Attempts at tasks, at most one at a time on each lease."""

    _running: dict[uuid.UUID, Attempt] = field(default_factory=dict)
    """By lease."""
    _newest: dict[str, TaskRef] = field(default_factory=dict)
    """Newest attempt at each task, which may have ended."""
    _peers: defaultdict[PeerId, set[uuid.UUID]] = field(default_factory=lambda: defaultdict(set))
    """Leases with a running attempt, by peer; none of a peer on which all have ended."""

    def register(self, task: TaskRef, spec: TaskSpec) -> Attempt:
        """Add an attempt that is about to start.

        Raises:
            AttemptError: another one runs on the lease, or this one is not newer than all others at its task.
        """
        if (other := self._running.get(task.lease.id)) is not None:
            raise AttemptError(f"task {task.name} cannot start: {other.task.name} runs on its lease")
        newest = self._newest.get(task.name)
        if newest is not None and task.attempt <= newest.attempt:
            why = f"attempt {newest.attempt} was started before; attempts at a task grow"
            raise AttemptError(f"task {task.name} cannot start as attempt {task.attempt}: {why}")
        return self._add(Attempt(task, spec))

    def adopt(self, task: TaskRef) -> None:
        """Add an attempt that an earlier run of the scheduler has started, and its worker has confirmed."""
        self._add(Attempt(task, spec=None)).confirmed.set()

    def _add(self, attempt: Attempt) -> Attempt:
        task = attempt.task
        self._newest[task.name] = task
        self._running[task.lease.id] = attempt
        self._peers[task.lease.peer].add(task.lease.id)
        return attempt

    def record_end(self, task: TaskRef) -> bool:
        """Record the end of an attempt; return whether it was running."""
        attempt = self.get(task)
        if attempt is None:
            return False
        del self._running[task.lease.id]
        self._peers[task.lease.peer].discard(task.lease.id)
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

    def started_at(self, peer: PeerId, named: AttemptId) -> TaskRef | None:
        """Return the attempt that a peer names, which may have ended.

        None if it was not started there, or a newer one at the task was started since.
        """
        task = self._newest.get(named.task)
        is_named = task is not None and task.attempt == named.number and task.lease.peer == peer
        return task if is_named else None

    def running_at(self, peer: PeerId, named: AttemptId) -> TaskRef | None:
        """Return the attempt that a peer names, if it runs there."""
        task = self.started_at(peer, named)
        return task if task is not None and self.runs(task) else None

    def any_on(self, peer: PeerId) -> TaskRef | None:
        """Return one of the attempts that run on a peer."""
        leases = self._peers.get(peer)
        return self._running[min(leases)].task if leases else None

    def involves(self, peer: PeerId) -> bool:
        """Return whether an attempt was ever started on a peer."""
        return peer in self._peers

    def runs_on(self, peer: PeerId) -> bool:
        """Return whether an attempt runs on a peer."""
        return bool(self._peers.get(peer))
