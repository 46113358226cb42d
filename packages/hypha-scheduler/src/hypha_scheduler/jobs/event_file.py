"""Event file: what happens in a job, as JSON lines in ``metrics.jsonl`` and in the log. Called by `events`.

Secret parts of URLs are hidden.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from hypha_net.redaction import redact_urls
from hypha_scheduler.jobs.json_lines import JsonLinesFile, cut_last_line

_log = logging.getLogger(__name__)

EVENTS: Final = "metrics.jsonl"
"""Name of the event file in a job's directory."""
_MAX_TEXT: Final = 300
_DEBUG_EVENTS: Final = frozenset({"metric", "task_started"})


class EventFile:
    """Appends events to a file as JSON lines; each line is written at once."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending; a last line that a crash has cut short is removed."""
        self._file = JsonLinesFile(path)
        cut_last_line(self._file.fileno())

    def __enter__(self) -> EventFile:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    def write(self, event: str, at: float | None = None, /, **fields: object) -> None:
        """Write an event with its time, by default now, and log it; numbers that are not finite become null.

        Raises:
            OSError: it could not be written; the file ends with the event before.
        """
        line = {"event": event, "time": at or round(time.time(), 3)} | {
            key: _plain(value) for key, value in fields.items()
        }
        self._file.append(line)
        level = logging.DEBUG if event in _DEBUG_EVENTS else logging.INFO
        _log.log(level, "%s", _readable(event, fields), extra={"event": event, "fields": line})


def _readable(event: str, fields: Mapping[str, object]) -> str:
    """Format an event's scalar fields as a log line."""
    short = [f"{key}={_short(value)}" for key, value in fields.items() if isinstance(value, int | float | str)]
    return " ".join([event, *short])


def _short(value: int | float | str) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return redact_urls(str(value)).partition("\n")[0][:_MAX_TEXT]


def _plain(value: object) -> object:
    if isinstance(value, str):
        return redact_urls(value)  # workers' reasons
    return None if isinstance(value, float) and not math.isfinite(value) else value
