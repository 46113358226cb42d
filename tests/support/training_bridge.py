"""The bridge of a task that trains, on an in-memory network with a scripted scheduler and parameter servers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx

from hypha_net import rpc, transfer
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.attempt_id import AttemptId
from hypha_proto.bridge_api import ReceivedFile, Transfer
from hypha_proto.commands import ChangeServer, CommandAnswer
from hypha_proto.contributions import (
    AWAIT_COMMIT,
    STATE_CONTRIBUTION,
    AwaitCommit,
    CommitStatus,
    Contribution,
    ContributionKnown,
    SampleRange,
    StateContribution,
)
from hypha_proto.ids import PeerId
from hypha_proto.job_membership import JOIN_ROUND, JoinRound, RoundToJoin
from hypha_proto.job_spec import (
    One,
    PeersReference,
    SliceAddress,
    TrainConfig,
)
from hypha_proto.resources import Resources
from hypha_proto.tasks import StoredOutput, TaskProgress, TaskSpec
from hypha_proto.transfer import OUTER_UPDATE, PullRequest, PushHeader, Refusal
from hypha_worker.bridge.backend import BridgeBackend
from hypha_worker.bridge.server import open_bridge
from hypha_worker.bridge.training import TrainingBridge
from hypha_worker.bridge.unix_socket import SocketPlace
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.leasing.capacity import Allocation
from hypha_worker.task_storage import TaskStorage
from hypha_worker.tasks.execution import TaskContext
from hypha_worker.tasks.output_store import OutputStore
from hypha_worker.tasks.resource_fetcher import ResourceFetcher
from hypha_worker.tasks.resource_pushes import ResourcePushes
from support.task_settings import training

JOB, LEASE = uuid.UUID(int=7), uuid.UUID(int=8)
ATTEMPT = AttemptId(JOB, "train", 0)
WEIGHTS = f"blake3:{1:064x}"
NEW_WEIGHTS = f"blake3:{2:064x}"
RANGES = (SampleRange(epoch=0, slice=3, first=0, end=16), SampleRange(epoch=0, slice=3, first=16, end=30))


@dataclass
class Rounds:
    """The bridge of a task that trains, its scripted scheduler, and its parameter server."""

    network: MemoryNetwork
    folder: Path
    worker: MemoryEndpoint
    scheduler: MemoryEndpoint
    server: MemoryEndpoint
    context: TaskContext
    training: TrainingBridge
    backend: BridgeBackend
    history: list[StateContribution | PushHeader | AwaitCommit | JoinRound] = field(default_factory=list)
    """What the scheduler and the parameter server have got, in order."""
    known: ContributionKnown = field(default_factory=lambda: ContributionKnown(accepted=True))
    commits: dict[str, CommitStatus] = field(default_factory=dict)
    """What the scheduler answers, by the digest of the outer update."""
    served: dict[int, bytes] = field(default_factory=dict)
    pulled: list[int] = field(default_factory=list)
    """Indexes of the files that were asked for."""
    received: dict[str, bytes] = field(default_factory=dict)
    """What parameter servers have got, by digest."""
    refused_push: str | None = None
    """Why the parameter server refuses updates."""
    joins: list[RoundToJoin] = field(default_factory=list)
    """Answers to `JoinRound`, in order; without one left, the executor has to ask again."""
    _changed: anyio.Event = field(default_factory=anyio.Event)

    @property
    def config(self) -> TrainConfig:
        """The settings of the task."""
        assert self.context.spec.training is not None
        return self.context.spec.training

    @property
    def work_dir(self) -> Path:
        """The folder of the task."""
        return self.context.work_dir

    async def join(self, _peer: PeerId, question: JoinRound) -> RoundToJoin:
        self._record(question)
        return self.joins.pop(0) if self.joins else RoundToJoin()

    async def state(self, _peer: PeerId, statement: StateContribution) -> ContributionKnown:
        self._record(statement)
        return self.known

    async def await_commit(self, _peer: PeerId, question: AwaitCommit) -> CommitStatus:
        self._record(question)
        with anyio.move_on_after(0.05):
            while question.update not in self.commits:
                await self.next_change()
        return self.commits.get(question.update, CommitStatus(committed=False))

    async def accept(self, _peer: PeerId, header: PushHeader) -> transfer.FilePushTarget | Refusal:
        if self.refused_push is not None:
            return Refusal(reason=self.refused_push)

        async def on_complete(_size: int, _digest: str) -> None:
            self.received[header.digest] = path.read_bytes()
            self._record(header)

        path = self.folder / f"{uuid.uuid4()}"

        return transfer.FilePushTarget(path, 1 << 30, on_complete)

    def _record(self, message: StateContribution | PushHeader | AwaitCommit | JoinRound) -> None:
        self.history.append(message)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def next_change(self) -> None:
        await self._changed.wait()

    def got(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.history if isinstance(message, kind)]

    async def until_asked(self, count: int) -> None:
        await self.until_got(AwaitCommit, count)

    async def until_got(self, kind: type[Any], count: int) -> None:
        while len(self.got(kind)) < count:
            await self.next_change()

    def change_server(self, server: MemoryEndpoint, term: int, number: int, **fields: Any) -> CommandAnswer:
        """Tell the task of another parameter server, as its scheduler."""
        command = ChangeServer(term=term, server=server.peer_id, round=number, **fields)
        return self.training.changes.handle(term, command)

    def commit(self, digest: str, status: CommitStatus) -> None:
        self.commits[digest] = status
        self._notify()

    async def send(self, content: bytes = b"update", number: int = 1, **changes: Any) -> Any:
        """Send a file as an executor does; `changes` are those of its contribution, `contribution=None` has none."""
        (self.work_dir / "u").write_bytes(content)
        _, digest = await transfer.describe(content)
        stated = None
        if "contribution" not in changes:
            fields = {
                "round": number,
                "weights": WEIGHTS,
                "ranges": RANGES,
                "batches": 2,
                "batch_size": 16,
                "seed": 5,
                "optimizer": "kept",
                "update": digest,
            }
            stated = Contribution(**(fields | changes))
        wanted = Transfer(self.config.updates, "u", round=number, samples=30, contribution=stated)
        return await self.backend.send(wanted)

    async def push(self, content: bytes = b"outer", number: int = 1, kind: str = OUTER_UPDATE, **changes: Any) -> str:
        """Push a file to the job as its parameter server; return its digest."""
        size, digest = await transfer.describe(content)
        sender = changes.pop("sender", self.server)
        name = changes.pop("name", f"r{number}")
        header = PushHeader(ATTEMPT, number, kind, name, size, digest, self.context.scheduler, **changes)
        await transfer.push(sender, self.worker.peer_id, content, header)
        return digest

    async def receive(self) -> ReceivedFile:
        """Receive a file as an executor does."""
        received = await self.training.queue.receive(lambda: self.training.server.senders, "received")
        assert received is not None
        return received

    def waiting_files(self) -> int:
        staging = self.context.storage.files.staging
        return len(list(staging.iterdir())) if staging.exists() else 0


class Control:
    """What an executor says about its task, which nobody hears here."""

    drain_seconds: float | None = None

    def report_ready(self) -> None:
        """See `TaskControl.report_ready`."""

    def report_progress(self, progress: TaskProgress) -> None:
        """See `TaskControl.report_progress`."""

    async def store_output(self, name: str, path: str) -> StoredOutput:
        """See `TaskControl.store_output`."""
        raise AssertionError(f"{name}: {path}")


def make_context(
    folder: Path,
    worker: MemoryEndpoint,
    scheduler: PeerId,
    config: TrainConfig,
    *,
    limit: int = 1 << 24,
    access: AccessPolicy | None = None,
) -> TaskContext:
    """Return an attempt at a task that trains, with a work directory in `folder` that holds `limit` bytes."""
    work_dir = folder / "hypha-job"
    work_dir.mkdir()
    storage = TaskStorage(work_dir, limit)
    contact = SchedulerContact(worker, scheduler)
    return TaskContext(
        attempt=ATTEMPT,
        spec=TaskSpec(executor="train/x", training=config),
        settings={},
        lease=LEASE,
        scheduler=scheduler,
        allocation=Allocation(Resources()),
        work_dir=work_dir,
        storage=storage,
        scope=anyio.CancelScope(),
        contact=contact,
        control=Control(),
        fetcher=ResourceFetcher(
            contact=contact,
            attempt=ATTEMPT,
            storage=storage,
            access=access or AccessPolicy(),
            store=OutputStore(folder / "outputs"),
            resource_pushes=ResourcePushes(),
        ),
    )


def fail_for_disk(error: object) -> None:
    """Fail: nothing is wrong with the disk."""
    raise AssertionError(error)


def make_bridge(
    context: TaskContext, on_disk_fault: Callable[[object], None] = fail_for_disk
) -> tuple[TrainingBridge, BridgeBackend]:
    """Return the bridge of a task that trains, which accepts what peers push to its worker."""
    assert context.spec.training is not None
    bridge = TrainingBridge(context, context.spec.training, on_disk_fault)

    async def accept(peer: PeerId, header: PushHeader) -> transfer.FilePushTarget | Refusal:
        return bridge.queue.accept(peer, header)

    transfer.serve_pushes(context.contact.endpoint, accept)
    return bridge, BridgeBackend(context, bridge, on_disk_fault)


@asynccontextmanager
async def open_client(backend: BridgeBackend, path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a bridge at a socket, whose path must be short, and connect a client to it."""
    transport = httpx.AsyncHTTPTransport(uds=str(path))
    async with (
        open_bridge(backend, SocketPlace(path), lambda _pid: True),
        httpx.AsyncClient(transport=transport, base_url="http://bridge", timeout=20) as client,
    ):
        yield client


