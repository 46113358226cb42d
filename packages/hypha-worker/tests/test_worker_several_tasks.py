"""Several tasks of a job on one worker, with scripted executions: which one a push is for."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from support.scripted_task_scheduler import ScriptedTaskScheduler
from support.task_settings import aggregation, all_of, training

from hypha_net import transfer
from hypha_net.errors import TransferRefusedError
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.resources import Resources
from hypha_proto.tasks import Stop, TaskSpec
from hypha_proto.transfer import OUTER_UPDATE, PSEUDO_GRADIENT, PushHeader, Refusal
from hypha_worker.leasing.capacity import Capacity
from hypha_worker.leasing.lease_manager import Lease, LeaseManager, LeaseState
from hypha_worker.leasing.terms import LeaseTerms
from hypha_worker.tasks.execution import Execution, TaskContext
from hypha_worker.tasks.output_store import OutputStore
from hypha_worker.tasks.spec_references import reference_peers
from hypha_worker.tasks.task_run import TaskHost
from hypha_worker.tasks.task_sessions import TaskSessions

EXECUTORS = (ExecutorDescriptor("train", "fake"), ExecutorDescriptor("aggregate", "fake"))
JOB = uuid.UUID(int=77)


class FakeExecution(Execution):
    """An execution that runs until it is stopped, and records the rounds of what is pushed to it."""

    def __init__(self, context: TaskContext, lab: Lab) -> None:
        spec = context.spec
        self.context, self._lab = context, lab
        if spec.training is not None:
            self._senders, self._kind = reference_peers([spec.training.results]), OUTER_UPDATE
        else:
            assert spec.aggregation is not None
            self._senders, self._kind = reference_peers([spec.aggregation.updates]), PSEUDO_GRADIENT
        self.received: list[int] = []

    @property
    def senders(self) -> frozenset[PeerId]:
        return frozenset(self._senders)

    @property
    def accepted_push_kind(self) -> str:
        return self._kind

    async def run(self) -> None:
        self._lab.started[self.context.scheduler, self.context.attempt.task] = self
        await anyio.sleep_forever()

    async def accept_push(self, peer: PeerId, header: PushHeader) -> transfer.FilePushTarget | Refusal:
        if peer not in self.senders:
            return Refusal(reason="not one of my senders")

        async def on_complete(_size: int, _digest: str) -> None:
            self.received.append(header.round)

        return transfer.FilePushTarget(self.context.work_dir / "pushed", 1 << 20, on_complete)


@dataclass
class Lab:
    """A worker's tasks with scripted executions, two schedulers of jobs with one id, and two peers."""

    worker: MemoryEndpoint
    schedulers: list[ScriptedTaskScheduler]
    peers: list[MemoryEndpoint]
    leases: LeaseManager
    tasks: TaskSessions = field(init=False)
    started: dict[tuple[PeerId, str], FakeExecution] = field(default_factory=dict)

    def hire(self, which: int = 0) -> uuid.UUID:
        """Lease a core to a scheduler."""
        holder, now, made = self.schedulers[which].endpoint.peer_id, anyio.current_time(), uuid.uuid4()
        allocation = self.leases.free.fit(Resources(cpu=1.0, storage=0.001))
        assert allocation is not None
        self.leases.offer(Lease(made, holder, made, allocation, 1.0, now + 0.5, executors=EXECUTORS))
        self.tasks.on_renewed(self.leases.renew(made, holder, now))
        return made

    async def start(self, task: str, spec: TaskSpec, which: int = 0, lease: uuid.UUID | None = None) -> str:
        """Start a task, by default on a lease of its own; return its first report, with the reason of an end."""
        scheduler = self.schedulers[which]
        scheduler.define(lease or self.hire(which), task, start=spec)
        await scheduler.until(lambda: scheduler.of(task))
        [report, *_] = scheduler.of(task)
        if report.started is None:
            return (report.cancelled or report.failed).reason  # type: ignore[union-attr]
        await scheduler.until(lambda: (scheduler.endpoint.peer_id, task) in self.started)
        return "started"

    def received(self, which: int = 0) -> dict[str, list[int]]:
        """Return the rounds that each task of a scheduler has received."""
        holder = self.schedulers[which].endpoint.peer_id
        return {task: run.received for (scheduler, task), run in self.started.items() if scheduler == holder}

    async def push(self, sender: MemoryEndpoint, number: int, kind: str = OUTER_UPDATE, which: int = 0) -> str:
        """Push a file for a task of the job; return why it was refused, empty if it was not."""
        content, scheduler = b"%d" % number, self.schedulers[which].endpoint.peer_id
        size, digest = await transfer.describe(content)
        header = PushHeader(
            AttemptId(JOB, "sender", 0), number, kind, "u", size, digest, samples=1, scheduler=scheduler
        )
        try:
            await transfer.push(sender, self.worker.peer_id, content, header)
        except TransferRefusedError as error:
            return str(error)
        return ""


def train(lab: Lab, *senders: MemoryEndpoint, grace_ms: int | None = None) -> TaskSpec:
    """Make a task that trains, and takes outer updates from `senders`."""
    results = all_of(*(sender.peer_id for sender in senders))
    config = training(lab.schedulers[0].endpoint.peer_id, results=results)
    return TaskSpec(executor="train/fake", training=config, orphan_grace_ms=grace_ms)


