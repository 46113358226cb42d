"""Record of what an update is computed from, stated to the scheduler with the update (`Contribution`).

`diloco.loop` adds every batch that it trains on, and states the record when the round ends. What a contribution states
decides the update exactly, to the bit, together with what is the same for the whole job; see docs/executor.md.
"""

from __future__ import annotations

from hypha.accelerate_executor.data.batches import Batch
from hypha_proto.contributions import MAX_RANGES, SampleRange


class SampleRecord:
    """The samples of one round, in the order in which they were used."""

    def __init__(self) -> None:
        self._ranges: list[SampleRange] | None = []

    @property
    def ranges(self) -> tuple[SampleRange, ...] | None:
        """Return the ranges, adjacent ones joined; None if they are more than `MAX_RANGES`."""
        return None if self._ranges is None else tuple(self._ranges)

    def add(self, batch: Batch) -> None:
        """Add the samples of a batch."""
        if self._ranges is None:
            return
        for part in batch.rows:
            _append(self._ranges, part.range)
        if len(self._ranges) > MAX_RANGES:
            self._ranges = None


def _append(ranges: list[SampleRange], following: SampleRange) -> None:
    """Append a range, or extend the last one if it continues it."""
    last = ranges[-1] if ranges else None
    if last is not None and (last.epoch, last.slice, last.end) == (following.epoch, following.slice, following.first):
        ranges[-1] = SampleRange(epoch=last.epoch, slice=last.slice, first=last.first, end=following.end)
    else:
        ranges.append(following)
