"""Rounds of a job in each worker: seeds, position in the schedule, optimizer, countdown and metrics."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypha.accelerate_executor import training
from hypha.accelerate_executor.diloco.metrics import RoundTally
from hypha.accelerate_executor.diloco.round_countdown import NextStep, RoundCountdown
from hypha.accelerate_executor.diloco.round_seed import round_seed, seed_generators
from hypha.accelerate_executor.distributed.process_group import BeginRound, LoadModel
from hypha.accelerate_executor.modeling.create import create_model
from hypha.accelerate_executor.options import ModelFiles
from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer, learning_rate_factor
from hypha.accelerate_executor.train.trainer import Trainer
from hypha_proto.job_spec import Adam, CosineWithWarmup, LinearWithWarmup, WarmupStableDecay
from hypha_proto.training_reports import Acknowledged, Continue, Done, ScheduleUpdate

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_torch_thread")]


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
        assert training.main(worker.arguments(task="causal-lm", inputs=["input_ids"], **config)) == 0
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


def test_followers_have_the_seed_of_their_leader(follow_commands: Callable[..., None], gpt: Path) -> None:
    follow_commands(LoadModel(ModelFiles(gpt)), BeginRound(7), task="causal-lm", inputs=["input_ids"], member=2)
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


@pytest.mark.parametrize(("batches", "round_steps"), [(20, 10.0), (5, 10.0), (10, None)])
def test_the_schedule_follows_the_job_whatever_the_workers_speed(
    make_worker: Callable[..., Any], batches: int, round_steps: float | None
) -> None:
    """Without `round_steps` each batch is a step, of which the job has twenty and not each round."""
    worker = make_worker(rounds=3, batches=batches)
    schedule = {"type": "linear-with-warmup", "warmup_steps": 0, "training_steps": 20}
    assert training.main(worker.arguments(scheduler=schedule, round_steps=round_steps)) == 0
    moved = []
    for number in range(3):
        tensors, metadata = worker.update(number)
        moved.append(any(tensors[name].any() for name in tensors.keys() - metadata.statistics))
    assert moved == [True, True, False]


@given(before=st.integers(0, 20), counter=st.integers(0, 20))
def test_a_count_of_n_means_n_more_batches(before: int, counter: int) -> None:
    countdown = RoundCountdown()
    assert all(countdown.after_batch(Continue()) is NextStep.TRAIN for _ in range(before))
    following = countdown.after_batch(ScheduleUpdate(counter=counter))
    more = 0
    while following is NextStep.TRAIN:
        following = countdown.after_batch(Continue())
        more += 1
    assert (following, more) == (NextStep.SYNCHRONISE, counter)
    assert countdown.after_merge(Acknowledged()) is NextStep.TRAIN
    assert countdown.round == 2
    assert countdown.after_batch(Continue()) is NextStep.TRAIN


def test_a_newer_count_replaces_the_older_and_done_ends_all() -> None:
    countdown = RoundCountdown(7)
    countdown.after_batch(ScheduleUpdate(counter=9))
    assert countdown.after_batch(ScheduleUpdate(counter=0)) is NextStep.SYNCHRONISE
    assert countdown.after_merge(Done()) is NextStep.STOP
    assert countdown.round == 7
    assert countdown.after_batch(Done()) is NextStep.STOP


def test_without_data_an_announced_round_is_still_sent() -> None:
    countdown = RoundCountdown()
    assert countdown.without_data() is NextStep.STOP
    countdown.after_batch(ScheduleUpdate(counter=3))
    assert countdown.without_data() is NextStep.SYNCHRONISE


def test_the_learning_rate_follows_transformers() -> None:
    from transformers.optimization import (
        get_cosine_schedule_with_warmup,
        get_linear_schedule_with_warmup,
        get_wsd_schedule,
    )

    def curve(make: Any) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = make(optimizer)
        rates = []
        for _ in range(60):
            rates.append(float(schedule.get_last_lr()[0]))
            optimizer.step()
            schedule.step()
        return rates

    pairs: list[tuple[Any, Any]] = [
        (CosineWithWarmup(warmup_steps=7, training_steps=50), lambda o: get_cosine_schedule_with_warmup(o, 7, 50)),
        (CosineWithWarmup(warmup_steps=0, training_steps=50), lambda o: get_cosine_schedule_with_warmup(o, 0, 50)),
        (LinearWithWarmup(warmup_steps=7, training_steps=50), lambda o: get_linear_schedule_with_warmup(o, 7, 50)),
        (
            WarmupStableDecay(warmup_steps=7, decay_steps=10, training_steps=50),
            lambda o: get_wsd_schedule(o, 7, 10, num_training_steps=50),
        ),
    ]
    for ours, theirs in pairs:
        factor = learning_rate_factor(ours)
        limit = 50 if isinstance(ours, CosineWithWarmup) else 60  # theirs turns up again after the end
        np.testing.assert_allclose([factor(step) for step in range(limit)], curve(theirs)[:limit], atol=1e-12)
    assert learning_rate_factor(CosineWithWarmup(warmup_steps=7, training_steps=50))(60) == 0.0
    endless = learning_rate_factor(WarmupStableDecay(warmup_steps=2, decay_steps=10))
    assert [endless(step) for step in (0, 1, 2, 1000)] == [0.0, 0.5, 1.0, 1.0]
    assert learning_rate_factor(None)(5) == 1.0


def test_the_inner_optimizer_is_adamw_bit_for_bit() -> None:
    config = Adam(learning_rate=1e-2, betas=(0.8, 0.95), epsilon=1e-6, weight_decay=0.1, max_grad_norm=0.5)
    torch.manual_seed(0)
    mine, plain = (torch.nn.Parameter(torch.randn(5, 3)) for _ in range(2))
    plain.data.copy_(mine.data)
    inner = InnerOptimizer([mine], config)
    adamw = torch.optim.AdamW([plain], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for _ in range(10):
        gradient = torch.randn(5, 3)
        mine.grad, plain.grad = gradient.clone(), gradient.clone()
        inner.step()
        torch.nn.utils.clip_grad_norm_([plain], 0.5)
        adamw.step()
        assert torch.equal(mine, plain)
    assert mine.grad is None


def test_the_mean_loss_is_weighted_by_samples() -> None:
    tally = RoundTally(report_wait=0.125)
    tally.add(1.0, 30, 0.5, waited=0.25)
    tally.add(4.0, 10, 0.25, waited=0.125)
    tally.add(None, 10, 0.25)  # has no labels
    expected = {"loss": 1.75, "samples": 50.0, "batches": 3.0, "samples_per_second": 50.0}
    times = {"compute_seconds": 1.0, "data_wait_seconds": 0.375, "report_wait_seconds": 0.125}
    assert tally.metrics(2).metrics == expected | times
    assert "loss" not in RoundTally().metrics(1).metrics
