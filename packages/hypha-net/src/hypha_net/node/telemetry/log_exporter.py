"""Export of a daemon's log records to OpenTelemetry, beside the lines that `logging_setup` writes. Imports the SDK.

A record carries the span that it was logged in, so a collector shows it within its trace. Records of the exporters and
their libraries are not exported: each export would cause further records.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from opentelemetry._logs import LoggerProvider, LogRecord, SeverityNumber
from opentelemetry.trace import TraceFlags

from hypha_net import instrumentation
from hypha_net.redaction import redact_urls

_TEXT_LIMIT: Final = 16_384
"""Characters of one message, or of one traceback."""
_OWN: Final = ("opentelemetry", "grpc", "urllib3", "requests", "hypha_net.node.telemetry")
"""Loggers of the code that exports."""
_SEVERITIES: Final = (
    (logging.CRITICAL, SeverityNumber.FATAL, "FATAL"),
    (logging.ERROR, SeverityNumber.ERROR, "ERROR"),
    (logging.WARNING, SeverityNumber.WARN, "WARN"),
    (logging.INFO, SeverityNumber.INFO, "INFO"),
    (logging.NOTSET, SeverityNumber.DEBUG, "DEBUG"),
)


class LogExport(logging.Handler):
    """Passes every log record to a provider of the SDK, which keeps it in a bounded queue."""

    def __init__(self, provider: LoggerProvider) -> None:
        super().__init__()
        self._provider = provider

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        if record.name.startswith(_OWN):
            return
        try:
            self._provider.get_logger(record.name).emit(_convert(record))
        except Exception:  # noqa: BLE001 - as in every handler: logging reports it on stderr, never to the caller
            self.handleError(record)


def _convert(record: logging.LogRecord) -> LogRecord:
    number, text = next((number, text) for least, number, text in _SEVERITIES if record.levelno >= least)
    made = LogRecord(
        timestamp=int(record.created * 1e9),
        observed_timestamp=time.time_ns(),
        severity_number=number,
        severity_text=text,
        body=_clean(record.getMessage()),
        attributes=_attributes(record),
    )
    if (here := instrumentation.current_traceparent()) is not None:
        _, trace, span, flags = here.split("-")
        made.trace_id, made.span_id, made.trace_flags = int(trace, 16), int(span, 16), TraceFlags(int(flags, 16))
    return made


def _attributes(record: logging.LogRecord) -> dict[str, str | int]:
    about: dict[str, str | int] = {"code.function.name": record.funcName, "code.line.number": record.lineno}
    if record.exc_info and record.exc_info[0] is not None:
        about["exception.type"] = record.exc_info[0].__name__
        about["exception.message"] = _clean(str(record.exc_info[1]))
        about["exception.stacktrace"] = _clean(logging.Formatter().formatException(record.exc_info))
    return about


def _clean(text: str) -> str:
    """Return bounded text without secret parts of URLs that protobuf can encode: without lone surrogates."""
    return redact_urls(text)[:_TEXT_LIMIT].encode(errors="replace").decode()
