"""What an executor states about its updates, how it keeps to committed weights, and how it joins and leaves rounds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from blake3 import blake3
from support.loopback_ports import free_port

from hypha.accelerate_executor import training
from hypha.accelerate_executor.data.recorded_batches import recorded_batches
from hypha.accelerate_executor.diloco import global_weights, loop
from hypha.accelerate_executor.diloco.round_seed import round_seed
from hypha.accelerate_executor.distributed.accelerator import CpuBackend
from hypha.accelerate_executor.distributed.process_group import LoadModel, Reset, SingleProcess
from hypha.accelerate_executor.options import ModelFiles, OwnerOptions
from hypha.accelerate_executor.training_setup import build_setup
from hypha_proto.bridge_api import read_transfer
from hypha_proto.contributions import OPTIMIZER_KEPT, OPTIMIZER_RESET, Contribution
from hypha_proto.update_file import UpdateMetadata, open_update, write_update
from hypha_proto.weights_digest import digest_weights

PEER = "12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
WEIGHTS = {
    "type": "peers",
    "peers": [PEER],
    "strategy": {"type": "One"},
    "resource": {"dataset": "job/weights", "index": 0},
    "filenames": ["weights.safetensors"],
}
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass
class CommittingScheduler:
    """Adds the outer updates to weights of its own, states their digests, and serves them."""

    worker: Any
    weights: Arrays
    round: int = 0
    contributions: list[Contribution | None] = field(default_factory=list)
    refusals: set[int] = field(default_factory=set)
    """Rounds of which it refuses the contribution."""
    false_outer: dict[int, Callable[[Arrays], Arrays]] = field(default_factory=dict)
    """Round -> what a faulty connection makes of the outer update on its way to the executor."""
    served: list[Callable[[Path], None]] = field(default_factory=list)
    """Replacements for the next answers to requests for the weights: each writes a file."""
    requests: int = 0
    """Requests for the weights."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of the weights after each round."""

    def __post_init__(self) -> None:
        self.digests[0] = digest_weights(self.weights.items())
        self.worker.answers |= {"/resources/send": self.send, "/resources/fetch": self.fetch}

    def send(self, body: Any) -> tuple[int, Any]:
        self.contributions.append(read_transfer("send", body).contribution)
        number, worker = body["round"], self.worker
        worker.sent.append(body)
        kept = worker.work_dir.parent / f"kept-{number}.safetensors"
        shutil.copy(worker.work_dir / body["path"], kept)
        worker.updates.append(kept)
        outer = worker.work_dir.parent / f"outer-{number}.safetensors"
        worker.outer.step(kept, outer)
        worker.outers.append(outer)
        self.advance(number, outer)
        self.push(number, outer)
        if number in self.refusals:
            return 409, {"error": "update-refused", "detail": f"ranges of round {number} are not yours"}
        return 200, {"sent": {PEER: 1}}

    def advance(self, number: int, outer: Path) -> None:
        file, _ = open_update(outer)
        with file:
            for name, value in self.weights.items():
                change = file.tensor(name)
                if np.issubdtype(value.dtype, np.integer):
                    change = np.rint(value + change.astype(np.float64)).astype("i8") - value
                self.weights[name] = np.asarray(value + change)
        self.round = number
        self.digests[number] = digest_weights(self.weights.items())

    def push(self, number: int, outer: Path) -> None:
        incoming = self.worker.work_dir / "incoming" / outer.name
        incoming.parent.mkdir(exist_ok=True)
        shutil.copy(outer, incoming)
        if (change := self.false_outer.get(number)) is not None:
            file, metadata = open_update(outer)
            with file:
                tensors = change({name: file.tensor(name) for name in file.tensors})
            about = UpdateMetadata(metadata.round, statistics=metadata.statistics)
            write_update(incoming, {name: value.shape for name, value in tensors.items()}, tensors.items(), about)
        event = {"path": f"incoming/{outer.name}", "size": 1, "from_peer": PEER, "round": number}
        self.worker.events.put(event | {"weights": self.digests[number]})

    def fetch(self, body: Any) -> tuple[int, Any]:
        if body.get("filenames") != WEIGHTS["filenames"]:
            return self.worker.fetch(body)  # type: ignore[no-any-return]
        self.requests += 1
        path = self.worker.work_dir / body["out_dir"] / "weights.safetensors"
        path.parent.mkdir(exist_ok=True)
        (self.served.pop(0) if self.served else self.write)(path)
        if not path.exists():
            return 502, {"error": "peer-failed", "detail": "the scheduler is away"}
        name = path.relative_to(self.worker.work_dir).as_posix()
        return 200, [{"path": name, "size": 1, "checksum": "blake3:" + "0" * 64, "metadata": {}}]

    def write(self, path: Path, **about: str) -> None:
        """Write the weights as they are."""
        safetensors.numpy.save_file(self.weights, path, {"round": str(self.round)} | about)


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


