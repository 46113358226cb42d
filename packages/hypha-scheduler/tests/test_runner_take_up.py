"""A scheduler that is started again takes its jobs up: their tasks, their leases, and what their workers say."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.scripted_jobs import (
    SPEC,
    Lab,
    OpenJobs,
    QuietOperator,
    ScriptedJob,
    ScriptedStrategy,
    ServedScheduler,
    role,
)
from support.waiting import until

from hypha_net.errors import NetError
from hypha_proto.ids import PeerId
from hypha_proto.record_file import EVENTS
from hypha_proto.tasks import TaskFinished
from hypha_proto.training_reports import Acknowledged, ReportError
from hypha_scheduler.errors import JobFailedError, JobInterruptedError
from hypha_scheduler.jobs.journal import JOURNAL, Journal, read_journal
from hypha_scheduler.jobs.orphaned_tasks import read_orphaned
from hypha_scheduler.service import SchedulerService
from hypha_scheduler.strategies.base import (
    EndJob,
    JobContext,
    Lease,
    StartTask,
    TaskEnded,
    TaskStarted,
    WriteJournal,
)
from hypha_scheduler.submission.resumption import ResumableJob, find_jobs_to_take_up

pytestmark = pytest.mark.virtual_clock

GRACE = 120.0


@pytest.fixture(autouse=True)
def _scripted_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(table: Any, _allowed: Any = None) -> ScriptedJob:
        return ScriptedJob.model_validate(table if isinstance(table, dict) else json.loads(table)["job"])

    monkeypatch.setattr("hypha_scheduler.submission.resumption.parse_job", parse)
    monkeypatch.setattr("hypha_scheduler.submission.server.parse_job", parse)


@asynccontextmanager
async def open_begun(
    open_jobs: OpenJobs, tasks: int, strategy: ScriptedStrategy | None = None, *, grace: float = GRACE
) -> AsyncIterator[tuple[Lab, QuietOperator]]:
    """Run a job until this many of its tasks run, on one lease each; yield its operator."""
    strategy = strategy or ScriptedStrategy()
    strategy.demand = [role(count=tasks, minimum=tasks)]
    async with open_jobs(strategy) as lab:
        yield lab, await begin(lab, tasks, grace)


async def begin(lab: Lab, tasks: int, grace: float = GRACE) -> QuietOperator:
    operator: QuietOperator = await lab.start(ScriptedJob(grace=grace))
    [leases] = await operator.until("acquired")
    for number in range(tasks):
        assert leases[number] == operator.leases[number]
        operator.act(StartTask(operator.task(f"task-{number}", number), SPEC))
    await operator.until("update", tasks)
    assert {update for _, update in operator.told("update")} == {TaskStarted()}
    return operator


async def stop(lab: Lab) -> None:
    """End the scheduler as SIGTERM does; a new one has its place."""
    before = len(lab.results)
    lab.service.interrupt_jobs()
    await lab.ended(before + 1)


def kill(directory: Path) -> None:
    """Remove from a job's journal that its scheduler was stopped, as if it had been killed."""
    lines = (directory / JOURNAL).read_text().splitlines(keepends=True)
    assert '"interrupted"' in lines[-1]
    (directory / JOURNAL).write_text("".join(lines[:-1]))


async def restart(lab: Lab) -> list[ResumableJob]:
    """Start another scheduler in place of the first one; run the jobs that it takes up in the background."""
    lab.service = SchedulerService(lab.service.host)
    found = await lab.service.take_up(lab.service.host.runs, [])

    async def run(job: ResumableJob) -> None:
        try:
            lab.results.append(await lab.service.run_taken_up(job))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            lab.results.append(error)

    for job in found:
        lab.tasks.start_soon(run, job)
    return found


def grace_ms(lab: Lab, lease: Lease) -> int | None:
    """Return for how long the task that was started on a lease may run on."""
    spec = lab.worker(lease).of(lease.id).definition.start
    assert spec is not None
    return spec.orphan_grace_ms


