"""Bounded waits for tests: each ends with its condition or its timeout; none sleeps for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

POLL: Final = 0.5
"""Most seconds that one polling pause counts towards a timeout: a suspended machine does not fail tests."""


def run(main: Callable[[], Awaitable[None]], limit: float = 30) -> None:
    """Run a test's coroutine; fail after `limit` seconds."""

    async def bounded() -> None:
        with anyio.fail_after(limit):
            await main()

    anyio.run(bounded, backend="trio")


async def until(condition: Callable[[], object], seconds: float = 10, pause: float = 0.01) -> float:
    """Wait until a condition holds, polled every `pause` seconds; return the seconds it took.

    A condition may be a coroutine function, which is awaited. Raises `TimeoutError` after `seconds`.
    """
    began = looked = anyio.current_time()
    left = seconds
    while not await _told(condition(), max(left, pause)):
        if left <= 0:
            raise TimeoutError(f"not so after {anyio.current_time() - began:.1f} s")
        slept = anyio.current_time()
        await anyio.sleep(pause)
        now = anyio.current_time()
        left -= slept - looked + min(now - slept, max(POLL, pause))
        looked = now
    return anyio.current_time() - began


async def _told(answer: object, seconds: float) -> object:
    if not isinstance(answer, Awaitable):
        return answer
    with anyio.fail_after(seconds):
        return await answer


def wait_until(happened: Callable[[], bool], timeout: float, what: str) -> float:
    """Wait outside an event loop; fail with `what` after `timeout` seconds."""
    began = looked = time.monotonic()
    left = timeout
    while not happened():
        assert left > 0, f"{what}: not within {timeout:g} s"
        slept = time.monotonic()
        time.sleep(0.05)
        now = time.monotonic()
        left -= slept - looked + min(now - slept, POLL)
        looked = now
    return time.monotonic() - began
