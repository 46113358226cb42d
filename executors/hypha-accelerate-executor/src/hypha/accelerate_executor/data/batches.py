"""Batches from dataset slices.

Slices are files of samples (`data.samples`); `bridge` fetches them and `train.trainer` consumes the batches. Samples
are shuffled within a slice, determined by (seed, epoch, slice) alone, and batches may span slices. `slice_prefetch`
fetches the next ones while the current one is used.

What decides the boundaries: the samples of all assigned slices, one slice after the other, each in its order and only
at the positions that were assigned, are one sequence. Batches are its consecutive parts of `batch_size` samples; only
the very last one may be shorter, when no slice is left. They depend neither on the boundaries of slices nor on those of
rounds: a round is a number of whole batches, and the next one begins with the sample after its last. Therefore
`recorded_batches` builds the batches of a round again from the ranges of samples that the executor has recorded.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hypha.accelerate_executor.bridge.client import Fetched
from hypha.accelerate_executor.data.samples import Arrays, open_samples
from hypha.accelerate_executor.data.slice_prefetch import InHand, PrefetchDemand, SlicePrefetch
from hypha.accelerate_executor.errors import BridgeRefused, DataError
from hypha_proto.contributions import SampleRange
from hypha_proto.texts import quote

logger = logging.getLogger(__name__)

_LISTED: Final = 64
"""Rows of a slice that an error lists."""
_U32: Final = (1 << 32) - 1
_U64: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive samples of a slice, in its order, and where they are stored."""

    range: SampleRange
    numbers: NDArray[np.int64]
    """Row of each sample in the slice, from 0."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples for one inner optimizer step."""

    tensors: Arrays
    """Name in the slice -> float32 or int64 array (as stored for a preprocessor), samples in the first dimension."""
    samples: int
    rows: tuple[Rows, ...] = ()
    """Where the samples are from, in their order."""
    dataset: str = ""

    @property
    def slices(self) -> Mapping[str, int]:
        """Number of samples from each slice, by its index."""
        found = Counter[str]()
        for part in self.rows:
            found[str(part.range.slice)] += len(part.numbers)
        return found

    def describe_row(self, number: int) -> str:
        """Return dataset, slice and row that sample `number` of this batch comes from."""
        begin = number
        for part in self.rows:
            if begin < len(part.numbers):
                dataset = f"dataset {self.dataset!r}, " if self.dataset else ""
                return f"{dataset}slice {part.range.slice}, row {part.numbers[begin]}"
            begin -= len(part.numbers)
        return f"row {number} of a batch"

    def describe_rows(self) -> str:
        """Return dataset, slices and rows that the samples of this batch come from."""
        dataset = [f"dataset {self.dataset!r}"] if self.dataset else []
        parts = [f"slice {part.range.slice}, rows {_listed(part.numbers)}" for part in self.rows]
        return ", ".join([*dataset, *parts]) or f"a batch of {self.samples} samples"


def _listed(numbers: NDArray[np.int64]) -> str:
    shown = " ".join(map(str, sorted(numbers[:_LISTED].tolist())))
    return shown if len(numbers) <= _LISTED else f"{shown} and {len(numbers) - _LISTED} more"


