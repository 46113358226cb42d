"""Complete jobs against a fake worker, exact where DiLoCo can be exact; and evaluation on held-out samples."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
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
from hypha.accelerate_executor.modeling.evaluation import EvaluatedModel, Subject, evaluate
from hypha_proto.update_file import apply_update_to_dir, open_update

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]


def test_every_round_says_where_its_time_has_gone(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(rounds=2, batches=5)
    assert training.main([*worker.arguments(), "--timeout", "60"]) == 0
    first, second = worker.metrics
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

    def fetch(_count: int) -> list[Fetched]:
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
    statistics = {name for name in start if name.endswith(("running_mean", "running_var", "num_batches_tracked"))}
    counts = [name for name in start if name.endswith("num_batches_tracked")]
    for number, path in enumerate(worker.updates, 1):
        file, metadata = open_update(path)
        with file:
            assert file.tensors.keys() == start.keys()
            assert (metadata.round, metadata.samples, metadata.statistics) == (number, 6 * 16, statistics)
            assert all(info.dtype == "F32" for info in file.tensors.values())
            assert [float(file.tensor(name)) for name in counts] == [6.0] * len(counts)
            assert all(np.abs(file.tensor(name)).max() > 0 for name in start)


def test_reports_are_sent_in_the_order_the_scheduler_expects(make_worker: Callable[..., Any]) -> None:
    worker = make_worker(rounds=2, batches=5)
    assert training.main(worker.arguments()) == 0
    assert worker.kinds == (["status"] * 5 + ["update", "metrics", "update-received"]) * 2
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
    assert worker.kinds == ["status"] * 4 + ["update", "metrics"]
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
        return 200, [worker._place(path, out / path.name, {}) for path in files]

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
    shutil.copytree(worker.model_dir, tmp_path / "result")
    for number, outer in enumerate(worker.outers, 1):
        apply_update_to_dir(tmp_path / "result", outer)
        if number % 2 == 0:
            after = evaluate("image-classification", tmp_path / "result", held_out[2], 64)
            assert found[number]["accuracy"] == pytest.approx(after.accuracy, abs=1e-6)
            assert found[number]["evaluation_loss"] == pytest.approx(after.loss, abs=1e-4)
            assert found[number]["evaluation_samples"] == after.samples == 360


def test_evaluation_does_not_change_training(make_worker: Callable[..., Any], held_out: list[Path]) -> None:
    plain, watched = make_worker(rounds=2, batches=8), make_worker(rounds=2, batches=8)
    serving(watched, held_out[:2])
    assert training.main(plain.arguments()) == 0
    assert training.main(watched.arguments(evaluation={"data": SHARE, "every": 1})) == 0
    assert list(measured(watched)) == [1, 2]
    for number in range(2):
        (ours, _), (theirs, _) = watched.update(number), plain.update(number)
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize(
    "error",
    [None, MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: 9 bytes")],
    ids=["no files", "memory", "memory of a GPU", "memory of torch"],
)
def test_an_evaluation_that_fails_costs_only_itself(
    make_worker: Callable[..., Any],
    held_out: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
) -> None:
    worker = make_worker(rounds=3, batches=4)

    def refuse(body: Any) -> tuple[int, Any]:
        unavailable = 502, {"error": "peer-failed", "detail": "away"}
        return worker.fetch(body) if body.get("filenames") is None else unavailable

    def fail(*_: Any, **__: Any) -> EvaluatedModel:
        assert error is not None
        raise error

    serving(worker, held_out[:2])
    if error is None:
        worker.answers["/resources/fetch"] = refuse
    else:
        monkeypatch.setattr(Subject, "measure", fail)
    assert training.main(worker.arguments(evaluation={"data": SHARE, "every": 1})) == 0
    assert len(worker.updates) == 3
    assert measured(worker) == {}
    assert caplog.text.count("evaluation is disabled") == 1


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold evaluations that run beside training until the event is set; fail those that wait for 30 seconds."""
    opened, usual = threading.Event(), Subject.measure

    def measure(subject: Subject, files: Any, batch_size: int, limit: int | None = None) -> EvaluatedModel:
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(30), "the evaluation has held up what it waits for"
        return usual(subject, files, batch_size, limit)

    monkeypatch.setattr(Subject, "measure", measure)
    return opened


def test_the_next_round_is_trained_during_an_evaluation(
    make_worker: Callable[..., Any], held_out: list[Path], gate: threading.Event
) -> None:
    worker = make_worker(rounds=3, batches=4)
    serving(worker, held_out[:2])

    def status(body: Any) -> tuple[int, Any]:
        if worker.done_rounds == 1 and body == "update":
            assert measured(worker) == {}
            gate.set()  # the second round's batches are done
        return worker.status(body)  # type: ignore[no-any-return]

    worker.answers["/status/send"] = status
    assert training.main(worker.arguments(evaluation={"data": SHARE, "every": 1})) == 0
    found = measured(worker)
    assert 1 in found
    assert 3 in found, "the last round is evaluated before the executor exits"


