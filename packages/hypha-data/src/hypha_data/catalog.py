"""Catalog of this node's datasets: folders of safetensors or JSONL slices, described by their manifests.

`verification` checks the slices against their manifest. A slice passes from `catalog` through `announcer` and the
scheduler's slice ledger to `slice_resolver`, and from there to a worker's job bridge.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from hypha_data.digest_cache import DigestCache, OnRead, ignore_progress
from hypha_data.errors import DatasetError
from hypha_data.jsonl import ColumnTable, RowFile
from hypha_proto.codec import from_json, to_json
from hypha_proto.datasets import JSONL, MANIFEST, MAX_MANIFEST, SAFETENSORS, SLICE_SUFFIXES, Manifest, SliceEntry
from hypha_proto.errors import DecodeError, TensorFileError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Dataset that can be served."""

    name: str
    folder: Path
    manifest: Manifest
    digest: str
    """Digest of the manifest's JSON; it covers names, order, lengths and contents of all slices."""
    manifest_json: bytes
    digests: DigestCache
    """Digests of the slices as they were last read."""
    is_prepared: bool
    """Whether the folder holds a manifest; else the slices are announced as they were at the start."""

    def slice_path(self, index: int) -> Path | None:
        """Return the path of slice `index`, or None if there is no such slice."""
        return self.folder / self.manifest.slices[index].file if index < len(self.manifest.slices) else None


def open_dataset(name: str, folder: Path, *, verify: bool = False, on_read: OnRead = ignore_progress) -> Dataset:
    """Open the dataset in a folder: the slices of its ``manifest.json``, none of which is read.

    Without a manifest the slices are the safetensors files in the folder, ordered by name, of which those are read that
    have changed since they were last read. If there is none they are its JSONL files, all of which are read.

    Args:
        verify: forget which slices were read before, so that all of them are read again.
        on_read: called with the number of bytes of each block that is read.

    Raises:
        DatasetError: the folder contains no slices, or there is no manifest and one is not a file of samples or a copy.
    """
    try:
        written = read_manifest(name, folder)
        files = find_slices(name, folder, written)
    except OSError as error:
        raise DatasetError(f"dataset {name}: {folder} cannot be read: {error}") from None
    digests = DigestCache(folder) if verify else DigestCache.load(folder)
    if written is None:
        _log.info("dataset %s: no %s is used, so the slices are announced as they are now", name, MANIFEST)
        manifest = measure(name, files, digests, on_read)
        digests.save()
        _check_distinct(name, folder, manifest)
    else:
        manifest = written
        _warn_of_unlisted(name, folder, files, manifest)
    text = to_json(Manifest, manifest)
    digest = f"blake3:{blake3(text).hexdigest()}"
    return Dataset(name, folder, manifest, digest, text, digests, is_prepared=written is not None)


def find_slices(name: str, folder: Path, written: Manifest | None) -> list[Path]:
    """Return the files of the manifest's format; without a manifest safetensors files, or JSONL files if none.

    Hidden files are none, such as the ``._`` files of macOS.
    """
    suffixes = list(SLICE_SUFFIXES.values()) if written is None else [slice_suffix(written)]
    for suffix in suffixes:
        if files := sorted(folder.glob(f"[!.]*{suffix}")):
            return files
    wanted = " or ".join(f"*{suffix}" for suffix in suffixes)
    raise DatasetError(f"dataset {name}: {folder} holds no {wanted}; `hypha-data prepare` makes slices")


def slice_suffix(manifest: Manifest) -> str:
    """Return the suffix of the slices' file names."""
    return SLICE_SUFFIXES[manifest.format or SAFETENSORS]


def _warn_of_unlisted(name: str, folder: Path, files: list[Path], manifest: Manifest) -> None:
    unlisted = {file.name for file in files} - {entry.file for entry in manifest.slices}
    if unlisted:
        _log.warning(
            "dataset %s: %d files, such as %s, are not in %s and not served; remove it to announce the folder as it is",
            name, len(unlisted), min(unlisted), folder / MANIFEST,
        )  # fmt: skip


def _check_distinct(name: str, folder: Path, manifest: Manifest) -> None:
    """Check that no slice is a copy of another one, whose samples would then count twice.

    Raises:
        DatasetError: one is.
    """
    first: dict[str, str] = {}
    for entry in manifest.slices:
        if (other := first.setdefault(entry.digest, entry.file)) != entry.file:
            raise DatasetError(
                f"dataset {name}: {folder / entry.file} is a copy of {other}: remove one of the two, or list the "
                f"slices in {MANIFEST}"
            )


def measure(name: str, files: list[Path], digests: DigestCache, on_read: OnRead) -> Manifest:
    """Return samples, size and digest of every slice, and the columns of JSONL slices.

    Safetensors slices are read if their digest is not remembered, JSONL slices always.

    Raises:
        DatasetError: a file does not hold samples of one format, or cannot be read.
    """
    if all(file.suffix == SLICE_SUFFIXES[JSONL] for file in files):
        columns = ColumnTable()
        rows = tuple(_measure_rows(file, columns, digests, on_read) for file in files)
        return Manifest(dataset=name, slices=rows, format=JSONL, columns=columns.kinds)
    return Manifest(dataset=name, slices=tuple(_measure_slice(file, digests, on_read) for file in files))


def _measure_slice(file: Path, digests: DigestCache, on_read: OnRead) -> SliceEntry:
    samples = count_samples(file)
    try:
        found, digest = digests.find(file) or digests.read(file, on_read)
    except OSError as error:
        raise DatasetError(f"{file}: {error.strerror or error}") from None
    return SliceEntry(file=file.name, samples=samples, size=found.size, digest=digest)


def _measure_rows(file: Path, columns: ColumnTable, digests: DigestCache, on_read: OnRead) -> SliceEntry:
    try:
        with RowFile(file, columns, on_read) as rows:
            found, digest = digests.find(file) or digests.read(file, on_read)
            rows.check_unchanged()
            return SliceEntry(file=file.name, samples=len(rows), size=found.size, digest=digest)
    except OSError as error:
        raise DatasetError(f"{file}: {error.strerror or error}") from None


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


def read_manifest(name: str, folder: Path) -> Manifest | None:
    """Return the manifest in the folder, or None if there is no usable one."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest: Manifest = from_json(Manifest, path.read_bytes(), MAX_MANIFEST)
    except DecodeError as error:
        _log.warning("dataset %s: %s cannot be used: %s", name, path, error)
        return None
    fault = _find_fault(manifest)
    if fault is not None:
        _log.warning("dataset %s: %s cannot be used: %s", name, path, fault)
        return None
    return Manifest(
        dataset=name,
        slices=manifest.slices,
        format=manifest.format,
        columns=manifest.columns,
        labels=manifest.labels,
    )


def _find_fault(manifest: Manifest) -> str | None:
    if manifest.format is not None and manifest.format not in SLICE_SUFFIXES:
        return f"format {manifest.format!r} is not known here, but {', '.join(SLICE_SUFFIXES)}; update hypha-data"
    if not manifest.slices:
        return "it names no slice"
    suffix = slice_suffix(manifest)
    for entry in manifest.slices:
        if not _is_file_name(entry.file):
            return f"{entry.file!r} is not the name of a file in its folder"
        if not entry.file.endswith(suffix):
            return f"{entry.file!r} is not a *{suffix}; set `format` to {' or '.join(SLICE_SUFFIXES)}"
    return None


def _is_file_name(name: str) -> bool:
    return name not in ("", "..") and Path(name).name == name and "\0" not in name