class Slice:
    """One fetched slice, read in shuffled order."""

    def __init__(
        self,
        path: Path,
        seed: int,
        raw: Collection[str],
        index: int,
        epoch: int,
        first: int = 0,
        end: int | None = None,
    ) -> None:
        """Open the file.

        Args:
            path: a safetensors file, or JSON lines.
            seed: decides the order of the samples, together with the next two.
            raw: tensors read as stored.
            index: the slice's index in its dataset.
            epoch: the pass over the dataset.
            first: position in the order of the first sample to use.
            end: position after the last sample to use; None for all.

        Raises:
            DataError: the file is malformed, its tensors do not share their first dimension, or it has no such
                positions.
        """
        self.path = path
        self._index, self._epoch = index, epoch
        self._file = open_samples(path)
        self.size = path.stat().st_size
        """Bytes of the file."""
        samples = self._file.count
        self._end = samples if end is None else end
        if not first < self._end <= samples:
            self._file.close()
            raise DataError(
                f"slice {index}: positions {first} to {self._end} were assigned, and it has {samples} samples: "
                "its dataset has changed, or the scheduler takes it for another one"
            )
        self.samples = self._end - first
        """Number of samples to use."""
        self._order = shuffled(samples, seed, epoch, index)
        self._raw = raw
        self._next = first

    @property
    def left(self) -> int:
        """Return the number of samples not taken yet."""
        return self._end - self._next

    def take(self, samples: int) -> tuple[Arrays, Rows]:
        """Return the next samples, fewer if fewer are left."""
        first, self._next = self._next, min(self._next + samples, self._end)
        numbers = self._order[first : self._next]
        found = SampleRange(epoch=self._epoch, slice=self._index, first=first, end=self._next)
        return self._file.read(numbers, self._raw), Rows(found, numbers)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def delete(self) -> None:
        """Close the file and delete it."""
        self.close()
        self.path.unlink(missing_ok=True)


def shuffled(samples: int, seed: int, epoch: int, index: int) -> NDArray[np.int64]:
    """Return the order of a slice's samples: a permutation determined by (seed, epoch, index) alone."""
    return np.random.default_rng([seed, epoch, index]).permutation(samples)


