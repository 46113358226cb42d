"""Spans, metrics and trace contexts with the API of OpenTelemetry, which does nothing until `node.telemetry` exports.

The trace context travels as a W3C ``traceparent`` (https://www.w3.org/TR/trace-context/): `rpc`, `pubsub` and
`transfer` add it to messages and continue the trace on the other side, also where nothing is exported.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Final, TypeVar

import msgspec
from opentelemetry import context, trace
from opentelemetry.metrics import CallbackOptions, Meter, NoOpMeter, Observation
from opentelemetry.trace import NoOpTracer, SpanContext, StatusCode, Tracer
from opentelemetry.trace import Span as Span
from opentelemetry.trace import SpanKind as SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from hypha_net.redaction import redact_urls
from hypha_proto.texts import shorten

Value = str | int | float | bool
Attributes = Mapping[str, Value]

_TRACE_CONTEXT: Final = TraceContextTextMapPropagator()
_NONE: Final[Attributes] = {}
_TRACEPARENT_LIMIT: Final = 128
_REASON_LIMIT: Final = 300

M = TypeVar("M")


_tracer: Tracer = NoOpTracer()
_meter: Meter = NoOpMeter("hypha")


def install(tracer: Tracer | None = None, meter: Meter | None = None) -> None:
    """Trace and measure with an SDK from now on, or not at all.

    OpenTelemetry's global providers are not used: with them libraries such as FastAPI would export spans of their own,
    with secret parts of URLs.
    """
    global _tracer, _meter
    _tracer, _meter = tracer or NoOpTracer(), meter or NoOpMeter("hypha")
    for instrument in _instruments:
        instrument.bind(_meter)


def enabled() -> bool:
    """Return whether anything is exported; expensive measurements depend on it."""
    return not isinstance(_tracer, NoOpTracer)


# --------------------------------------------------------------------------------------------------------------- traces


def _with_parent(traceparent: str | None, outer: context.Context) -> context.Context:
    """Return `outer` with the span of a ``traceparent`` as its current one; unchanged if that is None or malformed."""
    if traceparent is None:
        return outer
    return _TRACE_CONTEXT.extract({"traceparent": traceparent[:_TRACEPARENT_LIMIT]}, outer)


def _parse(traceparent: str | None) -> SpanContext:
    """Return the span that a ``traceparent`` names; an invalid one for None and for a malformed one."""
    return trace.get_current_span(_with_parent(traceparent, context.Context())).get_span_context()


def start_span(
    name: str,
    attributes: Attributes = _NONE,
    *,
    parent: str | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    ago: float = 0.0,
) -> Span:
    """Start a span that is not current; see `span` for the arguments."""
    began = time.time_ns() - int(ago * 1e9) if ago else None
    return _tracer.start_span(name, _with_parent(parent, context.get_current()), kind, attributes, start_time=began)


def end_span(span: Span, error: BaseException | None = None) -> None:
    """End a span, with the reason if its operation failed or was cancelled."""
    if isinstance(error, Exception):
        _set_failed(span, str(error), type(error).__name__)
    elif error is not None:
        span.set_attribute("hypha.cancelled", True)
    span.end()


def _set_failed(span: Span, reason: str, kind: str) -> None:
    span.set_status(StatusCode.ERROR, shorten(redact_urls(reason), _REASON_LIMIT))
    span.set_attribute("error.type", kind)


@contextmanager
def current(span: Span) -> Iterator[Span]:
    """Make a span the parent of spans inside, and end it on exit."""
    try:
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield span
    except BaseException as error:
        end_span(span, error)
        raise
    end_span(span)


def span(
    name: str,
    attributes: Attributes = _NONE,
    *,
    parent: str | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    ago: float = 0.0,
) -> AbstractContextManager[Span]:
    """Start a span: the parent of spans inside, ended on exit.

    Args:
        parent: ``traceparent`` of another process; by default, and if it is malformed, the span around this call.
        ago: seconds since the operation began.
    """
    return current(start_span(name, attributes, parent=parent, kind=kind, ago=ago))


def record(
    name: str, attributes: Attributes, *, parent: str | None, ago: float, seconds: float, error: str | None = None
) -> str | None:
    """Record a span for work that has ended, on behalf of a process without OpenTelemetry: an executor.

    Args:
        parent: ``traceparent`` of the parent.
        ago: seconds since the work began.
        seconds: its duration.
        error: why it failed.

    Returns:
        The ``traceparent`` for child spans.
    """
    span = start_span(name, attributes, parent=parent, ago=ago)
    if error is not None:
        _set_failed(span, error, "executor")
    span.end(time.time_ns() - int(max(0.0, ago - seconds) * 1e9))
    return traceparent_of(span)


def traceparent_of(span: Span) -> str | None:
    """Return the ``traceparent`` of a span, for its child spans in other processes; None outside of a trace."""
    carrier: dict[str, str] = {}
    _TRACE_CONTEXT.inject(carrier, trace.set_span_in_context(span))
    return carrier.get("traceparent")


def current_traceparent() -> str | None:
    """Return the ``traceparent`` of the current span, for a message or an environment; None outside of a trace."""
    return traceparent_of(trace.get_current_span())


def same_trace(first: str | None, second: str | None) -> bool:
    """Return whether two ``traceparent`` values are well formed and belong to one trace."""
    one, other = _parse(first), _parse(second)
    return one.is_valid and one.trace_id == other.trace_id


@contextmanager
def attached(traceparent: str | None) -> Iterator[None]:
    """Run the body as part of the trace of a ``traceparent``, or of no trace if that is None or malformed."""
    token = context.attach(_with_parent(traceparent, context.Context()))
    try:
        yield
    finally:
        context.detach(token)


def with_trace(message: M) -> M:
    """Return a message with the current ``traceparent``, if it has such a field and it is empty."""
    here = current_traceparent()
    if here is None or not isinstance(message, msgspec.Struct) or getattr(message, "traceparent", "") is not None:
        return message
    named: M = msgspec.structs.replace(message, traceparent=here)
    return named


def trace_of(message: object) -> str | None:
    """Return the ``traceparent`` of a message, if it has a well-formed one."""
    named = getattr(message, "traceparent", None)
    return named if isinstance(named, str) and _parse(named).is_valid else None


def serving(name: str, message: object, attributes: Attributes = _NONE) -> AbstractContextManager[object]:
    """Return a context for serving a peer's message: a span in the trace of the message, or no trace if it has none.

    The current trace is not continued: the task that serves a connection belongs to the trace that caused the dial.
    """
    parent = trace_of(message)
    return attached(None) if parent is None else span(name, attributes, parent=parent, kind=SpanKind.SERVER)


# -------------------------------------------------------------------------------------------------------------- metrics


_instruments: list[_Instrument] = []


class _Instrument:
    """A metric; made once, by the module that measures it, and bound to another meter by `install`."""

    _create: ClassVar[str]
    """Method of a meter that makes what it is bound to."""

    def __init__(self, name: str, unit: str, description: str) -> None:
        self._about = (name, unit, description)
        _instruments.append(self)
        self.bind(_meter)

    def bind(self, meter: Meter) -> None:
        """Measure with an instrument of `meter` from now on."""
        self._bound: Any = getattr(meter, self._create)(*self._about)


class Counter(_Instrument):
    """A monotonic counter."""

    _create = "create_counter"

    def add(self, amount: float = 1, attributes: Attributes = _NONE) -> None:
        """Add to the counter."""
        self._bound.add(amount, attributes)


class UpDownCounter(Counter):
    """A counter that can decrease."""

    _create = "create_up_down_counter"


class Histogram(_Instrument):
    """A distribution of values, such as durations."""

    _create = "create_histogram"

    def record(self, value: float, attributes: Attributes = _NONE) -> None:
        """Record a value."""
        self._bound.record(value, attributes)


class Gauge(_Instrument):
    """A value that stays until it is set again or forgotten, such as a share.

    Observed, because the synchronous gauge of OpenTelemetry cannot forget the values of a job that has ended.
    """

    _create = "create_observable_gauge"

    def bind(self, meter: Meter) -> None:
        """Begin without values."""
        self._values: dict[frozenset[tuple[str, Value]], Observation] = {}
        name, unit, description = self._about
        getattr(meter, self._create)(name, [self._observe], unit, description)

    def _observe(self, _options: CallbackOptions) -> Iterable[Observation]:
        """Return the values, in the exporter's thread: each change is a new dictionary."""
        return self._values.values()

    def set(self, value: float, attributes: Attributes = _NONE) -> None:
        """Set the value."""
        self._values = {**self._values, frozenset(attributes.items()): Observation(value, attributes)}

    def forget(self, attributes: Attributes = _NONE) -> None:
        """Stop exporting the value."""
        key = frozenset(attributes.items())
        self._values = {other: value for other, value in self._values.items() if other != key}


class Level(Gauge):
    """A gauge whose values can be added up over nodes and jobs, such as bytes in use."""

    _create = "create_observable_up_down_counter"
