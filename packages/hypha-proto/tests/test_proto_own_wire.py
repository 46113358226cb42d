"""Golden bytes of Hypha's protocol extensions: a difference here is a change of the wire format.

`python test_proto_own_wire.py` (with this folder as working directory) prints a new file after a deliberate change.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hypha_proto.codec import from_json, to_cbor, to_json, to_plain
from hypha_proto.datasets import (
    DATA,
    JSONL,
    DataRequest,
    DatasetRecord,
    Manifest,
    ProviderFailure,
    SliceAssigned,
    SliceEntry,
    UnusableSlice,
)
from hypha_proto.dispatch import DISPATCH_JOB, JOB_STATUS, DispatchJob, Finished, JobStatus
from hypha_proto.drain import ANNOUNCE_DRAIN, Drain, DrainReceived
from hypha_proto.errors import InvalidIdError
from hypha_proto.health import HEALTH_CHECK, Health
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import AggregateConfig, AggregateJob, All, Descriptor, JobSpec, Nesterov, PeersReference
from hypha_proto.leases import (
    CANCEL_JOB,
    JOB_END,
    RELEASE_LEASE,
    RENEW_LEASE,
    SAY_GOODBYE,
    WHY_NOT,
    CancelJob,
    Goodbye,
    GoodbyeReceived,
    JobCancelled,
    JobEnd,
    LeaseReleased,
    Reasons,
    Rejection,
    ReleaseLease,
    Renewed,
    WhyNot,
)
from hypha_proto.offers import TrainExecutor, WorkerRequest, WorkerSpec
from hypha_proto.progress import REPORT, BatchDone, OuterStepTaken, ProgressError, ProgressRequest
from hypha_proto.resources import Resources, Timestamp
from hypha_proto.round_membership import (
    ROUND_MEMBERS,
    UPDATE_REFUSED,
    Member,
    MembersKnown,
    RoundMembers,
    UpdateRefused,
)
from hypha_proto.signed_records import heartbeat_key, publisher_named, signed_bytes, split_heartbeat
from hypha_proto.transfer import (
    PSEUDO_GRADIENT,
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

GOLDEN = Path(__file__).parent / "own_wire.jsonl"
ID = [uuid.UUID(int=(0x0123456789ABCDEF << 64) + i) for i in range(9)]
PEER = PeerId.from_public_key(bytes(range(32)))
OTHER = PeerId.from_public_key(bytes(range(32, 64)))
TIME = Timestamp(secs_since_epoch=1_760_000_000, nanos_since_epoch=123_456_789)
DIGEST = "blake3:" + "ab" * 32
SPEC = WorkerSpec(resources=Resources(cpu=2.0, memory=8.0), executor=(TrainExecutor(name="diloco-transformer"),))
REQUEST = WorkerRequest(id=ID[2], spec=SPEC, timeout=TIME, bid=110.0, timeout_ms=5000)
NO_PEERS = PeersReference(peers=(), strategy=All())
JOB = JobSpec(
    job_id=ID[7],
    executor=AggregateJob(
        descriptor=Descriptor(name="parameter-server"),
        config=AggregateConfig(
            updates=NO_PEERS, results=NO_PEERS, optimizer=Nesterov(learning_rate=0.5, momentum=0.5), members=True
        ),
    ),
)

REQUESTS: list[tuple[Any, Any]] = [
    (RELEASE_LEASE, ReleaseLease(id=ID[1], reason="job finished")),
    (CANCEL_JOB, CancelJob(id=ID[1], reason="a member was lost")),
    (WHY_NOT, WhyNot(request=REQUEST)),
    (
        JOB_END,
        JobEnd(lease=ID[1], job_id=ID[7], outcome="failed", reason="exit status 3", exit_code=3, last_lines=("a", "b")),
    ),
    (
        JOB_END,
        JobEnd(lease=ID[1], job_id=ID[7], outcome="finished", reason="", bytes_sent=1 << 33, bytes_received=7),
    ),
    (
        ROUND_MEMBERS,
        RoundMembers(job_id=ID[7], round=4, members=(Member(peer=PEER, samples=320),), deadline_ms=30_000),
    ),
    (UPDATE_REFUSED, UpdateRefused(job_id=ID[7], round=4, peer=PEER, reason="not finite")),
    (DATA, DataRequest(dataset="digits", job_id=ID[7])),
    (DATA, DataRequest(dataset="digits", job_id=ID[7], id=ID[1])),
    (
        REPORT,
        ProgressRequest(job_id=ID[7], progress=BatchDone(batch_size=16, slices={"3": 16}, batch_ms=12.5), lease=ID[1]),
    ),
    (REPORT, ProgressRequest(job_id=ID[7], progress=OuterStepTaken(), lease=ID[1], id=ID[2])),
    (DATA, DataRequest(dataset="digits", job_id=ID[7], id=ID[2], lease=ID[1])),
    (DISPATCH_JOB, DispatchJob(id=ID[1], spec=JOB, keep_lease=True, attempt=2)),
    (JOB_STATUS, JobStatus(task_id=ID[1], status=Finished(), attempt=2)),
    (JOB_END, JobEnd(lease=ID[1], job_id=ID[7], outcome="finished", reason="", attempt=2)),
    (
        DATA,
        DataRequest(
            dataset="digits",
            job_id=ID[7],
            id=ID[1],
            unusable=UnusableSlice(index=3, failures=(ProviderFailure(provider=PEER, reason="wrong digest"),), epoch=1),
        ),
    ),
    (SAY_GOODBYE, Goodbye(leases=(ID[1], ID[2]), reason="the worker is shutting down")),
    (CANCEL_JOB, CancelJob(id=ID[1], reason="a member was lost", attempt=2)),
    (ANNOUNCE_DRAIN, Drain(leases=(ID[1], ID[2]), left_ms=60_000, reason="its owner drains it")),
]
RESPONSES: list[tuple[Any, Any]] = [
    (RELEASE_LEASE, LeaseReleased(known=True)),
    (CANCEL_JOB, JobCancelled(known=False)),
    (WHY_NOT, Reasons(reasons=("cpu: 2 wanted, 1 free",))),
    (
        WHY_NOT,
        Reasons(
            reasons=("cpu: 2 wanted, 1 free", "no"),
            rejections=(Rejection(code="cpu", required=2.0, available=1.0), Rejection(code="not-allowed")),
        ),
    ),
    (ROUND_MEMBERS, MembersKnown(accepted=False, reason="round 4 is over")),
    (DATA, SliceAssigned(data_provider=PEER, index=3, epoch=1, digest=DIGEST)),
    (DATA, SliceAssigned(data_provider=PEER, index=3, epoch=1, digest=DIGEST, others=(OTHER,))),
    (HEALTH_CHECK, Health(healthy=True, role="worker", version="0.1.0", bytes_sent=1, bytes_received=2)),
    (RENEW_LEASE, Renewed(id=ID[1], timeout=TIME, timeout_ms=10_000)),
    (REPORT, ProgressError(reason="the round is over")),
    (SAY_GOODBYE, GoodbyeReceived()),
    (DATA, SliceAssigned(data_provider=PEER, index=3, epoch=1, digest=DIGEST, format=JSONL)),
    (ANNOUNCE_DRAIN, DrainReceived()),
]
PUSH = PushHeader(
    job_id=ID[7], round=4, kind=PSEUDO_GRADIENT, name="update.safetensors", size=1 << 33, digest=DIGEST, samples=320
)
HEADERS: list[tuple[str, Any, Any]] = [
    ("PushHeader", PushHeader, PUSH),
    ("PushHeader.lease", PushHeader, msgspec.structs.replace(PUSH, lease=ID[1])),
    ("PushAnswer.GoOn", PushAnswer, GoOn(offset=4096)),
    ("PushAnswer.Refused", PushAnswer, Refusal(reason="not a member of round 4")),
    ("PushReceipt", PushReceipt, Receipt(size=1 << 33)),
    ("PullRequest", PullRequest, PullRequest(dataset="digits", index=3)),
    ("PullRequest.manifest", PullRequest, PullRequest(dataset="digits", index=0, name="manifest", offset=7)),
    ("PullAnswer.Start", PullAnswer, PullStart(size=1 << 33, digest=DIGEST)),
]
RECORD = b'{"num_slices":4,"seq":7,"manifest":"%s"}' % DIGEST.encode()
HEARTBEAT = [
    ("heartbeat_key", heartbeat_key(PEER, b"digits")),
    ("signed_bytes", signed_bytes(PEER, b"digits", RECORD)),
]


RECORDS = [DatasetRecord(num_slices=4, seq=7, manifest="blake3:" + "ab" * 32, withheld=(1, 3))]
ENTRY = SliceEntry(file="slice-00000.jsonl", samples=3, size=96, digest=DIGEST)
TENSORS = Manifest(dataset="digits", slices=(msgspec.structs.replace(ENTRY, file="slice-00000.safetensors"),))
MANIFESTS = [
    TENSORS,
    msgspec.structs.replace(TENSORS, columns={"pixel_values": "float32[1,8,8]", "labels": "int64[]"}),
    Manifest(dataset="prompts", slices=(ENTRY,), format=JSONL, columns={"prompt": "text", "stars": "integer"}),
]


def lines() -> list[dict[str, Any]]:
    made = []
    for kind, exchanges in (("request", REQUESTS), ("response", RESPONSES)):
        for method, value in exchanges:
            data = method.encode_request(value) if kind == "request" else method.encode_response(value)
            plain = to_plain(method.request if kind == "request" else method.response, value)
            name = method.variant or type(value).__name__
            made.append({"protocol": method.protocol, "kind": kind, "name": name, "hex": data.hex(), "json": plain})
    for name, annotated, value in HEADERS:
        data, plain = to_cbor(annotated, value), to_plain(annotated, value)
        made.append({"protocol": "transfer", "kind": "header", "name": name, "hex": data.hex(), "json": plain})
    for name, data in HEARTBEAT:
        made.append({"protocol": "/ipfs/kad/1.0.0", "kind": "record", "name": name, "hex": data.hex(), "json": None})
    for record in RECORDS:
        data, plain = to_json(DatasetRecord, record), to_plain(DatasetRecord, record)
        made.append(
            {"protocol": "/ipfs/kad/1.0.0", "kind": "record", "name": "dataset", "hex": data.hex(), "json": plain}
        )
    for manifest in MANIFESTS:
        data, plain = to_json(Manifest, manifest), to_plain(Manifest, manifest)
        made.append({"protocol": "transfer", "kind": "file", "name": "manifest", "hex": data.hex(), "json": plain})
    return made


def golden() -> list[dict[str, Any]]:
    return [json.loads(line) for line in GOLDEN.read_text().splitlines()]


ALL = len(REQUESTS) + len(RESPONSES) + len(HEADERS) + len(HEARTBEAT) + len(RECORDS) + len(MANIFESTS)


@pytest.mark.parametrize("index", range(ALL))
def test_encoding_matches_golden_bytes(index: int) -> None:
    assert lines()[index] == golden()[index]


def test_golden_bytes_decode() -> None:
    stored = golden()
    for (method, value), line in zip(REQUESTS, stored, strict=False):
        assert method.decode_request(bytes.fromhex(line["hex"])) == value
    for (method, value), line in zip(RESPONSES, stored[len(REQUESTS) :], strict=False):
        assert method.decode_response(bytes.fromhex(line["hex"])) == value
    records = stored[-len(RECORDS) - len(MANIFESTS) :]
    for record, line in zip(RECORDS, records, strict=False):
        assert from_json(DatasetRecord, bytes.fromhex(line["hex"])) == record
    for manifest, line in zip(MANIFESTS, stored[-len(MANIFESTS) :], strict=True):
        assert from_json(Manifest, bytes.fromhex(line["hex"])) == manifest
    assert len(stored) == ALL


def test_only_heartbeat_keys_name_a_publisher() -> None:
    assert publisher_named(heartbeat_key(PEER, b"a/b\xff")) == PEER
    assert publisher_named(b"digits") is None
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
