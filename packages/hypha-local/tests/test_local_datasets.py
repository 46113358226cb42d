"""Datasets `digits` and `text`, and the tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from hypha_local.byte_tokenizer import add_byte_tokenizer
from hypha_local.datasets.digits import load_digits, write_digits
from hypha_local.datasets.text import SEQUENCE, library_files, split, write_text
from hypha_local.errors import ModelUnusableError


def test_library_files_have_a_fixed_order_and_a_disjoint_split() -> None:
    files = library_files()
    assert files == library_files()
    assert len(files) > 300
    assert not any({"site-packages", "test", "tests"} & set(path.parts) for path in files)
    train, validation = split(files)
    assert sorted(train + validation) == sorted(files)
    assert not set(train) & set(validation)
    assert 0.05 < len(validation) / len(files) < 0.15


def test_samples_contain_the_bytes_of_the_files(tmp_path: Path) -> None:
    texts = [bytes([number + 1]) * length for number, length in enumerate((300, 128, 5, 0, 1000))]
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.py")
        files[-1].write_bytes(text)
    counts = write_text(tmp_path / "train", tmp_path / "validation", files)
    train, validation = load_file(tmp_path / "train"), load_file(tmp_path / "validation")
    assert counts == (1 + 1 + 8, 3) == (len(train["labels"]), len(validation["labels"]))
    for tensors, mine in ((validation, texts[:1]), (train, texts[1:])):
        ids, mask, labels = tensors["input_ids"], tensors["attention_mask"], tensors["labels"]
        assert ids.shape == mask.shape == labels.shape == (len(ids), SEQUENCE)
        assert ids[mask == 1].astype("u1").tobytes() == b"".join(mine)
        assert np.array_equal(labels, np.where(mask == 1, ids, -100))


def test_library_provides_enough_text_reproducibly(tmp_path: Path) -> None:
    counts = write_text(tmp_path / "train", tmp_path / "validation")
    assert counts[0] > 6000
    assert counts[1] > 500
    assert write_text(tmp_path / "again", tmp_path / "validation") == counts
    assert (tmp_path / "again").read_bytes() == (tmp_path / "train").read_bytes()


def test_split_is_stratified(tmp_path: Path) -> None:
    sizes = write_digits(tmp_path / "train", tmp_path / "test")
    train, test = load_file(tmp_path / "train"), load_file(tmp_path / "test")
    assert sizes == (1437, 360) == (len(train["labels"]), len(test["labels"]))
    assert train["pixel_values"].shape[1:] == (1, 8, 8)
    shares = [np.bincount(part["labels"], minlength=10) / len(part["labels"]) for part in (train, test)]
    assert np.abs(shares[0] - shares[1]).max() < 0.005


def test_samples_and_split_are_those_of_scikit_learn(tmp_path: Path) -> None:
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    images, labels = datasets.load_digits(return_X_y=True)
    assert np.array_equal(load_digits()[0], images)
    assert np.array_equal(load_digits()[1], labels)
    pixels = (images.reshape(-1, 1, 8, 8) / 16.0).astype(np.float32)
    parts = train_test_split(pixels, labels, test_size=0.2, stratify=labels, random_state=0)
    write_digits(tmp_path / "train", tmp_path / "test")
    for number, name in enumerate(("train", "test")):
        written = load_file(tmp_path / name)
        assert np.array_equal(written["pixel_values"], parts[number])
        assert np.array_equal(written["labels"], parts[2 + number])


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
