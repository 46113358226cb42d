"""How long to leave alone what has failed: longer with each failure, another time on each node, until a success."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import trio

JITTER: Final = (0.6, 1.4)
"""Pauses are between these shares of what is given, so that nodes which failed together do not come back together."""
FORGET: Final = 60.0
"""Seconds after which a failure is forgotten."""
MAX_KEPT: Final = 4096

K = TypeVar("K")


def jittered(pauses: Sequence[float], failures: int) -> float:
    """The pause after so many earlier failures, seconds; the last of `pauses` repeats."""
    return pauses[min(failures, len(pauses) - 1)] * random.uniform(*JITTER)


class Backoff(Generic[K]):
    """Failures by key, of which a bounded number is kept."""

    def __init__(self, pauses: Sequence[float], clock: Callable[[], float] = trio.current_time) -> None:
        self._pauses = pauses
        self._clock = clock
        self._failed: OrderedDict[K, tuple[int, float, float]] = OrderedDict()
        """How often, when last, and until when it is left alone."""

    def __len__(self) -> int:
        return len(self._failed)

    def failed(self, key: K) -> None:
        """It did not work."""
        count, last, _ = self._failed.pop(key, (0, 0.0, 0.0))
        now = self._clock()
        count = count if now - last < FORGET else 0
        while len(self._failed) >= MAX_KEPT:
            self._failed.popitem(last=False)
        self._failed[key] = (count + 1, now, now + jittered(self._pauses, count))

    def succeeded(self, key: K) -> None:
        """It worked: there is nothing to wait for any more."""
        self._failed.pop(key, None)

    def left(self, key: K) -> float:
        """Seconds for which it is still left alone; 0 when it is not."""
        return max(0.0, self._failed.get(key, (0, 0.0, 0.0))[2] - self._clock())

    def failed_at(self, key: K) -> float:
        """When it failed last; 0 if it has not, or not lately."""
        at = self._failed.get(key, (0, 0.0, 0.0))[1]
        return at if self._clock() - at < FORGET else 0.0
