"""The pure parts: rounds, reports, the order of samples, the learning rate, and what an import costs."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from hypha.accelerate_executor.bridge import Fetched
from hypha.accelerate_executor.data import Batches, shuffled
from hypha.accelerate_executor.device import Accelerated, Processor, choose_device
from hypha.accelerate_executor.errors import DataError, JobError, NoMoreData
from hypha.accelerate_executor.optimizer import InnerOptimizer, learning_rate_factor
from hypha.accelerate_executor.report import RoundTally
from hypha.accelerate_executor.rounds import Next, RoundCountdown
from hypha_proto.job import Adam, CosineWithWarmup, LinearWithWarmup, WarmupStableDecay
from hypha_proto.progress import Continue, Done, Ok, ScheduleUpdate


@given(before=st.integers(0, 20), counter=st.integers(0, 20))
def test_a_count_of_n_means_n_more_batches(before: int, counter: int) -> None:
    countdown = RoundCountdown()
    assert all(countdown.after_batch(Continue()) is Next.TRAIN for _ in range(before))
    following = countdown.after_batch(ScheduleUpdate(counter=counter))
    more = 0
    while following is Next.TRAIN:
        following = countdown.after_batch(Continue())
        more += 1
    assert (following, more) == (Next.SYNCHRONISE, counter)
    assert countdown.after_merge(Ok()) is Next.TRAIN
    assert countdown.round == 2
    assert countdown.after_batch(Continue()) is Next.TRAIN


def test_a_newer_count_replaces_the_older_and_done_ends_all() -> None:
    countdown = RoundCountdown(7)
    countdown.after_batch(ScheduleUpdate(counter=9))
    assert countdown.after_batch(ScheduleUpdate(counter=0)) is Next.SYNCHRONISE
    assert countdown.after_merge(Done()) is Next.STOP
    assert countdown.round == 7
    assert countdown.after_batch(Done()) is Next.STOP


def test_without_data_an_announced_round_is_still_sent() -> None:
    countdown = RoundCountdown()
    assert countdown.without_data() is Next.STOP
    countdown.after_batch(ScheduleUpdate(counter=3))
    assert countdown.without_data() is Next.SYNCHRONISE


def test_the_mean_loss_counts_samples() -> None:
    tally = RoundTally()
    tally.add(1.0, 30, 0.5)
    tally.add(4.0, 10, 0.5)
    assert tally.metrics(2).metrics == {"loss": 1.75, "samples": 40.0, "batches": 2.0, "samples_per_second": 40.0}
    assert RoundTally().metrics(1).metrics["loss"] == 0.0


@given(st.integers(1, 200), st.integers(0, 2**64 - 1), st.integers(0, 5), st.integers(0, 1000))
def test_the_order_is_a_permutation_that_seed_epoch_and_slice_decide(n: int, seed: int, epoch: int, index: int) -> None:
    order = shuffled(n, seed, epoch, index)
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, shuffled(n, seed, epoch, index))


def _slice(folder: Path, number: int, samples: int) -> Fetched:
    path = folder / f"{number}.safetensors"
    values = np.arange(samples, dtype="i4") + 1000 * number
    safetensors.numpy.save_file({"labels": values, "pixel_values": values.astype("u1").reshape(-1, 1)}, path)
    return Fetched(path, {"slice": str(number)})


@pytest.mark.parametrize("sizes", [[7, 5, 9], [1, 1, 1, 1, 40], [16], [3]])
def test_batches_hold_every_sample_once(tmp_path: Path, sizes: list[int]) -> None:
    files = iter([_slice(tmp_path, number, size) for number, size in enumerate(sizes)])

    def fetch() -> list[Fetched]:
        try:
            return [next(files)]
        except StopIteration:
            raise NoMoreData("that was all") from None

    batches = list(Batches(fetch, 4, 0))
    assert [batch.samples for batch in batches[:-1]] == [4] * (len(batches) - 1)
    seen = np.concatenate([batch.tensors["labels"] for batch in batches])
    assert sorted(seen.tolist()) == sorted(1000 * n + i for n, size in enumerate(sizes) for i in range(size))
    assert seen.dtype == np.int64
    assert batches[0].tensors["pixel_values"].dtype == np.float32
    assert list(tmp_path.iterdir()) == []


def test_the_next_slice_is_fetched_when_half_is_used(tmp_path: Path) -> None:
    asked: list[int] = []
    again = threading.Event()

    def fetch() -> list[Fetched]:
        asked.append(len(asked))
        if len(asked) > 1:
            again.set()
        return [_slice(tmp_path, asked[-1], 12)]

    batches = Batches(fetch, 3, 0)
    next(batches)
    assert asked == [0]
    next(batches)
    assert again.wait(10)
    assert asked == [0, 1]
    batches.close()


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": np.zeros(3, "f4"), "b": np.zeros(4, "f4")},
        {"a": np.zeros((), "f4")},
        {"a": np.zeros((0, 3), "f4")},
    ],
)
def test_a_slice_whose_tensors_do_not_fit_is_refused(tmp_path: Path, tensors: dict[str, Any]) -> None:
    safetensors.numpy.save_file(tensors, tmp_path / "s.safetensors")
    with pytest.raises(DataError, match="first dimension"):
        next(Batches(lambda: [Fetched(tmp_path / "s.safetensors")], 2, 0))


def test_a_slice_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"s\.safetensors"):
        next(Batches(lambda: [Fetched(tmp_path / "s.safetensors")], 2, 0))


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


def test_a_worker_that_joins_late_goes_on_where_the_schedule_of_the_job_is() -> None:
    schedule = CosineWithWarmup(warmup_steps=5, training_steps=40)
    late = InnerOptimizer([torch.nn.Parameter(torch.zeros(1))], Adam(learning_rate=2.0), schedule, first_step=20)
    rates = []
    for _ in range(3):
        late.step()
        rates.append(late.adamw.param_groups[0]["lr"])
    assert rates == [2.0 * learning_rate_factor(schedule)(step) for step in (20, 21, 22)]


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


def test_accelerate_is_used_only_where_it_has_something_to_do() -> None:
    assert isinstance(choose_device({}), Processor)
    with pytest.raises(JobError, match="'fp16' needs a GPU"):
        choose_device({"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_CPU": "true"})
    with pytest.raises(JobError, match="gradient_accumulation_steps"):
        choose_device({"ACCELERATE_USE_CPU": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "0"})
    placed = choose_device({"ACCELERATE_USE_CPU": "true"})
    assert isinstance(placed, Accelerated)
    assert placed.torch_device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_the_entry_does_not_wait_for_torch() -> None:
    heavy = ("torch", "transformers", "accelerate", "scipy")
    code = f"import hypha.accelerate_executor.training, sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.concurrent
def test_a_loaded_model_brings_only_its_own_class(digit_model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hypha.accelerate_executor.model import load_model\n"
        f"load_model('image-classification', Path({str(digit_model)!r}))\n"
        "print(sorted(m for m in sys.modules if m.startswith('transformers.models.') and '.modeling_' in m))\n"
        "print([m for m in ('scipy', 'sklearn', 'torchvision', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.splitlines() == [
        "['transformers.models.auto.modeling_auto', 'transformers.models.resnet.modeling_resnet']",
        "[]",
    ]
