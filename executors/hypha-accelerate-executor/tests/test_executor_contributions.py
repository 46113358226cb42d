"""What an executor states about its updates, and how it keeps to the weights that the scheduler has committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from blake3 import blake3
from support.committing_scheduler import WEIGHTS, Arrays, CommittingScheduler

from hypha.accelerate_executor import training
from hypha.accelerate_executor.data.recorded_batches import recorded_batches
from hypha.accelerate_executor.diloco import global_weights
from hypha.accelerate_executor.diloco.round_seed import round_seed
from hypha_proto.bridge_api import read_transfer
from hypha_proto.contributions import OPTIMIZER_KEPT, OPTIMIZER_RESET
from hypha_proto.update_file import UpdateMetadata, open_update, write_update
from hypha_proto.weights_digest import digest_weights

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]


@pytest.fixture
def job(make_worker: Callable[..., Any]) -> Callable[..., CommittingScheduler]:
    """Return a function that starts a fake worker whose scheduler commits its rounds."""

    def make(**settings: Any) -> CommittingScheduler:
        worker = make_worker(**{"rounds": 3, "batches": 5, **settings})
        weights: Arrays = safetensors.numpy.load_file(worker.model_dir / "model.safetensors")
        return CommittingScheduler(worker, dict(weights))

    return make


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch weights again at once, at most three times."""
    monkeypatch.setattr(global_weights, "PAUSES", (0.0, 0.0))


def _run(scheduler: CommittingScheduler, **config: Any) -> int:
    usual = {"term": 1, "weights": WEIGHTS}
    return training.main([*scheduler.worker.arguments(**(usual | config)), "--timeout", "20"])


def _failure(caplog: pytest.LogCaptureFixture) -> str:
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    return errors[0].getMessage()


def test_each_update_is_stated_with_what_it_was_computed_from(job: Callable[..., Any]) -> None:
    scheduler = job(batches=8)
    assert _run(scheduler, member=2) == 0
    worker, found = scheduler.worker, scheduler.contributions
    assert [each.round for each in found] == [1, 2, 3]
    assert [each.weights for each in found] == [scheduler.digests[number] for number in (0, 1, 2)]
    assert [each.update for each in found] == [f"blake3:{blake3(p.read_bytes()).hexdigest()}" for p in worker.updates]
    assert [each.optimizer for each in found] == [OPTIMIZER_RESET, OPTIMIZER_KEPT, OPTIMIZER_KEPT]
    assert [each.seed for each in found] == [round_seed(3, 2, number) for number in (1, 2, 3)]
    assert {(each.batches, each.batch_size) for each in found} == {(8, 16)}
    ranges = [[(r.epoch, r.slice, r.first, r.end) for r in each.ranges] for each in found]
    assert ranges == [
        [(0, 0, 0, 90), (0, 1, 0, 38)],
        [(0, 1, 38, 90), (0, 2, 0, 76)],
        [(0, 2, 76, 90), (0, 3, 0, 90), (0, 4, 0, 24)],
    ]
    assert scheduler.requests == 0
    assert all("weights_fetched" not in metrics for metrics in scheduler.metrics())


