"""Complete jobs in memory, on a virtual clock: the real scheduler, scripted workers and a scripted parameter server."""

from __future__ import annotations

import errno
import json
import logging
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc
import numpy as np
import pytest
from msgspec.structs import replace
from support.fake_hf_hub import hub_server
from support.scripted_jobs import ScriptedStart, ScriptedWorker
from support.waiting import until

from hypha_net import dataset_directory, rpc, transfer
from hypha_net.errors import NetError, TransferRefusedError
from hypha_net.testing import MemoryEndpoint, MemoryNetwork
from hypha_proto.codec import to_json
from hypha_proto.commands import CommandAnswer, SetMembers
from hypha_proto.contributions import STATE_CONTRIBUTION, StateContribution
from hypha_proto.datasets import (
    DATA,
    DataRequest,
    DatasetRecord,
    Manifest,
    ProviderFailure,
    SliceAssigned,
    SliceEntry,
    UnusableSlice,
)
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import PeersReference, TrainConfig
from hypha_proto.leases import (
    SAY_GOODBYE,
    Goodbye,
    LeaseReleased,
    LeaseRenewal,
    Reasons,
    Rejection,
    ReleaseLease,
    RenewalFailed,
    RenewLease,
    WhyNot,
)
from hypha_proto.offers import OFFER, WORKER_REQUESTS, WorkerOffer, WorkerRequest
from hypha_proto.resources import Resources
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo
from hypha_proto.tasks import TaskDefinition, TaskFailed, TaskFinished
from hypha_proto.training_reports import (
    REPORT,
    BatchDone,
    Done,
    OuterStepTaken,
    ReportAnswer,
    ReportError,
    ReportTraining,
    RoundMetrics,
    ScheduleUpdate,
    SendingUpdate,
    TrainingReport,
    UpdateMerged,
)
from hypha_proto.transfer import NO_ROOM, OUTER_UPDATE, PullRequest, PushHeader, Refusal
from hypha_proto.update_file import UpdateMetadata, write_update
from hypha_scheduler.allocation.auction import AuctionTable
from hypha_scheduler.audit import audit
from hypha_scheduler.errors import AllocationError, JobFailedError
from hypha_scheduler.jobs.config import StartModelTable
from hypha_scheduler.jobs.context import JobHost
from hypha_scheduler.jobs.effect_queue import ROOM_INTERVAL
from hypha_scheduler.jobs.journal import Journal, read_journal
from hypha_scheduler.service import SchedulerService
from hypha_scheduler.strategies.diloco import operator as diloco_operator
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig, RowsTable
from hypha_scheduler.strategies.diloco.specs import SETTLE

pytestmark = [pytest.mark.usefixtures("inline_threads"), pytest.mark.virtual_clock]

SLICES = 8
SLICE_SAMPLES = 40
MIN_ROUND_SAMPLES = 192 - 3 * 8
"""A round may miss its target by one batch per worker, since smaller changes of an allocation are not sent."""


GIVEN_BACK = {"the job is done", "the job needs it no longer"}
"""Why a lease is released whose task has ended."""


def job(model: Path, **changes: Any) -> DilocoJobConfig:
    plain: dict[str, Any] = {
        "dataset": "digits",
        "model": {"path": str(model), "type": "vision-classification"},
        "inner_optimizer": {"learning_rate": 0.001},
        "rounds": {"update_rounds": 3, "avg_samples_between_updates": 192, "batch_size": 8},
        "resources": {"num_workers": 3, "allocation_timeout": 20.0, "worker_price": {"bid": 100, "max": 123}},
    }
    for key, value in changes.items():
        plain[key] = {**plain[key], **value} if isinstance(plain[key], dict) else value
    return DilocoJobConfig.model_validate(plain)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "start-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with TensorFileWriter(folder / "model.safetensors", {"w": TensorInfo("F32", (2, 2))}, {}) as writer:
        writer.write("w", np.zeros((2, 2), np.float32))
    return folder


@dataclass
class SharedState:
    """State shared by the scripted nodes: outer updates made and slices assigned."""

    tmp: Path
    stepped: dict[int, anyio.Event] = field(default_factory=dict)
    given: list[tuple[int, int]] = field(default_factory=list)
    """Assigned slices as (epoch, index)."""

    def step(self, number: int) -> anyio.Event:
        return self.stepped.setdefault(number, anyio.Event())


