"""Preparation of a dataset: shuffles the samples of one file and cuts them into slices.

Rows are shuffled first because label-skewed slices slow down DiLoCo: every worker would train on its own labels. Source
tensors are memory-mapped; memory holds one slice of one tensor, or one row, at a time. Called by the command
``prepare``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from hypha_data.catalog import MANIFEST, count_samples, measure
from hypha_data.digest_cache import DigestCache, ignore_progress
from hypha_data.errors import DatasetError
from hypha_data.jsonl import ColumnTable, RowFile
from hypha_proto.codec import to_json
from hypha_proto.datasets import JSONL, SAFETENSORS, SLICE_SUFFIXES, Manifest, SliceEntry
from hypha_proto.safetensors_io import TensorFile, TensorFileWriter, TensorInfo

MAX_SLICES: Final = 99_999
SOURCE_FORMATS: Final[Mapping[str, str]] = {".jsonl": JSONL, ".ndjson": JSONL}
"""Format of a source by the suffix of its name; others are safetensors."""
_DTYPES: Final[Mapping[str, str]] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Dtypes as columns name them, by their names in safetensors files."""


def prepare_dataset(
    source: Path,
    out: Path,
    *,
    name: str,
    slices: int,
    seed: int,
    force: bool = False,
    source_format: str | None = None,
    on_notice: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """Shuffle the samples of the file `source` by `seed` and write them to `out` as `slices` slices of its format.

    The whole source is checked and all slices are written before the first one appears in `out`.

    Args:
        source: safetensors file whose tensors share their first dimension, the samples; or JSONL file of rows.
        out: the dataset's folder; created if it does not exist.
        slices: number of slices; their lengths differ by at most one sample.
        force: replace existing slices.
        source_format: a key of `hypha_proto.datasets.SLICE_SUFFIXES`; None means the suffix of the source tells it.
        on_notice: called with each line that the dataset's owner should read, such as columns that some rows lack.

    Returns:
        The manifest, also written to ``out/manifest.json``.

    Raises:
        DatasetError: the source has an invalid row, no samples or fewer than slices, or is in `out` itself, or `out`
            already contains slices.
        OSError: a file cannot be read or written.
    """
    with _open_source(source, source_format or SOURCE_FORMATS.get(source.suffix.lower(), SAFETENSORS)) as samples:
        most = min(len(samples), MAX_SLICES)
        if not 1 <= slices <= most:
            raise DatasetError(f"--slices {slices}: {source} holds {len(samples)} samples, so 1 to {most}")
        out.mkdir(parents=True, exist_ok=True)
        old = _find_old_slices(source, out, force)
        order = np.array_split(np.random.default_rng(seed).permutation(len(samples)), slices)
        with tempfile.TemporaryDirectory(dir=out, prefix=".prepare-") as temporary:
            manifest = samples.write(Path(temporary), name, order)
            text = Path(temporary) / MANIFEST
            text.write_bytes(to_json(Manifest, manifest))
            files = [out / entry.file for entry in manifest.slices]
            for path in [*files, out / MANIFEST]:
                (text.parent / path.name).replace(path)
    for path in set(old) - set(files):
        path.unlink()
    for notice in samples.notices():
        on_notice(notice)
    return manifest


def _find_old_slices(source: Path, out: Path, force: bool) -> list[Path]:
    """Return the slices that are in `out` already.

    Raises:
        DatasetError: there are some and they are not to be replaced, or the source is in `out`.
    """
    if source.resolve().parent == out.resolve():  # it would count as a slice, or be removed as an old one
        raise DatasetError(f"{source} lies in {out}, where the slices go; choose another folder")
    old = sorted(path for suffix in SLICE_SUFFIXES.values() for path in out.glob(f"*{suffix}"))
    if old and not force:
        raise DatasetError(
            f"{out} holds {len(old)} slices already, such as {old[0].name}; choose another folder, or --force to "
            "replace all of them"
        )
    return old


class _Samples(Protocol):
    """Samples of a source."""

    def __len__(self) -> int: ...

    def write(self, folder: Path, name: str, order: list[NDArray[np.int64]]) -> Manifest:
        """Write one slice for each array of sample numbers, and return the manifest."""
        ...

    def notices(self) -> Iterator[str]:
        """Yield what the owner should know of the samples, one line each."""
        ...


@contextmanager
def _open_source(source: Path, form: str) -> Iterator[_Samples]:
    if form == JSONL:
        columns = ColumnTable()
        with RowFile(source, columns, ignore_progress) as rows:
            yield _RowSamples(rows, columns)
        return
    try:
        length = count_samples(source)
    except DatasetError as error:
        if not _looks_like_json(source):
            raise
        remedy = f"JSON rows need the suffix {' or '.join(SOURCE_FORMATS)}, or --source-format jsonl"
        raise DatasetError(f"{error}; {remedy}") from None
    with TensorFile(source) as tensors:
        yield _TensorSamples(tensors, length)


def _looks_like_json(source: Path) -> bool:
    with source.open("rb") as file:
        return file.read(1) in (b"{", b"[")


class _TensorSamples:
    def __init__(self, source: TensorFile, length: int) -> None:
        self._source = source
        self._length = length

    def __len__(self) -> int:
        return self._length

    def notices(self) -> Iterator[str]:
        yield from ()

    def write(self, folder: Path, name: str, order: list[NDArray[np.int64]]) -> Manifest:
        paths = [_slice_path(folder, index, SAFETENSORS) for index in range(len(order))]
        for path, rows in zip(paths, order, strict=True):
            self._write_slice(path, rows)
        measured = measure(name, paths, DigestCache(folder), ignore_progress)
        return Manifest(dataset=name, slices=measured.slices, columns=self._columns())

    def _write_slice(self, path: Path, rows: NDArray[np.int64]) -> None:
        tensors = self._source.tensors
        shapes = {name: TensorInfo(info.dtype, (len(rows), *info.shape[1:])) for name, info in tensors.items()}
        with TensorFileWriter(path, shapes) as writer:
            for name in shapes:
                part: NDArray[Any] = self._source.stored(name)[rows]
                writer.write_stored(name, part)

    def _columns(self) -> dict[str, str]:
        """Return dtype and shape of one sample of each tensor, such as ``float32[3,32,32]``."""
        return {
            name: f"{_DTYPES[info.dtype]}[{','.join(str(size) for size in info.shape[1:])}]"
            for name, info in self._source.tensors.items()
        }


class _RowSamples:
    def __init__(self, rows: RowFile, columns: ColumnTable) -> None:
        self._rows = rows
        self._columns = columns

    def __len__(self) -> int:
        return len(self._rows)

    def notices(self) -> Iterator[str]:
        return self._columns.describe_gaps()

    def write(self, folder: Path, name: str, order: list[NDArray[np.int64]]) -> Manifest:
        entries = tuple(self._write_slice(_slice_path(folder, index, JSONL), rows) for index, rows in enumerate(order))
        self._rows.check_unchanged()
        return Manifest(dataset=name, slices=entries, format=JSONL, columns=self._columns.kinds)

    def _write_slice(self, path: Path, rows: NDArray[np.int64]) -> SliceEntry:
        hasher, size = blake3(), 0
        with path.open("xb") as file:
            for number in rows:
                line = self._rows.row(int(number)) + b"\n"
                hasher.update(line)
                size += file.write(line)
        return SliceEntry(file=path.name, samples=len(rows), size=size, digest=f"blake3:{hasher.hexdigest()}")


def _slice_path(folder: Path, index: int, form: str) -> Path:
    return folder / f"slice-{index:05d}{SLICE_SUFFIXES[form]}"
