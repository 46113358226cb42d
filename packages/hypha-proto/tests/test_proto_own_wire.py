"""Golden bytes of Hypha's messages: a difference here is a change of the wire format.

`python test_proto_own_wire.py` (with this folder as working directory) prints a new file after a deliberate change.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

from hypha_proto.attempt_id import AttemptId
from hypha_proto.batch_reports import MAX_BATCHES, REPORT_BATCHES, BatchesCounted, ReportBatches
from hypha_proto.codec import from_cbor, from_json, to_cbor, to_json, to_plain
from hypha_proto.commands import ChangeServer, CommandAnswer, SetMembers, SetWorkers, TaskCommand
from hypha_proto.contributions import (
    AWAIT_COMMIT,
    OPTIMIZER_KEPT,
    STATE_CONTRIBUTION,
    AwaitCommit,
    CommitStatus,
    Contribution,
    ContributionKnown,
    SampleRange,
    StateContribution,
)
from hypha_proto.dataset_listing import LIST_DATASETS, DatasetPage, ListDatasets, ListedDataset
from hypha_proto.datasets import (
    DATA,
    JSONL,
    AssignedSlice,
    ContentRecord,
    DataRequest,
    DatasetRecord,
    Manifest,
    NotFound,
    ProviderFailure,
    SliceAssigned,
    SliceEntry,
    SlicesAssigned,
    UnusableSlice,
    WireError,
)
from hypha_proto.drain import ANNOUNCE_DRAIN, Drain, DrainReceived
from hypha_proto.errors import DecodeError, InvalidIdError
from hypha_proto.health import HEALTH_CHECK, Caller, Health, HealthRequest
from hypha_proto.ids import PeerId
from hypha_proto.job_logs import LIST_LOGS, READ_LOG, ListLogs, LogEntry, LogPart, LogsListed, ReadLog
from hypha_proto.job_membership import (
    JOIN_ROUND,
    JoinRound,
    RoundToJoin,
)
from hypha_proto.job_spec import (
    Adam,
    AggregateConfig,
    All,
    HuggingFaceReference,
    Model,
    Nesterov,
    One,
    PeersReference,
    SchedulerReference,
    SliceAddress,
    TextRows,
    TrainConfig,
    WarmupStableDecay,
)
from hypha_proto.leases import (
    RELEASE_LEASE,
    RENEW_LEASE,
    SAY_GOODBYE,
    WHY_NOT,
    Goodbye,
    GoodbyeReceived,
    LeaseReleased,
    Reasons,
    Rejection,
    ReleaseLease,
    RenewalFailed,
    Renewed,
    RenewLease,
    WhyNot,
)
from hypha_proto.offers import (
    OFFER,
    WORKER_REQUESTS,
    ExecutorDescriptor,
    OfferReceived,
    WorkerOffer,
    WorkerRequest,
    WorkerSpec,
)
from hypha_proto.protocols import TASKS
from hypha_proto.resources import Resources
from hypha_proto.round_membership import (
    UPDATE_REFUSED,
    Member,
    UpdateRefused,
)
from hypha_proto.signed_records import confirmed_key, heartbeat_key, publisher_named, signed_bytes, split_heartbeat
from hypha_proto.task_resources import (
    LOCATE_RESOURCE,
    PUSH_OUTPUT,
    RELEASE_OUTPUTS,
    AwaitPush,
    FailedHolder,
    Gone,
    LocatedFile,
    LocateResource,
    NotYet,
    OutputsReleased,
    PullFiles,
    PushBegun,
    PushedFile,
    PushOutput,
    ReleaseOutputs,
    ResourceLocation,
)
from hypha_proto.tasks import (
    DatasetSource,
    DhtSource,
    Draining,
    DrainTask,
    FileSource,
    OutputPath,
    PeersSource,
    Ready,
    ResultSource,
    S3Source,
    SchedulerFrame,
    SlicesSource,
    Started,
    StatusUpdate,
    Stop,
    StoredFile,
    StoredOutput,
    Subscribe,
    Subscribed,
    TaskCancelled,
    TaskDefinition,
    TaskFailed,
    TaskFinished,
    TaskProgress,
    TaskResource,
    TaskSpec,
    UriSource,
    WorkerFrame,
)
from hypha_proto.training_reports import (
    REPORT,
    Acknowledged,
    BatchDone,
    Continue,
    Done,
    OuterStepTaken,
    ReportError,
    ReportTraining,
    RoundMetrics,
    ScheduleUpdate,
    SendingUpdate,
    TrainedBatch,
    UpdateMerged,
)
from hypha_proto.transfer import (
    PSEUDO_GRADIENT,
    TASK_RESOURCE,
    GoOn,
    PullAnswer,
    PullRequest,
    PullStart,
    PushAnswer,
    PushHeader,
    PushReceipt,
    Receipt,
    Refusal,
)
from hypha_proto.worker_status import DESCRIBE_WORKER, DescribeWorker, OfferedExecutor, WorkerStatus

GOLDEN = Path(__file__).parent / "own_wire.jsonl"
ID = [uuid.UUID(int=(0x0123456789ABCDEF << 64) + i) for i in range(9)]
PEER = PeerId.from_public_key(bytes(range(32)))
OTHER = PeerId.from_public_key(bytes(range(32, 64)))
DIGEST = "blake3:" + "ab" * 32
SPEC = WorkerSpec(
    resources=Resources(cpu=2.0, memory=8.0), executor=(ExecutorDescriptor("train", "diloco-transformer"),)
)
REQUEST = WorkerRequest(id=ID[2], spec=SPEC, bid=110.0, timeout_ms=5000)
OFFERED = WorkerOffer(
    id=ID[1], request_id=ID[2], price=150.25, resources=Resources(gpu=24.0, storage=500.1), timeout_ms=500
)
NO_PEERS = PeersReference(peers=(), strategy=All())
AGGREGATION = AggregateConfig(
    updates=NO_PEERS, results=NO_PEERS, optimizer=Nesterov(learning_rate=0.5, momentum=0.5), term=1
)
TRAINING = TrainConfig(
    model=Model(task="causal-lm", artifact=NO_PEERS, input_names=()),
    data=NO_PEERS,
    updates=NO_PEERS,
    results=NO_PEERS,
    optimizer=Adam(learning_rate=0.5),
    batch_size=16,
    scheduler=WarmupStableDecay(warmup_steps=5, decay_steps=10, training_steps=100),
    seed=9,
    member=2,
    round_steps=12.5,
)

SERVED = PeersReference(peers=(OTHER,), strategy=All())
CONTRIBUTION = Contribution(
    round=4,
    weights=DIGEST,
    ranges=(SampleRange(epoch=1, slice=3, first=10, end=100), SampleRange(epoch=1, slice=7, first=0, end=230)),
    batches=20,
    batch_size=16,
    seed=1 << 60,
    optimizer=OPTIMIZER_KEPT,
    update=DIGEST,
)
RESUMED_TRAINING = msgspec.structs.replace(TRAINING, first_round=5, term=2, weights=SERVED)
JOINING_TRAINING = msgspec.structs.replace(TRAINING, term=2, join=True, micro_batch=8)
ROWS_TRAINING = msgspec.structs.replace(TRAINING, rows=TextRows(completion="{answer}", prompt="{question}\n"))
RESUMED_AGGREGATION = msgspec.structs.replace(
    AGGREGATION,
    updates=SERVED,
    results=SERVED,
    optimizer=Nesterov(learning_rate=0.5, momentum=0.75),
    term=2,
    momentum=SERVED,
)

RESUMED_SPEC = TaskSpec(
    executor="train/diloco-transformer", training=RESUMED_TRAINING, orphan_grace_ms=120_000, traceparent="00-ab-cd-01"
)
JOINING_SPEC = TaskSpec(executor="train/diloco-transformer", training=JOINING_TRAINING)
ROWS_SPEC = TaskSpec(executor="train/diloco-transformer", training=ROWS_TRAINING)
RESUMED_AGGREGATION_SPEC = TaskSpec(executor="aggregate/parameter-server", aggregation=RESUMED_AGGREGATION)

ATTEMPT = AttemptId(ID[7], "train[1]", 2)
LOCATE = LocateResource(attempt=ATTEMPT, resource="model")
REQUESTS: list[tuple[Any, Any]] = [
    (RELEASE_LEASE, ReleaseLease(id=ID[1], reason="job finished")),
    (WHY_NOT, WhyNot(request=REQUEST)),
    (UPDATE_REFUSED, UpdateRefused(attempt=ATTEMPT, round=4, peer=PEER, reason="not finite")),
    (UPDATE_REFUSED, UpdateRefused(attempt=ATTEMPT, round=4, peer=PEER, reason="too late", missing=True)),
    (
        REPORT,
        ReportTraining(ATTEMPT, progress=BatchDone(batch_size=16, slices={"3": 16}, batch_ms=12.5)),
    ),
    (REPORT, ReportTraining(ATTEMPT, progress=OuterStepTaken(), id=ID[2])),
    (DATA, DataRequest(ATTEMPT, "digits", id=ID[2])),
    (DATA, DataRequest(ATTEMPT, "digits", id=ID[2], most=4)),
    (DATA, DataRequest(ATTEMPT, "digits", id=ID[2], ahead=True)),
    (
        DATA,
        DataRequest(
            attempt=ATTEMPT,
            dataset="digits",
            id=ID[2],
            unusable=UnusableSlice(index=3, failures=(ProviderFailure(provider=PEER, reason="wrong digest"),), epoch=1),
        ),
    ),
    (SAY_GOODBYE, Goodbye(leases=(ID[1], ID[2]), reason="the worker is shutting down")),
    (ANNOUNCE_DRAIN, Drain(leases=(ID[1], ID[2]), left_ms=60_000, reason="its owner drains it")),
    (LIST_LOGS, ListLogs(job_id=ID[7])),
    (DESCRIBE_WORKER, DescribeWorker()),
    (READ_LOG, ReadLog(job_id=ID[7], run="count[2]@3", position=1 << 20, limit=64 << 10)),
    (LOCATE_RESOURCE, LOCATE),
    (
        LOCATE_RESOURCE,
        msgspec.structs.replace(
            LOCATE,
            failures=(
                FailedHolder(peer=PEER, reason="no such file", is_permanent=True),
                FailedHolder(peer=OTHER, reason="unreachable"),
            ),
        ),
    ),
    (
        PUSH_OUTPUT,
        PushOutput(
            job_id=ID[7], delivery=ID[3], to=PEER, files=(PushedFile(dataset="unguessable", index=1, name="0"),)
        ),
    ),
    (RELEASE_OUTPUTS, ReleaseOutputs(job_id=ID[7], datasets=("unguessable",))),
    (
        STATE_CONTRIBUTION,
        StateContribution(
            attempt=ATTEMPT,
            round=4,
            update=DIGEST,
            samples=320,
            contribution=CONTRIBUTION,
            id=ID[2],
        ),
    ),
    (STATE_CONTRIBUTION, StateContribution(attempt=ATTEMPT, round=4, update=DIGEST)),
    (AWAIT_COMMIT, AwaitCommit(attempt=ATTEMPT, round=4, update=DIGEST)),
    (
        STATE_CONTRIBUTION,
        StateContribution(
            attempt=ATTEMPT,
            round=4,
            update=DIGEST,
            contribution=msgspec.structs.replace(CONTRIBUTION, micro_batch=8),
        ),
    ),
    (JOIN_ROUND, JoinRound(attempt=ATTEMPT)),
    (
        REPORT_BATCHES,
        ReportBatches(
            attempt=ATTEMPT,
            round=4,
            first=20,
            batches=(
                TrainedBatch(batch_size=16, slices={"3": 10, "7": 6}, batch_ms=12.5, wait_ms=0.25),
                TrainedBatch(batch_size=16, slices={"7": 16}, batch_ms=11.5, wait_ms=0.0),
            ),
        ),
    ),
    (
        REPORT_BATCHES,
        ReportBatches(
            attempt=ATTEMPT, round=4, first=20, batches=(TrainedBatch(batch_size=16, batch_ms=12.5),), last=21
        ),
    ),
    (
        REPORT_BATCHES,
        ReportBatches(
            attempt=ATTEMPT, round=4, first=20, batches=(TrainedBatch(batch_size=16),), last=22, settles=True
        ),
    ),
    (LIST_DATASETS, ListDatasets()),
    (LIST_DATASETS, ListDatasets(after="größer", limit=100)),
    (OFFER, OFFERED),
    (RENEW_LEASE, RenewLease(id=ID[1])),
    (HEALTH_CHECK, HealthRequest()),
    (HEALTH_CHECK, HealthRequest(caller=Caller(process=ID[1], age_ms=5000, address="/ip4/10.0.0.1/tcp/4001"))),
    (REPORT, ReportTraining(ATTEMPT, progress=RoundMetrics(round=2, metrics={"loss": 0.25}))),
    (REPORT, ReportTraining(ATTEMPT, progress=SendingUpdate())),
    (REPORT, ReportTraining(ATTEMPT, progress=UpdateMerged())),
]
RESPONSES: list[tuple[Any, Any]] = [
    (RELEASE_LEASE, LeaseReleased(known=True)),
    (WHY_NOT, Reasons()),
    (
        WHY_NOT,
        Reasons(
            rejections=(
                Rejection(code="cpu", text="cpu: 2 wanted, 1 free", required=2.0, available=1.0),
                Rejection(code="not-allowed", text="no"),
            )
        ),
    ),
    (DATA, SliceAssigned(data_provider=PEER, index=3, epoch=1, digest=DIGEST)),
    (DATA, SliceAssigned(data_provider=PEER, index=3, epoch=1, digest=DIGEST, others=(OTHER,))),
    (
        DATA,
        SlicesAssigned(
            slices=(
                AssignedSlice(data_provider=PEER, index=3, epoch=1, digest=DIGEST, first=10),
                AssignedSlice(data_provider=OTHER, index=0, epoch=2, digest=DIGEST),
            )
        ),
    ),
    (HEALTH_CHECK, Health(healthy=True, role="worker", version="0.1.0", bytes_sent=1, bytes_received=2)),
    (HEALTH_CHECK, Health(healthy=True, time_ms=1_800_000_000_000, twin="/ip4/10.0.0.2/tcp/4001")),
    (RENEW_LEASE, Renewed(id=ID[1], timeout_ms=10_000)),
    (REPORT, ReportError(reason="the round is over")),
    (SAY_GOODBYE, GoodbyeReceived()),
    (DATA, SliceAssigned(data_provider=PEER, index=3, epoch=1, digest=DIGEST, format=JSONL)),
    (ANNOUNCE_DRAIN, DrainReceived()),
    (LIST_LOGS, LogsListed(logs=(LogEntry(run=str(ID[1]), start=4096, end=9000, ended=True),))),
    (READ_LOG, LogPart(known=True, text="step 1\nstep 2\n", start=4100, next=4114)),
    (
        DESCRIBE_WORKER,
        WorkerStatus(
            total=Resources(cpu=8.0, memory=32.0),
            free=Resources(cpu=6.0, memory=24.0),
            price=100.0,
            executors=(OfferedExecutor("train", "diloco-transformer", "process"),),
            tasks=1,
            rejections=(Rejection(code="paused", text="its owner has paused this worker"),),
        ),
    ),
    (
        LOCATE_RESOURCE,
        ResourceLocation(
            pull=PullFiles(
                (
                    LocatedFile(
                        path="a/b", dataset="unguessable", index=1, size=1 << 33, digest=DIGEST, peers=(PEER, OTHER)
                    ),
                )
            )
        ),
    ),
    (
        LOCATE_RESOURCE,
        ResourceLocation(
            pushed=AwaitPush(
                delivery=ID[3], files=(LocatedFile(path="", dataset="unguessable", index=0),), senders=(OTHER,)
            )
        ),
    ),
    (LOCATE_RESOURCE, ResourceLocation(not_yet=NotYet(task="train[1]", retry_ms=500))),
    (LOCATE_RESOURCE, ResourceLocation(gone=Gone(reason="task train has failed"))),
    (PUSH_OUTPUT, PushBegun(accepted=True)),
    (PUSH_OUTPUT, PushBegun(accepted=False, reason="no such output")),
    (RELEASE_OUTPUTS, OutputsReleased(removed=3)),
    (DATA, SliceAssigned(data_provider=PEER, index=3, epoch=1, digest=DIGEST, first=10, end=100)),
    (STATE_CONTRIBUTION, ContributionKnown(accepted=True)),
    (STATE_CONTRIBUTION, ContributionKnown(accepted=False, reason="slice 3 was not given to this worker")),
    (STATE_CONTRIBUTION, ContributionKnown(accepted=False, reason="round 4 is closed", rejoin=True)),
    (JOIN_ROUND, RoundToJoin()),
    (JOIN_ROUND, RoundToJoin(round=5, weights=DIGEST)),
    (JOIN_ROUND, RoundToJoin(round=5, weights=DIGEST, keeps=True)),
    (JOIN_ROUND, RoundToJoin(reason="no training task of the job runs on this peer")),
    (AWAIT_COMMIT, CommitStatus(committed=True, weights=DIGEST)),
    (AWAIT_COMMIT, CommitStatus(committed=False)),
    (AWAIT_COMMIT, CommitStatus(committed=False, reason="round 4 has another outer update")),
    (REPORT_BATCHES, BatchesCounted(counted=22)),
    (REPORT_BATCHES, BatchesCounted(counted=22, last=30)),
    (REPORT_BATCHES, BatchesCounted(counted=22, done=True)),
    (REPORT_BATCHES, BatchesCounted(counted=20, reason="no training task of the job runs on this peer")),
    (LIST_DATASETS, DatasetPage(datasets=())),
    (
        LIST_DATASETS,
        DatasetPage(
            datasets=(
                ListedDataset(name="cifar", num_slices=1 << 33, providers=1, manifests=1),
                ListedDataset(name="größer", num_slices=16, providers=3, manifest=DIGEST, manifests=2),
            ),
            next="größer",
        ),
    ),
    (OFFER, OfferReceived()),
    (RENEW_LEASE, RenewalFailed()),
    (DATA, NotFound()),
    (DATA, WireError(message="unknown dataset")),
    (REPORT, Acknowledged()),
    (REPORT, Continue()),
    (REPORT, ScheduleUpdate(counter=5)),
    (REPORT, Done()),
]
PUSH = PushHeader(
    attempt=ATTEMPT,
    round=4,
    kind=PSEUDO_GRADIENT,
    name="update.safetensors",
    size=1 << 33,
    digest=DIGEST,
    scheduler=PEER,
    samples=320,
)
HEADERS: list[tuple[str, Any, Any]] = [
    ("PushHeader", PushHeader, PUSH),
    ("PushHeader.lease", PushHeader, msgspec.structs.replace(PUSH)),
    (
        "PushHeader.contribution",
        PushHeader,
        msgspec.structs.replace(PUSH, term=2, contribution=CONTRIBUTION),
    ),
    (
        "PushHeader.delivery",
        PushHeader,
        msgspec.structs.replace(PUSH, kind=TASK_RESOURCE, name="0", samples=0, round=0, delivery=ID[3]),
    ),
    ("PushAnswer.GoOn", PushAnswer, GoOn(offset=4096)),
    ("PushAnswer.Refused", PushAnswer, Refusal(reason="not a member of round 4")),
    ("PushReceipt", PushReceipt, Receipt(size=1 << 33)),
    ("PullRequest", PullRequest, PullRequest(dataset="digits", index=3)),
    ("PullRequest.manifest", PullRequest, PullRequest(dataset="digits", index=0, name="manifest", offset=7)),
    ("PullAnswer.Start", PullAnswer, PullStart(size=1 << 33, digest=DIGEST)),
]
TASK_SPEC = TaskSpec(
    executor="shell/bash",
    settings='{"model": "model"}',
    resources=(
        TaskResource(name="model", result=ResultSource(task="train", output="model")),
        TaskResource(name="base", huggingface=HuggingFaceReference(repository="a/b", filenames=("c",))),
        TaskResource(name="all", dataset=DatasetSource(name="digits")),
        TaskResource(name="some", dataset=DatasetSource(name="digits", slices=(1, 3))),
        TaskResource(name="slice", peers=PeersSource(peers=(PEER,), dataset="digits", index=3)),
        TaskResource(
            name="served", peers=PeersSource(peers=(PEER,), dataset="job/model", index=0, filenames=("a", "b"))
        ),
        TaskResource(name="shared", file=FileSource(path="/data/x")),
        TaskResource(name="page", uri=UriSource(value="https://example.org/x")),
        TaskResource(name="stream", slices=SlicesSource(dataset="digits")),
    ),
    outputs=(OutputPath(name="model", path="out/model"),),
    index=1,
    count=3,
    timeout_ms=60_000,
    sends=True,
)

SOURCES_SPEC = TaskSpec(
    executor="bash",
    resources=(
        TaskResource(name="dataset", s3=S3Source(bucket="my-bucket", key="data.csv")),
        TaskResource(name="model", dht=DhtSource(sha256="ab" * 32)),
    ),
)

LOCATED = LocatedFile(path="a", dataset="unguessable", index=0, size=7, digest=DIGEST, peers=(PEER,))
LOCATED_SPEC = TaskSpec(
    executor="bash",
    resources=(
        TaskResource(
            name="model", result=ResultSource(task="train", output="model"), location=PullFiles(files=(LOCATED,))
        ),
    ),
)

TRAINING_SPEC = TaskSpec(
    executor="train/diloco-transformer",
    training=TrainConfig(
        model=Model(
            task="torch",
            artifact=PeersReference(peers=(PEER,), strategy=One(), resource=SliceAddress(dataset="job/model", index=0)),
            input_names=("x",),
        ),
        data=SchedulerReference(peer=PEER, dataset="digits"),
        updates=PeersReference(peers=(OTHER,), strategy=All()),
        results=PeersReference(peers=(OTHER,), strategy=All()),
        optimizer=Adam(learning_rate=0.5),
        batch_size=16,
        term=2,
        join=True,
    ),
    orphan_grace_ms=60_000,
)
AGGREGATION_SPEC = TaskSpec(
    executor="aggregate/parameter-server",
    aggregation=AggregateConfig(
        updates=PeersReference(peers=(PEER,), strategy=All()),
        results=PeersReference(peers=(PEER, OTHER), strategy=All()),
        optimizer=Nesterov(learning_rate=0.5, momentum=0.5),
        term=2,
    ),
)
MEMBERS = SetMembers(round=3, members=(Member(peer=PEER, samples=320, update=DIGEST),), deadline_ms=300_000)
CHANGE = ChangeServer(
    term=2, server=PEER, round=4, update=DIGEST, outer_update=SliceAddress(dataset="job/last-update", index=0)
)


def definition(**what: Any) -> SchedulerFrame:
    about = TaskDefinition(attempt=ATTEMPT, **what)
    return SchedulerFrame(sequence=5, acknowledged=7, definition=about)


def report(**what: Any) -> WorkerFrame:
    about = StatusUpdate(attempt=ATTEMPT, **what)
    return WorkerFrame(sequence=7, acknowledged=6, report=about)


STORED = StoredOutput(name="model", dataset="unguessable", files=(StoredFile(path="a/b", size=1 << 33, digest=DIGEST),))
TASK_FRAMES: list[tuple[str, Any, Any]] = [
    ("Subscribe", Subscribe, Subscribe(lease=ID[1], next=5)),
    ("Subscribe.first", Subscribe, Subscribe(lease=ID[1], next=5, first=7)),
    ("Subscribed", Subscribed, Subscribed(job_id=ID[7], next=7)),
    ("Subscribed.refused", Subscribed, Subscribed(job_id=ID[0], next=0, refused="no such lease")),
    ("SchedulerFrame", SchedulerFrame, SchedulerFrame(sequence=5, acknowledged=7)),
    ("SchedulerFrame.start", SchedulerFrame, definition(start=TASK_SPEC)),
    ("SchedulerFrame.start.least", SchedulerFrame, definition(start=TaskSpec(executor="bash"))),
    ("SchedulerFrame.start.located", SchedulerFrame, definition(start=LOCATED_SPEC)),
    ("SchedulerFrame.stop", SchedulerFrame, definition(stop=Stop(reason="enough"))),
    ("SchedulerFrame.drain", SchedulerFrame, definition(drain=DrainTask(left_ms=60_000, reason="it moves"))),
    ("SchedulerFrame.start.sources", SchedulerFrame, definition(start=SOURCES_SPEC)),
    ("SchedulerFrame.start.training", SchedulerFrame, definition(start=TRAINING_SPEC)),
    ("SchedulerFrame.start.training.resumed", SchedulerFrame, definition(start=RESUMED_SPEC)),
    ("SchedulerFrame.start.training.joining", SchedulerFrame, definition(start=JOINING_SPEC)),
    ("SchedulerFrame.start.training.rows", SchedulerFrame, definition(start=ROWS_SPEC)),
    ("SchedulerFrame.start.aggregation.resumed", SchedulerFrame, definition(start=RESUMED_AGGREGATION_SPEC)),
    ("SchedulerFrame.start.aggregation", SchedulerFrame, definition(start=AGGREGATION_SPEC)),
    ("SchedulerFrame.command.members", SchedulerFrame, definition(command=TaskCommand(number=3, members=MEMBERS))),
    (
        "SchedulerFrame.command.workers",
        SchedulerFrame,
        definition(command=TaskCommand(number=4, workers=SetWorkers(workers=(PEER, OTHER)))),
    ),
    ("SchedulerFrame.command.server", SchedulerFrame, definition(command=TaskCommand(number=5, server=CHANGE))),
    ("WorkerFrame", WorkerFrame, WorkerFrame(sequence=7, acknowledged=6)),
    ("WorkerFrame.started", WorkerFrame, report(started=Started())),
    ("WorkerFrame.ready", WorkerFrame, report(ready=Ready())),
    (
        "WorkerFrame.progress",
        WorkerFrame,
        report(progress=TaskProgress(fraction=0.5, message="half", metrics={"loss": 0.25})),
    ),
    ("WorkerFrame.progress.least", WorkerFrame, report(progress=TaskProgress())),
    ("WorkerFrame.draining", WorkerFrame, report(draining=Draining(left_ms=30_000))),
    (
        "WorkerFrame.answered",
        WorkerFrame,
        report(answered=CommandAnswer(number=5, accepted=True, sends=DIGEST)),
    ),
    (
        "WorkerFrame.answered.not",
        WorkerFrame,
        report(answered=CommandAnswer(number=3, accepted=False, reason="round 3 is over")),
    ),
    (
        "WorkerFrame.finished",
        WorkerFrame,
        report(finished=TaskFinished(outputs=(STORED,), bytes_sent=1, bytes_received=1 << 33)),
    ),
    (
        "WorkerFrame.failed",
        WorkerFrame,
        report(failed=TaskFailed(reason="exit status 3", exit_code=3, last_lines=("a", "b"))),
    ),
    (
        "WorkerFrame.failed.resource",
        WorkerFrame,
        report(failed=TaskFailed(reason="nobody has it", resource="model", bytes_received=1)),
    ),
    ("WorkerFrame.cancelled", WorkerFrame, report(cancelled=TaskCancelled(reason="enough"))),
    ("executor", ExecutorDescriptor, ExecutorDescriptor.parse("inference/llm")),
]
RECORD = b'{"num_slices":4,"seq":7,"manifest":"%s"}' % DIGEST.encode()
HEARTBEAT = [
    ("heartbeat_key", heartbeat_key(PEER, b"digits")),
    ("signed_bytes", signed_bytes(PEER, b"digits", RECORD)),
]


CONTENT_RECORDS = [ContentRecord(size=1 << 33)]
RECORDS = [DatasetRecord(num_slices=4, seq=7, manifest="blake3:" + "ab" * 32, withheld=(1, 3))]
ENTRY = SliceEntry(file="slice-00000.jsonl", samples=3, size=96, digest=DIGEST)
TENSORS = Manifest(dataset="digits", slices=(msgspec.structs.replace(ENTRY, file="slice-00000.safetensors"),))
MANIFESTS = [
    TENSORS,
    msgspec.structs.replace(TENSORS, columns={"pixel_values": "float32[1,8,8]", "labels": "int64[]"}),
    Manifest(dataset="prompts", slices=(ENTRY,), format=JSONL, columns={"prompt": "text", "stars": "integer"}),
    msgspec.structs.replace(TENSORS, columns={"labels": "int64[]"}, labels=("cat", "dög")),
]


def lines() -> list[dict[str, Any]]:
    made = []
    for kind, exchanges in (("request", REQUESTS), ("response", RESPONSES)):
        for method, value in exchanges:
            data = method.encode_request(value) if kind == "request" else method.encode_response(value)
            plain = to_plain(method.request if kind == "request" else method.response, value)
            name = method.variant or type(value).__name__
            made.append({"protocol": method.protocol, "kind": kind, "name": name, "hex": data.hex(), "json": plain})
    data, plain = WORKER_REQUESTS.encode(REQUEST), to_plain(WORKER_REQUESTS.message, REQUEST)
    made.append(
        {"protocol": WORKER_REQUESTS.name, "kind": "gossip", "name": "request", "hex": data.hex(), "json": plain}
    )
    for name, annotated, value in HEADERS:
        data, plain = to_cbor(annotated, value), to_plain(annotated, value)
        made.append({"protocol": "transfer", "kind": "header", "name": name, "hex": data.hex(), "json": plain})
    for name, annotated, value in TASK_FRAMES:
        data, plain = to_cbor(annotated, value), to_plain(annotated, value)
        made.append({"protocol": TASKS, "kind": "frame", "name": name, "hex": data.hex(), "json": plain})
    for name, data in HEARTBEAT:
        made.append({"protocol": "/ipfs/kad/1.0.0", "kind": "record", "name": name, "hex": data.hex(), "json": None})
    for record in RECORDS:
        data, plain = to_json(DatasetRecord, record), to_plain(DatasetRecord, record)
        made.append(
            {"protocol": "/ipfs/kad/1.0.0", "kind": "record", "name": "dataset", "hex": data.hex(), "json": plain}
        )
    for content in CONTENT_RECORDS:
        data, plain = to_json(ContentRecord, content), to_plain(ContentRecord, content)
        made.append(
            {"protocol": "/ipfs/kad/1.0.0", "kind": "record", "name": "content", "hex": data.hex(), "json": plain}
        )
    for manifest in MANIFESTS:
        data, plain = to_json(Manifest, manifest), to_plain(Manifest, manifest)
        made.append({"protocol": "transfer", "kind": "file", "name": "manifest", "hex": data.hex(), "json": plain})
    return made


def golden() -> list[dict[str, Any]]:
    return [json.loads(line) for line in GOLDEN.read_text().splitlines()]


ALL = len(REQUESTS) + len(RESPONSES) + len(HEADERS) + len(TASK_FRAMES) + len(HEARTBEAT) + len(RECORDS) + len(MANIFESTS)
ALL += len(CONTENT_RECORDS) + 1  # one message by gossip


@pytest.mark.parametrize("index", range(ALL))
def test_encoding_matches_golden_bytes(index: int) -> None:
    assert lines()[index] == golden()[index]


def test_golden_bytes_decode() -> None:
    stored = golden()
    for (method, value), line in zip(REQUESTS, stored, strict=False):
        assert method.decode_request(bytes.fromhex(line["hex"])) == value
    for (method, value), line in zip(RESPONSES, stored[len(REQUESTS) :], strict=False):
        assert method.decode_response(bytes.fromhex(line["hex"])) == value
    [gossip] = [line for line in stored if line["kind"] == "gossip"]
    assert WORKER_REQUESTS.decode(bytes.fromhex(gossip["hex"])) == REQUEST
    frames = [line for line in stored if line["kind"] == "frame"]
    for (_, annotated, value), line in zip(TASK_FRAMES, frames, strict=True):
        assert from_cbor(annotated, bytes.fromhex(line["hex"])) == value
    records = stored[-len(RECORDS) - len(CONTENT_RECORDS) - len(MANIFESTS) :]
    for record, line in zip(RECORDS, records, strict=False):
        assert from_json(DatasetRecord, bytes.fromhex(line["hex"])) == record
    for content, line in zip(CONTENT_RECORDS, records[len(RECORDS) :], strict=False):
        assert from_json(ContentRecord, bytes.fromhex(line["hex"])) == content
    for manifest, line in zip(MANIFESTS, stored[-len(MANIFESTS) :], strict=True):
        assert from_json(Manifest, bytes.fromhex(line["hex"])) == manifest
    assert len(stored) == ALL


@pytest.mark.parametrize("count", [0, MAX_BATCHES + 1])
def test_a_report_of_no_batches_or_of_too_many_is_malformed(count: int) -> None:
    plain = {"round": 1, "first": 0, "batches": [{"batch_size": 16}] * count}
    about = {"job_id": ID[7].bytes, "task": "train", "number": 0}
    message = cbor2.dumps({"ReportBatches": plain | {"attempt": about}})
    with pytest.raises(DecodeError, match=f"{count} reports; expected 1 to 256"):
        REPORT_BATCHES.decode_request(message)


def test_only_heartbeat_keys_name_a_publisher() -> None:
    assert publisher_named(heartbeat_key(PEER, b"a/b\xff")) == PEER
    assert publisher_named(b"digits") is None
    assert confirmed_key(heartbeat_key(PEER, b"a/b\xff")) == b"a/b\xff"
    assert confirmed_key(b"a/b") == b"a/b"
    for spoilt in (
        b"/hypha/heartbeat/0.1.0/",
        b"/hypha/heartbeat/0.1.0/x/digits",
        heartbeat_key(PEER, b"")[:-1],
        b"\xff/",
    ):
        key = spoilt if spoilt.startswith(b"/hypha") else b"/hypha/heartbeat/0.1.0/" + spoilt
        with pytest.raises(InvalidIdError):
            publisher_named(key)
    assert split_heartbeat(bytes(64) + b"value") == (bytes(64), b"value")
    assert split_heartbeat(bytes(63)) == (b"", bytes(63))


if __name__ == "__main__":
    print("\n".join(json.dumps(line, separators=(",", ":"), sort_keys=True) for line in lines()))
