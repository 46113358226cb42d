"""Jobs of a scripted strategy on the in-memory network and a virtual clock, with scripted workers.

A test derives an operator from `QuietOperator`, runs it with `run_jobs`, and speaks as the workers.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import pytest

from hypha_net import pubsub, rpc
from hypha_net.errors import NetError
from hypha_net.node.lifecycle import Node
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.attempt_id import AttemptId
from hypha_proto.datasets import DATA, JSONL, DataRequest, SliceEntry, SlicesAnswer, UnusableSlice
from hypha_proto.drain import ANNOUNCE_DRAIN, Drain
from hypha_proto.health import HEALTH_CHECK, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.leases import (
    RELEASE_LEASE,
    RENEW_LEASE,
    WHY_NOT,
    LeaseReleased,
    LeaseRenewal,
    Reasons,
    Rejection,
    ReleaseLease,
    RenewalFailed,
    Renewed,
    RenewLease,
    WhyNot,
)
from hypha_proto.offers import OFFER, WORKER_REQUESTS, ExecutorDescriptor, WorkerOffer, WorkerRequest, WorkerSpec
from hypha_proto.resources import Resources
from hypha_proto.task_resources import Gone, LocateResource, ResourceLocation
from hypha_proto.tasks import Started, TaskCancelled, TaskDefinition, TaskFailed, TaskFinished, TaskSpec
from hypha_proto.training_reports import REPORT, Acknowledged, BatchDone, ReportAnswer, ReportTraining, TrainingReport
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.allocation.auction import AuctionTable
from hypha_scheduler.config import ConnectorsTable, QueueTable
from hypha_scheduler.datasets.dataset import DatasetView
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.jobs.context import JobHost
from hypha_scheduler.service import SchedulerService, serve
from hypha_scheduler.strategies.base import (
    Effects,
    EndJob,
    JobContext,
    Lease,
    Operator,
    RoleRequest,
    SliceToUse,
    StrategyMethod,
    TaskDraining,
    TaskProgressed,
    TaskReady,
    TaskRef,
    TaskUpdate,
)
from hypha_scheduler.submission.client import socket_path
from support.task_stream_worker import TaskStreamWorker

DATASET = "digits"
SLICES = 8
LIMIT = 600.0
"""Seconds of the virtual clock after which a test has failed."""
REAL_LIMIT = 30.0
"""The same in real time."""


def role(
    name: str = "train",
    count: int = 1,
    minimum: int = 0,
    *,
    distinct: bool = True,
    early: bool = False,
    settle: float = 0.0,
) -> RoleRequest:
    """Return a request for leases; a worker makes offers for every role."""
    spec = WorkerSpec(resources=Resources(cpu=1), executor=(ExecutorDescriptor("train", name),))
    return RoleRequest(
        name, spec, 100.0, 120.0, count, minimum, distinct_peers=distinct, starts_at_minimum=early, settle=settle
    )


SPEC = TaskSpec(executor="train/any")
"""A task; the scripted workers do not look at it."""


class ScriptedJob(JobTable):
    """Job table of the scripted strategy."""

    type: Literal["scripted"] = "scripted"
    seconds: float = 20.0
    grace: float = 0.0
    budget: float | None = None

    @property
    def token_budget(self) -> float | None:
        return self.budget

    @property
    def allocation_timeout(self) -> float:
        return self.seconds

    @property
    def orphan_grace_seconds(self) -> float:
        return self.grace


class QuietOperator:
    """Operator that notes what it hears and does nothing, unless a test overrides it."""

    def __init__(self, context: JobContext) -> None:
        self.context = context
        self.demand: tuple[RoleRequest, ...] = (role(),)
        self.heard: list[tuple[Any, ...]] = []
        self.leases: list[Lease] = []
        self.deadline: float | None = None
        self.changed = anyio.Event()

    def hear(self, *what: Any) -> None:
        self.heard.append(what)
        self.changed.set()
        self.changed = anyio.Event()

    def told(self, what: str) -> list[tuple[Any, ...]]:
        """Return what was heard of one kind, without the kind."""
        return [entry[1:] for entry in self.heard if entry[0] == what]

    async def until(self, what: str, count: int = 1) -> list[tuple[Any, ...]]:
        """Wait until something was heard `count` times."""
        while len(self.told(what)) < count:
            await self.changed.wait()
        return self.told(what)

    def on_start(self, now: float) -> Effects:
        return ()

    def act(self, *effects: Any) -> None:
        """Let the runner carry out effects, as if background work had observed something."""
        self.context.notify("act", effects)

    def refresh(self) -> None:
        """Let the runner look at the demand and the deadline again."""
        self.context.notify("act", ())

    def want(self, *demand: RoleRequest) -> None:
        """Ask for other leases than before."""
        self.demand = demand
        self.refresh()

    def task(self, name: str = "task", lease: int = 0, attempt: int = 0) -> TaskRef:
        return TaskRef(name, self.leases[lease], attempt)

    # ------------------------------------------------------------------------------------------------------- Operator

    def role_requests(self) -> Sequence[RoleRequest]:
        return self.demand

    def on_leases_acquired(self, leases: Sequence[Lease], now: float) -> Effects:
        self.leases += leases
        self.hear("acquired", *leases)
        return ()

    def on_tasks_adopted(self, tasks: Sequence[TaskRef], now: float) -> Effects:
        self.leases += [task.lease for task in tasks]
        self.hear("adopted", *tasks)
        return ()

    def on_lease_lost(self, lease: Lease, reason: str, now: float) -> Effects:
        self.hear("lost", lease, reason)
        return ()

    def on_lease_draining(self, lease: Lease, seconds: float, now: float) -> Effects:
        self.hear("draining", lease, seconds)
        return ()

    def on_allocation_timeout(self, role: str, reasons: str, now: float) -> Effects:
        self.hear("timeout", role, reasons)
        return ()

    def on_task_update(self, task: TaskRef, update: TaskUpdate, now: float) -> Effects:
        is_between = isinstance(update, TaskReady | TaskProgressed | TaskDraining)
        self.hear("running" if is_between else "update", task, update)
        return ()

    def on_locate(self, task: TaskRef, request: LocateResource, now: float) -> tuple[ResourceLocation, Effects]:
        self.hear("locate", task, request)
        return ResourceLocation(gone=Gone(reason="nothing here")), ()

    def on_training_report(self, task: TaskRef, progress: TrainingReport, now: float) -> tuple[ReportAnswer, Effects]:
        self.hear("progress", task, progress)
        return Acknowledged(), ()

    def next_slice(self, task: TaskRef, dataset: str, now: float) -> Any:
        self.hear("slice", task)
        return SliceToUse(0, 0)

    def slice_ahead(self, task: TaskRef, dataset: str, now: float) -> Any:
        return self.next_slice(task, dataset, now)

    def on_slice_unusable(self, task: TaskRef, dataset: str, report: UnusableSlice, now: float) -> Effects:
        self.hear("unusable", task, report)
        return ()

    def on_pull_request(self, task: TaskRef, request: PullRequest) -> Any:
        self.hear("pull", task, request)
        return Refusal(reason="nothing here")

    def on_push_request(self, task: TaskRef, header: Any, now: float) -> tuple[Any, Effects]:
        self.hear("push", task, header)
        return Refusal(reason="nothing wanted"), ()

    def on_late_push(self, task: TaskRef, header: Any, now: float) -> tuple[Any, Effects]:
        return Refusal(reason="no task of this job runs there"), ()

    def on_late_push_complete(self, task: TaskRef, header: Any, path: Path, now: float) -> Effects | None:
        return None

    def on_push_complete(self, task: TaskRef, header: Any, path: Path, digest: str, now: float) -> Effects:
        self.hear("pushed", task, path.read_bytes())
        return ()

    def on_message(self, source: TaskRef | None, name: str, message: Any, now: float) -> tuple[Any, Effects]:
        if source is None and name == "act":
            return None, tuple(message)
        self.hear("message", source, name, message)
        return None, ()

    def on_effect_result(self, tag: str, outcome: object, now: float) -> Effects:
        self.hear("result", tag, outcome)
        return ()

    def next_deadline(self) -> float | None:
        return self.deadline

    def on_deadline(self, now: float) -> Effects:
        self.deadline = None
        self.hear("deadline", now)
        return ()

    def on_command(self, command: str, now: float) -> Effects:
        raise ValueError(command)

    def summary(self, traffic: Mapping[PeerId, Any]) -> Mapping[str, object]:
        return {"leases": len(self.leases)}


@dataclass
class ScriptedStrategy:
    """Strategy whose operators a test makes; the operator of each job is kept."""

    make: Callable[[JobContext], QuietOperator] = QuietOperator
    methods: Sequence[StrategyMethod] = ()
    demand: Sequence[RoleRequest] = ()
    """What each operator asks for at first, if anything else than its own demand."""
    dataset: bool = False
    operators: list[QuietOperator] = field(default_factory=list)
    journals: list[Sequence[Mapping[str, Any]]] = field(default_factory=list)
    """Records that each job was opened with."""
    opened: anyio.Event = field(default_factory=anyio.Event)

    job_table = ScriptedJob

    @property
    def rpc_methods(self) -> Sequence[StrategyMethod]:
        return self.methods

    def open(
        self, job: Any, context: JobContext, journal: Sequence[Mapping[str, Any]]
    ) -> AbstractAsyncContextManager[Operator]:
        return self._open(context, journal)

    @asynccontextmanager
    async def _open(self, context: JobContext, journal: Sequence[Mapping[str, Any]]) -> AsyncIterator[Operator]:
        self.journals.append(journal)
        if self.dataset:
            await context.open_dataset(DATASET, timeout=5.0)
        operator = self.make(context)
        operator.demand = tuple(self.demand) or operator.demand
        self.operators.append(operator)
        self.opened.set()
        self.opened = anyio.Event()
        yield operator

    async def operator(self, number: int = 0) -> Any:
        """Wait for the operator of the job opened as this one."""
        while len(self.operators) <= number:
            await self.opened.wait()
        return self.operators[number]


@dataclass(frozen=True)
class ScriptedStart:
    """What a scripted worker was told to start."""

    lease: uuid.UUID
    definition: TaskDefinition

    @property
    def name(self) -> str:
        return self.definition.attempt.task

    @property
    def attempt(self) -> int:
        return self.definition.attempt.number


@dataclass
class ScriptedStream(TaskStreamWorker):
    """The stream of a lease; its worker is told what is heard."""

    told: Callable[[TaskDefinition], None] = lambda _definition: None

    async def hear(self, definition: TaskDefinition) -> None:
        await super().hear(definition)
        self.told(definition)


@dataclass
class ScriptedWorker:
    """Worker that offers as many leases as it has cores, one core each, and remembers what it is asked."""

    endpoint: MemoryEndpoint
    cores: int = 1
    opens_streams: bool = True
    """Whether it opens the streams of its leases; otherwise the test does."""
    leases: dict[uuid.UUID, PeerId] = field(default_factory=dict)
    """Confirmed leases."""
    released: list[tuple[uuid.UUID, str]] = field(default_factory=list)
    started: list[ScriptedStart] = field(default_factory=list)
    stopped: list[TaskDefinition] = field(default_factory=list)
    refuses_tasks: bool = False
    """Whether it gives each task back at once."""
    ends_cancelled: bool = True
    """Whether it reports the end of a cancelled task."""
    forgotten: set[uuid.UUID] = field(default_factory=set)
    """Leases that it no longer renews."""
    is_silent: bool = False
    """Whether it confirms no task."""
    changed: anyio.Event = field(default_factory=anyio.Event)
    streams: dict[uuid.UUID, ScriptedStream] = field(default_factory=dict)
    offered: dict[uuid.UUID, PeerId] = field(default_factory=dict)
    tasks: anyio.abc.TaskGroup = field(init=False)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        handlers: tuple[tuple[Any, Any], ...] = (
            (RENEW_LEASE, self.renew),
            (RELEASE_LEASE, self.release),
            (WHY_NOT, self.why_not),
            (HEALTH_CHECK, self.health),
        )
        for method, handler in handlers:
            rpc.serve(self.endpoint, method, handler)
        async with (
            anyio.create_task_group() as self.tasks,
            pubsub.subscribe(self.endpoint, WORKER_REQUESTS) as requests,
        ):
            task_status.started()
            async for scheduler, request in requests:
                await self.bid(scheduler, request)

    def _note(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a message has made a condition true."""
        while not condition():
            await self.changed.wait()

    async def bid(self, scheduler: PeerId, request: WorkerRequest) -> None:
        if len(self.leases) >= self.cores:
            return
        lease = uuid.uuid4()
        self.offered[lease] = scheduler
        resources = Resources(cpu=1)
        offer = WorkerOffer(id=lease, request_id=request.id, price=100.0, resources=resources, timeout_ms=500)
        await rpc.call(self.endpoint, scheduler, OFFER, offer)

    async def renew(self, peer: PeerId, request: RenewLease) -> LeaseRenewal:
        known = self.leases.get(request.id) == peer
        is_released = request.id in dict(self.released)  # a renewal may arrive after the release
        room = self.offered.get(request.id) == peer and len(self.leases) < self.cores and not is_released
        if request.id in self.forgotten or not (known or room):
            self.leases.pop(request.id, None)
            return RenewalFailed()
        self.leases[request.id] = peer
        self._note()
        if self.opens_streams and request.id not in self.streams:
            stream = ScriptedStream(self.endpoint, peer, request.id, self.tasks, told=partial(self.hear, request.id))
            self.streams[request.id] = stream
            self.tasks.start_soon(self._keep_open, stream)
        return Renewed(id=request.id, timeout_ms=10_000)

    async def _keep_open(self, stream: ScriptedStream) -> None:
        while stream.lease in self.leases:
            ended = stream.ended
            with suppress(NetError):
                if (await stream.open()).refused is None:
                    await stream.until_ended(ended + 1)
            await anyio.sleep(0.2)

    def hear(self, lease: uuid.UUID, definition: TaskDefinition) -> None:
        if definition.start is not None:
            self.started.append(ScriptedStart(lease, definition))
            if self.refuses_tasks:
                self.streams[lease].report(definition, cancelled=TaskCancelled(reason="it takes no tasks"))
            elif not self.is_silent:
                self.streams[lease].report(definition, started=Started())
        elif definition.stop is not None:
            self.stopped.append(definition)
            if self.ends_cancelled:
                self.streams[lease].report(definition, cancelled=TaskCancelled(reason=definition.stop.reason))
        self._note()

    async def release(self, peer: PeerId, request: ReleaseLease) -> LeaseReleased:
        self.released.append((request.id, request.reason))
        known = self.leases.pop(request.id, None) == peer
        self._note()
        return LeaseReleased(known=known)

    async def why_not(self, _peer: PeerId, _question: WhyNot) -> Reasons:
        return Reasons(rejections=(Rejection(code="busy", text="busy"),))

    async def health(self, _peer: PeerId, _request: HealthRequest) -> Health:
        return Health(healthy=True, role="worker", bytes_sent=123_456, bytes_received=123_456)

    async def drain(self, scheduler: PeerId, *leases: uuid.UUID, seconds: float = 60.0) -> None:
        """Announce that leases end within `seconds`."""
        message = Drain(leases=leases, left_ms=int(seconds * 1000), reason="its owner drains it")
        await rpc.call(self.endpoint, scheduler, ANNOUNCE_DRAIN, message)

    # -------------------------------------------------------------------------------------------- speaks as an executor

    def of(self, lease: uuid.UUID) -> ScriptedStart:
        """Return the last start on a lease."""
        return [start for start in self.started if start.lease == lease][-1]

    async def end(self, lease: uuid.UUID, outcome: str = "finished", *, reason: str = "") -> None:
        """Report the end of the task that was started last on a lease; wait until the scheduler has handled it."""
        ends = {
            "finished": TaskFinished(outputs=()),
            "failed": TaskFailed(reason=reason, exit_code=1),
            "cancelled": TaskCancelled(reason=reason),
        }
        with anyio.move_on_after(5):  # of the virtual clock: the job may end with it
            await self.streams[lease].tell(self.of(lease).definition, **{outcome: ends[outcome]})

    @property
    def last(self) -> AttemptId:
        """The attempt that was started last."""
        return self.started[-1].definition.attempt

    async def report(
        self, scheduler: PeerId, attempt: AttemptId | None = None, *, samples: int = 1, id: uuid.UUID | None = None
    ) -> ReportAnswer:
        message = ReportTraining(attempt or self.last, BatchDone(batch_size=samples), id=id)
        return await rpc.call(self.endpoint, scheduler, REPORT, message, timeout=100.0)

    async def slice(self, scheduler: PeerId, attempt: AttemptId | None = None, **about: Any) -> SlicesAnswer:
        request = DataRequest(attempt or self.last, DATASET, **{"id": uuid.uuid4(), **about})
        return await rpc.call(self.endpoint, scheduler, DATA, request, timeout=100.0)


