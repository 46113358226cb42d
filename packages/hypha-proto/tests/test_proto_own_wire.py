"""Golden bytes of Hypha's messages: a difference here is a change of the wire format.

Each line of the file has a message three times: its bytes, its JSON form, and the code that makes it. After a
deliberate change, or a new line with the JSON form alone, `python test_proto_own_wire.py` (with this folder as working
directory) prints a new file.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest

import hypha_proto
from hypha_proto.batch_reports import MAX_BATCHES, REPORT_BATCHES
from hypha_proto.codec import from_cbor, from_json, from_plain, to_cbor, to_json, to_plain
from hypha_proto.datasets import ContentRecord, DatasetRecord, Manifest
from hypha_proto.errors import DecodeError, InvalidIdError
from hypha_proto.ids import PeerId
from hypha_proto.offers import WORKER_REQUESTS, ExecutorDescriptor
from hypha_proto.protocols import TASKS, RpcMethod
from hypha_proto.signed_records import confirmed_key, heartbeat_key, publisher_named, signed_bytes, split_heartbeat
from hypha_proto.tasks import SchedulerFrame, Subscribe, Subscribed, WorkerFrame
from hypha_proto.transfer import PullAnswer, PullRequest, PushAnswer, PushHeader, PushReceipt

FILE = Path(__file__).parent / "own_wire.jsonl"
GOLDEN: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]
ID = uuid.UUID(int=7)
PEER = PeerId.from_public_key(bytes(range(32)))
RECORD = b'{"num_slices":4,"seq":7,"manifest":"blake3:%s"}' % (b"ab" * 32)
HEARTBEAT = {
    "heartbeat_key": heartbeat_key(PEER, b"digits"),
    "signed_bytes": signed_bytes(PEER, b"digits", RECORD),
}
METHODS: dict[tuple[str, str | None], RpcMethod[Any, Any]] = {
    (found.protocol, found.variant): found
    for module in pkgutil.iter_modules(hypha_proto.__path__, "hypha_proto.")
    for found in vars(importlib.import_module(module.name)).values()
    if isinstance(found, RpcMethod)
}
KINDS: dict[tuple[str, str], Any] = {
    ("transfer", "PushHeader"): PushHeader,
    ("transfer", "PushAnswer"): PushAnswer,
    ("transfer", "PushReceipt"): PushReceipt,
    ("transfer", "PullRequest"): PullRequest,
    ("transfer", "PullAnswer"): PullAnswer,
    ("transfer", "manifest"): Manifest,
    (TASKS, "Subscribe"): Subscribe,
    (TASKS, "Subscribed"): Subscribed,
    (TASKS, "SchedulerFrame"): SchedulerFrame,
    (TASKS, "WorkerFrame"): WorkerFrame,
    (TASKS, "executor"): ExecutorDescriptor,
    ("/ipfs/kad/1.0.0", "dataset"): DatasetRecord,
    ("/ipfs/kad/1.0.0", "content"): ContentRecord,
}
"""Types of the messages that are no requests, responses or gossip, by protocol and name."""


def codec_of(line: dict[str, Any]) -> tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Return the annotated type of a line's message, and what encodes and decodes it."""
    protocol, kind, name = line["protocol"], line["kind"], line["name"]
    if kind in ("request", "response"):
        method = METHODS.get((protocol, name)) or METHODS[protocol, None]
        if kind == "request":
            return method.request, method.encode_request, method.decode_request
        return method.response, method.encode_response, method.decode_response
    if protocol == WORKER_REQUESTS.name:
        return WORKER_REQUESTS.message, WORKER_REQUESTS.encode, WORKER_REQUESTS.decode
    message = KINDS[protocol, name.partition(".")[0]]
    encode, decode = (to_json, from_json) if kind in ("record", "file") else (to_cbor, from_cbor)
    return message, partial(encode, message), partial(decode, message)


def code_of(value: object) -> str:
    """Return the code that makes a value, without fields that have their default."""
    if isinstance(value, tuple):
        return f"({''.join(f'{code_of(each)}, ' for each in value)})"
    if not isinstance(value, msgspec.Struct):
        return repr(value)
    fields = [field for field in msgspec.structs.fields(value) if getattr(value, field.name) != field.default]
    arguments = [f"{field.name}={code_of(getattr(value, field.name))}" for field in fields]
    return f"{type(value).__name__}({', '.join(arguments)})"


def complete(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with the bytes and the code of its JSON form; a heartbeat has none."""
    if line["name"] in HEARTBEAT:
        return line | {"hex": HEARTBEAT[line["name"]].hex()}
    message, encode, _ = codec_of(line)
    value = from_plain(message, line["json"])
    return line | {"hex": encode(value).hex(), "json": to_plain(message, value), "code": code_of(value)}


@pytest.mark.parametrize("line", GOLDEN, ids=[f"{line['kind']} {line['name']}" for line in GOLDEN])
def test_encoding_matches_golden_bytes(line: dict[str, Any]) -> None:
    assert complete(line) == line


@pytest.mark.parametrize("line", [line for line in GOLDEN if line["name"] not in HEARTBEAT])
def test_golden_bytes_decode(line: dict[str, Any]) -> None:
    message, _, decode = codec_of(line)
    assert decode(bytes.fromhex(line["hex"])) == from_plain(message, line["json"])


@pytest.mark.parametrize("count", [0, MAX_BATCHES + 1])
def test_a_report_of_no_batches_or_of_too_many_is_malformed(count: int) -> None:
    plain = {"round": 1, "first": 0, "batches": [{"batch_size": 16}] * count}
    about = {"job_id": ID.bytes, "task": "train", "number": 0}
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
    print("\n".join(json.dumps(complete(line), separators=(",", ":")) for line in GOLDEN))
