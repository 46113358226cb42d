"""The announcement of a worker that it will end: who hears of it, of which leases, and how often."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from support.scripted_jobs import SPEC, Lab, OpenJobs, QuietOperator, ScriptedJob, ScriptedStrategy, role

from hypha_scheduler.strategies.base import EndJob, StartTask

pytestmark = pytest.mark.virtual_clock


def events(lab: Lab, kind: str) -> list[dict[str, Any]]:
    [path] = lab.service._runs_dir.glob("*/metrics.jsonl")
    return [event for line in path.read_text().splitlines() if (event := json.loads(line))["event"] == kind]


async def test_operator_hears_once_of_each_lease_that_it_holds(open_jobs: OpenJobs) -> None:
    def make(context: Any) -> QuietOperator:
        operator = QuietOperator(context)
        operator.demand = (role(count=2, distinct=False),)
        return operator

    async with open_jobs(ScriptedStrategy(make), workers=1, cores=2) as lab:
        operator: QuietOperator = await lab.start()
        [leases] = await operator.until("acquired")
        [worker] = lab.workers
        operator.act(StartTask(operator.task(), SPEC))
        await operator.until("update")
        await worker.drain(lab.peer, *(lease.id for lease in leases), uuid.uuid4(), seconds=42.0)
        await worker.drain(lab.peer, leases[0].id, seconds=12.0)
        assert operator.told("draining") == [(lease, 42.0) for lease in leases]
        assert operator.told("lost") == []
        await lab.finish(operator)
    [first, second] = events(lab, "lease_draining")
    assert (first["peer"], first["role"], first["seconds"]) == (str(lab.workers[0].endpoint.peer_id), "train", 42.0)
    assert first["reason"] == second["reason"] == "its owner drains it"


async def test_nobody_drains_the_lease_of_another_worker_or_job(open_jobs: OpenJobs) -> None:
    async with open_jobs() as lab:
        first: QuietOperator = await lab.start()
        [[lease]] = await first.until("acquired")
        second: QuietOperator = await lab.start()
        [[other]] = await second.until("acquired")
        assert lab.worker(lease) is not lab.worker(other)
        await lab.worker(other).drain(lab.peer, lease.id)
        assert first.told("draining") == second.told("draining") == []
        await lab.worker(other).drain(lab.peer, lease.id, other.id)
        assert first.told("draining") == []
        assert second.told("draining") == [(other, 60.0)]
        await lab.finish(first)
        await lab.finish(second)


async def test_lease_that_drains_before_its_search_has_ended_is_sought_elsewhere(open_jobs: OpenJobs) -> None:
    """The worker would refuse the first task on it."""

    def make(context: Any) -> QuietOperator:
        operator = QuietOperator(context)
        operator.demand = (role(count=2, minimum=2),)
        return operator

    async with open_jobs(ScriptedStrategy(make)) as lab:
        draining, second, late = lab.workers
        second.cores = late.cores = 0
        operator: QuietOperator = await lab.start(ScriptedJob(seconds=100.0))
        await draining.until(lambda: draining.leases)
        [lease] = draining.leases
        draining.cores = 0
        await draining.drain(lab.peer, lease)
        second.cores = late.cores = 1
        [leases] = await operator.until("acquired")
        assert {lease.peer for lease in leases} == {second.endpoint.peer_id, late.endpoint.peer_id}
        assert operator.told("draining") == []
        assert [released for released, _ in draining.released] == [lease]
        await lab.finish(operator)


async def test_announcement_after_the_end_of_a_job_is_acknowledged(open_jobs: OpenJobs) -> None:
    async with open_jobs() as lab:
        operator: QuietOperator = await lab.start()
        [[lease]] = await operator.until("acquired")
        operator.act(EndJob())
        await lab.worker(lease).drain(lab.peer, lease.id)
        await lab.ended()
        await lab.worker(lease).drain(lab.peer, lease.id)
    assert isinstance(lab.results[0], Path)
