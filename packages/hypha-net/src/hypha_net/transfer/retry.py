"""How often a transfer that broke off is taken up again, when, and until when: the same for pushes and pulls."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import anyio

from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import NetError, StreamDroppedError, TransferError, UnreachableError
from hypha_net.transfer.framing import TransferInterruptedError
from hypha_net.transfer.progress import Progress
from hypha_proto.ids import PeerId

_log = logging.getLogger("hypha_net.transfer")

T = TypeVar("T")

PAUSES: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each further attempt, give or take a third."""
DROPS: Final = 2
"""Streams of one transfer that an old peer may drop unread: rust-libp2p does so with one that arrives before it has
taken the one before."""


class Drops:
    """How many more dropped streams are borne."""

    def __init__(self) -> None:
        self._left = DROPS

    def bear(self, error: NetError, otherwise: NetError) -> NetError:
        """What to raise for a stream that was dropped unread: once too often `otherwise`."""
        self._left -= 1
        return TransferInterruptedError(str(error)) if self._left >= 0 else otherwise

    async def open_stream(self, endpoint: Endpoint, peer: PeerId, protocols: Sequence[str]) -> Stream:
        """As `Endpoint.open_stream`; a stream that is dropped while it is agreed on counts too."""
        try:
            return await endpoint.open_stream(peer, protocols)
        except StreamDroppedError as error:
            raise self.bear(error, error) from error


async def retry_with_deadline(attempt: Callable[[], Awaitable[T]], what: str, progress: Progress, timeout: float) -> T:
    """Await `attempt()`, again if it breaks off, for `timeout` seconds at most, and tell how that ends.

    Raises:
        UnreachableError, TransferError: as `take_up_again`; `TransferError` too when the time is over.
    """
    with progress.told():
        try:
            with anyio.fail_after(timeout):
                return await retry(attempt, what)
        except TimeoutError:
            raise TransferError(f"{what} was not done within {timeout:g} s") from None


async def retry(attempt: Callable[[], Awaitable[T]], what: str) -> T:
    """Await `attempt()` until it does not break off, or has too often.

    Raises:
        UnreachableError: the peer could not be reached from the beginning; later that counts as broken off.
        TransferError: the last attempt's, or one that another attempt would not mend.
    """
    broken: TransferInterruptedError | None = None
    for pause in (*PAUSES, None):
        try:
            return await attempt()
        except TransferInterruptedError as error:
            broken = error
        except UnreachableError as error:
            if broken is None:
                raise
            broken = TransferInterruptedError(f"{what} broke off, and then: {error}")
        if pause is None:
            break
        _log.info("%s; trying again in about %g s", broken, pause)
        await anyio.sleep(pause * random.uniform(2 / 3, 4 / 3))
    assert broken is not None
    raise broken
