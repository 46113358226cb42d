"""The start of the process: what it imports, its garbage collection, and the choice of the compute backend."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hypha.accelerate_executor.distributed.accelerator import AccelerateBackend, CpuBackend, choose_device
from hypha.accelerate_executor.environment import collected_at_end
from hypha.accelerate_executor.errors import JobError


@pytest.mark.parametrize("entry", ["training", "inference", "predict.slice_queue"])
def test_the_entry_point_does_not_import_torch(entry: str) -> None:
    heavy = ("torch", "transformers", "accelerate", "scipy")
    code = f"import hypha.accelerate_executor.{entry}, sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "[]\n"


@pytest.mark.nightly
def test_a_loaded_model_imports_only_its_own_class(digit_model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hypha.accelerate_executor.modeling.hf import load_model\n"
        f"load_model('image-classification', Path({str(digit_model)!r}))\n"
        "print(sorted(m for m in sys.modules if m.startswith('transformers.models.') and '.modeling_' in m))\n"
        "print([m for m in ('scipy', 'sklearn', 'torchvision', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.splitlines() == [
        "['transformers.models.auto.modeling_auto', 'transformers.models.resnet.modeling_resnet']",
        "[]",
    ]


STEP = """
import sys
from pathlib import Path
import torch
from hypha.accelerate_executor.modeling.hf import import_library, load_model
from hypha.accelerate_executor.train.inner_optimizer import InnerOptimizer
from hypha_proto.job_spec import Adam

import_library("image-classification")
model = load_model("image-classification", Path(sys.argv[1]))
optimizer = InnerOptimizer(model.parameters(), Adam(learning_rate=1e-3))
before = [value.detach().clone() for value in model.parameters()]
model(pixel_values=torch.ones(2, 1, 8, 8), labels=torch.tensor([1, 2])).loss.backward()
optimizer.step()
assert not any(torch.equal(*pair) for pair in zip(before, model.parameters()))
"""


@pytest.mark.nightly
def test_a_step_does_not_import_the_compiler(digit_model: Path) -> None:
    code = (
        STEP + "print([m for m in ('torch._dynamo.eval_frame', 'torch._dynamo.symbolic_convert') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(digit_model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "[]\n"


@pytest.mark.nightly
def test_the_compiler_works_after_it_was_deferred(digit_model: Path) -> None:
    code = STEP + (
        "double = torch.compile(lambda value: value * 2, backend='eager')\n"
        "print(double(torch.tensor(21)).item(), torch._dynamo.list_backends() != [], type(torch._dynamo).__name__)\n"
        "optimizer.adamw.zero_grad(); optimizer.adamw.load_state_dict(optimizer.adamw.state_dict())"
    )
    command = [sys.executable, "-c", code, str(digit_model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "42 True module\n"


class Cycle:
    """Refers to itself, as loaders do."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_garbage_of_the_start_is_collected_and_the_rest_is_left_out() -> None:
    collections = gc.get_stats()[2]["collections"]
    with collected_at_end():
        kept = [Cycle() for _ in range(100_000)]
        dropped = weakref.ref(Cycle())
        assert gc.get_stats()[2]["collections"] == collections
        assert dropped() is not None
    assert dropped() is None
    assert gc.isenabled()
    assert gc.get_stats()[2]["collections"] == collections + 1
    assert gc.get_freeze_count() >= len(kept)


def test_a_start_that_fails_leaves_the_collector_as_it_was() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ValueError, match="no model"), collected_at_end():
        raise ValueError("no model")
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_memory_that_a_step_frees_is_kept_for_the_next() -> None:
    code = """
import resource
from hypha.accelerate_executor.environment import keep_freed_memory

keep_freed_memory()
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(8 << 20) for _ in range(3)]
    del blocks
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    first, *later = map(int, done.stdout.split())
    assert max(later) < first / 10