def test_an_evaluation_longer_than_rounds_leaves_out_those_that_follow(
    make_worker: Callable[..., Any], held_out: list[Path], gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker(rounds=4, batches=4)
    serving(worker, held_out[:2])

    def status(body: Any) -> tuple[int, Any]:
        answer = worker.status(body)
        if worker.done_rounds == 4:
            gate.set()
        return answer  # type: ignore[no-any-return]

    worker.answers["/status/send"] = status
    assert training.main(worker.arguments(evaluation={"data": SHARE, "every": 1})) == 0
    assert list(measured(worker)) == [1, 4]
    assert "round 2 is not evaluated: the evaluation of an earlier round still runs" in caplog.text
    assert "round 3 is not evaluated" in caplog.text


def test_a_refused_report_of_an_evaluation_ends_the_executor(
    make_worker: Callable[..., Any], held_out: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker(rounds=3, batches=4)
    serving(worker, held_out[:2])

    def status(body: Any) -> tuple[int, Any]:
        if isinstance(body, dict) and "evaluation_loss" in body.get("metrics", {}).get("metrics", {}):
            return 200, {"type": "Error", "reason": "who are you"}
        return worker.status(body)  # type: ignore[no-any-return]

    worker.answers["/status/send"] = status
    assert training.main(worker.arguments(evaluation={"data": SHARE, "every": 1})) == 1
    assert "who are you" in caplog.records[-1].getMessage()


OWN_CLASSES = """
import torch

class Noisy(torch.nn.Module):
    scale = 1.0

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(64, 10)

    def forward(self, pixel_values, labels):
        x = pixel_values.flatten(1)
        if self.scale:
            x = x + self.scale * torch.rand_like(x)
        return torch.nn.functional.cross_entropy(self.inner(x), labels)

class Unique(Noisy):
    scale = 0.0

    def __deepcopy__(self, memo):
        raise RuntimeError("there is one of me")
"""


@pytest.fixture
def run_own(
    make_worker: Callable[..., Any], held_out: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Return a function that trains a class of the worker's owner, three rounds, and returns the worker."""
    (tmp_path / "owners_classes.py").write_text(OWN_CLASSES)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(name: str, **config: Any) -> Any:
        model = tmp_path / name
        options = ["--task", "torch", "--torch-class", f"owners_classes:{name}", "--out", str(model)]
        if not model.exists():
            assert CliRunner().invoke(command, ["create-model", *options]).exit_code == 0
        worker = make_worker(rounds=3, batches=4, model_dir=model)
        serving(worker, held_out[:2])
        assert training.main([*worker.arguments(task="torch", **config), "--allow-module", "owners_classes"]) == 0
        return worker

    yield run
    sys.modules.pop("owners_classes", None)


def _is_evaluated_before_the_merge_is_reported(worker: Any) -> bool:
    merged = worker.kinds.index("update-received")
    return worker.kinds[merged - 2 : merged + 2] == ["metrics", "metrics", "update-received", "status"]


def test_a_model_that_cannot_be_copied_is_evaluated_before_its_merge_is_reported(run_own: Callable[..., Any]) -> None:
    worker = run_own("Unique", evaluation={"data": SHARE, "every": 1})
    assert list(measured(worker)) == [1, 2, 3]
    assert _is_evaluated_before_the_merge_is_reported(worker)


def test_a_model_that_draws_random_numbers_in_evaluation_still_trains_reproducibly(
    run_own: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    plain, watched = run_own("Noisy"), run_own("Noisy", evaluation={"data": SHARE, "every": 1})
    assert "draws random numbers in evaluation" in caplog.text
    assert list(measured(watched)) == [1, 2, 3]
    assert _is_evaluated_before_the_merge_is_reported(watched)
    for ours, theirs in zip(watched.updates, plain.updates, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_session_executes_commands_like_processes_of_their_own(tmp_path: Path, held_out: list[Path]) -> None:
    model = str(tmp_path / "model")
    create = ["create-model", "--arch", "resnet-digits", "--out", model]
    measure = ["evaluate", "--model", model, "--data", str(held_out[2])]
    lines = [json.dumps(each).replace(", ", ",\r") for each in (create, measure, create, ["--version"], ["none"], 7)]
    done = CliRunner().invoke(command, ["session"], input="\n".join([*lines, "{", ""]))
    assert done.exit_code == 0
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["status"] for answer in answers] == [0, 0, 1, 0, 2, 2, 2]
    alone = CliRunner().invoke(command, measure)
    assert json.loads(answers[1]["output"]) == json.loads(alone.stdout)
    assert "not an empty directory" in answers[2]["output"]
    assert "hypha-accelerate-executor" in answers[3]["output"]
    assert "'none'" in answers[4]["output"]
    assert "not an array of strings" in answers[5]["output"]
    assert "is not JSON" in answers[6]["output"]
