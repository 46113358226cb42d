"""What a folder of slices holds, and whether its files are those of the manifest. Called by the command ``inspect``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hypha_data.catalog import Dataset, open_dataset
from hypha_data.digest_cache import DigestCache, ignore_progress
from hypha_data.sources.reader import LABELS, MAX_CLASSES
from hypha_proto.datasets import SAFETENSORS, SliceEntry
from hypha_proto.errors import TensorFileError
from hypha_proto.safetensors_io import TensorFile


@dataclass(frozen=True, slots=True)
class Inspection:
    """A dataset and what is wrong with its files."""

    dataset: Dataset
    faults: tuple[str, ...]
    """One line for each slice that is not as the manifest describes it."""
    class_counts: dict[int, int] | None
    """Samples of each class; None if there are no labels, or they are no classes."""

    @property
    def samples(self) -> int:
        """Number of samples of all slices."""
        return sum(entry.samples for entry in self.dataset.manifest.slices)

    @property
    def size(self) -> int:
        """Size of all slices in bytes."""
        return sum(entry.size for entry in self.dataset.manifest.slices)


def inspect_folder(folder: Path, *, verify: bool = False) -> Inspection:
    """Open a folder of slices.

    Args:
        folder: the dataset's folder.
        verify: read all slices and compare their digests, rather than their sizes alone.

    Raises:
        DatasetError: it holds no slices.
    """
    dataset = open_dataset(folder.resolve().name, folder)
    faults = tuple(_find_faults(dataset, verify))
    return Inspection(dataset, faults, None if faults else _count_classes(dataset))


def _find_faults(dataset: Dataset, verify: bool) -> Iterator[str]:
    for entry in dataset.manifest.slices:
        path = dataset.folder / entry.file
        fault = find_slice_fault(path, entry, verify)
        if fault is not None:
            yield f"{path}: {fault}; restore the file, or prepare the dataset again"


def find_slice_fault(path: Path, entry: SliceEntry, verify: bool) -> str | None:
    """Return how a slice differs from its entry in the manifest, or None; its content is read with `verify` only."""
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"{size} bytes, expected {entry.size}"
        digest = DigestCache(path.parent).read(path, ignore_progress)[1] if verify else entry.digest
    except OSError as error:
        return error.strerror or str(error)
    return None if digest == entry.digest else f"digest {digest}, expected {entry.digest}"


def _count_classes(dataset: Dataset) -> dict[int, int] | None:
    """Count the samples of each class, whose numbers are one a sample."""
    if (dataset.manifest.format or SAFETENSORS) != SAFETENSORS:
        return None
    counts: dict[int, int] = {}
    try:
        for entry in dataset.manifest.slices:
            with TensorFile(dataset.folder / entry.file) as file:
                info = file.tensors.get(LABELS)
                if info is None or len(info.shape) != 1 or not info.dtype.startswith(("I", "U")):
                    return None
                numbers, found = np.unique(file.stored(LABELS), return_counts=True)
                for number, count in zip(numbers.tolist(), found.tolist(), strict=True):
                    counts[number] = counts.get(number, 0) + count
                if len(counts) > MAX_CLASSES:
                    return None
    except (TensorFileError, OSError):  # a fault that `verify` names
        return None
    return dict(sorted(counts.items()))
