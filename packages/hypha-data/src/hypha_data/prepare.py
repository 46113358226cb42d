"""Preparation of a dataset: shuffles the samples of a source and cuts them into slices.

Rows are shuffled first because label-skewed slices slow down DiLoCo: every worker would train on its own labels.
Sources other than safetensors files are converted to tensors on disk first (`staging`). Memory holds a block of
samples, whatever the size; what is larger is memory-mapped.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from hypha_data.catalog import count_samples, measure
from hypha_data.digest_cache import DigestCache, ignore_progress
from hypha_data.errors import DatasetError
from hypha_data.jsonl import ColumnTable, RowFile
from hypha_data.sources.formats import (
    check_content,
    check_options,
    find_format,
    find_sources,
    makes_rows,
    open_reader,
)
from hypha_data.sources.options import HF, ReadOptions
from hypha_data.sources.plain_bytes import unpack
from hypha_data.sources.reader import BLOCK_BYTES, OnProgress, files_state
from hypha_data.staging import StagedSamples, stage
from hypha_data.workspace import WORK, Workspace
from hypha_proto.datasets import JSONL, SAFETENSORS, SLICE_SUFFIXES, Manifest, SliceEntry
from hypha_proto.safetensors_io import STORED_DTYPES, TensorFile, TensorFileWriter, TensorInfo

MAX_SLICES: Final = 99_999
DEFAULT_SLICES: Final = 16
"""Slices of a dataset that is small."""
SLICE_BYTES: Final = 64 << 20
"""Largest size of a slice, if their number is not given."""
_PLAN_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class _Plan:
    """What decides the slices: only a preparation with the same plan continues an interrupted one."""

    version: int
    sources: Sequence[str]
    format: str
    options: ReadOptions
    name: str
    slices: int | None
    seed: int
    test: float
    state: str
    """State of the source's files."""


def prepare_dataset(
    source: Path | Sequence[Path],
    out: Path,
    *,
    name: str,
    slices: int | None,
    seed: int,
    force: bool = False,
    source_format: str | None = None,
    options: ReadOptions | None = None,
    test: float = 0.0,
    on_notice: Callable[[str], None] = lambda _: None,
    on_progress: OnProgress = lambda _what, _count: None,
) -> Manifest:
    """Shuffle the samples of `source` by `seed` and write them to `out` as `slices` slices.

    The whole source is checked and all slices are written before the first one appears in `out`. If the process is
    interrupted, another one with the same arguments continues where it was.

    Args:
        source: file or folder of one of `hypha_data.sources.options.FORMATS`, or name of a dataset of the hub; or
            several files of one format, or patterns such as ``part-*.csv``, which are read in the order of their names.
        out: the dataset's folder; created if it does not exist.
        name: name in the manifest.
        slices: number of slices; their lengths differ by at most one sample. None means 16, or more of 64 MiB each.
        seed: decides the order of the samples, and which of them are for testing.
        force: replace existing slices.
        source_format: one of `hypha_data.sources.options.FORMATS`; None means that the source tells it.
        options: how to read the source.
        test: part of the samples that becomes the dataset ``NAME-test``, in a folder beside `out`; 0 for none.
        on_notice: called with each line that the dataset's owner should read, such as columns that some rows lack.
        on_progress: called now and then.

    Returns:
        The manifest of the samples that are not for testing, also written to ``out/manifest.json``.

    Raises:
        DatasetError: the source has an invalid row, no samples or fewer than slices, or is in `out` itself, or `out`
            already contains slices.
        OSError: a file cannot be read or written.
    """
    _check_counts(slices, test)
    read = _find_source(source, source_format, options or ReadOptions())
    outs = {name: out, f"{name}-test": test_folder(out)} if test else {name: out}
    for each in read.paths:
        _check_folders(each, outs.values())
    places = [str(each.absolute()) for each in read.paths]
    plan = _Plan(_PLAN_VERSION, places, read.form, read.options, name, slices, seed, test, read.state)
    encoded = json.dumps(asdict(plan)).encode()
    with _named_full_disk(out), ExitStack() as stack:
        parts = {part: stack.enter_context(Workspace(folder, encoded)) for part, folder in outs.items()}
        manifests = {part: made for part, workspace in parts.items() if (made := workspace.manifest()) is not None}
        if len(manifests) < len(parts):
            for folder in outs.values():
                _check_old_slices(folder, force)
            manifests = _write_all(read, parts, plan, on_notice, on_progress)
        for part, workspace in reversed(parts.items()):
            workspace.publish(manifests[part], _find_slices(outs[part]))
    return manifests[name]