@asynccontextmanager
async def open_rounds(folder: Path, **changes: Any) -> AsyncIterator[Rounds]:
    """Open the bridge of a task; `changes` replace some of its settings."""
    network = MemoryNetwork()
    async with (
        network.endpoint("worker") as worker,
        network.endpoint("scheduler") as scheduler,
        network.endpoint("server") as server,
        anyio.create_task_group() as tasks,
    ):
        weights = PeersReference(
            peers=(scheduler.peer_id,),
            strategy=One(),
            resource=SliceAddress(dataset=f"{JOB}/weights", index=0),
            filenames=("weights.safetensors",),
        )
        config = training(scheduler.peer_id, server.peer_id, **({"term": 2, "weights": weights} | changes))
        context = make_context(folder, worker, scheduler.peer_id, config)
        bridge, backend = make_bridge(context)
        rounds = Rounds(network, folder, worker, scheduler, server, context, bridge, backend)

        async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
            rounds.pulled.append(request.index)
            found = rounds.served.get(request.index) if request.dataset == f"{JOB}/weights" else b"slice"
            return Refusal(reason="not here") if found is None else transfer.PullSource(found)

        transfer.serve_pushes(server, rounds.accept)
        transfer.serve_pulls(scheduler, resolve)
        rpc.serve(scheduler, STATE_CONTRIBUTION, rounds.state)
        rpc.serve(scheduler, AWAIT_COMMIT, rounds.await_commit)
        rpc.serve(scheduler, JOIN_ROUND, rounds.join)
        await worker.connect_peer(scheduler.peer_id)
        tasks.start_soon(bridge.run)
        try:
            yield rounds
        finally:
            bridge.close()
            tasks.cancel_scope.cancel()
