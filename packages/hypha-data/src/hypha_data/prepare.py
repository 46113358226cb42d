"""Preparation of a dataset: shuffles the samples of one file and cuts them into slices.

Rows are shuffled first because label-skewed slices slow down DiLoCo: every worker would train on its own labels. Source
tensors are memory-mapped; memory holds one slice of one tensor at a time. Called by the command ``prepare``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hypha_data.catalog import MANIFEST, count_samples, measure
from hypha_data.digest_cache import DigestCache, ignore_progress
from hypha_data.errors import DatasetError
from hypha_proto.codec import to_json
from hypha_proto.datasets import Manifest
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo

MAX_SLICES: Final = 99_999


def prepare_dataset(source: Path, out: Path, *, name: str, slices: int, seed: int, force: bool = False) -> Manifest:
    """Shuffle the samples of the safetensors file `source` by `seed` and write them to `out` as `slices` slices.

    Args:
        source: tensors that share their first dimension, the samples.
        out: the dataset's folder; created if it does not exist.
        slices: number of slices; their lengths differ by at most one sample.
        force: replace existing slices.

    Returns:
        The manifest, also written to ``out/manifest.json``.

    Raises:
        DatasetError: the source has no samples or fewer than slices, or is in `out` itself, or `out` already contains
            slices.
        OSError: a file cannot be read or written.
    """
    samples = count_samples(source)
    if not 1 <= slices <= min(samples, MAX_SLICES):
        raise DatasetError(f"--slices {slices}: {source} holds {samples} samples, so 1 to {min(samples, MAX_SLICES)}")
    out.mkdir(parents=True, exist_ok=True)
    if (
        source.resolve().parent == out.resolve()
    ):  # every *.safetensors in `out` counts as a slice, or is removed as an old one
        raise DatasetError(f"{source} lies in {out}, where the slices go; choose another folder")
    old = sorted(out.glob("*.safetensors"))
    if old and not force:
        raise DatasetError(f"{out} holds {len(old)} slices already; choose another folder, or --force to replace them")
    order = np.random.default_rng(seed).permutation(samples)
    with TensorFile(source) as tensors:
        files = [
            _write_slice(tensors, rows, out / f"slice-{index:05d}.safetensors")
            for index, rows in enumerate(np.array_split(order, slices))
        ]
    for path in set(old) - set(files):
        path.unlink()
    manifest = measure(name, files, DigestCache(out), ignore_progress)
    (out / MANIFEST).write_bytes(to_json(Manifest, manifest))
    return manifest


def _write_slice(source: TensorFile, rows: NDArray[np.int64], path: Path) -> Path:
    shapes = {name: TensorInfo(info.dtype, (len(rows), *info.shape[1:])) for name, info in source.tensors.items()}
    with TensorFileWriter(path, shapes) as writer:
        for name in shapes:
            part: NDArray[Any] = source.stored(name)[rows]
            writer.write_stored(name, part)
    return path
