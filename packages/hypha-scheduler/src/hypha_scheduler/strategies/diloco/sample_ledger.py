"""Sample assignment: each sample of the dataset is used at most once per epoch, whatever workers do. Pure.

The dataset's manifest lists the slices. A worker requests samples of one as a `SampleSpan`, pulls the slice from a data
node and uses the span's positions in their order. With its update of a round it contributes those that it has used:

    AVAILABLE → ASSIGNED (to a worker) → CONTRIBUTED (by a worker, to a round) → USED (the round was committed)

What a lost, late or refused update holds becomes AVAILABLE again. A slice that no provider has as the manifest
describes it is SET_ASIDE for the rest of the job.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

from hypha_proto.contributions import MAX_RANGES
from hypha_scheduler.strategies.base import SliceRefusedError

ALL: Final = 2**63 - 1
"""`SampleSpan.end` of a slice whose number of samples is unknown: all of them."""
Count = Annotated[int, msgspec.Meta(ge=0)]
Position = Annotated[int, msgspec.Meta(ge=0, le=ALL)]
_MAX_SLICES: Final = 256
"""Number of slices that a worker may hold regardless of their size; beyond it, at most `_MAX_BATCHES` batches' worth.

Bounds the memory that a worker which never uses its slices can take, but lets a batch consist of many small slices, and
a fast worker report many batches late.
"""
_MAX_BATCHES: Final = 4
_MAX_GAPS: Final = 64
"""Places in a contribution at which samples of an assignment were skipped. What was skipped is assigned again piece by
piece, each with a download of its slice."""


class LedgerFullError(SliceRefusedError):
    """A worker holds so many unused slices that it gets no more."""


class NoUsableSliceError(SliceRefusedError):
    """Every slice is empty or was set aside."""


class SampleSpan(msgspec.Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive samples of a slice in one epoch, in the order that seed, epoch and slice give.

    In records a list of the four numbers.
    """

    epoch: Count
    """Pass over the dataset, from 0."""
    index: Count
    """Position of the slice in the dataset, from 0."""
    first: Position
    end: Position
    """Position after the last sample; `ALL` for every sample from `first` of a slice of unknown size."""

    @property
    def slice(self) -> tuple[int, int]:
        """Epoch and slice."""
        return self.epoch, self.index

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.end - self.first

    def __str__(self) -> str:
        end = "the end" if self.end == ALL else str(self.end)
        return f"positions {self.first} to {end} of slice {self.index} in epoch {self.epoch}"


def merge_spans(spans: Iterable[SampleSpan]) -> list[SampleSpan]:
    """Return the same samples as sorted spans of which none overlaps or continues another."""
    merged: list[SampleSpan] = []
    for span in sorted(spans):
        last = merged[-1] if merged else None
        if last is not None and last.slice == span.slice and span.first <= last.end:
            merged[-1] = SampleSpan(*span.slice, last.first, max(last.end, span.end))
        else:
            merged.append(span)
    return merged


def subtract_spans(span: SampleSpan, taken: Iterable[SampleSpan]) -> list[SampleSpan]:
    """Return what is left of `span` without `taken`, in order."""
    left, first = [], span.first
    for gone in merge_spans(other for other in taken if other.slice == span.slice):
        if gone.first > first:
            left.append(SampleSpan(*span.slice, first, min(gone.first, span.end)))
        first = max(first, gone.end)
        if first >= span.end:
            return [part for part in left if part.samples > 0]
    return [*left, SampleSpan(*span.slice, first, span.end)]


def _by_slice(spans: Iterable[SampleSpan]) -> defaultdict[tuple[int, int], list[SampleSpan]]:
    """Return spans by their slices, in the order in which these first occur."""
    found: defaultdict[tuple[int, int], list[SampleSpan]] = defaultdict(list)
    for span in spans:
        found[span.slice].append(span)
    return found


@dataclass(slots=True)
class _Held:
    """The rest of a span that was assigned to a worker: what it has not contributed."""

    span: SampleSpan
    reported: int = 0
    """Number of samples, from the first one of `span`, that the executor has reported."""
    is_touched: bool = False
    """Whether the worker has reported or contributed samples of what it was assigned."""
    is_over: bool = False
    """Whether the worker has asked for another slice since, of one whose samples are not counted."""


@dataclass(slots=True)
class _Holder:
    held: list[_Held] = field(default_factory=list)
    contributed: dict[int, tuple[SampleSpan, ...]] = field(default_factory=dict)
    """Spans by the round that they were contributed to, of rounds that are not committed."""
    reports_no_slices: bool = False
    """Whether it reports batches without stating the slices they came from."""


