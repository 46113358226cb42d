"""OpenTelemetry SDK of a daemon: exports the spans and metrics of `hypha_net.instrumentation` and the logs over OTLP.

Together with `exporters` and `log_exporter` the only importer of the SDK, itself imported by `lifecycle` only when a
collector is configured (`otlp_config`). Nothing waits for the collector: what it does not accept is dropped at the
limits of the SDK, an outage is logged once, and the end of the daemon takes at most `LAST_EXPORT` seconds longer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
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

from hypha_net.instrumentation import Attributes, Metric, OpenSpan
from hypha_net.instrumentation import SpanKind as KindName
from hypha_net.node.config.models import NodeConfig
from hypha_net.node.telemetry import exporters
from hypha_net.node.telemetry.exporters import (
    LibraryLogs,
    Outage,
    log_exporter,
    metric_exporter,
    set_library_logs,
    span_exporter,
)
from hypha_net.node.telemetry.log_exporter import LogExport
from hypha_net.node.telemetry.otlp_config import Target, targets

_log = logging.getLogger(__name__)

LAST_EXPORT: Final = 2.0
"""Longest time in seconds that the end of a daemon waits for the export of its last spans, metrics and logs."""
_SCOPE: Final = "hypha"
_KINDS: Final[Mapping[KindName, SpanKind]] = {
    "internal": SpanKind.INTERNAL,
    "client": SpanKind.CLIENT,
    "server": SpanKind.SERVER,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}


def make_sampler(config: NodeConfig) -> Sampler:
    """Return the configured sampler."""
    name = config.telemetry_sampler
    roots: dict[str, Sampler] = {
        "always_on": ALWAYS_ON,
        "always_off": ALWAYS_OFF,
        "traceidratio": TraceIdRatioBased(config.telemetry_sample_ratio),
    }
    root = roots[name.removeprefix("parentbased_")]
    return ParentBased(root) if name.startswith("parentbased_") else root


# ------------------------------------------------------------------------------------------------------------ recording


@dataclass(slots=True)
class _SdkSpan:
    """`OpenSpan` over a span of the SDK."""

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


def _parent_context(traceparent: str | None) -> Context:
    """Return a context with the traceparent as its parent span, or an empty one."""
    if traceparent is None:
        return Context()
    _, trace, span, flags = traceparent.split("-")
    parent = SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(parent), Context())


_Values = dict[frozenset[tuple[str, Any]], Observation]


class _Gauge:
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
    """`Recorder` that passes everything to the SDK."""

    tracer: Tracer
    meter: Meter
    _measures: dict[str, Callable[[float, Attributes], None]] = field(default_factory=dict)
    _gauges: dict[str, _Gauge] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def start_span(self, name: str, kind: KindName, parent: str | None, attributes: Attributes, ago: float) -> OpenSpan:
        """See `Recorder.start_span`."""
        began = time.time_ns() - int(ago * 1e9) if ago else None
        return _SdkSpan(
            self.tracer.start_span(
                name, _parent_context(parent), kind=_KINDS[kind], attributes=dict(attributes), start_time=began
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
        if (kept := self._gauges.get(metric.name)) is not None:
            kept.forget(attributes)

    def _make(self, metric: Metric) -> Callable[[float, Attributes], None]:
        words = (metric.name, metric.unit, metric.description)
        if metric.kind == "counter":
            return self.meter.create_counter(*words).add
        if metric.kind == "up_down_counter":
            return self.meter.create_up_down_counter(*words).add
        if metric.kind == "histogram":
            return self.meter.create_histogram(*words).record
        kept = self._gauges[metric.name] = _Gauge()
        observe: Callable[..., object] = (
            self.meter.create_observable_gauge
            if metric.kind == "gauge"
            else self.meter.create_observable_up_down_counter
        )
        observe(metric.name, [kept.read], metric.unit, metric.description)
        return kept.set


# ------------------------------------------------------------------------------------------------------------ lifecycle


@dataclass(slots=True)
class Export:
    """Running export of one daemon."""

    recorder: SdkRecorder
    _shutdowns: tuple[Callable[[], object], ...]
    _outages: Mapping[str, Outage]
    _logs: logging.Handler | None

    def close(self, timeout: float = LAST_EXPORT) -> None:
        """Export what is buffered and stop, within `timeout` seconds whatever the collector does."""
        deadline = time.monotonic() + timeout
        if self._logs is not None:
            logging.getLogger().removeHandler(self._logs)
        # threads that may be abandoned: with a collector that hangs the SDK's own shutdown takes longer
        threads = [threading.Thread(target=shutdown, daemon=True, name="telemetry-end") for shutdown in self._shutdowns]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            where = ", ".join(self._outages)
            _log.info("telemetry: what %s did not take within %g s is lost", where, timeout)
        for outage in self._outages.values():
            outage.close()
        set_library_logs(None)


def open_export(config: NodeConfig, *, service: str, version: str, instance: str) -> Export:
    """Start the configured export; nothing is sent or waited for yet.

    Args:
        service: ``service.name`` unless the configuration sets another.
        instance: ``service.instance.id`` unless the configuration sets another: the node's peer id.
    """
    set_library_logs(LibraryLogs(logging.WARNING))
    own = {"service.name": service, "service.version": version, "service.instance.id": instance}
    resource = Resource.create({**own, **config.telemetry_attributes})
    to = targets(config, os.environ)
    outages = {shown: Outage(shown) for shown in sorted({target.shown for target in to.values()})}
    spans = _tracer_provider(config, resource, to.get("traces"), outages)
    metrics = _meter_provider(resource, to.get("metrics"), outages)
    logs = _logger_provider(resource, to.get("logs"), outages)
    recorder = SdkRecorder(spans.get_tracer(_SCOPE, version), metrics.get_meter(_SCOPE, version))
    shutdowns = (spans.shutdown, lambda: metrics.shutdown(timeout_millis=LAST_EXPORT * 1000), logs.shutdown)
    handler = None
    if "logs" in to:
        handler = LogExport(logs)
        logging.getLogger().addHandler(handler)
    return Export(recorder, shutdowns, outages, handler)


def _tracer_provider(
    config: NodeConfig, resource: Resource, to: Target | None, outages: Mapping[str, Outage]
) -> TracerProvider:
    provider = TracerProvider(make_sampler(config), resource, shutdown_on_exit=False)
    if to is not None:
        provider.add_span_processor(BatchSpanProcessor(span_exporter(to, outages[to.shown])))
    return provider


def _meter_provider(resource: Resource, to: Target | None, outages: Mapping[str, Outage]) -> MeterProvider:
    readers = [] if to is None else [PeriodicExportingMetricReader(metric_exporter(to, outages[to.shown]))]
    return MeterProvider(readers, resource, shutdown_on_exit=False)


def _logger_provider(resource: Resource, to: Target | None, outages: Mapping[str, Outage]) -> LoggerProvider:
    provider = LoggerProvider(resource, shutdown_on_exit=False)
    if to is not None:
        provider.add_log_record_processor(BatchLogRecordProcessor(log_exporter(to, outages[to.shown])))
    return provider


def preload(config: NodeConfig) -> None:
    """Import the exporters of the configured protocols, before the event loop runs."""
    for protocol in sorted({target.protocol for target in targets(config, os.environ).values()}):
        exporters.preload(protocol)
