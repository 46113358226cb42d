"""What a round of the job decides in each worker: the random generators' seed and the position in the schedule."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from hypha.accelerate_executor import training
from hypha.accelerate_executor.diloco import loop
from hypha.accelerate_executor.diloco.loop import LoopTiming, follow
from hypha.accelerate_executor.diloco.round_seed import round_seed, seed_generators
from hypha.accelerate_executor.distributed.process_group import BeginRound, Command, LoadModel, Shutdown
from hypha.accelerate_executor.modeling.create import create_model
from hypha.accelerate_executor.options import ModelFiles, OwnerOptions
from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer, learning_rate_factor
from hypha.accelerate_executor.train.trainer import Trainer
from hypha_proto.job_spec import Adam, LinearWithWarmup
from hypha_proto.update_file import open_update

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]

MODEL = {"task": "causal-lm", "artifact": {"type": "uri", "value": "x"}, "input-names": ["input_ids"]}


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a small language model with dropout."""
    folder = tmp_path_factory.mktemp("gpt") / "model"
    config = {"model_type": "gpt2", "vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    create_model("causal-lm", config | {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}, 0, folder)
    return folder


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one slice of tokens."""
    path = tmp_path_factory.mktemp("rows") / "slice-0.safetensors"
    tokens = np.random.default_rng(0).integers(0, 32, (64, 8)).astype("i4")
    safetensors.numpy.save_file({"input_ids": tokens}, path)
    return path


@pytest.fixture
def train(make_worker: Callable[..., Any], gpt: Path, rows: Path) -> Callable[..., list[bytes]]:
    """Return a function that trains the model and returns its update files."""

    def run(*, batches: int = 4, **config: Any) -> list[bytes]:
        worker = make_worker(rounds=2, batches=batches, model_dir=gpt, slices=[rows])
        assert training.main(worker.arguments(model=MODEL, **config)) == 0
        return [path.read_bytes() for path in worker.updates]

    return run


def test_members_have_different_dropout_and_each_its_own_again(train: Callable[..., list[bytes]]) -> None:
    first, again, second = train(member=0), train(member=0), train(member=1)
    assert first == again
    assert first[0] != second[0]
    assert train() == train()
    assert train()[0] != first[0]
    assert train(member=0, seed=4)[0] != first[0]


def test_the_stream_of_a_round_does_not_depend_on_the_rounds_before(
    train: Callable[..., list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    compute = Trainer.compute

    def record(trainer: Trainer, *arguments: Any) -> float:
        seeds.append(torch.initial_seed())
        return compute(trainer, *arguments)

    monkeypatch.setattr(Trainer, "compute", record)
    rounds = [round_seed(3, 1, number) for number in (1, 2, 3)]
    train(member=1, batches=3)
    train(member=1, batches=5)
    assert seeds == [rounds[0]] * 3 + [rounds[1]] * 3 + [rounds[0]] * 5 + [rounds[1]] * 5
    seeds.clear()
    train(member=1, batches=3, first_round=2)
    assert seeds == [rounds[1]] * 3 + [rounds[2]] * 3


def test_followers_have_the_seed_of_their_leader(
    make_worker: Callable[..., Any], gpt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Follower:
        size, leads = 2, False
        commands: Iterator[Command] = iter([LoadModel(ModelFiles(gpt)), BeginRound(7), Shutdown()])

        def receive_command(self) -> Command:
            return next(self.commands)

    monkeypatch.setattr(loop, "join_process_group", lambda _timeout: Follower())
    worker = make_worker()
    follow(training.read_settings(worker.job(model=MODEL, member=2)), OwnerOptions(), LoopTiming(1.0))
    assert torch.initial_seed() == round_seed(3, 2, 7)


def test_seeds_differ_and_are_those_of_the_documentation() -> None:
    places = [(seed, member, number) for seed in (0, 1, 2**64 - 1) for member in (None, 0, 1, 11) for number in (1, 2)]
    found = [round_seed(*place) for place in places]
    assert len(set(found)) == len(found)
    assert all(0 <= value < 2**63 for value in found)
    assert round_seed(0, 0, 1) == 0x6B147C773F03EF17 >> 1  # printf 0/0/1 | sha256sum
    assert round_seed(3, None, 2) == 0x111EC1FEDB373877 >> 1


def test_all_generators_are_seeded() -> None:
    drawn = []
    for value in (2**62 + 1, 2**62 + 2, 2**62 + 1):
        seed_generators(value)
        drawn.append((float(torch.rand(1)), float(np.random.rand()), random.random()))
    assert drawn[0] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))


def test_a_round_begins_at_the_jobs_step_and_ends_before_the_next_ones() -> None:
    schedule = LinearWithWarmup(warmup_steps=5, training_steps=40)
    optimizer = InnerOptimizer([torch.nn.Parameter(torch.zeros(1))], Adam(learning_rate=2.0), schedule, round_steps=2.5)
    rates = []
    for number, batches in ((1, 4), (2, 1), (9, 2)):
        optimizer.begin_round(number)
        for _ in range(batches):
            optimizer.step()
            rates.append(optimizer.adamw.param_groups[0]["lr"])
    steps = [0, 1, 2, 2.5, 2.5, 20, 21]
    assert rates == [2.0 * learning_rate_factor(schedule)(step) for step in steps]


@pytest.mark.parametrize(("batches", "moves"), [(20, [True, True, False]), (5, [True, True, False])])
def test_the_schedule_follows_the_job_whatever_the_workers_speed(
    make_worker: Callable[..., Any], batches: int, moves: list[bool]
) -> None:
    worker = make_worker(rounds=3, batches=batches)
    schedule = {"type": "linear-with-warmup", "warmup_steps": 0, "training_steps": 20}
    assert training.main(worker.arguments(scheduler=schedule, round_steps=10.0)) == 0
    moved = []
    for path in worker.updates:
        file, metadata = open_update(path)
        with file:
            names = file.tensors.keys() - metadata.statistics
            moved.append(any(bool(file.tensor(name).any()) for name in names))
    assert moved == moves
