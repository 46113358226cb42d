"""Models that get a new head by `create-model --from`, and are evaluated with the preprocessor of a job."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner

from hypha.accelerate_executor.cli import main as command
from hypha.accelerate_executor.errors import ModelError
from hypha.accelerate_executor.modeling.create import create_model
from hypha.accelerate_executor.modeling.hf import load_model

BERT = {
    "model_type": "bert",
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
}
TASK = "sequence-classification"


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Write a model without a head for classification, and its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    create_model("masked-lm", BERT, 0, tmp_path / "trained")
    made = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "good": 2, "bad": 3}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<pad>")
    tokenizer.save_pretrained(tmp_path / "trained")
    (tmp_path / "trained" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "trained" / "README.txt").write_text("about")
    return tmp_path / "trained"


def _run(*arguments: object) -> str:
    result = CliRunner().invoke(command, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_new_head_is_determined_by_the_seed(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="create-model --from MODEL --task sequence-classification --labels N"):
        load_model(TASK, trained)
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        options = ("--task", TASK, "--labels", 3, "--seed", seed, "--out", tmp_path / name)
        assert "classifier.weight" in _run("create-model", "--from", trained, *options)
    files = [safetensors.numpy.load_file(tmp_path / name / "model.safetensors") for name in "abc"]
    before = safetensors.numpy.load_file(trained / "model.safetensors")
    assert files[0]["classifier.weight"].shape == (3, 16)
    np.testing.assert_array_equal(files[0]["classifier.weight"], files[1]["classifier.weight"])
    assert (files[0]["classifier.weight"] != files[2]["classifier.weight"]).any()
    assert (tmp_path / "a" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (tmp_path / "a" / "README.txt").exists()
    word = "bert.embeddings.word_embeddings.weight"
    np.testing.assert_array_equal(files[0][word], before[word])
    load_model(TASK, tmp_path / "a")
    again = ("--task", TASK, "--labels", 4, "--out", tmp_path / "d")
    assert "new: classifier.bias, classifier.weight" in _run("create-model", "--from", tmp_path / "a", *again)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--from", "{model}", "--task", "image-classification", "--labels", "2"), "cannot be loaded for task"),
        (("--from", "{model}/gone", "--task", "sequence-classification"), "no such folder; name that of a model"),
        (("--from", "{model}", "--task", "torch"), "task 'torch' has no heads"),
        (("--from", "{model}", "--arch", "llama-bytes"), "give either --from or a configuration"),
        (("--labels", "2", "--arch", "llama-bytes"), "--labels needs --from"),
    ],
)
def test_what_gets_no_head_is_refused(trained: Path, tmp_path: Path, options: tuple[str, ...], fault: str) -> None:
    words = [word.format(model=trained) for word in options]
    result = CliRunner().invoke(command, ["create-model", *words, "--out", str(tmp_path / "x")])
    assert result.exit_code in (1, 2)
    assert fault in result.output
    assert "Traceback" not in result.output


def test_text_is_evaluated_with_a_tokenizer(trained: Path, tmp_path: Path) -> None:
    _run("create-model", "--from", trained, "--task", TASK, "--labels", 2, "--out", tmp_path / "model")
    texts = np.frombuffer(b"good\0bad\0\0", np.uint8).reshape(2, 5)
    ids = np.array([[2], [3]])
    for name, tensors in (
        ("text", {"text": texts}),
        ("tokens", {"input_ids": ids, "attention_mask": np.ones_like(ids)}),
    ):
        (tmp_path / name).mkdir()
        for index in range(2):
            part = {key: array[index : index + 1] for key, array in tensors.items()}
            labels = np.array([index])
            safetensors.numpy.save_file({**part, "labels": labels}, tmp_path / name / f"slice-{index}.safetensors")
    measure = ("evaluate", "--task", TASK, "--model", tmp_path / "model", "--data")
    expected = json.loads(_run(*measure, tmp_path / "tokens"))
    assert expected["samples"] == 2
    assert json.loads(_run(*measure, tmp_path / "text", "--preprocessor", tmp_path / "model")) == expected
    refused = CliRunner().invoke(command, [*map(str, (*measure, tmp_path / "tokens", "--preprocessor", trained))])
    assert refused.exit_code == 1
    assert "has no tensor for --preprocessor (text, audio, image, video); leave it out" in refused.output
