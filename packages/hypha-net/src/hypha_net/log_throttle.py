"""What repeats itself is told once, and then now and then: a peer that stays refused, a gateway that stays away.

Before this room: `security` and `gateways`, which meet such things every few seconds. After it: the log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

import trio

QUIET: Final = 60.0
"""Seconds for which the same thing is not told again."""
MAX_KEPT: Final = 1024
"""Things that are remembered as told; the one that was longest not met goes first."""
REMINDERS: Final = (60.0, 300.0, 900.0, 3600.0)
"""Seconds from one line on something that stays away to the next; the last repeats."""


class LogThrottle:
    """Tells each thing at most once in `QUIET` seconds, with how often it came meanwhile."""

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._told: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()
        """When it was last told, and how often it came since."""

    def __len__(self) -> int:
        return len(self._told)

    def suppressed_count(self, key: Hashable) -> int | None:
        """It happened: none if it is not to be told now, else how often it happened untold since the last time."""
        now = self._clock()
        at, untold = self._told.pop(key, (None, 0))
        if at is not None and now - at < QUIET:
            self._told[key] = (at, untold + 1)
            return None
        while len(self._told) >= MAX_KEPT:
            self._told.popitem(last=False)
        self._told[key] = (now, 0)
        return untold


class OutageLogSchedule:
    """Says when to tell that something is still away: at once, then after longer and longer intervals."""

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        """It is away from now on."""
        self._clock = clock
        self._began = clock()
        self._ways: dict[str, tuple[int, float]] = {}
        """How often it was told, and when it is again; by way, as one may come between the lines on the other."""

    @property
    def seconds(self) -> float:
        """How long it has been away."""
        return self._clock() - self._began

    def is_due(self, way: str) -> bool:
        """Whether to tell now that it is away in this `way`, of which the caller has few."""
        now = self._clock()
        count, due = self._ways.get(way, (0, now))
        if now < due:
            return False
        self._ways[way] = (count + 1, now + REMINDERS[min(count, len(REMINDERS) - 1)])
        return True