class SampleLedger:
    """Assigns the samples of one dataset to workers.

    Epochs overlap: when nothing is AVAILABLE the next epoch starts, so that no worker waits for the last slice of
    another. Samples that came back are assigned first.
    """

    def __init__(self, samples: Sequence[int | None], seed: int = 0, batch: int = 0) -> None:
        """Start before epoch 0.

        Args:
            samples: number of samples of each slice; None if unknown.
            seed: seed of the order of the slices within each epoch.
            batch: samples per batch of a worker.

        Raises:
            ValueError: there are no slices.
        """
        if not samples:
            raise ValueError("a dataset without slices cannot be trained on")
        self._samples = list(samples)
        self._seed = seed
        self._max_unused = _MAX_BATCHES * batch
        self._available: dict[int, deque[SampleSpan]] = {}
        """AVAILABLE spans of each epoch, next first; no entry without one. Epochs in order."""
        self._next_epoch = 0
        self._holders: dict[Hashable, _Holder] = {}
        self._set_aside: set[int] = set()

    # ----------------------------------------------------------------------------------------------------------- state

    @property
    def usable(self) -> int:
        """Number of slices that were not set aside."""
        return len(self._samples) - len(self._set_aside)

    @property
    def epoch(self) -> int:
        """Newest epoch that has started."""
        return max(0, self._next_epoch - 1)

    @property
    def available(self) -> tuple[SampleSpan, ...]:
        """AVAILABLE spans of the epochs that have started, next first."""
        return tuple(span for queue in self._available.values() for span in queue)

    def held_by(self, worker: Hashable) -> tuple[SampleSpan, ...]:
        """Return the spans that are ASSIGNED to `worker`, oldest first, each without what it has contributed."""
        holder = self._holders.get(worker)
        return tuple(held.span for held in holder.held) if holder else ()

    def contribution(self, worker: Hashable, number: int) -> tuple[SampleSpan, ...] | None:
        """Return what `worker` has CONTRIBUTED to round `number`; None if nothing, or if the round is committed."""
        holder = self._holders.get(worker)
        return holder.contributed.get(number) if holder else None

    # -------------------------------------------------------------------------------------------------------- assigning

    def assign(self, worker: Hashable, *, whole: bool = False) -> SampleSpan:
        """Assign the next samples to `worker`.

        Args:
            worker: who gets them.
            whole: assign only slices of which nobody uses any part, because the worker's executor uses all of a slice.

        Raises:
            LedgerFullError: the worker holds too many unused slices.
            NoUsableSliceError: every slice is empty or was set aside.
        """
        holder = self._holders.setdefault(worker, _Holder())
        for held in holder.held:
            held.is_over |= holder.reports_no_slices or held.span.end == ALL
        if self._is_full(holder.held):
            raise LedgerFullError(f"{len(holder.held)} slices were assigned to this worker and not used")
        span = self._next(whole)
        if span is None:
            self._open_epoch()
            span = self._next(whole)
            assert span is not None
        self._remove(span)
        holder.held.append(_Held(span))
        return span

    def _is_full(self, held: Sequence[_Held]) -> bool:
        unused = [each for each in held if not each.is_over and each.reported < each.span.samples]
        if len(held) >= MAX_RANGES:
            return True
        if len(unused) < _MAX_SLICES:
            return False
        samples = sum(each.span.samples - each.reported for each in unused if each.span.end != ALL)
        return samples >= self._max_unused or len(unused) >= _MAX_SLICES + self._max_unused

    def _next(self, whole: bool) -> SampleSpan | None:
        spans = (span for queue in self._available.values() for span in queue)
        return next((span for span in spans if not whole or span == self._whole(*span.slice)), None)

    def _whole(self, epoch: int, index: int) -> SampleSpan:
        size = self._samples[index]
        return SampleSpan(epoch, index, 0, ALL if size is None else size)

    def _remove(self, span: SampleSpan) -> None:
        queue = self._available[span.epoch]
        queue.remove(span)
        if not queue:
            del self._available[span.epoch]

    def _open_epoch(self) -> None:
        order = list(range(len(self._samples)))
        random.Random(f"{self._seed}/{self._next_epoch}").shuffle(order)
        order = [index for index in order if index not in self._set_aside and self._samples[index] != 0]
        if not order:
            count = len(self._samples)
            raise NoUsableSliceError(
                f"all {count} slices were set aside" if not self.usable else "no slice has samples"
            )
        self._available[self._next_epoch] = deque(self._whole(self._next_epoch, index) for index in order)
        self._next_epoch += 1

    def set_aside(self, worker: Hashable, index: int, epoch: int | None = None) -> bool:
        """Never assign a slice again, because `worker` cannot get it from any provider.

        Others that hold the slice already may use it.

        Args:
            worker: to whom it is assigned.
            index: the slice.
            epoch: the epoch of the assignment; the oldest one if None.

        Returns:
            Whether the slice was assigned to the worker; if not, nothing changes.
        """
        found = self._holders[worker].held if worker in self._holders else []
        copies = [held for held in found if held.span.index == index and epoch in (None, held.span.epoch)]
        if not copies:
            return False
        found.remove(min(copies, key=lambda held: held.is_touched))  # what it uses already, it has got
        self._set_aside.add(index)
        for span in [span for span in self.available if span.index == index]:
            self._remove(span)
        return True

    # ----------------------------------------------------------------------------------------------------- contributing

    def report(self, worker: Hashable, used: Mapping[int, int] | None) -> None:
        """Record how many samples a batch of `worker` took from each slice, or None if the executor does not report it.

        Slices that the worker does not hold are ignored.
        """
        holder = self._holders.setdefault(worker, _Holder())
        holder.reports_no_slices = used is None
        for index, samples in (used or {}).items():
            self._count_samples(holder, index, samples)

    def _count_samples(self, holder: _Holder, index: int, samples: int) -> None:
        """Count samples of a slice, of which the worker may hold several spans: in the order of their positions."""
        for held in sorted((h for h in holder.held if h.span.index == index), key=lambda h: h.span):
            taken = min(samples, held.span.samples - held.reported)
            held.reported += taken
            held.is_touched |= taken > 0
            samples -= taken
            if samples <= 0:
                return

    def check(self, worker: Hashable, spans: Iterable[SampleSpan]) -> str | None:
        """Return why `worker` cannot contribute these samples; None if it can."""
        held = self.held_by(worker)
        free, starts = _by_slice(held), {(span.slice, span.first) for span in held}
        last: SampleSpan | None = None
        gaps = 0
        for span in sorted(spans):
            if span.first < 0 or span.end <= span.first:
                return f"{span} are no samples"
            if last is not None and last.slice == span.slice and span.first < last.end:
                return f"{span} overlap {last} of the same contribution"
            if subtract_spans(span, free[span.slice]):
                return f"{span} are not assigned to it, or were contributed before"
            continues = last is not None and last.slice == span.slice and span.first == last.end
            gaps += not continues and (span.slice, span.first) not in starts
            if gaps > _MAX_GAPS:
                return f"it skips samples in more than {_MAX_GAPS} places"
            last = span
        return None

    def contribute(self, worker: Hashable, number: int, spans: Iterable[SampleSpan] | None) -> tuple[SampleSpan, ...]:
        """Record the samples that the update of `worker` in round `number` was computed from.

        Positions before them in the same assignment, which the worker has skipped, become AVAILABLE again.

        Args:
            worker: whose update it is.
            number: the round.
            spans: the samples, in the order in which they were used. None if the executor does not state them: then
                what it has reported since its last contribution, or all that it was assigned if it reports no slices.

        Returns:
            The samples; those of the first call, if it is repeated.

        Raises:
            ValueError: `check` finds a fault, or the worker has contributed others to this round.
        """
        holder = self._holders.setdefault(worker, _Holder())
        known = holder.contributed.get(number)
        stated = None if spans is None else tuple(spans)
        if known is not None:
            if stated not in (None, known):
                raise ValueError(f"{worker} has contributed other samples to round {number}")
            return known
        if stated is None:
            stated = self._unstated(holder)
        elif (fault := self.check(worker, stated)) is not None:
            raise ValueError(f"{worker}: {fault}")
        holder.contributed[number] = stated
        self._take(holder, merge_spans(stated))
        return stated

    @staticmethod
    def _unstated(holder: _Holder) -> tuple[SampleSpan, ...]:
        """Return what a worker has used since its last contribution, as far as its reports tell."""
        found = []
        for held in holder.held:
            span = held.span
            if holder.reports_no_slices or held.is_over or (span.end == ALL and held.reported):
                found.append(span)
            elif held.reported:
                found.append(SampleSpan(*span.slice, span.first, span.first + held.reported))
        return tuple(found)

    def _take(self, holder: _Holder, spans: Sequence[SampleSpan]) -> None:
        """Shorten what a worker holds to what follows the samples that it contributes."""
        by_slice = _by_slice(spans)
        kept: list[_Held] = []
        skipped: list[SampleSpan] = []
        follows = False  # whether samples of a slice that was assigned later were contributed
        for held in reversed(holder.held):
            whole = held.span
            parts = [span for span in by_slice[whole.slice] if span.first < whole.end and span.end > whole.first]
            if parts:
                end = min(parts[-1].end, whole.end)
                skipped += subtract_spans(SampleSpan(*whole.slice, whole.first, end), parts)
                held.span = SampleSpan(*whole.slice, end, whole.end)
                held.reported = max(0, held.reported - (end - whole.first))
                held.is_touched = True
            is_exhausted = held.span.end == ALL and held.is_touched and follows
            follows |= bool(parts)
            if held.span.samples > 0 and not is_exhausted:
                kept.append(held)
        holder.held = kept[::-1]
        self._return(skipped)

    def commit(self, number: int, workers: Iterable[Hashable]) -> None:
        """Commit round `number`: contributions of `workers` to it are USED, those of others AVAILABLE again.

        Contributions to earlier rounds that were not committed with those become AVAILABLE, too.
        """
        accepted = set(workers)
        for worker, holder in self._holders.items():
            for earlier in [each for each in holder.contributed if each <= number]:
                spans = holder.contributed.pop(earlier)
                if earlier < number or worker not in accepted:
                    self._return(spans)

    def withdraw(self, worker: Hashable, number: int) -> tuple[SampleSpan, ...]:
        """Make the samples of a late or refused contribution AVAILABLE again; return them."""
        holder = self._holders.get(worker)
        return self._return(holder.contributed.pop(number, ()) if holder else ())

    def give_back(self, worker: Hashable) -> tuple[SampleSpan, ...]:
        """Make AVAILABLE again what is assigned to a worker that begins anew, but not what it has contributed."""
        holder = self._holders.get(worker)
        if holder is None:
            return ()
        held, holder.held = holder.held, []
        return self._return([each.span for each in held])

    def release(self, worker: Hashable) -> tuple[SampleSpan, ...]:
        """Make AVAILABLE again what is assigned to a lost worker, or contributed by it and not committed; return it."""
        holder = self._holders.pop(worker, None)
        if holder is None:
            return ()
        contributed = [span for spans in holder.contributed.values() for span in spans]
        return self._return([*contributed, *(held.span for held in holder.held)])

    def _return(self, spans: Sequence[SampleSpan]) -> tuple[SampleSpan, ...]:
        """Make spans AVAILABLE, to be assigned first, joined to neighbours; return those that are not SET_ASIDE.

        Their order is that in which slices first occur.
        The rest of a slice of unknown size may be empty, and is not assigned again.
        """
        joined = [span for found in _by_slice(spans).values() for span in merge_spans(found)]
        returned = [s for s in joined if s.index not in self._set_aside and not (s.first > 0 and s.end == ALL)]
        for span in reversed(returned):
            queue = self._available.setdefault(span.epoch, deque())
            neighbours = self._neighbours(span, queue)
            for neighbour in neighbours:
                queue.remove(neighbour)
            queue.extendleft(merge_spans([span, *neighbours]))
        self._available = dict(sorted(self._available.items()))
        return tuple(returned)

    def _neighbours(self, span: SampleSpan, queue: Iterable[SampleSpan]) -> list[SampleSpan]:
        if span == self._whole(*span.slice):  # and do not look through a long queue
            return []
        return [s for s in queue if s.slice == span.slice and (s.end == span.first or s.first == span.end)]

    # --------------------------------------------------------------------------------------------------------- restart

    def restore(self, used: Iterable[SampleSpan]) -> None:
        """Record the samples that committed rounds of an earlier run have used, before the first is assigned.

        A slice of unknown size that was used in part counts as used.
        """
        by_slice = _by_slice(used)
        while self._next_epoch <= max((epoch for epoch, _ in by_slice), default=-1):
            self._open_epoch()
            left: deque[SampleSpan] = deque()
            for span in self._available.pop(self._next_epoch - 1):
                gone = by_slice.get(span.slice, [])
                left += [] if gone and span.end == ALL else subtract_spans(span, gone)
            if left:
                self._available[self._next_epoch - 1] = left

    def assigned(self, worker: Hashable, span: SampleSpan) -> None:
        """Record that an earlier run has assigned AVAILABLE samples to a worker that has them still.

        An end of `ALL` is that of the slice. The rest of a slice of unknown size is never AVAILABLE, and taken for
        assigned to that worker.

        Raises:
            ValueError: they are not AVAILABLE.
        """
        is_known = 0 <= span.index < len(self._samples)
        if is_known and span.end == ALL:
            span = SampleSpan(*span.slice, span.first, self._whole(*span.slice).end)
        if not is_known or span.samples <= 0 or subtract_spans(span, [self._whole(*span.slice)]):
            raise ValueError(f"the dataset has no {span}")
        while self._next_epoch <= span.epoch:
            self._open_epoch()
        if span.first == 0 or span.end != ALL:
            self._take_available(span)
        self._holders.setdefault(worker, _Holder()).held.append(_Held(span, is_touched=span.first > 0))

    def _take_available(self, span: SampleSpan) -> None:
        around = [s for s in self.available if s.slice == span.slice and s.first <= span.first and span.end <= s.end]
        if not around:
            raise ValueError(f"{span} are not available")
        self._remove(around[0])
        if left := subtract_spans(around[0], [span]):
            self._available.setdefault(span.epoch, deque()).extendleft(reversed(left))
            self._available = dict(sorted(self._available.items()))
