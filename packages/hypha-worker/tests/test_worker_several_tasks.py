"""Several tasks of a job on one worker, with scripted executions: side by side, and one after the other on a lease."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from hypha_net import rpc, transfer
from hypha_net.errors import TransferRefusedError
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.bridge_api import Transfer
from hypha_proto.datasets import DATA, DataRequest, SliceAssigned
from hypha_proto.dispatch import DISPATCH_JOB, JOB_STATUS, DispatchJob, JobStatus, StatusReceived
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import (
    Adam,
    AggregateConfig,
    AggregateJob,
    All,
    Descriptor,
    JobSpec,
    Model,
    Nesterov,
    PeersReference,
    SchedulerReference,
    TrainConfig,
    TrainJob,
    UriReference,
)
from hypha_proto.leases import JOB_END, JobEnd, JobEndReceived
from hypha_proto.offers import AggregateExecutor, TrainExecutor
from hypha_proto.resources import Resources
from hypha_proto.round_membership import ROUND_MEMBERS, MembersKnown, RoundMembers
from hypha_proto.transfer import OUTER_UPDATE, PSEUDO_GRADIENT, PullRequest, PushHeader, Refusal
from hypha_worker.bridge.backend import JobBridgeBackend
from hypha_worker.bridge.delivery_queue import DeliveryQueue
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.errors import ExecutionError
from hypha_worker.job_storage import JobStorage
from hypha_worker.jobs.execution import ExecutionTrace, JobContext, MessageHandler, TaskMethod
from hypha_worker.jobs.job_manager import JobManager
from hypha_worker.jobs.references import reference_peers
from hypha_worker.leasing.capacity import Capacity
from hypha_worker.leasing.lease_manager import LeaseManager, LeaseState
from hypha_worker.leasing.terms import LeaseTerms

JOB = uuid.UUID(int=77)
TRAIN, SERVER = TrainExecutor(name="fake"), AggregateExecutor(name="fake")
MEMBERS = TaskMethod(ROUND_MEMBERS, lambda reason: MembersKnown(accepted=False, reason=reason))


class FakeExecution:
    """An execution that ends when the test says so, and records what reaches it."""

    trace = ExecutionTrace()

    def __init__(self, context: JobContext, lab: Lab) -> None:
        self.context = context
        self.lab = lab
        config = context.spec.executor.config
        aggregates = isinstance(context.spec.executor, AggregateJob)
        self.senders = reference_peers([config.updates if aggregates else config.results])
        self.accepted_push_kind = PSEUDO_GRADIENT if aggregates else OUTER_UPDATE
        self.message_handlers: dict[str, MessageHandler] = {ROUND_MEMBERS.name: self._members} if aggregates else {}
        self.ends = anyio.Event()
        self.failure = ""
        self.received: list[Any] = []

    async def run(self) -> None:
        self.lab.add(self.lab.started, self)
        await self.ends.wait()
        if self.failure:
            raise ExecutionError(self.failure)

    async def accept_push(self, peer: PeerId, header: PushHeader | None) -> transfer.FilePushTarget | Refusal:
        if peer not in self.senders:
            return Refusal(reason="not one of my senders")

        async def on_complete(_size: int, _digest: str) -> None:
            self.received.append(header)

        return transfer.FilePushTarget(self.context.work_dir / "pushed", 1 << 20, on_complete)

    async def _members(self, _scheduler: PeerId, message: RoundMembers) -> MembersKnown:
        self.received.append(message)
        return MembersKnown(accepted=True)


@dataclass
class Lab:
    """A job manager with scripted executions, and peers around it."""

    worker: MemoryEndpoint
    scheduler: MemoryEndpoint
    peers: list[MemoryEndpoint]
    leases: LeaseManager
    jobs: JobManager = field(init=False)
    started: list[FakeExecution] = field(default_factory=list)
    ends: list[JobEnd] = field(default_factory=list)
    statuses: list[JobStatus] = field(default_factory=list)
    _changed: anyio.Event = field(default_factory=anyio.Event)

    def add(self, records: list[Any], record: object) -> None:
        """Record something that `until` may wait for."""
        records.append(record)
        self._changed.set()
        self._changed = anyio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition on what `add` records holds."""
        while not condition():
            await self._changed.wait()

    def hire(self, scheduler: MemoryEndpoint | None = None) -> uuid.UUID:
        """Lease a core to the scheduler, or to another one."""
        holder = (scheduler or self.scheduler).peer_id
        allocation = self.leases.free.fit(Resources(cpu=1.0, storage=0.001))
        assert allocation is not None
        made = uuid.uuid4()
        self.leases.offer(made, holder, made, allocation, 1.0, anyio.current_time(), (TRAIN,))
        self.leases.renew(made, holder, anyio.current_time())
        return made

    def state(self, lease: uuid.UUID) -> LeaseState | None:
        found = self.leases.find(lease, self.scheduler.peer_id)
        return found and found.state

    async def dispatch(
        self, lease: uuid.UUID, spec: JobSpec, *, scheduler: MemoryEndpoint | None = None, **fields: Any
    ) -> str:
        """Dispatch over the network; return the name of the answer."""
        message = DispatchJob(id=lease, spec=spec, **fields)
        return type(await rpc.call(scheduler or self.scheduler, self.worker.peer_id, DISPATCH_JOB, message)).__name__

    async def push(
        self,
        sender: MemoryEndpoint,
        kind: str = OUTER_UPDATE,
        number: int = 1,
        scheduler: MemoryEndpoint | None = None,
    ) -> str:
        """Push a file for the job, of a scheduler if one is given; return why it was refused, empty if it was not."""
        content = b"%d" % number
        header = PushHeader(
            job_id=JOB,
            round=number,
            kind=kind,
            name="u",
            size=len(content),
            digest="",
            samples=1,
            scheduler=None if scheduler is None else scheduler.peer_id,
        )
        _, digest = await transfer.describe(content)
        try:
            await transfer.push(sender, self.worker.peer_id, content, msgspec.structs.replace(header, digest=digest))
        except TransferRefusedError as error:
            return str(error)
        return ""

    async def running(self, count: int) -> list[FakeExecution]:
        """Wait until `count` executions have begun in all; return them."""
        await self.until(lambda: len(self.started) >= count)
        assert len(self.started) == count
        return self.started

    async def end_task(self, execution: FakeExecution, failure: str = "") -> JobEnd:
        """End an execution; return the report of its end."""
        count = len(self.ends)
        execution.failure = failure
        execution.ends.set()
        await self.until(lambda: len(self.ends) > count)
        return self.ends[-1]