@dataclass(kw_only=True)
class Worker(ScriptedWorker):
    """Worker that makes offers for its role, and runs a scripted executor."""

    shared: SharedState
    role: str = "train"
    price: float = 100.0
    batch_seconds: float = 0.05
    fails_after: int | None = None
    """Number of batches after which its executor fails."""
    unusable: frozenset[int] = frozenset()
    """Slices that it gets from no provider."""
    skipped_round: int = 0
    """Round whose outer update it does not send to the scheduler."""
    evaluation_seconds: float = 0.0
    """Duration of the evaluation after the last round; 0 without one."""
    repeats_messages: bool = False
    """Whether it repeats each report and slice request, as after a lost response."""
    traffic: tuple[int, int] = (1000, 2000)
    """Bytes that it states to have sent and received for a job."""
    batches: int = 0
    """Number of batches that it has reported."""
    refuses: bool = False
    offers_left: int = 1_000_000
    renewals_left: int = 1_000_000
    ends_cancelled: bool = False
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    requests: list[WorkerRequest] = field(default_factory=list)
    rounds_seen: list[SetMembers] = field(default_factory=list)

    @property
    def start(self) -> ScriptedStart | None:
        """What it was told to start last."""
        return self.started[-1] if self.started else None

    async def bid(self, scheduler: PeerId, request: WorkerRequest) -> None:
        self.requests.append(request)
        if request.spec.executor[0].kind != self.role or self.refuses or not self.offers_left:
            return
        self.offers_left -= 1
        lease = uuid.uuid4()
        self.offered[lease] = scheduler
        resources = Resources(cpu=2, memory=2)
        offer = WorkerOffer(id=lease, request_id=request.id, price=self.price, resources=resources, timeout_ms=500)
        await rpc.call(self.endpoint, scheduler, OFFER, offer)

    async def renew(self, peer: PeerId, request: RenewLease) -> LeaseRenewal:
        self.renewals_left -= 1
        return RenewalFailed() if self.renewals_left < 0 else await super().renew(peer, request)

    def hear(self, lease: uuid.UUID, definition: TaskDefinition) -> None:
        """Start a task, or carry out a command, on a lease."""
        super().hear(lease, definition)
        peer, spec, command = self.leases[lease], definition.start, definition.command
        if spec is not None and not self.is_silent:
            assert spec.executor.startswith(f"{self.role}/")
            if self.role == "train":
                self.tasks.start_soon(self.until_unreachable, self.train, peer, self.start)
        elif command is not None:
            answer = CommandAnswer(number=command.number, accepted=True)
            self.streams[lease].report(definition, answered=answer)
            if command.members is not None:
                self.rounds_seen.append(command.members)
                self.tasks.start_soon(self.until_unreachable, self.aggregate, peer, command.members)

    async def release(self, peer: PeerId, request: ReleaseLease) -> LeaseReleased:
        if self.start is not None and self.start.lease == request.id:  # no offer that is not needed
            self.scope.cancel()
        return await super().release(peer, request)

    async def why_not(self, _peer: PeerId, question: WhyNot) -> Reasons:
        offered = {executor.name for executor in question.request.spec.executor}
        text = "the owner says no" if self.refuses else f"has no executor {offered}"
        return Reasons(rejections=(Rejection(code="executor", text=text),))

    async def tell(self, peer: PeerId, start: ScriptedStart, progress: TrainingReport) -> ReportAnswer:
        message = ReportTraining(start.definition.attempt, progress, id=uuid.uuid4())
        self.batches += isinstance(progress, BatchDone)
        answer = await rpc.call(self.endpoint, peer, REPORT, message)
        if self.repeats_messages:
            with suppress(NetError):  # the scheduler may have stopped after the last report
                assert await rpc.call(self.endpoint, peer, REPORT, message) == answer
        return answer

    async def exit(self, start: ScriptedStart, code: int, reason: str, lines: tuple[str, ...]) -> None:
        outcome = "finished" if code == 0 else "failed"
        sent, received = self.traffic
        about: dict[str, Any] = {"bytes_sent": sent, "bytes_received": received}
        ends = {
            "finished": TaskFinished(outputs=(), **about),
            "failed": TaskFailed(reason=reason, exit_code=code, last_lines=lines, **about),
        }
        self.streams[start.lease].report(start.definition, **{outcome: ends[outcome]})

    # -------------------------------------------------------------------------------------------------------- executor

    async def until_unreachable(self, role: Callable[..., Awaitable[None]], peer: PeerId, message: Any) -> None:
        """Run a coroutine until the scheduler is no longer reachable."""
        with suppress(NetError):
            await role(peer, message)

    async def train(self, peer: PeerId, start: ScriptedStart) -> None:
        with anyio.CancelScope() as self.scope:
            spec = start.definition.start
            assert spec is not None
            assert spec.training is not None
            await self.fetch_model(spec.training)
            batches = 0
            for number in range(1, 1000):
                left: int | None = None
                while left is None or left > 0:
                    if not await self.take_slice_if_needed(peer, start, batches):
                        return  # the scheduler has removed this worker
                    await anyio.sleep(self.batch_seconds)
                    batches += 1
                    if batches == self.fails_after:
                        await self.exit(start, 3, "the executor exited with 3", ("Traceback", "RuntimeError: no"))
                        return
                    answer = await self.tell(peer, start, BatchDone(batch_size=8, slices={str(self.index): 8}))
                    if isinstance(answer, Done):
                        await self.exit(start, 0, "", ())
                        return
                    if isinstance(answer, ScheduleUpdate):
                        left = answer.counter
                    elif left is not None:
                        left -= 1
                await self.tell(peer, start, SendingUpdate())
                update = f"blake3:{number:064x}"
                message = StateContribution(start.definition.attempt, number, update, id=uuid.uuid4())
                await rpc.call(self.endpoint, peer, STATE_CONTRIBUTION, message)
                await self.shared.step(number).wait()
                await self.tell(peer, start, RoundMetrics(round=number, metrics={"loss": 1.0 / number}))
                if isinstance(await self.tell(peer, start, UpdateMerged()), Done):
                    break
            if self.evaluation_seconds:
                await anyio.sleep(self.evaluation_seconds)
                await self.tell(peer, start, RoundMetrics(round=number, metrics={"evaluation_loss": 0.25}))
            await self.exit(start, 0, "", ())

    async def fetch_model(self, config: TrainConfig) -> None:
        artifact = config.model.artifact
        assert isinstance(artifact, PeersReference)
        assert artifact.resource is not None
        for index, name in enumerate(artifact.filenames or ()):
            target = self.shared.tmp / f"{self.endpoint.peer_id}-{name}"
            asked = PullRequest(dataset=artifact.resource.dataset, index=artifact.resource.index + index)
            await transfer.pull(self.endpoint, artifact.peers[0], asked, target)

    async def take_slice_if_needed(self, peer: PeerId, start: ScriptedStart, batches: int) -> bool:
        if batches * 8 % SLICE_SAMPLES == 0:
            report: UnusableSlice | None = None
            while True:
                request = DataRequest(start.definition.attempt, "digits", id=uuid.uuid4(), unusable=report)
                answer = await rpc.call(self.endpoint, peer, DATA, request)
                if self.repeats_messages:
                    assert await rpc.call(self.endpoint, peer, DATA, request) == answer
                if not isinstance(answer, SliceAssigned):
                    return False
                if answer.index not in self.unusable:
                    break
                failure = ProviderFailure(provider=answer.data_provider, reason="the digest\nis wrong")
                report = UnusableSlice(index=answer.index, epoch=answer.epoch, failures=(failure,))
            assert answer.digest is not None
            self.index = answer.index
            self.shared.given.append((answer.epoch or 0, answer.index))
        return True

    # ------------------------------------------------------------------------------------------------ parameter server

    async def push_until_there_is_room(self, peer: PeerId, path: Path, header: PushHeader) -> None:
        while True:
            try:
                await transfer.push(self.endpoint, peer, path, header)
            except TransferRefusedError as error:
                if not error.reason.startswith(NO_ROOM):
                    raise
                await anyio.sleep(0.05)
            else:
                return

    async def aggregate(self, peer: PeerId, message: SetMembers) -> None:
        assert self.start is not None
        path = self.shared.tmp / f"outer-{message.round}.safetensors"
        delta = np.full((2, 2), message.round, np.float32)
        write_update(path, {"w": (2, 2)}, [("w", delta)], UpdateMetadata(round=message.round))
        size, digest = await transfer.describe(path)
        attempt = self.start.definition.attempt
        header = PushHeader(attempt, message.round, OUTER_UPDATE, path.name, size, digest, peer, term=1)
        if message.round != self.skipped_round:
            with suppress(TransferRefusedError):
                await self.push_until_there_is_room(peer, path, header)
        self.shared.step(message.round).set()
        if isinstance(await self.tell(peer, self.start, OuterStepTaken()), Done):
            await self.exit(self.start, 0, "", ())