@pytest.mark.parametrize("how", ["stopped", "killed"])
async def test_a_job_goes_on_with_its_tasks(open_jobs: OpenJobs, how: str) -> None:
    async with open_begun(open_jobs, 3) as (lab, first):
        assert {grace_ms(lab, lease) for lease in first.leases} == {120_000}
        tasks = [task for task, _ in first.told("update")]
        ended = tasks[2]
        await lab.worker(ended.lease).end(ended.lease.id)
        await first.until("update", 4)
        await stop(lab)
        assert isinstance(lab.results[0], JobInterruptedError)
        released = {lease for worker in lab.workers for lease, _ in worker.released}
        assert released.isdisjoint(task.lease.id for task in tasks[:2])
        if how == "killed":
            kill(first.context.directory)
        await anyio.sleep(100.0)  # the workers hold the leases meanwhile
        [found] = await restart(lab)
        assert found.job_id == first.context.job_id
        second = await lab.strategy.operator(1)
        [adopted] = await second.until("adopted")
        assert set(adopted) == set(tasks[:2])
        assert not second.told("acquired")
        answer = await lab.worker(tasks[0].lease).report(lab.peer, tasks[0].id_in(found.job_id))
        assert answer == Acknowledged()
        await lab.worker(tasks[0].lease).end(tasks[0].lease.id)
        await second.until("update")
        [(task, update)] = second.told("update")
        assert task == tasks[0]
        assert isinstance(update, TaskEnded)
        await anyio.sleep(60.0)  # the other lease is renewed on
        assert second.told("lost") == []
        await lab.finish(second)
        assert lab.results[-1] == second.context.directory / "result.json"
        kinds = [record["record"] for record in read_journal(second.context.directory / JOURNAL)]
        assert kinds.count("interrupted") == (how == "stopped")
        assert kinds[-1] == "finished"


async def test_what_workers_say_waits_until_the_job_is_taken_up(open_jobs: OpenJobs) -> None:
    """A report answered with an error would end the executor; a push or an end that gets lost could not count."""
    opening = anyio.Event()

    class Slow(ScriptedStrategy):
        @asynccontextmanager
        async def _open(self, context: JobContext, journal: Any) -> AsyncIterator[Any]:
            if self.operators:
                await opening.wait()
            async with super()._open(context, journal) as operator:
                yield operator

    answers: list[Any] = []
    async with open_begun(open_jobs, 2, Slow()) as (lab, first):
        reporting, ending = (task for task, _ in first.told("update"))
        await stop(lab)

        async def report() -> None:
            answers.append(await lab.worker(reporting.lease).report(lab.peer, reporting.id_in(job_id)))

        async def end() -> None:
            worker, lease = lab.worker(ending.lease), ending.lease.id
            await worker.streams[lease].tell(worker.of(lease).definition, finished=TaskFinished(outputs=()))
            answers.append("ended")

        job_id = first.context.job_id
        await restart(lab)
        lab.tasks.start_soon(report)
        lab.tasks.start_soon(end)
        await anyio.sleep(20.0)
        assert answers == []
        opening.set()
        second = await lab.strategy.operator(1)
        await second.until("update")
        assert next(entry[0] for entry in second.heard) == "adopted"
        [(task, _)] = second.told("update")
        assert task == ending
        await until(lambda: len(answers) >= 2, 60, 0.1)
        assert set(answers) == {Acknowledged(), "ended"}
        assert second.told("lost") == []  # the leases were renewed while the strategy prepared
        await lab.finish(second)


async def test_a_lease_that_is_gone_is_not_adopted(open_jobs: OpenJobs) -> None:
    """One worker has ended its lease, another one cannot be reached: the job goes on with the third, and searches."""
    async with open_begun(open_jobs, 3) as (lab, first):
        kept, forgotten, unreachable = (task for task, _ in first.told("update"))
        await stop(lab)
        lab.worker(forgotten.lease).forgotten.add(forgotten.lease.id)
        lab.endpoint._network.partition(lab.peer, unreachable.lease.peer)
        [found] = await restart(lab)
        second = await lab.strategy.operator(1)
        [adopted] = await second.until("adopted")
        assert adopted == (kept,)
        answer = await lab.worker(forgotten.lease).report(lab.peer, forgotten.id_in(found.job_id))
        assert isinstance(answer, ReportError)
        lab.endpoint._network.heal(lab.peer, unreachable.lease.peer)
        await second.until("acquired")
        assert kept.lease not in second.told("acquired")[0]
        await lab.finish(second)


