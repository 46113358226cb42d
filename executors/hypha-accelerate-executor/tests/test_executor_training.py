"""Complete jobs against a fake worker; exact where DiLoCo can be exact."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from click.testing import CliRunner

from hypha.accelerate_executor import training
from hypha.accelerate_executor.cli import main as command
from hypha.accelerate_executor.data.batches import Batches
from hypha.accelerate_executor.modeling.evaluation import evaluate
from hypha_proto.update_file import apply_update_to_dir, open_update

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]


def test_every_round_says_where_its_time_has_gone(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(rounds=2, batches=5)
    assert training.main([*worker.arguments(), "--timeout", "60"]) == 0
    first, second = [report["metrics"]["metrics"] for report in worker.reports if "metrics" in report]
    assert first["compute_seconds"] > 0
    assert first["data_wait_seconds"] > 0
    assert "report_wait_seconds" in first
    assert "sync_seconds" not in first
    assert second["sync_seconds"] > 0  # between the two


def _result(worker: Any, to: Path) -> Path:
    """Return the scheduler's copy: the start model plus every outer update."""
    shutil.copytree(worker.model_dir, to)
    for outer in worker.outers:
        apply_update_to_dir(to, outer)
    return to


def _plain_adamw(model_dir: Path, worker: Any, steps: int, seed: int) -> Any:
    """Train on the same batches with transformers and torch alone, without rounds."""
    from transformers import AutoModelForImageClassification

    from hypha.accelerate_executor.bridge.client import Fetched

    scratch = worker.work_dir.parent / "plain"
    numbers = iter(range(1000))

    def fetch() -> list[Fetched]:
        epoch, index = divmod(next(numbers), len(worker.slices))
        folder = scratch / f"{epoch}-{index}"
        folder.mkdir(parents=True)
        path = Path(shutil.copy(worker.slices[index], folder))
        return [Fetched(path, {"slice": str(index), "epoch": str(epoch)})]

    model = AutoModelForImageClassification.from_pretrained(model_dir)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    batches = Batches(fetch, 16, seed)
    for _ in range(steps):
        batch = next(batches)
        arguments = {name: torch.from_numpy(value) for name, value in batch.tensors.items()}
        model(**arguments).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    batches.close()
    return model


def test_one_worker_with_outer_learning_rate_1_is_plain_adamw(
    make_worker: Callable[..., Any], tmp_path: Path, digits: dict[str, Any]
) -> None:
    worker = make_worker(rounds=4, batches=30)
    assert training.main(worker.arguments()) == 0
    result = _result(worker, tmp_path / "result")
    plain = _plain_adamw(worker.model_dir, worker, 120, seed=3)

    for name, value in safetensors.numpy.load_file(result / "model.safetensors").items():
        np.testing.assert_allclose(value, plain.state_dict()[name].numpy(), atol=2e-5, rtol=1e-4, err_msg=name)
    test = tmp_path / "test.safetensors"
    safetensors.numpy.save_file(digits["test"], test)
    plain.save_pretrained(tmp_path / "plain")
    ours = evaluate("image-classification", result, test, 360)
    theirs = evaluate("image-classification", tmp_path / "plain", test, 360)
    assert abs(ours.loss - theirs.loss) <= 0.005
    assert ours.accuracy > 0.9


