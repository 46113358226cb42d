"""Shared parts of the commands ``accounts`` of workers and schedulers: periods of ``--since``, and the output."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from hypha_proto.texts import quote

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
            f"{quote(text)} is no period: write a duration such as 30m, 12h, 7d or 4w, or a date such as 2026-12-31"
        ) from None


def time_text(seconds: float) -> str:
    """Return seconds since the epoch as UTC, by ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def render_accounts(
    rows: Sequence[Mapping[str, Any]], fields: Sequence[str], form: str, describe: Callable[[Mapping[str, Any]], str]
) -> str:
    """Return accounts as ``text``, ``json`` (an array of objects) or ``csv``.

    Args:
        rows: accounts, each with ``seconds`` and ``tokens``.
        fields: columns of the CSV.
        form: ``text``, ``json`` or ``csv``.
        describe: returns the line of an account in the text, which ends with the sums.
    """
    if form == "json":
        return json.dumps(rows) + "\n"
    if form == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()
    seconds, tokens = (sum(row[name] for row in rows) for name in ("seconds", "tokens"))
    sums = f"{len(rows)} leases, {seconds:.1f} s, {tokens:.4f} tokens"
    return "".join(f"{line}\n" for line in [*map(describe, rows), sums])
