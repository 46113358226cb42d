"""The text demo: its data, and its whole run against workers that train alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hypha_local.datasets.text import SEQUENCE, library_files, split, write_text
from hypha_local.demo_tasks import TASKS, TEXT
from hypha_local.network_layout import Folders, Training, plan_nodes, write_configuration
from hypha_local.summary import Summary


def test_the_library_is_read_in_one_order_and_split_by_file() -> None:
    files = library_files()
    assert files == library_files()
    assert len(files) > 300
    assert not any({"site-packages", "test", "tests"} & set(path.parts) for path in files)
    train, validation = split(files)
    assert sorted(train + validation) == sorted(files)
    assert not set(train) & set(validation)
    assert 0.05 < len(validation) / len(files) < 0.15


def test_samples_are_the_bytes_of_the_files(tmp_path: Path) -> None:
    texts = [bytes([number + 1]) * length for number, length in enumerate((300, 128, 5, 0, 1000))]
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.py")
        files[-1].write_bytes(text)
    counts = write_text(tmp_path / "train", tmp_path / "validation", files)
    train, validation = load_file(tmp_path / "train"), load_file(tmp_path / "validation")
    assert counts == (1 + 1 + 8, 3) == (len(train["labels"]), len(validation["labels"]))
    for tensors, mine in ((validation, texts[:1]), (train, texts[1:])):
        ids, mask, labels = tensors["input_ids"], tensors["attention_mask"], tensors["labels"]
        assert ids.shape == mask.shape == labels.shape == (len(ids), SEQUENCE)
        assert ids[mask == 1].astype("u1").tobytes() == b"".join(mine)
        assert np.array_equal(labels, np.where(mask == 1, ids, -100))


def test_the_library_gives_enough_text_and_the_same_again(tmp_path: Path) -> None:
    counts = write_text(tmp_path / "train", tmp_path / "validation")
    assert counts[0] > 6000
    assert counts[1] > 500
    assert write_text(tmp_path / "again", tmp_path / "validation") == counts
    assert (tmp_path / "again").read_bytes() == (tmp_path / "train").read_bytes()


@pytest.mark.parametrize("task", TASKS.values(), ids=lambda task: task.name)
def test_the_job_is_that_of_the_task(tmp_path: Path, task: object) -> None:
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


def test_the_summary_of_text_says_nats_a_byte() -> None:
    numbers = dict.fromkeys(Summary.__dataclass_fields__, 0) | {"test_loss": 1.9, "task": "text", "model_dir": "m"}
    text = Summary(**numbers | {"alone_losses": (2.25, 2.5)}).as_text()  # type: ignore[arg-type]
    assert "1.9000 nats/byte" in text
    assert "2.2500, 2.5000" in text
    assert "accuracy" not in text


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_together_workers_reach_a_lower_loss_than_each_alone(tmp_path: Path) -> None:
    """Measured on source files that no worker sees, in nats a byte; alone with the same number of steps on a shard."""
    program = str(Path(sys.executable).parent / "hypha-local")
    command = [program, "demo", "--task", TEXT.name, "--compare", "--dir", str(tmp_path / "run"), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["rounds"], summary["workers"], summary["parameters"]) == (TEXT.rounds, 3, 1_033_488)
    assert len(summary["alone_losses"]) == 3
    assert summary["test_loss"] < min(summary["alone_losses"]) - 0.05
    assert summary["test_loss"] < 2.2
