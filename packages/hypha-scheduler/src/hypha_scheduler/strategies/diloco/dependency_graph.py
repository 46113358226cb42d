"""Dependency graph of a DiLoCo job's tasks: the inputs that they depend on, and their states. Pure.

There is one aggregate task and many train tasks; some are added and replaced. Called by `running_job`.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import TaskState


@dataclass(frozen=True, slots=True)
class TaskOfLease:
    """Task that runs on one lease."""

    name: str
    role: str
    """Class of the executor: ``train`` or ``aggregate``."""
    peer: PeerId
    lease: uuid.UUID
    inputs: frozenset[str] = frozenset()
    """Names of results that must exist before it can start."""
    outputs: frozenset[str] = frozenset()
    """Names of results that exist once it is running."""


class TaskError(Exception):
    """Invalid graph or invalid change of a task's state."""


class DependencyGraph:
    """Tasks of one job and their states."""

    def __init__(self) -> None:
        self._tasks: dict[str, TaskOfLease] = {}
        self._states: dict[str, TaskState] = {}
        self._results: set[str] = set()

    def add(self, task: TaskOfLease) -> None:
        """Add a waiting task; a lease takes another one when that before has ended.

        Raises:
            TaskError: there is a task with its name, or one that has not ended on its lease.
        """
        before = self.of_lease(task.lease)
        if task.name in self._tasks or (before is not None and not self._states[before.name].has_ended):
            raise TaskError(f"task {task.name}: two tasks have one name or one lease")
        self._tasks[task.name] = task
        self._states[task.name] = TaskState.WAITING

    def find(self, name: str) -> TaskOfLease:
        """Return the task of a name.

        Raises:
            KeyError: there is none.
        """
        return self._tasks[name]

    def of_lease(self, lease: uuid.UUID) -> TaskOfLease | None:
        """Return the newest task of a lease, or None."""
        return next((task for task in reversed(self._tasks.values()) if task.lease == lease), None)

    def provide(self, result: str) -> None:
        """Record that a result exists."""
        self._results.add(result)

    def withdraw(self, result: str) -> None:
        """Record that a result exists no more: tasks that need it wait."""
        self._results.discard(result)

    def ready(self) -> tuple[TaskOfLease, ...]:
        """Return the waiting tasks whose inputs all exist."""
        return tuple(
            task
            for name, task in self._tasks.items()
            if self._states[name] is TaskState.WAITING and task.inputs <= self._results
        )

    def mark_running(self, name: str) -> None:
        """Record that a ready task was dispatched, and that its outputs exist.

        Raises:
            TaskError: the task is not ready.
        """
        if self._tasks[name] not in self.ready():
            raise TaskError(f"task {name} is {self._states[name].value} and cannot start")
        self._states[name] = TaskState.RUNNING
        self._results |= self._tasks[name].outputs

    def mark_ended(self, name: str, state: TaskState) -> bool:
        """Record the final state of a task; only the first one counts. Return whether this was the first.

        Raises:
            TaskError: `state` is not final.
        """
        if not state.has_ended:
            raise TaskError(f"{state.value} is not an ending")
        if self._states[name].has_ended:
            return False
        self._states[name] = state
        return True

    def running(self) -> tuple[TaskOfLease, ...]:
        """Return the tasks that are running."""
        return tuple(task for name, task in self._tasks.items() if self._states[name] is TaskState.RUNNING)
