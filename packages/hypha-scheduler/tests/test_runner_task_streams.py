"""Task streams at the scheduler: definitions and reports, streams that break, and what hostile workers report."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import pytest
from support.mutation import mutated
from support.scripted_jobs import (
    DATASET,
    SLICES,
    Lab,
    OpenJob,
    OpenJobs,
    QuietOperator,
    ScriptedStrategy,
    ScriptedWorker,
    dataset,
    role,
)
from support.task_stream_worker import TaskStreamWorker, WorkerCodec, subscribe

from hypha_net import rpc
from hypha_net.endpoint import Stream
from hypha_net.errors import NetError
from hypha_net.message_channel import MAX_PENDING, receive_frame
from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_LEASE
from hypha_proto.protocols import TASKS
from hypha_proto.task_resources import (
    LOCATE_RESOURCE,
    FailedHolder,
    Gone,
    LocateResource,
    NotYet,
    PullFiles,
    ResourceLocation,
)
from hypha_proto.tasks import (
    MAX_FRAME,
    MAX_OUTPUT_FILES,
    DatasetSource,
    Draining,
    DrainTask,
    OutputPath,
    Ready,
    ResultSource,
    Started,
    StatusUpdate,
    Stop,
    StoredFile,
    StoredOutput,
    Subscribe,
    TaskCancelled,
    TaskDefinition,
    TaskFailed,
    TaskFinished,
    TaskProgress,
    TaskResource,
    TaskSpec,
    UriSource,
)
from hypha_scheduler.datasets.dataset import DatasetView
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.journal import JOURNAL, read_journal
from hypha_scheduler.jobs.task_streams import MAX_STREAMS, SUBSCRIBE_TIMEOUT
from hypha_scheduler.strategies.base import (
    Effects,
    JobContext,
    Lease,
    StartTask,
    StopTask,
    TaskDraining,
    TaskEnded,
    TaskNotStarted,
    TaskProgressed,
    TaskReady,
    TaskRef,
    TaskStarted,
    TaskState,
    TrafficCounts,
    WriteJournal,
)

pytestmark = pytest.mark.virtual_clock

SPEC = TaskSpec(executor="shell/bash")
DIGEST = "blake3:" + "ab" * 32
REFUSED = "hypha.scheduler.task_reports.refused"


class ConstantOperator(QuietOperator):
    """Operator whose job waits for whatever the test does, and whose summary has the traffic."""

    def summary(self, traffic: Any) -> dict[str, object]:
        return {"traffic": {str(peer): [counts.sent, counts.received] for peer, counts in traffic.items()}}


async def open_stream(lab: Lab, lease: Lease, **settings: Any) -> TaskStreamWorker:
    """Open the stream of a lease as its worker."""
    worker = TaskStreamWorker(lab.worker(lease).endpoint, lab.peer, lease.id, lab.tasks, **settings)
    answer = await worker.open()
    assert answer.refused is None, answer
    return worker


async def start(lab: Lab, spec: TaskSpec = SPEC, *, attempt: int = 0) -> tuple[Any, TaskStreamWorker, TaskDefinition]:
    """Start a job, and a task on its first lease over a new stream, which confirms it.

    Returns:
        The job's operator, the worker's side of the stream, and the definition of the task.
    """
    operator = await lab.acquire()
    worker = await open_stream(lab, operator.leases[0])
    operator.act(StartTask(operator.task(attempt=attempt), spec))
    begin = await worker.until("start")
    await worker.tell(begin, started=Started())
    assert operator.told("update")[-1] == (operator.task(attempt=attempt), TaskStarted())
    return operator, worker, begin


@asynccontextmanager
async def running(
    open_jobs: OpenJobs, spec: TaskSpec = SPEC, **more: int
) -> AsyncIterator[tuple[Lab, Any, TaskStreamWorker, TaskDefinition]]:
    """Open a lab with a job as `start` returns it, which succeeds at the end of the context."""
    async with open_jobs(streams=False) as lab:
        operator, worker, begin = await start(lab, spec, **more)
        yield lab, operator, worker, begin
        await lab.finish(operator)


def events(context: JobContext, *names: str) -> list[dict[str, Any]]:
    """Return events of a job, without their times."""
    lines = [json.loads(line) for line in (context.directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines if line["event"] in names]


# ------------------------------------------------------------------------------------------------------------- attempts


async def test_attempts_follow_one_another_over_one_stream(open_jobs: OpenJobs) -> None:
    async with open_jobs(ScriptedStrategy(ConstantOperator), streams=False) as lab:
        operator, worker, begin = await start(lab)
        assert begin == TaskDefinition(attempt=AttemptId(operator.context.job_id, "task", 0), start=SPEC)
        await worker.tell(begin, ready=Ready())
        await worker.tell(begin, progress=TaskProgress(fraction=0.5, message="half\nway", metrics={"loss": 1.0}))
        progress = TaskProgressed(TaskProgress(fraction=0.5, message="half way", metrics={"loss": 1.0}))
        assert operator.told("running") == [(operator.task(), TaskReady()), (operator.task(), progress)]
        failed = TaskFailed(reason="it broke", exit_code=3, last_lines=("x",) * 60, bytes_sent=5, bytes_received=7)
        await worker.tell(begin, failed=failed)
        assert operator.told("update")[-1] == (
            operator.task(),
            TaskEnded(TaskState.FAILED, "it broke", 3, ("x",) * 50),
        )
        operator.act(StartTask(operator.task(attempt=1), SPEC))
        again = await worker.until("start", 2)
        await worker.tell(again, ready=Ready())  # implies that it has started
        assert operator.told("update")[-1] == (operator.task(attempt=1), TaskStarted())
        await worker.finish(again)
        assert operator.told("update")[-1] == (operator.task(attempt=1), TaskEnded(TaskState.FINISHED, exit_code=0))
        assert worker.channel.pending == 0
        await lab.finish(operator)
        [result] = lab.results
        assert isinstance(result, Path)
        peer = str(operator.leases[0].peer)
        assert json.loads(result.read_text())["traffic"] == {peer: [6, 9]}
        assert lab.worker(operator.leases[0]).started == []
        about = {"task": "task", "worker": peer}
        assert events(operator.context, "task_started", "task_ended") == [
            {"event": "task_started", **about, "attempt": 0},
            {"event": "task_ended", **about, "attempt": 0, "outcome": "failed", "reason": "it broke", "exit_code": 3},
            {"event": "task_started", **about, "attempt": 1},
            {"event": "task_ended", **about, "attempt": 1, "outcome": "finished", "exit_code": 0},
        ]
        await worker.until_ended()


@pytest.mark.parametrize("seed", range(12))
async def test_nothing_is_lost_or_repeated_while_streams_break(open_jobs: OpenJobs, seed: int) -> None:
    """Attempts run on three leases while their streams are cut at random; the operator starts one after the other."""
    attempts, chance = 25, random.Random(seed)

    class Chain(QuietOperator):
        def on_task_update(self, task: TaskRef, update: Any, now: float) -> Effects:
            super().on_task_update(task, update, now)
            if not isinstance(update, TaskEnded):
                return ()
            after = TaskRef(task.name, task.lease, task.attempt + 1)
            record = WriteJournal("done", {"task": task.name, "attempt": task.attempt})
            return (record, StartTask(after, SPEC)) if after.attempt < attempts else (record,)

    async with open_jobs(ScriptedStrategy(Chain, demand=[role(count=3, minimum=3)]), streams=False, seed=seed) as lab:
        operator = await lab.acquire()
        workers = [await open_stream(lab, lease, auto=True) for lease in operator.leases]
        operator.act(*(StartTask(TaskRef(f"task-{n}", lease), SPEC) for n, lease in enumerate(operator.leases)))
        while sum(isinstance(update, TaskEnded) for _, update in operator.told("update")) < 3 * attempts:
            for _ in range(chance.randrange(30)):
                await anyio.lowlevel.checkpoint()
            victim = chance.choice(workers)
            await victim.cut()
            assert (await victim.open()).refused is None
        expected = [
            (f"task-{n}", attempt, kind)
            for n in range(3)
            for attempt in range(attempts)
            for kind in (TaskStarted, TaskEnded)
        ]
        heard = [(task.name, task.attempt, type(update)) for task, update in operator.told("update")]
        assert sorted(heard, key=lambda entry: entry[:2]) == expected
        assert len(operator.told("running")) == 3 * attempts
        done = [record for record in read_journal(operator.context.directory / JOURNAL) if record["record"] == "done"]
        assert len(done) == 3 * attempts
        await lab.finish(operator)


async def test_definitions_wait_for_the_first_stream(open_job: OpenJob) -> None:
    async with open_job(streams=False) as (lab, operator):
        await operator.until("acquired")
        operator.act(StartTask(operator.task(), SPEC), StopTask(operator.task(), "too late", keep_lease=True))
        await anyio.sleep(10)
        worker = await open_stream(lab, operator.leases[0])
        stop = await worker.until("stop")
        assert [entry.start is not None for entry in worker.definitions] == [True, False]
        await worker.tell(stop, cancelled=TaskCancelled(reason="too late"))
        assert operator.told("update")[-1][1] == TaskEnded(TaskState.CANCELLED, "too late")


async def test_a_task_that_no_worker_confirms_is_not_started_and_its_lease_goes(open_job: OpenJob) -> None:
    async with open_job(streams=False) as (lab, operator):
        await operator.until("acquired")
        operator.demand = ()
        worker = await open_stream(lab, operator.leases[0])
        operator.act(StartTask(operator.task(), SPEC))
        await worker.until("start")
        with anyio.move_on_after(29) as waited:
            await operator.until("update")
        assert waited.cancelled_caught
        [(task, update)] = await operator.until("update")
        assert task == operator.task()
        assert isinstance(update, TaskNotStarted)
        assert "did not confirm task task within 30 s" in update.reason
        scripted = lab.worker(operator.leases[0])
        await scripted.until(lambda: scripted.released)
        await worker.until_ended()
        assert (await worker.open()).refused == "no job of this scheduler holds that lease"
        assert operator.told("lost") == []


async def test_a_worker_that_acknowledges_nothing_loses_its_lease(open_job: OpenJob) -> None:
    """The definitions pile up until the limit of the channel."""
    async with open_job(streams=False) as (lab, operator):
        await operator.until("acquired")
        operator.demand = ()
        task = operator.task()
        operator.act(StartTask(task, SPEC), *(StopTask(task, "", drain_seconds=1) for _ in range(MAX_PENDING)))
        [(_, update)] = await operator.until("update")
        assert update == TaskEnded(TaskState.CANCELLED)
        scripted = lab.worker(operator.leases[0])
        await scripted.until(lambda: scripted.released)


async def test_reports_are_acknowledged_when_their_effects_are_carried_out(
    open_jobs: OpenJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recording(QuietOperator):
        def on_task_update(self, task: TaskRef, update: Any, now: float) -> Effects:
            super().on_task_update(task, update, now)
            return (WriteJournal("done", {}),) if isinstance(update, TaskEnded) else ()

    async with open_jobs(ScriptedStrategy(Recording), streams=False) as lab:
        operator, worker, begin = await start(lab)
        free = anyio.Event()

        async def held(work: Any, *arguments: Any, **_: Any) -> Any:
            await free.wait()
            return work(*arguments)

        monkeypatch.setattr(anyio.to_thread, "run_sync", held)
        worker.report(begin, finished=TaskFinished(outputs=()))
        await operator.until("update", 2)
        await anyio.sleep(5)
        assert worker.channel.pending == 1
        await worker.cut()
        await worker.open()  # the next stream waits for it, and hears of it
        await anyio.sleep(5)
        assert worker.channel.pending == 1
        free.set()
        await worker.channel.wait_until_handled()
        assert len(operator.told("update")) == 2
        await lab.finish(operator)


# ------------------------------------------------------------------------------------------------------ stop and drain


async def test_a_stopped_task_leaves_its_lease(open_jobs: OpenJobs) -> None:
    async with running(open_jobs) as (lab, operator, worker, begin):
        stop = StopTask(operator.task(), "enough", keep_lease=True)
        operator.act(stop, stop)  # a second one does no harm
        heard = await worker.until("stop")
        assert (heard.attempt, heard.stop) == (begin.attempt, Stop("enough"))
        await worker.tell(begin, cancelled=TaskCancelled(reason="enough"))
        assert operator.told("update")[-1] == (operator.task(), TaskEnded(TaskState.CANCELLED, "enough"))
        operator.act(StartTask(operator.task(attempt=1), SPEC))
        again = await worker.until("start", 2)
        await worker.tell(again, started=Started())
        operator.act(stop, StopTask(operator.task(), "late"))  # of the attempt that is over
        await anyio.sleep(100)
        await worker.finish(again)
        assert operator.told("update")[-1] == (operator.task(attempt=1), TaskEnded(TaskState.FINISHED, exit_code=0))
        assert len([entry for entry in worker.definitions if entry.stop is not None]) == 1
        assert lab.worker(operator.leases[0]).released == []


@pytest.mark.parametrize("drains", [False, True])
async def test_a_task_whose_end_is_not_reported_loses_its_lease(open_jobs: OpenJobs, drains: bool) -> None:
    async with running(open_jobs) as (lab, operator, worker, _):
        operator.demand = ()
        began = anyio.current_time()
        operator.act(StopTask(operator.task(), "enough", keep_lease=True, drain_seconds=20 * drains))
        await operator.until("update", 2)
        assert anyio.current_time() - began == pytest.approx(80 if drains else 60, abs=1)
        kinds = ["drain" if entry.drain else "stop" for entry in worker.definitions[1:]]
        assert kinds == (["drain", "stop"] if drains else ["stop"])
        assert operator.told("update")[-1][1] == TaskEnded(TaskState.CANCELLED, "enough")
        await worker.until_ended()
        scripted = lab.worker(operator.leases[0])
        await scripted.until(lambda: scripted.released)


async def test_a_task_that_drains_ends_by_itself(open_jobs: OpenJobs) -> None:
    async with running(open_jobs) as (lab, operator, worker, begin):
        operator.act(StopTask(operator.task(), "move over", drain_seconds=20))
        heard = await worker.until("drain")
        assert heard.drain == DrainTask(left_ms=20_000, reason="move over")
        await worker.tell(begin, draining=Draining(left_ms=15_000))
        assert operator.told("running") == [(operator.task(), TaskDraining(15.0))]
        await worker.finish(begin)
        assert operator.told("update")[-1][1] == TaskEnded(TaskState.FINISHED, exit_code=0)
        await anyio.sleep(100)
        assert lab.worker(operator.leases[0]).released == []


async def test_a_task_that_is_stopped_for_good_takes_its_lease_along(open_jobs: OpenJobs) -> None:
    async with running(open_jobs) as (lab, operator, worker, _):
        operator.demand = ()
        operator.act(StopTask(operator.task(), "over"))
        assert (await operator.until("update", 2))[-1][1] == TaskEnded(TaskState.CANCELLED, "over")
        await worker.until_ended()
        scripted = lab.worker(operator.leases[0])
        await scripted.until(lambda: scripted.released)
        assert scripted.released == [(operator.leases[0].id, "over")]
        assert [entry.stop for entry in worker.definitions] == [None]


async def test_a_lost_lease_ends_its_task_and_its_stream(open_jobs: OpenJobs) -> None:
    async with running(open_jobs) as (lab, operator, worker, begin):
        operator.demand = ()
        scripted = lab.worker(operator.leases[0])
        scripted.forgotten.add(operator.leases[0].id)
        await operator.until("lost")
        assert operator.told("update")[-1][1].state is TaskState.FAILED
        await worker.until_ended()
        before = len(operator.heard)
        assert (await worker.open()).refused is not None
        worker.report(begin, finished=TaskFinished(outputs=()))
        await anyio.sleep(10)
        assert len(operator.heard) == before


async def test_a_lease_is_renewed_at_once_when_its_stream_breaks(open_jobs: OpenJobs) -> None:
    """Its worker may have ended, and its lease with it."""
    async with running(open_jobs) as (lab, operator, worker, _):
        operator.demand = ()
        lab.worker(operator.leases[0]).forgotten.add(operator.leases[0].id)
        began = anyio.current_time()
        await worker.cut()
        await operator.until("lost")
        assert anyio.current_time() - began < 1.0


# ------------------------------------------------------------------------------------------------------ hostile reports


async def test_reports_of_other_attempts_are_refused_and_counted(
    open_jobs: OpenJobs, recorded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(open_jobs, attempt=1) as (_lab, operator, worker, begin):
        before = len(operator.heard)
        for false in ({"number": 0}, {"number": 2}, {"task": "other"}, {"job_id": uuid.uuid4()}):
            attempt = msgspec.structs.replace(begin.attempt, **false)
            worker.channel.send(StatusUpdate(attempt=attempt, finished=TaskFinished(outputs=())))
        await worker.channel.wait_until_handled()
        assert recorded.total(REFUSED) == 4
        assert len(operator.heard) == before
        await worker.finish(begin)
        worker.report(begin, finished=TaskFinished(outputs=()))
        await worker.channel.wait_until_handled()
        assert recorded.total(REFUSED) == 5
        assert len(operator.told("update")) == 2
        refusals = [record for record in caplog.records if "refused: it is about an attempt" in record.getMessage()]
        assert len(refusals) == 1  # a minute for each lease


ASKED = TaskSpec(
    executor="shell/bash",
    outputs=(OutputPath(name="model", path="model"), OutputPath(name="log", path="log.txt")),
    resources=(TaskResource(name="data", uri=UriSource(value="https://example.org/data")),),
)


def file(path: str, *, size: int = 1, digest: str = DIGEST) -> StoredFile:
    return StoredFile(path=path, size=size, digest=digest)


def stored(name: str, *files: StoredFile, dataset: str | None = None) -> StoredOutput:
    return StoredOutput(name=name, dataset=f"secret-{name}" if dataset is None else dataset, files=files)


LOG = stored("log", file(""))
MODEL = stored("model", file("a"), file("b/c"), file("b/d"))


def finished(*outputs: StoredOutput) -> dict[str, Any]:
    return {"finished": TaskFinished(outputs=outputs)}


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (finished(LOG), "an end without the output 'model'"),
        (finished(LOG, MODEL, stored("x")), "the output 'x', which it was not asked for"),
        (finished(LOG, LOG, MODEL), "an output twice"),
        (finished(stored("log", dataset="x"), stored("model", dataset="x")), "two outputs under one name"),
        (finished(stored("log", dataset=""), MODEL), "a dataset's name of 0 characters"),
        (finished(stored("log", dataset="x" * 201), MODEL), "a dataset's name of 201 characters"),
        (finished(LOG, stored("model", file("../x"))), "'../x', which is not inside its folder"),
        (finished(LOG, stored("model", file("/x"))), "'/x', which is not inside its folder"),
        (finished(LOG, stored("model", file("x/.."))), "'x/..', which is not inside its folder"),
        (finished(LOG, stored("model", file("x\0"))), "which is not inside its folder"),
        (finished(LOG, stored("model", file("x" * 256))), "which is longer than 255 bytes"),
        (finished(LOG, stored("model", file("."))), "'.', which is not inside its folder"),
        (finished(LOG, stored("model", file(""), file("x"))), "'', which is not inside its folder"),
        (finished(LOG, stored("model", file("x"), file("./x"))), "which overlap"),
        (finished(LOG, stored("model", file("x"), file("x-y"), file("x//y"))), "'x' and 'x//y', which overlap"),
        (finished(LOG, stored("model", file("x", size=1 << 41))), "outputs of more than"),
        (finished(LOG, stored("model", file("x", digest="sha256:" + "ab" * 32))), "which is not of blake3"),
        (finished(LOG, stored("model", *(file(str(n)) for n in range(MAX_OUTPUT_FILES)))), "more than 2000 files"),
        ({"failed": TaskFailed(reason="", resource="x" * 9000)}, "xxx', which the task does not have"),
        ({"progress": TaskProgress(fraction=1.5)}, "progress of 1.5, which is not from 0 to 1"),
        ({"progress": TaskProgress(metrics={str(n): 1.0 for n in range(101)})}, "more than 100 metrics"),
        ({**finished(LOG, MODEL), "ready": Ready()}, "several things in one message"),
    ],
)
async def test_a_report_that_contradicts_the_task_ends_its_attempt(
    open_jobs: OpenJobs, recorded: Any, what: dict[str, Any], why: str
) -> None:
    async with running(open_jobs, ASKED) as (_lab, operator, worker, begin):
        await worker.tell(begin, **what)
        task, update = operator.told("update")[-1]
        assert (task, update.state, update.outputs) == (operator.task(), TaskState.FAILED, ())
        assert update.reason.startswith("its worker reported ")
        assert why in update.reason
        assert len(update.reason) < 200
        assert recorded.total(REFUSED) == 1
        operator.act(StartTask(operator.task(attempt=1), ASKED))
        again = await worker.until("start", 2)
        stops = [entry for entry in worker.definitions if entry.stop is not None]
        assert len(stops) == ("progress" in what)  # it may still run
        await worker.finish(again, MODEL, LOG)
        ended = TaskEnded(TaskState.FINISHED, exit_code=0, outputs=(MODEL, LOG))
        assert operator.told("update")[-1] == (operator.task(attempt=1), ended)


async def test_an_empty_report_is_of_a_later_version_and_skipped(open_jobs: OpenJobs, recorded: Any) -> None:
    async with running(open_jobs) as (_lab, operator, worker, begin):
        before = len(operator.heard)
        await worker.tell(begin)
        assert (len(operator.heard), recorded.total(REFUSED)) == (before, 0)


# -------------------------------------------------------------------------------------------------------------- streams


async def refused(lab: Lab, worker: ScriptedWorker, lease: uuid.UUID) -> str | None:
    stream = await worker.endpoint.open_stream(lab.peer, [TASKS])
    answer = await subscribe(stream, Subscribe(lease=lease, next=0))
    if answer.refused is not None:
        assert await stream.receive_some() == b""
    return answer.refused


async def test_streams_of_other_leases_are_refused(open_jobs: OpenJobs, recorded: Any) -> None:
    async with open_jobs(streams=False) as lab:
        operator = await lab.acquire()
        lease = operator.leases[0]
        other = next(worker for worker in lab.workers if worker is not lab.worker(lease))
        unknown = "no job of this scheduler holds that lease"
        assert await refused(lab, other, lease.id) == unknown
        assert await refused(lab, other, uuid.uuid4()) == unknown
        assert await refused(lab, lab.worker(lease), lease.id) is None
        await lab.finish(operator)
        assert await refused(lab, lab.worker(lease), lease.id) == unknown
        assert recorded.total("hypha.scheduler.task_streams.refused") == 3


async def test_streams_of_a_peer_are_bounded(open_job: OpenJob) -> None:
    async with open_job(streams=False) as (lab, operator):
        await operator.until("acquired")
        worker = lab.worker(operator.leases[0])
        idle = [await worker.endpoint.open_stream(lab.peer, [TASKS]) for _ in range(MAX_STREAMS)]
        assert await refused(lab, worker, operator.leases[0].id) == "over 64 streams"
        await idle[0].reset()
        await anyio.sleep(1)
        assert await refused(lab, worker, operator.leases[0].id) is None
        await anyio.sleep(SUBSCRIBE_TIMEOUT)
        for stream in idle[1:]:
            with pytest.raises(NetError):  # no first message in time
                await stream.receive_some()
        assert await refused(lab, worker, operator.leases[0].id) is None


async def test_a_stream_may_come_before_the_answer_to_its_renewal(open_jobs: OpenJobs) -> None:
    """A worker opens the stream when it has confirmed the lease, which the scheduler may hear later."""
    answers: list[str | None] = []
    async with open_jobs(streams=False) as lab:
        for worker in lab.workers:
            confirm = worker.renew

            async def renew(peer: PeerId, request: Any, worker: Any = worker, confirm: Any = confirm) -> Any:
                answer = await confirm(peer, request)
                if not answers:
                    answers.append("asked")
                    lab.tasks.start_soon(open_early, worker, request.id)
                    await anyio.sleep(0.1)
                return answer

            worker.renew = renew  # type: ignore[method-assign]
            rpc.serve(worker.endpoint, RENEW_LEASE, renew)

        async def open_early(worker: ScriptedWorker, lease: uuid.UUID) -> None:
            answers.append(await refused(lab, worker, lease))

        operator = await lab.acquire()
        await anyio.sleep(0.5)
        assert answers == ["asked", None]
        await lab.finish(operator)


@pytest.mark.parametrize("data", [b"", b"\xff", (1 << 20).to_bytes(4, "little"), b"\x03\0\0\0\x83\x01\x02"])
async def test_a_malformed_first_message_ends_the_stream(
    open_job: OpenJob, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    async with open_job(streams=False) as (lab, operator):
        await operator.until("acquired")
        stream: Stream = await lab.workers[0].endpoint.open_stream(lab.peer, [TASKS])
        await stream.send_eof(data)
        with pytest.raises(NetError):
            await stream.receive_some()
        assert "Traceback" not in caplog.text


def with_flipped_bit(data: bytes, chance: random.Random) -> bytes:
    """Return a message that most often still decodes."""
    changed = bytearray(data)
    changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(changed)


async def test_a_job_survives_whatever_its_worker_sends(open_jobs: OpenJobs, caplog: pytest.LogCaptureFixture) -> None:
    """Mutated reports over many streams; what decodes is about the running attempt or another one."""
    chance, outcomes = random.Random(3), Counter[str]()
    whats: list[dict[str, Any]] = [
        {"progress": TaskProgress(fraction=0.5, message="half", metrics={"loss": 1.0})},
        {"failed": TaskFailed(reason="it broke", last_lines=("x", "y"), resource="data")},
        finished(MODEL, LOG),
        {"ready": Ready()},
    ]
    async with open_jobs(streams=False) as lab:
        operator, worker, begin = await start(lab, ASKED)
        await worker.cut()
        received = attempt = 0
        for _ in range(400):
            stream = await worker.endpoint.open_stream(lab.peer, [TASKS])
            about = msgspec.structs.replace(begin.attempt, number=attempt)
            reports = (
                StatusUpdate(attempt=about, started=Started()),
                StatusUpdate(attempt=about, **chance.choice(whats)),
            )
            begins = False
            try:
                answer = await subscribe(stream, Subscribe(lease=worker.lease, next=received))
                begins = await receive_frame(stream, MAX_FRAME) is not None
                frames = [WorkerCodec().encode(answer.next + n, received, report) for n, report in enumerate(reports)]
                frames[1] = chance.choice((mutated, with_flipped_bit))(frames[1], chance)
                await stream.send_eof(b"".join(len(frame).to_bytes(4, "little") + frame for frame in frames))
                while await stream.receive_some():
                    pass
                outcomes["ended"] += 1
            except NetError:
                outcomes["reset"] += 1
                if not begins:  # a frame has acknowledged something else: find out what
                    received = (received + 1) % (2 * attempt + 3)
            await stream.aclose()
            ends = sum(isinstance(update, TaskEnded) for _, update in operator.told("update"))
            if ends > attempt:
                attempt = ends
                operator.act(StartTask(operator.task(attempt=attempt), ASKED))
                await anyio.sleep(0.1)
        assert attempt > 10, (attempt, outcomes)
        assert min(outcomes["ended"], outcomes["reset"]) > 10
        assert lab.results == []
        await lab.finish(operator)
        assert isinstance(lab.results[0], Path)
        assert "Traceback" not in caplog.text
        assert "internal error" not in caplog.text


async def test_a_peer_whose_role_does_not_allow_it_gets_no_stream(
    open_job: OpenJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_job(streams=False) as (lab, operator):
        await operator.until("acquired")
        monkeypatch.setattr(lab.endpoint, "is_authorized", lambda _peer, what: what != TASKS)
        with pytest.raises(NetError):
            await refused(lab, lab.worker(operator.leases[0]), operator.leases[0].id)


# ------------------------------------------------------------------------------------------------------------ resources

INPUTS = TaskSpec(
    executor="shell/bash",
    resources=(
        TaskResource(name="model", result=ResultSource(task="train", output="model")),
        TaskResource(name="data", dataset=DatasetSource(name=DATASET, slices=(1, 3))),
        TaskResource(name="all", dataset=DatasetSource(name=DATASET)),
        TaskResource(name="none", dataset=DatasetSource(name=DATASET, slices=(SLICES,))),
        TaskResource(name="other", dataset=DatasetSource(name="other")),
        TaskResource(name="page", uri=UriSource(value="https://example.org")),
    ),
)


async def locate(
    worker: TaskStreamWorker, begin: TaskDefinition, resource: str, failures: Any = (), **changes: Any
) -> ResourceLocation:
    attempt = msgspec.structs.replace(begin.attempt, **changes)
    question = LocateResource(attempt=attempt, resource=resource, failures=failures)
    return await rpc.call(worker.endpoint, worker.scheduler, LOCATE_RESOURCE, question)


async def test_workers_hear_where_resources_are(open_jobs: OpenJobs, recorded: Any) -> None:
    class Locating(QuietOperator):
        def on_locate(self, task: TaskRef, request: LocateResource, now: float) -> tuple[ResourceLocation, Effects]:
            self.hear("locate", task, request)
            return ResourceLocation(not_yet=NotYet(task="train", retry_ms=500)), (WriteJournal("asked", {}),)

    async with open_jobs(ScriptedStrategy(Locating, dataset=True), streams=False) as lab:
        operator, worker, begin = await start(lab, INPUTS)
        failure = FailedHolder(peer=lab.peer, reason="a\nb" * 1000)
        answer = await locate(worker, begin, "model", failures=(failure,) * 100)
        assert answer == ResourceLocation(not_yet=NotYet(task="train", retry_ms=500))
        [(task, question)] = operator.told("locate")
        assert (task, question.resource, len(question.failures)) == (operator.task(), "model", 16)
        assert len(question.failures[0].reason) == 400
        assert [record["record"] for record in read_journal(operator.context.directory / JOURNAL)][-1] == "asked"

        slices = (await locate(worker, begin, "data")).pull
        assert slices is not None
        assert [(entry.path, entry.dataset, entry.index, entry.size) for entry in slices.files] == [
            ("digits-1.jsonl", DATASET, 1, 1),
            ("digits-3.jsonl", DATASET, 3, 1),
        ]
        [peer] = slices.files[0].peers
        assert slices.files[0].digest == "blake3:" + "0" * 64
        every = (await locate(worker, begin, "all")).pull
        assert every is not None
        assert len(every.files) == SLICES
        again = await locate(worker, begin, "data", failures=(FailedHolder(peer=peer, reason=""),))
        assert again.pull == slices  # it could not be reached, and there is no other
        lacks = FailedHolder(peer=peer, reason="", is_permanent=True)
        for gone, why in (
            (await locate(worker, begin, "data", failures=(lacks,)), "no data node has slice 1"),
            (await locate(worker, begin, "none"), "has 8 slices, none with index 8"),
            (await locate(worker, begin, "other"), "does not use the dataset 'other'"),
            (await locate(worker, begin, "page"), "the source of resource 'page' says where it is"),
            (await locate(worker, begin, "x"), "the task has no resource 'x'"),
            (await locate(worker, begin, "model", number=1), "this attempt at the task does not run on this peer"),
            (await locate(worker, begin, "model", task="x"), "this attempt at the task does not run on this peer"),
            (await locate(worker, begin, "model", job_id=uuid.uuid4()), "this scheduler runs no job"),
        ):
            assert gone.gone is not None
            assert why in gone.gone.reason
        assert len(operator.told("locate")) == 1
        other = next(found for found in lab.workers if found.endpoint is not worker.endpoint)
        thief = TaskStreamWorker(other.endpoint, lab.peer, worker.lease, lab.tasks)
        assert (await locate(thief, begin, "model")).gone is not None
        assert recorded.total("hypha.scheduler.resource_questions.refused") == 3
        await worker.finish(begin)
        assert (await locate(worker, begin, "model")).gone is not None
        assert len(operator.told("locate")) == 1
        await lab.finish(operator)


async def test_slices_keep_the_suffix_of_their_format(open_jobs: OpenJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DatasetSource(name=DATASET, slices=(3, 1, 3))
    spec = TaskSpec(executor="shell/bash", resources=(TaskResource(name="data", dataset=source),))
    async with open_jobs(ScriptedStrategy(dataset=True), streams=False) as lab:

        async def open_dataset(*_: Any, **__: Any) -> DatasetView:
            return replace(dataset(lab.peer), format=None)

        monkeypatch.setattr("hypha_scheduler.jobs.context.open_dataset", open_dataset)
        operator, worker, begin = await start(lab, spec)
        slices = (await locate(worker, begin, "data")).pull
        assert slices is not None
        assert [entry.path for entry in slices.files] == ["digits-3.safetensors", "digits-1.safetensors"]
        await lab.finish(operator)


@pytest.mark.parametrize(
    "answer",
    [
        ResourceLocation(),
        ResourceLocation(gone=Gone(reason=""), pull=PullFiles(())),
        None,
    ],
)
async def test_a_malformed_answer_of_an_operator_fails_its_job(open_jobs: OpenJobs, answer: Any) -> None:
    class Wrong(QuietOperator):
        def on_locate(self, task: TaskRef, request: LocateResource, now: float) -> tuple[ResourceLocation, Effects]:
            return answer, ()

    async with open_jobs(ScriptedStrategy(Wrong), streams=False) as lab:
        _, worker, begin = await start(lab, INPUTS)
        assert await locate(worker, begin, "model") == ResourceLocation(gone=Gone(reason="the job is over"))
        [error] = await lab.ended()
        assert isinstance(error, JobFailedError)
        assert "internal error of strategy" in str(error)


def test_traffic_of_attempts_adds_up() -> None:
    assert TrafficCounts(1, None) + TrafficCounts(2, 3) == TrafficCounts(3, 3)
