"""Cost of the scheduler's job runner: a report and a request for a slice, and a long journal read back.

A job with 200 workers and a dataset of 100,000 slices on the in-memory network, with an operator that does nothing,
then with DiLoCo's. The workers hold leases and confirm tasks; reports are passed to the runner one after the other.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc
import anyio.lowlevel

from benchmarks.run import BenchmarkRun
from benchmarks.tables import Row
from hypha_net import dataset_directory, pubsub, rpc, transfer
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.attempt_id import AttemptId
from hypha_proto.codec import to_json
from hypha_proto.datasets import DataRequest, DatasetRecord, Manifest, SliceAssigned, SliceEntry
from hypha_proto.health import HEALTH_CHECK, Health
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import UriReference
from hypha_proto.leases import RELEASE_LEASE, RENEW_LEASE, LeaseReleased, ReleaseLease, Renewed, RenewLease
from hypha_proto.offers import OFFER, WORKER_REQUESTS, OfferReceived, WorkerOffer, WorkerRequest
from hypha_proto.resources import Resources
from hypha_proto.tasks import Started, StatusUpdate, TaskSpec
from hypha_proto.training_reports import Acknowledged, BatchDone, ReportError, ReportTraining
from hypha_proto.transfer import PullRequest
from hypha_scheduler.jobs.context import JobHost
from hypha_scheduler.jobs.journal import Journal, read_journal
from hypha_scheduler.jobs.runner import JobRunner
from hypha_scheduler.jobs.task_streams import TaskStreams, serve_task_streams
from hypha_scheduler.strategies.base import (
    JobContext,
    Lease,
    SliceToUse,
    StartTask,
    Strategy,
    TaskRef,
    TaskUpdate,
)
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.restore import restore
from hypha_scheduler.strategies.diloco.specs import PlacedJob, Slot, role_requests
from hypha_scheduler.strategies.diloco.strategy import STRATEGY
from hypha_worker.tasks.task_stream import TaskStream

WORKERS, SLICES, RECORDS = 200, 100_000, 10_000
SLICE_SAMPLES, BATCH = 32, 8
DATASET = "digits"
MS = 1000
TIMEOUT = 120.0
"""Seconds for one measurement."""
_IDLE: Final = "operator that does nothing"
_NO_MODEL: Final = UriReference(value="file:///nowhere")


@dataclass(frozen=True)
class Cost:
    """Seconds of the scheduler, on average."""

    report: float
    slice: float


def measure(run: BenchmarkRun) -> list[Row]:
    """Measure both operators in the same run, then the journal."""
    count = max(WORKERS, 20 * run.count // WORKERS * WORKERS)
    quiet = anyio.run(_measure_operator, run.folder / "quiet", QuietStrategy(), count, backend="trio")
    diloco = anyio.run(_measure_operator, run.folder / "diloco", STRATEGY, count, backend="trio")
    about = f"{WORKERS} workers, {SLICES:,} slices"
    rows = []
    pairs = {"report": (quiet.report, diloco.report), "request for a slice": (quiet.slice, diloco.slice)}
    for what, (own, other) in pairs.items():
        rows.append(Row(f"{what}, {about}, {_IDLE}", "ms", own * MS, bound="< 1 ms"))
        rows.append(Row(f"{what}, {about}, DiLoCo", "ms", other * MS, own * MS, _IDLE, other / own))
    return rows + measure_journal(run.folder / "journal.jsonl")


async def _measure_operator(folder: Path, strategy: Strategy, count: int) -> Cost:
    """Run a job with a strategy until all tasks have started, and pass reports and requests to it."""
    await anyio.Path(folder).mkdir()
    network = MemoryNetwork(seed=1)
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(TIMEOUT))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        scheduler = await stack.enter_async_context(network.endpoint("scheduler"))
        data = await stack.enter_async_context(network.endpoint("data"))
        await _serve_dataset(data, folder)
        for number in range(WORKERS + 1):
            endpoint = await stack.enter_async_context(network.endpoint(f"worker-{number}"))
            await tasks.start(FakeWorker(endpoint, "train" if number else "aggregate", tasks).run)
        runner = JobRunner(JobHost(scheduler, folder / "runs"), strategy, _job(folder))
        _route(scheduler, runner)
        tasks.start_soon(runner.run)
        cost = await _measure_messages(runner, await _placed_tasks(runner), count)
        tasks.cancel_scope.cancel()
    return cost


def _route(scheduler: MemoryEndpoint, runner: JobRunner) -> None:
    async def handle(peer: PeerId, offer: WorkerOffer) -> OfferReceived:
        runner.on_offer(peer, offer)
        return OfferReceived()

    async def find_streams(_peer: PeerId, _lease: uuid.UUID) -> TaskStreams:
        return runner.task_streams

    rpc.serve(scheduler, OFFER, handle)
    serve_task_streams(scheduler, find_streams)


async def _placed_tasks(runner: JobRunner) -> list[tuple[PeerId, AttemptId]]:
    """Wait until every worker runs its task; return peers and tasks of those that train."""
    path = runner.directory / "journal.jsonl"
    while True:
        records = read_journal(path)
        placed = [lease for record in records if record["record"] == "placed" for lease in record["leases"]]
        tasks = [
            (PeerId.parse(lease["peer"]), AttemptId(runner.job_id, f"task-{number}", 0))
            for number, lease in enumerate(placed)
        ]
        if tasks and all(runner.attempts.runs_on(peer) for peer, _ in tasks):
            return [task for task, lease in zip(tasks, placed, strict=True) if lease["role"] == "train"]
        await anyio.sleep(0.05)


async def _measure_messages(runner: JobRunner, members: Sequence[tuple[PeerId, AttemptId]], count: int) -> Cost:
    """Let each worker in turn take a slice and report its batches; return the mean time of either."""
    async with anyio.create_task_group() as first:  # a barrier may hold up the first slices
        for peer, task in members:
            first.start_soon(_take_slice, runner, peer, task)
    slices = reports = 0.0
    batches = SLICE_SAMPLES // BATCH
    for number in range(count // batches):
        peer, task = members[number % len(members)]
        begin = time.perf_counter()
        index = await _take_slice(runner, peer, task)
        await anyio.lowlevel.checkpoint()  # what the event wakes belongs to its cost
        middle = time.perf_counter()
        progress = BatchDone(batch_size=BATCH, slices={str(index): BATCH})
        for _ in range(batches):
            request = ReportTraining(task, progress, id=uuid.uuid4())
            if isinstance(await runner.on_training_report(peer, request), ReportError):
                raise AssertionError(f"a report of {peer} was refused")
            await anyio.lowlevel.checkpoint()
        slices += middle - begin
        reports += time.perf_counter() - middle
    rounds = count // batches
    return Cost(report=reports / (rounds * batches), slice=slices / rounds)


async def _take_slice(runner: JobRunner, peer: PeerId, task: AttemptId) -> int:
    answer = await runner.on_slice_request(peer, DataRequest(task, DATASET, uuid.uuid4()))
    if not isinstance(answer, SliceAssigned):
        raise AssertionError(f"{peer} got no slice: {answer}")
    return answer.index


# ------------------------------------------------------------------------------------------------------------- journal


def _round_record(number: int, peers: Sequence[str]) -> dict[str, object]:
    """Return a record of a round of workers that state what they have used."""
    digest = f"blake3:{number:064x}"
    members = []
    for position, peer in enumerate(peers):
        epoch, index = divmod(8 * number + position, SLICES)
        part = {"epoch": epoch, "slice": index, "first": 0, "end": 8 * BATCH}
        stated = {"round": number, "weights": digest, "ranges": [part], "batches": 8, "batch_size": BATCH}
        stated |= {"seed": 1, "optimizer": "kept", "update": digest}
        member = {"peer": peer, "samples": 8 * BATCH, "batches": 8, "ranges": [[*part.values()]]}
        members.append(member | {"contribution": stated, "update": digest})
    digests = dict.fromkeys(("update", "weights_before", "weights"), digest)
    return {"round": number, "term": 1, "members": members, "unused": [], "loss": 0.5, **digests}


def measure_journal(path: Path) -> list[Row]:
    """Write a journal of closed rounds, read it back and restore DiLoCo's state from it."""
    peers = [str(PeerId.from_public_key(bytes([number]) * 32)) for number in range(8)]
    with Journal(path) as journal:
        journal.record("accepted")
        journal.append("term", term=1, server=peers[0])
        for number in range(1, RECORDS - 1):
            journal.append("round", **_round_record(number, peers))
    size, begin = path.stat().st_size, time.perf_counter()
    records = read_journal(path)
    read = time.perf_counter() - begin
    state = restore(records)
    restored = time.perf_counter() - begin - read
    if (len(records), state.closed) != (RECORDS, RECORDS - 2):
        raise AssertionError(f"{len(records)} records and {state.closed} rounds were read of {RECORDS}")
    begin = time.perf_counter()
    with path.open("rb") as file:
        plain = sum(1 for line in file if json.loads(line))
    bare = time.perf_counter() - begin
    path.unlink()
    what = f"journal of {plain:,} records, {size / 1e6:.0f} MB"
    return [
        Row(f"{what}, read", "s", read, bare, "json.loads", read / bare, "< 5 s"),
        Row(f"{what}, DiLoCo restored", "s", restored),
    ]


