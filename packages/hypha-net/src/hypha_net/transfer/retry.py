"""Retries of interrupted transfers, the same for pushes and pulls."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from hypha_net import retries
from hypha_net.errors import NetError, TransferError, UnreachableError
from hypha_net.transfer.framing import TransferInterruptedError
from hypha_net.transfer.progress import TransferProgress

_log = logging.getLogger("hypha_net.transfer")

T = TypeVar("T")


async def retry_with_deadline(
    attempt: Callable[[], Awaitable[T]], what: str, progress: TransferProgress, timeout: float
) -> T:
    """Await `attempt()`, again if it is interrupted, for at most `timeout` seconds, and emit its outcome.

    Raises:
        UnreachableError, TransferError: as `retry`; also `TransferError` on timeout.
    """
    with progress.report_outcome():
        try:
            with anyio.fail_after(timeout):
                return await retry(attempt, what)
        except TimeoutError:
            raise TransferError(f"{what} was not done within {timeout:g} s") from None


async def retry(attempt: Callable[[], Awaitable[T]], what: str) -> T:
    """Await `attempt()` until it is not interrupted, as often as `retries.TRANSFER` says.

    Raises:
        UnreachableError: the peer could not be reached at the first attempt; later that counts as an interruption.
        TransferError: the last attempt's, or one that another attempt would not cure.
    """
    interruption: TransferInterruptedError | None = None

    async def attempt_once() -> T:
        nonlocal interruption
        try:
            return await attempt()
        except TransferInterruptedError as error:
            interruption = error
            raise
        except UnreachableError as error:
            if interruption is None:
                raise
            interruption = TransferInterruptedError(f"{what} broke off, and then: {error}")
            raise interruption from error

    def on_failure(error: NetError, pause: float) -> None:
        if not isinstance(error, TransferInterruptedError):
            raise error
        _log.info("%s; trying again in %.1f s", error, pause)

    return await retries.TRANSFER.retry(attempt_once, on_failure)
