"""Codec: messages round-trip, malformed input is rejected, and errors name the field."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import types
import typing
import uuid
from typing import Any

import cbor2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hypha_proto.attempt_id import AttemptId
from hypha_proto.bridge_api import read_spans, read_transfer
from hypha_proto.codec import (
    MAX_JSON_DEPTH,
    from_cbor,
    from_json,
    parse_cbor,
    parse_json,
    split_json_lines,
    to_cbor,
    to_json,
)
from hypha_proto.datasets import DATA, Manifest
from hypha_proto.errors import DecodeError, EncodeError, InvalidIdError
from hypha_proto.health import HEALTH_CHECK, Health
from hypha_proto.ids import PeerId, base58_decode, base58_encode, check_digest
from hypha_proto.job_membership import JoinRound
from hypha_proto.leases import RELEASE_LEASE, RENEW_LEASE, WHY_NOT
from hypha_proto.offers import OFFER, WORKER_REQUESTS, WorkerOffer, WorkerRequest, WorkerSpec
from hypha_proto.protocols import RpcMethod
from hypha_proto.resources import Resources
from hypha_proto.round_membership import UPDATE_REFUSED
from hypha_proto.tasks import TaskSpec
from hypha_proto.training_reports import REPORT, BatchDone, ReportTraining, TrainingReportValue
from hypha_proto.transfer import PullAnswer, PullRequest, PushHeader
from hypha_proto.wire_schema import MAX_PRICE, FloatKind, IntRange, Mark, Message
from hypha_proto.worker_status import OfferedExecutor

CONVERSATIONS: list[RpcMethod[Any, Any]] = [
    OFFER, RENEW_LEASE, DATA, HEALTH_CHECK, REPORT, RELEASE_LEASE, WHY_NOT, UPDATE_REFUSED,
]  # fmt: skip
OTHERS: list[Any] = [WorkerRequest, TaskSpec, Manifest, PushHeader, PullRequest, PullAnswer, TrainingReportValue]
KINDS = [c.request for c in CONVERSATIONS] + [c.response for c in CONVERSATIONS] + OTHERS

PEERS = st.binary(min_size=32, max_size=32).map(PeerId.from_public_key)
SINGLES = st.floats(width=32, allow_nan=False)
SPECIAL = {
    "address": st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=8),
    "outcome": st.sampled_from(["finished", "failed", "cancelled"]),
    "code": st.from_regex(r"[a-z][a-z-]{0,23}", fullmatch=True),
    "task": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,20}(\[[0-9]{1,10}\])?", fullmatch=True),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of an annotated type."""
    if typing.get_origin(hint) is typing.Annotated:
        inner, *marks = typing.get_args(hint)
        for mark in marks:
            if isinstance(mark, IntRange):
                return st.integers(mark.low, mark.high)
            if isinstance(mark, FloatKind):
                finite = st.floats(0, min(mark.largest, sys.float_info.max))
                return finite if mark.amount else SINGLES if mark.width == 4 else st.floats(allow_nan=False)
            if mark is Mark.DIGEST:
                return st.from_regex(r"(blake3|sha256):[0-9a-f]{64}", fullmatch=True)
        return values(inner)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values(arg) for arg in args))
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(values(args[0]), max_size=3).map(tuple)
        return st.tuples(*(values(arg) for arg in args))
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), values(args[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, Message):
        hints = typing.get_type_hints(hint, include_extras=True)
        fields = {name: SPECIAL.get(name, values(h)) for name, h in hints.items() if name in hint.__struct_fields__}
        return st.builds(hint, **fields)
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(max_size=8), bool: st.booleans(), float: st.floats(allow_nan=False), uuid.UUID: st.uuids(),
        PeerId: PEERS, type(None): st.none(), int: st.integers(0, 2**32),
    }  # fmt: skip
    return scalars[hint]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", str(kind))[:60])
def test_every_message_round_trips(kind: Any) -> None:
    @given(values(kind))
    @settings(max_examples=25, deadline=None)
    def check(value: Any) -> None:
        assert from_cbor(kind, to_cbor(kind, value)) == value

    check()


@given(values(TaskSpec))
@settings(max_examples=50, deadline=None)
def test_task_spec_round_trips_through_json(spec: TaskSpec) -> None:
    finite = b"null" not in to_json(TaskSpec, spec).replace(b'"token":null', b"")
    if finite:  # JSON has no infinity: msgspec writes null, which is rejected when read
        assert from_json(TaskSpec, to_json(TaskSpec, spec)) == spec


