"""Spans and metrics for every room, without OpenTelemetry: calls that cost next to nothing until a recorder is there.

`node.telemetry` installs the recorder when a collector is configured, and is the only place that imports the SDK. The
trace that work belongs to travels as a W3C ``traceparent``: `requests`, `gossip` and `transfer` write it into messages
and take it up on the other side, so rooms only name what they do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Protocol, TypeVar

import msgspec

Value = str | int | float | bool
Attributes = Mapping[str, Value]
SpanKind = Literal["internal", "client", "server", "producer", "consumer"]
MetricKind = Literal["counter", "up_down_counter", "histogram", "gauge", "level"]

_NONE: Final[Attributes] = {}
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_REASON_LIMIT: Final = 300

M = TypeVar("M")


class OpenSpan(Protocol):
    """A span that a recorder has begun."""

    @property
    def traceparent(self) -> str:
        """The span as the parent of others."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        ...

    def end(self, error: str | None, kind: str | None, ago: float = 0.0) -> None:
        """Finish, `ago` seconds before now; with `error` and its `kind` when what it tells of failed."""
        ...


class Recorder(Protocol):
    """Where spans and measurements go."""

    def start_span(self, name: str, kind: SpanKind, parent: str | None, attributes: Attributes, ago: float) -> OpenSpan:
        """Begin a span, `ago` seconds before now, under a valid ``traceparent`` or as a trace of its own."""
        ...

    def measure(self, metric: Metric, value: float, attributes: Attributes) -> None:
        """Take one measurement: an amount for a counter, a value for anything else."""
        ...

    def forget(self, metric: Metric, attributes: Attributes) -> None:
        """Export a gauge's or level's value under these attributes no more."""
        ...


_recorder: Recorder | None = None
_here: ContextVar[str | None] = ContextVar("traceparent", default=None)


def install(recorder: Recorder | None) -> None:
    """Send everything to `recorder` from now on; none turns it off."""
    global _recorder
    _recorder = recorder


def enabled() -> bool:
    """Whether anybody listens: what costs something to measure is measured only then."""
    return _recorder is not None


# --------------------------------------------------------------------------------------------------------------- traces


class Span:
    """A piece of work. Begins when it is made; as a context it is the parent of what happens inside, and then ends.

    Without a recorder it only passes on the trace that it is part of.
    """

    __slots__ = ("_entered", "_open", "traceparent")

    def __init__(self, name: str, attributes: Attributes, parent: str | None, kind: SpanKind, ago: float) -> None:
        above = parent if parent is not None and _TRACEPARENT.fullmatch(parent) else _here.get()
        self._open = _recorder.start_span(name, kind, above, attributes, ago) if _recorder is not None else None
        self._entered: Token[str | None] | None = None
        self.traceparent: str | None = above if self._open is None else self._open.traceparent
        """This span as the parent of others, in this process or another."""

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        if self._open is not None:
            self._open.set(attributes)

    def end(self, error: BaseException | None = None) -> None:
        """Finish it, for one that is not used as a context."""
        if self._open is None:
            return
        opened, self._open = self._open, None
        if isinstance(error, Exception):
            opened.end(str(error)[:_REASON_LIMIT], type(error).__name__)
            return
        if error is not None:
            opened.set({"hypha.cancelled": True})
        opened.end(None, None)

    def __enter__(self) -> Span:
        self._entered = _here.set(self.traceparent)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._entered is not None:
            _here.reset(self._entered)
        self.end(error)


def span(
    name: str,
    attributes: Attributes = _NONE,
    *,
    parent: str | None = None,
    kind: SpanKind = "internal",
    ago: float = 0.0,
) -> Span:
    """Begin a span.

    Args:
        parent: ``traceparent`` of another process; by default, and if it is malformed, the span around this call.
        ago: seconds for which the work has been going on already.
    """
    return Span(name, attributes, parent, kind, ago)


