"""Which files belong to a model: what the library would load, and nothing that lies beside it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hypha_proto.errors import TensorFileError
from hypha_proto.model_listing import INDEX, list_companions, list_model, list_weights, weights_of

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
COMPANIONS = (
    "config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt",
    "spiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm", "vocab-src.json", "qwen.tiktoken",
    "tekken.json", "bpe.codes", "vocab.bpe", "prophetnet.tokenizer", "tokenizer.model.v3", "entity_vocab.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "normalizer.json",
)  # fmt: skip
OTHERS = (
    "consolidated.safetensors", "._model.safetensors", "model.fp16.safetensors", "optimizer.safetensors",
    "model copy.safetensors", "adapter_model.safetensors", "adapter_config.json", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "model.fp16.safetensors.index.json", "training_args.bin", "trainer_state.json",
    "all_results.json", "._config.json", ".config.json.swp", "config (1).json", "config.json~", "README.md",
    "LICENSE.txt", "requirements.txt", "modeling_custom.py", ".gitattributes", "onnx/model.safetensors",
    "checkpoint-500/config.json", "../config.json", "/config.json",
)  # fmt: skip


def read_index(files: Sequence[str]) -> bytes:
    return json.dumps({"weight_map": {f"layer.{number}": name for number, name in enumerate(files)}}).encode()


def never_read(name: str) -> bytes:
    raise AssertionError(name)


@pytest.mark.parametrize("name", COMPANIONS)
def test_configuration_templates_tokenizers_and_processors_belong_to_a_model(name: str) -> None:
    files = {name, "config.json", "model.safetensors"}
    assert list_model(files, never_read) == sorted(files)
    assert list_companions([name, "model.safetensors"]) == [name]


@pytest.mark.parametrize("name", OTHERS)
def test_what_lies_beside_a_model_does_not_belong_to_it(name: str) -> None:
    files = [*SHARDS, INDEX, "config.json"]
    assert list_model([*files, name], lambda _: read_index(SHARDS)) == sorted(files)
    assert list_model([name, "config.json", "model.safetensors"], never_read) == ["config.json", "model.safetensors"]


def test_files_that_a_job_names_are_a_whole_model_and_used_with_what_else_they_are() -> None:
    files = ["config.json", "model.safetensors", "modeling_custom.py", "tokenizer.json"]
    assert list_model(files, never_read, files[:3]) == files[:3]
    for lacking, fault in ((files[1:], "no config.json"), (files[:1], "neither model.safetensors")):
        with pytest.raises(TensorFileError, match=fault):
            list_model(files, never_read, lacking)
    for wanted in ((), ("adapter_config.json", "config.json")):
        with pytest.raises(TensorFileError, match="that of an adapter: save the model that merge_and_unload makes"):
            list_model(["adapter_config.json", "adapter_model.safetensors", "config.json"], never_read, wanted)


def test_one_file_is_preferred_to_shards_as_the_library_does() -> None:
    files = [*SHARDS, INDEX, "model.safetensors", "config.json"]
    assert list_model(files, never_read) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("index", "fault"),
    [
        ('{"weight_map": {"a": "../../etc/passwd"}}', "'../../etc/passwd', no safetensors file beside it"),
        ('{"weight_map": {"a": "sub/model.safetensors"}}', "no safetensors file beside it"),
        ('{"weight_map": {"a": "pytorch_model.bin"}}', "no safetensors file beside it"),
        ('{"weight_map": {"a": 1}}', "no safetensors file beside it"),
        ('{"weight_map": {"a": [1]}}', "is not an index"),
        ('{"weight_map": []}', "is not an index"),
        ('{"weight_map": {}}', "names no file"),
        ("[]", "is not an index"),
        ("{", "is not an index"),
        ('{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}', "x.safetensors and 1 more is missing"),
    ],
)
def test_malformed_index_is_rejected(tmp_path: Path, index: str, fault: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(TensorFileError, match=fault):
        weights_of(tmp_path)


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        ((), "save_pretrained writes them"),
        (("weights.safetensors",), "rename weights.safetensors to model.safetensors"),
        (("pytorch_model.bin",), "pickled files are not loaded"),
        (("._model.safetensors", "a.safetensors", "b.safetensors"), "save_pretrained writes them"),
    ],
)
def test_a_folder_without_weights_is_rejected_with_the_remedy(names: Sequence[str], remedy: str) -> None:
    with pytest.raises(TensorFileError, match=f"neither model.safetensors nor {INDEX}.*{remedy}"):
        list_weights(names, never_read)
