"""A scheduler that dies: leases that are orphaned and taken back, jobs that train on, on a virtual clock."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import msgspec
import numpy as np
import pytest
from support.scripted_task_scheduler import ENDS, ScriptedTaskScheduler, kind_of
from support.task_settings import aggregation, training

from hypha_net import backoff, retries, rpc, transfer
from hypha_net.endpoint import Endpoint
from hypha_net.errors import RequestTimeoutError
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.commands import SetMembers
from hypha_proto.contributions import (
    AWAIT_COMMIT,
    STATE_CONTRIBUTION,
    AwaitCommit,
    CommitStatus,
    ContributionKnown,
    StateContribution,
)
from hypha_proto.datasets import DATA, DataRequest, NotFound, SliceAssigned
from hypha_proto.ids import PeerId
from hypha_proto.leases import (
    RELEASE_LEASE,
    RENEW_LEASE,
    SAY_GOODBYE,
    Goodbye,
    GoodbyeReceived,
    LeaseRenewal,
    ReleaseLease,
    Renewed,
    RenewLease,
)
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.resources import Resources
from hypha_proto.round_membership import Member
from hypha_proto.tasks import StatusUpdate, Stop, TaskSpec
from hypha_proto.training_reports import (
    REPORT,
    Acknowledged,
    BatchDone,
    Continue,
    Done,
    OuterStepTaken,
    ReportAnswer,
    ReportError,
    ReportTraining,
    RoundMetrics,
    ScheduleUpdate,
    SendingUpdate,
    UpdateMerged,
)
from hypha_proto.transfer import OUTER_UPDATE, PSEUDO_GRADIENT, PushHeader, Refusal
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_worker.bidding.arbiter import Arbiter
from hypha_worker.bidding.policy import OfferSection
from hypha_worker.bridge.round_commits import RoundClient
from hypha_worker.bridge.training import TrainingBridge
from hypha_worker.bridge.training_reports import MAX_UNREPORTED
from hypha_worker.connectors.peer_files import request_slices
from hypha_worker.errors import BridgeError
from hypha_worker.executors.parameter_server.server import ParameterServer
from hypha_worker.leasing.capacity import Capabilities, Capacity
from hypha_worker.leasing.lease_manager import Lease, LeaseManager, LeaseState
from hypha_worker.leasing.terms import LeaseTerms
from hypha_worker.service import Worker
from hypha_worker.tasks.execution import Execution, TaskContext
from hypha_worker.tasks.output_server import OutputServer
from hypha_worker.tasks.output_store import OutputStore
from hypha_worker.tasks.task_run import TaskHost
from hypha_worker.tasks.task_sessions import TaskSessions

pytestmark = pytest.mark.virtual_clock

TRAIN = ExecutorDescriptor("train", "x")
SERVER = ExecutorDescriptor("aggregate", "x")
MACHINE = Capacity(Resources(cpu=4.0))
LEASE = uuid.UUID(int=7)
TASK = "task"
PRICE = 3600.0
"""A token a second."""
Script = Callable[["Job"], Awaitable[None]]


class Job(Execution):
    """A scripted execution, which does what an executor does through its bridge."""

    def __init__(self, context: TaskContext, script: Script) -> None:
        assert context.spec.training is not None
        self.context, self._script = context, script
        self.bridge = TrainingBridge(context, context.spec.training, lambda _error: None)
        self.reported: list[Any] = []
        self.batches = 0
        self.slowest_batch = 0.0

    async def run(self) -> None:
        await self._script(self)

    async def batch(self, slices: Mapping[str, int] | None = None) -> ReportAnswer:
        """Compute for a second and report it."""
        await anyio.sleep(1.0)
        begun = anyio.current_time()
        answer = await self.bridge.report(BatchDone(batch_size=8, slices=dict(slices) if slices else None))
        self.batches += 1
        self.slowest_batch = max(self.slowest_batch, anyio.current_time() - begun)
        return answer

    async def report(self, progress: Any) -> ReportAnswer:
        answer = await self.bridge.report(progress)
        self.reported.append(progress)
        return answer

    async def next_slice(self) -> None:
        context = self.context
        await request_slices(context.contact, DataRequest(context.attempt, "digits", id=uuid.uuid4()))


@dataclass
class Process:
    """One run of a scheduler's process. One that was started again knows no job before `take_up`."""

    endpoint: MemoryEndpoint
    folder: Path
    tasks: ScriptedTaskScheduler
    """Its side of the task streams, which each run has from its journal."""
    reports: list[ReportTraining] = field(default_factory=list)
    goodbyes: list[Goodbye] = field(default_factory=list)
    pushes: list[str] = field(default_factory=list)
    """Kinds of the files that it got."""
    slices: int = 0
    refused: int = 0
    silent: bool = False

    def listen(self) -> None:
        for method, handler in (
            (REPORT, self._report),
            (DATA, self._data),
            (SAY_GOODBYE, self._goodbye),
        ):
            rpc.serve(self.endpoint, method, handler)  # type: ignore[arg-type]
        transfer.serve_pushes(self.endpoint, self._push)
        self.tasks.endpoint = self.endpoint
        self.tasks.listen()

    @property
    def knows_job(self) -> bool:
        return self.tasks.refuse is None

    def take_up(self) -> None:
        """Know the job from now on."""
        self.tasks.refuse = None

    @property
    def ends(self) -> list[StatusUpdate]:
        return [report for report in self.tasks.updates if kind_of(report) in ENDS]

    async def _push(self, _peer: PeerId, header: PushHeader) -> transfer.FilePushTarget | Refusal:
        if not self.knows_job or header is None:
            self.refused += 1
            return Refusal(reason="no such job")

        async def on_complete(_size: int, _digest: str) -> None:
            self.pushes.append(header.kind)

        return transfer.FilePushTarget(self.folder / f"{uuid.uuid4()}", 1 << 20, on_complete)

    async def _report(self, _peer: PeerId, report: ReportTraining) -> ReportAnswer:
        if self.silent:
            await anyio.sleep_forever()
        if not self.knows_job:
            self.refused += 1
            return ReportError(reason="no such job")
        self.reports.append(report)
        if isinstance(report.progress, BatchDone):
            return ScheduleUpdate(counter=3) if len(self.reports) == 5 else Continue()
        return Done() if isinstance(report.progress, OuterStepTaken) else Acknowledged()

    async def _data(self, _peer: PeerId, _request: DataRequest) -> SliceAssigned | NotFound:
        if not self.knows_job:
            self.refused += 1
            return NotFound()
        self.slices += 1
        return SliceAssigned(data_provider=self.endpoint.peer_id, index=self.slices)

    async def _goodbye(self, _peer: PeerId, goodbye: Goodbye) -> GoodbyeReceived:
        self.goodbyes.append(goodbye)
        return GoodbyeReceived()

    def commit_rounds(self) -> None:
        """Serve the protocol of rounds."""
        rpc.serve(self.endpoint, STATE_CONTRIBUTION, self._state)
        rpc.serve(self.endpoint, AWAIT_COMMIT, self._await_commit)

    async def _state(self, _peer: PeerId, _statement: StateContribution) -> ContributionKnown:
        self.refused += not self.knows_job
        return ContributionKnown(accepted=self.knows_job, reason="" if self.knows_job else "no such job")

    async def _await_commit(self, _peer: PeerId, _question: AwaitCommit) -> CommitStatus:
        self.refused += not self.knows_job
        return CommitStatus(committed=self.knows_job, reason="" if self.knows_job else "no such job")

    def progress(self, *kinds: type[Any]) -> list[Any]:
        return [report.progress for report in self.reports if isinstance(report.progress, kinds)]


