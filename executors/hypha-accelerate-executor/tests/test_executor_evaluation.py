"""Evaluation between rounds on held-out samples, without effect on training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from hypha.accelerate_executor import training
from hypha.accelerate_executor.modeling.evaluation import evaluate
from hypha_proto.update_file import apply_update_to_dir, open_update

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
SHARE = {
    "type": "peers",
    "peers": [PEER],
    "strategy": {"type": "One"},
    "resource": {"dataset": "held-out", "index": 0},
    "filenames": ["evaluation-00000.safetensors", "evaluation-00001.safetensors"],
}


@pytest.fixture
def held_out(tmp_path: Path, digits: dict[str, Any]) -> list[Path]:
    """Return the test images in two files, and all of them in a third."""
    paths = [tmp_path / name for name in (*SHARE["filenames"], "whole.safetensors")]
    for path, part in zip(paths, (slice(0, 200), slice(200, None), slice(None)), strict=True):
        rows = {name: np.ascontiguousarray(value[part]) for name, value in digits["test"].items()}
        safetensors.numpy.save_file(rows, path)
    return paths


def serving(worker: Any, files: list[Path]) -> list[Any]:
    """Let a fake worker provide the evaluation files; return the requests for them."""
    asked: list[Any] = []

    def fetch(body: Any) -> tuple[int, Any]:
        if body.get("filenames") is None:
            return worker.fetch(body)  # type: ignore[no-any-return]
        asked.append(body)
        out = worker.work_dir / body["out_dir"]
        out.mkdir(exist_ok=True)
        return 200, [worker._place(path, out, {}) for path in files]

    worker.answers["/resources/fetch"] = fetch
    return asked


def measured(worker: Any) -> dict[int, dict[str, float]]:
    """Return the reported evaluation metrics by round."""
    told = [report["metrics"] for report in worker.reports if isinstance(report, dict) and "metrics" in report]
    return {each["round"]: each["metrics"] for each in told if "evaluation_loss" in each["metrics"]}


def test_every_second_round_is_evaluated_as_the_evaluate_command_does(
    make_worker: Callable[..., Any], held_out: list[Path], tmp_path: Path
) -> None:
    worker = make_worker(rounds=4, batches=12)
    asked = serving(worker, held_out[:2])
    assert training.main(worker.arguments(evaluation={"data": SHARE, "every": 2})) == 0
    found = measured(worker)
    assert list(found) == [2, 4]
    assert len(asked) == 1, "the samples are fetched once"
    import shutil

    shutil.copytree(worker.model_dir, tmp_path / "result")
    for outer in worker.outers:
        apply_update_to_dir(tmp_path / "result", outer)
    after = evaluate("image-classification", tmp_path / "result", held_out[2], 64)
    assert found[4]["accuracy"] == pytest.approx(after.accuracy, abs=1e-6)
    assert found[4]["evaluation_loss"] == pytest.approx(after.loss, abs=1e-4)
    assert found[4]["evaluation_samples"] == after.samples == 360


def test_evaluation_does_not_change_training(make_worker: Callable[..., Any], held_out: list[Path]) -> None:
    plain, watched = make_worker(rounds=2, batches=8), make_worker(rounds=2, batches=8)
    serving(watched, held_out[:2])
    assert training.main(plain.arguments()) == 0
    assert training.main(watched.arguments(evaluation={"data": SHARE, "every": 1})) == 0
    assert list(measured(watched)) == [1, 2]
    for ours, theirs in zip(watched.updates, plain.updates, strict=True):
        (one, _), (other, _) = open_update(ours), open_update(theirs)
        with one, other:
            for name in other.tensors:
                np.testing.assert_array_equal(one.tensor(name), other.tensor(name), err_msg=name)


def test_training_continues_when_evaluation_files_are_unavailable(
    make_worker: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker(rounds=3, batches=4)

    def refuse(body: Any) -> tuple[int, Any]:
        return (
            worker.fetch(body) if body.get("filenames") is None else (502, {"error": "peer-failed", "detail": "away"})
        )

    worker.answers["/resources/fetch"] = refuse
    assert training.main(worker.arguments(evaluation={"data": SHARE, "every": 1})) == 0
    assert len(worker.updates) == 3
    assert measured(worker) == {}
    assert caplog.text.count("evaluation is disabled") == 1
