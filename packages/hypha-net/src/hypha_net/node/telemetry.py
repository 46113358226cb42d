"""Exports what `hypha_net.telemetry` is told to an OpenTelemetry collector, by OTLP over HTTP or gRPC.

The only importer of the SDK, and imported only when a collector is configured. The collector is never waited for: what
it does not take is dropped after the SDK's own bounds, an outage is told once, and the end takes `LAST_EXPORT` at most.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urlsplit, urlunsplit

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    set_span_in_context,
)

from hypha_net.node.config import NodeConfig, masked
from hypha_net.telemetry import Attributes, Metric, OpenSpan
from hypha_net.telemetry import SpanKind as KindName

_log = logging.getLogger(__name__)

LAST_EXPORT: Final = 2.0
"""Seconds that the end of a daemon waits for its last spans and metrics to be taken, at most."""
_SCOPE: Final = "hypha"
_KINDS: Final[Mapping[KindName, SpanKind]] = {
    "internal": SpanKind.INTERNAL,
    "client": SpanKind.CLIENT,
    "server": SpanKind.SERVER,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}


def without_user(url: str) -> tuple[str, dict[str, str]]:
    """A URL without its user and password, and the header that carries them: gRPC's would take them for a host."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url, {}
    user, _, host = parts.netloc.rpartition("@")
    token = base64.b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"authorization": f"Basic {token}"}


def signal_url(config: NodeConfig, signal: str) -> str:
    """Where a signal (``traces``, ``metrics``) is sent: over HTTP the configured endpoint is a base."""
    base, _ = without_user(config.telemetry_endpoint or "")
    return base if config.telemetry_protocol == "grpc" else f"{base.rstrip('/')}/v1/{signal}"


def make_sampler(config: NodeConfig) -> Sampler:
    """The configured sampler."""
    name = config.telemetry_sampler
    roots: dict[str, Sampler] = {
        "always_on": ALWAYS_ON,
        "always_off": ALWAYS_OFF,
        "traceidratio": TraceIdRatioBased(config.telemetry_sample_ratio),
    }
    root = roots[name.removeprefix("parentbased_")]
    return ParentBased(root) if name.startswith("parentbased_") else root


def _make_exporters(config: NodeConfig) -> tuple[SpanExporter, MetricExporter]:
    traces, metrics = signal_url(config, "traces"), signal_url(config, "metrics")
    headers = {**without_user(config.telemetry_endpoint or "")[1], **config.telemetry_headers}
    if config.telemetry_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans

        pairs = [(key.lower(), value) for key, value in headers.items()]  # gRPC takes lower-case names only
        return GrpcSpans(endpoint=traces, headers=pairs), GrpcMetrics(endpoint=metrics, headers=pairs)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans

    return HttpSpans(endpoint=traces, headers=headers), HttpMetrics(endpoint=metrics, headers=headers)


# ------------------------------------------------------------------------------------------------------------ exporting


class _Outage(logging.Handler):
    """Tells once that the collector is away, and once that it is back; takes the libraries' own words as the reason."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self._endpoint = endpoint
        self._away = False
        self._reason = ""
        self._closed = False
        self._guard = threading.Lock()

    def close(self) -> None:
        """Say no more: what still fails was left behind on purpose."""
        self._closed = True
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what a library of OpenTelemetry says, for when the export fails."""
        if record.name.startswith("opentelemetry.exporter"):
            self._reason = str(masked(record.getMessage()[:300]))
            self.told(took=False)  # the first attempt is known to have failed long before the last

    def told(self, *, took: bool) -> None:
        """How an export went."""
        with self._guard:
            before, self._away = self._away, not took
            if self._closed:
                return
        if not took and not before:
            reason = f": {self._reason}" if self._reason else ""
            _log.warning("telemetry: %s takes nothing, not told again until it does%s", self._endpoint, reason)
        elif took and before:
            _log.info("telemetry: %s takes what is exported again", self._endpoint)


class _Spans(SpanExporter):
    """An exporter of spans whose outages are told once."""

    def __init__(self, inner: SpanExporter, outage: _Outage) -> None:
        self._inner, self._outage = inner, outage

    def export(self, spans: Any) -> SpanExportResult:
        result = self._inner.export(spans)
        self._outage.told(took=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _Metrics(MetricExporter):
    """An exporter of metrics whose outages are told once."""

    def __init__(self, inner: MetricExporter, outage: _Outage) -> None:
        super().__init__(inner._preferred_temporality, inner._preferred_aggregation)
        self._inner, self._outage = inner, outage

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **more: Any) -> MetricExportResult:
        result = self._inner.export(metrics_data, timeout_millis, **more)
        self._outage.told(took=result is MetricExportResult.SUCCESS)
        return result

    def shutdown(self, timeout_millis: float = 30_000, **more: Any) -> None:
        self._inner.shutdown(timeout_millis, **more)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._inner.force_flush(timeout_millis)


# ------------------------------------------------------------------------------------------------------------ recording


@dataclass(slots=True)
class _OpenSpan:
    """A span of the SDK, as rooms see it."""

    span: Span

    @property
    def traceparent(self) -> str:
        context = self.span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def set(self, attributes: Attributes) -> None:
        self.span.set_attributes(attributes)

    def end(self, error: str | None, kind: str | None, ago: float = 0.0) -> None:
        if error is not None:
            self.span.set_status(StatusCode.ERROR, error)
            self.span.set_attribute("error.type", kind or "error")
        self.span.end(time.time_ns() - int(ago * 1e9) if ago else None)