def _find_source(source: Path | Sequence[Path], source_format: str | None, options: ReadOptions) -> _Source:
    paths = find_sources([source] if isinstance(source, Path) else source)
    form = find_format(paths, source_format)
    check_options(form, options)
    for each in paths:
        if form != HF and not each.exists():
            raise DatasetError(f"{each}: no such file or folder; name an existing one")
        check_content(each, form)
    return _Source(paths, form, options)


def _check_counts(slices: int | None, test: float) -> None:
    """Check what can be checked before anything is read."""
    if not 0 <= test < 1:
        raise DatasetError(f"--test {test:g}: a part of the samples, from 0 up to less than 1, such as 0.1")
    if slices is not None and not 1 <= slices <= MAX_SLICES:
        raise DatasetError(f"--slices {slices}: a dataset has 1 to {MAX_SLICES} slices")


def _write_all(
    read: _Source,
    parts: dict[str, Workspace],
    plan: _Plan,
    on_notice: Callable[[str], None],
    on_progress: OnProgress,
) -> dict[str, Manifest]:
    """Write all slices to the folders of `parts`, which then keep their manifests too; return these."""
    with read.open(parts[plan.name].folder, on_progress) as samples:
        manifests = _write_parts(samples, parts, plan, on_progress)
        read.check_unchanged()
        for notice in samples.notices:
            on_notice(notice)
    for part, workspace in reversed(parts.items()):
        workspace.finish(manifests[part])
    return manifests


