"""Jobs that wait, run and are cancelled at a running scheduler, as clients of its socket see them; configured jobs."""

from __future__ import annotations

import errno
import json
import logging
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import pytest
from support.scripted_jobs import Lab, OpenJobs, QuietOperator, ScriptedJob, ScriptedStrategy, ServedScheduler, role
from support.waiting import until

from hypha_proto.codec import parse_json
from hypha_proto.record_file import EVENTS
from hypha_scheduler.client import AsyncClient, Client, Event, NoSchedulerError
from hypha_scheduler.errors import JobCancelledError, JobFailedError
from hypha_scheduler.jobs.unfinished import QUEUED
from hypha_scheduler.strategies.base import BY_OWNER, Effects, EndJob, JobContext
from hypha_scheduler.submission.active_jobs import ActiveJob
from hypha_scheduler.submission.client import (
    JobCommandError,
    SchedulerEndedError,
    attach_job,
    send_command,
    socket_path,
    submit_job,
)
from hypha_scheduler.submission.queue_files import read_queue, write_queued


@pytest.fixture(autouse=True)
def _parse_scripted_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(data: bytes, _allowed: object = None) -> ScriptedJob:
        return ScriptedJob.model_validate(parse_json(data)["job"])

    monkeypatch.setattr("hypha_scheduler.submission.server.parse_job", parse)
    monkeypatch.setattr(
        "hypha_scheduler.submission.server.validate_job", lambda table, _allowed: ScriptedJob.model_validate(table)
    )


class Scheduler(ServedScheduler):
    """A scheduler in the background, and clients of its socket."""

    async def submit(self, name: str | None = None, *, wait: bool = True) -> str:
        """Submit a job, and leave; return its id."""
        await self.is_up()
        job = {"type": "scripted"} | ({} if name is None else {"name": name})
        submit = partial(submit_job, socket_path(self.runs), job, detach=True, wait=wait)
        answer = (await anyio.to_thread.run_sync(lambda: next(submit()))).answer
        assert answer is not None
        if "error" in answer:
            raise JobCommandError(answer)
        assert answer["accepted"] is True
        return str(answer["job_id"])

    async def connect(self) -> anyio.abc.ByteStream:
        """Submit a job; return the connection once the job is accepted."""
        await self.is_up()
        stream = await anyio.connect_unix(socket_path(self.runs))
        await stream.send(json.dumps({"job": {"type": "scripted"}}).encode())
        await stream.send_eof()
        assert json.loads(await stream.receive())["accepted"] is True
        return stream

    async def command(self, command: str, **arguments: Any) -> dict[str, Any]:
        await self.is_up()
        request = {"command": command, **arguments}
        return await anyio.to_thread.run_sync(send_command, socket_path(self.runs), request)

    async def attach(self, wanted: str, answers: list[dict[str, Any]]) -> None:
        def follow() -> None:
            for heard in attach_job(socket_path(self.runs), wanted):
                if heard.answer is not None:
                    answers.append(heard.answer)  # noqa: PERF401 - others look at it meanwhile

        await anyio.to_thread.run_sync(follow)

    async def states(self, *, every: bool = False) -> dict[str, str]:
        found = await self.command("jobs", all=every)
        return {entry["name"]: entry["state"] for entry in found["jobs"]}


async def test_jobs_wait_for_their_turn_and_are_cancelled_waiting_and_running(open_jobs: OpenJobs, runs: Path) -> None:
    async with open_jobs(real_time=True) as lab:
        scheduler = Scheduler(lab, runs, max_running=1)
        first, second, third = [await scheduler.submit(name) for name in ("one", "two", "three")]
        operator: QuietOperator = await lab.strategy.operator()
        await operator.until("acquired")
        listed = (await scheduler.command("jobs"))["jobs"]
        assert [entry["job_id"] for entry in listed] == [first, second, third]
        assert [entry["state"] for entry in listed] == ["running", "waiting", "waiting"]
        assert "scheduler.queue.max_running allows, and 1 wait before it" in listed[2]["reason"]

        assert await scheduler.command("cancel", id="two") == {"cancelled": second, "directory": str(runs / second)}
        assert (await scheduler.command("status", id=second[:12]))["job"]["state"] == "cancelled"

        seen: list[list[dict[str, Any]]] = [[], []]
        async with anyio.create_task_group() as terminals:
            for answers in seen:
                terminals.start_soon(scheduler.attach, "one", answers)
            await until(lambda: all(seen), 60)
            worker = lab.worker(operator.leases[0])
            assert (await scheduler.command("cancel", id=first[:8]))["cancelled"] == first
        assert operator.leases[0].id not in worker.leases
        for answers in seen:
            assert answers[0]["job"]["state"] == "running"
            assert answers[-1]["error"] == BY_OWNER
        with pytest.raises(JobCommandError, match=r"has ended: cancelled") as caught:
            await scheduler.command("cancel", id="one")
        assert caught.value.code == "ended"

        last: QuietOperator = await lab.strategy.operator(1)
        last.act(EndJob())
        while await scheduler.states():
            await anyio.sleep(0.02)
        assert await scheduler.states(every=True) == {"one": "cancelled", "two": "cancelled", "three": "finished"}
        assert [json.loads((runs / third / "result.json").read_text())["job_id"]] == [third]
        assert not [job_id for job_id in (first, second, third) if (runs / job_id / QUEUED).exists()]


