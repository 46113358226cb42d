"""Attempts to lease a whole set of workers: when an incomplete one is given up, and when the next one begins. Pure.

Schedulers that compete for too few workers would hold incomplete sets until they time out, each with workers that
another one needs. `allocator` therefore releases a set that lacks workers and does not grow, and tries again after a
pause, unless it finds that nobody competes with it.
"""

from __future__ import annotations

from random import Random
from typing import Final

PATIENCE: Final = 2.0
"""Seconds without a new lease after which an incomplete set is given up."""
_PATIENCE_JITTER: Final = (0.75, 1.25)
FIRST_PAUSE: Final = 0.5
"""Mean seconds between the first two attempts; doubled with each further one."""
LONGEST_PAUSE: Final = 8.0
_PAUSE_JITTER: Final = (0.5, 1.5)
LAST_ATTEMPT: Final = 3.0
"""Seconds before the deadline in which no set is given up, because another one could hardly be found in that time."""


class SearchPacing:
    """When the attempts of one search begin and end; `now` is the local monotonic clock in seconds."""

    def __init__(self, deadline: float, random: Random) -> None:
        """Begin the first attempt of a search that ends at `deadline`."""
        self._deadline = deadline
        self._random = random
        self._given_up = 0
        self.resume_at: float | None = None
        """End of the pause between two attempts; None outside of pauses."""
        self.give_up_at: float | None = None
        """When the set is given up unless it grows; None before the first lease, and close to the deadline.

        From the second attempt on an empty set is given up, too: otherwise it would gather the workers that others
        release one by one, and hold these up again.
        """

    @property
    def is_first(self) -> bool:
        """Whether no set has been given up yet."""
        return not self._given_up

    def restart_patience(self, now: float) -> None:
        """Restart the time after which the set is given up: a lease was added to it, or lost."""
        at = now + PATIENCE * self._random.uniform(*_PATIENCE_JITTER)
        self.give_up_at = at if at < self._deadline - LAST_ATTEMPT else None

    def give_up(self, now: float) -> float:
        """Begin the pause after an attempt; return its length in seconds."""
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self._given_up, 16)) * self._random.uniform(*_PAUSE_JITTER)
        self._given_up += 1
        self.give_up_at = None
        self.resume_at = min(now + pause, max(now, self._deadline - LAST_ATTEMPT))
        return self.resume_at - now

    def resume(self, now: float) -> None:
        """Begin the next attempt after a pause."""
        if self.resume_at is not None:
            self.resume_at = None
            self.restart_patience(now)
