"""Whether an executor can start: takes it out of bids when its check fails, or several starts in a row.

The executions of `executors.process` note how their executor has started, `bidding.arbiter` reads whether it may be
offered, and the owner's ``resume`` lets it be checked again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import anyio

from hypha_proto.texts import shorten
from hypha_proto.worker_status import OfferedExecutor

_log = logging.getLogger(__name__)

MAX_FAILURES: Final = 3
"""Failed starts in a row after which an executor is taken out of bids."""
_LONGEST: Final = 300
"""Characters of the reason that an exclusion names."""
EXCLUSION: Final = 600.0
"""Seconds for which it stays out. Then a failed check is repeated, and one further failure takes it out again."""


async def _find_nothing() -> None:
    return None


@dataclass(slots=True)
class ExecutorHealth:
    """The check and the latest starts of one executor."""

    executor: OfferedExecutor
    clock: Callable[[], float] = anyio.current_time
    find_fault: Callable[[], Awaitable[str | None]] = _find_nothing
    """Checks the executor: returns why it cannot start here, or None."""
    _fault: str | None = None
    _failures: int = 0
    """Failed starts in a row."""
    _reason: str = ""
    _excluded_until: float = -math.inf

    @property
    def exclusion(self) -> str | None:
        """Why the executor is out of bids; None if it is not."""
        if self._fault is not None:
            return shorten(self._fault, _LONGEST)
        if not self._failures or self.clock() >= self._excluded_until:
            return None
        return f"it failed {self._failures} times in a row at its start: {shorten(self._reason, _LONGEST)}"

    async def check(self) -> None:
        """Check the executor, and let it be offered if nothing is found, also after failures."""
        self.reset()
        self._fault = await self.find_fault()
        if self._fault is not None:
            _log.error(
                "executor %s is not offered: %s; correct it, and run hypha-worker resume or start the worker again",
                self.executor,
                self._fault,
            )

    def note_failure(self, reason: str) -> None:
        """Note that the executor could not be started, or ended with an error before it had used its bridge."""
        self._failures += 1
        self._reason = reason
        if self._failures >= MAX_FAILURES:
            self._excluded_until = self.clock() + EXCLUSION
            _log.error(
                "executor %s is taken out of bids for %.0f minutes: %s; correct it, and run hypha-worker resume or "
                "start the worker again to bring it back sooner",
                self.executor,
                EXCLUSION / 60,
                self.exclusion,
            )

    def note_success(self) -> None:
        """Note that the executor has started."""
        if self._failures >= MAX_FAILURES:
            _log.info("executor %s has started again", self.executor)
        self.reset()

    def reset(self) -> None:
        """Forget the failures, so that the executor is offered again."""
        self._failures, self._excluded_until = 0, -math.inf