def _above(traceparent: str | None) -> Context:
    """A context with a valid traceparent as the parent, or an empty one."""
    if traceparent is None:
        return Context()
    _, trace, span, flags = traceparent.split("-")
    parent = SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(parent), Context())


_Values = dict[frozenset[tuple[str, Any]], Observation]


class _Kept:
    """Current values, set by the program's thread and read by the exporter's: each change is a new dictionary."""

    def __init__(self) -> None:
        self.values: _Values = {}

    def set(self, value: float, attributes: Attributes) -> None:
        self.values = {**self.values, frozenset(attributes.items()): Observation(value, dict(attributes))}

    def forget(self, attributes: Attributes) -> None:
        key = frozenset(attributes.items())
        self.values = {other: value for other, value in self.values.items() if other != key}

    def read(self, _options: CallbackOptions) -> Iterable[Observation]:
        return list(self.values.values())


@dataclass(slots=True)
class SdkRecorder:
    """A `Recorder` that hands everything to the SDK."""

    tracer: Tracer
    meter: Meter
    _measures: dict[str, Callable[[float, Attributes], None]] = field(default_factory=dict)
    _kept: dict[str, _Kept] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def start_span(self, name: str, kind: KindName, parent: str | None, attributes: Attributes, ago: float) -> OpenSpan:
        """See `Recorder.start_span`."""
        began = time.time_ns() - int(ago * 1e9) if ago else None
        return _OpenSpan(
            self.tracer.start_span(
                name, _above(parent), kind=_KINDS[kind], attributes=dict(attributes), start_time=began
            )
        )

    def measure(self, metric: Metric, value: float, attributes: Attributes) -> None:
        """See `Recorder.measure`."""
        known = self._measures.get(metric.name)
        if known is None:
            with self._guard:
                known = self._measures.get(metric.name) or self._measures.setdefault(metric.name, self._make(metric))
        known(value, attributes)

    def forget(self, metric: Metric, attributes: Attributes) -> None:
        """See `Recorder.forget`."""
        if (kept := self._kept.get(metric.name)) is not None:
            kept.forget(attributes)

    def _make(self, metric: Metric) -> Callable[[float, Attributes], None]:
        words = (metric.name, metric.unit, metric.description)
        if metric.kind == "counter":
            return self.meter.create_counter(*words).add
        if metric.kind == "up_down_counter":
            return self.meter.create_up_down_counter(*words).add
        if metric.kind == "histogram":
            return self.meter.create_histogram(*words).record
        kept = self._kept[metric.name] = _Kept()
        observe: Callable[..., object] = (
            self.meter.create_observable_gauge
            if metric.kind == "gauge"
            else self.meter.create_observable_up_down_counter
        )
        observe(metric.name, [kept.read], metric.unit, metric.description)
        return kept.set


# ---------------------------------------------------------------------------------------------------------- life, death


@dataclass(slots=True)
class Export:
    """The SDK at work for one daemon."""

    recorder: SdkRecorder
    _spans: TracerProvider
    _metrics: MeterProvider
    _outage: _Outage
    _endpoint: str

    def close(self, timeout: float = LAST_EXPORT) -> None:
        """Send what is left and stop, within `timeout` seconds whatever the collector does."""
        deadline = time.monotonic() + timeout
        ends: tuple[Callable[[], None], ...] = (
            self._spans.shutdown,
            lambda: self._metrics.shutdown(timeout_millis=timeout * 1000),
        )
        # threads that may be left behind: a collector that hangs holds the SDK's own shutdown for longer
        threads = [threading.Thread(target=end, daemon=True, name="telemetry-end") for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            _log.info("telemetry: what %s did not take within %g s is lost", self._endpoint, timeout)
        self._outage.close()
        _set_library_logs(None)


def open_export(config: NodeConfig, *, service: str, version: str, instance: str) -> Export:
    """Begin to export to the configured collector; nothing is sent or waited for yet.

    Args:
        service: ``service.name`` unless the configuration says another.
        instance: ``service.instance.id`` unless the configuration says another: the node's peer id.
    """
    endpoint = str(masked(config.telemetry_endpoint or ""))  # it may hold a password
    outage = _Outage(endpoint)
    _set_library_logs(outage)
    own = {"service.name": service, "service.version": version, "service.instance.id": instance}
    resource = Resource.create({**own, **config.telemetry_attributes})
    span_exporter, metric_exporter = _make_exporters(config)
    metrics = MeterProvider(
        [PeriodicExportingMetricReader(_Metrics(metric_exporter, outage))], resource, shutdown_on_exit=False
    )
    spans = TracerProvider(make_sampler(config), resource, shutdown_on_exit=False)
    spans.add_span_processor(BatchSpanProcessor(_Spans(span_exporter, outage)))
    recorder = SdkRecorder(spans.get_tracer(_SCOPE, version), metrics.get_meter(_SCOPE, version))
    return Export(recorder, spans, metrics, outage, endpoint)


def _set_library_logs(handler: logging.Handler | None) -> None:
    """Let OpenTelemetry's libraries talk to `handler` only, which tells an outage once; none: to nobody."""
    for name in ("opentelemetry", "grpc"):
        logger = logging.getLogger(name)
        logger.handlers = [handler or logging.NullHandler()]
        logger.propagate = False


def preload(config: NodeConfig) -> None:
    """Import what the configured protocol needs, which takes most of a second, before the event loop runs."""
    if config.telemetry_protocol == "grpc":
        import opentelemetry.exporter.otlp.proto.grpc.metric_exporter
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
    else:
        import opentelemetry.exporter.otlp.proto.http.metric_exporter
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