def dataset(provider: PeerId) -> DatasetView:
    """Return the dataset, as a scheduler has found it."""
    digest = "blake3:" + "0" * 64
    entries = tuple(SliceEntry(file=f"{n}", samples=4, size=1, digest=digest) for n in range(SLICES))
    return DatasetView(DATASET, provider, entries, format=JSONL)


@dataclass
class Lab:
    """Scheduler, workers and the strategy of a test."""

    service: SchedulerService
    strategy: ScriptedStrategy
    workers: list[ScriptedWorker]
    endpoint: MemoryEndpoint
    """Of the scheduler."""
    tasks: anyio.abc.TaskGroup
    results: list[Path | BaseException] = field(default_factory=list)

    @property
    def peer(self) -> PeerId:
        return self.endpoint.peer_id

    def worker(self, lease: Lease) -> ScriptedWorker:
        return next(worker for worker in self.workers if worker.endpoint.peer_id == lease.peer)

    async def start(
        self, job: ScriptedJob | None = None, job_id: uuid.UUID | None = None, *, resume: bool = False
    ) -> Any:
        """Start or resume a job in the background; return its operator."""
        number = len(self.strategy.operators)
        self.tasks.start_soon(self.run, job, job_id, resume)
        return await self.strategy.operator(number)

    async def acquire(self, *arguments: Any, **settings: Any) -> Any:
        """Start a job as `start` does; return its operator when it has its leases."""
        operator = await self.start(*arguments, **settings)
        await operator.until("acquired")
        return operator

    async def run(self, job: ScriptedJob | None = None, job_id: uuid.UUID | None = None, resume: bool = False) -> None:
        try:
            run = self.service.resume_job if resume else self.service.run_job
            self.results.append(await run(job or ScriptedJob(), job_id))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.results.append(error)

    async def ended(self, count: int = 1) -> list[Path | BaseException]:
        """Wait until jobs have ended; return their results or errors."""
        while len(self.results) < count:
            await anyio.sleep(0.1)
        return self.results

    async def finish(self, operator: QuietOperator) -> None:
        """Let a job succeed."""
        before = len(self.results)
        operator.act(EndJob())
        await self.ended(before + 1)


