"""The batches of a round, built again from the ranges of samples that an executor has stated for it.

The counterpart of `data.batches` for a replay: the same slices, ranges and batch size give the same batches, to the
bit. Opens files where they are and deletes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing
from pathlib import Path

from hypha.accelerate_executor.data.batches import Batch, Slice, batches_of
from hypha_proto.contributions import SampleRange


def recorded_batches(
    file_of: Callable[[int], Path],
    ranges: Iterable[SampleRange],
    batch_size: int,
    seed: int,
    raw: Collection[str] = (),
) -> Iterator[Batch]:
    """Yield the batches of one round of one worker.

    A round is a number of whole batches, so its ranges alone decide the boundaries: the samples of all ranges, one
    range after the other, are cut into batches of `batch_size`; the last one is shorter only where the worker had no
    further slice. Nothing of the rounds before is needed. Call it anew for each round: a batch never spans two.

    Args:
        file_of: returns the file of a slice by its index in the dataset.
        ranges: `Contribution.ranges`, in the order in which the samples were used.
        batch_size: `Contribution.batch_size`.
        seed: the job's seed, as in `TrainConfig.seed` (not `Contribution.seed`); None there means 0.
        raw: tensors whose integers are kept as stored (`data.preprocess.preprocessed_columns`).

    Raises:
        DataError: a slice is malformed, or has no such positions.
        OSError: a file cannot be read.
    """

    def slices() -> Iterator[Slice]:
        for wanted in ranges:
            place = wanted.epoch, wanted.first, wanted.end
            with closing(Slice(file_of(wanted.slice), seed, raw, wanted.slice, *place)) as opened:
                yield opened

    return batches_of(slices(), batch_size)
