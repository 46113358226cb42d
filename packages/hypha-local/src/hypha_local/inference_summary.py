"""Summary of an inference demo: counts and rates, accuracy or a few texts, the audit, and where the results are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from hypha_proto.codec import parse_json
from hypha_proto.texts import shorten

EXAMPLES: Final = 5


@dataclass(frozen=True, slots=True)
class InferenceSummary:
    """Result of an inference demo."""

    task: str
    rows: int
    errors: int
    """Rows whose result says why they could not be computed."""
    slices: int
    workers: int
    """Workers that computed results."""
    accuracy: float | None
    """Fraction of rows that were classified correctly; None for texts."""
    tokens: int
    rows_per_second: float | None
    """Between the first and the last part of the job, or of its resumed run; None with a single part."""
    rows_assigned: int
    """Rows of all slices that were assigned, more than `rows` where work was done twice; of the resumed run only."""
    wall_seconds: float
    killed: str | None
    """What was killed during the job."""
    audit: str
    """What ``hypha-scheduler audit`` says."""
    results_dir: str
    examples: tuple[tuple[str, str], ...] = ()
    """Prompts and texts of the first rows."""

    def as_json(self) -> str:
        """Format the summary as a JSON object."""
        return json.dumps(asdict(self))

    def as_text(self) -> str:
        """Format the summary for people."""
        lines = [f"{_quoted(prompt)}\n  -> {_quoted(text)}" for prompt, text in self.examples]
        if self.accuracy is not None:
            lines.append(f"accuracy           {self.accuracy:.4f}")
        rate = "" if self.rows_per_second is None else f", {self.rows_per_second:.1f} rows/s from first to last part"
        lines.append(f"rows               {self.rows:,} by {self.workers} workers, {self.errors} errors{rate}")
        if self.tokens:
            lines.append(f"tokens             {self.tokens:,}")
        if self.killed is not None:
            again = "after resuming" if self.killed == "scheduler" else "in all"
            lines.append(f"killed             {self.killed}; {self.rows_assigned:,} rows assigned {again}")
        lines += [
            f"audit              {self.audit}",
            f"time               {self.wall_seconds:.1f} s",
            f"results            {self.results_dir}",
        ]
        return "\n".join(lines)


def _quoted(text: str) -> str:
    return shorten(json.dumps(text, ensure_ascii=False), 96)


def read_results(results: Path) -> Iterator[dict[str, Any]]:
    """Yield all results of a job in the order of slices and rows."""
    manifest: Any = parse_json((results / "manifest.json").read_text())
    for entry in manifest["slices"]:
        with (results / entry["file"]).open("rb") as lines:  # which end at line feeds alone
            yield from map(parse_json, lines)


def summarize_inference(
    result: dict[str, Any], *, task: str, wall_seconds: float, killed: str | None, audit: str
) -> InferenceSummary:
    """Build the summary from the scheduler's ``result.json`` and the results."""
    results = Path(result["results_dir"])
    correct = labelled = 0
    examples: list[tuple[str, str]] = []
    for row in read_results(results):
        if "labels" in row:
            labelled += 1
            correct += row.get("label") == row["labels"]
        if "text" in row and len(examples) < EXAMPLES:
            examples.append((row["prompt"], row["text"]))
    return InferenceSummary(
        task=task,
        rows=result["rows"],
        errors=result["errors"],
        slices=result["slices"],
        workers=sum(worker["rows"] > 0 for worker in result["workers"]),
        accuracy=correct / result["rows"] if labelled else None,
        tokens=result["tokens"],
        rows_per_second=result["rows_per_second"],
        rows_assigned=result["rows_assigned"],
        wall_seconds=round(wall_seconds, 2),
        killed=killed,
        audit=audit,
        results_dir=str(results),
        examples=tuple(examples),
    )
