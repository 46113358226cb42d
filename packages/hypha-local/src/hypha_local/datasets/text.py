"""Source code of the Python standard library as bytes, which needs no download. Data of the task `text`.

A token is a byte, so a loss in nats per token is also in nats per byte.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

SEQUENCE: Final = 128
"""Bytes per sample."""
VALIDATION_EVERY: Final = 10
"""One file in this many is held out for validation."""
TRAIN_BYTES: Final = 900_000
VALIDATION_BYTES: Final = 80_000
_MAX_FILE_BYTES: Final = 100_000
"""Larger files are left out, since a single one would dominate the text."""
_EXCLUDED_FOLDERS: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def library_files() -> list[Path]:
    """Return the source files of the standard library, sorted by a digest of their names.

    The order mixes all kinds of files and is the same on every machine.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = (path for path in root.rglob("*.py") if not _EXCLUDED_FOLDERS.intersection(path.relative_to(root).parts))
    return sorted(
        (path for path in found if 0 < path.stat().st_size <= _MAX_FILE_BYTES), key=lambda path: _sort_key(path, root)
    )


def split(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Split files into disjoint lists for training and validation."""
    validation = set(files[::VALIDATION_EVERY])
    return [path for path in files if path not in validation], [path for path in files if path in validation]


def write_text(train: Path, validation: Path, files: Sequence[Path] | None = None) -> tuple[int, int]:
    """Write training and validation data as safetensors files; return the numbers of samples.

    ``input_ids`` and ``labels`` are int16 of shape (samples, 128) and hold the same bytes. The last sample of a source
    file is padded with zeros, for which ``attention_mask`` (uint8) is 0 and the label is -100.
    """
    parts = split(library_files() if files is None else files)
    return _write(train, parts[0], TRAIN_BYTES), _write(validation, parts[1], VALIDATION_BYTES)


def _sort_key(path: Path, root: Path) -> str:
    return hashlib.sha256(path.relative_to(root).as_posix().encode()).hexdigest()


def _write(out: Path, files: Iterable[Path], limit: int) -> int:
    import numpy as np
    from safetensors.numpy import save_file

    rows: list[bytes] = []
    for path in files:
        if len(rows) * SEQUENCE >= limit:
            break
        text = path.read_bytes()
        rows += [text[begin : begin + SEQUENCE] for begin in range(0, len(text), SEQUENCE)]
    input_ids = np.zeros((len(rows), SEQUENCE), np.int16)
    mask = np.zeros((len(rows), SEQUENCE), np.uint8)
    for number, row in enumerate(rows):
        input_ids[number, : len(row)] = np.frombuffer(row, np.uint8)
        mask[number, : len(row)] = 1
    labels = np.where(mask == 1, input_ids, np.int16(-100))
    save_file({"input_ids": input_ids, "attention_mask": mask, "labels": labels}, out)
    return len(rows)