async def test_a_name_or_prefix_names_one_job_or_is_ambiguous(open_jobs: OpenJobs, runs: Path) -> None:
    async with open_jobs(real_time=True) as lab:
        scheduler = Scheduler(lab, runs, max_running=1)
        ids = [await scheduler.submit(name) for name in ("same", "same", "same-again", "other")]
        for wanted, meant in (("same", ids[:2]), ("sam", ids[:3])):
            with pytest.raises(JobCommandError, match=f"{len(meant)} jobs have a name or an id that begins") as caught:
                await scheduler.command("status", id=wanted)
            assert caught.value.code == "ambiguous"
            assert [entry["job_id"] for entry in caught.value.matches] == meant
        for wanted, meant in (("same-", ids[2]), ("oth", ids[3])):
            assert (await scheduler.command("status", id=wanted))["job"]["job_id"] == meant
        assert (await scheduler.command("status", id=ids[1].upper()))["job"]["job_id"] == ids[1]
        for unknown in ("Other", "others", "", "x" * 9000):
            with pytest.raises(JobCommandError) as caught:
                await scheduler.command("cancel", id=unknown)
            assert caught.value.code == "unknown"
            assert len(str(caught.value)) < 200
        for request in ({"command": "jump"}, {"command": "status"}, {"command": "status", "id": 3}):
            with pytest.raises(JobCommandError, match="command: "):
                await anyio.to_thread.run_sync(send_command, socket_path(runs), request)


async def test_jobs_that_waited_wait_again_in_their_order_after_a_restart(open_jobs: OpenJobs, runs: Path) -> None:
    async with open_jobs(real_time=True) as lab:
        scheduler = Scheduler(lab, runs, max_running=1)
        for name in ("one", "two", "three"):
            await scheduler.submit(name)
        operator: QuietOperator = await lab.strategy.operator()
        await operator.until("acquired")
        await scheduler.terminate()
        again = Scheduler(lab, runs, max_running=1)
        next_one: QuietOperator = await lab.strategy.operator(1)
        await next_one.until("acquired")
        assert await again.states(every=True) == {"two": "running", "three": "waiting", "one": "interrupted"}
        next_one.act(EndJob())
        (await lab.strategy.operator(2)).act(EndJob())
        while await again.states():
            await anyio.sleep(0.02)
        ended = await again.states(every=True)
        assert ended == {"one": "interrupted", "two": "finished", "three": "finished"}


async def test_the_client_of_an_interrupted_job_is_told(open_jobs: OpenJobs, runs: Path) -> None:
    heard: list[str] = []

    def wait_for_end() -> None:
        with pytest.raises(SchedulerEndedError) as caught:
            answers = submit_job(socket_path(runs), {"type": "scripted", "grace": 120.0}, detach=False)
            heard.extend(json.dumps(each.answer) for each in answers if each.answer is not None)
        heard.append(str(caught.value))

    async with open_jobs(real_time=True) as lab:
        scheduler = ServedScheduler(lab, runs)
        await scheduler.is_up()
        async with anyio.create_task_group() as client:
            client.start_soon(anyio.to_thread.run_sync, wait_for_end)
            operator: QuietOperator = await lab.strategy.operator()
            await operator.until("acquired")
            await scheduler.terminate()
        assert "accepted" in heard[0]
        assert heard[1].startswith(f"job {operator.context.job_id} was interrupted: the scheduler was stopped before")
        assert "start the scheduler again until then, or later continue it with `hypha-scheduler resume" in heard[1]


async def test_no_more_jobs_wait_than_the_queue_takes(open_jobs: OpenJobs, runs: Path) -> None:
    async with open_jobs(real_time=True) as lab:
        scheduler = Scheduler(lab, runs, max_running=1, max_waiting=1)
        await scheduler.submit("one")
        operator: QuietOperator = await lab.strategy.operator()
        await operator.until("acquired")
        with pytest.raises(JobCommandError, match=r"max_running = 1.*without --no-wait"):
            await scheduler.submit(wait=False)
        await scheduler.submit("two")
        with pytest.raises(JobCommandError, match=r"max_waiting = 1"):
            await scheduler.submit("three")


