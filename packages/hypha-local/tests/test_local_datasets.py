"""Dataset `text`: order, split and samples of the standard library's source files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from hypha_local.datasets.text import SEQUENCE, library_files, split, write_text


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
