"""Summary and plot of a demo run."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from safetensors.numpy import save_file

from hypha_local import plot
from hypha_local.summary import Summary, count_parameters, summarize

WORKER = {"peer": "p", "samples": 160, "batches": 10, "bytes_sent": 100, "bytes_received": 50}


def summary_of(folder: Path, *workers: dict[str, Any]) -> Summary:
    """Summarise a job of these workers, whose model has 12 parameters."""
    tensors = {"w": np.zeros((3, 4), np.float32), "bn.running_mean": np.zeros(5, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    result = {"rounds": 2, "samples": 320, "workers": workers, "placement_seconds": 0.5, "wall_seconds": 3.0}
    evaluated, names = {"accuracy": 0.5, "loss": 1.0}, {"p": "worker-1"}
    return summarize(result, evaluated, seed=1, wall_seconds=9.0, model_dir=folder, names=names)


def summary_with(**fields: Any) -> Summary:
    """Return a summary whose other numbers are zero."""
    return Summary(**dict.fromkeys(Summary.__dataclass_fields__, 0) | fields)


def test_summary_counts_parameters_and_compares_traffic(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, WORKER, WORKER)
    assert count_parameters(tmp_path) == 12
    assert summary.per_step_bytes_per_worker == 10 * 12 * 4
    assert summary.traffic_ratio == 4.8
    assert json.loads(summary.as_json())["bytes_sent_per_worker"] == 100
    assert "0.5000" in summary.as_text()


def test_summary_says_where_the_time_of_each_worker_has_gone(tmp_path: Path) -> None:
    seconds = {"compute_seconds": 6.0, "data_wait_seconds": 0.5, "report_wait_seconds": 0.25, "sync_seconds": 3.25}
    summary = summary_of(tmp_path, WORKER | {"seconds": seconds}, WORKER | {"peer": "q", "seconds": None})
    line = "60.0% computing, 5.0% waiting for data, 2.5% waiting for the network, 32.5% synchronising"
    assert f"\nworker-1           {line}\n" in summary.as_text()
    assert json.loads(summary.as_json())["worker_seconds"] == {"worker-1": seconds}


def test_workers_that_state_no_bytes_are_left_out_of_the_mean(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, *(WORKER | {"bytes_sent": sent, "bytes_received": None} for sent in (None, 100)))
    assert (summary.bytes_sent_per_worker, summary.bytes_received_per_worker) == (100, 0)


def test_text_summary_states_nats_per_byte() -> None:
    text = summary_with(test_loss=1.9, task="text", model_dir="m", alone_losses=(2.25, 2.5)).as_text()
    assert "1.9000 nats/byte" in text
    assert "2.2500, 2.5000" in text
    assert "accuracy" not in text


def test_times_of_a_job_whose_scheduler_was_killed_are_those_after_it() -> None:
    numbers: dict[str, Any] = {"task": "digits", "wall_seconds": 9.0, "audit": "a\nb"}
    text = summary_with(**numbers, killed="scheduler", training_seconds=4.0).as_text()
    assert "9.0 s, 4.0 s of it after the scheduler was started again" in text
    assert "placement" not in text
    assert "audit              a\n                   b\n" in text
    assert "placement" in summary_with(**numbers, killed="data").as_text()


def test_what_followed_the_kill_is_listed() -> None:
    changes = ("after 8.1 s worker lost: a", "after 20.0 s worker joined: b")
    text = summary_with(task="digits", audit="proven", killed="worker", changes=changes).as_text()
    assert "then               after 8.1 s worker lost: a\n                   after 20.0 s worker joined: b\n" in text


SUMMARY = summary_with(accuracy=0.9681, rounds=2, workers=2)


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


def measured(worker: str, number: int, name: str, value: float | None) -> dict[str, Any]:
    return {"event": "metric", "worker": worker, "round": number, "name": name, "value": value}


def test_loss_is_plotted_with_the_accuracy_in_the_title(tmp_path: Path, axes: MagicMock) -> None:
    metrics = write(
        tmp_path / "metrics.jsonl",
        {"event": "accepted"},
        measured("a", 1, "loss", 2.5),
        measured("b", 1, "loss", None),
        measured("a", 1, "samples", 96),
        {"event": "round", "round": 1, "loss": 2.5},
        {"event": "round", "round": 2, "loss": None},
        {"event": "round", "round": 3, "loss": 0.5},
    )
    message = plot.plot_loss(metrics, SUMMARY, tmp_path / "loss.png")
    assert message == f"loss over 2 rounds drawn in {tmp_path / 'loss.png'}"
    assert (tmp_path / "loss.png").exists()
    assert [call.args for call in axes.plot.call_args_list] == [((1,), (2.5,)), ((1, 3), (2.5, 0.5))]
    assert "test accuracy 0.9681" in axes.set.call_args.kwargs["title"]


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