def _arguments(scheduler: CommittingScheduler, **config: Any) -> list[str]:
    return [*scheduler.worker.arguments(**({"term": 1, "weights": WEIGHTS} | config)), "--timeout", "20"]


def _run(scheduler: CommittingScheduler, **config: Any) -> int:
    return training.main(_arguments(scheduler, **config))


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
    assert all("weights_fetched" not in metrics for metrics in scheduler.worker.metrics)


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
    job: Callable[..., Any], fails: Callable[..., str]
) -> None:
    scheduler = job(rounds=9)
    scheduler.refusals = {2, 3, 4, 5}
    message = fails(training.main, _arguments(scheduler), 1)
    refusals = "the scheduler has not accepted the updates of 3 rounds in a row"
    assert message == f"{refusals}; round 4: ranges of round 4 are not yours"
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
    assert [metrics.get("weights_fetched") for metrics in scheduler.worker.metrics] == [None, 1.0, None]
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
        safetensors.numpy.save_file(tensors, path, {"round": str(scheduler.round)})

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
    job: Callable[..., Any], fails: Callable[..., str], served: Any, words: str
) -> None:
    scheduler = job()
    scheduler.false_outer = {1: _moved}
    scheduler.served = [served(scheduler)] * 3
    assert words in fails(training.main, _arguments(scheduler), 1)
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
    first, _ = scheduler.worker.update(0)
    assert np.abs(first["classifier.1.bias"]).max() < 0.5, "the module began from them, not only the record"


def test_a_later_start_without_weights_to_fetch_begins_from_the_model(job: Callable[..., Any]) -> None:
    scheduler = job(rounds=1)
    assert _run(scheduler, first_round=5, weights=None) == 0
    assert scheduler.requests == 0
    assert scheduler.contributions[0].weights == scheduler.digests[0]


SCHEDULE = {"type": "linear-with-warmup", "warmup_steps": 3, "training_steps": 60}


@dataclass
class JoinedJob:
    """A job whose worker is told with which rounds it begins."""

    scheduler: CommittingScheduler
    begins: list[int]
    """Rounds, the others have finished those before."""
    closed: set[int] = field(default_factory=set)
    """Rounds that go on without the worker."""
    sent: list[int] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        worker = self.scheduler.worker
        worker.answers |= {"/rounds/join": self.join, "/resources/send": self.send}

    def join(self, _: Any) -> tuple[int, Any]:
        self.asked += 1
        number = self.begins.pop(0)
        while self.scheduler.round < number - 1:
            self.advance()
        self.scheduler.worker.handed_out = 10 * number  # slices by round, so that two processes get the same ones
        if number == 1:
            return 200, {"round": 1}
        return 200, {"round": number, "weights": self.scheduler.digests[number - 1]}

    def advance(self) -> None:
        """Finish a round without the worker."""
        number = self.scheduler.round + 1
        path = self.scheduler.worker.work_dir.parent / f"others-{number}.safetensors"
        changes = {name: np.full(value.shape, 2.0**-7 * number, "f4") for name, value in self.scheduler.weights.items()}
        shapes = {name: value.shape for name, value in changes.items()}
        write_update(path, shapes, changes.items(), UpdateMetadata(round=number))
        self.scheduler.advance(number, path)
        self.scheduler.push(number, path)

    def send(self, body: Any) -> tuple[int, Any]:
        self.sent.append(body["round"])
        if body["round"] in self.closed:
            self.advance()
            return 409, {"error": "round-closed", "detail": "it was waited for long enough"}
        return self.scheduler.send(body)

    def run(self, **config: Any) -> int:
        """Run the process in this one; return its exit code."""
        return training.main([*self.arguments(**config), "--timeout", "20"])

    def arguments(self, **config: Any) -> list[str]:
        usual = {"term": 1, "weights": WEIGHTS, "join": True, "scheduler": SCHEDULE, "round_steps": 5.0}
        return self.scheduler.worker.arguments(**(usual | config))  # type: ignore[no-any-return]


