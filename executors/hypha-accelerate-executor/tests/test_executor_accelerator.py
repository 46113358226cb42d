"""Choice of the compute backend."""

from __future__ import annotations

import pytest
import torch

from hypha.accelerate_executor.distributed.accelerator import AccelerateBackend, CpuBackend, choose_device
from hypha.accelerate_executor.errors import JobError


def test_accelerate_is_used_only_when_needed() -> None:
    assert isinstance(choose_device({}), CpuBackend)
    with pytest.raises(JobError, match="'fp16' needs a GPU"):
        choose_device({"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_CPU": "true"})
    with pytest.raises(JobError, match="gradient_accumulation_steps"):
        choose_device({"ACCELERATE_USE_CPU": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "0"})
    placed = choose_device({"ACCELERATE_USE_CPU": "true"})
    assert isinstance(placed, AccelerateBackend)
    assert placed.torch_device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("variable", "value", "mode"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeed is not supported"),
        ("ACCELERATE_USE_MEGATRON_LM", "1", "Megatron-LM is not supported"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "parallelism_config .* is not supported"),
        ("FORK_LAUNCHED", "1", "as that of TPUs does, is not supported"),
        ("ACCELERATE_MIXED_PRECISION", "fp8", "mixed_precision: 'fp8'"),
    ],
)
def test_modes_of_the_launcher_that_are_not_supported_are_named(variable: str, value: str, mode: str) -> None:
    with pytest.raises(JobError, match=mode):
        choose_device({"WORLD_SIZE": "1", variable: value})
