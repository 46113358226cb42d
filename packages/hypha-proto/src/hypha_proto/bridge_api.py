"""Job bridge API between an executor and its worker: JSON over HTTP on a Unix socket, one socket per job.

Two forms of request body are accepted: the one that existing executors send (`{"resource": Reference, "path": …}`, or
the bare reference for a fetch) and the documented one (`{"fetch": {"type": "HuggingFace", …}, "out_dir": …}`).
Used by the worker's bridge (server) and by executors (client).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, TypeVar

import msgspec

from hypha_proto.codec import from_plain
from hypha_proto.contributions import Contribution
from hypha_proto.datasets import SliceCount
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId, is_inside
from hypha_proto.job_spec import Reference
from hypha_proto.texts import quote
from hypha_proto.wire_schema import OMIT, U32, U64, Digest, Message

FETCH: Final = "/resources/fetch"
SEND: Final = "/resources/send"
RECEIVE: Final = "/resources/receive"
STATUS: Final = "/status/send"
BATCHES: Final = "/status/batches"
"""Reports of several batches at once (`batch_reports.TrainedBatches`), answered with `batch_reports.BatchesCounted`."""

SPANS: Final = "/telemetry/spans"
"""Optional extension: where a bridge does not offer this route, executors continue without reporting spans."""

UPDATE: Final = "/task/update"
"""Progress of a task."""

JOIN: Final = "/rounds/join"
"""Where an executor whose `TrainConfig` has `join` asks in which round it begins. The answer, `RoundJoined`, comes when
the scheduler has decided, without a time limit. Status 410: it will never take part."""

ROUND_CLOSED: Final = "round-closed"
"""`BridgeErrorBody.error` of a 409 to a send: the round continues without this update. The executor asks `JOIN` again,
and fetches the weights."""

ASSIGNED: Final = "assigned"
"""Key of `FetchedFile.metadata`: how many slices the scheduler has assigned to the executor before this one, as a
decimal number. An executor that fetches several at a time uses them in this order."""

MEMORY_VARIABLE: Final = "HYPHA_EXECUTOR_MEMORY"
"""Environment variable of an executor: bytes of main memory that its lease has; absent if the lease states none."""
MAX_SPANS: Final = 256
"""Maximum number of spans in one report, nested spans included."""
MAX_SPAN_DEPTH: Final = 4
"""Maximum nesting depth of spans in one report."""

MAX_PATH: Final = 1024
"""Maximum number of characters in a path of a request."""

_TYPES: Final = {
    "HuggingFace": "huggingface",
    "Peers": "peers",
    "Uri": "uri",
    "URI": "uri",
    "Scheduler": "scheduler",
    "Resource": "resource",
}
_ACTIONS: Final = {"fetch": "out_dir", "send": "path", "receive": "out_dir"}


class FetchedFile(Message, frozen=True):
    """One file downloaded by a fetch."""

    path: str
    """Path relative to the work directory."""
    size: U64
    """Size in bytes."""
    checksum: Digest
    metadata: dict[str, str]
    """`source`, `timestamp`; for a slice also `dataset`, `slice`, `epoch`, and for a part of one `first` and `end`; of
    a training job also `assigned`."""


class ReceivedFile(Message, frozen=True):
    """One server-sent event of ``/resources/receive``: a file that a peer has pushed."""

    path: str
    """Path relative to the work directory."""
    size: U64
    """Size in bytes."""
    from_peer: PeerId
    sequence: U64
    round: Annotated[U32 | None, OMIT] = None
    kind: Annotated[str | None, OMIT] = None
    weights: Annotated[Digest | None, OMIT] = None
    """Of an outer update: digest of the global weights after the round, as the scheduler has committed them."""


class RoundJoined(Message, frozen=True):
    """Response of ``/rounds/join``."""

    round: U32
    """Round with which the executor begins, without state of the inner optimizer."""
    weights: Annotated[Digest | None, OMIT] = None
    """Digest of the global weights after the round before, to be fetched as `TrainConfig.weights`; None where the round
    begins from the start model."""
    keeps: Annotated[bool | None, OMIT] = None
    """True if the slices that were fetched ahead are to be used; otherwise they are not the executor's any more."""


class BridgeErrorBody(Message, frozen=True):
    """Body of every unsuccessful response."""

    error: str
    """Kind of error in kebab-case, for programs."""
    detail: str
    """What happened and how to fix it, for people."""


class ResourceReference(Message, frozen=True, tag="resource"):
    """A resource of a task to fetch, or an output to send."""

    name: str


AnyReference = Reference | ResourceReference


class Transfer(Message, frozen=True):
    """Body of a fetch, send or receive request."""

    reference: AnyReference = msgspec.field(name="resource")
    path: str
    """File to send, or folder to write to, relative to the work directory; empty if the request names none."""
    round: Annotated[U32 | None, OMIT] = None
    samples: Annotated[U64 | None, OMIT] = None
    contribution: Annotated[Contribution | None, OMIT] = None
    """What the executor states about the update that it sends."""
    count: Annotated[SliceCount | None, OMIT] = None
    """Number of slices to fetch at most, of the scheduler's dataset of a training job; None means one."""
    ahead: Annotated[bool | None, OMIT] = None
    """True for slices that the executor uses after it has asked with which round it begins."""