def test_the_update_has_the_tensors_of_the_files_and_names_the_statistics(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(rounds=2, batches=6)
    assert training.main(worker.arguments()) == 0
    start = safetensors.numpy.load_file(worker.model_dir / "model.safetensors")
    for number, path in enumerate(worker.updates, 1):
        file, metadata = open_update(path)
        with file:
            assert file.tensors.keys() == start.keys()
            assert metadata.round == number
            assert metadata.samples == 6 * 16
            assert metadata.statistics == {
                name for name in start if name.endswith(("running_mean", "running_var", "num_batches_tracked"))
            }
            assert all(info.dtype == "F32" for info in file.tensors.values())
            counts = [name for name in start if name.endswith("num_batches_tracked")]
            assert [float(file.tensor(name)) for name in counts] == [6.0] * len(counts)
            assert all(np.abs(file.tensor(name)).max() > 0 for name in start)


def test_reports_are_sent_in_the_order_the_scheduler_expects(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(rounds=2, batches=5)
    assert training.main(worker.arguments()) == 0
    kinds = [report if isinstance(report, str) else next(iter(report)) for report in worker.reports]
    assert kinds == (["status"] * 5 + ["update", "metrics", "update-received"]) * 2
    batch = worker.reports[0]["status"]
    assert batch["batch_size"] == 16
    assert batch["slices"] == {"0": 16}
    assert batch["batch_ms"] > 0
    metrics = [report["metrics"] for report in worker.reports if isinstance(report, dict) and "metrics" in report]
    assert [entry["round"] for entry in metrics] == [1, 2]
    assert metrics[0]["metrics"]["samples"] == 80
    assert 1.5 < metrics[0]["metrics"]["loss"] < 3.5
    assert metrics[0]["metrics"]["samples_per_second"] > 0
    assert [(body["round"], body["samples"]) for body in worker.sent] == [(1, 80), (2, 80)]


@pytest.mark.parametrize("answer", ["Ok", "Done"])
def test_a_job_that_nobody_sends_outer_updates_ends_with_its_first_update(
    make_worker: Callable[..., Any], answer: str
) -> None:
    worker = make_worker(rounds=5, batches=4, silent=True)
    usual, received = worker.status, []

    def status(body: Any) -> tuple[int, Any]:
        found: tuple[int, Any] = usual(body)
        return (200, {"type": answer}) if isinstance(body, dict) and "metrics" in body else found

    def receive(body: Any) -> tuple[int, Any]:
        received.append(body)
        return 400, {"error": "bad-request", "detail": "nobody sends anything"}

    worker.answers = {"/status/send": status, "/resources/receive": receive}
    nobody = {"type": "peers", "peers": [], "strategy": {"type": "All"}, "resource": None}
    assert training.main([*worker.arguments(results=nobody), "--timeout", "10"]) == 0
    kinds = [report if isinstance(report, str) else next(iter(report)) for report in worker.reports]
    assert kinds == ["status"] * 4 + ["update", "metrics"]
    assert [(body["round"], body["samples"]) for body in worker.sent] == [(1, 64)]
    assert received == []
    assert not (worker.work_dir / "update-1.safetensors").exists()


def test_batches_span_slices_and_every_sample_is_reported_once(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(rounds=100, batches=1000, epochs=1)
    assert training.main(worker.arguments()) == 0  # no more data ends training
    used: dict[str, int] = {}
    batches = [report["status"] for report in worker.reports if "status" in report]
    for batch in batches:
        for index, samples in batch["slices"].items():
            used[index] = used.get(index, 0) + samples
        assert sum(batch["slices"].values()) == batch["batch_size"]
    sizes = [len(safetensors.numpy.load_file(path)["labels"]) for path in worker.slices]
    assert used == {str(index): size for index, size in enumerate(sizes)}
    assert any(len(batch["slices"]) == 2 for batch in batches)
    assert list((worker.work_dir / "slices").iterdir()) == []  # what is left would be looked at with each file


def test_the_same_seed_gives_the_same_bytes(make_worker: Callable[..., Any]) -> None:
    first, second, other = (make_worker(rounds=2, batches=10) for _ in range(3))
    assert training.main(first.arguments()) == 0
    assert training.main(second.arguments()) == 0
    assert training.main(other.arguments(seed=4)) == 0
    contents = [[path.read_bytes() for path in worker.updates] for worker in (first, second, other)]
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]


def test_used_files_are_deleted(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(rounds=2, batches=4)
    assert training.main(worker.arguments()) == 0
    left = {path.relative_to(worker.work_dir).parts[0] for path in worker.work_dir.rglob("*") if path.is_file()}
    assert left <= {"model", "slices"}


@pytest.mark.parametrize(
    "schedule",
    [
        {"type": "linear-with-warmup", "warmup_steps": 5, "training_steps": 20},
        {"type": "cosine-with-warmup", "warmup_steps": 5, "training_steps": 20},
        {"type": "wsd", "warmup_steps": 5, "decay_steps": 10, "training_steps": 20},
    ],
)
def test_the_learning_rate_follows_the_job_and_not_the_round(make_worker: Callable[..., Any], schedule: Any) -> None:
    worker = make_worker(rounds=3, batches=10)
    assert training.main(worker.arguments(scheduler=schedule)) == 0
    moved = []
    for path in worker.updates:
        file, metadata = open_update(path)
        with file:
            trained = file.tensors.keys() - metadata.statistics
            moved.append(max(float(np.abs(file.tensor(name)).max()) for name in trained))
    assert moved[0] > 0
    assert moved[1] > 0
    assert moved[2] == 0  # the schedule's twenty steps are over


def test_training_alone_is_plain_adamw(make_worker: Callable[..., Any], tmp_path: Path) -> None:
    worker = make_worker()
    arguments = ["train-alone", "--model", str(worker.model_dir), "--out", str(tmp_path / "alone"), "--steps", "40"]
    arguments += ["--learning-rate", "2e-3", "--seed", "3", "--threads", "1", *map(str, worker.slices)]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert 1.0 < json.loads(result.stdout)["loss"] < 2.5
    plain = _plain_adamw(worker.model_dir, worker, 40, seed=3)
    for name, value in safetensors.numpy.load_file(tmp_path / "alone" / "model.safetensors").items():
        np.testing.assert_allclose(value, plain.state_dict()[name].numpy(), atol=1e-6, err_msg=name)
    assert all(path.exists() for path in worker.slices)
    assert CliRunner().invoke(command, arguments).exit_code == 1  # a trained model is not overwritten


def test_the_byte_model_has_about_a_million_parameters(tmp_path: Path) -> None:
    out = tmp_path / "model"
    result = CliRunner().invoke(
        command, ["create-model", "--arch", "llama-bytes", "--task", "causal-lm", "--out", str(out)]
    )
    assert result.stdout == f"{out}: 1033488 parameters\n"


def test_a_device_map_does_not_change_training(make_worker: Callable[..., Any]) -> None:
    plain, mapped = make_worker(rounds=1, batches=5), make_worker(rounds=1, batches=5)
    assert training.main(plain.arguments()) == 0
    assert training.main([*mapped.arguments(), "--device-map", "cpu"]) == 0
    assert plain.updates[0].read_bytes() == mapped.updates[0].read_bytes()