def aggregate(lab: Lab, *senders: MemoryEndpoint) -> TaskSpec:
    """Make a parameter server that takes updates from `senders`."""
    config = aggregation([sender.peer_id for sender in senders], [lab.schedulers[0].endpoint.peer_id])
    return TaskSpec(executor="aggregate/fake", aggregation=config)


@asynccontextmanager
async def open_lab(folder: Path) -> AsyncIterator[Lab]:
    network = MemoryNetwork()
    async with (
        network.endpoint("worker") as worker,
        network.endpoint("scheduler") as scheduler,
        network.endpoint("other") as other,
        network.endpoint("first") as first,
        network.endpoint("second") as second,
        anyio.create_task_group() as tasks,
    ):
        leases = LeaseManager(Capacity(Resources(cpu=4.0, storage=1.0)), LeaseTerms())
        schedulers = [ScriptedTaskScheduler(endpoint, job_id=JOB) for endpoint in (scheduler, other)]
        lab = Lab(worker, schedulers, [first, second], leases)
        executors = dict.fromkeys(map(str, EXECUTORS), lambda context: FakeExecution(context, lab))
        lab.tasks = TaskSessions(TaskHost(worker, leases, folder, OutputStore(folder / "outputs"), executors), tasks)
        transfer.serve_pushes(worker, lab.tasks.accept_push)
        for each in schedulers:
            each.listen()
            await worker.connect(each.endpoint.addresses[0])
        yield lab
        tasks.cancel_scope.cancel()


InLab = Callable[[], AbstractAsyncContextManager[Lab]]


@pytest.fixture
def in_lab(tmp_path: Path) -> InLab:
    return lambda: open_lab(tmp_path)


async def test_tasks_that_accept_no_push_run_side_by_side_and_end_separately(in_lab: InLab) -> None:
    async with in_lab() as lab:
        leases = {task: lab.hire() for task in ("a", "b", "c")}
        for task, lease in leases.items():
            assert await lab.start(task, train(lab), lease=lease) == "started"
        assert len({run.context.work_dir for run in lab.started.values()}) == 3
        assert {run.context.attempt.task: run.context.lease for run in lab.started.values()} == leases
        assert "no job here accepts" in await lab.push(lab.peers[0], 1)
        lab.schedulers[0].define(leases["b"], "b", stop=Stop("enough"))
        assert (await lab.schedulers[0].end("b")).cancelled is not None
        assert {run.attempt.task for run in lab.tasks.running} == {"a", "c"}


async def test_pushes_of_different_senders_reach_the_task_that_names_them(in_lab: InLab) -> None:
    async with in_lab() as lab:
        first, second = lab.peers
        assert await lab.start("a", train(lab, first)) == "started"
        assert await lab.start("b", train(lab, second)) == "started"
        assert await lab.start("server", aggregate(lab, first)) == "started"
        assert await lab.push(first, 1) == await lab.push(second, 2) == ""
        assert await lab.push(first, 3, PSEUDO_GRADIENT) == ""
        assert lab.received() == {"a": [1], "b": [2], "server": [3]}
        assert "not one of my senders" in await lab.push(second, 4, PSEUDO_GRADIENT)
        assert await lab.push(lab.schedulers[0].endpoint, 5) != ""


async def test_tasks_of_a_job_that_could_be_confused_are_refused(in_lab: InLab) -> None:
    async with in_lab() as lab:
        first, second = lab.peers
        assert await lab.start("a", train(lab, first)) == "started"
        assert await lab.start("server", aggregate(lab, first)) == "started"
        lease = lab.hire()
        why = await lab.start("b", train(lab, second, first), lease=lease)
        assert f"both accept pushes of kind outer-update from {first.peer_id}" in why
        assert await lab.start("c", train(lab, second), lease=lease) == "started"


async def test_a_task_on_an_orphaned_lease_is_ended_when_its_scheduler_begins_it_anew(in_lab: InLab) -> None:
    """The worker was behind a partition, and its scheduler has given the lease up."""
    async with in_lab() as lab:
        sender, scheduler, first = lab.peers[0], lab.schedulers[0], lab.hire()
        assert await lab.start("a", train(lab, sender, grace_ms=60_000), lease=first) == "started"
        assert "both accept pushes" in await lab.start("b", train(lab, sender))
        lab.leases.sweep(anyio.current_time() + 15.0)
        lease = lab.leases.find(first, scheduler.endpoint.peer_id)
        assert lease is not None
        assert lease.state is LeaseState.ORPHANED
        assert await lab.start("c", train(lab, sender)) == "started"
        ended = (await scheduler.end("a")).cancelled
        assert ended is not None
        assert "begun it anew on another lease" in ended.reason
        assert await lab.push(sender, 1) == ""
        assert lab.received() == {"a": [], "c": [1]}


async def test_jobs_of_two_schedulers_with_one_id_do_not_disturb_each_other(in_lab: InLab) -> None:
    """The other scheduler has learnt the job's id, and names the same peers."""
    async with in_lab() as lab:
        sender, stranger = lab.peers
        for which in (1, 0):
            assert await lab.start("a", train(lab, sender), which) == "started"
            assert await lab.start("server", aggregate(lab, sender), which) == "started"
        assert await lab.push(sender, 1) == await lab.push(sender, 2, PSEUDO_GRADIENT) == ""
        assert (lab.received(0), lab.received(1)) == ({"a": [1], "server": [2]}, {"a": [], "server": []})
        assert await lab.push(sender, 4, which=1) == ""
        assert lab.received(1) == {"a": [4], "server": []}
        assert await lab.push(stranger, 5) != ""
