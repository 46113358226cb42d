"""The job runner's tasks and messages: attempts on one lease, stopping, fencing, and what effects lead to."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.scripted_jobs import SPEC, Lab, OpenJob, OpenJobs, QuietOperator, ScriptedStrategy, ScriptedWorker, role

from hypha_net import backoff, rpc, transfer
from hypha_net.errors import NetError, RequestTimeoutError, TransferRefusedError, UnsupportedProtocolError
from hypha_proto.commands import CommandAnswer, SetWorkers
from hypha_proto.datasets import NO_FREE_SLICE, NotFound, SliceAssigned, SlicesAssigned, WireError
from hypha_proto.health import HEALTH_CHECK, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.job_logs import LIST_LOGS, ListLogs
from hypha_proto.round_membership import UPDATE_REFUSED, RefusalKnown, UpdateRefused
from hypha_proto.tasks import TaskFailed
from hypha_proto.training_reports import Acknowledged, ReportError
from hypha_proto.transfer import PushHeader, Refusal
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.journal import JOURNAL, read_journal
from hypha_scheduler.jobs.runner import MAX_WAITING
from hypha_scheduler.strategies.base import (
    Effects,
    EmitEvent,
    EndJob,
    PushTarget,
    RetryAfter,
    RunInBackground,
    SendCommand,
    SendMessage,
    SliceRefusedError,
    SliceToUse,
    StartTask,
    StrategyMethod,
    TaskEnded,
    TaskNotStarted,
    TaskRef,
    TaskStarted,
    TaskState,
    WriteJournal,
)

pytestmark = pytest.mark.virtual_clock


async def start_task(lab: Lab, operator: QuietOperator, *, attempt: int = 0) -> ScriptedWorker:
    """Start a task on the first lease and wait until its worker has confirmed it; return the worker."""
    await operator.until("acquired")
    before = len(operator.told("update"))
    task = operator.task(attempt=attempt)
    operator.act(StartTask(task, SPEC))
    assert (await operator.until("update", before + 1))[-1] == (task, TaskStarted())
    return lab.worker(operator.leases[0])


# ------------------------------------------------------------------------------------------------------ tasks on leases


async def test_tasks_follow_one_another_on_a_lease_and_late_ends_are_ignored(open_jobs: OpenJobs) -> None:
    async with open_jobs() as lab:
        operator = await lab.start()
        worker = await start_task(lab, operator)
        lease = operator.leases[0].id
        await worker.end(lease)
        assert operator.told("update")[-1][1] == TaskEnded(TaskState.FINISHED, exit_code=0)
        await start_task(lab, operator, attempt=1)
        assert [start.attempt for start in worker.started] == [0, 1]
        heard = len(operator.heard)
        await worker.streams[lease].tell(worker.started[0].definition, failed=TaskFailed(reason="late"))
        assert len(operator.heard) == heard
        assert isinstance(await worker.report(lab.peer, worker.started[0].definition.attempt), ReportError)
        assert isinstance(await worker.report(lab.peer), Acknowledged)
        assert operator.told("progress")[-1][0].attempt == 1
        await worker.end(lease, "failed")
        assert operator.told("update")[-1] == (operator.task(attempt=1), TaskEnded(TaskState.FAILED, exit_code=1))
        await lab.finish(operator)
        assert worker.released == [(lease, "the job is done")]


async def test_task_on_a_lost_lease_does_not_start(open_job: OpenJob) -> None:
    async with open_job() as (lab, operator):
        await operator.until("acquired")
        first = operator.leases[0]
        worker = lab.worker(first)
        worker.forgotten.add(first.id)
        await operator.until("lost")
        operator.act(StartTask(operator.task(), SPEC))
        [(task, update)] = await operator.until("update")
        assert (task, update) == (operator.task(), TaskNotStarted("its lease is no longer held"))
        assert worker.started == []


async def test_commands_arrive_in_their_order_and_answers_reach_the_operator(open_job: OpenJob) -> None:
    async with open_job() as (lab, operator):
        worker = await start_task(lab, operator)
        stream = worker.streams[operator.leases[0].id]
        commands = [SetWorkers(workers=(PeerId.from_public_key(bytes([number]) * 32),)) for number in range(3)]
        operator.act(*(SendCommand(operator.task(), command, f"c{n}") for n, command in enumerate(commands)))
        heard = await stream.until("command", 3)
        sent = [found.command for found in stream.definitions if found.command is not None]
        assert [found.workers for found in sent] == commands
        answers = [CommandAnswer(number=found.number, accepted=bool(found.number), reason="r") for found in sent]
        for answer in reversed(answers[1:]):
            stream.report(heard, answered=answer)
        assert dict(await operator.until("result", 2)) == {"c1": answers[1], "c2": answers[2]}
        stream.report(heard, answered=CommandAnswer(number=99, accepted=True))  # nobody has asked
        [_, _, (tag, outcome)] = await operator.until("result", 3)
        assert (tag, type(outcome)) == ("c0", RequestTimeoutError)
        operator.act(SendCommand(operator.task(), commands[0], "late"))
        await stream.until("command", 4)
        await worker.end(operator.leases[0].id)
        operator.act(SendCommand(operator.task(), commands[0], "too late"))
        await anyio.sleep(100)
        assert len(operator.told("result")) == 3


# ------------------------------------------------------------------------------------------------------------- messages


async def test_message_and_work_outcomes_reach_the_operator(open_job: OpenJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "JITTER", (1.0, 1.0))
    async with open_job() as (_lab, operator):
        await operator.until("acquired")
        peer, nobody = operator.leases[0].peer, PeerId.from_public_key(bytes(32))
        delays = (1.0, 2.0)
        began = anyio.current_time()
        logs = ListLogs(job_id=operator.context.job_id)
        operator.act(
            SendMessage(peer, HEALTH_CHECK, HealthRequest(), "health"),
            SendMessage(peer, LIST_LOGS, logs, "unknown", delays),
        )
        outcomes: dict[str, Any] = dict(await operator.until("result", 2))  # type: ignore[arg-type]
        assert outcomes["health"].healthy
        assert isinstance(outcomes["unknown"], UnsupportedProtocolError)
        assert anyio.current_time() - began < 1  # that peer will not learn it
        operator.act(SendMessage(nobody, HEALTH_CHECK, HealthRequest(), "nobody", delays))
        outcomes = dict(await operator.until("result", 3))  # type: ignore[arg-type]
        assert isinstance(outcomes["nobody"], NetError)
        assert anyio.current_time() - began == pytest.approx(3.0, abs=0.5)

        async def succeed() -> str:
            await anyio.sleep(1)
            return "a result"

        async def fail(error: Exception) -> None:
            raise error

        failures = {"file": OSError("disk"), "job": JobFailedError("no"), "net": NetError("gone")}
        operator.act(RunInBackground(succeed, "work"))
        operator.act(*(RunInBackground(lambda error=error: fail(error), tag) for tag, error in failures.items()))
        outcomes = dict(await operator.until("result", 7))  # type: ignore[arg-type]
        assert outcomes["work"] == "a result"
        assert {tag: outcomes[tag] for tag in failures} == failures


async def test_own_methods_reach_the_operator_from_its_tasks_only(open_job: OpenJob) -> None:
    heard: list[TaskRef | None] = []

    class Noting(QuietOperator):
        def on_message(self, source: TaskRef | None, name: str, message: Any, now: float) -> Any:
            if name == "act":
                return super().on_message(source, name, message, now)
            assert name == UPDATE_REFUSED.name
            heard.append(source)
            return RefusalKnown(), ()

    strategy = ScriptedStrategy(Noting, methods=[StrategyMethod(UPDATE_REFUSED, unknown_job=RefusalKnown())])
    async with open_job(strategy) as (lab, operator):
        worker = await start_task(lab, operator)
        stranger = next(other for other in lab.workers if other is not worker)
        for job_id in (operator.context.job_id, uuid.uuid4()):
            attempt = operator.task().id_in(job_id)
            about = UpdateRefused(attempt=attempt, round=1, peer=worker.endpoint.peer_id, reason="r")
            for sender in (worker, stranger):
                assert await rpc.call(sender.endpoint, lab.peer, UPDATE_REFUSED, about) == RefusalKnown()
        assert heard == [operator.task()]


async def test_messages_that_wait_do_not_wake_each_other(open_job: OpenJob) -> None:
    asked: list[float] = []

    class Waiting(QuietOperator):
        def on_message(self, source: TaskRef | None, name: str, message: Any, now: float) -> Any:
            if source is None:
                return super().on_message(source, name, message, now)
            asked.append(now)
            return (RetryAfter(1.0) if now - asked[0] < 3.0 else RefusalKnown()), ()

    strategy = ScriptedStrategy(Waiting, methods=[StrategyMethod(UPDATE_REFUSED, unknown_job=RefusalKnown())])
    async with open_job(strategy) as (lab, operator):
        worker = await start_task(lab, operator)
        about = UpdateRefused(attempt=worker.last, round=1, peer=worker.endpoint.peer_id, reason="r")
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(rpc.call, worker.endpoint, lab.peer, UPDATE_REFUSED, about)
        assert len(asked) <= 16  # every second, and at other events


async def test_nothing_of_peers_without_a_running_task_reaches_the_operator(open_job: OpenJob) -> None:
    strategy = ScriptedStrategy(dataset=True)
    async with open_job(strategy) as (lab, operator):
        await operator.until("acquired")
        [mine, stranger, _] = sorted(lab.workers, key=lambda worker: worker.endpoint.peer_id != operator.leases[0].peer)
        first, job_id = operator.task(), operator.context.job_id
        others = (replace(first, name="other"), replace(first, attempt=1))

        async def speak() -> int:
            before = len(operator.heard)
            for worker in (mine, stranger):
                for named in (task.id_in(job_id) for task in (first, *others)):
                    assert isinstance(await worker.report(lab.peer, named), ReportError)
                    assert isinstance(await worker.slice(lab.peer, named), NotFound)
                    header = PushHeader(named, 1, "k", "n", 0, "blake3:" + "0" * 64, lab.peer)
                    assert "no task of this job runs there" in str(
                        await lab.service._push(worker.endpoint.peer_id, header)
                    )
            return len(operator.heard) - before

        assert await speak() == 0  # no task has started
        await start_task(lab, operator)
        assert isinstance(await mine.report(lab.peer), Acknowledged)
        for other in others:
            assert isinstance(await mine.report(lab.peer, other.id_in(job_id)), ReportError)
        assert isinstance(await stranger.report(lab.peer, mine.last), ReportError)
        assigned = await mine.slice(lab.peer)
        assert isinstance(assigned, SliceAssigned)
        assert assigned.format == "jsonl"
        assert len(operator.told("progress")) == 1
        await mine.end(first.lease.id)
        assert await speak() == 0  # a task that has ended


class Barrier(QuietOperator):
    """Operator that answers each request for a slice alike."""

    answer: Any = RetryAfter(8.0)

    def next_slice(self, task: TaskRef, dataset: str, now: float) -> Any:
        self.hear("slice", now)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_request_for_a_slice_is_asked_again_at_the_next_event(open_jobs: OpenJobs) -> None:
    strategy = ScriptedStrategy(Barrier, dataset=True)
    async with open_jobs(strategy) as lab:
        operator = await lab.start()
        worker = await start_task(lab, operator)
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await worker.slice(lab.peer))

        async with anyio.create_task_group() as tasks:
            began = anyio.current_time()
            tasks.start_soon(ask)
            await operator.until("slice", 2)  # without an event, after the seconds that it states
            assert anyio.current_time() - began == pytest.approx(8.0, abs=0.1)
            operator.answer = SliceToUse(3, 5)
            operator.refresh()
            await anyio.sleep(0.1)
            [assigned] = answers
            assert (assigned.epoch, assigned.index) == (3, 5)
        operator.answer = RetryAfter(-1.0)
        before, began = len(operator.told("slice")), anyio.current_time()
        waited = await worker.slice(lab.peer)  # not asked for ever, and not in a busy loop
        assert waited == WireError(message=NO_FREE_SLICE)  # the worker knows that it may ask again
        assert anyio.current_time() - began == pytest.approx(30.0, abs=1.0)
        assert len(operator.told("slice")) - before < 1000
        operator.answer = SliceRefusedError("too many slices")
        refused = await worker.slice(lab.peer)
        assert isinstance(refused, WireError)
        assert refused.message == "too many slices"
        operator.answer = RetryAfter(100.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await operator.until("slice", len(operator.told("slice")) + 1)
            began = anyio.current_time()
            operator.act(EndJob())
        assert isinstance(answers[-1], NotFound)  # the end of the job is an event, too
        assert anyio.current_time() - began < 1.0
        await lab.ended()


async def test_one_request_is_assigned_as_many_slices_as_it_asks_for_and_there_are(open_jobs: OpenJobs) -> None:
    class Six(QuietOperator):
        after: Any = None
        left = 6

        def next_slice(self, task: TaskRef, dataset: str, now: float) -> Any:
            if self.left:
                self.left -= 1
                return SliceToUse(0, 5 - self.left, 0)
            if isinstance(self.after, Exception):
                raise self.after
            return self.after

    async with open_jobs(ScriptedStrategy(Six, dataset=True)) as lab:
        operator = await lab.start()
        worker = await start_task(lab, operator)

        async def indices(**wanted: Any) -> list[int]:
            answer = await worker.slice(lab.peer, **wanted)
            assert isinstance(answer, SlicesAssigned)
            return [assigned.index for assigned in answer.slices]

        repeated = uuid.uuid4()
        assert await indices(most=2, id=repeated) == [0, 1]
        assert await indices(most=2, id=repeated) == [0, 1]
        assert await indices(most=1) == [2]
        operator.after = RetryAfter(100.0)
        assert await indices(most=32) == [3, 4, 5]  # it does not wait for more
        operator.left, operator.after = 1, SliceRefusedError("too many slices")
        assert await indices(most=3) == [5]
        assert await worker.slice(lab.peer, most=3) == WireError(message="too many slices")
        operator.left, operator.after = 1, None
        assert await indices(most=1, ahead=True) == [5]
        assert await worker.slice(lab.peer, most=3) == NotFound()
        await lab.finish(operator)
        records = read_journal(operator.context.directory / JOURNAL)
        assert [record["slice"] for record in records if record["record"] == "assigned"] == [0, 1, 2, 3, 4, 5, 5, 5]


async def test_requests_of_one_peer_that_wait_are_limited(open_job: OpenJob) -> None:
    async with open_job(ScriptedStrategy(Barrier, dataset=True)) as (lab, operator):
        worker = await start_task(lab, operator)
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await worker.slice(lab.peer))

        async with anyio.create_task_group() as tasks:
            for _ in range(MAX_WAITING + 5):
                tasks.start_soon(ask)
            await anyio.sleep(1.0)
            assert answers == [WireError(message=NO_FREE_SLICE)] * 5  # they may ask again
        assert len(answers) == MAX_WAITING + 5


async def test_deadlines_are_told_when_they_have_passed(open_job: OpenJob) -> None:
    async with open_job() as (_lab, operator):
        await operator.until("acquired")
        for seconds in (100.0, 5.0):  # the second replaces the first, which lies further away
            operator.deadline = due = anyio.current_time() + seconds
            operator.refresh()
        [(told,)] = await operator.until("deadline")
        assert told == pytest.approx(due, abs=0.01)
        assert anyio.current_time() == pytest.approx(due, abs=0.01)


async def test_a_job_that_needs_no_lease_can_end_at_its_start(open_jobs: OpenJobs) -> None:
    class WithoutWork(QuietOperator):
        def on_start(self, now: float) -> Effects:
            self.hear("start", now)
            return (EndJob(),)

    async with open_jobs(ScriptedStrategy(WithoutWork)) as lab:
        operator = await lab.start()
        [result] = await lab.ended()
        assert isinstance(result, Path)
        assert len(operator.told("start")) == 1
        assert operator.leases == []


async def test_notices_from_before_the_operator_exists_are_delivered(open_job: OpenJob) -> None:
    def make(context: Any) -> QuietOperator:
        context.notify("listening", 7)
        return QuietOperator(context)

    async with open_job(ScriptedStrategy(make)) as (_lab, operator):
        assert await operator.until("message") == [(None, "listening", 7)]


async def test_pushed_file_is_told_of_once_and_refused_after_its_task(open_job: OpenJob, tmp_path: Path) -> None:
    class Receiving(QuietOperator):
        def on_push_request(self, task: TaskRef, header: Any, now: float) -> Any:
            return PushTarget(self.context.directory / f"{task.name}-{header.name}", 1000), ()

    strategy = ScriptedStrategy(Receiving, demand=[role(count=2, minimum=2, distinct=False)])
    async with open_job(strategy, workers=1, cores=2) as (lab, operator):
        await operator.until("acquired")
        job_id = operator.context.job_id
        operator.act(*(StartTask(operator.task(f"t{n}", n), SPEC) for n in (0, 1)))
        await operator.until("update", 2)
        [worker] = lab.workers
        source = tmp_path / "source"
        for number in (0, 1):
            source.write_bytes(b"content %d" % number)
            size, digest = await transfer.describe(source)
            named = operator.task(f"t{number}", number).id_in(job_id)
            header = PushHeader(named, 1, "k", "file", size, digest, lab.peer)
            await transfer.push(worker.endpoint, lab.peer, source, header)
            assert operator.told("pushed")[number] == (operator.task(f"t{number}", number), b"content %d" % number)
        target = await lab.service._push(worker.endpoint.peer_id, header)
        assert isinstance(target, transfer.FilePushTarget)
        await worker.end(operator.leases[1].id)
        with pytest.raises(TransferRefusedError, match="no task of this job runs there"):
            await target.on_complete(size, digest)
        assert len(operator.told("pushed")) == 2


# ------------------------------------------------------------------------------------------------- errors of a strategy


def raising(*_: Any, **__: Any) -> Any:
    raise KeyError("a bug")


async def broken_work() -> None:
    raise KeyError("a bug")


class Unwritable:
    """What cannot be written as JSON."""


BUGS = {
    "role_requests": "refresh",
    "next_deadline": "refresh",
    "on_deadline": "deadline",
    "on_training_report": "report",
    "next_slice": "slice",
    "on_task_update": "end",
    "on_message": "refresh",
    "on_push_request": "push",
    "summary": "finish",
    "on_lease_lost": "lose",
}
"""Methods that raise, and what makes the runner call them."""


async def provoke(lab: Lab, operator: QuietOperator, worker: ScriptedWorker, what: str) -> None:
    lease = operator.leases[0].id
    match what:
        case "refresh":
            operator.refresh()
        case "deadline":
            operator.deadline = anyio.current_time() + 1
            operator.refresh()
        case "report":
            assert isinstance(await worker.report(lab.peer), ReportError)
        case "slice":
            assert isinstance(await worker.slice(lab.peer), NotFound)
        case "end":
            await worker.end(lease)
        case "push":
            digest = "blake3:" + "0" * 64
            header = PushHeader(worker.last, 1, "k", "n", 0, digest, lab.peer)
            assert await lab.service._push(worker.endpoint.peer_id, header) == Refusal(reason="the job is over")
        case "finish":
            operator.act(EndJob())
        case "lose":
            worker.forgotten.add(lease)


async def check_other_job_goes_on(lab: Lab, other: QuietOperator) -> None:
    """Wait for the failure of the first job; let the other one succeed."""
    [failure] = await lab.ended()
    assert isinstance(failure, JobFailedError), repr(failure)
    assert "internal error of strategy 'scripted'" in str(failure)
    await start_task(lab, other)
    await lab.finish(other)
    assert isinstance(lab.results[-1], Path)


@pytest.mark.parametrize("method", BUGS)
async def test_exception_of_an_operator_fails_its_job_alone(open_jobs: OpenJobs, method: str) -> None:
    strategy = ScriptedStrategy(dataset=True)
    async with open_jobs(strategy) as lab:
        operator, other = await lab.start(), await lab.start()
        worker = await start_task(lab, operator)
        setattr(operator, method, raising)
        await provoke(lab, operator, worker, BUGS[method])
        await check_other_job_goes_on(lab, other)
        assert "a bug" in str(lab.results[0])
        assert not [lease for lease, peer in worker.leases.items() if lease == operator.leases[0].id]


WRONG_EFFECTS = {
    "event that is not JSON": EmitEvent("event", {"value": Unwritable()}),
    "record that is not JSON": WriteJournal("record", {"value": Unwritable()}),
    "record of the runner": WriteJournal("finished", {}),
    "field of the runner": WriteJournal("mine", {"record": "finished"}),
    "message of another type": SendMessage(PeerId.from_public_key(bytes(32)), HEALTH_CHECK, Unwritable(), "tag"),
    "work that raises": RunInBackground(broken_work, "tag"),
    "no effect": Unwritable(),
}


@pytest.mark.parametrize("effect", WRONG_EFFECTS.values(), ids=WRONG_EFFECTS)
@pytest.mark.parametrize("after_record", [False, True])
async def test_wrong_effect_fails_its_job_alone(open_jobs: OpenJobs, effect: Any, after_record: bool) -> None:
    async with open_jobs() as lab:
        operator, other = await lab.start(), await lab.start()
        await operator.until("acquired")
        operator.act(*([WriteJournal("first", {})] if after_record else []), effect)
        await check_other_job_goes_on(lab, other)


@pytest.mark.parametrize("what", ["busy lease", "used attempt"])
async def test_task_that_cannot_be_told_apart_fails_its_job(open_jobs: OpenJobs, what: str) -> None:
    async with open_jobs() as lab:
        operator = await lab.start()
        worker = await start_task(lab, operator)
        if what == "used attempt":
            await worker.end(operator.leases[0].id)
        operator.act(StartTask(operator.task(attempt=what == "busy lease"), SPEC))
        [failure] = await lab.ended()
        expected = "task runs on its lease" if what == "busy lease" else "attempts at a task grow"
        assert expected in str(failure)


@pytest.mark.parametrize("answer", [SliceToUse(0, 99), (0, 1), "a slice"], ids=["no such slice", "a tuple", "a text"])
async def test_slice_that_does_not_exist_fails_the_job(open_jobs: OpenJobs, answer: Any) -> None:
    strategy = ScriptedStrategy(dataset=True)
    async with open_jobs(strategy) as lab:
        operator, other = await lab.start(), await lab.start()
        worker = await start_task(lab, operator)
        operator.next_slice = lambda *_: answer
        assert isinstance(await worker.slice(lab.peer), NotFound)
        await check_other_job_goes_on(lab, other)


async def test_strategy_that_cannot_open_fails_its_job_alone(open_jobs: OpenJobs) -> None:
    made: list[Any] = []

    def make(context: Any) -> QuietOperator:
        made.append(context)
        return QuietOperator(context) if len(made) == 1 else raising()

    async with open_jobs(ScriptedStrategy(make)) as lab:
        operator = await lab.start()
        lab.tasks.start_soon(lab.run)
        await check_other_job_goes_on(lab, operator)


async def test_summary_that_is_not_json_fails_the_job_without_a_result(open_jobs: OpenJobs) -> None:
    async with open_jobs() as lab:
        operator = await lab.acquire()
        operator.summary = lambda _traffic: {"value": Unwritable()}
        operator.act(EndJob())
        [failure] = await lab.ended()
        assert "internal error of strategy 'scripted'" in str(failure)
        assert not (operator.context.directory / "result.json").exists()