def peers(*endpoints: MemoryEndpoint) -> PeersReference:
    return PeersReference(peers=tuple(endpoint.peer_id for endpoint in endpoints), strategy=All())


def train(lab: Lab, *senders: MemoryEndpoint, seed: int = 0) -> JobSpec:
    """Make a train task that takes outer updates from `senders`."""
    config = TrainConfig(
        model=Model(task="auto", artifact=UriReference(value="file:///model"), input_names=("x",)),
        data=SchedulerReference(peer=lab.scheduler.peer_id, dataset="digits"),
        updates=peers(lab.scheduler),
        results=peers(*senders),
        optimizer=Adam(learning_rate=0.1),
        batch_size=1,
        seed=seed,
    )
    return JobSpec(job_id=JOB, executor=TrainJob(descriptor=Descriptor(name="fake"), config=config))


def aggregate(lab: Lab, *senders: MemoryEndpoint) -> JobSpec:
    """Make a parameter server that takes updates from `senders`."""
    config = AggregateConfig(
        updates=peers(*senders), results=peers(lab.scheduler), optimizer=Nesterov(learning_rate=1.0, momentum=0.0)
    )
    return JobSpec(job_id=JOB, executor=AggregateJob(descriptor=Descriptor(name="fake"), config=config))


@asynccontextmanager
async def open_lab(folder: Path, **terms: Any) -> AsyncIterator[Lab]:
    network = MemoryNetwork()
    async with (
        network.endpoint("worker") as worker,
        network.endpoint("scheduler") as scheduler,
        network.endpoint("first") as first,
        network.endpoint("second") as second,
        anyio.create_task_group() as tasks,
    ):
        leases = LeaseManager(Capacity(Resources(cpu=4.0, storage=1.0)), LeaseTerms(**terms))
        lab = Lab(worker, scheduler, [first, second], leases)
        factories = dict.fromkeys((TRAIN, SERVER), lambda context: FakeExecution(context, lab))
        lab.jobs = JobManager(worker, leases, factories, folder, tasks)
        rpc.serve(worker, DISPATCH_JOB, lab.jobs.dispatch)
        rpc.serve(worker, ROUND_MEMBERS, lab.jobs.message_handler(MEMBERS))
        transfer.serve_pushes(worker, lab.jobs.accept_push)

        async def on_end(_peer: PeerId, end: JobEnd) -> JobEndReceived:
            lab.add(lab.ends, end)
            return JobEndReceived()

        async def on_status(_peer: PeerId, status: JobStatus) -> StatusReceived:
            lab.add(lab.statuses, status)
            return StatusReceived()

        rpc.serve(scheduler, JOB_END, on_end)
        rpc.serve(scheduler, JOB_STATUS, on_status)
        await worker.connect(scheduler.addresses[0])
        yield lab
        tasks.cancel_scope.cancel()