def test_the_stated_ranges_are_the_batches_that_were_trained_on(
    job: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hypha.accelerate_executor.train.trainer import Trainer

    scheduler, used, split = job(rounds=2, batches=7), [], Trainer.split

    def record(trainer: Trainer, batch: Any, processes: int = 1) -> Any:
        used.append(batch)
        return split(trainer, batch, processes)

    monkeypatch.setattr(Trainer, "split", record)
    assert _run(scheduler) == 0
    again = [
        batch
        for each in scheduler.contributions
        for batch in recorded_batches(scheduler.worker.slices.__getitem__, each.ranges, each.batch_size, 3)
    ]
    assert len(again) == len(used) == 14
    for one, other in zip(again, used, strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        assert all(np.array_equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_a_job_without_a_term_states_nothing(job: Callable[..., Any]) -> None:
    scheduler = job(rounds=1)
    assert training.main([*scheduler.worker.arguments(), "--timeout", "20"]) == 0
    assert scheduler.contributions == [None]
    assert "contribution" not in scheduler.worker.sent[0]


def test_parts_of_slices_are_trained_on_and_stated(job: Callable[..., Any]) -> None:
    scheduler = job(rounds=1, batches=4)
    bounds = iter([(30, 50), (60, 90), (7, 40)])

    def fetch(body: Any) -> tuple[int, Any]:
        if body["type"] != "scheduler":
            return scheduler.worker.fetch(body)  # type: ignore[no-any-return]
        status, [entry] = scheduler.worker.fetch(body)
        first, end = next(bounds)
        entry["metadata"] |= {"first": str(first), "end": str(end)}
        return status, [entry]

    scheduler.worker.answers["/resources/fetch"] = fetch
    assert _run(scheduler) == 0
    ranges = [(r.slice, r.first, r.end) for r in scheduler.contributions[0].ranges]
    assert ranges == [(0, 30, 50), (1, 60, 90), (2, 7, 21)]


def test_an_update_is_kept_until_its_round_is_merged(job: Callable[..., Any]) -> None:
    for term, expected in ((1, True), (None, False)):
        scheduler, kept = job(), []
        usual = scheduler.worker.status

        def status(body: Any, scheduler: Any = scheduler, kept: Any = kept, usual: Any = usual) -> tuple[int, Any]:
            if isinstance(body, dict) and "metrics" in body:
                kept.append((scheduler.worker.work_dir / f"update-{body['metrics']['round']}.safetensors").exists())
            return usual(body)  # type: ignore[no-any-return]

        scheduler.worker.answers["/status/send"] = status
        assert _run(scheduler, term=term) == 0
        assert kept == [expected] * 3
        assert list(scheduler.worker.work_dir.glob("update-*")) == []


def test_a_refused_contribution_costs_the_round_and_not_the_job(
    job: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = job(rounds=6)
    scheduler.refusals = {1, 2, 4, 5}
    assert _run(scheduler) == 0
    assert [each.round for each in scheduler.contributions] == [1, 2, 3, 4, 5, 6]
    assert [each.weights for each in scheduler.contributions] == [scheduler.digests[number] for number in range(6)]
    assert "the update of round 4 does not count: ranges of round 4 are not yours" in caplog.text
    assert scheduler.worker.done_rounds == 6


def test_three_refused_contributions_in_a_row_end_the_executor(
    job: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = job(rounds=9)
    scheduler.refusals = {2, 3, 4, 5}
    assert _run(scheduler) == 1
    expected = (
        "the scheduler has not accepted the updates of 3 rounds in a row; round 4: ranges of round 4 are not yours"
    )
    assert _failure(caplog) == expected
    assert len(scheduler.contributions) == 4


def _moved(tensors: Arrays) -> Arrays:
    name = min(tensors)
    return tensors | {name: tensors[name] + np.float32(1e-3)}


def test_weights_that_differ_are_fetched_and_counted(job: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    scheduler, plain = job(), job()
    scheduler.false_outer = {1: _moved}
    assert _run(plain) == 0
    assert _run(scheduler) == 0
    assert scheduler.requests == 1
    assert "round 1: the weights have the digest blake3:" in caplog.text
    assert [metrics.get("weights_fetched") for metrics in scheduler.metrics()] == [None, 1.0, None]
    for ours, theirs in zip(scheduler.worker.updates, plain.worker.updates, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    assert not list((scheduler.worker.work_dir / "weights").iterdir())


def test_weights_without_a_digest_are_not_compared(job: Callable[..., Any]) -> None:
    scheduler = job(rounds=2)
    scheduler.false_outer = {1: _moved}
    scheduler.digests = dict.fromkeys(range(3))  # type: ignore[assignment]
    scheduler.advance = lambda number, outer: None  # type: ignore[method-assign]
    assert _run(scheduler, term=None) == 0
    assert scheduler.requests == 0


def test_weights_of_an_earlier_round_or_a_restarting_scheduler_are_asked_for_again(job: Callable[..., Any]) -> None:
    scheduler = job()
    scheduler.false_outer = {2: _moved}
    scheduler.served = [lambda path: scheduler.write(path, round="1"), lambda path: None]
    assert _run(scheduler) == 0
    assert scheduler.requests == 3
    assert scheduler.contributions[2].weights == scheduler.digests[2]


def _with(scheduler: CommittingScheduler, **changed: Any) -> Callable[[Path], None]:
    """Return a function that writes the weights with other tensors."""

    def write(path: Path) -> None:
        tensors = {name: value for name, value in (scheduler.weights | changed).items() if value is not None}
        safetensors.numpy.save_file(tensors, path, {"round": "1"})

    return write


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (lambda s: lambda path: s.write(path, round="0"), "sent the weights of round 0, expected those of round 1"),
        (
            lambda s: lambda path: None,
            "weights of round 1 cannot be fetched: /resources/fetch: the worker answered 502",
        ),
        (lambda s: lambda path: s.write(path, round="one"), "round is 'one' in its metadata"),
        (lambda s: lambda path: path.write_bytes(b"nothing"), "weights weights.safetensors: it is text"),
        (lambda s: _with(s, extra=np.zeros(1, "f4")), "weights weights.safetensors names the unknown tensor 'extra'"),
        (lambda s: _with(s, **{"classifier.1.bias": None}), "lacks the tensor 'classifier.1.bias'"),
        (lambda s: _with(s, **{"classifier.1.bias": np.zeros(11, "f4")}), "has shape (11,)"),
        (lambda s: _with(s, **{"classifier.1.bias": np.full(10, np.inf, "f4")}), "contains NaN or infinity"),
        (lambda s: _with(s, **{"classifier.1.bias": np.zeros(10, "f8")}), "has dtype F64, expected F32"),
        (lambda s: _with(s, **{"classifier.1.bias": np.zeros(10, "f4")}), "and the scheduler has committed"),
    ],
)
def test_weights_that_do_not_fit_end_the_executor(
    job: Callable[..., Any], caplog: pytest.LogCaptureFixture, served: Any, words: str
) -> None:
    scheduler = job()
    scheduler.false_outer = {1: _moved}
    scheduler.served = [served(scheduler)] * 3
    assert _run(scheduler) == 1
    assert words in _failure(caplog)
    assert len(scheduler.contributions) == 1


def test_weights_of_a_later_round_contain_the_outer_updates_up_to_it(job: Callable[..., Any]) -> None:
    """While this worker was slow, the others have finished the next round."""
    scheduler = job(rounds=4)
    scheduler.false_outer = {1: _moved}
    outers: list[Path] = []

    def later(path: Path) -> None:
        ahead = path.with_name("ahead.safetensors")
        changes = {name: np.full(value.shape, 0.25, "f4") for name, value in scheduler.weights.items()}
        shapes = {name: value.shape for name, value in changes.items()}
        write_update(ahead, shapes, changes.items(), UpdateMetadata(round=2))
        scheduler.advance(2, ahead)
        scheduler.write(path)
        outers.append(ahead)

    send = scheduler.send

    def refuse_second(body: Any) -> tuple[int, Any]:
        if body["round"] != 2:
            return send(body)  # type: ignore[no-any-return]
        scheduler.contributions.append(read_transfer("send", body).contribution)
        scheduler.push(2, outers[0])
        return 409, {"error": "update-refused", "detail": "the round is over"}

    scheduler.served = [later]
    scheduler.worker.answers["/resources/send"] = refuse_second
    assert _run(scheduler) == 0
    assert scheduler.requests == 1
    assert [each.weights for each in scheduler.contributions[2:]] == [scheduler.digests[2], scheduler.digests[3]]


def test_a_later_start_begins_from_the_fetched_weights(job: Callable[..., Any]) -> None:
    scheduler = job(rounds=2)
    scheduler.weights["classifier.1.bias"] = scheduler.weights["classifier.1.bias"] + np.float32(1)
    scheduler.round, scheduler.digests[4] = 4, digest_weights(scheduler.weights.items())
    scheduler.served = [lambda path: None]
    assert _run(scheduler, first_round=5, member=1) == 0
    assert scheduler.requests == 2
    assert [each.round for each in scheduler.contributions] == [5, 6]
    assert [each.weights for each in scheduler.contributions] == [scheduler.digests[4], scheduler.digests[5]]
    assert [each.optimizer for each in scheduler.contributions] == [OPTIMIZER_RESET, OPTIMIZER_KEPT]
    file, _ = open_update(scheduler.worker.updates[0])
    with file:  # the module began from them, not only the record
        assert float(np.abs(file.tensor("classifier.1.bias")).max()) < 0.5


def test_a_later_start_without_weights_to_fetch_begins_from_the_model(job: Callable[..., Any]) -> None:
    scheduler = job(rounds=1)
    assert _run(scheduler, first_round=5, weights=None) == 0
    assert scheduler.requests == 0
    assert scheduler.contributions[0].weights == scheduler.digests[0]
