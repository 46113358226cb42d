"""Bounded retries of requests and transfers that may fail for a moment.

What a job asks its scheduler goes through `scheduler_contact`, which knows how long the job may wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from hypha_net import backoff
from hypha_net.errors import NetError, TransferRefusedError, UnsupportedProtocolError

_log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_DELAYS: Final = (0.0, 0.25, 1.0, 3.0)
"""Seconds before each attempt, of which the first is immediate, at an operation that may fail for a moment."""


async def retry(
    what: str,
    attempt: Callable[[], Awaitable[T]],
    delays: Sequence[float] = RETRY_DELAYS,
    final: tuple[type[NetError], ...] = (),
) -> T:
    """Call `attempt` until it succeeds, once per delay; the first attempt is immediate. A refusal is final.

    Args:
        what: the attempt, for the log.
        attempt: what is tried.
        delays: seconds before each attempt.
        final: further errors that are not retried.

    Raises:
        NetError: the error of the last attempt.
    """
    failures = 0

    def on_failure(error: NetError, _pause: float) -> None:
        nonlocal failures
        if isinstance(error, (TransferRefusedError, UnsupportedProtocolError, *final)):
            raise error
        failures += 1
        _log.info("%s failed (%s), attempt %d of %d", what, error, failures, len(delays))

    return await backoff.retry(attempt, delays[1:], on_failure)
