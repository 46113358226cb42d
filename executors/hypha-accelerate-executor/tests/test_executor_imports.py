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


@pytest.mark.slow
@pytest.mark.concurrent
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
