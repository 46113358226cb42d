"""Batches from dataset slices.

Slices are safetensors files whose tensors share their first dimension, the samples; `bridge` fetches them and
`train.trainer` consumes the batches. Samples are shuffled within a slice, determined by (seed, epoch, slice) alone,
and batches may span two slices. The next slice is fetched while the current one is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hypha.accelerate_executor.bridge.client import Fetched
from hypha.accelerate_executor.errors import DataError, NoMoreData
from hypha_proto.errors import TensorFileError
from hypha_proto.update_file import FLOAT_DTYPES, TensorFile, to_float32

logger = logging.getLogger(__name__)

FLOAT_INPUTS: Final = ("pixel_values", "input_values", "input_features")
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Rows:
    """Where some rows of a batch are stored."""

    slice: str
    """Index of the slice in its dataset, or the file's name if it is unknown."""
    numbers: NDArray[np.int64]
    """Row of each sample in the slice, from 0."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples for one inner optimizer step."""

    tensors: Arrays
    """Name in the slice -> float32 or int64 array (as stored for a preprocessor), samples in the first dimension."""
    samples: int
    slices: Mapping[str, int]
    """Slice index -> number of samples from it; empty if the worker names no slices."""
    rows: tuple[Rows, ...] = ()
    """Where the samples are stored, in their order."""
    dataset: str = ""

    def describe_row(self, number: int) -> str:
        """Return dataset, slice and row that sample `number` of this batch comes from."""
        begin = number
        for part in self.rows:
            if begin < len(part.numbers):
                dataset = f"dataset {self.dataset!r}, " if self.dataset else ""
                return f"{dataset}slice {part.slice}, row {part.numbers[begin]}"
            begin -= len(part.numbers)
        return f"row {number} of a batch"


class Slice:
    """One fetched slice, read in shuffled order."""

    def __init__(
        self, path: Path, index: str | None, order: Callable[[int], NDArray[np.int64]], raw: Collection[str] = ()
    ) -> None:
        """Open the file.

        Args:
            path: a safetensors file.
            index: the slice's index in its dataset; None if unknown.
            order: returns a permutation of the given number of samples.
            raw: tensors read as stored.

        Raises:
            DataError: the file is malformed, or its tensors do not share their first dimension.
        """
        self.path = path
        self.index = index
        try:
            self._file = TensorFile(path)
        except TensorFileError as error:
            raise DataError(f"slice {error}") from None
        self.samples = count_samples(self._file)
        self._order = order(self.samples)
        self._raw = raw
        self._used = 0

    @property
    def left(self) -> int:
        """Return the number of samples not taken yet."""
        return self.samples - self._used

    def take(self, samples: int) -> tuple[Rows, dict[str, NDArray[Any]]]:
        """Return all tensors of the next samples, fewer if fewer are left, and where they are stored."""
        rows = self._order[self._used : self._used + samples]
        self._used += len(rows)
        arrays = {name: read_rows(self._file, name, rows, name in self._raw) for name in self._file.tensors}
        return Rows(self.path.name if self.index is None else self.index, rows), arrays

    def delete(self) -> None:
        """Close the file and delete it."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def count_samples(file: TensorFile) -> int:
    """Return the first dimension that all tensors of a slice share.

    Raises:
        DataError: the tensors differ in it, or have none.
    """
    counts = {info.shape[0] if info.shape else None for info in file.tensors.values()}
    count = counts.pop() if len(counts) == 1 else None
    if not count:
        shapes = {name: list(info.shape) for name, info in file.tensors.items()}
        raise DataError(f"slice {file.path.name}: tensors do not share a first dimension of samples: {shapes!r:.300}")
    return count


def read_rows(file: TensorFile, name: str, rows: NDArray[np.int64], raw: bool = False) -> NDArray[Any]:
    """Read samples of one tensor by number: floats as float32, integers as int64, or float32 for images and sound.

    With `raw` integers stay as they are stored.
    """
    stored, dtype = file.stored(name)[rows], file.tensors[name].dtype
    if dtype in FLOAT_DTYPES:
        return to_float32(stored, dtype)
    if raw:
        return stored
    return stored.astype(np.float32 if name in FLOAT_INPUTS else np.int64)


def shuffled(samples: int, seed: int, epoch: int, index: int) -> NDArray[np.int64]:
    """Return the order of a slice's samples: a permutation determined by (seed, epoch, index) alone."""
    return np.random.default_rng([seed, epoch, index]).permutation(samples)