@dataclass
class Site:
    """A worker with one lease, and the processes of its scheduler."""

    network: MemoryNetwork
    worker: Worker
    terms: LeaseTerms
    spec: TaskSpec
    stack: AsyncExitStack
    jobs: list[Job]
    process: Process

    @property
    def peer(self) -> PeerId:
        return self.worker.endpoint.peer_id

    @property
    def lease(self) -> Lease | None:
        return next((lease for lease in self.worker.lease_manager.leases if lease.id == LEASE), None)

    @property
    def state(self) -> LeaseState | None:
        return None if self.lease is None else self.lease.state

    @property
    def held(self) -> Lease:
        assert self.lease is not None
        return self.lease

    @property
    def free(self) -> float:
        return self.worker.lease_manager.free.resources.cpu

    async def start(self, *, knows_job: bool) -> Process:
        """Start the scheduler's process; it connects to the worker."""
        endpoint = await self.stack.enter_async_context(self.network.endpoint("scheduler"))
        self.process = Process(endpoint, self.process.folder, self.process.tasks)
        self.process.tasks.refuse = None if knows_job else "no such job"
        self.process.listen()
        return self.process

    async def kill(self) -> None:
        """End the scheduler's process."""
        await self.stack.aclose()

    async def renew(self) -> LeaseRenewal:
        return await rpc.call(self.process.endpoint, self.peer, RENEW_LEASE, RenewLease(id=LEASE))

    async def renew_for(self, seconds: float) -> None:
        end = anyio.current_time() + seconds
        while anyio.current_time() < end:
            assert isinstance(await self.renew(), Renewed)
            await anyio.sleep(min(3.0, end - anyio.current_time()))

    async def dispatch(self, grace: float | None, spec: TaskSpec | None = None) -> None:
        grace_ms = None if grace is None else int(grace * 1000)
        tasks = self.process.tasks
        tasks.define(LEASE, TASK, start=msgspec.structs.replace(spec or self.spec, orphan_grace_ms=grace_ms))
        await tasks.until(lambda: tasks.of(TASK))
        assert tasks.kinds(TASK)[0] == "started"

    async def seconds_until(self, condition: Callable[[], bool], bound: float = 400.0) -> float:
        begun = anyio.current_time()
        with anyio.fail_after(bound):
            while not condition():
                await anyio.sleep(0.05)
        return anyio.current_time() - begun


