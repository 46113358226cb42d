"""Spans and metrics without OpenTelemetry: calls that cost almost nothing until a recorder is installed.

`node.telemetry.sdk` installs the recorder when a collector is configured; only that package imports the OpenTelemetry
SDK. The trace context travels as a W3C ``traceparent`` (https://www.w3.org/TR/trace-context/): `rpc`, `pubsub` and
`transfer` add it to messages and continue the trace on the other side. Called by every module that measures something.
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

from hypha_net.redaction import redact_urls

Value = str | int | float | bool
Attributes = Mapping[str, Value]
SpanKind = Literal["internal", "client", "server", "producer", "consumer"]
MetricKind = Literal["counter", "up_down_counter", "histogram", "gauge", "level"]

_NONE: Final[Attributes] = {}
_TRACEPARENT: Final = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_REASON_LIMIT: Final = 300

M = TypeVar("M")


class OpenSpan(Protocol):
    """A span that a recorder has started."""

    @property
    def traceparent(self) -> str:
        """The ``traceparent`` for child spans."""
        ...

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        ...

    def end(self, error: str | None, kind: str | None, ago: float = 0.0) -> None:
        """End the span, `ago` seconds before now; with `error` and its `kind` if the operation failed."""
        ...


class Recorder(Protocol):
    """Receives spans and measurements."""

    def start_span(self, name: str, kind: SpanKind, parent: str | None, attributes: Attributes, ago: float) -> OpenSpan:
        """Start a span, `ago` seconds before now, under a valid ``traceparent`` or as a new trace."""
        ...

    def measure(self, metric: Metric, value: float, attributes: Attributes) -> None:
        """Record one measurement: an amount for a counter, a value for any other metric."""
        ...

    def forget(self, metric: Metric, attributes: Attributes) -> None:
        """Stop exporting the value of a gauge or level with these attributes."""
        ...


_recorder: Recorder | None = None
_current: ContextVar[str | None] = ContextVar("traceparent", default=None)


def install(recorder: Recorder | None) -> None:
    """Send everything to `recorder` from now on; None turns recording off."""
    global _recorder
    _recorder = recorder


def enabled() -> bool:
    """Return whether a recorder is installed; expensive measurements depend on it."""
    return _recorder is not None


# --------------------------------------------------------------------------------------------------------------- traces


class Span:
    """A span; starts when it is made. As a context manager it is the parent of spans inside, and ends on exit.

    Without a recorder it only propagates the trace it is part of.
    """

    __slots__ = ("_entered", "_open", "traceparent")

    def __init__(self, name: str, attributes: Attributes, parent: str | None, kind: SpanKind, ago: float) -> None:
        outer = parent if parent is not None and _TRACEPARENT.fullmatch(parent) else _current.get()
        self._open = _recorder.start_span(name, kind, outer, attributes, ago) if _recorder is not None else None
        self._entered: Token[str | None] | None = None
        self.traceparent: str | None = outer if self._open is None else self._open.traceparent
        """The ``traceparent`` for child spans, in this process or another."""

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        if self._open is not None:
            self._open.set(attributes)

    def end(self, error: BaseException | None = None) -> None:
        """End a span that is not used as a context manager."""
        if self._open is None:
            return
        opened, self._open = self._open, None
        if isinstance(error, Exception):
            opened.end(redact_urls(str(error))[:_REASON_LIMIT], type(error).__name__)
            return
        if error is not None:
            opened.set({"hypha.cancelled": True})
        opened.end(None, None)

    def __enter__(self) -> Span:
        self._entered = _current.set(self.traceparent)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._entered is not None:
            _current.reset(self._entered)
        self.end(error)


def span(
    name: str,
    attributes: Attributes = _NONE,
    *,
    parent: str | None = None,
    kind: SpanKind = "internal",
    ago: float = 0.0,
) -> Span:
    """Start a span.

    Args:
        parent: ``traceparent`` of another process; by default, and if it is malformed, the span around this call.
        ago: seconds since the operation began.
    """
    return Span(name, attributes, parent, kind, ago)


def record(
    name: str, attributes: Attributes, *, parent: str | None, ago: float, seconds: float, error: str | None = None
) -> str | None:
    """Record a span for work that has ended, on behalf of a process without a recorder: an executor.

    Args:
        parent: ``traceparent`` of the parent; without a valid one nothing is recorded.
        ago: seconds since the work began.
        seconds: its duration.
        error: why it failed.

    Returns:
        The ``traceparent`` for child spans.
    """
    if parent is None or not _TRACEPARENT.fullmatch(parent) or _recorder is None:
        return parent
    opened = _recorder.start_span(name, "internal", parent, attributes, ago)
    opened.end(error and redact_urls(error)[:_REASON_LIMIT], error and "executor", max(0.0, ago - seconds))
    return opened.traceparent


def same_trace(first: str | None, second: str | None) -> bool:
    """Return whether two ``traceparent`` values are well formed and belong to one trace."""
    both = [text for text in (first, second) if text is not None and _TRACEPARENT.fullmatch(text)]
    return len(both) == 2 and both[0].split("-")[1] == both[1].split("-")[1]


def current_traceparent() -> str | None:
    """Return the ``traceparent`` of the current span, for a message or an environment; None outside of a trace."""
    return _current.get()


@contextmanager
def attached(traceparent: str | None) -> Iterator[None]:
    """Run the body as part of the trace of a ``traceparent``, or of no trace if that is None or malformed."""
    valid = traceparent if traceparent is not None and _TRACEPARENT.fullmatch(traceparent) else None
    token = _current.set(valid)
    try:
        yield
    finally:
        _current.reset(token)


def with_trace(message: M) -> M:
    """Return a message with the current ``traceparent``, if it has such a field and it is empty."""
    here = _current.get()
    if here is None or not isinstance(message, msgspec.Struct) or getattr(message, "traceparent", "") is not None:
        return message
    named: M = msgspec.structs.replace(message, traceparent=here)
    return named


def trace_of(message: object) -> str | None:
    """Return the ``traceparent`` of a message, if it has a well-formed one."""
    named = getattr(message, "traceparent", None)
    return named if isinstance(named, str) and _TRACEPARENT.fullmatch(named) else None


def serving(name: str, message: object, attributes: Attributes = _NONE) -> AbstractContextManager[object]:
    """Return a context for serving a peer's message: a span in the trace of the message, or no trace if it has none.

    The current trace is not continued: the task that serves a connection belongs to whatever caused the dial.
    """
    parent = trace_of(message)
    return attached(None) if parent is None else span(name, attributes, parent=parent, kind="server")


# -------------------------------------------------------------------------------------------------------------- metrics


@dataclass(frozen=True, slots=True)
class Metric:
    """Name and kind of a metric; made once, by the module that measures it."""

    name: str
    kind: MetricKind
    unit: str
    description: str


class Counter:
    """A monotonic counter."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self.metric = Metric(name, "counter", unit, description)

    def add(self, amount: float = 1, attributes: Attributes = _NONE) -> None:
        """Add to the counter."""
        if _recorder is not None:
            _recorder.measure(self.metric, amount, attributes)


class UpDownCounter(Counter):
    """A counter that can decrease."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self.metric = Metric(name, "up_down_counter", unit, description)


class Histogram:
    """A distribution of values, such as durations."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self.metric = Metric(name, "histogram", unit, description)

    def record(self, value: float, attributes: Attributes = _NONE) -> None:
        """Record a value."""
        if _recorder is not None:
            _recorder.measure(self.metric, value, attributes)


class Gauge:
    """A value that stays until it is set again or forgotten, such as a share."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self.metric = Metric(name, "gauge", unit, description)

    def set(self, value: float, attributes: Attributes = _NONE) -> None:
        """Set the value."""
        if _recorder is not None:
            _recorder.measure(self.metric, value, attributes)

    def forget(self, attributes: Attributes = _NONE) -> None:
        """Stop exporting the value."""
        if _recorder is not None:
            _recorder.forget(self.metric, attributes)


class Level(Gauge):
    """A gauge whose values can be added up over nodes and jobs, such as bytes in use."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self.metric = Metric(name, "level", unit, description)
