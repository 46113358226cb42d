"""Leases of the job runner: growth, replacement, shrinking, drains, and searches that find too few."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.scripted_jobs import (
    SPEC,
    Lab,
    OpenJob,
    OpenJobs,
    QuietOperator,
    ScriptedJob,
    ScriptedStrategy,
    open_scripted_jobs,
    role,
)

from hypha_net.testing import simulate
from hypha_proto.datasets import SliceAssigned
from hypha_proto.record_file import EVENTS
from hypha_proto.training_reports import Acknowledged
from hypha_scheduler.jobs.journal import JOURNAL, read_journal
from hypha_scheduler.strategies.base import (
    EndJob,
    StartTask,
    StopTask,
    TaskEnded,
    TaskNotStarted,
    TaskStarted,
    WriteJournal,
)

pytestmark = pytest.mark.virtual_clock


def events(lab: Lab, kind: str) -> list[dict[str, Any]]:
    [path] = lab.service.host.runs.glob(f"*/{EVENTS}")
    return [event for line in path.read_text().splitlines() if (event := json.loads(line))["event"] == kind]


async def test_raised_count_finds_leases_that_are_delivered_one_by_one(open_jobs: OpenJobs) -> None:
    async with open_jobs() as lab:
        operator: QuietOperator = await lab.acquire()
        operator.want(role(count=3))
        found = await operator.until("acquired", 3)
        assert [len(leases) for leases in found] == [1, 1, 1]
        assert {lease.peer for [lease] in found} == {worker.endpoint.peer_id for worker in lab.workers}
        await lab.finish(operator)
        assert [len(worker.released) for worker in lab.workers] == [1, 1, 1]
    kinds = [record["record"] for record in read_journal(operator.context.directory / JOURNAL)]
    assert kinds == ["accepted", "placed", "leased", "leased", "finished"]


@pytest.mark.parametrize("available", [1, 2, 3])
async def test_job_that_starts_at_its_minimum_gets_all_offers_of_the_first_decision(
    open_jobs: OpenJobs, available: int
) -> None:
    """What else is free is not left to lapse: a second search would wait for these offers to end."""
    strategy = ScriptedStrategy(demand=[role(count=3, minimum=1, early=True)])
    async with open_jobs(strategy) as lab:
        for worker in lab.workers[available:]:
            worker.cores = 0
        operator: QuietOperator = await lab.acquire()
        began = anyio.current_time()
        await operator.until("acquired", available)
        assert anyio.current_time() - began < 0.1
        for worker in lab.workers:
            worker.cores = 1
        found = await operator.until("acquired", 3)
        assert [len(leases) for leases in found] == [1, 1, 1]
        assert {lease.peer for [lease] in found} == {worker.endpoint.peer_id for worker in lab.workers}
        assert operator.told("timeout") == []
        await lab.finish(operator)
        assert [len(worker.released) for worker in lab.workers] == [1, 1, 1]


async def test_job_that_starts_at_its_minimum_waits_for_the_minimum(open_jobs: OpenJobs) -> None:
    strategy = ScriptedStrategy(demand=[role(count=3, minimum=2, early=True)])
    async with open_jobs(strategy) as lab:
        for worker in lab.workers[1:]:
            worker.cores = 0
        operator: QuietOperator = await lab.start(ScriptedJob(seconds=10.0))
        await operator.until("timeout")
        assert operator.told("acquired") == []
        lab.workers[1].cores = 1
        first, *_ = await operator.until("acquired")
        assert len(first) == 2
        await lab.finish(operator)


@pytest.mark.parametrize("comes_at", [None, 1.0])
async def test_job_with_its_minimum_starts_after_it_settled_or_when_all_are_there(
    open_jobs: OpenJobs, comes_at: float | None
) -> None:
    async with open_jobs(ScriptedStrategy(demand=[role(count=3, minimum=2, early=True, settle=2.0)])) as lab:
        late = lab.workers[2]
        late.cores = 0
        operator: QuietOperator = await lab.start(ScriptedJob(seconds=60.0))
        began = anyio.current_time()
        if comes_at is not None:
            await anyio.sleep(comes_at)
            late.cores = 1
        first, *_ = await operator.until("acquired")
        seconds = anyio.current_time() - began
        assert len(first) == (2 if comes_at is None else 3)
        assert 2.0 <= seconds < 3.0 if comes_at is None else seconds < comes_at + 2.0
        late.cores = 1
        while len(operator.leases) < 3:
            await operator.changed.wait()
        assert operator.told("timeout") == []
        await lab.finish(operator)


async def test_all_roles_must_have_their_minimum_before_it_settles(open_jobs: OpenJobs) -> None:
    """A worker that is lost before the start is not counted: the time begins again."""
    demand = (role("train", 3, 2, early=True, settle=2.0), role("one", 1, 1, early=True, settle=2.0))
    async with open_jobs(ScriptedStrategy(demand=demand)) as lab:
        for worker in lab.workers[2:]:
            worker.cores = 0
        operator: QuietOperator = await lab.start(ScriptedJob(seconds=60.0))
        await anyio.sleep(10.0)
        assert operator.told("acquired") == []
        lab.workers[2].cores = 1
        [leases] = await operator.until("acquired")
        assert sorted(lease.role for lease in leases) == ["one", "train", "train"]
        await lab.finish(operator)


async def test_timeout_bounds_the_time_below_the_minimum_whatever_else_changes(open_jobs: OpenJobs) -> None:
    """A further loss, or a changed demand, does not give the job more time."""
    async with open_jobs(ScriptedStrategy(demand=[role(count=3, minimum=3, early=True, settle=2.0)])) as lab:
        operator: QuietOperator = await lab.start(ScriptedJob(seconds=30.0))
        [leases] = await operator.until("acquired")
        await anyio.sleep(100.0)
        assert operator.told("timeout") == []
        for worker in lab.workers:
            worker.cores = 0
        lab.worker(leases[0]).forgotten.add(leases[0].id)
        await operator.until("lost")
        since = anyio.current_time()
        await anyio.sleep(10.0)
        lab.worker(leases[1]).forgotten.add(leases[1].id)
        await operator.until("lost", 2)
        await anyio.sleep(5.0)
        operator.want(role(count=4, minimum=3, early=True, settle=2.0))
        [(name, reasons)] = await operator.until("timeout")
        assert 29.0 < anyio.current_time() - since < 32.0
        assert name == "train"
        assert "within 30 s: 1 of 4 for train" in reasons
        await lab.finish(operator)


async def test_a_job_that_has_its_minimum_again_gets_the_whole_time_anew(open_jobs: OpenJobs) -> None:
    async with open_jobs(ScriptedStrategy(demand=[role(count=3, minimum=3, early=True)])) as lab:
        operator: QuietOperator = await lab.start(ScriptedJob(seconds=30.0))
        [leases] = await operator.until("acquired")
        for loss in range(3):
            victim = lab.worker(leases[0])
            victim.cores = 0
            victim.forgotten.add(leases[0].id)
            await operator.until("lost", loss + 1)
            await anyio.sleep(20.0)
            victim.cores = 1
            *_, leases = await operator.until("acquired", loss + 2)
        assert operator.told("timeout") == []
        await lab.finish(operator)


async def test_a_shortage_is_told_at_once_and_again_while_the_job_waits(open_jobs: OpenJobs) -> None:
    demand = role(count=4, minimum=3, early=True, settle=2.0)
    async with open_jobs(ScriptedStrategy(demand=[demand]), workers=2) as lab:
        operator: QuietOperator = await lab.start(ScriptedJob(seconds=100.0))
        await anyio.sleep(2.0)
        [first] = events(lab, "shortage")
        assert (first["role"], first["held"], first["wanted"], first["minimum"]) == ("train", 2, 4, 3)
        assert first["text"] == "2 of 4 held, 1 more needed; 2 of 2 suitable"
        await anyio.sleep(70.0)
        assert [each["text"] for each in events(lab, "shortage")] == [first["text"]] * 3
        operator.want(role(count=4, minimum=2, early=True, settle=2.0))
        await operator.until("acquired")
        before = len(events(lab, "shortage"))
        await anyio.sleep(200.0)  # it could grow, but waits for nobody
        assert len(events(lab, "shortage")) <= before + 1
        await lab.finish(operator)


async def test_lost_lease_is_replaced_while_the_demand_stays(open_job: OpenJob) -> None:
    async with open_job() as (lab, operator):
        [[first]] = await operator.until("acquired")
        lab.worker(first).forgotten.add(first.id)
        [(lost, reason)] = await operator.until("lost")
        assert (lost, "no longer has its lease" in reason) == (first, True)
        _, [second] = await operator.until("acquired", 2)
        assert second.id != first.id


async def test_search_for_a_replacement_takes_the_worker_that_is_replaced_if_it_comes_back(open_job: OpenJob) -> None:
    """A worker that drains is replaced before its lease ends; it may be the only one that comes."""
    async with open_job(workers=1) as (lab, operator):
        [[first]] = await operator.until("acquired")
        operator.want(role(count=2))
        await anyio.sleep(5)
        operator.demand = (role(count=1),)
        lab.worker(first).forgotten.add(first.id)
        await operator.until("lost")
        with anyio.fail_after(10):
            _, [second] = await operator.until("acquired", 2)
        assert second.peer == first.peer


@pytest.mark.parametrize("how", ["lost", "released"])
async def test_lease_that_ends_in_a_partition_is_released_when_its_worker_is_back(open_job: OpenJob, how: str) -> None:
    """Its task would run on for as long as a scheduler may be away, and hold what a new lease needs."""
    async with open_job(job=ScriptedJob(seconds=60.0)) as (lab, operator):
        [[first]] = await operator.until("acquired")
        worker, network = lab.worker(first), lab.endpoint._network
        network.partition(lab.peer, first.peer)
        if how == "released":
            operator.want()
        else:
            [(lost, _)] = await operator.until("lost")
            assert lost == first
        await anyio.sleep(20)
        assert worker.released == []
        network.heal(lab.peer, first.peer)
        await worker.until(lambda: worker.released)
        assert [lease for lease, _ in worker.released] == [first.id]


@pytest.mark.parametrize("how", ["stopped", "not started"])
async def test_lease_that_went_with_its_task_is_replaced(open_job: OpenJob, how: str) -> None:
    """A task that was stopped for good, or did not start, takes its lease along."""
    async with open_job() as (lab, operator):
        [[first]] = await operator.until("acquired")
        lab.worker(first).is_silent = how == "not started"
        operator.act(StartTask(operator.task(), SPEC))
        updates = await operator.until("update")
        if how == "stopped":
            operator.act(StopTask(operator.task(), "enough"))
        with anyio.fail_after(30):
            _, [second] = await operator.until("acquired", 2)
        updates = operator.told("update")
        assert isinstance(updates[-1][1], TaskNotStarted if how == "not started" else TaskEnded)
        assert second.id != first.id
        assert operator.told("lost") == []


async def test_a_lease_at_an_excluded_peer_is_replaced_and_released(open_jobs: OpenJobs) -> None:
    """The only lease of a role is kept until there is another one; with several it is released at once."""
    async with open_jobs() as lab:
        for worker in lab.workers[1:]:
            worker.cores = 0
        operator: QuietOperator = await lab.start()
        [[first]] = await operator.until("acquired")
        operator.want(replace(role(), excluded=frozenset({first.peer})))
        await anyio.sleep(5.0)
        assert lab.worker(first).released == []
        lab.workers[1].cores = 1
        _, [second] = await operator.until("acquired", 2)
        assert second.peer == lab.workers[1].endpoint.peer_id
        await lab.worker(first).until(lambda: lab.worker(first).released)
        operator.want(role(count=2))
        _, _, [third] = await operator.until("acquired", 3)
        assert third.peer == first.peer
        operator.want(replace(role(count=2), excluded=frozenset({first.peer})))
        await lab.worker(first).until(lambda: len(lab.worker(first).released) == 2)
        await anyio.sleep(5.0)
        assert len(operator.told("acquired")) == 3
        await lab.finish(operator)


async def test_a_task_on_a_lease_at_an_excluded_peer_goes_on(open_job: OpenJob) -> None:
    async with open_job() as (lab, operator):
        [[first]] = await operator.until("acquired")
        operator.act(StartTask(operator.task(), SPEC))
        await operator.until("update")
        operator.want(replace(role(count=2), excluded=frozenset({first.peer})))
        _, [second] = await operator.until("acquired", 2)
        assert second.peer != first.peer
        assert lab.worker(first).released == []


async def test_surplus_leases_go_once_they_have_no_task(open_jobs: OpenJobs) -> None:
    strategy = ScriptedStrategy(demand=[role(count=3, minimum=3)])
    async with open_jobs(strategy) as lab:
        operator: QuietOperator = await lab.start()
        [leases] = await operator.until("acquired")
        start = [StartTask(operator.task(f"t{n}", n), SPEC) for n in (0, 1)]
        operator.act(*start)
        await operator.until("update", 2)
        operator.want(role(count=0))
        busy, other, idle = leases
        await lab.worker(idle).until(lambda: lab.worker(idle).released)
        assert lab.worker(busy).released == lab.worker(other).released == []
        await lab.worker(busy).end(busy.id)
        await lab.worker(busy).until(lambda: lab.worker(busy).released)
        assert lab.worker(other).released == []
        operator.want(role(count=1))
        assert len(operator.told("acquired")) == 1
        await lab.finish(operator)
        assert lab.worker(idle).released == [(idle.id, "the job needs it no longer")]
        assert lab.worker(busy).released == [(busy.id, "the job needs it no longer")]
        assert lab.worker(other).released == [(other.id, "the job is done")]


async def test_several_leases_of_a_job_on_one_peer_are_told_apart(open_job: OpenJob) -> None:
    strategy = ScriptedStrategy(demand=[role(count=2, minimum=2, distinct=False)], dataset=True)
    async with open_job(strategy, workers=1, cores=2) as (lab, operator):
        await operator.until("acquired")
        one, two = operator.leases
        assert one.peer == two.peer
        [worker] = lab.workers
        tasks = [operator.task(f"t{n}", n) for n in (0, 1)]
        operator.act(*(StartTask(task, SPEC) for task in tasks))
        await operator.until("update", 2)
        for task in tasks:
            about = task.id_in(operator.context.job_id)
            assert isinstance(await worker.report(lab.peer, about), Acknowledged)
            assert operator.told("progress")[-1][0] == task
            assert isinstance(await worker.slice(lab.peer, about), SliceAssigned)
            assert operator.told("slice")[-1][0] == task


async def test_search_that_finds_too_few_keeps_nothing_and_goes_on(open_jobs: OpenJobs) -> None:
    """Only roles without their minimum are named, what was found is not held back, and the search is repeated."""
    strategy = ScriptedStrategy(demand=(role("many", 3, 3, distinct=False), role("one", 1, 1, distinct=False)))
    async with open_jobs(strategy) as lab:
        last = lab.workers[-1]
        last.cores = 0
        operator: QuietOperator = await lab.start(ScriptedJob(seconds=10.0))
        [(name, reasons), *others] = await operator.until("timeout")
        assert name == "many"
        assert [role for role, _ in others] == (["one"] if "0 of 1 for one" in reasons else [])
        assert operator.told("acquired") == []
        last.cores = 2
        lab.workers[0].cores = 2
        [leases] = await operator.until("acquired")
        assert sorted(lease.role for lease in leases) == ["many", "many", "many", "one"]
        held = {lease.id for lease in leases}
        assert {lease for worker in lab.workers for lease in worker.leases} == held
        await lab.finish(operator)
        assert isinstance(lab.results[0], Path)


async def test_job_that_fails_at_an_allocation_timeout_asks_for_no_more_workers(open_jobs: OpenJobs) -> None:
    class Giving(QuietOperator):
        def on_allocation_timeout(self, role: str, reasons: str, now: float) -> Any:
            return (EndJob(failure=reasons),)

    strategy = ScriptedStrategy(Giving)
    async with open_jobs(strategy) as lab:
        for worker in lab.workers:
            worker.cores = 0
        lab.endpoint.gateway_peers = {"/ip4/10.0.0.1/tcp/4001": None}
        lab.endpoint.gateway_errors = {"/ip4/10.0.0.1/tcp/4001": "Connection refused"}
        operator: QuietOperator = await lab.start(ScriptedJob(seconds=2.0))
        operator.want(role(count=1, minimum=1))
        [failure] = await lab.ended()
        assert type(failure).__name__ == "AllocationError"
        assert "0 of 1 for train" in str(failure)
        assert str(failure).endswith("; 0 of 1 gateways: /ip4/10.0.0.1/tcp/4001: Connection refused")


async def test_released_leases_are_answered_for_before_a_job_ends(open_jobs: OpenJobs) -> None:
    """A lease that is released in the same moment as the job ends does not stay at its worker."""
    async with open_jobs() as lab:
        operator: QuietOperator = await lab.start()
        [[lease]] = await operator.until("acquired")
        operator.act(StartTask(operator.task(), SPEC))
        await operator.until("update")
        operator.act(StopTask(operator.task(), "enough"), EndJob())
        await lab.ended()
        assert lab.worker(lease).released == [(lease.id, "enough")]
        assert isinstance(operator.told("update")[0][1], TaskStarted)


async def test_two_requests_for_one_role_fail_the_job(open_jobs: OpenJobs) -> None:
    async with open_jobs() as lab:
        operator: QuietOperator = await lab.acquire()
        operator.want(role(count=1), role(count=2))
        [failure] = await lab.ended()
        assert "two requests for role 'train'" in str(failure)


@pytest.mark.parametrize("first", ["alone", "many"])
@pytest.mark.parametrize("together", [True, False])
def test_role_with_distinct_peers_shares_its_peer_with_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, together: bool
) -> None:
    """Its executors may be older ones, of whose reports only the peer is known."""
    alone, many = role("alone", 1, 1), role("many", 2, 2, distinct=False)
    begin = (alone, many) if together else (alone,) if first == "alone" else (many,)

    async def case(seed: int) -> None:
        folder, strategy = tmp_path / str(seed), ScriptedStrategy(demand=begin)
        folder.mkdir()
        async with open_scripted_jobs(monkeypatch, folder, strategy, workers=3, cores=3, seed=seed) as lab:
            operator: QuietOperator = await lab.acquire()
            operator.want(alone, many)
            while len(operator.leases) < 3:
                await operator.changed.wait()
            [single] = [lease for lease in operator.leases if lease.role == "alone"]
            assert single.peer not in {lease.peer for lease in operator.leases if lease.role == "many"}
            await lab.finish(operator)

    for seed in range(3):
        simulate(partial(case, seed), seed=seed)


async def test_a_smaller_demand_spares_the_lease_of_a_task_that_is_about_to_start(open_job: OpenJob) -> None:
    strategy = ScriptedStrategy(demand=[role(count=2, minimum=2)])
    async with open_job(strategy) as (lab, operator):
        [(idle, newest)] = await operator.until("acquired")
        operator.demand = (role(count=1),)
        task = operator.task("late", lease=1)
        operator.act(WriteJournal("before", {}), StartTask(task, SPEC))
        assert await operator.until("update") == [(task, TaskStarted())]
        await lab.worker(idle).until(lambda: lab.worker(idle).released)
        assert lab.worker(newest).released == []


async def test_operator_hears_once_of_each_lease_that_it_holds(open_jobs: OpenJobs) -> None:
    async with open_jobs(ScriptedStrategy(demand=[role(count=2, distinct=False)]), workers=1, cores=2) as lab:
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

    async with open_jobs(ScriptedStrategy(demand=[role(count=2, minimum=2)])) as lab:
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
