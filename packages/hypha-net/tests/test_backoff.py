"""Bounded retries: how often an operation is repeated, and which error ends it."""

from __future__ import annotations

import anyio
import pytest

from hypha_net.backoff import retry
from hypha_net.errors import NetError, TransferRefusedError, UnreachableError


class Operation:
    """Fails with the given errors, then returns how often it was called."""

    def __init__(self, *errors: NetError) -> None:
        self.errors = list(errors)
        self.calls = 0
        self.reported: list[tuple[NetError, float]] = []

    async def attempt(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls

    def on_failure(self, error: NetError, pause: float) -> None:
        self.reported.append((error, pause))
        if isinstance(error, TransferRefusedError):
            raise error


@pytest.mark.virtual_clock
async def test_an_operation_is_repeated_after_each_pause_until_it_succeeds() -> None:
    first, second = UnreachableError("one"), UnreachableError("two")
    operation = Operation(first, second)
    began = anyio.current_time()
    assert await retry(operation.attempt, (5.0, 10.0, 60.0), operation.on_failure) == 3
    assert anyio.current_time() - began == pytest.approx(15)
    assert operation.reported == [(first, 5.0), (second, 10.0)]


async def test_the_error_of_the_last_attempt_is_raised() -> None:
    operation = Operation(*(UnreachableError(str(number)) for number in range(5)))
    with pytest.raises(UnreachableError, match="2"):
        await retry(operation.attempt, (0.0, 0.0), operation.on_failure)
    assert operation.calls == 3


async def test_an_error_that_on_failure_raises_ends_the_attempts() -> None:
    operation = Operation(UnreachableError("one"), TransferRefusedError("no"))
    with pytest.raises(TransferRefusedError):
        await retry(operation.attempt, (0.0,) * 5, operation.on_failure)
    assert operation.calls == 2