Case = Callable[[Lab], Awaitable[None]]


@pytest.fixture
def in_lab(tmp_path: Path) -> Callable[..., None]:
    def run(case: Case, **terms: Any) -> None:
        async def main() -> None:
            with anyio.fail_after(30):
                async with open_lab(tmp_path, **terms) as lab:
                    await case(lab)

        anyio.run(main, backend="trio")

    return run


# ------------------------------------------------------------------------------------------------------- side by side


def test_tasks_that_accept_no_push_run_side_by_side(in_lab: Callable[[Case], None]) -> None:
    async def case(lab: Lab) -> None:
        leases = [lab.hire() for _ in range(3)]
        for seed, lease in enumerate(leases):
            assert await lab.dispatch(lease, train(lab, seed=seed)) == "Dispatched"
        executions = await lab.running(3)
        assert len({execution.context.work_dir for execution in executions}) == 3
        assert {execution.context.lease for execution in executions} == set(leases)
        assert "no job here accepts" in await lab.push(lab.scheduler)
        ended = [(await lab.end_task(execution)).lease for execution in executions[1:]]
        assert ended == [execution.context.lease for execution in executions[1:]]
        assert [job.lease for job in lab.jobs.running] == [executions[0].context.lease]

    in_lab(case)


def test_pushes_of_different_senders_reach_the_task_that_names_them(in_lab: Callable[[Case], None]) -> None:
    async def case(lab: Lab) -> None:
        first, second = lab.peers
        for sender in lab.peers:
            assert await lab.dispatch(lab.hire(), train(lab, sender)) == "Dispatched"
        assert await lab.dispatch(lab.hire(), aggregate(lab, first)) == "Dispatched"
        await lab.running(3)
        assert await lab.push(first, number=1) == await lab.push(second, number=2) == ""
        assert await lab.push(first, PSEUDO_GRADIENT, 3) == ""
        by_sender = {
            (execution.accepted_push_kind, *execution.senders): [header.round for header in execution.received]
            for execution in lab.started
        }
        assert by_sender == {
            (OUTER_UPDATE, first.peer_id): [1],
            (OUTER_UPDATE, second.peer_id): [2],
            (PSEUDO_GRADIENT, first.peer_id): [3],
        }
        assert "no job here accepts" in await lab.push(lab.scheduler)
        assert "not one of my senders" in await lab.push(lab.scheduler, PSEUDO_GRADIENT)

    in_lab(case)