class Batches:
    """Iterator of batches, as long as the scheduler assigns slices."""

    def __init__(
        self,
        fetch: Callable[[], list[Fetched]],
        batch_size: int,
        seed: int,
        raw: Collection[str] = (),
        dataset: str = "",
    ) -> None:
        """Prepare; the first slice is fetched by `prefetch` or by the first batch.

        Args:
            fetch: fetches the next slice; raises `NoMoreData` if there is none.
            batch_size: samples per batch; the last batch may have fewer.
            seed: decides the order of samples.
            raw: tensors whose integers are kept as stored: inputs of a preprocessor.
            dataset: name of the dataset, for errors.
        """
        self._fetch = fetch
        self._dataset = dataset
        self._raw = frozenset(raw)
        self._batch_size = batch_size
        self._seed = seed
        self._open: list[Slice] = []
        self._seen: dict[int, int] = {}
        self._fetched = 0
        self._ended = False
        self._coming: Future[list[Fetched]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slices")

    def prefetch(self) -> None:
        """Start fetching a slice, unless one is being fetched or none is left."""
        if self._coming is None and not self._ended:
            self._coming = self._thread.submit(self._fetch)

    def close(self) -> None:
        """Discard the pending fetch and delete the fetched slices."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for opened in self._open:
            opened.delete()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next batch, waiting for its slices.

        Raises:
            StopIteration: no sample is left and the scheduler assigns no further slice.
            DataError: a slice is malformed.
            ExecutorError: a slice could not be fetched.
        """
        parts: list[dict[str, NDArray[Any]]] = []
        rows: list[Rows] = []
        taken: dict[str, int] = {}
        missing = self._batch_size
        while missing and self._refill():
            current = self._open[0]
            count = min(missing, current.left)
            stored, arrays = current.take(count)
            rows.append(stored)
            parts.append(arrays)
            missing -= count
            if current.index is not None:
                taken[current.index] = taken.get(current.index, 0) + count
            self._after_taking(current)
        if not parts:
            raise StopIteration
        return Batch(_join(parts), self._batch_size - missing, taken, tuple(rows), self._dataset)

    def _refill(self) -> bool:
        """Open the next slice if the current one is used up; return False if there is none."""
        while not self._open and not self._ended:
            self.prefetch()
            assert self._coming is not None
            try:
                files = self._coming.result()
            except NoMoreData as end:
                logger.info("no further slice: %s", end)
                self._ended = True
            else:
                self._open.extend(self._opened(fetched) for fetched in files)
            self._coming = None
        return bool(self._open)

    def _after_taking(self, current: Slice) -> None:
        if len(self._open) == 1 and current.left * 2 <= current.samples:
            self.prefetch()
        if not current.left:
            self._open.pop(0).delete()

    def _opened(self, fetched: Fetched) -> Slice:
        name = fetched.metadata.get("slice")
        index = int(name) if name is not None and name.isdecimal() else self._fetched
        self._fetched += 1
        again = self._seen.get(index, 0)
        self._seen[index] = again + 1
        told = fetched.metadata.get("epoch", "")
        epoch = int(told) if told.isdecimal() else again
        return Slice(fetched.path, name, lambda samples: shuffled(samples, self._seed, epoch, index), self._raw)


def _join(parts: list[dict[str, NDArray[Any]]]) -> Arrays:
    if len(parts) == 1:
        return parts[0]
    for part in parts[1:]:
        if part.keys() != parts[0].keys():
            raise DataError(f"two slices have different tensors: {sorted(parts[0])} and {sorted(part)}")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