async def run_inline(work: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
    """Run the work of a thread in the event loop: a virtual clock does not wait for threads."""
    await anyio.lowlevel.checkpoint()
    return work(*arguments)


@asynccontextmanager
async def open_scripted_jobs(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    strategy: ScriptedStrategy | None = None,
    *,
    workers: int = 3,
    cores: int = 1,
    seed: int = 1,
    real_time: bool = False,
    streams: bool = True,
) -> AsyncIterator[Lab]:
    """Open a scheduler and workers, for a virtual clock: work in threads takes no time.

    Transfers of files have threads of their own, and need `real_time`. Without `streams` workers open no task streams.
    """

    async def open_dataset(*_: Any, **__: Any) -> DatasetView:
        return dataset(endpoints[1].peer_id)

    used = strategy or ScriptedStrategy()
    if not real_time:
        monkeypatch.setattr(anyio.to_thread, "run_sync", run_inline)
    monkeypatch.setattr("hypha_scheduler.service.load_strategy", lambda _name, _allowed=None: used)
    monkeypatch.setattr("hypha_scheduler.jobs.context.open_dataset", open_dataset)
    network = MemoryNetwork(seed=seed)
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(REAL_LIMIT if real_time else LIMIT))
        names = ["scheduler", "data", *(f"worker-{number}" for number in range(workers))]
        endpoints = [await stack.enter_async_context(network.endpoint(name)) for name in names]
        tasks = await stack.enter_async_context(anyio.create_task_group())
        scripted = [ScriptedWorker(endpoint, cores, streams) for endpoint in endpoints[2:]]
        for worker in scripted:
            await tasks.start(worker.run)
        service = SchedulerService(JobHost(endpoints[0], folder / "runs"))
        yield Lab(service, used, scripted, endpoints[0], tasks)
        tasks.cancel_scope.cancel()