def make_worker(
    endpoint: Endpoint, leases: LeaseManager, tasks: anyio.abc.TaskGroup, folder: Path, script: Script, jobs: list[Job]
) -> Worker:
    def execute(context: TaskContext) -> Job:
        jobs.append(Job(context, script))
        return jobs[-1]

    executors = {"train/x": execute, "aggregate/x": ParameterServer}
    store = OutputStore(folder / "outputs")
    sessions = TaskSessions(TaskHost(endpoint, leases, folder, store, executors), tasks)
    outputs = OutputServer(endpoint, store, leases, tasks)
    return Worker(endpoint, Arbiter(OfferSection(), Capabilities(MACHINE)), leases, sessions, outputs)


@asynccontextmanager
async def open_site(folder: Path, script: Script, terms: LeaseTerms) -> AsyncIterator[Site]:
    network, leases, jobs = MemoryNetwork(), LeaseManager(MACHINE, terms), list[Job]()
    async with (
        network.endpoint("worker") as endpoint,
        anyio.create_task_group() as tasks,
        AsyncExitStack() as stack,
    ):
        worker = make_worker(endpoint, leases, tasks, folder, script, jobs)
        worker.listen()
        tasks.start_soon(worker.sweep_loop)
        scheduler = await stack.enter_async_context(network.endpoint("scheduler"))
        process = Process(scheduler, folder, ScriptedTaskScheduler(scheduler))
        spec = TaskSpec(executor="train/x", training=training(scheduler.peer_id))
        site = Site(network, worker, terms, spec, stack, jobs, process)
        site.process.listen()
        allocation = MACHINE.fit(Resources(cpu=3.0))
        assert allocation is not None
        expires, executors = anyio.current_time() + 0.5, (TRAIN, SERVER)
        leases.offer(Lease(LEASE, scheduler.peer_id, uuid.uuid4(), allocation, PRICE, expires, executors=executors))
        await site.renew()
        yield site
        tasks.cancel_scope.cancel()


