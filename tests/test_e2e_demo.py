"""The demo as its user sees it: one command trains a real model over a real network and leaves no process running."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.local_demo import environment, run_demo

from hypha_local.processes import script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

PROMISED = {"accuracy", "rounds", "workers", "samples", "wall_seconds", "placement_seconds", "model_dir"}
PROMISED |= {"bytes_sent_per_worker"}
ROUNDS = 16
LEARNED = 0.9
"""Accuracy after `ROUNDS` rounds, however the workers share the batches; with wrong arithmetic it stays far below."""
PLAIN = Path(__file__).parent / "support" / "baseline_accuracy.py"


def plain_accuracy(summary: dict[str, Any], folder: Path) -> float:
    """Return the test accuracy that transformers alone compute for the model."""
    command = [sys.executable, str(PLAIN), summary["model_dir"], str(folder / "test.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True, env=environment())
    return float(done.stdout)


def assert_clean(folder: Path, workers: int) -> None:
    """Assert that every executor exited with 0, every program ended by itself, and no log has an error."""
    logs = {log.stem: log.read_text() for log in (folder / "logs").glob("*.log")}
    nodes = {"gateway", "data", "parameter-server", "scheduler", *(f"worker-{i + 1}" for i in range(workers))}
    assert nodes <= set(logs)
    for name, text in logs.items():
        assert "Traceback" not in text, f"{name}:\n{text}"
        assert " ERROR " not in text, f"{name}:\n{text}"
    for name in nodes:
        assert logs[name].splitlines()[-1].endswith("ended"), f"{name}:\n{logs[name][-500:]}"
    for worker in range(workers):
        assert logs[f"worker-{worker + 1}"].count("executor exited with status 0") == 1


def assert_proven(folder: Path, rounds: int) -> None:
    """Assert that the job's record proves its samples, and that every round can be computed again to the bit."""
    [run] = (folder / "runs").glob("*/journal.jsonl")
    scheduler = script("hypha-scheduler")
    replay = ["replay", str(run.parent), "--data", str(folder / "data" / "digits"), "--threads", "1"]
    for arguments in (["audit", str(run.parent)], replay):
        done = subprocess.run(
            [scheduler, *arguments], capture_output=True, text=True, timeout=200, check=False, env=environment()
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"proven: {rounds} rounds equal to the bit"


@pytest.mark.nightly
def test_one_command_trains_a_model_over_a_real_network(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    summary, progress = run_demo(folder, "--seed", "1")
    print(summary)
    assert set(summary) >= PROMISED
    assert (summary["workers"], summary["rounds"], summary["seed"]) == (3, ROUNDS, 1)
    assert summary["model_dir"] == str(folder / "model")
    assert summary["accuracy"] == plain_accuracy(summary, folder)
    assert summary["accuracy"] >= LEARNED
    assert summary["per_step_bytes_per_worker"] > 5 * summary["bytes_sent_per_worker"]
    assert_clean(folder, workers=3)
    assert json.loads((folder / "summary.json").read_text()) == summary
    events = [json.loads(line)["event"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [events.count(kind) for kind in ("placement", "round", "finished", "failed")] == [1, ROUNDS, 1, 0]
    kept = {path.name for path in folder.iterdir()}
    assert {"model", "metrics.jsonl", "logs", "test.safetensors", "summary.json"} <= kept
    assert not kept & {"certs", "config", "data", "work", "runs"}
    for stage in ("healthy", "placement", f"round {ROUNDS}/{ROUNDS}", "every process ended"):
        assert stage in progress
    assert "Traceback" not in progress


FOLLOWED = {"worker": "worker joined", "executor": "executor restarted", "parameter-server": "worker replaced"}
"""What the summary tells after the end of a member of the job."""


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["scheduler", "data", *FOLLOWED])
def test_a_job_goes_on_when_a_process_is_killed(victim: str, tmp_path: Path) -> None:
    folder, rounds = tmp_path / "run", 10 if victim in FOLLOWED else 5
    summary, progress = run_demo(folder, "--rounds", str(rounds), "--kill", victim, "--keep")
    assert (summary["rounds"], summary["workers"], summary["killed"]) == (rounds, 3, victim)
    if victim in FOLLOWED:
        assert "killed" in progress
        assert any(FOLLOWED[victim] in change for change in summary["changes"]), summary["changes"]
    else:
        assert f"{victim} killed" in progress
        for log in (folder / "logs").glob("worker-*.log"):  # the same process to the end
            assert log.read_text().count("executor exited with status 0") == 1
    assert_proven(folder, rounds)
    [run] = (folder / "runs").glob("*/journal.jsonl")
    terms = [record for record in map(json.loads, run.read_text().splitlines()) if record["record"] == "term"]
    assert len(terms) == (2 if victim == "parameter-server" else 1)