async def data_node(endpoint: MemoryEndpoint, tmp: Path, form: str | None = None) -> None:
    digest = "blake3:" + "0" * 64
    entries = tuple(SliceEntry(file=f"{n}", samples=SLICE_SAMPLES, size=1, digest=digest) for n in range(SLICES))
    manifests = {name: tmp / f"served-{name}.json" for name in ("digits", "held-out")}
    for name, path in manifests.items():
        columns = dict.fromkeys(("a", "c", "pixel_values", "labels"), "text")
        manifest = Manifest(dataset=name, slices=entries, format=form, columns=columns)
        path.write_bytes(to_json(Manifest, manifest))

    async def resolve(_peer: PeerId, request: PullRequest) -> transfer.PullSource | Refusal:
        manifest = manifests[request.dataset]
        return transfer.PullSource(manifest) if request.name == "manifest" else Refusal(reason="not in this test")

    transfer.serve_pulls(endpoint, resolve)
    for name in manifests:
        await dataset_directory.announce_dataset(endpoint, name, DatasetRecord(num_slices=SLICES))


@asynccontextmanager
async def open_network(
    tmp_path: Path, form: str | None = None
) -> AsyncIterator[tuple[SchedulerService, list[Worker], SharedState]]:
    """Open three training workers, a parameter server, a data node and a scheduler."""
    network = MemoryNetwork(seed=7)
    shared = SharedState(tmp_path)
    async with AsyncExitStack() as stack:
        stack.enter_context(anyio.fail_after(1000))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        endpoints = [await stack.enter_async_context(network.endpoint(name)) for name in "abcpsd"]
        workers = [Worker(endpoint, shared=shared) for endpoint in endpoints[:3]]
        workers.append(Worker(endpoints[3], shared=shared, role="aggregate"))
        for worker in workers:
            await tasks.start(worker.run)
        await data_node(endpoints[5], tmp_path, form)
        yield SchedulerService(JobHost(endpoints[4], tmp_path / "runs")), workers, shared
        tasks.cancel_scope.cancel()


