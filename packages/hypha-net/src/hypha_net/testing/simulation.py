"""Run a whole network on a virtual clock, the same way every time.

    def test_leases_over_an_hour() -> None:
        simulate(main, seed=7)

Time passes when nobody has anything to do: an hour of waiting takes no time, and code under test sees `anyio.sleep` and
`anyio.current_time` behave as always. trio runs tasks that are ready in random order on purpose; here that order comes
from the seed, so a history that fails can be played again.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio

T = TypeVar("T")


def simulate(main: Callable[[], Awaitable[T]], *, seed: int = 0) -> T:
    """Run `main` under trio on a clock that jumps to the next thing to do; returns what `main` returns.

    Nothing in it may wait for the world outside (threads, sockets, processes): for that no virtual time passes.
    """
    import trio.testing

    with _ordered(seed):
        clock = trio.testing.MockClock(autojump_threshold=0)
        return anyio.run(main, backend="trio", backend_options={"clock": clock})


@contextmanager
def _ordered(seed: int) -> Iterator[None]:
    """Let trio's order of tasks follow from the seed; it has this switch for Hypothesis."""
    import trio._core._run as trio_run

    settings: dict[str, Any] = vars(trio_run)
    before = settings["_ALLOW_DETERMINISTIC_SCHEDULING"], settings["_r"]
    settings["_ALLOW_DETERMINISTIC_SCHEDULING"], settings["_r"] = True, random.Random(f"tasks/{seed}")
    try:
        yield
    finally:
        settings["_ALLOW_DETERMINISTIC_SCHEDULING"], settings["_r"] = before