class Batches:
    """Iterator of batches, as long as the scheduler assigns slices."""

    def __init__(
        self,
        fetch: Callable[[int], list[Fetched]],
        batch_size: int,
        seed: int,
        raw: Collection[str] = (),
        dataset: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare; the first slice is fetched by `prefetch` or by the first batch.

        Args:
            fetch: fetches as many of the next slices as it is told, or fewer; raises `NoMoreData` if there is none.
            batch_size: samples per batch; the last batch may have fewer.
            seed: decides the order of samples.
            raw: tensors whose integers are kept as stored: inputs of a preprocessor.
            dataset: name of the dataset, for errors.
            clock: returns seconds.
        """
        self._raw = frozenset(raw)
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._open: list[Slice] = []
        self._made = batches_of(self._needed(), batch_size, dataset)
        self._demand = PrefetchDemand(batch_size)
        self._coming = SlicePrefetch(fetch, clock)
        self._clock = clock
        self._handed_out: tuple[int, float] | None = None
        """Samples of the last batch, and when it was handed out."""
        self._was_refused = False
        """Whether the slice that training needs was refused once."""
        self.before_retry: Callable[[], object] = lambda: None
        """Called before a refused slice that training needs is requested once more: the scheduler assigns none to a
        worker that has, as far as it knows, not used many others."""

    def prefetch(self) -> None:
        """Start fetching slices, unless enough are in hand or on their way, or none is left."""
        self._request(self._demand.samples_ahead)

    def drop(self) -> None:
        """Give up the samples that were assigned and not used; waits for the slices on their way."""
        self._handed_out = None
        for file in self._coming.drop():
            file.path.unlink(missing_ok=True)
        for opened in self._open:
            opened.delete()
        self._open.clear()
        self._made = batches_of(self._needed(), self._batch_size, self._dataset)

    def close(self) -> None:
        """Discard pending fetches and delete the fetched slices; a fetch that has begun goes on."""
        self._coming.close()
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
        if self._handed_out is not None:
            samples, at = self._handed_out
            self._demand.add_batch(samples, self._clock() - at)
        while self._take(waits=False):
            pass
        batch = next(self._made)
        self._delete_used()
        self.prefetch()
        self._handed_out = batch.samples, self._clock()
        return batch

    def _needed(self) -> Iterator[Slice]:
        """Yield the slices to take samples from, each until it is used up, waiting for one if none is in hand."""
        while True:
            self._delete_used()
            while not self._open:
                self._request(self._batch_size + self._demand.samples_ahead, is_ahead=False)
                if not self._take_needed() and self._coming.is_over:
                    return
            yield self._open[0]

    def _delete_used(self) -> None:
        while self._open and not self._open[0].left:
            self._open.pop(0).delete()

    def _request(self, wanted: float, *, is_ahead: bool = True) -> None:
        """Request slices, so that `wanted` samples are in hand when they have come.

        `is_ahead` says that no batch waits for them.
        """
        opened = self._open
        in_hand = InHand(
            samples=sum(each.left for each in opened),
            slices=len(opened),
            bytes=sum(each.size for each in opened),
            is_half_used=len(opened) == 1 and opened[0].left * 2 <= opened[0].samples,
        )
        count = self._demand.further(wanted, in_hand, self._coming.coming)
        demand = self._demand
        self._coming.request(count, len(opened), demand.parallel, demand.slices_per_request, is_ahead=is_ahead)

    def _take_needed(self) -> bool:
        """Wait for the slices that were assigned next; return False if none is left, or one was refused for now."""
        try:
            was_taken = self._take(waits=True)
        except BridgeRefused as refusal:
            if self._was_refused:
                raise
            logger.info("a slice is requested once more: %s", refusal)
            self.before_retry()
            self._was_refused = True
            return False
        self._was_refused &= not was_taken
        return was_taken

    def _take(self, *, waits: bool) -> bool:
        """Open the slices that were assigned next, if they have come; return whether there were any."""
        taken = self._coming.take(len(self._open), waits=waits)
        if taken is None:
            return False
        files, seconds = taken
        self._demand.add_fetch(seconds)
        for fetched in files:
            self._open.append(opened := self._opened(fetched))
            self._demand.add_slice(opened.samples, opened.size)
        return True

    def _opened(self, fetched: Fetched) -> Slice:
        return Slice(
            fetched.path,
            self._seed,
            self._raw,
            index=_number(fetched, "slice", _U64),
            epoch=_number(fetched, "epoch", _U32),
            first=_number(fetched, "first", _U64) if "first" in fetched.metadata else 0,
            end=_number(fetched, "end", _U64) if "end" in fetched.metadata else None,
        )


def batches_of(slices: Iterable[Slice], batch_size: int, dataset: str = "") -> Iterator[Batch]:
    """Yield batches of the samples of some slices, the last one with fewer samples if no slice is left.

    Args:
        slices: each has samples left, and is asked for no other one before it is used up.
        batch_size: samples of a batch.
        dataset: name of the dataset, for errors.

    Raises:
        DataError: a slice is malformed.
    """
    parts: list[tuple[Arrays, Rows]] = []
    missing = batch_size
    for opened in slices:
        while opened.left:
            parts.append(opened.take(missing))
            missing -= len(parts[-1][1].numbers)
            if not missing:
                yield _joined(parts, dataset)
                parts, missing = [], batch_size
    if parts:
        yield _joined(parts, dataset)


def _joined(parts: Sequence[tuple[Arrays, Rows]], dataset: str) -> Batch:
    first, *others = (arrays for arrays, _ in parts)
    for arrays in others:
        if arrays.keys() != first.keys():
            raise DataError(f"two slices have different tensors: {sorted(first)} and {sorted(arrays)}")
    tensors = {name: np.concatenate([arrays[name] for arrays, _ in parts]) for name in first} if others else first
    return Batch(tensors, sum(len(rows.numbers) for _, rows in parts), tuple(rows for _, rows in parts), dataset)


def _number(fetched: Fetched, key: str, limit: int) -> int:
    """Return the number, from 0 to `limit`, that a slice's metadata has under a key.

    Raises:
        DataError: it is missing or malformed.
    """
    text = fetched.metadata.get(key, "")
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(limit)) else limit + 1
    if number > limit:
        raise DataError(f"slice {fetched.path.name}: {key} is {quote(text)}, expected a decimal number up to {limit}")
    return number
