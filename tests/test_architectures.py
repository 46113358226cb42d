"""Every type of model that transformers has for a task, made small: is it delivered as it was trained?"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hypha.accelerate_executor.errors import ModelError
from hypha.accelerate_executor.modeling.hf import load_model
from hypha_scheduler.jobs.model_files import find_missing_head

TOOL = Path(__file__).parents[1] / "tools" / "architectures.py"
NOT_DELIVERED = {"emu3", "funnel", "mllama", "youtu"}
"""Types for which docs/executor.md gives the reason."""
KINDS = (
    "bert",
    "deberta-v2",
    "distilbert",
    "electra",
    "gpt2",
    "llama",
    "modernbert",
    "roberta",
    "vit",
    "wav2vec2",
    "xlnet",
)
HEADED = ("image-classification", "sequence-classification", "audio-classification", "causal-lm", "masked-lm")
"""Tasks whose heads are looked for at submission."""


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_models_of_all_architectures_are_delivered_as_they_were_trained() -> None:
    done = subprocess.run([sys.executable, TOOL], capture_output=True, text=True, timeout=1100, check=False)
    print(done.stdout)
    assert "| causal-lm |" in done.stdout, done.stderr[-2000:]
    failures = done.stdout.partition("Not delivered")[2].partition("Not created")[0]
    assert {line.split()[2].rstrip(":") for line in failures.splitlines() if line.startswith("- ")} <= NOT_DELIVERED
    assert sum(int(count) for count in re.findall(r"^\| [\w-]+ \| (\d+) \|", done.stdout, re.MULTILINE)) > 450


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_loads_for_a_task_is_not_refused_for_its_head(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    architectures = importlib.import_module("architectures")
    refused = 0
    for saved in ("auto", *HEADED):
        model = tmp_path / saved
        if (saved != "auto" and not [*architectures.chosen([f"{saved}:{kind}"])]) or architectures.create(
            saved, kind, model
        ):
            continue
        for task in HEADED:
            if not [*architectures.chosen([f"{task}:{kind}"])]:
                continue
            if fault := find_missing_head(task, model, ["model.safetensors"]):
                refused += 1
                with pytest.raises(ModelError):
                    load_model(task, model)
                assert f"has no head for {task}" in fault
    assert refused > 0
