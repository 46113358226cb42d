"""What a folder of slices holds, and whether its files are those of the manifest.

For ``inspect``, and for ``run --check`` and ``probe``, which read no slice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hypha_data.catalog import Dataset, count_samples, find_slices, open_dataset, read_manifest
from hypha_data.config import DataConfig
from hypha_data.digest_cache import DigestCache, ignore_progress
from hypha_data.errors import DatasetError
from hypha_data.jsonl import RowFormatError, parse_row
from hypha_data.sources.reader import LABELS, MAX_CLASSES
from hypha_net.node.checks import Check, failed, ok
from hypha_proto.datasets import JSONL, SAFETENSORS, SLICE_SUFFIXES, SliceEntry
from hypha_proto.errors import TensorFileError
from hypha_proto.file_kinds import is_text
from hypha_proto.safetensors_io import TensorFile, to_float32
from hypha_proto.texts import quote

_SHOWN_ROWS: Final = 3
_SHOWN_VALUES: Final = 8
_REMEDY: Final = "restore the file, or prepare the dataset again"


@dataclass(frozen=True, slots=True)
class Inspection:
    """A dataset and what is wrong with its files."""

    dataset: Dataset
    faults: tuple[str, ...]
    """One line for each slice that is not as the manifest describes it."""
    class_counts: dict[int, int] | None
    """Samples of each class; None if there are no labels, or they are no classes."""
    first_rows: tuple[dict[str, str], ...]
    """What the first samples have in each column, shortened."""


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
    if faults:
        return Inspection(dataset, faults, None, ())
    return Inspection(dataset, faults, _count_classes(dataset), tuple(_first_rows(dataset)))


def _find_faults(dataset: Dataset, verify: bool) -> Iterator[str]:
    for entry in dataset.manifest.slices:
        path = dataset.folder / entry.file
        fault = find_slice_fault(path, entry, verify)
        if fault is not None:
            yield f"{path}: {fault}; {_REMEDY}"


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


def _first_rows(dataset: Dataset) -> Iterator[dict[str, str]]:
    """Yield the first samples of the first slice, or none if it cannot be read, which `verify` names."""
    manifest, path = dataset.manifest, dataset.folder / dataset.manifest.slices[0].file
    with suppress(TensorFileError, RowFormatError, OSError):
        if manifest.format == JSONL:
            with path.open("rb") as lines:
                for line in itertools.islice(lines, _SHOWN_ROWS):
                    yield {name: quote(value) for name, value in parse_row(line).items()}
            return
        with TensorFile(path) as file:
            names = [*(manifest.columns or file.tensors)]
            for row in range(min(_SHOWN_ROWS, manifest.slices[0].samples)):
                yield {name: _show(name, _value(file, name, row), manifest.labels) for name in names}


def _value(file: TensorFile, name: str, row: int) -> NDArray[Any]:
    stored = np.asarray(file.stored(name)[row])
    return to_float32(stored, "BF16") if file.tensors[name].dtype == "BF16" else stored


def _show(name: str, values: NDArray[Any], labels: Sequence[str] | None) -> str:
    """Return a sample's values in one line: a class with its name, bytes that are text as text."""
    if name == LABELS and labels and values.ndim == 0 and 0 <= int(values) < len(labels):
        return f"{values} {labels[int(values)]}"
    text = values.tobytes().rstrip(b"\0") if values.dtype == np.uint8 and values.ndim == 1 else b""
    if text and is_text(text):
        return quote(text.decode())
    if values.ndim == 0:
        return str(values)
    shown = " ".join(str(value) for value in values.reshape(-1)[:_SHOWN_VALUES])
    return f"[{shown}{' …' if values.size > _SHOWN_VALUES else ''}]"


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


# -------------------------------------------------------------------------------------------------- checks of a node


def check_datasets(config: DataConfig) -> Iterator[Check]:
    """Check the folders of all datasets, and the files that are provided one by one."""
    if config.dataset_path is not None:
        yield _check_dataset("dataset_path", config.dataset_path.name, config.dataset_path)
    for number, dataset in enumerate(config.datasets):
        yield _check_dataset(f"datasets[{number}].path", dataset.name, dataset.path)
    for number, path in enumerate(config.provide):
        yield _check_file(f"provide[{number}] {path}", path)


def _check_dataset(key: str, name: str, folder: Path) -> Check:
    what = f"{key} {folder}"
    if not folder.is_dir():
        return failed(f"{what}: there is no such folder: `hypha-data prepare` makes one, or correct the path")
    try:
        count, faults = _examine(name, folder)
    except (DatasetError, OSError) as error:
        return failed(f"{what}: {error}")
    if faults:
        return failed(f"{what}: {len(faults)} of {count} slices cannot be served, the first: {faults[0]}; {_REMEDY}")
    return ok(f"{what}: {count} slices are there")


def _examine(name: str, folder: Path) -> tuple[int, list[str]]:
    """Return the number of slices and what is wrong with them: sizes, or headers where there is no manifest."""
    manifest = read_manifest(name, folder)
    files = find_slices(name, folder, manifest)
    if manifest is not None:
        found = ((entry.file, find_slice_fault(folder / entry.file, entry, False)) for entry in manifest.slices)
        return len(manifest.slices), [f"{file}: {fault}" for file, fault in found if fault is not None]
    for file in files:
        if file.suffix == SLICE_SUFFIXES[SAFETENSORS]:
            count_samples(file)
    return len(files), []


def _check_file(what: str, path: Path) -> Check:
    if not path.is_file():
        return failed(f"{what}: there is no such file: correct the path, or remove it from the list")
    try:
        with path.open("rb") as file:
            file.read(1)
    except OSError as error:
        return failed(f"{what}: cannot be read: {error.strerror or error}; correct its owner or mode")
    return ok(f"{what}: can be read")
