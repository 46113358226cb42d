"""Logs of a daemon: lines for people or JSON for machines, on stderr, so that stdout stays for data."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

LogFormat = Literal["text", "json"]

LEVELS: Final = ("debug", "info", "warning", "error")
_QUIET: Final = ("libp2p", "trio", "uvicorn", "asyncio", "multiaddr", "async_service")
"""Libraries that tell their own story; only their warnings are of interest."""


def configure_logs(form: LogFormat = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Send every log record to `stream` (stderr); replaces what was configured before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


class _Text(logging.Formatter):
    """``2026-01-01T12:00:00.000Z INFO hypha_worker.offers: …``"""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Json(logging.Formatter):
    """One object a line: time, level, logger, message, and exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)
