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
    _committed: set[int]
    _queue: deque[int] = field(init=False)
    """Slices that are available, in the order in which they are assigned."""
    _delayed: dict[int, float] = field(default_factory=dict)
    """Available slices that are not assigned before a time."""
    _held: dict[TaskRef, list[int]] = field(default_factory=dict)
    """Assigned slices by attempt, the one assigned first at the front."""
    assigned_rows: int = 0
    """Rows of all assignments so far; more than the dataset has where work was done again."""

    def __post_init__(self) -> None:
        self._queue = deque(index for index in range(len(self.rows)) if index not in self._committed)

    @property
    def unfinished(self) -> int:
        """Number of slices that are not committed."""
        return len(self.rows) - len(self._committed)

    @property
    def committed(self) -> int:
        """Number of committed slices."""
        return len(self._committed)

    @property
    def is_any_held(self) -> bool:
        """Return whether a slice is assigned to any attempt."""
        return bool(self._held)

    def is_committed(self, index: int) -> bool:
        """Return whether a slice is committed."""
        return index in self._committed

    def held_by(self, task: TaskRef) -> tuple[int, ...]:
        """Return the slices that are assigned to an attempt, the one assigned first at the front."""
        return tuple(self._held.get(task, ()))

    def is_held(self, task: TaskRef, index: int) -> bool:
        """Return whether a slice is assigned to an attempt."""
        return index in self._held.get(task, ())

    def assign(self, task: TaskRef, now: float, may_take: Callable[[int], bool] = lambda _index: True) -> int | None:
        """Assign the next available slice that an attempt may take; None if there is none now."""
        for index in [index for index, at in self._delayed.items() if at <= now]:
            del self._delayed[index]
            self._queue.appendleft(index)
        found = next(filter(may_take, self._queue), None)
        if found is None:
            return None
        self._queue.remove(found)
        self._held.setdefault(task, []).append(found)
        self.assigned_rows += self.rows[found]
        return found

    def next_available_at(self) -> float | None:
        """Return when the next delayed slice can be assigned, or None if none is delayed."""
        return min(self._delayed.values(), default=None)

    def commit(self, task: TaskRef, index: int) -> bool:
        """Commit a slice that is assigned to an attempt; return False, and change nothing, if it is not."""
        if not self.is_held(task, index):
            return False
        self._take(task, index)
        self._committed.add(index)
        return True

    def give_back(self, task: TaskRef, index: int, until: float | None = None) -> bool:
        """Make an assigned slice available, at `until` if that is given; return False if it is not assigned so."""
        if not self.is_held(task, index):
            return False
        self._take(task, index)
        if until is None:
            self._queue.appendleft(index)
        else:
            self._delayed[index] = until
        return True

    def release(self, task: TaskRef) -> tuple[int, ...]:
        """Make the slices of an attempt that has ended available, to be assigned first; return them."""
        held = self._held.pop(task, [])
        self._queue.extendleft(reversed(held))
        return tuple(held)

    def _take(self, task: TaskRef, index: int) -> None:
        held = self._held[task]
        held.remove(index)
        if not held:
            del self._held[task]
