"""OpenTelemetry exporters of each signal, with one log line per outage of a collector. Imports the SDK.

Called by `sdk` for the targets of `otlp_config`. Exporters run in threads of the SDK and are never waited for; what
their libraries log is used only as the reason in the log line of an outage.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExporter, LogRecordExportResult
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from hypha_net.node.config.models import mask_secrets
from hypha_net.node.config.otlp_variables import Signal
from hypha_net.node.telemetry.otlp_config import Target

_log = logging.getLogger(__name__)

_REASON_LIMIT: Final = 300
_LIBRARIES: Final = ("opentelemetry", "grpc")


class Outage:
    """Logs once that a collector is unavailable, and once that it is available again."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._failing: set[Signal] = set()
        self._closed = False
        self._guard = threading.Lock()

    def close(self) -> None:
        """Log nothing further: exports that still fail were abandoned on purpose."""
        self._closed = True

    def record(self, signal: Signal, *, success: bool, reason: str = "") -> None:
        """Record the result of an export."""
        with self._guard:
            before = bool(self._failing)
            (self._failing.discard if success else self._failing.add)(signal)
            now = bool(self._failing)
            if self._closed:
                return
        if now and not before:
            why = f": {reason}" if reason else ""
            _log.warning("telemetry: %s takes no %s, not told again until it does%s", self._endpoint, signal, why)
        elif before and not now:
            _log.info("telemetry: %s takes what is exported again", self._endpoint)


class _Exporting(threading.local):
    """Exporter that runs in this thread, for the log records of its libraries."""

    outage: Outage | None = None
    signal: Signal = "traces"


_exporting = _Exporting()


class LibraryLogs(logging.Handler):
    """Uses what OpenTelemetry's libraries log during an export as the reason of an outage."""

    def emit(self, record: logging.LogRecord) -> None:
        """Record the failure at once: the first attempt fails long before the last."""
        if _exporting.outage is not None and record.name.startswith("opentelemetry.exporter"):
            reason = str(mask_secrets(record.getMessage()[:_REASON_LIMIT]))
            _exporting.outage.record(_exporting.signal, success=False, reason=reason)


def set_library_logs(handler: logging.Handler | None) -> None:
    """Send the log records of OpenTelemetry's libraries to `handler` only; None discards them."""
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers = [handler or logging.NullHandler()]
        logger.propagate = False


@contextmanager
def _export(outage: Outage, signal: Signal) -> Iterator[None]:
    _exporting.outage, _exporting.signal = outage, signal
    try:
        yield
    finally:
        _exporting.outage = None


class Spans(SpanExporter):
    """Span exporter that logs each outage once."""

    def __init__(self, inner: SpanExporter, outage: Outage) -> None:
        self._inner, self._outage = inner, outage

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans."""
        with _export(self._outage, "traces"):
            result = self._inner.export(spans)
        self._outage.record("traces", success=result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        """Shut down the exporter."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Send what is buffered."""
        return self._inner.force_flush(timeout_millis)


class Metrics(MetricExporter):
    """Metric exporter that logs each outage once."""

    def __init__(self, inner: MetricExporter, outage: Outage) -> None:
        super().__init__(inner._preferred_temporality, inner._preferred_aggregation)
        self._inner, self._outage = inner, outage

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **more: Any) -> MetricExportResult:
        """Send metrics."""
        with _export(self._outage, "metrics"):
            result = self._inner.export(metrics_data, timeout_millis, **more)
        self._outage.record("metrics", success=result is MetricExportResult.SUCCESS)
        return result

    def shutdown(self, timeout_millis: float = 30_000, **more: Any) -> None:
        """Shut down the exporter."""
        self._inner.shutdown(timeout_millis, **more)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Send what is buffered."""
        return self._inner.force_flush(timeout_millis)


class Logs(LogRecordExporter):
    """Log exporter that logs each outage once."""

    def __init__(self, inner: LogRecordExporter, outage: Outage) -> None:
        self._inner, self._outage = inner, outage

    def export(self, batch: Sequence[ReadableLogRecord]) -> LogRecordExportResult:
        """Send log records."""
        with _export(self._outage, "logs"):
            result = self._inner.export(batch)
        self._outage.record("logs", success=result is LogRecordExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        """Shut down the exporter."""
        self._inner.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True: a log exporter buffers nothing."""
        return True


def span_exporter(target: Target, outage: Outage) -> Spans:
    """Return a span exporter for a target."""
    if target.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans

        return Spans(GrpcSpans(endpoint=target.url, headers=_pairs(target)), outage)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans

    return Spans(HttpSpans(endpoint=target.url, headers=dict(target.headers)), outage)


def metric_exporter(target: Target, outage: Outage) -> Metrics:
    """Return a metric exporter for a target."""
    if target.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics

        return Metrics(GrpcMetrics(endpoint=target.url, headers=_pairs(target)), outage)
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics

    return Metrics(HttpMetrics(endpoint=target.url, headers=dict(target.headers)), outage)


def log_exporter(target: Target, outage: Outage) -> Logs:
    """Return a log exporter for a target."""
    if target.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogs

        return Logs(GrpcLogs(endpoint=target.url, headers=_pairs(target)), outage)
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpLogs

    return Logs(HttpLogs(endpoint=target.url, headers=dict(target.headers)), outage)


def _pairs(target: Target) -> list[tuple[str, str]]:
    return [(key.lower(), value) for key, value in target.headers.items()]  # gRPC accepts lower-case names only


def preload(protocol: str) -> None:
    """Import the exporters of a protocol, which takes most of a second."""
    if protocol == "grpc":
        import opentelemetry.exporter.otlp.proto.grpc._log_exporter
        import opentelemetry.exporter.otlp.proto.grpc.metric_exporter
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
    else:
        import opentelemetry.exporter.otlp.proto.http._log_exporter
        import opentelemetry.exporter.otlp.proto.http.metric_exporter
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
