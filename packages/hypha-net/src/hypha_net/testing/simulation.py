"""Deterministic simulation of a whole network on a virtual clock.

    def test_leases_over_an_hour() -> None:
        simulate(main, seed=7)

Virtual time advances when no task can run: an hour of waiting takes no real time, and the code under test uses
`anyio.sleep` and `anyio.current_time` as always. trio runs ready tasks in random order on purpose; here that order is
derived from the seed, so a failing history can be reproduced.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


def simulate(main: Callable[[], Awaitable[T]], *, seed: int = 0) -> T:
    """Run `main` under trio on a clock that jumps to the next deadline; return what `main` returns.

    It must not wait for threads, sockets or processes: virtual time passes meanwhile. What a thread pool
    would do, for example the one of a file transfer, is done at once.
    """
    import trio.testing

    with _deterministic_order(seed), _thread_pools_at_once():
        clock = trio.testing.MockClock(autojump_threshold=0)
        return anyio.run(main, backend="trio", backend_options={"clock": clock})


@contextmanager
def _thread_pools_at_once() -> Iterator[None]:
    """Let thread pools do their work at once: the virtual clock does not wait for threads."""

    def run(_pool: ThreadPoolExecutor, job: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(job(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - whoever waits for the job gets it
            done.set_exception(error)
        return done

    settings: Any = ThreadPoolExecutor
    before, settings.submit = settings.submit, run
    try:
        yield
    finally:
        settings.submit = before


@contextmanager
def _deterministic_order(seed: int) -> Iterator[None]:
    """Derive trio's order of tasks from the seed; trio has this switch for Hypothesis."""
    import trio._core._run as trio_run

    settings: dict[str, Any] = vars(trio_run)
    before = settings["_ALLOW_DETERMINISTIC_SCHEDULING"], settings["_r"]
    settings["_ALLOW_DETERMINISTIC_SCHEDULING"], settings["_r"] = True, random.Random(f"tasks/{seed}")
    try:
        yield
    finally:
        settings["_ALLOW_DETERMINISTIC_SCHEDULING"], settings["_r"] = before
