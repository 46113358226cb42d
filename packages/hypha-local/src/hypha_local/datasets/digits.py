"""Handwritten digits of scikit-learn, 1,797 images of 8×8 pixels, which need no download. Data of the task `digits`.

Reads scikit-learn's data file and a stored split instead of calling its functions: importing these takes most of a
second, and the demo's data node starts only after the dataset is written.
"""

from __future__ import annotations

import gzip
import json
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPLIT: Final = "digits_split.json"
"""Sample numbers of the two parts, in order: those of a stratified `sklearn.model_selection.train_test_split` with
``test_size=0.2`` and ``random_state=0``. The same in every run: accuracies of training seeds can be compared."""


def write_digits(train: Path, test: Path) -> tuple[int, int]:
    """Write a stratified split as two safetensors files; return the numbers of samples.

    ``pixel_values`` is float32 of shape (samples, 1, 8, 8) in 0..1, ``labels`` int64 of shape (samples,).
    """
    import numpy as np
    from safetensors.numpy import save_file

    images, labels = load_digits()
    pixels = (images.reshape(-1, 1, 8, 8) / 16.0).astype(np.float32)
    split = json.loads((files("hypha_local.datasets") / SPLIT).read_text())
    for path, part in ((train, split["train"]), (test, split["test"])):
        save_file({"pixel_values": pixels[part], "labels": labels[part]}, path)
    return len(split["train"]), len(split["test"])


def load_digits() -> tuple[NDArray[Any], NDArray[Any]]:
    """Return images (1797, 64) as float64 in 0..16 and labels (1797,) as int64, as `sklearn.datasets.load_digits` does.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        FileNotFoundError: it has no such file.
    """
    import numpy as np

    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("scikit-learn is not installed: it provides the demo's digits")
    path = Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(np.int64)
