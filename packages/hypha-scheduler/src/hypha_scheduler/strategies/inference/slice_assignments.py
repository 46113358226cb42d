"""Assignments of slices: each slice is AVAILABLE, ASSIGNED to an attempt at a task, or COMMITTED, which it stays. Pure.

Work may be done twice, but a slice is committed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypha_scheduler.strategies.base import TaskRef


@dataclass(slots=True)
class SliceAssignments:
    """State of every slice of one job."""

    rows: Sequence[int]
    """Number of rows of each slice."""
    committed: set[int]
    """Slices that are committed."""
    _queue: deque[int] = field(init=False)
    """Slices that are available, in the order in which they are assigned."""
    _delayed: dict[int, float] = field(default_factory=dict)
    """Available slices that are not assigned before a time."""
    held: dict[TaskRef, list[int]] = field(default_factory=dict)
    """Assigned slices by attempt, the one assigned first at the front."""
    assigned_rows: int = 0
    """Rows of all assignments so far; more than the dataset has where work was done again."""

    def __post_init__(self) -> None:
        self._queue = deque(index for index in range(len(self.rows)) if index not in self.committed)

    @property
    def unfinished(self) -> int:
        """Number of slices that are not committed."""
        return len(self.rows) - len(self.committed)

    def held_by(self, task: TaskRef) -> tuple[int, ...]:
        """Return the slices that are assigned to an attempt, the one assigned first at the front."""
        return tuple(self.held.get(task, ()))

    def assign(self, task: TaskRef, now: float, may_take: Callable[[int], bool] = lambda _index: True) -> int | None:
        """Assign the next available slice that an attempt may take; None if there is none now."""
        for index in [index for index, at in self._delayed.items() if at <= now]:
            del self._delayed[index]
            self._queue.appendleft(index)
        found = next(filter(may_take, self._queue), None)
        if found is None:
            return None
        self._queue.remove(found)
        self.held.setdefault(task, []).append(found)
        self.assigned_rows += self.rows[found]
        return found

    def next_available_at(self) -> float | None:
        """Return when the next delayed slice can be assigned, or None if none is delayed."""
        return min(self._delayed.values(), default=None)

    def commit(self, task: TaskRef, index: int) -> bool:
        """Commit a slice that is assigned to an attempt; return False, and change nothing, if it is not."""
        is_held = self._take(task, index)
        if is_held:
            self.committed.add(index)
        return is_held

    def give_back(self, task: TaskRef, index: int, until: float | None = None) -> bool:
        """Make an assigned slice available, at `until` if that is given; return False if it is not assigned so."""
        if not self._take(task, index):
            return False
        if until is None:
            self._queue.appendleft(index)
        else:
            self._delayed[index] = until
        return True

    def release(self, task: TaskRef) -> tuple[int, ...]:
        """Make the slices of an attempt that has ended available, to be assigned first; return them."""
        held = self.held.pop(task, [])
        self._queue.extendleft(reversed(held))
        return tuple(held)

    def _take(self, task: TaskRef, index: int) -> bool:
        """Take a slice from an attempt; return False if it is not assigned to it."""
        held = self.held.get(task, [])
        if index not in held:
            return False
        held.remove(index)
        if not held:
            del self.held[task]
        return True