OpenJobs = Callable[..., AbstractAsyncContextManager[Lab]]
OpenJob = Callable[..., AbstractAsyncContextManager[tuple[Lab, Any]]]


class ServedScheduler:
    """A scheduler's `serve` in the background."""

    def __init__(self, lab: Lab, runs: Path, jobs: tuple[ScriptedJob, ...] = (), **queue: Any) -> None:
        self.lab, self.runs = lab, runs
        self.terminated, self.ended = anyio.Event(), anyio.Event()
        self.error: BaseException | None = None
        table = SimpleNamespace(
            auction=AuctionTable(),
            queue=QueueTable(**queue),
            connectors=ConnectorsTable(),
            strategies=None,
            model_command=(),
        )
        self._config: Any = SimpleNamespace(bridge_address=None, scheduler=table, runs_dir=runs, jobs=jobs)
        self._node = Node(lab.endpoint, lab.tasks, drain_on_sigterm=lambda _seconds: self.terminated)
        lab.tasks.start_soon(self._serve)

    async def _serve(self) -> None:
        try:
            await serve(self._config, self._node)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        self.ended.set()

    async def is_up(self) -> None:
        while not await anyio.Path(socket_path(self.runs)).exists():
            await anyio.sleep(0.01)

    async def terminate(self) -> None:
        self.terminated.set()
        await self.ended.wait()
        assert self.error is None
