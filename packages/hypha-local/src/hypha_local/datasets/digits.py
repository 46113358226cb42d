"""Handwritten digits of scikit-learn, 1,797 images of 8×8 pixels, which need no download. Data of the task `digits`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

TEST_SHARE: Final = 0.2
SPLIT_SEED: Final = 0
"""Seed of the split, the same in every run so that accuracies of different training seeds can be compared."""


def write_digits(train: Path, test: Path) -> tuple[int, int]:
    """Write a stratified split as two safetensors files; return the numbers of samples.

    ``pixel_values`` is float32 of shape (samples, 1, 8, 8) in 0..1, ``labels`` int64 of shape (samples,).
    """
    import numpy as np
    from safetensors.numpy import save_file
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    pixels = (images.reshape(-1, 1, 8, 8) / 16.0).astype(np.float32)
    parts = train_test_split(
        pixels, labels.astype(np.int64), test_size=TEST_SHARE, stratify=labels, random_state=SPLIT_SEED
    )
    for path, pixel_values, targets in ((train, parts[0], parts[2]), (test, parts[1], parts[3])):
        save_file({"pixel_values": np.ascontiguousarray(pixel_values), "labels": np.ascontiguousarray(targets)}, path)
    return len(parts[2]), len(parts[3])
