"""What has been computed so far, and the strategy's part of ``result.json``. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import TrafficCounts
from hypha_scheduler.strategies.inference.part_check import ErrorKind
from hypha_scheduler.strategies.inference.parts import PartRecord


@dataclass(slots=True)
class Tally:
    """Counts of one job; rates are of the present run only."""

    began: float
    """Time of the first lease of this run."""
    rows: int = 0
    errors: int = 0
    error_kinds: dict[str, ErrorKind] = field(default_factory=dict)
    """Errors by their kind."""
    tokens: int = 0
    dropped: int = 0
    """Parts that came late or twice."""
    refused: int = 0
    """Parts that were invalid."""
    rows_of: Counter[PeerId] = field(default_factory=Counter)
    """Committed rows by worker."""
    parts_of: Counter[PeerId] = field(default_factory=Counter)
    _first: float | None = None
    """Time of the first part of this run."""
    _last: float = 0.0
    """Time of the last part of this run."""
    _later_rows: int = 0
    """Rows of this run after its first part."""
    _later_tokens: int = 0

    def restore(self, part: PartRecord) -> None:
        """Count a part of an earlier run."""
        self.rows += part.rows
        self.errors += part.errors
        self.tokens += part.tokens
        for name, kind in part.error_kinds.items():
            known = self.error_kinds.get(name)
            self.error_kinds[name] = kind if known is None else known.with_rows(kind.rows)
        self.rows_of[part.worker] += part.rows
        self.parts_of[part.worker] += 1

    def commit(self, part: PartRecord, now: float) -> None:
        """Count a part that was committed now."""
        self.restore(part)
        self._last = now
        if self._first is None:
            self._first = now
        else:
            self._later_rows += part.rows
            self._later_tokens += part.tokens

    @property
    def is_one_error(self) -> bool:
        """Whether every row is an error, and all are of one kind."""
        return [kind.rows for kind in self.error_kinds.values()] == [self.rows]

    def describe_most_frequent_error(self) -> str:
        """Return the most frequent kind of error, how many rows have it, and what the first of them says."""
        if not self.error_kinds:
            return "the results say why"
        name, kind = max(self.error_kinds.items(), key=lambda entry: entry[1].rows)
        return f"the most frequent, {name} ({kind.rows} rows), says: {kind.example}"

    def _rate(self, count: int) -> float | None:
        """Return a count per second between the first and the last part of this run, or None."""
        seconds = 0.0 if self._first is None else self._last - self._first
        return round(count / seconds, 3) if seconds > 0 else None

    def summary(self, traffic: Mapping[PeerId, TrafficCounts], computed: int) -> dict[str, object]:
        """Return the counts; `computed` is the number of rows that this run had assigned, some of them twice."""
        peers = sorted({*self.rows_of, *traffic})
        return {
            "rows": self.rows,
            "errors": self.errors,
            "error_kinds": {name: kind.rows for name, kind in self.error_kinds.items()},
            "tokens": self.tokens,
            "seconds": 0.0 if self._first is None else round(self._last - self.began, 3),
            "rows_per_second": self._rate(self._later_rows),
            "tokens_per_second": self._rate(self._later_tokens),
            "rows_assigned": computed,
            "parts_dropped": self.dropped,
            "parts_refused": self.refused,
            "workers": [self._worker(peer, traffic.get(peer, TrafficCounts())) for peer in peers],
        }

    def _worker(self, peer: PeerId, carried: TrafficCounts) -> dict[str, object]:
        return {
            "peer": str(peer),
            "rows": self.rows_of[peer],
            "parts": self.parts_of[peer],
            "bytes_sent": carried.sent,
            "bytes_received": carried.received,
        }