@given(data=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("kind", [WorkerRequest, TaskSpec, ReportTraining, PushHeader], ids=lambda kind: kind.__name__)
def test_random_bytes_raise_only_decode_errors(kind: Any, data: bytes) -> None:
    with pytest.raises(DecodeError):
        from_cbor(kind, data)
    with pytest.raises(DecodeError):
        from_json(kind, data)


@given(values(ReportTraining), st.data())
@settings(max_examples=200, deadline=None)
def test_flipped_byte_raises_only_decode_errors(value: ReportTraining, data: st.DataObject) -> None:
    encoded = bytearray(to_cbor(ReportTraining, value))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(DecodeError):  # the only error allowed
        assert isinstance(from_cbor(ReportTraining, bytes(encoded)), ReportTraining)


HEALTHY = to_cbor(Health, Health(healthy=True))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (HEALTHY + b"\0", "1 bytes follow"),
        (bytes.fromhex("a2676865616c746879f5676865616c746879f4"), "healthy|duplicate"),
        (bytes.fromhex("a1676865616c74687901"), "healthy: expected a boolean, got integer"),
        (b"\xa0", "healthy: is missing"),
        (b"\x80", "expected a map, got list"),
        (bytes.fromhex("a1676865616c746879c1f5"), "tag"),
        (bytes.fromhex("d81c" + "a1676865616c746879f5"), "tag"),
        (b"\x81" * 60 + b"\x00", "CBOR"),
        (bytes.fromhex("9bffffffffffffffff"), "CBOR"),
        (b"\xa1\x01\xf5", "CBOR|text keys"),
        (b"", "CBOR"),
    ],
)
def test_malformed_cbor_is_rejected(data: bytes, message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        from_cbor(Health, data)


def test_errors_name_the_field() -> None:
    spec = {"resources": {"gpu": 0.0, "cpu": -1.0, "storage": 0.0, "memory": 0.0}, "executor": []}
    with pytest.raises(DecodeError, match=r"^spec\.resources\.cpu: expected a finite number >= 0, got -1\.0$"):
        from_cbor(WorkerRequest, cbor2.dumps({"id": b"\0" * 16, "spec": spec}))
    spec["resources"] = {"gpu": 0.0, "cpu": 1.0, "storage": 0.0, "memory": 0.0}
    spec["executor"] = [{"class": "train", "name": "a"}, {"class": "tr"}]  # type: ignore[list-item]
    with pytest.raises(DecodeError, match=r"^spec\.executor\[1\]\.name: is missing$"):
        from_cbor(WorkerRequest, cbor2.dumps({"id": b"\0" * 16, "spec": spec}))


@pytest.mark.parametrize("task", ["", "-a", "a" * 65, "a[]", "a[1", "a[12345678901]", "a\n", "a b", "a/b"])
def test_a_task_has_a_name_of_bounded_length(task: str) -> None:
    plain = {"attempt": {"job_id": bytes(16), "task": "train.0_x-y[1234567890]", "number": 1}}
    assert from_cbor(JoinRound, cbor2.dumps(plain)).attempt == AttemptId(uuid.UUID(int=0), "train.0_x-y[1234567890]", 1)
    plain["attempt"]["task"] = task
    with pytest.raises(DecodeError, match=r"^attempt: task .* is no name"):
        from_cbor(JoinRound, cbor2.dumps(plain))


def test_a_runtime_is_a_name() -> None:
    with pytest.raises(DecodeError, match=r"runtime '\\x1b\[2J' is no name"):
        from_cbor(OfferedExecutor, cbor2.dumps({"class": "train", "name": "a", "runtime": "\x1b[2J"}))


RESOURCES = {"gpu": 0.0, "cpu": 1.0, "storage": 0.0, "memory": 0.0}
REQUEST = {"id": b"\0" * 16, "spec": {"resources": RESOURCES, "executor": []}, "timeout_ms": 1, "bid": 1e9}
OFFERED = {"id": b"\0" * 16, "request_id": b"\0" * 16, "resources": RESOURCES, "timeout_ms": 1, "price": 1e9}


@pytest.mark.parametrize(("kind", "plain", "field"), [(WorkerRequest, REQUEST, "bid"), (WorkerOffer, OFFERED, "price")])
def test_prices_and_bids_are_bounded(kind: Any, plain: dict[str, Any], field: str) -> None:
    assert getattr(from_cbor(kind, cbor2.dumps(plain)), field) == MAX_PRICE == 1e9
    for value in (1e300, 1.0000001e9, float("inf"), float("nan"), -1.0):
        with pytest.raises(DecodeError, match=rf"^{field}: expected a finite number from 0 to 1e\+09, got "):
            from_cbor(kind, cbor2.dumps({**plain, field: value}))


@pytest.mark.parametrize("item", [b"\xa0", b"\x80", b"\x60", b"\x00", b"\xf6"])
def test_too_many_items_are_rejected_before_decoding(item: bytes) -> None:
    many = (10 << 20) - 5
    with pytest.raises(DecodeError, match="more than 131072 items"):
        parse_cbor(b"\x9a" + many.to_bytes(4, "big") + item * many)
    few = (1 << 17) - 1
    assert len(parse_cbor(b"\x9a" + few.to_bytes(4, "big") + item * few)) == few  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [(1 << 17) - 5, (1 << 17) + 1, 1 << 20])
