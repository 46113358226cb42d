"""Retries of requests and transfers that may fail for a moment, as `hypha_net.retries` says.

What a job asks its scheduler goes through `scheduler_contact`, which knows how long the job may wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from hypha_net import retries
from hypha_net.errors import NetError, TransferRefusedError, UnsupportedProtocolError
from hypha_net.retries import RetryPolicy

_log = logging.getLogger(__name__)

T = TypeVar("T")


async def retry(
    what: str,
    attempt: Callable[[], Awaitable[T]],
    policy: RetryPolicy = retries.REQUEST,
    final: tuple[type[NetError], ...] = (),
) -> T:
    """Call `attempt` as often as `policy` says until it succeeds. A refusal is final.

    Args:
        what: the attempt, for the log.
        attempt: what is tried.
        policy: how often it is tried again.
        final: further errors that are not retried.

    Raises:
        NetError: the error of the last attempt.
    """

    def on_failure(error: NetError, pause: float) -> None:
        if isinstance(error, (TransferRefusedError, UnsupportedProtocolError, *final)):
            raise error
        _log.info("%s failed (%s), again in %.1f s", what, error, pause)

    return await policy.retry(attempt, on_failure)
