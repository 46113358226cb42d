"""What a benchmark found: one line a measurement, as a table for people and as JSON for machines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One measurement: ours, what it is held against, and what it has to reach."""

    what: str
    unit: str
    ours: float
    reference: float | None = None
    """The same done by other means in the same run."""
    reference_is: str = ""
    ratio: float | None = None
    """Ours over the reference; of rates measured in turns, the median of the pairs."""
    bound: str = ""


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def paired(what: str, ours: Sequence[float], reference: Sequence[float], reference_is: str, bound: str) -> Row:
    """A row of rates (MiB/s) that were measured in turns."""
    ratio = statistics.median(one / other for one, other in zip(ours, reference, strict=True))
    return Row(what, "MiB/s", statistics.median(ours), statistics.median(reference), reference_is, ratio, bound)


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| what | ours | reference | ratio | must reach |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        reference = "" if row.reference is None else f"{_number(row.reference)} {row.unit} ({row.reference_is})"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"| {row.what} | {_number(row.ours)} {row.unit} | {reference} | {ratio} | {row.bound} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def as_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The rows as JSON's values."""
    return [asdict(row) for row in rows]
