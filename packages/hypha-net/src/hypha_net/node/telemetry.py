"""Export of a daemon's spans, metrics and logs with the SDK of OpenTelemetry (https://opentelemetry.io/docs/specs/otel/).

The only module that imports the SDK; imported only when `config.otlp` names a collector. Exporters run in threads of
the SDK, and nothing waits for them: data that a collector does not accept is dropped at the limits of the SDK, an
outage is logged once, and the end of the daemon takes at most `LAST_EXPORT` seconds longer.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Final

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased

from hypha_net import instrumentation
from hypha_net.node.config.models import NodeConfig, mask_secrets
from hypha_net.node.config.otlp import Signal, Target, targets
from hypha_net.node.logging_setup import LONGEST
from hypha_net.redaction import redact_urls
from hypha_proto.texts import shorten

_log = logging.getLogger(__name__)

LAST_EXPORT: Final = 2.0
"""Longest time in seconds that the end of a daemon waits for the export of its last spans, metrics and logs."""
_SCOPE: Final = "hypha"
_LIBRARIES: Final = ("opentelemetry", "grpc")
_NOT_EXPORTED: Final = (*_LIBRARIES, "urllib3", "requests", __name__)
"""Loggers of the code that exports: each export would cause further records."""
_EXPORTERS: Final[Mapping[Signal, str]] = {
    "traces": "trace_exporter:OTLPSpanExporter",
    "metrics": "metric_exporter:OTLPMetricExporter",
    "logs": "_log_exporter:OTLPLogExporter",
}


# -------------------------------------------------------------------------------------------------------------- outages


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


_exporting: ContextVar[tuple[Outage, Signal] | None] = ContextVar("exporting", default=None)
"""The export that runs in this thread, to which log records of its libraries belong."""


class _LibraryLogs(logging.Handler):
    """Takes the reason of an outage from what the libraries log during an export."""

    def emit(self, record: logging.LogRecord) -> None:
        """Record the failure at once: the first attempt fails long before the last."""
        if (running := _exporting.get()) is not None and record.name.startswith("opentelemetry.exporter"):
            outage, signal = running
            outage.record(signal, success=False, reason=str(mask_secrets(record.getMessage())))


def _set_library_logs(handler: logging.Handler) -> None:
    """Send the log records of the libraries to `handler` only."""
    for name in _LIBRARIES:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False


def _exporter_class(signal: Signal, target: Target) -> Any:
    """Import the exporter of a signal and protocol, which takes most of a second the first time."""
    protocol = "grpc" if target.protocol == "grpc" else "http"
    return resolve_name(f"opentelemetry.exporter.otlp.proto.{protocol}.{_EXPORTERS[signal]}")


def _make_exporter(signal: Signal, target: Target, outage: Outage) -> Any:
    """Return an exporter that records each result with `outage`."""
    lower = target.protocol == "grpc"  # which accepts lower-case names only
    headers = {name.lower() if lower else name: value for name, value in target.headers.items()}
    exporter = _exporter_class(signal, target)(endpoint=target.url, headers=headers)
    send = exporter.export

    def export(*args: Any, **kwargs: Any) -> Any:
        token = _exporting.set((outage, signal))
        try:
            result = send(*args, **kwargs)
        finally:
            _exporting.reset(token)
        outage.record(signal, success=result.name == "SUCCESS")
        return result

    exporter.export = export
    return exporter


# ----------------------------------------------------------------------------------------------------------------- logs


class _LogExport(logging.Handler):
    """Passes every log record to a provider of the SDK, which keeps it in a bounded queue."""

    def __init__(self, provider: LoggerProvider) -> None:
        super().__init__()
        self._provider = provider

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        if record.name.startswith(_NOT_EXPORTED):
            return
        try:
            self._provider.get_logger(record.name).emit(_convert(record))
        except Exception:  # noqa: BLE001 - as in every handler: logging reports it on stderr, never to the caller
            self.handleError(record)


def _convert(record: logging.LogRecord) -> LogRecord:
    """Return a record of OpenTelemetry, which takes the current span, so that a collector shows it in its trace."""
    severity = SeverityNumber(4 * min(max(record.levelno // 10, 1), 5) + 1)  # from DEBUG, 5, to FATAL, 21
    about: dict[str, str | int] = {"code.function.name": record.funcName, "code.line.number": record.lineno}
    if record.exc_info and record.exc_info[0] is not None:
        about["exception.type"] = record.exc_info[0].__name__
        about["exception.message"] = _clean(str(record.exc_info[1]))
        about["exception.stacktrace"] = _clean(logging.Formatter().formatException(record.exc_info))
    return LogRecord(
        timestamp=int(record.created * 1e9),
        severity_number=severity,
        severity_text=severity.name,
        body=_clean(record.getMessage()),
        attributes=about,
    )


def _clean(text: str) -> str:
    """Return bounded text without secret parts of URLs that protobuf can encode: without lone surrogates."""
    return shorten(redact_urls(text), LONGEST).encode(errors="replace").decode()


# ------------------------------------------------------------------------------------------------------------ lifecycle


@dataclass(slots=True)
class Export:
    """Running export of one daemon."""

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
        _set_library_logs(logging.NullHandler())
        instrumentation.install()


def open_export(config: NodeConfig, *, service: str, version: str, instance: str) -> Export:
    """Start the configured export, and install it; nothing is sent or waited for yet.

    Args:
        service: ``service.name`` unless the configuration sets another.
        instance: ``service.instance.id`` unless the configuration sets another: the node's peer id.
    """
    _set_library_logs(_LibraryLogs(logging.WARNING))
    own = {"service.name": service, "service.version": version, "service.instance.id": instance}
    resource = Resource.create({**own, **config.telemetry_attributes})
    to = targets(config, os.environ)
    outages = {shown: Outage(shown) for shown in sorted({target.shown for target in to.values()})}
    exporters = {signal: _make_exporter(signal, target, outages[target.shown]) for signal, target in to.items()}
    tracers = TracerProvider(make_sampler(config), resource, shutdown_on_exit=False)
    readers = [PeriodicExportingMetricReader(exporters["metrics"])] if "metrics" in exporters else []
    meters = MeterProvider(readers, resource, shutdown_on_exit=False)
    loggers = LoggerProvider(resource, shutdown_on_exit=False)
    handler = None
    if "traces" in exporters:
        tracers.add_span_processor(BatchSpanProcessor(exporters["traces"]))
    if "logs" in exporters:
        loggers.add_log_record_processor(BatchLogRecordProcessor(exporters["logs"]))
        handler = _LogExport(loggers)
        logging.getLogger().addHandler(handler)
    instrumentation.install(tracers.get_tracer(_SCOPE, version), meters.get_meter(_SCOPE, version))
    shutdowns = (tracers.shutdown, lambda: meters.shutdown(timeout_millis=LAST_EXPORT * 1000), loggers.shutdown)
    return Export(shutdowns, outages, handler)


def make_sampler(config: NodeConfig) -> Sampler:
    """Return the configured sampler."""
    name = config.telemetry_sampler
    fixed = {"always_on": 1.0, "always_off": 0.0}
    root = TraceIdRatioBased(fixed.get(name.removeprefix("parentbased_"), config.telemetry_sample_ratio))
    return ParentBased(root) if name.startswith("parentbased_") else root


def preload(config: NodeConfig) -> None:
    """Import the exporters before the event loop runs."""
    for signal, target in targets(config, os.environ).items():
        _exporter_class(signal, target)
