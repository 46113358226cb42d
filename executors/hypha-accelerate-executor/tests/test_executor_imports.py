"""Cost of imports: what the start of the process waits for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


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
