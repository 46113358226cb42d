"""What a job is made of: tasks, the results they depend on, and how each stands. Pure, of no strategy in particular.

A strategy names the tasks and what they need; the shell dispatches the ones that are ready, says which results exist,
and tells how executors ended. DiLoCo's are one aggregate and many train tasks; another strategy has others.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from hypha_proto.ids import PeerId


class TaskState(Enum):
    """How a task stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        """Whether nothing more happens to the task."""
        return self in (TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED)


@dataclass(frozen=True, slots=True)
class Task:
    """One dispatch: what runs, on which lease."""

    name: str
    role: str
    """What kind of executor it inputs: ``train``, ``aggregate``."""
    peer: PeerId
    lease: uuid.UUID
    inputs: frozenset[str] = frozenset()
    """Names of results that must exist before it can start."""
    outputs: frozenset[str] = frozenset()
    """Names of results that exist once it runs."""


class TaskError(Exception):
    """A task is told something that does not fit its state."""


class TaskGraph:
    """The tasks of one job."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        """All tasks wait; no result exists.

        Raises:
            TaskError: two tasks have one name or one lease, or needs form a circle among the tasks themselves.
        """
        listed = list(tasks)
        self._tasks = {task.name: task for task in listed}
        self._states = dict.fromkeys(self._tasks, TaskState.WAITING)
        self._results: set[str] = set()
        if len(self._tasks) != len(listed) or len({task.lease for task in listed}) != len(listed):
            raise TaskError("two tasks have one name or one lease")
        self._check_order(listed)

    def _check_order(self, tasks: list[Task]) -> None:
        made_here = frozenset().union(*(task.outputs for task in tasks))
        known: frozenset[str] = frozenset()
        left = tasks
        while left:
            ready = [task for task in left if task.inputs & made_here <= known]
            if not ready:
                raise TaskError(f"tasks wait for each other: {', '.join(sorted(task.name for task in left))}")
            known = known.union(*(task.outputs for task in ready))
            left = [task for task in left if task not in ready]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every task."""
        return tuple(self._tasks.values())

    def state(self, name: str) -> TaskState:
        """How a task stands."""
        return self._states[name]

    def of_lease(self, lease: uuid.UUID) -> Task | None:
        """The task that runs on a lease."""
        return next((task for task in self._tasks.values() if task.lease == lease), None)

    def provide(self, result: str) -> None:
        """A result exists now."""
        self._results.add(result)

    def ready(self) -> tuple[Task, ...]:
        """Tasks that wait for nothing any more."""
        return tuple(
            task
            for name, task in self._tasks.items()
            if self._states[name] is TaskState.WAITING and task.inputs <= self._results
        )

    def start(self, name: str) -> None:
        """A ready task was dispatched; what it gives exists now.

        Raises:
            TaskError: it is not ready.
        """
        if self._tasks[name] not in self.ready():
            raise TaskError(f"task {name} is {self._states[name].value} and cannot start")
        self._states[name] = TaskState.RUNNING
        self._results |= self._tasks[name].outputs

    def end(self, name: str, state: TaskState) -> bool:
        """A task is over; the first ending counts. Returns whether this was it.

        Raises:
            TaskError: `state` is not an ending.
        """
        if not state.over:
            raise TaskError(f"{state.value} is not an ending")
        if self._states[name].over:
            return False
        self._states[name] = state
        return True

    def running(self) -> tuple[Task, ...]:
        """Tasks whose executors run."""
        return tuple(task for name, task in self._tasks.items() if self._states[name] is TaskState.RUNNING)

    @property
    def over(self) -> bool:
        """Whether every task has ended."""
        return all(state.over for state in self._states.values())