def test_strings_count_as_one_item(length: int) -> None:
    plain = {"text": "x" * length, "bytes": bytes(length), "more": [1, 1 << 20, 1 << 40, -7, 1.5, None, True, []]}
    assert parse_cbor(cbor2.dumps(plain)) == plain
    with pytest.raises(DecodeError):
        parse_cbor(cbor2.dumps(plain)[:-1])
    with pytest.raises(DecodeError):
        parse_cbor(cbor2.dumps(plain) + bytes(length))


def test_size_limits() -> None:
    with pytest.raises(DecodeError, match="over the limit"):
        WORKER_REQUESTS.decode(b"\0" * (WORKER_REQUESTS.max_bytes + 1))
    with pytest.raises(DecodeError, match="over the limit"):
        HEALTH_CHECK.decode_request(b"\0" * (HEALTH_CHECK.max_request + 1))


def test_unknown_fields_are_skipped_and_unset_fields_omitted() -> None:
    plain = {"healthy": True, "colour": "green", "nested": {"deep": [1, 2.0, None]}}
    assert from_cbor(Health, cbor2.dumps(plain)) == Health(healthy=True)
    assert to_cbor(Health, Health(healthy=True)) == bytes.fromhex("a1676865616c746879f5")


@pytest.mark.parametrize("width", ["<e", "<f", "<d"])
def test_floats_of_every_width_are_decoded_but_integers_rejected(width: str) -> None:
    value = struct.unpack(width, struct.pack(width, 0.5))[0]
    head = {"<e": b"\xf9", "<f": b"\xfa", "<d": b"\xfb"}[width]
    amounts = dict.fromkeys(("gpu", "storage", "memory"), 1.0)
    data = cbor2.dumps(amounts)[1:]
    assert from_cbor(Resources, b"\xa4\x63cpu" + head + struct.pack(">" + width[1], value) + data).cpu == 0.5
    with pytest.raises(DecodeError, match="cpu: expected a float, got integer"):
        from_cbor(Resources, b"\xa4\x63cpu\x01" + data)


def test_values_of_wrong_type_are_not_encoded() -> None:
    with pytest.raises(EncodeError, match="batch_size: integer is out of range"):
        to_cbor(TrainingReportValue, BatchDone(batch_size=2**32))
    request = WorkerRequest(
        id=uuid.UUID(int=1),
        spec=WorkerSpec(resources=Resources(), executor=()),
        timeout_ms="3",  # type: ignore[arg-type]
        bid=1.0,
    )
    with pytest.raises(EncodeError, match="timeout_ms: expected an integer"):
        to_cbor(WorkerRequest, request)


@given(st.binary(max_size=40))
def test_base58_round_trip(data: bytes) -> None:
    assert base58_decode(base58_encode(data)) == data


@pytest.mark.parametrize(
    "text", ["", "0", "12D3KooW", "QmX7d" * 9, "1" * 300, "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH6é"]
)
def test_invalid_peer_ids_are_rejected(text: str) -> None:
    with pytest.raises(InvalidIdError):
        PeerId.parse(text)


@pytest.mark.parametrize("text", ["", "abc", "md5:" + "0" * 32, "sha256:" + "0" * 63, "blake3:" + "G" * 64])
def test_digest_without_algorithm_is_rejected(text: str) -> None:
    with pytest.raises(InvalidIdError):
        check_digest(text)


