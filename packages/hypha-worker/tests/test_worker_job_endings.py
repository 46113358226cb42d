"""How a job ends when its execution fails in the moment in which it is cancelled; one job never ends the worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from hypha_worker.errors import ExecutionError
from hypha_worker.jobs.execution import ExecutionTrace, JobContext

InLab = Callable[..., None]


class FailsWhenCancelled:
    """An execution that fails of itself while it is being cancelled, with a task of its own still running."""

    senders: frozenset[Any] = frozenset()
    accepted_push_kind = ""
    trace = ExecutionTrace(exit_code=3)

    def __init__(self, context: JobContext) -> None:
        self._context = context

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            self._context.scope.cancel()
            raise ExecutionError("it failed")


def test_a_job_that_fails_while_it_is_cancelled_leaves_the_worker_alive(
    in_lab: InLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_worker.service.ParameterServer", FailsWhenCancelled)

    async def case(lab: Any) -> None:
        for _ in range(2):  # the second is taken by a worker that still lives
            lease = await lab.scheduler.hire(lab.SERVER)
            await lab.scheduler.dispatch(lab.peer, lease, lab.aggregate_spec([], []))
            end = await lab.scheduler.ended()
            assert (end.lease, end.outcome) == (lease, "cancelled")
            await lab.scheduler.release(lab.peer, lease)

    in_lab(case)
