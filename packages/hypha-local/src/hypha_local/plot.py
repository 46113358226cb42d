"""Plot of a run: loss and accuracy over rounds from ``metrics.jsonl``. Last step of `demo`.

Needs matplotlib, which the extra ``plot`` installs; it is imported only when there is something to draw.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Final

from hypha_local.summary import Summary
from hypha_proto.codec import parse_json, split_json_lines

PLOT_MISSING: Final = "no loss.png: matplotlib is not installed; it comes with the extra hypha-local[plot]"
_MEASURED: Final = ("accuracy", "evaluation_samples")
NOTHING_TO_PLOT: Final = "no loss.png: no round reported a loss"


def plot_loss(metrics: Path, summary: Summary, picture: Path) -> str:
    """Plot a run to a PNG file if matplotlib is installed.

    Args:
        metrics: the scheduler's ``metrics.jsonl``.
        summary: summary of the run; the title shows its test accuracy or, for text, its loss.
        picture: the file to write.

    Returns:
        One line for people: what was plotted, or why nothing was.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return PLOT_MISSING
    events = [parse_json(line) for line in split_json_lines(metrics.read_bytes())]
    rounds = [(event["round"], event["loss"]) for event in events if event["event"] == "round"]
    losses = [(number, loss) for number, loss in rounds if loss is not None]
    if not losses:
        return NOTHING_TO_PLOT
    accuracies = accuracy_by_round(events)
    _draw(losses, _workers(events), accuracies, _title(summary), picture)
    return f"loss{' and accuracy' if accuracies else ''} over {len(losses)} rounds drawn in {picture}"


def accuracy_by_round(events: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return (round, accuracy) of each evaluation, averaged over workers by their number of evaluation samples."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    for event in events:
        has_value = event["event"] == "metric" and event["value"] is not None
        if has_value and event["name"] in _MEASURED:
            found.setdefault(event["round"], {}).setdefault(event["worker"], {})[event["name"]] = event["value"]
    curve = []
    for number, workers in sorted(found.items()):
        complete = [each for each in workers.values() if len(each) == len(_MEASURED)]
        if samples := sum(each["evaluation_samples"] for each in complete):
            correct = sum(each["accuracy"] * each["evaluation_samples"] for each in complete)
            curve.append((number, correct / samples))
    return curve


def _workers(events: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return the loss of each worker over rounds."""
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
    losses: list[tuple[int, float]],
    workers: dict[str, list[tuple[int, float]]],
    accuracies: list[tuple[int, float]],
    title: str,
    picture: Path,
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
    axes.legend(loc="upper left" if not accuracies else "center right")
    if accuracies:
        other = axes.twinx()
        other.plot(*zip(*accuracies, strict=True), linewidth=1.5, marker="s", markersize=3, color="tab:green")
        other.set(ylabel="accuracy on samples that no worker trains on")
        other.set_ylim(0, 1)
        other.yaxis.label.set_color("tab:green")
    figure.savefig(picture, dpi=120)