@given(values(Resources), values(Resources), values(Resources))
def test_covers_is_a_partial_order(a: Resources, b: Resources, c: Resources) -> None:
    assert a.covers(a)
    assert not (a.covers(b) and b.covers(c)) or a.covers(c) or max(_numbers(a, b, c)) > 1e6
    assert a.covers(b) == (a.lacking(b) == ())
    assert (a + b).covers(a)
    assert not a.covers(b) or a.covers(a - b)


def _numbers(*resources: Resources) -> list[float]:
    return [getattr(r, name) for r in resources for name in r.__struct_fields__]


def test_duplicate_json_keys_are_rejected() -> None:
    with pytest.raises(DecodeError, match="duplicate key 'healthy'"):
        from_json(Health, b'{"healthy": true, "healthy": false}')


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 20_000, "[" * 65 + "]" * 65, '{"a":' * 65 + "1" + "}" * 65])
def test_nested_json_is_rejected(text: str) -> None:
    with pytest.raises(DecodeError, match="nested"):
        parse_json(text)
    with pytest.raises(DecodeError, match="nested"):
        from_json(Health, f'{{"healthy": true, "more": {text}}}')


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"1\n2", [b"1", b"2"]),
        (b"1\n\n2\r\n", [b"1", b"", b"2\r"]),
        ('"\u2028\u2029\u0085"\n[1,\r2]\n'.encode(), ['"\u2028\u2029\u0085"'.encode(), b"[1,\r2]"]),
    ],
)
def test_json_lines_end_at_line_feeds_alone(data: bytes, lines: list[bytes]) -> None:
    assert split_json_lines(data) == lines


def test_json_within_the_depth_limit_is_parsed() -> None:
    text = "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH
    assert json.dumps(parse_json(text), separators=(",", ":")) == text
    assert parse_json("1") == 1


@given(st.binary() | st.text())
def test_any_input_is_json_or_a_decode_error(data: bytes | str) -> None:
    with contextlib.suppress(DecodeError):
        parse_json(data)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


_WORDS = (
    *("resource", "type", "fetch", "send", "receive", "path", "out_dir", "round", "samples", "Peers", "peers", "uri"),
    *("value", "strategy", "HuggingFace", "repository", "filenames", "spans", "name", "ago_ms", "inside"),
)
BRIDGE_BODIES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(_WORDS) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_WORDS), inner, max_size=4),
)


@given(st.sampled_from(["fetch", "send", "receive"]), BRIDGE_BODIES)
def test_any_body_is_a_transfer_or_a_decode_error(action: str, body: object) -> None:
    with contextlib.suppress(DecodeError):
        assert read_transfer(action, body).path is not None


@given(st.binary() | BRIDGE_BODIES.map(lambda body: json.dumps(body).encode()))
@example(b'{"spans":[{"name":"a","ago_ms":1,"duration_ms":1,"inside":' * 5000)
@example(b"[" * 100_000)
def test_any_body_is_a_span_report_or_a_decode_error(body: bytes) -> None:
    with contextlib.suppress(DecodeError):
        assert read_spans(body).spans is not None


@given(JSON_VALUES)
def test_plain_json_is_parsed_as_it_was_written(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("public_key", "text"),
    [
        (
            "8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c",
            "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5",
        ),
        (
            "8139770ea87d175f56a35466c34c7ecccb8d8a91b4ee37a25df60f5b8fc9b394",
            "12D3KooWJWoaqZhDaoEFshF7Rh1bpY9ohihFhzcW6d69Lr2NASuq",
        ),
    ],
)
def test_peer_ids_are_those_of_other_implementations(public_key: str, text: str) -> None:
    """Both were printed by rust-libp2p."""
    assert str(PeerId.from_public_key(bytes.fromhex(public_key))) == text


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"resource": {"type": "uri", "value": 4}, "path": "x"}, "resource.value"),
        ({"fetch": {"type": "URI", "value": 4}, "out_dir": "x"}, "fetch.value"),
        ({"type": "URI", "value": 4, "out_dir": "x"}, "value"),
        ({"fetch": {"type": "URI", "value": "a"}, "out_dir": 7}, "out_dir"),
    ],
)
def test_an_error_in_a_bridge_body_has_the_names_of_its_form(body: dict[str, Any], place: str) -> None:
    with pytest.raises(DecodeError) as raised:
        read_transfer("fetch", body)
    assert raised.value.path == place
