"""States of the instances of tasks, and which of them can start. Pure.

An instance waits until all results that its task uses exist, is ready until it is started, runs, and is finished. A
result that is lost takes what is ready back to waiting, and its task to be run again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.tasks.graph import GraphTask, Key, Result, Role, TaskGraph


class Phase(Enum):
    """State of an instance."""

    WAITING = "waiting"
    """Results that it uses do not exist."""
    READY = "ready"
    RESTING = "resting"
    """It is ready, and started again after a pause."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Instance:
    """One instance of a task."""

    name: str
    task: GraphTask
    index: int
    attempt: int
    """Number of the next attempt."""
    phase: Phase = Phase.WAITING
    attempts: int = 0
    failures: int = 0
    """Attempts that count as failed."""
    losses: int = 0
    """Attempts that ended with their lease, or were given back."""
    lacks: int = 0
    """Attempts that could not be given a result."""
    worker: PeerId | None = None
    """Where it finished."""
    failed_at: set[PeerId] = field(default_factory=set)
    """Workers at which attempts failed or were lost; further ones start elsewhere if they can."""
    seconds: float = 0.0
    """Duration of the attempt that finished."""

    @property
    def order(self) -> int:
        """Position among all instances: smaller ones are started first."""
        return self.task.first + self.index

    @property
    def has_used_retries(self) -> bool:
        """Whether the job fails unless its failures are those of its workers."""
        return self.failures > self.task.table.retries


@dataclass(slots=True)
class Instances:
    """All instances of a job."""

    graph: TaskGraph
    on_ready: Callable[[Instance], None]
    """Called with an instance that has become ready."""
    first_attempt: int = 1
    by_name: dict[str, Instance] = field(default_factory=dict)
    ready: Counter[Role] = field(default_factory=Counter)
    """Number of ready instances."""
    running: Counter[Role] = field(default_factory=Counter)
    unfinished: int = 0
    _unfinished: Counter[str] = field(default_factory=Counter)
    """By task."""
    _users: Counter[Result] = field(default_factory=Counter)
    """Number of tasks that use a result and have not finished."""
    _made: Counter[Result] = field(default_factory=Counter)
    """Number of instances whose output exists."""
    _missing: dict[str, int] = field(default_factory=dict)
    """Number of results that a task uses and that do not all exist."""

    def __post_init__(self) -> None:
        for task in self.graph.tasks.values():
            self._missing[task.name] = len(task.inputs)
            self._unfinished[task.name] = len(task.names)
            self._users.update(task.inputs)
            self.unfinished += len(task.names)
            for index, name in enumerate(task.names):
                self.by_name[name] = Instance(name, task, index, self.first_attempt)

    def begin(self) -> None:
        """Make ready what waits for nothing."""
        for task in self.graph.tasks.values():
            self._wake(task)

    def of_task(self, name: str) -> Iterator[Instance]:
        """Yield the instances of a task."""
        return (self.by_name[instance] for instance in self.graph.tasks[name].names)

    # ------------------------------------------------------------------------------------------------------ instances

    def mark_running(self, instance: Instance) -> int:
        """Record that a ready instance starts; return the number of the attempt."""
        self._set(instance, Phase.RUNNING)
        instance.attempts += 1
        instance.attempt += 1
        return instance.attempt - 1

    def mark_finished(self, instance: Instance) -> bool:
        """Record that an instance has finished; return whether it was the last of its task."""
        self._set(instance, Phase.FINISHED)
        return not self._unfinished[instance.task.name]

    def run_again(self, instance: Instance, *, after_pause: bool = False) -> None:
        """Take an instance back: it waits, or is ready at once or, with `after_pause`, when `end_pause` is called."""
        if self._missing[instance.task.name]:
            self._set(instance, Phase.WAITING)
        elif after_pause:
            self._set(instance, Phase.RESTING)
        else:
            self._set(instance, Phase.READY)

    def end_pause(self, instance: Instance) -> None:
        """Make an instance ready that rests."""
        if instance.phase is Phase.RESTING:
            self._set(instance, Phase.READY)

    def _set(self, instance: Instance, phase: Phase) -> None:
        before, instance.phase = instance.phase, phase
        if before is phase:
            return
        role, name = instance.task.role, instance.task.name
        for counted, counter in ((Phase.READY, self.ready), (Phase.RUNNING, self.running)):
            counter[role] += (phase is counted) - (before is counted)
        change = (before is Phase.FINISHED) - (phase is Phase.FINISHED)
        unfinished = self._unfinished[name]
        self._unfinished[name] += change
        self.unfinished += change
        for result in instance.task.inputs if change else ():
            self._users[result] += (self._unfinished[name] > 0) - (unfinished > 0)
        if phase is Phase.READY:
            self.on_ready(instance)

    # -------------------------------------------------------------------------------------------------------- results

    def add_output(self, instance: Instance, output: str) -> None:
        """Record that an output exists."""
        result = (instance.task.name, output)
        self._made[result] += 1
        if self._made[result] == len(instance.task.names):
            for task in self.graph.consumers.get(result, ()):
                self._missing[task.name] -= 1
                self._wake(task)

    def remove_output(self, instance: Instance, output: str) -> None:
        """Record that an output exists no longer."""
        result = (instance.task.name, output)
        self._made[result] -= 1
        if self._made[result] == len(instance.task.names) - 1:
            for task in self.graph.consumers.get(result, ()):
                self._missing[task.name] += 1
                if self._missing[task.name] == 1:
                    self._put_back(task)

    def is_used(self, result: Result) -> bool:
        """Return whether an instance that has not finished uses a result."""
        return self._users[result] > 0

    def is_complete(self, result: Result) -> bool:
        """Return whether every instance's output exists."""
        return self._made[result] == len(self.graph.tasks[result[0]].names)

    def keys(self, result: Result) -> Iterator[Key]:
        """Yield the outputs that a result consists of, in the order of the instances."""
        task, output = result
        return ((name, output) for name in self.graph.tasks[task].names)

    def _wake(self, task: GraphTask) -> None:
        if self._missing[task.name]:
            return
        for instance in self.of_task(task.name):
            if instance.phase is Phase.WAITING:
                self._set(instance, Phase.READY)

    def _put_back(self, task: GraphTask) -> None:
        for instance in self.of_task(task.name):
            if instance.phase in (Phase.READY, Phase.RESTING):
                self._set(instance, Phase.WAITING)
