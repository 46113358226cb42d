"""How often each kind of failure of a transfer or request is tried again, and after which pauses.

The table in docs/faults.md shows these policies, and those of the modules `retries` of `hypha_scheduler.strategies`,
which say how often a task runs again. A layer repeats what may succeed without help from the layer above, then reports
the failure to it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import anyio

from hypha_net.backoff import jittered
from hypha_net.errors import NetError, TransferRefusedError, UnreachableError, UnsupportedProtocolError

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often one kind of failure is tried again, and after which pauses."""

    failure: str
    """What has failed, as the documentation says it."""
    pauses: tuple[float, ...]
    """Seconds before each further attempt; jitter is added."""
    repeats: bool = False
    """Whether the last pause repeats until the caller gives up, such as when its task has ended."""

    def __str__(self) -> str:
        if self.repeats:
            return f"every {self.pauses[-1]:g} s"
        seconds = sum(self.pauses)
        within = f" in {seconds / 60:.0f} minutes" if seconds >= 60 else f" in {seconds:.0f} s" if seconds else ""
        return f"{self.times} times{within}"

    @property
    def times(self) -> int:
        """Number of further attempts, if the last pause does not repeat."""
        return len(self.pauses)

    def pause(self, failures: int) -> float:
        """Return the pause in seconds after `failures` earlier failures, with jitter."""
        return jittered(self.pauses, failures)

    async def wait(self, failures: int) -> None:
        """Wait before the next attempt, after `failures` earlier failures."""
        await anyio.sleep(self.pause(failures))

    async def retry(
        self,
        attempt: Callable[[], Awaitable[T]],
        on_failure: Callable[[NetError, float], None] = lambda _error, _pause: None,
    ) -> T:
        """Call `attempt` until it succeeds, or has failed once more than `times` if the last pause does not repeat.

        Args:
            attempt: what is tried.
            on_failure: called with the error and the next pause; raises if another attempt would not help.

        Raises:
            NetError: the error of the last attempt, or what `on_failure` raises.
        """
        for failures in itertools.count() if self.repeats else range(self.times):
            pause = self.pause(failures)
            try:
                return await attempt()
            except NetError as error:
                on_failure(error, pause)
            await anyio.sleep(pause)
        return await attempt()

    async def retry_unless_refused(
        self, what: str, attempt: Callable[[], Awaitable[T]], final: tuple[type[NetError], ...] = ()
    ) -> T:
        """Call `attempt` as `retry` does, and log each failure of `what`; a refusal, and errors of `final`, are final.

        Raises:
            NetError: the error of the last attempt.
        """

        def on_failure(error: NetError, pause: float) -> None:
            if isinstance(error, (TransferRefusedError, UnsupportedProtocolError, *final)):
                raise error
            _log.info("%s failed (%s), again in %.1f s", what, error, pause)

        return await self.retry(attempt, on_failure)

    async def retry_unreachable(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Call `attempt` as `retry` does, and log that `what`; only that nobody can be reached is tried again.

        Raises:
            NetError: the error of the last attempt.
        """

        def on_failure(error: NetError, pause: float) -> None:
            if not isinstance(error, UnreachableError):
                raise error
            _log.warning("%s, trying again in %.1f s: %s", what, pause, error)

        return await self.retry(attempt, on_failure)


# ----------------------------------------------------------------------------------------------- requests and transfers

TRANSFER: Final = RetryPolicy("a file transfer or download was interrupted", (0.25, 0.5, 1.0, 2.0, 4.0))
REQUEST: Final = RetryPolicy("a pull or push could not begin, or a request got no answer", (0.25, 1.0, 3.0))
HOLDER: Final = RetryPolicy("a pull from a holder that can be replaced could not begin", (0.25, 1.0))
REPORT: Final = RetryPolicy("a report to the scheduler got no answer", (0.2, 0.5, 1.0, 2.0, 4.0, 8.0))
MESSAGE: Final = RetryPolicy("a message of the scheduler to a worker got no answer", (0.5, 1.0, 1.5))

# ----------------------------------------------------------------------------------------------------- files and slices

NO_PROVIDER: Final = RetryPolicy("no provider of a file can be reached", (2.0, 5.0, *(10.0,) * 48))
WRONG_CONTENT: Final = RetryPolicy("those that can be reached have other content than announced", (2.0, 5.0, 10.0))
UNUSABLE_SLICE: Final = RetryPolicy("an assigned slice cannot be had from any provider", (0.0,) * 31)
NO_HOLDER: Final = RetryPolicy("no holder of content in the DHT can provide it", (0.5, 1.0, 2.0))
LOOKUP: Final = RetryPolicy("no gateway answers the scheduler's lookup", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0))
ANNOUNCEMENT: Final = RetryPolicy(
    "no gateway takes the record of a dataset or file", (0.5, 1.0, 2.0, 5.0, 10.0), repeats=True
)
OUTPUT: Final = RetryPolicy("the scheduler cannot reach the holder of an output", (0.5, 2.0, 5.0))
LOCATION: Final = RetryPolicy(
    "a worker has no answer where a resource is, or cannot fetch it there", (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0), True
)

# -------------------------------------------------------------------------------------------------------- running tasks

STREAM: Final = RetryPolicy("a task stream broke", (0.1, 0.2, 0.4, 0.8, 1.6, 2.0), True)
OUTAGE: Final = RetryPolicy(
    "the scheduler of a task with an `orphan_grace` cannot be reached", (0.1, 0.2, 0.5, 1.0, 2.0), True
)
ROUND: Final = RetryPolicy(
    "a question about a round has no answer, or none that decides", (0.2, 0.5, 1.0, 2.0, 4.0), True
)
UPDATE: Final = RetryPolicy("an update or outer update cannot be delivered", (0.5, 1.0, 2.0, 4.0), True)
MISSED_UPDATE: Final = RetryPolicy(
    "the last outer update of a former parameter server cannot be pulled", (1.0, 2.0, 5.0, 10.0), True
)

ONCE: Final = RetryPolicy("what a layer above repeats", ())
POLICIES: Final = tuple(value for value in list(globals().values()) if isinstance(value, RetryPolicy) and value.pauses)
"""All of them, in the order of the table."""
