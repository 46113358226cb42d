"""The inner optimizer: learning-rate schedules and AdamW."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer, learning_rate_factor
from hypha_proto.job_spec import Adam, CosineWithWarmup, LinearWithWarmup, WarmupStableDecay


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