@pytest.fixture
def joining(job: Callable[..., CommittingScheduler]) -> Callable[..., JoinedJob]:
    """Return a function that makes a job by the rounds with which the worker begins."""

    def make(*begins: int, closed: set[int] | None = None, **settings: Any) -> JoinedJob:
        return JoinedJob(job(**{"rounds": 2, **settings}), list(begins), closed or set())

    return make


def test_it_begins_with_the_round_and_the_weights_that_it_is_given(joining: Callable[..., JoinedJob]) -> None:
    joined = joining(4)
    assert joined.run() == 0
    found = joined.scheduler.contributions
    assert [each.round for each in found if each] == [4, 5]
    assert [each.weights for each in found if each] == [joined.scheduler.digests[3], joined.scheduler.digests[4]]
    assert [each.optimizer for each in found if each] == [OPTIMIZER_RESET, OPTIMIZER_KEPT]
    assert joined.asked == 1


@pytest.mark.parametrize("keeps", [True, False])
def test_a_slice_comes_while_the_model_is_loaded_and_is_used_if_it_still_may(
    joining: Callable[..., JoinedJob], keeps: bool
) -> None:
    joined, order, has_asked = joining(2), [], threading.Event()
    worker, join = joined.scheduler.worker, joined.join

    def fetch(body: Any) -> tuple[int, Any]:
        if body["type"] == "scheduler":
            order.append("slice ahead" if body.get("ahead") else "slice")
            has_asked.set()
        return joined.scheduler.fetch(body)

    def ask(body: Any) -> tuple[int, Any]:
        assert has_asked.wait(20)
        order.append("join")
        status, answer = join(body)
        return status, answer | {"keeps": keeps}

    worker.answers |= {"/resources/fetch": fetch, "/rounds/join": ask}
    assert joined.run() == 0
    assert order[:2] == ["slice ahead", "join"]
    assert set(order[2:]) == {"slice"}
    [first, *_] = joined.scheduler.contributions
    assert first is not None
    assert ((first.ranges[0].epoch, first.ranges[0].slice) == (0, 0)) is keeps


def test_after_a_closed_round_it_trains_as_a_process_that_has_just_started(joining: Callable[..., JoinedJob]) -> None:
    again, fresh = joining(1, 4, closed={2}, rounds=3), joining(4, rounds=2)
    assert again.run() == 0
    while fresh.scheduler.round < 3:  # its round 1 is that of the other job, with its update
        number = fresh.scheduler.round + 1
        if number == 1:
            fresh.scheduler.advance(1, again.scheduler.worker.outers[0])
        else:
            fresh.advance()
    assert fresh.run() == 0
    assert again.sent == [1, 2, 4, 5]
    assert again.scheduler.digests == fresh.scheduler.digests
    ours, theirs = again.scheduler.worker.updates[1:], fresh.scheduler.worker.updates
    assert [path.read_bytes() for path in ours] == [path.read_bytes() for path in theirs]
    assert again.scheduler.contributions[1:] == fresh.scheduler.contributions
    assert not list(again.scheduler.worker.work_dir.glob("update-*"))


def test_it_joins_again_when_the_job_goes_on_while_it_fetches(joining: Callable[..., JoinedJob]) -> None:
    joined = joining(3, 5)

    def later(path: Path) -> None:
        joined.advance()
        joined.advance()
        joined.scheduler.write(path)

    joined.scheduler.served = [later]
    assert joined.run() == 0
    assert (joined.asked, joined.scheduler.requests, joined.sent) == (2, 1, [5, 6])


