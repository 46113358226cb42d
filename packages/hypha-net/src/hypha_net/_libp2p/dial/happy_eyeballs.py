"""Attempts at the same thing that are begun one after the other, without waiting long for those that say nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import anyio

from hypha_net.errors import NetError, RefusedError, UnreachableError


async def run_staggered(attempts: Iterable[Callable[[], Awaitable[None]]], pause: float) -> None:
    """Run all, each begun `pause` seconds after the one before it or as soon as that has ended; returns with the last.

    Whoever succeeds cancels the others through a scope of its caller's.
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
            with anyio.move_on_after(pause):
                await ended.wait()


class Race:
    """Attempts of which the first success ends the others."""

    def __init__(self) -> None:
        self.won = False
        self.failures: list[NetError] = []
        self.direct_failed = anyio.Event()
        self.scope: anyio.CancelScope | None = None

    async def run(self, attempt: Awaitable[None]) -> None:
        """Run one attempt, and note how it ends."""
        try:
            await attempt
        except NetError as error:
            self.failures.append(error)
            return
        self.won = True
        if self.scope is not None:
            self.scope.cancel()

    def check(self, what: str) -> None:
        """Raise for `what` if no attempt succeeded: `RefusedError` if all were refused, else `UnreachableError`."""
        if self.won:
            return
        refused = bool(self.failures) and all(isinstance(error, RefusedError) for error in self.failures)
        reasons = "; ".join(dict.fromkeys(map(str, self.failures))) or "no address of it is known"
        raise (RefusedError if refused else UnreachableError)(f"{what} cannot be reached: {reasons}")


async def happy_eyeballs(what: str, pause: float, attempts: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run attempts, staggered by `pause` seconds, until one succeeds; raises as `Race.check` when none does."""
    race = Race()

    async def run(attempt: Callable[[], Awaitable[None]]) -> None:
        await race.run(attempt())

    async with anyio.create_task_group() as tasks:
        race.scope = tasks.cancel_scope
        await run_staggered([partial(run, attempt) for attempt in attempts], pause)
    race.check(what)
