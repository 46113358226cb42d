"""Shared parts of the commands ``accounts`` of workers and schedulers: the option ``--since``, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION: Final = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])")


def parse_since(text: str, now: float) -> float:
    """Return a time in seconds since the epoch.

    Args:
        text: a duration before `now`, such as ``7d``; or a date or time by ISO 8601, local unless it names a zone.
        now: seconds since the epoch.

    Raises:
        ValueError: it is neither.
    """
    if match := _DURATION.fullmatch(text):
        return now - float(match[1]) * _UNITS[match[2]]
    try:
        return datetime.fromisoformat(text).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text[:40]!r} is no period: write a duration such as 30m, 12h, 7d or 4w, or a date such as 2026-12-31"
        ) from None


def time_text(seconds: float) -> str:
    """Return seconds since the epoch as UTC, by ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def render_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as an array of objects."""
    return json.dumps(rows) + "\n"


def render_csv(rows: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> str:
    """Return rows with these columns, after a line with their names."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
