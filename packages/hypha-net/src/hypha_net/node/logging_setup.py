"""Logging of a daemon: text lines or JSON on stderr, without secret parts of URLs; stdout is reserved for data.

Peers are named by `peer_names`; JSON has their ids, too.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

from hypha_net.peer_names import find_peer_ids, name_peers
from hypha_net.redaction import redact_urls
from hypha_proto.texts import shorten

LogFormat = Literal["text", "json"]

LEVELS: Final = ("debug", "info", "warning", "error")
_WARNINGS_ONLY: Final = ("libp2p", "trio", "uvicorn", "asyncio", "multiaddr", "async_service", "httpx", "httpx2")
"""Libraries of which only warnings are logged; HTTP clients would log URLs, which may contain signatures."""
FLOOD: Final = 500
"""Records from one source line within `FLOOD_SECONDS`; further ones are dropped, except debug records."""
FLOOD_SECONDS: Final = 60.0
LONGEST: Final = 8192
"""Characters of a record's text, or of an exported one or its traceback: what a peer sends may be longer."""
_LISTENERS: Final = "trio.serve_listeners"
"""Logger of trio's listeners, which retry ten times a second to accept a connection while no file can be opened."""
_CONTROL: Final = {
    code: "\n  " if code == 10 else f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code != 9
} | {0x2028: "\\u2028", 0x2029: "\\u2029"}


def configure_logs(form: LogFormat = "text", level: str = "info", stream: TextIO | None = None) -> None:
    """Send every log record to `stream` (stderr); replaces what was configured before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    handler.addFilter(_FloodFilter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _WARNINGS_ONLY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


class _FloodFilter(logging.Filter):
    """Limits the records per source line and minute, since a peer can cause thousands a second.

    Records with the extra attribute `unlimited`, which marks a job's own output, always pass. Of the records of
    listeners that cannot accept connections one passes, without its traceback.
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
        # by source line: the text may be chosen by a peer
        kind = (record.pathname, record.lineno)
        self._counts[kind] += 1
        if record.name == _LISTENERS:
            record.msg, record.args = f"connections wait for others to end: {record.getMessage()}", None
            record.exc_info = record.exc_text = None
            return self._counts[kind] == 1
        if self._counts[kind] == FLOOD:
            record.msg, record.args = f"{record.getMessage()} (no more of these for up to {FLOOD_SECONDS:g} s)", None
        return self._counts[kind] <= FLOOD


def _escape(text: str) -> str:
    """Indent all lines but the first and escape other control characters, so that no text forges a record."""
    return text.translate(_CONTROL)


def _message(record: logging.LogRecord) -> str:
    """Return the text of a record without secret parts of URLs, its middle left out if it is long."""
    return shorten(redact_urls(record.getMessage()), LONGEST)


class _TextFormatter(logging.Formatter):
    """Text lines such as ``2026-01-01T12:00:00.000Z INFO hypha_worker.bidding.arbiter: …``."""

    def format(self, record: logging.LogRecord) -> str:
        text = f"{_time(record)} {record.levelname} {record.name}: {_escape(name_peers(_message(record)))}"
        exception = name_peers(redact_urls(self.formatException(record.exc_info))) if record.exc_info else ""
        return f"{text}\n  {_escape(exception)}" if exception else text


class _JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, and ids of peers and exception if there are any."""

    def format(self, record: logging.LogRecord) -> str:
        message = _message(record)
        entry: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": name_peers(message),
        }
        if peers := find_peer_ids(message):
            entry["peers"] = peers
        if record.exc_info:
            entry["exception"] = name_peers(redact_urls(self.formatException(record.exc_info)))
        return json.dumps(entry, ensure_ascii=False)
