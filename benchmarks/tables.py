"""Results of benchmarks: one row per measurement, as a Markdown table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """One measurement: our value, the reference and the required bound."""

    what: str
    unit: str
    ours: float
    reference: float | None = None
    """Value of the reference implementation in the same run."""
    reference_is: str = ""
    ratio: float | None = None
    """Our value over the reference; for rates measured in turns, the median of the pairs."""
    bound: str = ""


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def paired(what: str, ours: Sequence[float], reference: Sequence[float], reference_is: str, bound: str) -> Row:
    """Return a row for rates (MiB/s) that were measured in turns."""
    ratio = statistics.median(one / other for one, other in zip(ours, reference, strict=True))
    return Row(what, "MiB/s", statistics.median(ours), statistics.median(reference), reference_is, ratio, bound)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| what | ours | reference | ratio | must reach |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        reference = "" if row.reference is None else f"{_number(row.reference)} {row.unit} ({row.reference_is})"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"| {row.what} | {_number(row.ours)} {row.unit} | {reference} | {ratio} | {row.bound} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def as_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the rows as JSON values."""
    return [asdict(row) for row in rows]
