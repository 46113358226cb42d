"""Limits repeated log lines: of a peer that is refused again and again, or a gateway that stays unreachable."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

import anyio

INTERVAL: Final = 60.0
"""Seconds for which the same message is suppressed, unless the caller chooses others."""
MAX_KEPT: Final = 1024
"""Keys that are remembered; the least recently used is dropped first."""
REMINDERS: Final = (60.0, 300.0, 900.0, 3600.0)
"""Seconds between two lines about one outage; the last repeats."""


class LogThrottle:
    """Logs each message once in `interval` seconds, with the number of those in between."""

    def __init__(self, clock: Callable[[], float] = anyio.current_time, interval: float = INTERVAL) -> None:
        self._clock = clock
        self._interval = interval
        self._logged: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()
        """When a key was last logged, and how often it was suppressed since."""

    def __len__(self) -> int:
        return len(self._logged)

    def log(self, logger: logging.Logger, level: int, key: Hashable, message: str, *arguments: object) -> None:
        """Log a message unless one of the same `key` was logged lately."""
        now = self._clock()
        at, suppressed = self._logged.pop(key, (None, 0))
        if at is not None and now - at < self._interval:
            self._logged[key] = (at, suppressed + 1)
            return
        while len(self._logged) >= MAX_KEPT:
            self._logged.popitem(last=False)
        self._logged[key] = (now, 0)
        more = f" ({suppressed} more since it was last logged)" if suppressed else ""
        logger.log(level, f"{message}%s", *arguments, more, stacklevel=2)


class OutageLogSchedule:
    """Decides when to log an outage: at once, then after growing intervals."""

    def __init__(self, clock: Callable[[], float] = anyio.current_time) -> None:
        """Begin the outage."""
        self._clock = clock
        self._began = clock()
        self._kinds: dict[str, tuple[int, float]] = {}
        """For each kind of failure: how often it was logged, and when it is due again. Kinds may alternate."""

    @property
    def seconds(self) -> float:
        """Duration of the outage so far."""
        return self._clock() - self._began

    def is_due(self, kind: str) -> bool:
        """Return whether to log a failure of this `kind` now; callers use few kinds."""
        now = self._clock()
        count, due = self._kinds.get(kind, (0, now))
        if now < due:
            return False
        self._kinds[kind] = (count + 1, now + REMINDERS[min(count, len(REMINDERS) - 1)])
        return True
