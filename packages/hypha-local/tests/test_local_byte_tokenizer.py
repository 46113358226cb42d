"""Tokenizer of bytes: what transformers reads, and which models get it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from hypha_local.byte_tokenizer import add_byte_tokenizer
from hypha_local.errors import ModelUnusableError


def model(folder: Path, vocabulary: int) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": vocabulary}))
    return folder


def test_every_byte_is_the_token_of_its_number(tmp_path: Path) -> None:
    assert add_byte_tokenizer(model(tmp_path, 256))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "".join(map(chr, range(0x20))) + "def f(x):\n\treturn 'é' + '€𝄞' \x7f\x85"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))


def test_a_tokenizer_that_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert not add_byte_tokenizer(model(tmp_path, 256))
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


def test_a_model_without_tokenizer_whose_tokens_are_no_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusableError, match=r"no tokenizer, and 32000 tokens.*name a directory"):
        add_byte_tokenizer(model(tmp_path, 32000))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
