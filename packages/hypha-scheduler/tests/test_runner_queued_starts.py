"""Tasks that start once a journal record is on disk: their leases are in use until then."""

from __future__ import annotations

from typing import Any

import pytest
from support.scripted_jobs import SPEC, OpenJobs, QuietOperator, ScriptedStrategy, role

from hypha_scheduler.strategies.base import StartTask, TaskStarted, WriteJournal

pytestmark = pytest.mark.virtual_clock


async def test_a_smaller_demand_spares_the_lease_of_a_task_that_is_about_to_start(open_jobs: OpenJobs) -> None:
    strategy = ScriptedStrategy()

    def make(context: Any) -> QuietOperator:
        made = QuietOperator(context)
        made.demand = (role(count=2, minimum=2),)
        return made

    strategy.make = make
    async with open_jobs(strategy) as lab:
        operator: QuietOperator = await lab.start()
        [(idle, newest)] = await operator.until("acquired")
        operator.demand = (role(count=1),)
        task = operator.task("late", lease=1)
        operator.act(WriteJournal("before", {}), StartTask(task, SPEC))
        assert await operator.until("update") == [(task, TaskStarted())]
        await lab.worker(idle).until(lambda: lab.worker(idle).released)
        assert lab.worker(newest).released == []
        await lab.finish(operator)