def test_tasks_of_a_job_that_could_be_confused_are_refused(
    in_lab: Callable[[Case], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def case(lab: Lab) -> None:
        first, second = lab.peers
        assert await lab.dispatch(lab.hire(), train(lab, first)) == "Dispatched"
        assert await lab.dispatch(lab.hire(), aggregate(lab, first)) == "Dispatched"
        lease = lab.hire()
        assert await lab.dispatch(lease, train(lab, second, first)) == "DispatchFailed"
        assert f"both accept pushes of kind outer-update from {first.peer_id}" in caplog.text
        assert await lab.dispatch(lease, aggregate(lab, second)) == "DispatchFailed"
        assert "both handle RoundMembers requests" in caplog.text
        assert lab.state(lease) is LeaseState.HELD
        other_job = msgspec.structs.replace(train(lab, first), job_id=uuid.uuid4())
        assert await lab.dispatch(lease, other_job) == "Dispatched"

    in_lab(case)


def test_a_task_on_an_orphaned_lease_is_ended_when_its_scheduler_begins_it_anew(
    in_lab: Callable[[Case], None],
) -> None:
    """The worker was behind a partition, and its scheduler has given the lease up."""

    async def case(lab: Lab) -> None:
        first = lab.hire()
        assert await lab.dispatch(first, train(lab, lab.peers[0]), orphan_grace_ms=60_000) == "Dispatched"
        await lab.running(1)
        assert await lab.dispatch(lab.hire(), train(lab, lab.peers[0])) == "DispatchFailed"
        lab.leases.sweep(anyio.current_time() + 15.0)
        assert lab.state(first) is LeaseState.ORPHANED
        assert await lab.dispatch(lab.hire(), train(lab, lab.peers[0])) == "Dispatched"
        await lab.until(lambda: lab.ends)
        assert (lab.ends[0].lease, lab.ends[0].outcome) == (first, "cancelled")
        assert "begun it anew on another lease" in lab.ends[0].reason
        _, renewed = await lab.running(2)
        assert await lab.push(lab.peers[0]) == ""
        assert len(renewed.received) == 1

    in_lab(case)


def test_a_request_reaches_the_task_that_handles_it_from_its_scheduler_only(in_lab: Callable[[Case], None]) -> None:
    async def case(lab: Lab) -> None:
        async def announce(sender: MemoryEndpoint, job_id: uuid.UUID = JOB) -> MembersKnown:
            message = RoundMembers(job_id=job_id, round=1, members=(), deadline_ms=1)
            return await rpc.call(sender, lab.worker.peer_id, ROUND_MEMBERS, message)

        assert await lab.dispatch(lab.hire(), train(lab)) == "Dispatched"
        await lab.running(1)
        assert "handles RoundMembers" in (await announce(lab.scheduler)).reason
        assert await lab.dispatch(lab.hire(), aggregate(lab)) == "Dispatched"
        _, server = await lab.running(2)
        assert (await announce(lab.scheduler)).accepted
        assert not (await announce(lab.peers[0])).accepted
        assert not (await announce(lab.scheduler, uuid.uuid4())).accepted
        assert len(server.received) == 1

    in_lab(case)


def test_jobs_of_two_schedulers_with_one_id_do_not_disturb_each_other(in_lab: Callable[[Case], None]) -> None:
    """The other scheduler has learnt the job's id, and names the same peers."""

    async def case(lab: Lab) -> None:
        sender, other = lab.peers
        for scheduler in (other, lab.scheduler):
            for spec in (train(lab, sender), aggregate(lab, sender)):
                assert await lab.dispatch(lab.hire(scheduler), spec, scheduler=scheduler) == "Dispatched"
        await lab.running(4)

        def received(scheduler: MemoryEndpoint) -> list[Any]:
            return [
                (found.round, getattr(found, "kind", None))
                for execution in lab.started
                for found in execution.received
                if execution.context.scheduler == scheduler.peer_id
            ]

        assert await lab.push(sender, number=1, scheduler=lab.scheduler) == ""
        assert await lab.push(sender, PSEUDO_GRADIENT, 2, lab.scheduler) == ""
        members = RoundMembers(job_id=JOB, round=3, members=(), deadline_ms=1)
        assert (await rpc.call(lab.scheduler, lab.worker.peer_id, ROUND_MEMBERS, members)).accepted
        assert sorted(received(lab.scheduler)) == [(1, OUTER_UPDATE), (2, PSEUDO_GRADIENT), (3, None)]
        assert received(other) == []
        assert await lab.push(sender, number=4, scheduler=other) == ""
        assert received(other) == [(4, OUTER_UPDATE)]
        assert "no job here accepts" in await lab.push(sender, number=5, scheduler=sender)
        assert "matches 2 jobs" in await lab.push(sender, number=6)  # an older peer, which names no scheduler

    in_lab(case)


# ------------------------------------------------------------------------------------------ what tasks send and ask for


@contextmanager
def open_backend(lab: Lab, folder: Path) -> Iterator[JobBridgeBackend]:
    """Open the bridge's side of a task on a lease of its own."""
    folder.mkdir()
    storage, spec = JobStorage(folder, 1 << 20), train(lab)
    backend = JobBridgeBackend(
        endpoint=lab.worker,
        spec=spec,
        lease=lab.hire(),
        scheduler=lab.scheduler.peer_id,
        work_dir=folder,
        queue=DeliveryQueue(JOB, folder, frozenset(), storage, OUTER_UPDATE),
        access=AccessPolicy(),
        files=PeerFiles(lab.worker, storage),
    )
    yield backend
    backend.close()


async def send_update(backend: JobBridgeBackend, content: bytes = b"update") -> None:
    (backend.work_dir / "u").write_bytes(content)
    await backend.send(Transfer(backend.spec.executor.config.updates, "u", round=1, samples=3))


def test_slices_pushes_and_gauges_name_the_lease_of_their_task(
    in_lab: Callable[[Case], None], tmp_path: Path, recorded: Any
) -> None:
    async def case(lab: Lab) -> None:
        asked: list[DataRequest] = []
        pushed: list[PushHeader] = []

        async def assign(_peer: PeerId, request: DataRequest) -> SliceAssigned:
            asked.append(request)
            return SliceAssigned(data_provider=lab.peers[0].peer_id, index=0)

        async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource:
            return transfer.PullSource((2).to_bytes(8, "little") + b"{}")  # a safetensors file without tensors

        async def accept(_peer: PeerId, header: PushHeader) -> transfer.FilePushTarget:
            async def on_complete(_size: int, _digest: str) -> None:
                pushed.append(header)

            return transfer.FilePushTarget(tmp_path / f"{header.lease}", 1 << 20, on_complete)

        rpc.serve(lab.scheduler, DATA, assign)
        transfer.serve_pulls(lab.peers[0], resolve)
        transfer.serve_pushes(lab.scheduler, accept)
        with open_backend(lab, tmp_path / "a") as first, open_backend(lab, tmp_path / "b") as second:
            both = [first, second]
            async with anyio.create_task_group() as tasks:
                for backend in both:
                    tasks.start_soon(backend.fetch, Transfer(backend.spec.executor.config.data, "slices"))
                    tasks.start_soon(send_update, backend)
            leases = {backend.lease for backend in both}
        assert {request.lease for request in asked} == leases
        assert {(header.lease, header.kind) for header in pushed} == {(x, PSEUDO_GRADIENT) for x in leases}
        assert {header.scheduler for header in pushed} == {lab.scheduler.peer_id}
        gauges = [about for name, _, about in recorded.values if name == "hypha.worker.prefetch.depth"]
        assert {about["hypha.lease.id"] for about in gauges} == {str(lease) for lease in leases}

    in_lab(case)


def test_an_update_to_the_scheduler_is_sent_when_the_scheduler_has_it(
    in_lab: Callable[[Case], None], tmp_path: Path
) -> None:
    async def case(lab: Lab) -> None:
        arrived, stored, sent = anyio.Event(), anyio.Event(), anyio.Event()

        async def accept(_peer: PeerId, _header: PushHeader) -> transfer.FilePushTarget:
            async def on_complete(_size: int, _digest: str) -> None:
                assert (tmp_path / "received").read_bytes() == b"update"
                arrived.set()
                await stored.wait()

            return transfer.FilePushTarget(tmp_path / "received", 1 << 20, on_complete)

        transfer.serve_pushes(lab.scheduler, accept)
        with open_backend(lab, tmp_path / "a") as backend:

            async def send() -> None:
                await send_update(backend)
                sent.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                await arrived.wait()
                await anyio.wait_all_tasks_blocked()
                assert not sent.is_set()
                stored.set()
                await sent.wait()

    in_lab(case)


# ------------------------------------------------------------------------------------------------- one after the other


@pytest.mark.parametrize("failure", ["", "out of memory"])
def test_a_kept_lease_takes_task_after_task(in_lab: Callable[[Case], None], failure: str) -> None:
    async def case(lab: Lab) -> None:
        lease = lab.hire()
        for attempt in range(3):
            spec = train(lab, seed=attempt)
            assert await lab.dispatch(lease, spec, keep_lease=True, attempt=attempt) == "Dispatched"
            executions = await lab.running(attempt + 1)
            end = await lab.end_task(executions[-1], failure)
            assert (end.lease, end.attempt, end.outcome) == (lease, attempt, "failed" if failure else "finished")
            assert lab.state(lease) is LeaseState.HELD
        assert lab.leases.free.resources.cpu == 3.0
        await lab.until(lambda: len([each for each in lab.statuses if type(each.status).__name__ != "Running"]) == 3)
        assert [each.attempt for each in lab.statuses if type(each.status).__name__ != "Running"] == [0, 1, 2]

    in_lab(case)


def test_a_lease_that_is_not_kept_is_spent_as_before(in_lab: Callable[[Case], None]) -> None:
    async def case(lab: Lab) -> None:
        for count, fields in enumerate(({}, {"keep_lease": False}, {"attempt": 0}), start=1):
            lease = lab.hire()
            assert await lab.dispatch(lease, train(lab), **fields) == "Dispatched"
            end = await lab.end_task((await lab.running(count))[-1])
            assert end.attempt == fields.get("attempt")
            assert lab.state(lease) is LeaseState.SPENT
            assert await lab.dispatch(lease, train(lab, seed=1), attempt=1) == "DispatchFailed"

    in_lab(case)


@pytest.mark.parametrize("keep", [True, False])
def test_a_repeated_dispatch_starts_nothing_although_its_task_has_ended(
    in_lab: Callable[[Case], None], keep: bool
) -> None:
    async def case(lab: Lab) -> None:
        lease, spec = lab.hire(), train(lab)
        for _ in range(2):
            assert await lab.dispatch(lease, spec, keep_lease=keep, attempt=4) == "Dispatched"
        await lab.end_task((await lab.running(1))[0])
        assert await lab.dispatch(lease, spec, keep_lease=keep, attempt=4) == "Dispatched"
        assert lab.jobs.running == ()
        assert lab.state(lease) is (LeaseState.HELD if keep else LeaseState.SPENT)
        assert await lab.dispatch(lease, train(lab, seed=9), attempt=4) == "DispatchFailed", "another specification"
        assert await lab.dispatch(lease, spec, attempt=3) == "DispatchFailed", "an older attempt"
        await lab.running(1)

    in_lab(case)


def test_a_late_copy_of_an_older_dispatch_is_refused_while_the_next_one_runs(in_lab: Callable[[Case], None]) -> None:
    async def case(lab: Lab) -> None:
        lease, spec = lab.hire(), train(lab)
        assert await lab.dispatch(lease, spec, keep_lease=True, attempt=0) == "Dispatched"
        await lab.end_task((await lab.running(1))[0])
        assert await lab.dispatch(lease, spec, keep_lease=True, attempt=1) == "Dispatched"
        await lab.running(2)
        assert await lab.dispatch(lease, spec, keep_lease=True, attempt=0) == "DispatchFailed"
        assert await lab.dispatch(lease, spec, keep_lease=True, attempt=1) == "Dispatched"
        assert len(lab.jobs.running) == 1

    in_lab(case)


def test_the_next_attempt_is_refused_while_a_task_runs_and_accepted_afterwards(in_lab: Callable[[Case], None]) -> None:
    async def case(lab: Lab) -> None:
        lease = lab.hire()
        assert await lab.dispatch(lease, train(lab), keep_lease=True, attempt=0) == "Dispatched"
        [execution] = await lab.running(1)
        assert await lab.dispatch(lease, train(lab, seed=1), keep_lease=True, attempt=1) == "DispatchFailed"
        await lab.end_task(execution)
        assert await lab.dispatch(lease, train(lab, seed=1), keep_lease=True, attempt=1) == "Dispatched"
        await lab.running(2)

    in_lab(case)


def test_a_late_cancellation_does_not_end_the_next_task(in_lab: Callable[[Case], None]) -> None:
    async def case(lab: Lab) -> None:
        lease = lab.hire()
        scheduler = lab.scheduler.peer_id
        assert await lab.dispatch(lease, train(lab), keep_lease=True, attempt=0) == "Dispatched"
        await lab.end_task((await lab.running(1))[0])
        assert await lab.dispatch(lease, train(lab), keep_lease=True, attempt=1) == "Dispatched"
        await lab.running(2)
        assert not lab.jobs.cancel(lease, scheduler, "late", attempt=0)
        assert len(lab.jobs.running) == 1
        assert lab.jobs.cancel(lease, scheduler, "enough", attempt=1)
        await lab.until(lambda: len(lab.ends) == 2)
        assert (lab.ends[1].outcome, lab.ends[1].attempt) == ("cancelled", 1)
        assert lab.state(lease) is LeaseState.HELD

    in_lab(case)


def test_a_kept_lease_ends_by_release_during_a_task_and_when_idle(in_lab: Callable[[Case], None]) -> None:
    async def case(lab: Lab) -> None:
        released, idle = lab.hire(), lab.hire()
        for lease in (released, idle):
            assert await lab.dispatch(lease, train(lab), keep_lease=True, attempt=0) == "Dispatched"
        executions = {execution.context.lease: execution for execution in await lab.running(2)}
        lab.leases.release(released, lab.scheduler.peer_id)
        await lab.end_task(executions[released])
        assert lab.state(released) is None
        await lab.end_task(executions[idle])
        now = anyio.current_time()
        lab.leases.sweep(now)  # starts the time without a job
        lab.leases.renew(idle, lab.scheduler.peer_id, now)
        lab.leases.sweep(now + 1.9)
        assert lab.state(idle) is LeaseState.HELD
        lab.leases.sweep(now + 2.0)
        assert lab.state(idle) is None
        assert lab.leases.free.resources.cpu == 4.0

    in_lab(case, idle_lease=2.0)