_Body = TypeVar("_Body")
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Text = Annotated[str, msgspec.Meta(max_length=300)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0.0)]
_Integer = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]


class ExecutorSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Finished trace span of an executor, reported with durations only so that no two clocks are compared."""

    name: _Name
    ago_ms: _Milliseconds
    """Milliseconds from the start of the span to this report."""
    duration_ms: _Milliseconds
    """Length of the span in milliseconds; at most `ago_ms`."""
    attributes: Annotated[dict[_Name, _Text | bool | _Integer | float], msgspec.Meta(max_length=32)] = {}
    error: _Text | None = None
    """Why the operation failed, or None if it succeeded."""
    inside: tuple[ExecutorSpan, ...] = ()
    """Child spans."""


class SpanReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Request body of ``/telemetry/spans``."""

    spans: tuple[ExecutorSpan, ...]
    traceparent: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    """W3C trace context of the parent span; the worker's own span of the job if None."""


class ProgressUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request body of ``/task/update``."""

    fraction: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    """Share of the work that is done."""
    message: Annotated[str, msgspec.Meta(max_length=1000)] | None = None
    """One line for people."""
    metrics: Annotated[dict[_Name, float], msgspec.Meta(max_length=100)] | None = None
    """Numbers by name."""


class ProgressUpdateAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Response of ``/task/update``."""

    draining: bool
    """Whether the task is to end by itself as soon as it can."""
    seconds_left: float | None = None
    """Seconds until it is ended, while it drains."""


def _read(body: bytes, kind: type[_Body]) -> _Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DecodeError(str(error)) from None


def read_progress_update(body: bytes) -> ProgressUpdate:
    """Decode and validate the body of ``/task/update``.

    Raises:
        DecodeError: the body is malformed or exceeds a limit; the message says where.
    """
    update = _read(body, ProgressUpdate)
    for name, value in (update.metrics or {}).items():
        if not math.isfinite(value):
            raise DecodeError(f"metric {name!r} is {value}, not a finite number")
    return update


def read_spans(body: bytes) -> SpanReport:
    """Decode and validate the body of ``/telemetry/spans``.

    Raises:
        DecodeError: the body is malformed or exceeds a limit; the message says where.
    """
    report = _read(body, SpanReport)
    level, count = report.spans, 0
    for _ in range(MAX_SPAN_DEPTH):
        count += len(level)
        if any(span.duration_ms > span.ago_ms for span in level):
            raise DecodeError("duration_ms of a span is larger than ago_ms, the time since it started")
        level = tuple(inner for span in level for inner in span.inside)
    if level or count > MAX_SPANS:
        raise DecodeError(f"a report may hold at most {MAX_SPANS} spans, nested at most {MAX_SPAN_DEPTH} levels deep")
    return report


def read_transfer(action: str, body: Any) -> Transfer:
    """Validate a body of ``/resources/<action>`` in either form.

    Args:
        action: ``fetch``, ``send`` or ``receive``.
        body: the parsed JSON.

    Raises:
        DecodeError: the body matches neither form; `DecodeError.path` says where, by the names of the form it has.
    """
    if type(body) is not dict:
        raise DecodeError("expected an object")
    key = _ACTIONS[action]
    if "resource" in body and "type" not in body:
        names = {"resource": "resource", "path": "path"}
    elif action in body:
        names = {"resource": action, "path": key}
    elif action == "fetch" and "type" in body:
        names = {"resource": "", "path": key}
    else:
        raise DecodeError(f"expected {action!r} with {key!r}, or 'resource' with 'path'")
    reference = body[names["resource"]] if names["resource"] else body
    try:
        transfer: Transfer = from_plain(
            Transfer, {**body, "resource": _wire_form(reference), "path": body.get(names["path"], "")}
        )
    except DecodeError as error:
        field, _, rest = error.path.partition(".")
        place = ".".join(filter(None, (names.get(field, field), rest)))
        raise DecodeError(error.reason, place) from None
    _check_path(transfer.path, names["path"])
    for name in getattr(transfer.reference, "filenames", None) or ():
        _check_path(name, "filenames")
    return transfer


def _check_path(path: str, place: str) -> None:
    if len(path) > MAX_PATH or not (is_inside(path) or path in ("", ".")):
        raise DecodeError(
            f"{quote(path)} is not a relative path within the work directory: name one of at most {MAX_PATH} "
            "characters without a leading slash, '..' or null bytes",
            place,
        )


def _wire_form(reference: Any) -> Any:
    """Convert a reference in the documented form to the wire form: lower-case type, strategy as a map."""
    if type(reference) is not dict:
        return reference
    made = dict(reference)
    if type(made.get("type")) is str:
        made["type"] = _TYPES.get(made["type"], made["type"])
    if type(made.get("strategy")) is str:
        made["strategy"] = {"type": made["strategy"]}
    return made
