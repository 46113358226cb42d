"""Backoff with jitter, shared by the retry loops of all daemons.

`jittered` gives the pause of a loop that retries one thing (gateways, relay reservations); `Backoff` remembers failures
of many things by key (peers and addresses to dial, peers to identify). Jitter keeps nodes that failed together from
retrying together. `retries` says how long work that failed is tried.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import trio

JITTER: Final = (0.6, 1.4)
"""Bounds of the factor by which each pause is multiplied."""
FORGET_AFTER: Final = 60.0
"""Seconds after which a failure is forgotten."""
MAX_KEPT: Final = 4096

K = TypeVar("K")


def jittered(pauses: Sequence[float], failures: int) -> float:
    """Return the pause in seconds after `failures` earlier failures, with jitter; the last of `pauses` repeats."""
    return pauses[min(failures, len(pauses) - 1)] * random.uniform(*JITTER)


class Backoff(Generic[K]):
    """Backoff by key; keeps at most `MAX_KEPT` keys and drops the one whose last failure is oldest."""

    def __init__(self, pauses: Sequence[float], clock: Callable[[], float] = trio.current_time) -> None:
        self._pauses = pauses
        self._clock = clock
        self._failures: OrderedDict[K, tuple[int, float, float]] = OrderedDict()
        """Number of failures, time of the last, and end of the pause."""

    def __len__(self) -> int:
        return len(self._failures)

    def record_failure(self, key: K) -> None:
        """Count a failure and begin a pause."""
        count, last, _ = self._failures.pop(key, (0, 0.0, 0.0))
        now = self._clock()
        count = count if now - last < FORGET_AFTER else 0
        while len(self._failures) >= MAX_KEPT:
            self._failures.popitem(last=False)
        self._failures[key] = (count + 1, now, now + jittered(self._pauses, count))

    def record_success(self, key: K) -> None:
        """Forget the failures of `key`."""
        self._failures.pop(key, None)

    def remaining(self, key: K) -> float:
        """Return the seconds left of the pause; 0 when there is none."""
        return max(0.0, self._failures.get(key, (0, 0.0, 0.0))[2] - self._clock())

    def last_failure_at(self, key: K) -> float:
        """Return when `key` last failed, by the clock; 0 if it has not failed within `FORGET_AFTER` seconds."""
        at = self._failures.get(key, (0, 0.0, 0.0))[1]
        return at if self._clock() - at < FORGET_AFTER else 0.0
