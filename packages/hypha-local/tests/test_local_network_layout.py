"""Layout of a local network: run directories and configuration files."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest

from hypha_local.demo_tasks import TASKS
from hypha_local.errors import RunDirectoryError
from hypha_local.network_layout import Folders, Training, plan_nodes, write_configuration


def test_only_run_directories_are_replaced(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "run")
    folders.make()
    (folders.logs / "old.log").write_text("old")
    folders.make()
    assert not (folders.logs / "old.log").exists()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("42")
    with pytest.raises(RunDirectoryError, match="precious"):
        Folders(precious).make()
    assert (precious / "thesis.tex").read_text() == "42"


def test_tidy_keeps_the_results(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "run")
    folders.make()
    folders.model.mkdir()
    folders.metrics.write_text("{}\n")
    folders.tidy()
    assert sorted(path.name for path in folders.root.iterdir()) == [".hypha-local", "logs", "metrics.jsonl", "model"]


def test_every_node_has_its_own_configuration(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "run")
    folders.make()
    nodes = plan_nodes(2)
    write_configuration(folders, nodes, Training(workers=2, rounds=7, seed=5), sys.executable)
    files = {path.stem: tomllib.loads(path.read_text()) for path in folders.configuration.iterdir()}
    assert set(files) == {"gateway", "data", "worker-1", "worker-2", "parameter-server", "scheduler"}
    assert len({tuple(file["listen_addresses"]) for file in files.values()}) == len(files)
    assert files["worker-1"]["gateway_addresses"] == files["gateway"]["listen_addresses"]
    job = files["scheduler"]["scheduler"]["job"]
    assert (job["seed"], job["rounds"]["update_rounds"], job["resources"]["num_workers"]) == (5, 7, 2)
    assert (job["dataset"], job["rounds"]["evaluate_every"]) == ({"dataset": "digits"}, 0)


def test_python_path_with_any_characters_is_configured(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "demo")
    folders.make()
    python = "/home/\u017elu\u0165 \U0001f40d/bin/python"
    write_configuration(folders, plan_nodes(1), Training(workers=1), python)
    text = (folders.configuration / "worker-1.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text)["executors"][0]["cmd"] == python


def test_evaluating_demo_announces_the_held_out_dataset(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "run")
    folders.make()
    write_configuration(folders, plan_nodes(1), Training(workers=1, evaluate_every=2), sys.executable)
    data, scheduler = (
        tomllib.loads((folders.configuration / f"{name}.toml").read_text()) for name in ("data", "scheduler")
    )
    assert [each["name"] for each in data["datasets"]] == ["digits", "held-out"]
    job = scheduler["scheduler"]["job"]
    assert job["dataset"] == {"dataset": "digits", "evaluation": "held-out"}
    assert job["rounds"]["evaluate_every"] == 2


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_job_configuration_follows_the_task(tmp_path: Path, task: object) -> None:
    folders, chosen = Folders(tmp_path / "run"), TASKS[task.name]  # type: ignore[attr-defined]
    folders.make()
    training = Training(workers=2, rounds=7, task=chosen)
    write_configuration(folders, plan_nodes(2), training, sys.executable)
    job = tomllib.loads((folders.configuration / "scheduler.toml").read_text())["scheduler"]["job"]
    assert job["dataset"]["dataset"] == chosen.name
    assert job["model"]["type"] == chosen.type
    assert job["rounds"]["avg_samples_between_updates"] == 2 * chosen.batch_size * chosen.steps
    assert training.steps_a_worker == 7 * chosen.steps
    data = tomllib.loads((folders.configuration / "data.toml").read_text())["datasets"]
    assert [entry["name"] for entry in data] == [chosen.name]