def test_a_job_that_is_always_ahead_ends_the_process(
    joining: Callable[..., JoinedJob], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MAX_BEHIND", 2)
    joined = joining(3, 5, 7)

    def later(path: Path) -> None:
        joined.advance()
        joined.scheduler.write(path)

    joined.scheduler.served = [later, later]
    assert joined.run() == 1
    assert "the job went on 2 times while the weights of a round were fetched" in caplog.text


def test_weights_with_another_digest_end_the_process(
    joining: Callable[..., JoinedJob], caplog: pytest.LogCaptureFixture
) -> None:
    joined = joining(3)
    joined.scheduler.served = [_with(joined.scheduler, **{"classifier.1.bias": np.zeros(10, "f4")})]
    assert joined.run() == 1
    assert "and the scheduler has committed" in caplog.text
    assert joined.sent == []


def test_in_a_job_that_nobody_joins_it_begins_as_the_task_says(joining: Callable[..., JoinedJob]) -> None:
    joined = joining()
    joined.advance()
    assert joined.run(first_round=2, join=None) == 0
    assert joined.asked == 0
    assert joined.sent == [2, 3]
    first = joined.scheduler.contributions[0]
    assert first is not None
    assert first.weights == joined.scheduler.digests[1]


def test_it_ends_when_the_job_does_not_need_it(
    joining: Callable[..., JoinedJob], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    joined, join = joining(1, closed={1}), []

    def ask(body: Any) -> tuple[int, Any]:
        join.append(body)
        return joined.join(body) if len(join) == 1 else (410, {"error": "no-round", "detail": "three rounds missed"})

    joined.scheduler.worker.answers["/rounds/join"] = ask
    assert joined.run() == 0
    assert joined.sent == [1]
    assert "the job needs this process no more: three rounds missed" in caplog.text


@pytest.mark.parametrize("answer", [{}, {"round": -1}, {"round": 1, "weights": "md5:0"}, b"[" * 100_000])
def test_a_malformed_answer_ends_the_process(
    joining: Callable[..., JoinedJob], caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    joined = joining()
    joined.scheduler.worker.answers["/rounds/join"] = lambda _: (200, answer)
    assert joined.run() == 1
    assert "join: the worker answered 200 malformed-answer" in caplog.text


def test_a_reset_discards_moments_and_changes_of_buffers_that_are_not_exchanged(
    make_worker: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counting_net.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = torch.nn.Linear(2, 1)\n"
        "        self.register_buffer('calls', torch.zeros(1), persistent=False)\n"
        "    def forward(self, x):\n        self.calls += 1\n        return self.layer(x).sum() * self.calls.sum()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from hypha.accelerate_executor.data.batches import Batch
    from hypha.accelerate_executor.modeling.torch import write_torch_model

    write_torch_model("counting_net:Net", {}, 0, tmp_path / "model")
    config = training.read_settings(make_worker().job(task="torch", inputs=["x"]))
    options = OwnerOptions(frozenset({"counting_net"}))
    setup = build_setup(config, options, ModelFiles(tmp_path / "model"), CpuBackend(), SingleProcess())
    losses = []
    for _ in range(2):
        losses.append(setup.trainer.step(Batch({"x": np.ones((3, 2), "f4")}, 3)))
        setup.trainer.step(Batch({"x": np.ones((3, 2), "f4")}, 3))
        setup.reset()
        setup.replica.load_global()
    assert losses[0] == losses[1]
    assert not setup.optimizer.adamw.state
    assert torch.equal(dict(setup.module.named_buffers())["calls"], torch.zeros(1))


def test_a_follower_resets_as_its_leader(
    follow_commands: Callable[..., None], digit_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets = []
    monkeypatch.setattr("hypha.accelerate_executor.training_setup._reset", lambda *_: resets.append(1))
    follow_commands(LoadModel(ModelFiles(digit_model)), Reset())
    assert resets == [1]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_two_processes_begin_anew_as_one(
    joining: Callable[..., JoinedJob], llama: Path, text_slices: list[Path]
) -> None:
    """A process group that leaves a round trains the next ones as one that has just started."""
    again = joining(1, 3, closed={1}, rounds=1, model_dir=llama, slices=text_slices)
    fresh = joining(3, rounds=1, model_dir=llama, slices=text_slices)
    for joined in (again, fresh):
        launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        launched["MASTER_PORT"] = str(free_port())
        arguments = [*joined.arguments(task="causal-lm"), "--timeout", "60"]
        command = [sys.executable, "-m", "hypha.accelerate_executor.training", *arguments]
        running = [
            subprocess.Popen(command, env=os.environ | launched | {"RANK": rank, "LOCAL_RANK": rank})
            for rank in ("0", "1")
        ]
        try:
            assert [process.wait(120) for process in running] == [0, 0]
        finally:
            for process in running:
                process.kill()
    assert (again.sent, fresh.sent) == ([1, 3], [3])
    [ours], [theirs] = again.scheduler.worker.updates, fresh.scheduler.worker.updates
    assert ours.read_bytes() == theirs.read_bytes()
