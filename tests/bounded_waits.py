"""Waits of tests: each ends, by what it waits for or by its bound; none sleeps for a time and hopes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import anyio


def run(main: Callable[[], Awaitable[None]], limit: float = 30) -> None:
    """Run a test's coroutine; it fails after `limit` seconds."""

    async def bounded() -> None:
        with anyio.fail_after(limit):
            await main()

    anyio.run(bounded, backend="trio")


async def until(condition: Callable[[], object], seconds: float = 10, pause: float = 0.01) -> float:
    """Wait until something is so, asked every `pause` seconds; gives the seconds that it took.

    A condition may be a coroutine function, which is awaited. Raises `TimeoutError` after `seconds`.
    """
    began = anyio.current_time()
    with anyio.fail_after(seconds):
        while not await _told(condition()):
            await anyio.sleep(pause)
    return anyio.current_time() - began


async def _told(answer: object) -> object:
    return await answer if isinstance(answer, Awaitable) else answer


def wait_until(happened: Callable[[], bool], timeout: float, what: str) -> float:
    """The same outside an event loop; fails with `what` after `timeout` seconds."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() - began < timeout, f"{what}: not within {timeout:g} s"
        time.sleep(0.05)
    return time.monotonic() - began
