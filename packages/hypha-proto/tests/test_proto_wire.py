"""Captured bytes of other implementations (`wire.jsonl`): each line decodes, and encodes to the same bytes."""

import json
from pathlib import Path
from typing import Any

import pytest

from hypha_proto.codec import from_json, from_plain, to_json, to_plain
from hypha_proto.datasets import DATA, DatasetRecord
from hypha_proto.dispatch import DISPATCH_JOB, JOB_STATUS, PARAMETER_PULL, PARAMETER_PUSH
from hypha_proto.health import HEALTH_CHECK
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import JobSpec
from hypha_proto.leases import RENEW_LEASE
from hypha_proto.offers import OFFER, WORKER_REQUESTS
from hypha_proto.progress import REPORT
from hypha_proto.protocols import API, RpcMethod
from hypha_proto.transfer import PullHeader

LINES = [json.loads(line) for line in (Path(__file__).parent / "wire.jsonl").read_text().splitlines()]
CONVERSATIONS: list[RpcMethod[Any, Any]] = [
    OFFER, RENEW_LEASE, JOB_STATUS, DISPATCH_JOB, PARAMETER_PULL, PARAMETER_PUSH, DATA, HEALTH_CHECK, REPORT,
]  # fmt: skip


def conversation(line: dict[str, str]) -> RpcMethod[Any, Any]:
    variant = line["name"].partition(".")[0] if line["protocol"] == API else None
    [found] = [c for c in CONVERSATIONS if c.protocol == line["protocol"] and c.variant == variant]
    return found


def select(*kinds: str) -> Any:
    chosen = [line for line in LINES if line["kind"] in kinds]
    assert chosen
    return pytest.mark.parametrize("line", chosen, ids=lambda line: f"{line['kind']}-{line['name']}")


def test_every_line_is_covered() -> None:
    kinds = {"request", "response", "gossip", "record", "header", "argument", "ed25519 seed byte repeated 32 times"}
    assert {line["kind"] for line in LINES} == kinds
    assert len(LINES) == 51


@select("request")
def test_requests(line: dict[str, Any]) -> None:
    talk = conversation(line)
    data = bytes.fromhex(line["hex"])
    message = talk.decode_request(data)
    assert talk.encode_request(message) == data
    value = line["json"][talk.variant] if talk.variant else line["json"]
    assert from_plain(talk.request, value) == message


@select("response")
def test_responses(line: dict[str, Any]) -> None:
    talk = conversation(line)
    data = bytes.fromhex(line["hex"])
    message = talk.decode_response(data)
    assert talk.encode_response(message) == data
    value = line["json"][talk.variant] if talk.variant else line["json"]
    assert to_plain(talk.response, message) == value


@select("gossip")
def test_gossip(line: dict[str, Any]) -> None:
    data = bytes.fromhex(line["hex"])
    message = WORKER_REQUESTS.decode(data)
    assert WORKER_REQUESTS.encode(message) == data
    assert to_plain(WORKER_REQUESTS.message, message) == line["json"]


@select("argument")
def test_job_arguments(line: dict[str, Any]) -> None:
    data = bytes.fromhex(line["hex"])
    spec: JobSpec = from_json(JobSpec, data)
    assert to_json(JobSpec, spec) == data
    assert to_plain(JobSpec, spec) == line["json"]


@select("record")
def test_dataset_record(line: dict[str, Any]) -> None:
    data = bytes.fromhex(line["hex"])
    assert to_json(DatasetRecord, from_json(DatasetRecord, data)) == data


@select("header")
def test_pull_header(line: dict[str, Any]) -> None:
    data = bytes.fromhex(line["hex"])
    length = int.from_bytes(data[:8], "little")
    assert length == len(data) - 8
    assert to_json(PullHeader, from_json(PullHeader, data[8:])) == data[8:]


@select("ed25519 seed byte repeated 32 times")
def test_peer_ids(line: dict[str, Any]) -> None:
    raw = bytes.fromhex(line["hex"])
    assert str(PeerId(raw)) == line["json"]
    assert PeerId.parse(line["json"]).raw == raw
