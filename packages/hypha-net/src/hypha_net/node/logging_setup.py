"""Logs of a daemon: lines for people or JSON for machines, on stderr, so that stdout stays for data."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

LogFormat = Literal["text", "json"]

LEVELS: Final = ("debug", "info", "warning", "error")
_QUIET: Final = ("libp2p", "trio", "uvicorn", "asyncio", "multiaddr", "async_service")
"""Libraries that tell their own story; only their warnings are of interest."""
FLOOD: Final = 500
"""Records of one place in the source within `FLOOD_SECONDS`; further ones are dropped, those for debugging aside."""
FLOOD_SECONDS: Final = 60.0
_CONTROL: Final = {
    code: "\n  " if code == 10 else f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9
} | {0x2028: "\\u2028", 0x2029: "\\u2029"}


def configure_logs(form: LogFormat = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Send every log record to `stream` (stderr); replaces what was configured before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    handler.addFilter(_Flood())
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


class _Flood(logging.Filter):
    """Lets so many records of one kind a minute through: a peer can cause thousands a second.

    Those with the extra attribute `unlimited` all pass: a job's own output.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began = 0.0
        self._counts: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter.filter`."""
        if record.levelno < logging.INFO or getattr(record, "unlimited", False):
            return True
        if not 0 <= record.created - self._began < FLOOD_SECONDS:
            self._began = record.created
            self._counts.clear()
        # by its place in the source: what a message says may be a peer's
        kind = (record.pathname, record.lineno)
        self._counts[kind] += 1
        if self._counts[kind] == FLOOD:
            record.msg, record.args = f"{record.getMessage()} (no more of these for up to {FLOOD_SECONDS:g} s)", None
        return self._counts[kind] <= FLOOD


def _harmless(text: str) -> str:
    """Lines after the first are indented, and other control characters written out: a peer's text forges no record."""
    return text.translate(_CONTROL)


class _Text(logging.Formatter):
    """``2026-01-01T12:00:00.000Z INFO hypha_worker.bidding.arbiter: …``"""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname} {record.name}: {_harmless(record.getMessage())}"
        return f"{text}\n  {_harmless(self.formatException(record.exc_info))}" if record.exc_info else text


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
