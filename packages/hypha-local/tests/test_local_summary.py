"""Summary of a demo run: parameters, traffic and text output."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from hypha_local.summary import Summary, count_parameters, summarize


def test_summary_counts_parameters_and_compares_traffic(tmp_path: Path) -> None:
    tensors = {"w": np.zeros((3, 4), np.float32), "bn.running_mean": np.zeros(5, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert count_parameters(tmp_path) == 12
    worker = {"peer": "p", "samples": 160, "batches": 10, "bytes_sent": 100, "bytes_received": 50}
    result = {"rounds": 2, "samples": 320, "workers": [worker] * 2, "placement_seconds": 0.5, "wall_seconds": 3.0}
    summary = summarize(result, {"accuracy": 0.5, "loss": 1.0}, seed=1, wall_seconds=9.0, model_dir=tmp_path)
    assert summary.per_step_bytes_per_worker == 10 * 12 * 4
    assert summary.traffic_ratio == 4.8
    assert json.loads(summary.as_json())["bytes_sent_per_worker"] == 100
    assert "0.5000" in summary.as_text()


def test_summary_says_where_the_time_of_each_worker_has_gone(tmp_path: Path) -> None:
    save_file({"w": np.zeros((3, 4), np.float32)}, tmp_path / "model.safetensors")
    worker = {"samples": 160, "batches": 10, "bytes_sent": 100, "bytes_received": 50}
    seconds = {"compute_seconds": 6.0, "data_wait_seconds": 0.5, "report_wait_seconds": 0.25, "sync_seconds": 3.25}
    workers = [worker | {"peer": "p", "seconds": seconds}, worker | {"peer": "q", "seconds": None}]
    result = {"rounds": 2, "samples": 320, "workers": workers, "placement_seconds": 0.5, "wall_seconds": 3.0}
    summary = summarize(
        result, {"accuracy": 0.5, "loss": 1.0}, seed=1, wall_seconds=9.0, model_dir=tmp_path, names={"p": "worker-1"}
    )
    line = "60.0% computing, 5.0% waiting for data, 2.5% waiting for the network, 32.5% synchronising"
    assert f"\nworker-1           {line}\n" in summary.as_text()
    assert json.loads(summary.as_json())["worker_seconds"] == {"worker-1": seconds}


def test_workers_that_state_no_bytes_are_left_out_of_the_mean(tmp_path: Path) -> None:
    save_file({"w": np.zeros((3, 4), np.float32)}, tmp_path / "model.safetensors")
    workers = [{"samples": 1, "batches": 1, "bytes_sent": sent, "bytes_received": None} for sent in (None, 100)]
    result = {"rounds": 2, "samples": 320, "workers": workers, "placement_seconds": 0.5, "wall_seconds": 3.0}
    summary = summarize(result, {"accuracy": 0.5, "loss": 1.0}, seed=1, wall_seconds=9.0, model_dir=tmp_path)
    assert (summary.bytes_sent_per_worker, summary.bytes_received_per_worker) == (100, 0)


def test_text_summary_states_nats_per_byte() -> None:
    numbers = dict.fromkeys(Summary.__dataclass_fields__, 0) | {"test_loss": 1.9, "task": "text", "model_dir": "m"}
    text = Summary(**numbers | {"alone_losses": (2.25, 2.5)}).as_text()  # type: ignore[arg-type]
    assert "1.9000 nats/byte" in text
    assert "2.2500, 2.5000" in text
    assert "accuracy" not in text


def test_times_of_a_job_whose_scheduler_was_killed_are_those_after_it() -> None:
    numbers = dict.fromkeys(Summary.__dataclass_fields__, 0) | {"task": "digits", "wall_seconds": 9.0, "audit": "a\nb"}
    text = Summary(**numbers | {"killed": "scheduler", "training_seconds": 4.0}).as_text()  # type: ignore[arg-type]
    assert "9.0 s, 4.0 s of it after the scheduler was started again" in text
    assert "placement" not in text
    assert "audit              a\n                   b\n" in text
    assert "placement" in Summary(**numbers | {"killed": "data"}).as_text()  # type: ignore[arg-type]


def test_what_followed_the_kill_is_listed() -> None:
    numbers = dict.fromkeys(Summary.__dataclass_fields__, 0) | {"task": "digits", "audit": "proven", "killed": "worker"}
    text = Summary(**numbers | {"changes": ("after 8.1 s worker lost: a", "after 20.0 s worker joined: b")}).as_text()  # type: ignore[arg-type]
    assert "then               after 8.1 s worker lost: a\n                   after 20.0 s worker joined: b\n" in text
