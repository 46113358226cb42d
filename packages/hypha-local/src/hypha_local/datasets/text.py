"""The text demo's data: the running interpreter's own standard library, as bytes; it needs no network.

In place of `digits` when the demo's task is text. A token is a byte, so that a loss in nats a token is one in nats a
byte.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

SEQUENCE: Final = 128
"""Bytes of one sample."""
VALIDATION_EVERY: Final = 10
"""One file in so many is kept from the workers."""
TRAIN_BYTES: Final = 900_000
VALIDATION_BYTES: Final = 80_000
_LARGEST: Final = 100_000
"""Longer files are left out: one of them would be a large part of the text."""
_OTHERS: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def library_files(root: Path | None = None) -> list[Path]:
    """Source files of the standard library in an order that their names alone decide.

    The order is that of a digest of the names: mixed, so that any part is of all kinds, and the same everywhere.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = (path for path in root.rglob("*.py") if not _OTHERS.intersection(path.relative_to(root).parts))
    return sorted((path for path in found if 0 < path.stat().st_size <= _LARGEST), key=lambda path: _rank(path, root))


def split(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Files to train on and files to validate on, which have no file in common."""
    validation = set(files[::VALIDATION_EVERY])
    return [path for path in files if path not in validation], [path for path in files if path in validation]


def write_text(train: Path, validation: Path, files: Sequence[Path] | None = None) -> tuple[int, int]:
    """Write both parts as safetensors files; returns the numbers of samples.

    ``input_ids`` and ``labels`` are int16 of shape (samples, 128): bytes, and the same bytes to predict. The last
    sample of a source file is filled up with zeros, whose ``attention_mask`` (uint8) is 0 and whose label is -100.
    """
    parts = split(library_files() if files is None else files)
    return _write(train, parts[0], TRAIN_BYTES), _write(validation, parts[1], VALIDATION_BYTES)


def _rank(path: Path, root: Path) -> str:
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
