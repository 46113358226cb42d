"""The picture of a run: loss over rounds from ``metrics.jsonl``, the final accuracy in the title. After `summary`.

matplotlib draws it; it comes with the extra ``plot`` and is imported only here, when there is something to draw.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any, Final

from hypha_local.summary import Summary

PLOT_MISSING: Final = "no loss.png: matplotlib is not installed (pip install 'hypha-local[plot]')"
NOTHING_TO_PLOT: Final = "no loss.png: no round reported a loss"


def plot_loss(metrics: Path, summary: Summary, picture: Path) -> str:
    """Draw a run into a PNG file, where matplotlib is installed.

    Args:
        metrics: the scheduler's ``metrics.jsonl``.
        summary: its test accuracy (for text its loss) stands in the title.
        picture: the file to write.

    Returns:
        One line for people: what was drawn, or why nothing was.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return PLOT_MISSING
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    rounds = [(event["round"], event["loss"]) for event in events if event["event"] == "round"]
    losses = [(number, loss) for number, loss in rounds if loss is not None]
    if not losses:
        return NOTHING_TO_PLOT
    _draw(losses, _workers(events), _title(summary), picture)
    return f"loss over {len(losses)} rounds drawn in {picture}"


def _workers(events: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Each worker's own loss over rounds."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        if event["event"] == "metric" and event["name"] == "loss" and event["value"] is not None:
            curves.setdefault(event["worker"], []).append((event["round"], event["value"]))
    return curves


def _title(summary: Summary) -> str:
    reached = f"test accuracy {summary.accuracy:.4f}"
    if summary.task == "text":
        reached = f"validation loss {summary.test_loss:.4f} nats/byte"
    return f"{summary.task}: {summary.workers} workers, {summary.rounds} rounds, {reached}"


def _draw(
    losses: list[tuple[int, float]], workers: dict[str, list[tuple[int, float]]], title: str, picture: Path
) -> None:
    figures: Any = importlib.import_module("matplotlib.figure")  # without pyplot: no display, no global state
    figure = figures.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, curve in enumerate(workers.values(), 1):
        axes.plot(*zip(*sorted(curve), strict=True), linewidth=0.8, alpha=0.5, label=f"worker {number}")
    axes.plot(*zip(*losses, strict=True), linewidth=2, marker="o", markersize=3, color="black", label="all, by samples")
    axes.set(title=title, xlabel="round", ylabel="training loss")
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
