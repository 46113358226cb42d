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
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


def simulate(main: Callable[[], Awaitable[T]], *, seed: int = 0) -> T:
    """Run `main` under trio on a clock that jumps to the next deadline; return what `main` returns.

    It must not wait for threads, sockets or processes: virtual time does not pass for them.
    """
    import trio.testing

    with _deterministic_order(seed):
        clock = trio.testing.MockClock(autojump_threshold=0)
        return anyio.run(main, backend="trio", backend_options={"clock": clock})


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