async def test_a_task_that_had_not_begun_is_not_adopted(open_jobs: OpenJobs) -> None:
    """Its worker may have got the definition: the lease is released, and the search begins anew."""
    strategy = ScriptedStrategy(demand=[role(minimum=1)])
    async with open_jobs(strategy) as lab:
        worker = lab.workers[0]
        for other in lab.workers:
            other.is_silent = True
        first: QuietOperator = await lab.start(ScriptedJob(grace=GRACE))
        [[lease]] = await first.until("acquired")
        worker = lab.worker(lease)
        first.act(StartTask(first.task(), SPEC))
        await worker.until(lambda: worker.started)
        for other in lab.workers:
            other.is_silent = False
        copy = (first.context.directory / JOURNAL).read_text()  # the scheduler is killed here
        await stop(lab)
        (first.context.directory / JOURNAL).write_text(copy)
        worker.leases[lease.id], worker.released[:] = lab.peer, []
        await restart(lab)
        second = await strategy.operator(1)
        await second.until("acquired")
        assert worker.released[0] == (lease.id, "the scheduler was started again")
        assert second.told("adopted") == []
        await lab.finish(second)


async def test_a_job_that_cannot_go_on_gives_its_leases_back(open_jobs: OpenJobs) -> None:
    class Refusing(ScriptedStrategy):
        def open(self, job: Any, context: JobContext, journal: Any) -> Any:
            if journal:
                raise JobFailedError("the dataset has changed")
            return super().open(job, context, journal)

    async with open_begun(open_jobs, 1, Refusing()) as (lab, first):
        [(task, _)] = first.told("update")
        await stop(lab)
        before = read_journal(first.context.directory / JOURNAL)
        await restart(lab)
        await lab.ended(2)
        assert str(lab.results[1]) == "the dataset has changed"
        worker = lab.worker(task.lease)
        await worker.until(lambda: worker.released)
        assert [lease for lease, _ in worker.released] == [task.lease.id]
        assert read_journal(first.context.directory / JOURNAL) == before
        answer = await worker.report(lab.peer, task.id_in(first.context.job_id))
        assert isinstance(answer, ReportError)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_no_worker_is_told_that_an_interrupted_job_is_over(
    open_jobs: OpenJobs, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The scheduler still listens for a moment; an answer that the job is over would end the executors."""

    class Recording(QuietOperator):
        def on_training_report(self, task: Any, progress: Any, now: float) -> Any:
            self.hear("progress", task, progress)
            return Acknowledged(), (WriteJournal("report", {}),)

    async with open_begun(open_jobs, 1, ScriptedStrategy(Recording)) as (lab, first):
        [(task, _)] = first.told("update")
        answers: list[Any] = []

        async def never_on_disk(_journal: Journal) -> None:
            await anyio.sleep_forever()

        async def report() -> None:
            try:
                answers.append(await lab.worker(task.lease).report(lab.peer, task.id_in(first.context.job_id)))
            except NetError as error:
                answers.append(error)

        if when == "meanwhile":
            monkeypatch.setattr(Journal, "sync", never_on_disk)
            lab.tasks.start_soon(report)
            await first.until("progress")
            await stop(lab)
        else:
            await stop(lab)
            await report()
        await until(lambda: answers, 60, 0.1)
        assert isinstance(answers[0], NetError)


async def test_a_scheduler_that_is_stopped_while_it_takes_a_job_up_leaves_its_tasks(open_jobs: OpenJobs) -> None:
    class Hanging(ScriptedStrategy):
        @asynccontextmanager
        async def _open(self, context: JobContext, journal: Any) -> AsyncIterator[Any]:
            if len(self.journals) == 1:
                self.journals.append(journal)
                await anyio.sleep_forever()
            async with super()._open(context, journal) as operator:
                yield operator

    async with open_begun(open_jobs, 1, Hanging()) as (lab, first):
        [(task, _)] = first.told("update")
        await stop(lab)
        before = read_journal(first.context.directory / JOURNAL)
        await restart(lab)
        await anyio.sleep(5.0)
        await stop(lab)
        assert isinstance(lab.results[1], JobInterruptedError)
        assert lab.worker(task.lease).released == []
        assert read_journal(first.context.directory / JOURNAL) == before
        await restart(lab)
        third = await lab.strategy.operator(1)
        assert await third.until("adopted") == [(task,)]
        await lab.finish(third)


async def test_a_second_restart_finds_the_tasks_too(open_jobs: OpenJobs) -> None:
    async with open_begun(open_jobs, 2) as (lab, first):
        tasks = {task for task, _ in first.told("update")}
        for number in (1, 2):
            await stop(lab)
            kill(first.context.directory)
            await restart(lab)
            again = await lab.strategy.operator(number)
            [adopted] = await again.until("adopted")
            assert set(adopted) == tasks
        await lab.finish(again)


async def test_tasks_end_with_a_scheduler_that_is_cancelled(open_jobs: OpenJobs, tmp_path: Path) -> None:
    """SIGINT, or a second SIGTERM: the leases are released, and the job is not taken up by itself, but can resume."""
    strategy = ScriptedStrategy(demand=[role(minimum=1)])
    async with open_jobs(strategy) as lab:
        async with anyio.create_task_group() as scheduler:
            lab.tasks = scheduler
            first = await begin(lab, 1)
            scheduler.cancel_scope.cancel()
        worker = lab.worker(first.leases[0])
        assert [lease for lease, _ in worker.released] == [first.leases[0].id]
        last = read_journal(first.context.directory / JOURNAL)[-1]
        assert (last["record"], last["tasks_run_on"]) == ("interrupted", False)
        events = [json.loads(line) for line in (first.context.directory / EVENTS).read_text().splitlines()]
        assert events[-1]["event"] == "interrupted"
        assert await lab.service.take_up(tmp_path / "runs", []) == []


async def test_a_job_without_grace_is_interrupted_and_releases_its_leases(open_jobs: OpenJobs) -> None:
    async with open_begun(open_jobs, 1, grace=0.0) as (lab, first):
        assert grace_ms(lab, first.leases[0]) is None
        await stop(lab)
        assert isinstance(lab.results[0], JobInterruptedError)
        assert f"hypha-scheduler resume {first.context.directory}" in str(lab.results[0])
        assert [lease for lease, _ in lab.worker(first.leases[0]).released] == [first.leases[0].id]
        kinds = [record["record"] for record in read_journal(first.context.directory / JOURNAL)]
        assert kinds == ["accepted", "placed", "interrupted"]
        assert await restart(lab) == []
        resumed = await lab.start(ScriptedJob(), first.context.job_id, resume=True)
        await lab.finish(resumed)


async def test_leases_that_cannot_live_any_more_are_left_to_resume(
    open_jobs: OpenJobs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_begun(open_jobs, 1) as (lab, first):
        await stop(lab)
        runs, directory = tmp_path / "runs", first.context.directory
        now = time.time()
        [found] = find_jobs_to_take_up(runs, [], None, now)
        assert found.directory == directory
        assert "has no end" not in caplog.text
        os.utime(directory / JOURNAL, (now - GRACE - 60, now - GRACE - 60))
        assert find_jobs_to_take_up(runs, [], None, now) == []
        assert f"hypha-scheduler resume {directory} --config FILE" in caplog.text


async def test_a_running_job_marks_its_journal(open_jobs: OpenJobs) -> None:
    """A long round has no records; its leases are young all the same."""
    async with open_begun(open_jobs, 1) as (lab, first):
        journal = first.context.directory / JOURNAL
        began = time.time()
        os.utime(journal, (1000.0, 1000.0))
        await anyio.sleep(6.0)
        assert journal.stat().st_mtime > began - 1
        await lab.finish(first)


# ------------------------------------------------------------------------------------------------- the whole scheduler


async def test_a_configured_job_that_is_taken_up_does_not_run_twice(open_jobs: OpenJobs, runs: Path) -> None:
    """The jobs of a configuration run in their order: the first one had ended when the scheduler was stopped."""
    strategy = ScriptedStrategy(demand=[role(minimum=1)])
    jobs = tuple(ScriptedJob(grace=GRACE, seconds=seconds) for seconds in (20.0, 21.0, 22.0))
    async with open_jobs(strategy) as lab:
        scheduler = ServedScheduler(lab, runs, jobs)
        (await strategy.operator()).act(EndJob())
        interrupted: QuietOperator = await strategy.operator(1)
        await interrupted.until("acquired")
        interrupted.act(StartTask(interrupted.task(), SPEC))
        await interrupted.until("update")
        await scheduler.terminate()
        again = ServedScheduler(lab, runs, jobs)
        operators = [await strategy.operator(number) for number in (2, 3)]
        [taken_up] = [one for one in operators if one.context.job_id == interrupted.context.job_id]
        for operator in operators:
            operator.act(EndJob())
        await again.ended.wait()
        assert again.error is None
        assert taken_up.told("adopted") != []
        assert len(strategy.operators) == 4
        assert len([path async for path in anyio.Path(runs).glob("*/result.json")]) == 3


# ---------------------------------------------------------------------------------------------------------- the records


def lease_record(number: int) -> dict[str, Any]:
    peer = str(PeerId.from_public_key(number.to_bytes(32, "big")))
    return {"lease": str(uuid.UUID(int=number)), "peer": peer, "role": "train", "price": 3.0}


def task_record(number: int, **fields: Any) -> dict[str, Any]:
    return {"task": f"task-{number}", "attempt": 0, "lease": str(uuid.UUID(int=number))} | fields


PLACED = {"record": "placed", "leases": [lease_record(1), lease_record(2)]}
FIRST = {"record": "started", **task_record(1)}
SECOND = {"record": "started", **task_record(2)}


@pytest.mark.parametrize(
    ("records", "running", "idle"),
    [
        ([PLACED], [], [1, 2]),
        ([PLACED, FIRST, SECOND], [1, 2], []),
        ([PLACED, FIRST, SECOND, {"record": "ended", "task": "task-1", "lease": str(uuid.UUID(int=1))}], [2], [1]),
        ([PLACED, FIRST, {"record": "interrupted", "tasks_run_on": True}], [1], [2]),
        ([PLACED, FIRST, {"record": "interrupted", "tasks_run_on": False}], [], []),
        ([PLACED, FIRST, {"record": "resumed"}], [], []),
        ([PLACED, FIRST, {"record": "resumed", "leases": [lease_record(1)], "tasks": [task_record(1)]}], [1], []),
        ([PLACED, FIRST, {"record": "leased", "leases": [lease_record(3)]}], [1], [2, 3]),
        ([PLACED, FIRST, {"record": "failed", "error": "why"}], [], []),
        ([{"record": "placed", "leases": [{"lease": str(uuid.UUID(int=1)), **lease_record(1)}]}], [], [1]),
    ],
)
def test_what_a_job_held_follows_from_its_journal(
    records: list[dict[str, Any]], running: list[int], idle: list[int]
) -> None:
    held = read_orphaned([{"record": "accepted"}, *records])
    assert [lease.int for lease in held.tasks] == running
    assert [lease.id.int for lease in held.idle] == idle
    assert {task.lease.price for task in held.tasks.values()} <= {3.0}


@pytest.mark.parametrize(
    "record",
    [
        {"record": "placed"},
        {"record": "placed", "leases": [{**lease_record(1), "peer": "nobody"}]},
        {"record": "started", **task_record(7)},
        {"record": "started", **task_record(1, attempt="first")},
        {"record": "ended", "lease": 3},
        {"record": "interrupted"},
    ],
)
def test_a_malformed_record_is_named(record: dict[str, Any]) -> None:
    with pytest.raises(JobFailedError, match=f"record 3 of the journal, '{record['record']}', is malformed"):
        read_orphaned([{"record": "accepted"}, PLACED, record])
