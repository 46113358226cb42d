"""A process joins the rounds of a job, leaves one that goes on without it, and begins anew."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from support.committing_scheduler import WEIGHTS, CommittingScheduler
from support.loopback_ports import free_port

from hypha.accelerate_executor import training
from hypha.accelerate_executor.bridge.client import Fetched
from hypha.accelerate_executor.data.batches import Batches
from hypha.accelerate_executor.diloco import global_weights, loop
from hypha.accelerate_executor.diloco.loop import LoopTiming, follow
from hypha.accelerate_executor.distributed.accelerator import CpuBackend
from hypha.accelerate_executor.distributed.process_group import Command, LoadModel, Reset, Shutdown, SingleProcess
from hypha.accelerate_executor.errors import NoMoreData
from hypha.accelerate_executor.options import ModelFiles, OwnerOptions
from hypha.accelerate_executor.training_setup import build_setup
from hypha_proto.contributions import OPTIMIZER_KEPT, OPTIMIZER_RESET
from hypha_proto.update_file import UpdateMetadata, write_update

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]

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
def job(make_worker: Callable[..., Any]) -> Callable[..., JoinedJob]:
    """Return a function that makes a job by the rounds with which the worker begins."""

    def make(*begins: int, closed: set[int] | None = None, **settings: Any) -> JoinedJob:
        worker = make_worker(**{"rounds": 2, "batches": 5, **settings})
        weights = dict(safetensors.numpy.load_file(worker.model_dir / "model.safetensors"))
        return JoinedJob(CommittingScheduler(worker, weights), list(begins), closed or set())

    return make


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch weights again at once, at most three times."""
    monkeypatch.setattr(global_weights, "PAUSES", (0.0, 0.0))


def test_it_begins_with_the_round_and_the_weights_that_it_is_given(job: Callable[..., JoinedJob]) -> None:
    joined = job(4)
    assert joined.run() == 0
    found = joined.scheduler.contributions
    assert [each.round for each in found if each] == [4, 5]
    assert [each.weights for each in found if each] == [joined.scheduler.digests[3], joined.scheduler.digests[4]]
    assert [each.optimizer for each in found if each] == [OPTIMIZER_RESET, OPTIMIZER_KEPT]
    assert joined.asked == 1


def test_no_sample_is_requested_before_it_has_joined(job: Callable[..., JoinedJob]) -> None:
    joined, order = job(2), []
    worker, join = joined.scheduler.worker, joined.join

    def fetch(body: Any) -> tuple[int, Any]:
        order.append(body["type"])
        return joined.scheduler.fetch(body)

    def ask(body: Any) -> tuple[int, Any]:
        order.append("join")
        return join(body)

    worker.answers |= {"/resources/fetch": fetch, "/rounds/join": ask}
    assert joined.run() == 0
    assert order[: order.index("scheduler")] == ["uri", "join", "peers"]


def test_after_a_closed_round_it_trains_as_a_process_that_has_just_started(job: Callable[..., JoinedJob]) -> None:
    again, fresh = job(1, 4, closed={2}, rounds=3), job(4, rounds=2)
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


def test_it_joins_again_when_the_job_goes_on_while_it_fetches(job: Callable[..., JoinedJob]) -> None:
    joined = job(3, 5)

    def later(path: Path) -> None:
        joined.advance()
        joined.advance()
        joined.scheduler.write(path)

    joined.scheduler.served = [later]
    assert joined.run() == 0
    assert (joined.asked, joined.scheduler.requests, joined.sent) == (2, 1, [5, 6])


def test_a_job_that_is_always_ahead_ends_the_process(
    job: Callable[..., JoinedJob], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "MAX_BEHIND", 2)
    joined = job(3, 5, 7)

    def later(path: Path) -> None:
        joined.advance()
        joined.scheduler.write(path)

    joined.scheduler.served = [later, later]
    assert joined.run() == 1
    assert "the job went on 2 times while the weights of a round were fetched" in caplog.text


def test_weights_with_another_digest_end_the_process(
    job: Callable[..., JoinedJob], caplog: pytest.LogCaptureFixture
) -> None:
    joined = job(3)
    joined.scheduler.served = [lambda path: _write_moved(joined.scheduler, path)]
    assert joined.run() == 1
    assert "and the scheduler has committed" in caplog.text
    assert joined.sent == []


def _write_moved(scheduler: CommittingScheduler, path: Path) -> None:
    moved = {name: np.asarray(value + np.ones_like(value)) for name, value in scheduler.weights.items()}
    safetensors.numpy.save_file(moved, path, {"round": str(scheduler.round)})


