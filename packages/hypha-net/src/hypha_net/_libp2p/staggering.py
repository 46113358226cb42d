"""Attempts at the same thing that are begun one after the other, without waiting long for those that say nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

import anyio


async def staggered(attempts: Iterable[Callable[[], Awaitable[None]]], pause: float) -> None:
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
