"""Silence: how long a worker that computes may report nothing, from its own last reports. Pure.

Strategies measure the intervals between the reports of each worker, and so need no assumption on how fast it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

MARGIN: Final = 2.0
"""Seconds of silence that are never suspicious."""
INTERVALS: Final = 3.0
"""How many times as long as usual a worker may be silent, beyond `MARGIN`."""
PATIENCE: Final = 2.0
"""How many times as long as a suspicious silence is waited for a worker that alone is missing."""
SLOW_RATE: Final = 1e6
"""Rate in bytes per second that every worker's link is assumed to have: 8 Mbit/s."""
_RECENT: Final = 8
"""Number of last durations that count."""


def recent() -> deque[float]:
    """Return where the last durations of one kind are kept."""
    return deque(maxlen=_RECENT)


def suspicious_after(seconds: float) -> float:
    """Return after how many seconds a worker that usually reports after `seconds` is suspected."""
    return MARGIN + INTERVALS * seconds


def low_median(values: Collection[float]) -> float:
    """Return the median; the lower one of the two in the middle of an even number."""
    return sorted(values)[(len(values) - 1) // 2]