def test_in_a_job_that_nobody_joins_it_begins_as_the_task_says(job: Callable[..., JoinedJob]) -> None:
    joined = job()
    joined.advance()
    assert joined.run(first_round=2, join=None) == 0
    assert joined.asked == 0
    assert joined.sent == [2, 3]
    first = joined.scheduler.contributions[0]
    assert first is not None
    assert first.weights == joined.scheduler.digests[1]


def test_it_ends_when_the_job_does_not_need_it(job: Callable[..., JoinedJob], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    joined, join = job(1, closed={1}), []

    def ask(body: Any) -> tuple[int, Any]:
        join.append(body)
        return joined.join(body) if len(join) == 1 else (410, {"error": "no-round", "detail": "three rounds missed"})

    joined.scheduler.worker.answers["/rounds/join"] = ask
    assert joined.run() == 0
    assert joined.sent == [1]
    assert "the job needs this process no more: three rounds missed" in caplog.text


@pytest.mark.parametrize("answer", [{}, {"round": -1}, {"round": 1, "weights": "md5:0"}, b"[" * 100_000])
def test_a_malformed_answer_ends_the_process(
    job: Callable[..., JoinedJob], caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    joined = job()
    joined.scheduler.worker.answers["/rounds/join"] = lambda _: (200, answer)
    assert joined.run() == 1
    assert "join: the worker answered 200 malformed-answer" in caplog.text


def test_samples_that_were_assigned_are_given_up(tmp_path: Path) -> None:
    paths = []

    def fetch() -> list[Fetched]:
        if len(paths) == 3:
            raise NoMoreData("none is free")
        paths.append(tmp_path / f"{len(paths)}.safetensors")
        rows = {"x": np.arange(8, dtype="f4").reshape(8, 1)}
        safetensors.numpy.save_file(rows, paths[-1])
        return [Fetched(paths[-1], {"slice": str(len(paths)), "epoch": "0"})]

    batches = Batches(fetch, 4, 0)
    next(batches)  # half of the first slice is left, the second one is on its way
    batches.drop()
    assert not any(path.exists() for path in paths)
    batch = next(batches)
    assert batch.slices == {"3": 4}
    batches.drop()  # there was no fourth
    batches.prefetch()
    with pytest.raises(StopIteration):
        next(batches)
    batches.close()


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
    model = {"task": "torch", "artifact": {"type": "uri", "value": "x"}, "input-names": ["x"]}
    config = training.read_settings(make_worker().job(model=model))
    options = OwnerOptions(frozenset({"counting_net"}))
    setup = build_setup(config, options, ModelFiles(tmp_path / "model"), CpuBackend(), SingleProcess())
    losses = []
    for _ in range(2):
        losses.append(setup.trainer.step(Batch({"x": np.ones((3, 2), "f4")}, 3, {})))
        setup.trainer.step(Batch({"x": np.ones((3, 2), "f4")}, 3, {}))
        setup.reset()
        setup.replica.load_global()
    assert losses[0] == losses[1]
    assert not setup.optimizer.adamw.state
    assert torch.equal(dict(setup.module.named_buffers())["calls"], torch.zeros(1))


def test_a_follower_resets_as_its_leader(
    make_worker: Callable[..., Any], digit_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets = []

    class Follower:
        size, leads = 2, False
        commands = iter((LoadModel(ModelFiles(digit_model)), Reset(), Shutdown()))

        def receive_command(self) -> Command:
            return next(self.commands)

    monkeypatch.setattr(loop, "join_process_group", lambda _timeout: Follower())
    monkeypatch.setattr("hypha.accelerate_executor.training_setup._reset", lambda *_: resets.append(1))
    follow(training.read_settings(make_worker().job()), OwnerOptions(), LoopTiming(1.0))
    assert resets == [1]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_two_processes_begin_anew_as_one(job: Callable[..., JoinedJob], llama: Path, tmp_path: Path) -> None:
    """A process group that leaves a round trains the next ones as one that has just started."""
    rows = tmp_path / "rows.safetensors"
    tokens = np.random.default_rng(0).integers(0, 64, (90, 12)).astype("i4")
    safetensors.numpy.save_file({"input_ids": tokens, "attention_mask": np.ones((90, 12), "u1")}, rows)
    model = {"task": "causal-lm", "artifact": {"type": "uri", "value": "x"}, "input-names": []}
    again = job(1, 3, closed={1}, rounds=1, model_dir=llama, slices=[rows])
    fresh = job(3, rounds=1, model_dir=llama, slices=[rows])
    for joined in (again, fresh):
        launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        launched["MASTER_PORT"] = str(free_port())
        arguments = [*joined.arguments(model=model), "--timeout", "60"]
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