async def test_further_clients_are_told_to_try_again(
    open_jobs: OpenJobs, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypha_scheduler.submission.server.MAX_CONNECTIONS", 2)
    async with open_jobs(real_time=True) as lab:
        scheduler = Scheduler(lab, runs)
        await scheduler.is_up()
        silent = [await anyio.connect_unix(socket_path(runs)) for _ in range(2)]
        async with await anyio.connect_unix(socket_path(runs)) as refused:
            assert json.loads(await refused.receive())["code"] == "busy"
        for stream in silent:
            await stream.aclose()
        while await is_busy(scheduler):
            await anyio.sleep(0.01)


async def test_programs_submit_follow_and_cancel_jobs(open_jobs: OpenJobs, runs: Path) -> None:
    kinds: list[str] = []

    def follow_plainly(job: str) -> list[str]:
        return [event["event"] for event in Client(socket_path(runs)).follow(job)]

    async with open_jobs(real_time=True) as lab:
        scheduler = Scheduler(lab, runs)
        await scheduler.is_up()
        client = AsyncClient(socket_path(runs))
        job = await client.submit({"type": "scripted", "name": "mine"})
        assert job.directory == runs / job.job_id
        operator: QuietOperator = await lab.strategy.operator()
        async for event in client.follow("mine"):
            kinds.append(event["event"])
            if event["event"] == "placement":
                assert [entry.state for entry in await client.jobs()] == ["running"]
                operator.act(EndJob())
        expected = ["queued", "accepted", "placement", "finished"]
        assert [kind for kind in kinds if kind != "shortage"] == expected  # which a slow machine may have
        assert await anyio.to_thread.run_sync(follow_plainly, job.job_id) == kinds
        assert (await client.status("mine")).state == "finished"

        second = await client.submit({"type": "scripted", "name": "other"})
        await client.cancel("other")
        for follow in (partial(anyio.to_thread.run_sync, follow_plainly), partial(follow_all, client)):
            with pytest.raises(JobFailedError, match="cancelled it"):
                await follow(second.job_id)
            with pytest.raises(JobCommandError, match="no job has a name"):
                await follow("nobody")
        with pytest.raises(JobCommandError, match="has ended"):
            await client.cancel("mine")
        await scheduler.terminate()
        with pytest.raises(NoSchedulerError):
            await follow_all(client, "mine")
        with pytest.raises(NoSchedulerError):
            await client.jobs()


async def follow_all(client: AsyncClient, job: str) -> list[Event]:
    return [event async for event in client.follow(job)]


async def is_busy(scheduler: Scheduler) -> bool:
    """Return whether the scheduler takes no further client."""
    try:
        await scheduler.states()
    except JobCommandError as error:
        return error.code == "busy"
    return False


# ----------------------------------------------------------------------------------------------- on the virtual clock


def add_waiting(lab: Lab, folder: Path) -> ActiveJob:
    job_id = uuid.uuid4()
    return lab.service.jobs.add(ActiveJob(job_id, ScriptedJob(seconds=20.0), folder / "runs" / str(job_id), waits=True))


async def run_waiting(lab: Lab, job: ActiveJob) -> None:
    with pytest.raises(JobCancelledError):
        await lab.service.jobs.run(job, partial(lab.service.run_job, job.job, job.job_id))


class NeedingOperator(QuietOperator):
    """Operator that cannot begin without a worker."""

    def __init__(self, context: JobContext) -> None:
        super().__init__(context)
        self.demand = (role(minimum=1),)


@pytest.mark.virtual_clock
async def test_a_job_that_lacks_workers_waits_for_longer_than_its_timeout(open_jobs: OpenJobs, tmp_path: Path) -> None:
    strategy = ScriptedStrategy(NeedingOperator)
    async with open_jobs(strategy, workers=1) as lab:
        [worker] = lab.workers
        worker.leases[uuid.uuid4()] = worker.endpoint.peer_id  # it works for somebody else
        job = add_waiting(lab, tmp_path)
        job.directory.mkdir(parents=True)
        (job.directory / QUEUED).touch()
        lab.tasks.start_soon(run_waiting, lab, job)
        operator: QuietOperator = await strategy.operator()
        await anyio.sleep(100)
        assert operator.told("timeout") == []
        assert "0 of 1 held" in str(lab.service.jobs.waits_because(job))
        assert (job.directory / QUEUED).exists()
        worker.leases.clear()
        await operator.until("acquired")
        assert lab.service.jobs.waits_because(job) is None
        assert not (job.directory / QUEUED).exists()
        job.cancel()
        await job.ended.wait()
        assert worker.leases == {}


class StubbornOperator(QuietOperator):
    """Operator that does not end its job when it is cancelled."""

    def on_command(self, command: str, now: float) -> Effects:
        self.hear("command", command)
        return ()


@pytest.mark.virtual_clock
async def test_a_job_is_cancelled_although_its_strategy_does_not_end_it(open_jobs: OpenJobs, tmp_path: Path) -> None:
    strategy = ScriptedStrategy(StubbornOperator)
    async with open_jobs(strategy) as lab:
        job = add_waiting(lab, tmp_path)
        lab.tasks.start_soon(run_waiting, lab, job)
        operator: QuietOperator = await strategy.operator()
        await operator.until("acquired")
        lab.endpoint.gateway_peers = {"/ip4/10.0.0.1/tcp/4001": None}
        began = anyio.current_time()
        job.cancel()
        await job.ended.wait()
        assert operator.told("command") == [("cancel",)]
        assert anyio.current_time() - began < 10
        assert lab.worker(operator.leases[0]).leases == {}
        last = json.loads((job.directory / EVENTS).read_text().splitlines()[-1])
        assert (last["event"], last["error"], last["cancelled"]) == ("failed", BY_OWNER, True)


def test_a_job_that_cannot_be_recorded_does_not_wait_after_a_restart(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: object, _path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    directory = runs / str(uuid.UUID(int=1))
    monkeypatch.setattr("hypha_scheduler.submission.queue_files.EventFile.__init__", full)
    with pytest.raises(OSError, match="No space left"):
        write_queued(directory, ScriptedJob(), 1.0, 1)
    assert list(directory.iterdir()) == []
    assert read_queue(runs) == []


@pytest.mark.parametrize("last", ["configured", "submitted"])
@pytest.mark.virtual_clock
async def test_scheduler_with_configured_jobs_ends_after_them_and_all_submitted_ones(
    open_jobs: OpenJobs, runs: Path, last: str
) -> None:
    async with open_jobs() as lab:
        scheduler = Scheduler(lab, runs, (ScriptedJob(),))
        configured: QuietOperator = await lab.strategy.operator()
        connection = await scheduler.connect()
        submitted: QuietOperator = await lab.strategy.operator(1)
        for operator in (configured, submitted):
            await operator.until("acquired")
        first, second = (submitted, configured) if last == "configured" else (configured, submitted)
        first.act(EndJob())
        await until(lambda: (first.context.directory / "result.json").exists(), 60)
        with anyio.move_on_after(60) as waited:
            await scheduler.ended.wait()
        assert waited.cancelled_caught
        second.act(EndJob())
        await scheduler.ended.wait()
        assert scheduler.error is None
        assert "result" in json.loads(await connection.receive())
        assert not socket_path(runs).exists()


@pytest.mark.virtual_clock
async def test_scheduler_without_configured_jobs_stays(open_jobs: OpenJobs, runs: Path) -> None:
    async with open_jobs() as lab:
        scheduler = Scheduler(lab, runs)
        for number in range(2):
            connection = await scheduler.connect()
            operator: QuietOperator = await lab.strategy.operator(number)
            operator.act(EndJob())
            assert "result" in json.loads(await connection.receive())
        with anyio.move_on_after(60) as waited:
            await scheduler.ended.wait()
        assert waited.cancelled_caught


@pytest.mark.parametrize("jobs", [0, 1])
@pytest.mark.virtual_clock
async def test_configured_jobs_run_although_no_jobs_can_be_submitted(
    open_jobs: OpenJobs, runs: Path, caplog: pytest.LogCaptureFixture, jobs: int
) -> None:
    """Another scheduler has the socket; without configured jobs that is an error."""
    with caplog.at_level(logging.WARNING):
        async with open_jobs() as lab:
            other = Scheduler(lab, runs)
            await other.connect()
            (await lab.strategy.operator()).act(EndJob())
            scheduler = Scheduler(lab, runs, (ScriptedJob(),) * jobs)
            if jobs:
                operator: QuietOperator = await lab.strategy.operator(len(lab.strategy.operators))
                operator.act(EndJob())
            await scheduler.ended.wait()
            if jobs:
                assert scheduler.error is None
                assert "no jobs can be submitted beside the configured ones" in caplog.text
            else:
                assert isinstance(scheduler.error, ExceptionGroup)
                assert scheduler.error.subgroup(OSError) is not None
            await other.connect()  # the other scheduler's socket is as it was
