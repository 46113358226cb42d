"""Catalog of this node's datasets: folders of safetensors slices, measured once at start.

Called by `service`. A slice passes from `catalog` through `announcer` and the scheduler's slice ledger to
`slice_resolver`, and from there to a worker's job bridge.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from hypha_data.errors import DatasetError
from hypha_proto.codec import from_json, to_json
from hypha_proto.datasets import Manifest, SliceEntry
from hypha_proto.errors import DecodeError, TensorFileError

_log = logging.getLogger(__name__)

MANIFEST: Final = "manifest.json"
MAX_MANIFEST: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Dataset:
    """Dataset that can be served."""

    name: str
    folder: Path
    manifest: Manifest
    digest: str
    """Digest of the manifest's JSON; it covers names, order, lengths and contents of all slices."""

    def slice_path(self, index: int) -> Path | None:
        """Return the path of slice `index`, or None if there is no such slice."""
        return self.folder / self.manifest.slices[index].file if index < len(self.manifest.slices) else None


def open_dataset(name: str, folder: Path) -> Dataset:
    """Open the dataset in a folder; its slices are ordered by file name.

    A ``manifest.json`` that is newer than every slice and lists the same names and sizes is used; otherwise every slice
    is read once.

    Raises:
        DatasetError: the folder contains no slices, or one is not a safetensors file of samples.
    """
    try:
        files = sorted(folder.glob("*.safetensors"))
    except OSError as error:
        raise DatasetError(f"dataset {name}: {folder} cannot be read: {error}") from None
    if not files:
        raise DatasetError(f"dataset {name}: {folder} holds no *.safetensors; `hypha-data prepare` makes slices")
    manifest = _current_manifest(name, folder, files) or measure(name, files)
    text = to_json(Manifest, manifest)
    return Dataset(name, folder, manifest, f"blake3:{blake3(text).hexdigest()}")


def measure(name: str, files: list[Path]) -> Manifest:
    """Read every slice and return its number of samples, size and digest.

    Raises:
        DatasetError: a file is not a safetensors file of samples.
    """
    return Manifest(dataset=name, slices=tuple(_measure_slice(file) for file in files))


def _measure_slice(file: Path) -> SliceEntry:
    samples = count_samples(file)
    hasher = blake3()
    hasher.update_mmap(file)
    return SliceEntry(file=file.name, samples=samples, size=file.stat().st_size, digest=f"blake3:{hasher.hexdigest()}")


def count_samples(file: Path) -> int:
    """Return the number of samples in a slice: the first dimension, which all its tensors share.

    Raises:
        DatasetError: it is not a safetensors file, or its tensors differ in their first dimension.
    """
    from hypha_proto.safetensors_io import TensorFile  # imports numpy (0.1 s), which slices with a manifest do not need

    try:
        with TensorFile(file) as tensors:
            lengths = {name: info.shape[:1] for name, info in tensors.tensors.items()}
    except (TensorFileError, OSError) as error:
        raise DatasetError(f"{file}: not a safetensors file: {error}") from None
    if not lengths or () in lengths.values() or len(set(lengths.values())) > 1:
        found = ", ".join(f"{name}: {length[0] if length else 'scalar'}" for name, length in lengths.items())
        raise DatasetError(f"{file}: the tensors of a slice share their first dimension, the samples; found {found}")
    return int(next(iter(lengths.values()))[0])


def _current_manifest(name: str, folder: Path, files: list[Path]) -> Manifest | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest: Manifest = from_json(Manifest, path.read_bytes(), MAX_MANIFEST)
    except DecodeError as error:
        _log.warning("%s cannot be used, reading the slices again: %s", path, error)
        return None
    written = path.stat().st_mtime_ns
    listed = [(entry.file, entry.size) for entry in manifest.slices]
    found = [(file.name, file.stat().st_size) for file in files]
    if listed != found or any(file.stat().st_mtime_ns > written for file in files):
        _log.warning("%s does not match the slices beside it, reading them again", path)
        return None
    return Manifest(dataset=name, slices=manifest.slices)


def open_catalog(folders: Mapping[str, Path]) -> dict[str, Dataset]:
    """Open every dataset; raise `DatasetError` for the first that cannot be served."""
    return {name: open_dataset(name, folder) for name, folder in folders.items()}
