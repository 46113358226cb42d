"""Happy Eyeballs (RFC 8305): staggered connection attempts, of which the first success cancels the others.

A new attempt starts when the one before it has failed or after a delay, so that an address that does not answer costs
little. Unlike the RFC, addresses are not sorted by family: the caller orders them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final

import anyio

from hypha_net.errors import NetError, NotReservedError, NotRunningError, RefusedError, UnreachableError

ATTEMPT_DELAY: Final = 0.25
"""Connection Attempt Delay in seconds, the value that RFC 8305 section 5 recommends."""


async def run_staggered(attempts: Iterable[Callable[[], Awaitable[None]]], delay: float) -> None:
    """Run all attempts, each started `delay` seconds after the one before it or as soon as that has ended.

    Returns when the last has ended. An attempt that succeeds cancels the others through a scope of the caller's.
    """

    async def run(attempt: Callable[[], Awaitable[None]], ended: anyio.Event) -> None:
        try:
            await attempt()
        finally:
            ended.set()

    async with anyio.create_task_group() as tasks:
        for attempt in attempts:
            ended = anyio.Event()
            tasks.start_soon(run, attempt, ended)
            with anyio.move_on_after(delay):
                await ended.wait()


class Race:
    """Attempts of which the first success cancels the others; they run inside `scope`."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.direct_failed = anyio.Event()
        """Set when no direct attempt is left."""
        self._succeeded = False
        self._failures: list[NetError] = []

    async def run(self, attempt: Awaitable[None]) -> None:
        """Run one attempt: record its failure, or cancel the others on success."""
        try:
            await attempt
        except NetError as error:
            self.add_failure(error)
            return
        self._succeeded = True
        self.scope.cancel()

    def add_failure(self, error: NetError) -> None:
        """Record why an attempt failed, or could not be made."""
        self._failures.append(error)

    def raise_if_failed(self, target: str) -> None:
        """Raise an error for `target` if no attempt succeeded.

        Raises:
            RefusedError: all attempts were refused.
            NotRunningError: no process listens at any address, and no relay is connected to the peer.
            UnreachableError: any other failure, or no attempt was made.
        """
        if self._succeeded:
            return
        reasons = "; ".join(dict.fromkeys(map(str, self._failures))) or "no address of it is known"
        raise self._kind()(f"{target} cannot be reached: {reasons}")

    def _kind(self) -> type[UnreachableError]:
        if self._failures and all(isinstance(error, RefusedError) for error in self._failures):
            return RefusedError
        direct = [error for error in self._failures if not isinstance(error, NotReservedError)]
        if direct and all(isinstance(error, NotRunningError) for error in direct):
            return NotRunningError
        return UnreachableError


async def happy_eyeballs(target: str, delay: float, attempts: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run attempts, staggered by `delay` seconds, until one succeeds. Raises as `Race.raise_if_failed` if none does."""
    race = Race()

    async def run(attempt: Callable[[], Awaitable[None]]) -> None:
        await race.run(attempt())

    with race.scope:
        await run_staggered([partial(run, attempt) for attempt in attempts], delay)
    race.raise_if_failed(target)