def record(
    name: str, attributes: Attributes, *, parent: str | None, ago: float, seconds: float, error: str | None = None
) -> str | None:
    """Tell of work that is over already, done by somebody who has no recorder: an executor.

    Args:
        parent: ``traceparent`` of what it was part of; without a valid one nothing is recorded.
        ago: seconds since it began.
        seconds: for which it lasted.
        error: why it failed.

    Returns:
        It as the parent of others.
    """
    if parent is None or not _TRACEPARENT.fullmatch(parent) or _recorder is None:
        return parent
    opened = _recorder.start_span(name, "internal", parent, attributes, ago)
    opened.end(error and error[:_REASON_LIMIT], error and "executor", max(0.0, ago - seconds))
    return opened.traceparent


def same_trace(first: str | None, second: str | None) -> bool:
    """Whether two ``traceparent``s are well formed and of one trace."""
    both = [text for text in (first, second) if text is not None and _TRACEPARENT.fullmatch(text)]
    return len(both) == 2 and both[0].split("-")[1] == both[1].split("-")[1]


def current_traceparent() -> str | None:
    """The span around this call, for a message or an environment; none outside of any trace."""
    return _here.get()


@contextmanager
def attached(traceparent: str | None) -> Iterator[None]:
    """Do what happens inside as part of a trace that is known by its ``traceparent``; none: as part of no trace."""
    valid = traceparent if traceparent is not None and _TRACEPARENT.fullmatch(traceparent) else None
    token = _here.set(valid)
    try:
        yield
    finally:
        _here.reset(token)


def with_trace(message: M) -> M:
    """A message of the wire that names the span around this call, when it has a place for that and names none yet."""
    here = _here.get()
    if here is None or not isinstance(message, msgspec.Struct) or getattr(message, "traceparent", "") is not None:
        return message
    named: M = msgspec.structs.replace(message, traceparent=here)
    return named


def trace_of(message: object) -> str | None:
    """The span that a message of the wire names, if it is well formed."""
    named = getattr(message, "traceparent", None)
    return named if isinstance(named, str) and _TRACEPARENT.fullmatch(named) else None


def serving(name: str, message: object, attributes: Attributes = _NONE) -> AbstractContextManager[object]:
    """A span for what a peer's message asks for, when that names a span; otherwise the work is part of no trace.

    Not of the one around this call either: a task that serves a connection's streams is one of whatever had it dialled.
    """
    parent = trace_of(message)
    return attached(None) if parent is None else span(name, attributes, parent=parent, kind="server")


# -------------------------------------------------------------------------------------------------------------- metrics


@dataclass(frozen=True, slots=True)
class Metric:
    """What is measured. Made once, by the room that measures it."""

    name: str
    kind: MetricKind
    unit: str
    description: str


class Counter:
    """Grows only; rates follow from it."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self.metric = Metric(name, "counter", unit, description)

    def add(self, amount: float = 1, attributes: Attributes = _NONE) -> None:
        """Count."""
        if _recorder is not None:
            _recorder.measure(self.metric, amount, attributes)


class UpDownCounter(Counter):
    """Counts what comes and goes."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self.metric = Metric(name, "up_down_counter", unit, description)


class Histogram:
    """How values are distributed: durations above all."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self.metric = Metric(name, "histogram", unit, description)

    def record(self, value: float, attributes: Attributes = _NONE) -> None:
        """Take a value."""
        if _recorder is not None:
            _recorder.measure(self.metric, value, attributes)


class Gauge:
    """A value that is what it is until it is set again or forgotten, such as a share."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self.metric = Metric(name, "gauge", unit, description)

    def set(self, value: float, attributes: Attributes = _NONE) -> None:
        """It is `value` from now on."""
        if _recorder is not None:
            _recorder.measure(self.metric, value, attributes)

    def forget(self, attributes: Attributes = _NONE) -> None:
        """What it told of is gone."""
        if _recorder is not None:
            _recorder.forget(self.metric, attributes)


class Level(Gauge):
    """Like a gauge, of something that adds up over nodes and jobs, such as bytes in use."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self.metric = Metric(name, "level", unit, description)