@pytest.fixture
def at_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AtSite:
    """Return a function that opens a worker, for a virtual clock: what threads would do is done at once."""

    async def at_once(function: Callable[..., Any], *arguments: Any, **_options: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return function(*arguments)

    monkeypatch.setattr(anyio.to_thread, "run_sync", at_once)

    return lambda script, **terms: open_site(tmp_path, script, LeaseTerms(**terms))


AtSite = Callable[..., AbstractAsyncContextManager[Site]]


async def train(job: Job) -> None:
    """Train rounds of ten batches, for ever."""
    for number in range(1, 1000):
        await job.next_slice()
        for _ in range(10):
            await job.batch({"1": 8})
        for progress in (SendingUpdate(), UpdateMerged(), RoundMetrics(round=number, metrics={})):
            await job.report(progress)


async def compute(job: Job) -> None:
    """Only compute, for ever."""
    while True:
        await job.batch()


async def test_a_scheduler_that_is_back_within_the_grace_finds_its_job(
    at_site: AtSite, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with at_site(train) as site:
            await site.dispatch(120.0)
            await site.renew_for(25.0)
            before, [job] = site.process, site.jobs
            assert 20 < site.held.charged <= 26
            batches = job.batches
            await site.kill()
            assert 8 < await site.seconds_until(lambda: site.state is LeaseState.ORPHANED) < 11
            charged = site.held.charged
            assert site.free == 1.0, "its resources stay taken"
            await anyio.sleep(50.0)
            assert (site.state, site.free, site.held.charged) == (LeaseState.ORPHANED, 1.0, charged)
            assert job.batches > batches, "it has finished its round"
            after = await site.start(knows_job=False)
            await anyio.sleep(3.0)
            assert after.refused > 0, "the job reaches it before it has read its journal"
            after.take_up()
            assert isinstance(await site.renew(), Renewed)
            assert site.state is LeaseState.HELD
            await site.renew_for(30.0)
            assert charged + 29 < site.held.charged < charged + 31, "charged again from then on"
            assert [each for each in site.jobs if each is not job] == []
            reported = [*before.reports, *after.reports]
            others = [report.progress for report in reported if not isinstance(report.progress, BatchDone)]
            assert others == job.reported, "each report has arrived once, in order"
            assert len(others) > 6
            assert job.slowest_batch < 5.5, "no batch waits for the scheduler"
    lines = [line for line in caplog.messages if f"lease {LEASE}" in line]
    assert [line for line in lines if "is orphaned" in line and "held for 120 s" in line]
    assert [line for line in lines if "takes its job back" in line]


async def test_batches_are_answered_at_once_and_their_samples_counted_later(at_site: AtSite) -> None:
    async def count(job: Job) -> None:
        while True:
            await job.batch({"1": 8})

    async with at_site(count) as site:
        await site.dispatch(120.0)
        await site.renew_for(5.0)
        [job], worker = site.jobs, site.peer
        site.network.partition(worker, site.process.endpoint.peer_id)
        begun = job.batches
        await anyio.sleep(8.0)
        assert job.batches >= begun + 7
        site.network.heal(worker, site.process.endpoint.peer_id)
        await site.renew_for(6.0)
        counted = sum(batch.slices["1"] for batch in site.process.progress(BatchDone))
        assert counted in (8 * job.batches, 8 * job.batches - 8), "all but one that may be under way"


async def test_counts_that_an_executor_invents_in_an_outage_are_bounded(at_site: AtSite) -> None:
    async def invent(job: Job) -> None:
        await anyio.sleep(2.0)
        for number in range(3):
            await job.batch({f"{number}-{slice}": 1 << 31 for slice in range(900)} | {"x" * 5000: 1, "1": 1 << 31})
        await anyio.sleep(10.0)
        await job.batch({"1": 8})
        await anyio.sleep_forever()

    async with at_site(invent) as site:
        await site.dispatch(120.0)
        worker, scheduler = site.peer, site.process.endpoint.peer_id
        await anyio.sleep(1.0)
        site.network.partition(worker, scheduler)
        await anyio.sleep(8.0)
        site.network.heal(worker, scheduler)
        await site.renew_for(20.0)
        [batch] = site.process.progress(BatchDone)
        assert batch.slices["1"] == (1 << 32) - 1
        assert len(batch.slices) == MAX_UNREPORTED
        assert max(map(len, batch.slices)) < 20


async def test_a_scheduler_that_does_not_answer_holds_up_one_batch(at_site: AtSite) -> None:
    async with at_site(compute) as site:
        await site.dispatch(120.0)
        await site.renew_for(5.0)
        site.process.silent = True
        [job] = site.jobs
        begun = job.batches
        await anyio.sleep(20.0)
        assert job.batches >= begun + 13


@pytest.mark.parametrize(
    ("asked", "allowed", "expected", "script"),
    [
        (60.0, 120.0, 60.0, train),
        (120.0, 20.0, 20.0, train),
        (60.0, 120.0, 60.0, compute),
        (120.0, 20.0, 20.0, compute),
        (2.0**53, 20.0, 20.0, compute),
        (None, 120.0, 0.0, compute),
        (0.0, 120.0, 0.0, compute),
        (120.0, 0.0, 0.0, compute),
    ],
)
async def test_a_job_ends_when_the_grace_is_over(
    at_site: AtSite, tmp_path: Path, asked: float | None, allowed: float, expected: float, script: Script
) -> None:
    async with at_site(script, orphan_grace=allowed) as site:
        await site.dispatch(asked)
        await site.kill()
        [job] = site.jobs
        took = await site.seconds_until(lambda: site.free == 4.0)
        assert 10.0 <= took - expected <= 10.5
        assert job.context.scope.cancel_called
        assert site.worker.tasks.running == ()
        assert site.state is None
        assert site.worker.lease_manager.owed == pytest.approx(10.0, abs=0.2), "the grace costs nothing"
        await site.start(knows_job=True)
        assert type(await site.renew()).__name__ == "RenewalFailed"
    assert not list(tmp_path.glob("hypha-*")), "its folder is removed"


async def _fail(_peer: PeerId, _report: ReportTraining) -> ReportAnswer:
    raise RequestTimeoutError("broken")


async def test_a_scheduler_that_renews_and_cannot_answer_fails_the_report(
    at_site: AtSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an outage is waited out: an error of the scheduler must not hold up the job for ever."""
    monkeypatch.setattr(backoff, "JITTER", (1.0, 1.0))
    failed: list[float] = []

    async def report_once(job: Job) -> None:
        begun = anyio.current_time()
        try:
            await job.report(SendingUpdate())
        except BridgeError:
            failed.append(anyio.current_time() - begun)
        await anyio.sleep_forever()

    async with at_site(report_once) as site:
        rpc.serve(site.process.endpoint, REPORT, _fail)
        await site.dispatch(120.0)
        await site.renew_for(40.0)
        assert [seconds == pytest.approx(sum(retries.REPORT.pauses), abs=1.0) for seconds in failed] == [True]


@pytest.mark.parametrize("how", ["release", "cancel"])
async def test_an_orphaned_lease_can_be_released_and_its_job_cancelled(at_site: AtSite, how: str) -> None:
    async with at_site(compute) as site:
        await site.dispatch(120.0)
        await site.kill()
        await site.seconds_until(lambda: site.state is LeaseState.ORPHANED)
        known = len(site.process.tasks.subscriptions)
        after = await site.start(knows_job=True)
        await site.seconds_until(lambda: len(after.tasks.subscriptions) > known, 40.0)
        if how == "release":
            answer: Any = await rpc.call(after.endpoint, site.peer, RELEASE_LEASE, ReleaseLease(id=LEASE))
            assert answer.known
            assert await site.seconds_until(lambda: site.free == 4.0) < 1.0
        else:
            after.tasks.define(LEASE, TASK, stop=Stop("x"))
        assert await site.seconds_until(lambda: bool(after.ends)) < 1.0
        assert [kind_of(end) for end in after.ends] == ["cancelled"]
        assert site.worker.tasks.running == ()


async def test_the_end_of_a_job_is_reported_to_the_scheduler_that_takes_it_up(at_site: AtSite) -> None:
    async def end_later(job: Job) -> None:
        await anyio.sleep(30.0)

    async with at_site(end_later) as site:
        await site.dispatch(120.0)
        await site.kill()
        await site.seconds_until(lambda: site.worker.tasks.running == ())
        await anyio.sleep(40.0)
        assert site.state is LeaseState.ORPHANED, "the end is still to be reported"
        after = await site.start(knows_job=False)
        await anyio.sleep(5.0)
        assert after.ends == []
        after.take_up()
        await site.seconds_until(lambda: bool(after.ends), 40.0)
        assert [kind_of(end) for end in after.ends] == ["finished"]
        with anyio.fail_after(20.0):
            await site.worker.tasks.wait_until_idle()


async def test_a_drain_ends_orphaned_leases_when_its_time_is_over(at_site: AtSite) -> None:
    async with at_site(compute) as site:
        await site.dispatch(120.0)
        await site.kill()
        await site.seconds_until(lambda: site.state is LeaseState.ORPHANED)
        begun = anyio.current_time()
        site.worker.draining.request(30.0, "it is told to")
        left = await site.worker.draining.run()
        assert anyio.current_time() - begun == pytest.approx(30.0, abs=0.1)
        assert len(left) == 1
        after = await site.start(knows_job=True)
        await site.worker.say_goodbye("it is over")
        assert [goodbye.leases for goodbye in after.goodbyes] == [(LEASE,)]


async def test_states_and_what_is_owed_are_measured(at_site: AtSite, recorded: Any) -> None:
    async with at_site(compute) as site:
        await site.dispatch(20.0)
        await site.kill()
        await site.seconds_until(lambda: site.state is LeaseState.ORPHANED)
        await anyio.sleep(1.0)
        await site.start(knows_job=True)
        await site.renew()
        await site.kill()
        await site.seconds_until(lambda: site.lease is None)
        await anyio.sleep(1.0)
    states = [about["hypha.lease.state"] for name, value, about in recorded.values
              if name == "hypha.worker.leases.active" and value == 1]  # fmt: skip
    assert list(dict.fromkeys(states))[:3] == ["held", "orphaned", "ending"]
    assert recorded.total("hypha.worker.lease.renewals", hypha_outcome="taken-back") == 1
    assert recorded.total("hypha.worker.lease.ends", hypha_outcome="expired", hypha_lease_state="orphaned") == 1
    assert recorded.total("hypha.worker.lease.owed") == pytest.approx(20.0, abs=0.5)


@pytest.mark.parametrize("knows_protocol", [False, True])
async def test_statements_and_outer_updates_wait_until_the_job_is_taken_up(
    at_site: AtSite, knows_protocol: bool
) -> None:
    """Neither a refusal nor a missing protocol counts before: the update would be lost, or merged without a commit."""
    answers: list[Any] = []
    digest = f"blake3:{1:064}"

    async def finish_round(job: Job) -> None:
        context = job.context
        commits = RoundClient(context.attempt, context.contact)
        await anyio.sleep(12.0)
        answers.append(await commits.state_contribution(1, digest, 8, None))
        answers.append(await commits.wait(1, digest))
        await anyio.sleep_forever()

    async with at_site(finish_round) as site:
        await site.dispatch(120.0)
        await site.kill()
        await anyio.sleep(40.0)
        after = await site.start(knows_job=False)
        if knows_protocol:
            after.commit_rounds()
        await anyio.sleep(10.0)
        assert answers == []
        assert (after.refused > 0) == knows_protocol
        after.take_up()
        after.commit_rounds()
        await site.renew_for(15.0)
        assert answers == [ContributionKnown(accepted=True), CommitStatus(committed=True)]


async def test_a_parameter_server_holds_its_outer_update_and_report(at_site: AtSite, tmp_path: Path) -> None:
    """It takes the step while the scheduler is gone; the members have the outer update before the scheduler."""
    async with at_site(compute) as site, site.network.endpoint("trainer") as endpoint:
        trainer = Process(endpoint, tmp_path, ScriptedTaskScheduler(endpoint))
        trainer.listen()
        receivers = [endpoint.peer_id, site.process.endpoint.peer_id]
        spec = TaskSpec(executor="aggregate/x", aggregation=aggregation([endpoint.peer_id], receivers))
        await site.dispatch(120.0, spec=spec)
        tasks = site.process.tasks
        named = SetMembers(round=1, members=(Member(peer=endpoint.peer_id, samples=8),), deadline_ms=60_000)
        assert (await tasks.command(LEASE, TASK, named)).accepted
        site.network.partition(site.peer, site.process.endpoint.peer_id)
        await push_update(endpoint, site.peer, tasks, tmp_path / "update")
        await site.seconds_until(lambda: trainer.pushes == [OUTER_UPDATE], 5.0)
        await site.seconds_until(lambda: site.state is LeaseState.ORPHANED)
        await anyio.sleep(60.0)
        site.process.tasks.refuse = "no such job"
        site.network.heal(site.peer, site.process.endpoint.peer_id)
        await site.seconds_until(lambda: site.process.refused > 0)
        site.process.take_up()
        await site.renew()
        await site.seconds_until(lambda: bool(site.process.ends), 20.0)
        assert site.process.pushes == [OUTER_UPDATE]
        assert [type(report) for report in site.process.progress(OuterStepTaken)] == [OuterStepTaken]
        assert [kind_of(end) for end in site.process.ends] == ["finished"]


async def push_update(endpoint: MemoryEndpoint, server: PeerId, tasks: ScriptedTaskScheduler, path: Path) -> None:
    write_update(path, {"w": (4,)}, [("w", np.ones(4, np.float32))], UpdateMetadata())
    size, digest = await transfer.describe(path)
    scheduler = tasks.endpoint.peer_id
    header = PushHeader(tasks.name("t"), 1, PSEUDO_GRADIENT, "u", size, digest, samples=1, scheduler=scheduler)
    await transfer.push(endpoint, server, path, header)
