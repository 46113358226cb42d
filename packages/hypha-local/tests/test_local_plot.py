"""Plot of a run: what is plotted, and the message if nothing is."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from hypha_local import plot
from hypha_local.summary import Summary

SUMMARY = Summary(
    accuracy=0.9681,
    test_loss=1.25,
    rounds=2,
    workers=2,
    samples=192,
    wall_seconds=1.0,
    placement_seconds=0.1,
    training_seconds=0.5,
    bytes_sent_per_worker=1,
    bytes_received_per_worker=1,
    per_step_bytes_per_worker=1,
    traffic_ratio=1.0,
    parameters=1,
    seed=0,
    model_dir="model",
)


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """Mock of matplotlib's axes."""
    figure = MagicMock()
    figure.savefig.side_effect = lambda picture, **_: Path(picture).write_bytes(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", SimpleNamespace(Figure=lambda **_: figure))  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    axes: MagicMock = figure.subplots.return_value
    return axes


def write(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def loss(worker: str, number: int, value: float | None) -> dict[str, Any]:
    return {"event": "metric", "worker": worker, "round": number, "name": "loss", "value": value}


def test_loss_is_plotted_with_the_accuracy_in_the_title(tmp_path: Path, axes: MagicMock) -> None:
    metrics = write(
        tmp_path / "metrics.jsonl",
        {"event": "accepted"},
        loss("a", 1, 2.5),
        loss("b", 1, None),
        {"event": "metric", "worker": "a", "round": 1, "name": "samples", "value": 96},
        {"event": "round", "round": 1, "loss": 2.5},
        {"event": "round", "round": 2, "loss": None},
        {"event": "round", "round": 3, "loss": 0.5},
    )
    message = plot.plot_loss(metrics, SUMMARY, tmp_path / "loss.png")
    assert message == f"loss over 2 rounds drawn in {tmp_path / 'loss.png'}"
    assert (tmp_path / "loss.png").exists()
    assert [call.args for call in axes.plot.call_args_list] == [((1,), (2.5,)), ((1, 3), (2.5, 0.5))]
    assert "test accuracy 0.9681" in axes.set.call_args.kwargs["title"]


def measured(worker: str, number: int, name: str, value: float) -> dict[str, Any]:
    return {"event": "metric", "worker": worker, "round": number, "name": name, "value": value}


def test_accuracy_is_weighted_by_evaluation_samples(tmp_path: Path, axes: MagicMock) -> None:
    metrics = write(
        tmp_path / "metrics.jsonl",
        {"event": "round", "round": 1, "loss": 2.5},
        {"event": "round", "round": 2, "loss": 0.5},
        measured("a", 1, "accuracy", 0.5),
        measured("a", 1, "evaluation_samples", 100),
        measured("b", 1, "accuracy", 1.0),
        measured("b", 1, "evaluation_samples", 300),
        measured("a", 2, "accuracy", 0.75),
        measured("a", 2, "evaluation_samples", 100),
        measured("b", 2, "accuracy", 0.1),  # its number of samples is missing
    )
    message = plot.plot_loss(metrics, SUMMARY, tmp_path / "loss.png")
    assert message == f"loss and accuracy over 2 rounds drawn in {tmp_path / 'loss.png'}"
    [drawn] = axes.twinx.return_value.plot.call_args_list
    assert drawn.args == ((1, 2), (0.875, 0.75))


def test_nothing_is_plotted_without_a_loss(tmp_path: Path, axes: MagicMock) -> None:
    metrics = write(tmp_path / "metrics.jsonl", {"event": "round", "round": 1, "loss": None})
    assert plot.plot_loss(metrics, SUMMARY, tmp_path / "loss.png") == plot.NOTHING_TO_PLOT
    assert not (tmp_path / "loss.png").exists()


def test_missing_matplotlib_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert plot.plot_loss(tmp_path / "none", SUMMARY, tmp_path / "loss.png") == plot.PLOT_MISSING
    assert "hypha-local[plot]" in plot.PLOT_MISSING
