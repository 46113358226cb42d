"""Dataset `digits`: the split into training and test samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from hypha_local.datasets.digits import SPLIT_SEED, TEST_SHARE, load_digits, write_digits


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
    parts = train_test_split(pixels, labels, test_size=TEST_SHARE, stratify=labels, random_state=SPLIT_SEED)
    write_digits(tmp_path / "train", tmp_path / "test")
    for number, name in enumerate(("train", "test")):
        written = load_file(tmp_path / name)
        assert np.array_equal(written["pixel_values"], parts[number])
        assert np.array_equal(written["labels"], parts[2 + number])
