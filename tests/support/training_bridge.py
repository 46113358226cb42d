"""The bridge of a training job on an in-memory network, with a scripted scheduler and parameter servers around it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from hypha_net import rpc, transfer
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.bridge_api import Transfer
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
from hypha_proto.job_membership import JOIN_ROUND, SERVER_CHANGED, JoinRound, RoundToJoin, ServerChanged, ServerKnown
from hypha_proto.job_spec import (
    Adam,
    All,
    Descriptor,
    HuggingFaceReference,
    JobSpec,
    Model,
    One,
    PeersReference,
    SchedulerReference,
    SliceAddress,
    TrainConfig,
    TrainJob,
)
from hypha_proto.transfer import OUTER_UPDATE, PullRequest, PushHeader, Refusal
from hypha_worker.bridge.backend import JobBridgeBackend
from hypha_worker.bridge.delivery_queue import DeliveryQueue
from hypha_worker.bridge.round_commits import RoundCommits
from hypha_worker.bridge.server_changes import ServerChanges
from hypha_worker.bridge.uncommitted_updates import PendingFile, UncommittedUpdates
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.job_storage import JobStorage
from hypha_worker.jobs.references import job_references, reference_peers

JOB, LEASE = uuid.UUID(int=7), uuid.UUID(int=8)
WEIGHTS = f"blake3:{1:064x}"
NEW_WEIGHTS = f"blake3:{2:064x}"
RANGES = (SampleRange(epoch=0, slice=3, first=0, end=16), SampleRange(epoch=0, slice=3, first=16, end=30))


@dataclass
class Rounds:
    """A training job's bridge, its scripted scheduler, and the parameter server that it exchanges updates with."""

    network: MemoryNetwork
    folder: Path
    worker: MemoryEndpoint
    scheduler: MemoryEndpoint
    server: MemoryEndpoint
    backend: JobBridgeBackend
    queue: DeliveryQueue
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

    async def accept(self, _peer: PeerId, header: PushHeader | None) -> transfer.FilePushTarget | Refusal:
        if self.refused_push is not None:
            return Refusal(reason=self.refused_push)

        async def on_complete(_size: int, _digest: str) -> None:
            assert header is not None
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

    async def change_server(self, server: MemoryEndpoint, term: int, number: int, **fields: Any) -> ServerKnown:
        """Tell the job of another parameter server, as its scheduler."""
        about = {"job_id": JOB, "lease": LEASE, "term": term, "server": server.peer_id, "round": number}
        message = ServerChanged(**(about | fields))
        return await rpc.call(self.scheduler, self.worker.peer_id, SERVER_CHANGED, message)

    def commit(self, digest: str, status: CommitStatus) -> None:
        self.commits[digest] = status
        self._notify()

    async def send(self, content: bytes = b"update", number: int = 1, **changes: Any) -> Any:
        """Send a file as an executor does; `changes` are those of its contribution, `contribution=None` has none."""
        (self.backend.work_dir / "u").write_bytes(content)
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
        reference = self.backend.spec.executor.config.updates
        return await self.backend.send(Transfer(reference, "u", round=number, samples=30, contribution=stated))

    async def push(self, content: bytes = b"outer", number: int = 1, kind: str = OUTER_UPDATE, **changes: Any) -> str:
        """Push a file to the job as its parameter server; return its digest."""
        size, digest = await transfer.describe(content)
        fields = {"job_id": JOB, "round": number, "kind": kind, "name": f"r{number}", "size": size, "digest": digest}
        sender = changes.pop("sender", self.server)
        await transfer.push(sender, self.worker.peer_id, content, PushHeader(**(fields | changes)))
        return digest

    async def next_file(self) -> PendingFile:
        file = await self.queue.next_file(lambda: self.backend.server.senders)
        assert file is not None
        return file

    def claim(self, file: PendingFile) -> Any:
        claimed = self.queue.claim(file, self.backend.files.storage.files.make_folder("received"))
        assert claimed is not None
        return claimed

    def waiting_files(self) -> int:
        staging = self.backend.files.storage.files.staging / "pushes"
        return len(list(staging.iterdir())) if staging.exists() else 0


def make_spec(scheduler: MemoryEndpoint, server: MemoryEndpoint, **changes: Any) -> JobSpec:
    peers = PeersReference(peers=(server.peer_id,), strategy=All())
    model = HuggingFaceReference(repository="org/model", filenames=("config.json",), token="hf_secret")
    weights = PeersReference(
        peers=(scheduler.peer_id,),
        strategy=One(),
        resource=SliceAddress(dataset=f"{JOB}/weights", index=0),
        filenames=("weights.safetensors",),
    )
    fields: dict[str, Any] = {
        "model": Model(task="auto", artifact=model, input_names=("x",)),
        "data": SchedulerReference(peer=scheduler.peer_id, dataset="digits"),
        "updates": peers,
        "results": peers,
        "optimizer": Adam(learning_rate=0.1),
        "batch_size": 1,
        "term": 2,
        "weights": weights,
    }
    config = TrainConfig(**(fields | changes))
    return JobSpec(job_id=JOB, executor=TrainJob(descriptor=Descriptor(name="x"), config=config))


@asynccontextmanager
async def open_rounds(folder: Path, *, speaks: bool = True, **changes: Any) -> AsyncIterator[Rounds]:
    network = MemoryNetwork()
    async with (
        network.endpoint("worker") as worker,
        network.endpoint("scheduler") as scheduler,
        network.endpoint("server") as server,
        anyio.create_task_group() as tasks,
    ):
        spec = make_spec(scheduler, server, **changes)
        work_dir = folder / "hypha-job"
        work_dir.mkdir()
        storage = JobStorage(work_dir, 1 << 24)
        assert isinstance(spec.executor, TrainJob)
        term, joins = spec.executor.config.term, bool(spec.executor.config.join)
        commits = RoundCommits(worker, scheduler.peer_id, JOB, LEASE)
        queue = DeliveryQueue(
            JOB,
            work_dir,
            frozenset({server.peer_id}),
            storage,
            OUTER_UPDATE,
            reference_peers(job_references(spec)),
            uncommitted=None if term is None else UncommittedUpdates(commits, term, joins=joins),
        )
        files = PeerFiles(worker, storage)
        backend = JobBridgeBackend(worker, spec, LEASE, scheduler.peer_id, work_dir, queue, AccessPolicy(), files)
        changes_of_server = ServerChanges(backend, queue)
        rounds = Rounds(network, folder, worker, scheduler, server, backend, queue)

        async def accept(peer: PeerId, header: PushHeader | None) -> transfer.FilePushTarget | Refusal:
            return queue.accept(peer, header)

        async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
            rounds.pulled.append(request.index)
            found = rounds.served.get(request.index) if request.dataset == f"{JOB}/weights" else b"slice"
            return Refusal(reason="not here") if found is None else transfer.PullSource(found)

        transfer.serve_pushes(worker, accept)
        transfer.serve_pushes(server, rounds.accept)
        transfer.serve_pulls(scheduler, resolve)
        if speaks:
            rpc.serve(scheduler, STATE_CONTRIBUTION, rounds.state)
            rpc.serve(scheduler, AWAIT_COMMIT, rounds.await_commit)
            rpc.serve(scheduler, JOIN_ROUND, rounds.join)
        rpc.serve(worker, SERVER_CHANGED, changes_of_server.handle)
        await worker.connect_peer(scheduler.peer_id)
        tasks.start_soon(queue.run)
        tasks.start_soon(changes_of_server.run)
        try:
            yield rounds
        finally:
            queue.close()
            backend.close()
            tasks.cancel_scope.cancel()
