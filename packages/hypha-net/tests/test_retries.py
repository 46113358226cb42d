"""Retries: how often an operation is repeated, which error ends it, and the documented table of the policies."""

from __future__ import annotations

import re
from pathlib import Path

import anyio
import pytest

from hypha_net.backoff import JITTER
from hypha_net.errors import NetError, TransferRefusedError, UnreachableError
from hypha_net.retries import POLICIES, RetryPolicy

PAGE = Path(__file__).parents[3] / "docs/faults.md"


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
    assert await RetryPolicy("test", (5.0, 10.0, 60.0)).retry(operation.attempt, operation.on_failure) == 3
    assert [error for error, _ in operation.reported] == [first, second]
    pauses = [pause for _, pause in operation.reported]
    assert anyio.current_time() - began == pytest.approx(sum(pauses))
    for pause, usual in zip(pauses, (5.0, 10.0), strict=True):
        assert JITTER[0] * usual <= pause <= JITTER[1] * usual


async def test_the_error_of_the_last_attempt_is_raised() -> None:
    operation = Operation(*(UnreachableError(str(number)) for number in range(5)))
    with pytest.raises(UnreachableError, match="2"):
        await RetryPolicy("test", (0.0, 0.0)).retry(operation.attempt, operation.on_failure)
    assert operation.calls == 3


async def test_an_error_that_on_failure_raises_ends_the_attempts() -> None:
    operation = Operation(UnreachableError("one"), TransferRefusedError("no"))
    with pytest.raises(TransferRefusedError):
        await RetryPolicy("test", (0.0,) * 5).retry(operation.attempt, operation.on_failure)
    assert operation.calls == 2


@pytest.mark.virtual_clock
async def test_the_last_pause_repeats_where_the_caller_gives_up() -> None:
    policy, began = RetryPolicy("test", (1.0, 2.0), repeats=True), anyio.current_time()
    for failures in range(4):
        await policy.wait(failures)
    assert anyio.current_time() - began == pytest.approx(7.0, rel=0.4)


def test_the_documented_table_has_the_policies() -> None:
    section = PAGE.read_text().partition("## How long a failure is tried")[2].partition("\n## ")[0]
    rows = [tuple(cells) for cells in re.findall(r"^\| (.*) \| (.*) \| .*\|$", section, re.MULTILINE)]
    listed = [row for row in rows if row[0] in {policy.failure for policy in POLICIES}]
    assert [(failure, repeated.split(";")[0]) for failure, repeated in listed] == [
        (policy.failure, str(policy)) for policy in POLICIES
    ]