@contextmanager
def _named_full_disk(out: Path) -> Iterator[None]:
    """Name the remedy of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DatasetError(
            f"{out}: no space left on the disk; free some and run the same command again, which continues, or remove "
            f"{out / WORK}"
        ) from None


def test_folder(out: Path) -> Path:
    """Return the folder of the samples for testing."""
    place = out if out.name not in ("", "..") else out.resolve()
    return place.with_name(f"{place.name}-test")


def _write_parts(
    samples: _Samples, parts: Mapping[str, Workspace], plan: _Plan, on_progress: OnProgress
) -> dict[str, Manifest]:
    """Write the slices of each part, those for testing the first ones of the shuffled samples."""
    (name, main), *others = parts.items()
    tested = max(1, round(len(samples) * plan.test)) if others else 0
    rest = len(samples) - tested
    if rest < 1:
        raise DatasetError(
            f"--test {plan.test:g}: {len(samples)} samples are too few to keep some for testing; leave it out"
        )
    most = min(rest, MAX_SLICES)
    wanted = plan.slices or min(most, max(DEFAULT_SLICES, math.ceil(samples.size / SLICE_BYTES)))
    if not 1 <= wanted <= most:
        raise DatasetError(f"--slices {wanted}: {samples.source} holds {rest} samples, so 1 to {most}")
    order = _shuffle(main.folder / "order", len(samples), plan.seed)
    made: dict[str, Manifest] = {}
    for part, workspace in others:
        count = min(tested, max(1, round(wanted * tested / rest)))
        made[part] = _write_slices(samples, part, workspace, np.array_split(order[:tested], count), on_progress)
    made[name] = _write_slices(samples, name, main, np.array_split(order[tested:], wanted), on_progress)
    return made


def _shuffle(path: Path, length: int, seed: int) -> NDArray[np.int64]:
    """Return the numbers of the samples in random order, which is `Generator.permutation`, in a memory-mapped file."""
    order = np.memmap(path, np.int64, "w+", shape=(length,)).view(np.ndarray)
    for begin in range(0, length, 1 << 20):
        order[begin : begin + (1 << 20)] = np.arange(begin, min(begin + (1 << 20), length))
    np.random.default_rng(seed).shuffle(order)
    return order


def _write_slices(
    samples: _Samples, name: str, workspace: Workspace, order: list[NDArray[np.int64]], on_progress: OnProgress
) -> Manifest:
    """Write the slices that are not finished yet."""
    entries = workspace.finished()
    for index in range(len(entries), len(order)):
        path = _slice_path(workspace.folder, index, samples.form)
        path.unlink(missing_ok=True)  # of an interrupted attempt
        entries.append(samples.write_slice(path, order[index]))
        workspace.add_finished(entries)
        on_progress(f"slices of {len(order)} written", index + 1)
    return Manifest(
        dataset=name,
        slices=tuple(entries),
        format=None if samples.form == SAFETENSORS else samples.form,
        columns=samples.columns(),
        labels=samples.labels,
    )


def _check_folders(source: Path, outs: Any) -> None:
    """Check that the slices do not go where the source is.

    Raises:
        DatasetError: they would; they would count as a source, or the source as an old slice.
    """
    place = source.resolve()
    for out in outs:
        folder = out.resolve()
        if place.parent == folder or place == folder:
            raise DatasetError(f"{source} lies in {out}, where the slices go; choose another folder")
        if place.is_dir() and place in folder.parents:
            raise DatasetError(f"{out} lies in {source}, which is read; choose another folder")


def _find_slices(out: Path) -> list[Path]:
    return sorted(path for suffix in SLICE_SUFFIXES.values() for path in out.glob(f"*{suffix}"))


def _check_old_slices(out: Path, force: bool) -> None:
    """Check that there are no slices in `out` already that are not to be replaced.

    Raises:
        DatasetError: there are some.
    """
    old = _find_slices(out)
    if old and not force:
        raise DatasetError(
            f"{out} holds {len(old)} slices already, such as {old[0].name}; choose another folder, or --force to "
            "replace all of them"
        )


class _Source:
    """Sources of one format, whose files are not to change meanwhile."""

    def __init__(self, paths: Sequence[Path], form: str, options: ReadOptions) -> None:
        self.paths, self.form, self.options = paths, form, options
        is_stored = form == SAFETENSORS or makes_rows(form, options)
        if is_stored and (folder := next((each for each in paths if each.is_dir()), None)):
            raise DatasetError(f"{folder}: a folder; {form} needs files, such as {folder}/*.{form}")
        self._reader = None if is_stored else open_reader(paths, form, options)
        self.state = self._find_state()

    def _find_state(self) -> str:
        return files_state(self.paths) if self._reader is None else self._reader.state()

    def check_unchanged(self) -> None:
        """Check that no file was written to.

        Raises:
            DatasetError: one was.
        """
        if self._find_state() != self.state:
            raise DatasetError(f"{self.paths[0]}: changed while it was read; run the command again when it is complete")

    @contextmanager
    def open(self, work: Path, on_progress: OnProgress) -> Iterator[_Samples]:
        """Open the samples, which are converted in the folder `work` first if they are not tensors."""
        if self._reader is not None:
            folder = work / "staged"
            folder.mkdir(exist_ok=True)
            layout, staged = stage(self._reader, folder, self.check_unchanged, on_progress)
            yield _TensorSamples(self.paths[0], staged, staged.length, layout.labels, layout.notices or ())
            return
        columns = ColumnTable()
        with ExitStack() as stack:
            if self.form == JSONL:
                rows = (
                    RowFile(path, columns, ignore_progress, unpack(path, work / f"rows-{number:05d}"))
                    for number, path in enumerate(self.paths)
                )
                yield _RowSamples([stack.enter_context(each) for each in rows], columns)
                return
            lengths = [_count_tensor_samples(path) for path in self.paths]
            files = [stack.enter_context(TensorFile(path)) for path in self.paths]
            yield _TensorSamples(self.paths[0], _JoinedTensors(files, lengths), sum(lengths))


def _count_tensor_samples(source: Path) -> int:
    try:
        return count_samples(source)
    except DatasetError as error:
        raise DatasetError(f"{error}; if it is of another format, name that by --format") from None


class _JoinedTensors:
    """Tensors of several files, one file after the other."""

    def __init__(self, files: Sequence[TensorFile], lengths: Sequence[int]) -> None:
        """Join files.

        Raises:
            DatasetError: one has other tensors than the first one, or of another dtype or shape.
        """
        self._files = files
        self._ends = np.cumsum(lengths)
        first = files[0]
        for file in files[1:]:
            for name in sorted({*first.tensors, *file.tensors}):
                found, expected = _sample_kind(file, name), _sample_kind(first, name)
                if found != expected:
                    raise DatasetError(
                        f"{file.path}: the tensor {name!r} is {found}, and {expected} in {first.path}; give all files "
                        "the same tensors, or prepare them one by one"
                    )
        total = int(self._ends[-1])
        self.tensors = {name: TensorInfo(info.dtype, (total, *info.shape[1:])) for name, info in first.tensors.items()}

    def stored(self, name: str) -> _JoinedRows:
        """Return the tensor of all files."""
        return _JoinedRows([file.stored(name) for file in self._files], self._ends)


@dataclass(frozen=True, slots=True)
class _JoinedRows:
    """A tensor in several parts."""

    parts: Sequence[NDArray[Any]]
    ends: NDArray[np.int64]
    """Number of the first sample after each part."""

    def __getitem__(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        found = np.empty((len(rows), *self.parts[0].shape[1:]), self.parts[0].dtype)
        owners = np.searchsorted(self.ends, rows, side="right")
        for number, part in enumerate(self.parts):
            here = owners == number
            found[here] = part[rows[here] - (self.ends[number] - len(part))]
        return found


def _sample_kind(file: TensorFile, name: str) -> str:
    info = file.tensors.get(name)
    return "missing" if info is None else _kind(info)


def _kind(info: TensorInfo) -> str:
    """Return dtype and shape of one sample, such as ``float32[3,32,32]``."""
    dtype = "bfloat16" if info.dtype == "BF16" else STORED_DTYPES[info.dtype].name
    return f"{dtype}[{','.join(str(size) for size in info.shape[1:])}]"


@dataclass(frozen=True, slots=True)
class _TensorSamples:
    form: ClassVar = SAFETENSORS
    """Format of the slices."""
    source: Path
    tensors: StagedSamples | _JoinedTensors
    length: int
    labels: tuple[str, ...] | None = None
    """Names of the classes."""
    notices: tuple[str, ...] = ()
    """What the owner should know of the samples, one line each."""

    def __len__(self) -> int:
        return self.length

    @property
    def size(self) -> int:
        """Size of all slices in bytes, about."""
        return sum(info.nbytes for info in self.tensors.tensors.values())

    def write_slice(self, path: Path, rows: NDArray[np.int64]) -> SliceEntry:
        """Write a slice with the samples of these numbers."""
        tensors = self.tensors.tensors
        shapes = {name: TensorInfo(info.dtype, (len(rows), *info.shape[1:])) for name, info in tensors.items()}
        with TensorFileWriter(path, shapes) as writer:
            for name, info in shapes.items():
                stored = self.tensors.stored(name)
                most = max(1, BLOCK_BYTES * len(rows) // max(1, info.nbytes))
                for begin in range(0, len(rows), most):
                    part: NDArray[Any] = stored[rows[begin : begin + most]]
                    writer.write_stored(name, part)
        [entry] = measure("", [path], DigestCache(path.parent), ignore_progress).slices
        return entry

    def columns(self) -> dict[str, str]:
        """Return the kind of each column, as in the manifest."""
        return {name: _kind(info) for name, info in self.tensors.tensors.items()}


class _RowSamples:
    form = JSONL
    labels: tuple[str, ...] | None = None

    def __init__(self, files: Sequence[RowFile], columns: ColumnTable) -> None:
        self.source = files[0].path
        self.size = sum(file.size for file in files)
        self._files = files
        self._ends = [*itertools.accumulate(len(file) for file in files)]
        self._columns = columns

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def notices(self) -> Iterator[str]:
        return self._columns.describe_gaps()

    def write_slice(self, path: Path, rows: NDArray[np.int64]) -> SliceEntry:
        hasher, size = blake3(), 0
        with path.open("xb") as file:
            for number in rows:
                line = self._row(int(number)) + b"\n"
                hasher.update(line)
                size += file.write(line)
        for rows_of_file in self._files:
            rows_of_file.check_unchanged()
        return SliceEntry(file=path.name, samples=len(rows), size=size, digest=f"blake3:{hasher.hexdigest()}")

    def _row(self, number: int) -> bytes:
        file = bisect_right(self._ends, number)
        return self._files[file].row(number - self._ends[file] + len(self._files[file]))

    def columns(self) -> dict[str, str]:
        return self._columns.kinds


_Samples = _TensorSamples | _RowSamples


def _slice_path(folder: Path, index: int, form: str) -> Path:
    return folder / f"slice-{index:05d}{SLICE_SUFFIXES[form]}"
