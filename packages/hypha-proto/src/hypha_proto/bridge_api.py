"""What an executor and its worker say to each other: JSON over HTTP on a Unix socket, one socket a job.

Two forms of body are understood, the one that executors in the field send (`{"resource": Reference, "path": …}`, or the
bare reference for a fetch) and the one of the user's documents (`{"fetch": {"type": "HuggingFace", …}, "out_dir": …}`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from hypha_proto.codec import from_plain
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import Reference
from hypha_proto.wire_schema import OMIT, U32, U64, Digest, Message

FETCH: Final = "/resources/fetch"
SEND: Final = "/resources/send"
RECEIVE: Final = "/resources/receive"
STATUS: Final = "/status/send"
SPANS: Final = "/telemetry/spans"
"""Ours, and optional: an executor goes on without spans where a bridge does not know it."""

MAX_SPANS: Final = 256
"""Spans of one report, those inside others counted."""
MAX_SPAN_DEPTH: Final = 4

_TYPES: Final = {"HuggingFace": "huggingface", "Peers": "peers", "Uri": "uri", "URI": "uri", "Scheduler": "scheduler"}
_ACTIONS: Final = {"fetch": "out_dir", "send": "path", "receive": "out_dir"}


class FetchedFile(Message, frozen=True):
    """One file that a fetch brought."""

    path: str
    """Relative to the work directory."""
    size: U64
    checksum: Digest
    metadata: dict[str, str]
    """`source`, `timestamp`; for a slice also `dataset`, `slice`, `epoch`."""


class ReceivedFile(Message, frozen=True):
    """One event of ``/resources/receive``."""

    path: str
    size: U64
    from_peer: PeerId
    sequence: U64
    round: Annotated[U32 | None, OMIT] = None
    kind: Annotated[str | None, OMIT] = None


class BridgeErrorBody(Message, frozen=True):
    """Body of every answer that is not a success."""

    error: str
    """Kind of the error, kebab-case, for programs."""
    detail: str
    """What happened and what to do, for people."""


class Transfer(Message, frozen=True):
    """A body of fetch, send or receive, whichever form it came in."""

    reference: Reference
    path: str
    """The file to send, or the folder to write to, relative to the work directory; empty when none was named."""
    round: U32 | None = None
    samples: U64 | None = None


_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Text = Annotated[str, msgspec.Meta(max_length=300)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0.0)]
_Integer = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]


class ExecutorSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Work that an executor has done, for the trace of its job. Durations only: no clock is compared with another."""

    name: _Name
    ago_ms: _Milliseconds
    """From its beginning to the report."""
    duration_ms: _Milliseconds
    attributes: Annotated[dict[_Name, _Text | bool | _Integer | float], msgspec.Meta(max_length=32)] = {}
    error: _Text | None = None
    """Why it failed, if it did."""
    inside: tuple[ExecutorSpan, ...] = ()
    """What it consisted of."""


class SpanReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of ``/telemetry/spans``."""

    spans: tuple[ExecutorSpan, ...]
    traceparent: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    """What they are part of, a span of the job's trace; by default the worker's own span of the job."""


def read_spans(body: bytes) -> SpanReport:
    """Read a body of ``/telemetry/spans``.

    Raises:
        DecodeError: it is not one, or over a bound; the text says where.
    """
    try:
        report = msgspec.json.decode(body, type=SpanReport)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DecodeError(str(error)) from None
    level, count = report.spans, 0
    for _ in range(MAX_SPAN_DEPTH):
        count += len(level)
        if any(span.duration_ms > span.ago_ms for span in level):
            raise DecodeError(
                "a span that is over cannot have lasted longer (duration_ms) than since it began (ago_ms)"
            )
        level = tuple(inner for span in level for inner in span.inside)
    if level or count > MAX_SPANS:
        raise DecodeError(f"a report has {MAX_SPANS} spans at most, {MAX_SPAN_DEPTH} deep")
    return report


def read_transfer(action: str, body: Any) -> Transfer:
    """Read a body of ``/resources/<action>`` (parsed JSON) in either form.

    Args:
        action: ``fetch``, ``send`` or ``receive``.

    Raises:
        DecodeError: the body fits neither form; the path says where.
    """
    if type(body) is not dict:
        raise DecodeError("expected an object")
    if "resource" in body and "type" not in body:
        reference, path = from_plain(Reference, body["resource"]), body.get("path", "")
    elif action in body:
        reference, path = from_plain(Reference, _documented(body[action])), body.get(_ACTIONS[action], "")
    elif action == "fetch" and "type" in body:
        reference, path = from_plain(Reference, _documented(body)), body.get("out_dir", "")
    else:
        raise DecodeError(f"expected {action!r} with {_ACTIONS[action]!r}, or 'resource' with 'path'")
    extras = from_plain(_Extras, body)
    if type(path) is not str:
        raise DecodeError("expected text", "path")
    return Transfer(reference=reference, path=path, round=extras.round, samples=extras.samples)


class _Extras(Message, frozen=True):
    round: U32 | None = None
    samples: U64 | None = None


def _documented(reference: Any) -> Any:
    """The reference of the user's documents as the wire writes it: lower-case type, strategy as a map."""
    if type(reference) is not dict:
        return reference
    made = dict(reference)
    if type(made.get("type")) is str:
        made["type"] = _TYPES.get(made["type"], made["type"])
    if type(made.get("strategy")) is str:
        made["strategy"] = {"type": made["strategy"]}
    return made
