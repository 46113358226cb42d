"""A model without a head is refused when its job is submitted, if that is certain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.stored_model import write_model

from hypha_scheduler.jobs.config import ModelTable
from hypha_scheduler.jobs.model_files import missing_files

BODY = ("embeddings.word_embeddings.weight", "encoder.layer.0.output.dense.weight", "pooler.dense.bias")


@pytest.mark.parametrize(
    ("task", "architecture"),
    [
        ("sequence-classification", "BertModel"),
        ("sequence-classification", "GPT2LMHeadModel"),
        ("vision-classification", "ResNetModel"),
        ("vision-classification", "ViTForMaskedImageModeling"),
        ("masked-lm", "BertForTokenClassification"),
    ],
)
def test_a_base_model_is_refused_with_the_command_that_adds_a_head(
    task: str, architecture: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "base", BODY[:1], BODY[1:], architectures=[architecture])
    wire = task.replace("vision", "image")
    for table in (ModelTable(path=model, type=task), ModelTable(file=model, type=task)):
        assert missing_files(table) == [
            f"model.path: {model} has no head for {wire}: its config.json names {architecture}; add one with "
            f"`hypha-accelerate-executor create-model --from {model} --task {wire} --labels N --out DIR`"
        ]


@pytest.mark.parametrize(
    ("task", "architectures", "tensors"),
    [
        ("sequence-classification", ["BertForSequenceClassification"], BODY),
        ("sequence-classification", ["BertModel"], (*BODY, "classifier.weight")),
        ("sequence-classification", ["BertModel", "BertForSequenceClassification"], BODY),
        ("sequence-classification", ["BertForTokenClassification"], BODY),
        ("zero-shot-image-classification", ["AlignModel"], BODY),
        ("causal-lm", ["LlamaModel"], ("embed_tokens.weight", "norm.weight")),  # its head may be the input embedding
        ("causal-lm", ["BloomModel"], ("word_embeddings.weight", "ln_f.weight")),
        ("causal-lm", ["MistralForSequenceClassification"], ("model.embed_tokens.weight", "score.weight")),
        ("causal-lm", ["BertModel"], (*BODY, "cls.predictions.bias")),
        ("masked-lm", ["BertModel"], (*BODY, "cls.predictions.bias")),
        ("masked-lm", ["BartForConditionalGeneration"], BODY),
        ("sequence-classification", [], BODY),
        ("sequence-classification", "BertModel", BODY),
        ("sequence-classification", [3], BODY),
        ("sequence-classification", None, BODY),
    ],
    ids=str,
)
def test_a_model_that_may_have_a_head_is_left_to_the_executor(
    task: str, architectures: object, tensors: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", tensors[:1], tensors[1:], architectures=architectures)
    assert missing_files(ModelTable(path=model, type=task)) == []


def test_a_head_of_tokens_that_is_not_the_embedding_must_be_in_the_files(tmp_path: Path) -> None:
    tensors = ("model.embed_tokens.weight", "score.weight")
    model = write_model(
        tmp_path / "model", tensors, architectures=["MistralForSequenceClassification"], tie_word_embeddings=False
    )
    [line] = missing_files(ModelTable(path=model, type="causal-lm"))
    assert "has no head for causal-lm: its config.json names MistralForSequenceClassification" in line


@pytest.mark.parametrize("config", [b"", b"[" * 100_000, b"[]", b"\xff"])
def test_a_configuration_that_cannot_be_read_is_refused(config: bytes, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", BODY, architectures=["BertModel"])
    (model / "config.json").write_bytes(config)
    [line] = missing_files(ModelTable(path=model, type="sequence-classification"))
    assert re.fullmatch(rf"model\.path: {model}: config\.json is not (a )?JSON.*: fetch it again.*", line)


def test_weights_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", BODY, architectures=["BertModel"])
    (model / "model.safetensors").write_bytes(b"\xfe" * 100)
    [line] = missing_files(ModelTable(path=model, type="sequence-classification"))
    assert line.startswith(f"model.path: {model}: model.safetensors: it is of no known kind")
    assert line.endswith("fetch it again")