# ------------------------------------------------------------------------------------------------------------- workers


class FakeWorker:
    """Worker that offers one lease for its executor, confirms its task and releases it."""

    def __init__(self, endpoint: MemoryEndpoint, executor: str, tasks: anyio.abc.TaskGroup) -> None:
        self.endpoint = endpoint
        self._tasks = tasks
        self._stream: TaskStream | None = None
        self._executor = executor
        self._lease = uuid.uuid4()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Serve the scheduler and answer its requests until cancelled."""
        rpc.serve(self.endpoint, RENEW_LEASE, self._renew)
        rpc.serve(self.endpoint, RELEASE_LEASE, self._release)
        rpc.serve(self.endpoint, HEALTH_CHECK, self._health)
        async with pubsub.subscribe(self.endpoint, WORKER_REQUESTS) as requests:
            task_status.started()
            async for scheduler, request in requests:
                if request.spec.executor[0].kind == self._executor:
                    await self._bid(scheduler, request)

    async def _bid(self, scheduler: PeerId, request: WorkerRequest) -> None:
        offer = WorkerOffer(
            id=self._lease, request_id=request.id, price=1.0, resources=Resources(cpu=2, memory=2), timeout_ms=2000,
        )  # fmt: skip
        await rpc.call(self.endpoint, scheduler, OFFER, offer, timeout=TIMEOUT)

    async def _renew(self, scheduler: PeerId, request: RenewLease) -> Renewed:
        if self._stream is None:
            self._stream = TaskStream(self.endpoint, scheduler, self._lease, self._start, lambda _attempt: None)
            self._tasks.start_soon(self._stream.run)
        return Renewed(id=request.id, timeout_ms=3_600_000)

    def _start(self, attempt: AttemptId, _spec: TaskSpec) -> None:
        assert self._stream is not None
        self._stream.send_update(StatusUpdate(attempt=attempt, started=Started()))

    async def _release(self, _peer: PeerId, _request: ReleaseLease) -> LeaseReleased:
        return LeaseReleased(known=True)

    async def _health(self, _peer: PeerId, _request: object) -> Health:
        return Health(healthy=True, role="worker")


async def _serve_dataset(endpoint: MemoryEndpoint, folder: Path) -> None:
    digest = "blake3:" + "0" * 64
    entries = tuple(SliceEntry(file=f"{n}", samples=SLICE_SAMPLES, size=1, digest=digest) for n in range(SLICES))
    manifest = folder / "manifest.json"
    manifest.write_bytes(to_json(Manifest, Manifest(dataset=DATASET, slices=entries)))

    async def resolve(_peer: PeerId, _request: PullRequest) -> transfer.PullSource:
        return transfer.PullSource(manifest)

    transfer.serve_pulls(endpoint, resolve)
    await dataset_directory.announce_dataset(endpoint, DATASET, DatasetRecord(num_slices=SLICES))


# ------------------------------------------------------------------------------------------------------------ operators


def _job(folder: Path) -> DilocoJobConfig:
    """Return a job whose first round does not end during the measurement."""
    from hypha_proto.safetensors_io import TensorFileWriter, TensorInfo  # imported late: numpy

    model = folder / "start-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with TensorFileWriter(model / "model.safetensors", {"w": TensorInfo("F32", (0,))}, {}):
        pass
    return DilocoJobConfig.model_validate(
        {
            "dataset": DATASET,
            "model": {"path": str(model), "type": "vision-classification"},
            "inner_optimizer": {"learning_rate": 0.001},
            "rounds": {"update_rounds": 3, "avg_samples_between_updates": 10_000_000, "batch_size": BATCH},
            "resources": {
                "num_workers": WORKERS,
                "allocation_timeout": TIMEOUT,
                "worker_price": {"bid": 100, "max": 100},
            },
        }
    )


class QuietOperator:
    """Operator that starts a task on each lease and acknowledges every report."""

    def __init__(self, context: JobContext, job: DilocoJobConfig) -> None:
        self._context, self._job = context, job
        self._demand = role_requests(job)
        self._next = 0

    def on_start(self, now: float) -> tuple[()]:
        return ()

    def role_requests(self) -> Sequence[Any]:
        return self._demand

    def on_leases_acquired(self, leases: Sequence[Lease], now: float) -> tuple[StartTask, ...]:
        peers = tuple(lease.peer for lease in leases)
        placed = PlacedJob(self._context.job_id, self._job, self._context.scheduler, peers[0], peers, _NO_MODEL)
        return tuple(
            StartTask(TaskRef(f"task-{number}", lease), placed.train_spec(Slot(number, None)))
            for number, lease in enumerate(leases)
        )

    def on_task_update(self, task: TaskRef, update: TaskUpdate, now: float) -> tuple[()]:
        return ()

    def on_training_report(self, task: TaskRef, progress: object, now: float) -> tuple[Acknowledged, tuple[()]]:
        return Acknowledged(), ()

    def next_slice(self, task: TaskRef, dataset: str, now: float) -> SliceToUse:
        self._next += 1
        return SliceToUse(*divmod(self._next, SLICES))

    def next_deadline(self) -> None:
        return None


class QuietStrategy:
    """Strategy of `QuietOperator`, for the same job table as DiLoCo's."""

    job_table = DilocoJobConfig
    rpc_methods = ()

    @asynccontextmanager
    async def open(
        self, job: DilocoJobConfig, context: JobContext, journal: Sequence[Mapping[str, Any]]
    ) -> AsyncIterator[Any]:
        await context.open_dataset(DATASET, timeout=TIMEOUT)
        yield QuietOperator(context, job)
