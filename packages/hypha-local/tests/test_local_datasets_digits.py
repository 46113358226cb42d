"""Dataset `digits`: the split into training and test samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from hypha_local.datasets.digits import write_digits


def test_split_is_stratified(tmp_path: Path) -> None:
    sizes = write_digits(tmp_path / "train", tmp_path / "test")
    train, test = load_file(tmp_path / "train"), load_file(tmp_path / "test")
    assert sizes == (1437, 360) == (len(train["labels"]), len(test["labels"]))
    assert train["pixel_values"].shape[1:] == (1, 8, 8)
    shares = [np.bincount(part["labels"], minlength=10) / len(part["labels"]) for part in (train, test)]
    assert np.abs(shares[0] - shares[1]).max() < 0.005
