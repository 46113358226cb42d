"""Training on JSON lines: prompts and completions become tokens, and the loss counts completions alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hypha.accelerate_executor import training
from hypha.accelerate_executor.data.model_inputs import ModelInputs
from hypha.accelerate_executor.data.row_tokenizer import RowTokenizer
from hypha.accelerate_executor.data.samples import open_samples
from hypha.accelerate_executor.errors import DataError
from hypha.accelerate_executor.modeling.evaluation import measure
from hypha.accelerate_executor.modeling.hf import load_model
from hypha_proto.job_spec import TextRows

ASKED = TextRows(prompt="what is {a} plus {b}? ", completion="{sum}")
CHAT = "{% for each in messages %}u: {{ each['content'] }}{% endfor %} r: "


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(count: int) -> list[dict[str, Any]]:
    return [{"a": n % 3, "b": n % 2, "sum": ["zero", "one", "two", "three"][n % 3 + n % 2]} for n in range(count)]


def read(path: Path) -> Any:
    samples = open_samples(path)
    return samples.read(np.arange(samples.count))


def test_the_labels_of_prompts_and_padding_are_ignored(writer: Path, words: Any, tmp_path: Path) -> None:
    rows = sums(3)
    made = RowTokenizer(words, ASKED, load_model("causal-lm", writer))(read(write_rows(tmp_path / "r.jsonl", rows)))
    for number, row in enumerate(rows):
        prompt = words(f"what is {row['a']} plus {row['b']}? ")["input_ids"]
        answer = [*words(row["sum"], add_special_tokens=False)["input_ids"], words.eos_token_id]
        length = len(prompt) + len(answer)
        padding = made["input_ids"].shape[1] - length
        assert made["input_ids"][number, :length].tolist() == prompt + answer
        assert made["labels"][number].tolist() == [-100] * len(prompt) + answer + [-100] * padding
        assert made["attention_mask"][number].tolist() == [1] * length + [0] * padding


def test_without_a_prompt_the_whole_text_is_learnt_as_far_as_the_model_takes_it(
    writer: Path, words: Any, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "r.jsonl", [{"text": "a" * 100}, {"text": "b"}])
    made = RowTokenizer(words, TextRows(completion="{text}"), load_model("causal-lm", writer))(read(path))
    assert made["input_ids"].shape == (2, 64)
    assert made["labels"][0].tolist() == words("a" * 64)["input_ids"]
    assert made["labels"][1, :3].tolist() == [*words("b")["input_ids"], words.eos_token_id, -100]


@pytest.mark.parametrize("applies", [True, False])
def test_a_prompt_is_formatted_by_the_chat_template_as_in_inference(
    writer: Path, words: Any, tmp_path: Path, applies: bool
) -> None:
    chatting = copy.copy(words)
    chatting.chat_template = CHAT
    rows = TextRows(prompt="hi {name}", completion="you", chat_template=applies)
    path = write_rows(tmp_path / "r.jsonl", [{"name": "tom"}])
    made = RowTokenizer(chatting, rows, load_model("causal-lm", writer))(read(path))
    text = "u: hi tom r: you<end>" if applies else "hi tomyou<end>"
    assert words.decode(made["input_ids"][0]) == text


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": 1, "b": 2}', "there is no column 'sum', only a, b"),
        ('{"a": 1, "b": null, "sum": 3}', "column 'b' is null"),
        ("[1]", "expected an object"),
        ('{"a": 1', "not JSON"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(writer: Path, words: Any, tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "sums-3.jsonl"
    path.write_text(json.dumps(sums(1)[0]) + f"\n{line}\n")
    tokenize = RowTokenizer(words, ASKED, load_model("causal-lm", writer))
    with pytest.raises(DataError, match=rf"sums-3\.jsonl, row 1: .*{reason}"):
        tokenize(read(path))


def test_evaluation_counts_completions_alone(writer: Path, words: Any, tmp_path: Path) -> None:
    path, module = write_rows(tmp_path / "r.jsonl", sums(5)), load_model("causal-lm", writer)
    tokenize = RowTokenizer(words, ASKED, module)
    inputs = ModelInputs("causal-lm", (), module, preprocessed=True)
    found = measure(module, inputs, [path], 2, torch.device("cpu"), tokenize)
    tensors = {name: torch.from_numpy(value) for name, value in tokenize(read(path)).items()}
    with torch.inference_mode():
        expected = module.eval()(**tensors).loss
    assert found.samples == 5
    assert found.loss == pytest.approx(float(expected), rel=1e-5)


def test_a_model_learns_the_completions_of_rows(make_worker: Callable[..., Any], writer: Path, tmp_path: Path) -> None:
    slices = [write_rows(tmp_path / f"sums-{number}.jsonl", sums(48)) for number in range(2)]
    worker = make_worker(rounds=3, batches=20, slices=slices, model_dir=writer)
    artifact = {"type": "uri", "value": "file:///tokenizer"}
    config = {
        "model": {"task": "causal-lm", "artifact": artifact, "input-names": []},
        "preprocessor": {"task": "tokenizer", "artifact": artifact, "input-names": []},
        "rows": {"prompt": ASKED.prompt, "completion": ASKED.completion, "chat_template": True},
        "optimizer": {"learning-rate": 5e-3, "betas": None, "epsilon": None},
    }
    assert training.main(worker.arguments(**config)) == 0
    losses = [report["metrics"]["metrics"]["loss"] for report in worker.reports if "metrics" in report]
    assert len(losses) == 3
    assert losses[-1] < 0.3 * losses[0]