def events(tmp_path: Path) -> list[dict[str, Any]]:
    [path] = (tmp_path / "runs").glob("*/metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(tmp_path: Path) -> list[dict[str, Any]]:
    [path] = (tmp_path / "runs").glob("*/journal.jsonl")
    return read_journal(path)


@contextmanager
def expect_failure() -> Iterator[list[str]]:
    messages: list[str] = []
    with pytest.raises(JobFailedError) as caught:
        yield messages
    messages.append(str(caught.value))


async def test_job_runs_from_request_to_result(tmp_path: Path, model: Path) -> None:
    async with open_network(tmp_path) as (service, workers, shared):
        path = await service.run_job(job(model))
        result = json.loads(path.read_text())
        assert result["rounds"] == 3
        assert len(result["workers"]) == 3
        assert result["placement_seconds"] == pytest.approx(AuctionTable().decision_window)
        assert result["loss"] == pytest.approx(1 / 3)
        assert result["samples"] == sum(worker["samples"] for worker in result["workers"]) >= 3 * MIN_ROUND_SAMPLES
        assert all(worker["samples"] == 8 * worker["batches"] for worker in result["workers"])
        with TensorFile(path.parent / "model" / "model.safetensors") as trained:
            assert trained.stored("w").tolist() == [[6.0, 6.0], [6.0, 6.0]]  # 1 + 2 + 3
        assert not any((path.parent / "updates").iterdir())
        assert all({reason for _, reason in worker.released} <= GIVEN_BACK for worker in workers)
        assert len(set(shared.given)) == len(shared.given)
        found = audit(path.parent)
        assert found.faults == []
        assert (found.rounds, found.samples, found.is_finished) == (3, result["samples"], True)
        for worker in workers:  # the largest price, 123, is never sent
            assert worker.requests
            for request in worker.requests:
                assert request.bid == 100
                assert b"\xf9\x57\xb0" not in WORKER_REQUESTS.encode(request)  # 123.0 as CBOR half
            assert "123.0" not in repr(worker.start)
    reported = events(tmp_path)
    [placement] = [event for event in reported if event["event"] == "placement"]
    assert [entry["role"] for entry in placement["workers"]].count("train") == 3
    rounds = [event for event in reported if event["event"] == "round"]
    assert [event["round"] for event in rounds] == [1, 2, 3]
    assert all(event["samples"] >= MIN_ROUND_SAMPLES and event["samples_per_second"] > 0 for event in rounds)
    assert [event["loss"] for event in rounds] == pytest.approx([1.0, 1 / 2, 1 / 3])
    assert len([event for event in reported if event["event"] == "metric"]) == 9
    assert reported[-1]["event"] == "finished"


@pytest.mark.parametrize("kind", ["began", "contributed"])
async def test_a_job_that_its_audit_does_not_prove_fails(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    append = Journal.append

    def lose(journal: Journal, record: str, /, **fields: object) -> None:
        append(journal, "lost" if record == kind else record, **fields)

    monkeypatch.setattr(Journal, "append", lose)
    async with open_network(tmp_path) as (service, _workers, _shared):
        with pytest.raises(
            JobFailedError, match=r"the audit of the rounds has failed:\n.*(not begun|contributed nothing)"
        ):
            await service.run_job(job(model))


async def test_the_job_ends_after_the_evaluation_of_its_last_round(tmp_path: Path, model: Path) -> None:
    async with open_network(tmp_path) as (service, workers, _shared):
        for worker in workers[:3]:
            worker.batch_seconds = 20.0  # a share may take four times as long as it would be trained
            worker.evaluation_seconds = 2 * diloco_operator._EXECUTOR_EXIT_TIMEOUT
        await service.run_job(
            job(model, dataset={"dataset": "digits", "evaluation": "held-out"}, rounds={"evaluate_every": 3})
        )
    measured = [event for event in events(tmp_path) if event["event"] == "metric" and "evaluation_loss" in str(event)]
    assert len(measured) == 3
    assert not any("did not end in time" in str(event) for event in events(tmp_path))


def test_a_private_repository_is_served_to_workers_without_its_token(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, token = {path.name: path.read_bytes() for path in model.iterdir()}, "hf_PrivateToken0123456789"

    async def case() -> None:
        async with open_network(tmp_path) as (service, _workers, _shared):
            table = {"repository": "org/model", "type": "vision-classification", "token": token, "serve": True}
            wanted = job(model).model_copy(update={"model": StartModelTable.model_validate(table)})
            path = await service.run_job(wanted)  # its workers pull the files from the scheduler
            with TensorFile(path.parent / "model" / "model.safetensors") as trained:
                assert trained.stored("w").tolist() == [[6.0, 6.0], [6.0, 6.0]]
            assert not (path.parent / ".model-served").exists()

    monkeypatch.undo()  # a download asks its thread whether it was cancelled
    with hub_server(files, token) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        anyio.run(case, backend="trio")
    fetched = [each.read_bytes() for each in tmp_path.glob("12D3Koo*-model.safetensors")]
    assert fetched == [files["model.safetensors"]] * 3
    assert all(token.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("form", "rows", "reason"),
    [
        (
            "jsonl",
            None,
            "holds rows of the format jsonl: say with rows.completion which text of a row is learnt",
        ),
        (
            None,
            RowsTable(completion="{a}"),
            "holds tensors, and rows reads JSON lines: leave rows out",
        ),
        ("jsonl", RowsTable(completion="{a} {b}"), "rows: dataset 'digits' has no column 'b'; it has a, c"),
    ],
)
async def test_a_dataset_that_does_not_fit_is_refused_before_any_lease(
    tmp_path: Path, model: Path, form: str | None, rows: RowsTable | None, reason: str
) -> None:
    async with open_network(tmp_path, form=form) as (service, workers, _shared):
        with expect_failure() as messages:
            await service.run_job(job(model).model_copy(update={"rows": rows}))
        assert [reason in message for message in messages] == [True]
        assert not any(worker.released for worker in workers)
        assert not any(event["event"] == "placement" for event in events(tmp_path))


async def test_result_states_the_bytes_that_peers_moved_for_this_job(tmp_path: Path, model: Path) -> None:
    async with open_network(tmp_path) as (service, workers, _shared):
        workers[0].traffic = (700, 30)
        result = json.loads((await service.run_job(job(model))).read_text())
        stated = {peer["peer"]: (peer["bytes_sent"], peer["bytes_received"]) for peer in result["workers"]}
        assert stated == {str(worker.endpoint.peer_id): worker.traffic for worker in workers[:3]}
        server = result["parameter_server"]
        assert (server["bytes_sent"], server["bytes_received"]) == workers[3].traffic


async def test_start_of_each_worker_is_logged_once(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peers: list[str] = []
    with caplog.at_level(logging.INFO, "hypha_scheduler.strategies.diloco.running_job"):
        async with open_network(tmp_path) as (service, workers, _shared):
            await service.run_job(job(model))
            peers.extend(str(worker.endpoint.peer_id) for worker in workers[:3])
    messages = [record.getMessage().split() for record in caplog.records if "is ready after" in record.getMessage()]
    assert sorted(words[1] for words in messages) == sorted(peers)
    assert [" ".join(words[-3:]) for words in messages] == ["(1 of 3)", "(2 of 3)", "(3 of 3)"]
    assert {words[5] for words in messages} == {"0.0"}


async def test_job_without_a_replacement_of_a_failed_executor_fails_with_its_last_line(
    tmp_path: Path, model: Path
) -> None:
    async with open_network(tmp_path) as (service, workers, _shared):
        workers[1].fails_after = 5
        workers[1].offers_left = 1
        with expect_failure() as messages:
            await service.run_job(job(model, resources={"min_workers": 3, "allocation_timeout": 1.0}))
        assert "exit code 3" in messages[0]
        assert "RuntimeError: no" in messages[0]
        assert str(workers[1].endpoint.peer_id) in messages[0]
        assert all(worker.released for worker in workers)
    assert events(tmp_path)[-1]["event"] == "failed"


@pytest.mark.parametrize("role", ["train", "aggregate"])
async def test_worker_that_does_not_start_its_task_counts_as_lost(tmp_path: Path, model: Path, role: str) -> None:
    async with open_network(tmp_path) as (service, workers, _shared):
        workers[2 if role == "train" else 3].is_silent = True
        wanted = job(model, resources={"min_workers": 2, "allocation_timeout": 1.0})
        if role == "train":
            path = await service.run_job(wanted)
            assert json.loads(path.read_text())["rounds"] == 3
            assert len(workers[3].rounds_seen[-1].members) == 2
        else:
            with expect_failure() as messages:
                await service.run_job(wanted)
            assert "there is no parameter server" in messages[0]
            assert "did not confirm task" in messages[0]
            assert [worker.start for worker in workers[:3]] == [None, None, None]
        assert "its task did not start" in dict(workers[2 if role == "train" else 3].released).values()


async def test_missing_outer_update_fails_the_job(tmp_path: Path, model: Path) -> None:
    async with open_network(tmp_path) as (service, workers, _shared):
        workers[3].skipped_round = 2
        with expect_failure() as messages:
            await service.run_job(job(model))
        assert "the outer update of round 2 never came" in messages[0]


async def test_job_starts_with_its_minimum_and_says_who_is_missing(tmp_path: Path, model: Path) -> None:
    """It does not wait for the third worker until `allocation_timeout`, 20 s."""

    async with open_network(tmp_path) as (service, workers, _shared):
        workers[0].refuses = True
        result = json.loads((await service.run_job(job(model, resources={"min_workers": 2}))).read_text())
        peers = {str(worker.endpoint.peer_id) for worker in workers[1:3]}
        assert {entry["peer"] for entry in result["workers"]} == peers
    [placement] = [event for event in events(tmp_path) if event["event"] == "placement"]
    assert placement["seconds"] == pytest.approx(SETTLE + AuctionTable().decision_window)
    shortage = next(event for event in events(tmp_path) if event["event"] == "shortage")
    assert (shortage["role"], shortage["held"], shortage["wanted"], shortage["minimum"]) == ("train", 2, 3, 2)


async def test_allocation_error_explains_missing_offers(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connected(endpoint: MemoryEndpoint, _topic: str) -> frozenset[PeerId]:
        return frozenset(endpoint.connected())  # as on a real network, where a worker without an offer never connects

    monkeypatch.setattr(MemoryEndpoint, "topic_peers", connected)
    async with open_network(tmp_path) as (service, workers, _shared):
        workers[0].refuses = True
        workers[1].price = 500.0
        with pytest.raises(AllocationError) as caught:
            await service.run_job(job(model, resources={"allocation_timeout": 1.5}))
        text = str(caught.value)
        assert "1 of 3 for train" in text
        assert "the owner says no" in text
        assert "not named here made no offer for train: the bid of 100 may be under" in text
        assert "asks 500 tokens an hour" in text
        assert "123" not in text.split("asks 500")[1]
        counted = "1 of 4 suitable: 1 without the executor, 1 above the price, 1 in another role of this job"
        assert f"train: 1 of 3 held, 2 more needed; {counted}" in text
        assert all(worker.released for worker in (workers[2], workers[3]))
    early, shortage = [event for event in events(tmp_path) if event["event"] == "shortage"]
    assert (early["held"], early["wanted"], early["minimum"]) == (1, 3, 3)
    assert shortage["rejections"] == {"price": 1, "taken": 1, "executor": 1}
    assert (shortage["role"], shortage["suitable"], shortage["known"]) == ("train", 1, 4)


async def test_allocation_error_names_workers_held_for_another_role(tmp_path: Path, model: Path) -> None:
    async with open_network(tmp_path) as (service, _workers, _shared):
        with pytest.raises(JobFailedError, match="not enough workers") as caught:
            await service.run_job(job(model, resources={"num_workers": 4, "allocation_timeout": 1.5}))
        lines = str(caught.value).splitlines()
        assert "4 of 4 for train, 0 of 1 for aggregate" in lines[0] or "3 of 4 for train, 1 of 1" in lines[0]
        assert len([line for line in lines if "taken for" in line and "a worker of its own" in line]) == 4
        assert not any(line.endswith(": ") for line in lines)


@contextmanager
def full_disk(kind: str, failures: float = math.inf) -> Iterator[list[str]]:
    """Let the journal find no room for records of a kind so many times; yield the records that it had none for."""
    append, refused = Journal.append, list[str]()

    def find_no_room(journal: Journal, what: str, /, **fields: object) -> None:
        if what == kind and len(refused) < failures:
            refused.append(what)
            raise OSError(errno.ENOSPC, "No space left on device")
        append(journal, what, **fields)

    with pytest.MonkeyPatch.context() as full:
        full.setattr(Journal, "append", find_no_room)
        yield refused


@pytest.mark.parametrize("kind", ["accepted", "placed"])
async def test_full_disk_fails_the_job_and_not_the_scheduler(tmp_path: Path, model: Path, kind: str) -> None:
    async with open_network(tmp_path) as (service, workers, _shared):
        with full_disk(kind), expect_failure() as messages:
            await service.run_job(job(model))
        assert "No space left on device" in messages[0]
        assert "; free space on that disk, then resume the job or submit it again" in messages[0]
        assert [len(worker.released) for worker in workers] == ([0] * 4 if kind == "accepted" else [1] * 4)
    assert events(tmp_path)[-1]["event"] == "failed"
    assert "No space left on device; free space on that disk" in events(tmp_path)[-1]["error"]


@pytest.mark.parametrize("kind", ["announced", "round", "contributed", "ended"])
async def test_job_pauses_while_the_disk_has_no_room_for_its_records(tmp_path: Path, model: Path, kind: str) -> None:
    async with open_network(tmp_path) as (service, _workers, _shared):
        with full_disk(kind, failures=3) as refused:
            result = json.loads((await service.run_job(job(model))).read_text())
        assert result["rounds"] == 3
    assert len(refused) == 3
    [paused] = [event for event in events(tmp_path) if event["event"] == "paused"]
    assert "No space left on device; free space on that disk, then the job goes on" in paused["reason"]
    [continued] = [event for event in events(tmp_path) if event["event"] == "continued"]
    assert continued["seconds"] == pytest.approx(2 * ROOM_INTERVAL)
    assert [r["round"] for r in records(tmp_path) if r["record"] == "round"] == [1, 2, 3]


async def test_job_pauses_while_there_is_no_room_for_an_outer_update(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def disk_usage(_path: Path) -> SimpleNamespace:
        nonlocal looks
        looks += 1
        return SimpleNamespace(free=100 if looks < 3 else 1 << 40)

    async with open_network(tmp_path) as (service, _workers, _shared):
        with monkeypatch.context() as full:
            full.setattr("shutil.disk_usage", disk_usage)
            result = json.loads((await service.run_job(job(model))).read_text())
        assert result["rounds"] == 3
    [paused] = [event for event in events(tmp_path) if event["event"] == "paused"]
    assert "bytes, 100 are free" in paused["reason"]
    assert "; free space on that disk, then the job goes on" in paused["reason"]
    assert sum(event["event"] == "continued" for event in events(tmp_path)) == 1


async def test_unknown_dataset_fails_the_job(tmp_path: Path, model: Path) -> None:
    async with open_network(tmp_path) as (service, _workers, _shared):
        with expect_failure() as messages:
            await service.run_job(job(model, dataset={"dataset": "mnist"}, resources={"allocation_timeout": 0.5}))
        assert "dataset 'mnist' was not found within 0.5 s: no data node announces it" in messages[0]


async def test_a_job_continues_without_a_slice_that_no_provider_has(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hypha_scheduler.strategies.diloco"):
        async with open_network(tmp_path) as (service, workers, shared):
            for worker in workers:
                worker.unusable = frozenset({2, 5})
                worker.repeats_messages = True
            result = json.loads((await service.run_job(job(model))).read_text())
            assert result["rounds"] == 3
            assert [entry["slice"] for entry in result["slices_set_aside"]] == [2, 5]
            assert list(result["slices_set_aside"][0]["providers"].values()) == ["the digest is wrong"]
            assert not {2, 5} & {index for _, index in shared.given}
            assert len({epoch for epoch, _ in shared.given}) > 1
    reported = [event for event in events(tmp_path) if event["event"] == "slice_set_aside"]
    assert sorted(event["slice"] for event in reported) == [2, 5]
    assert [event["left"] for event in reported] == [7, 6]
    [first, _] = [text for record in caplog.records if "continues with" in (text := record.getMessage())]
    assert "7 slices" in first
    assert "the digest is wrong; restore the file there" in first


async def test_a_job_without_a_usable_slice_fails_and_says_why(tmp_path: Path, model: Path) -> None:
    async with open_network(tmp_path) as (service, workers, _shared):
        for worker in workers[:3]:
            worker.unusable = frozenset(range(SLICES))
        with expect_failure() as messages:
            await service.run_job(job(model))
        assert messages[0].startswith("dataset 'digits': all 8 slices were set aside; the last, slice ")
        assert "the digest is wrong; restore the file there" in messages[0]


async def test_a_report_of_a_slice_that_was_not_assigned_changes_nothing(tmp_path: Path, model: Path) -> None:
    async with open_network(tmp_path) as (service, workers, shared):

        async def lie() -> None:
            await until(lambda: shared.given, 60)
            [scheduler] = {peer for worker in workers for peer in worker.leases.values()}
            training = next(worker for worker in workers[1:] if worker.start is not None)
            assert training.start is not None
            for index in (*range(SLICES), 10**6):
                report = UnusableSlice(index=index, failures=(), epoch=77)
                attempt = training.start.definition.attempt
                request = DataRequest(attempt, "digits", id=uuid.uuid4(), unusable=report)
                await rpc.call(training.endpoint, scheduler, DATA, request)

        workers[0].tasks.start_soon(lie)
        result = json.loads((await service.run_job(job(model))).read_text())
        assert result["slices_set_aside"] == []


async def test_the_lease_of_a_worker_that_says_goodbye_is_not_renewed_again(tmp_path: Path, model: Path) -> None:
    async with open_network(tmp_path) as (service, workers, _shared):
        left = workers[1]

        async def say_goodbye() -> None:
            await until(lambda: left.batches >= 5, 60)
            [(lease, scheduler)] = [(lease, peer) for lease, peer in left.leases.items() if left.start is not None]
            left.scope.cancel()
            strange = Goodbye(leases=(lease,), reason="not mine")
            await rpc.call(workers[0].endpoint, scheduler, SAY_GOODBYE, strange)
            left.leases.clear()
            left.renewals_left, left.refuses = 0, True
            goodbye = Goodbye(leases=(lease,), reason="it shuts\ndown" + 9000 * ".")
            await rpc.call(left.endpoint, scheduler, SAY_GOODBYE, goodbye)

        left.tasks.start_soon(say_goodbye)
        result = json.loads((await service.run_job(job(model, resources={"min_workers": 2}))).read_text())
        assert result["rounds"] == 3
        assert left.renewals_left == 0
    [lost] = [event for event in events(tmp_path) if event["event"] == "worker_lost"]
    assert lost["reason"].startswith("it shuts down.")
    assert len(lost["reason"]) == 400


async def test_refused_reports_are_logged_once_with_their_reason_which_is_answered(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[ReportAnswer] = []
    with caplog.at_level(logging.WARNING, "hypha_scheduler.service"):
        async with open_network(tmp_path) as (service, workers, _shared):

            async def report_nonsense() -> None:
                await until(lambda: workers[0].batches >= 3, 60)
                [scheduler] = workers[0].leases.values()
                assert workers[0].start is not None
                known = workers[0].start.definition.attempt
                unknown = replace(known, job_id=uuid.UUID(int=7)), replace(known, number=8)
                for attempt in (*unknown, known, known):
                    message = ReportTraining(attempt, OuterStepTaken())
                    answers.append(await rpc.call(workers[0].endpoint, scheduler, REPORT, message))

            workers[0].tasks.start_soon(report_nonsense)
            await service.run_job(job(model))
    reasons = [answer.reason or "" for answer in answers if isinstance(answer, ReportError)]
    assert "runs no job 00000000-" in reasons[0]
    assert "does not run on this peer" in reasons[1]
    assert reasons[2] == reasons[3] == "only the parameter server takes outer steps"
    logged = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(logged) == 3  # the last one is a repetition
    assert all(reason in line for reason, line in zip(reasons, logged, strict=False))
