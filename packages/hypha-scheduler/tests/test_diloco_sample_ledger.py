"""Sample assignment: each sample is used at most once per epoch, whatever workers do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypha_scheduler.strategies.diloco import sample_ledger
from hypha_scheduler.strategies.diloco.sample_ledger import (
    ALL,
    LedgerFullError,
    NoUsableSliceError,
    SampleLedger,
    SampleSpan,
    merge_spans,
    subtract_spans,
)

SIZES = [10, 7, 1, 12, 5]
WORKERS = st.sampled_from(["a", "b", "c"])
Sample = tuple[int, int, int]
"""Epoch, slice and position."""


def samples_of(spans: Iterable[SampleSpan]) -> list[Sample]:
    return [(span.epoch, span.index, position) for span in spans for position in range(span.first, span.end)]


def share(span: SampleSpan, first: int, end: int) -> SampleSpan:
    return SampleSpan(span.epoch, span.index, first, end)


class LedgerMachine(RuleBasedStateMachine):
    """Random workers that take, use and keep samples, are late, refused, lost and come back; a model of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SampleLedger(SIZES, seed=3)
        self.used: set[Sample] = set()
        self.assigned: dict[Sample, str] = {}
        self.contributed: dict[tuple[str, int], list[Sample]] = {}
        self.committed = 0
        self.unusable: set[int] = set()

    @rule(worker=WORKERS, whole=st.booleans())
    def take(self, worker: str, whole: bool) -> None:
        before = set(samples_of(self.ledger.available))
        epoch = self.ledger.epoch
        try:
            span = self.ledger.assign(worker, whole=whole)
        except LedgerFullError:
            return
        except NoUsableSliceError:
            assert len(self.unusable) == len(SIZES)
            return
        given = set(samples_of([span]))
        assert span.index not in self.unusable
        assert given <= before or span.epoch > epoch or not before
        assert not whole or (span.first, span.end) == (0, SIZES[span.index])
        assert not given & self.used
        assert not given & self.assigned.keys()
        assert not any(given & set(samples) for samples in self.contributed.values())
        self.assigned.update(dict.fromkeys(given, worker))

    @rule(worker=WORKERS, index=st.integers(-1, 6), samples=st.integers(0, 30))
    def report(self, worker: str, index: int, samples: int) -> None:
        self.ledger.report(worker, {index: samples})

    @rule(worker=WORKERS)
    def report_nothing(self, worker: str) -> None:
        self.ledger.report(worker, None)

    @rule(worker=WORKERS, data=st.data())
    def contribute(self, worker: str, data: st.DataObject) -> None:
        """State some of the samples of each span, perhaps with a gap before them, to the worker's round."""
        spans = []
        for held in self.ledger.held_by(worker):
            end = data.draw(st.integers(held.first, held.end))
            first = data.draw(st.integers(held.first, end)) if data.draw(st.booleans()) else held.first
            spans += [share(held, first, end)] if end > first else []
        self._contributed(worker, data.draw(st.permutations(spans)))

    @rule(worker=WORKERS)
    def contribute_unstated(self, worker: str) -> None:
        self._contributed(worker, None)

    def _contributed(self, worker: str, spans: list[SampleSpan] | None) -> None:
        number = self.committed + 1
        if (worker, number) in self.contributed:
            return
        assert spans is None or self.ledger.check(worker, spans) is None
        given = samples_of(self.ledger.contribute(worker, number, spans))
        assert all(self.assigned.pop(sample) == worker for sample in given)
        assert spans is None or given == samples_of(spans)
        self.contributed[worker, number] = given
        held = set(samples_of(self.ledger.held_by(worker)))
        for sample in [s for s, owner in self.assigned.items() if owner == worker and s not in held]:
            del self.assigned[sample]  # skipped: it must be available, which `agrees` checks

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        number = self.committed + 1
        workers = [worker for worker, each in self.contributed if each == number]
        accepted = data.draw(st.sets(st.sampled_from(workers))) if workers else set()
        self.ledger.commit(number, accepted)
        self.committed = number
        for worker in workers:
            samples = self.contributed.pop((worker, number))
            if worker in accepted:
                assert not self.used & set(samples)
                self.used.update(samples)

    @rule(worker=WORKERS)
    def come_late(self, worker: str) -> None:
        """State the update of a round that was committed without it."""
        for sample in samples_of(self.ledger.contribute(worker, self.committed, None)):
            assert self.assigned.pop(sample) == worker
        self.ledger.withdraw(worker, self.committed)

    @rule(worker=WORKERS)
    def refuse(self, worker: str) -> None:
        number = self.committed + 1
        withdrawn = self.contributed.pop((worker, number), [])
        usable = {sample for sample in withdrawn if sample[1] not in self.unusable}
        assert set(samples_of(self.ledger.withdraw(worker, number))) == usable

    @rule(worker=WORKERS)
    def vanish(self, worker: str) -> None:
        gone = {sample for sample, owner in self.assigned.items() if owner == worker}
        for key in [key for key in self.contributed if key[0] == worker]:
            gone.update(self.contributed.pop(key))
        self.assigned = {sample: owner for sample, owner in self.assigned.items() if owner != worker}
        returned = self.ledger.release(worker)
        assert set(samples_of(returned)) == {sample for sample in gone if sample[1] not in self.unusable}
        assert self.ledger.held_by(worker) == ()

    @rule(worker=WORKERS, index=st.integers(-1, 6))
    def cannot_use(self, worker: str, index: int) -> None:
        held = [span for span in self.ledger.held_by(worker) if span.index == index]
        assert self.ledger.set_aside(worker, index) == bool(held)
        if held:
            self.unusable.add(index)
            left = set(samples_of(self.ledger.held_by(worker)))
            for sample in set(samples_of(held)) - left:
                del self.assigned[sample]

    @invariant()
    def agrees(self) -> None:
        """Each sample of the epochs that have started is in exactly one state, unless its slice was set aside."""
        available = samples_of(self.ledger.available)
        held = [sample for worker in "abc" for sample in samples_of(self.ledger.held_by(worker))]
        contributed = [sample for samples in self.contributed.values() for sample in samples]
        states = Counter([*available, *held, *contributed, *self.used])
        assert max(states.values(), default=1) == 1
        assert set(held) == self.assigned.keys()
        assert not any(sample[1] in self.unusable for sample in available)
        whole = [SampleSpan(e, i, 0, SIZES[i]) for e in range(self.ledger.epoch + 1) for i in range(len(SIZES))]
        started = samples_of(span for span in whole if span.index not in self.unusable)
        assert not states or states.keys() >= set(started)
        assert self.ledger.usable == len(SIZES) - len(self.unusable)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


test_no_sample_is_used_twice_and_none_is_lost = LedgerMachine.TestCase


def test_seed_determines_the_order() -> None:
    def order(seed: int) -> list[SampleSpan]:
        ledger = SampleLedger([1] * 50, seed)
        return [ledger.assign(number) for number in range(100)]

    assert order(5) == order(5)
    assert order(5) != order(6)
    assert [a.index for a in order(5)[:50]] != [a.index for a in order(5)[50:]]


@pytest.mark.parametrize(
    ("spans", "fault"),
    [
        ([(0, 10, 10)], "are no samples"),
        ([(0, 12, 9)], "are no samples"),
        ([(0, -1, 9)], "are no samples"),
        ([(0, 0, 6), (0, 5, 8)], "overlap"),
        ([(0, 0, 21)], "not assigned"),
        ([(1, 0, 5)], "not assigned"),
        ([(2, 0, 5)], "not assigned"),
        ([(0, 2**63, 2**64)], "not assigned"),
    ],
)
def test_samples_that_were_not_assigned_are_no_contribution(spans: list[tuple[int, int, int]], fault: str) -> None:
    ledger = SampleLedger([20] * 2)
    span = ledger.assign("a")
    ledger.assign("b")
    stated = [SampleSpan(0, (span.index + index) % 3, first, end) for index, first, end in spans]
    assert fault in str(ledger.check("a", stated))
    assert "not assigned" in str(ledger.check("stranger", [span]))
    with pytest.raises(ValueError, match=fault):
        ledger.contribute("a", 1, stated)
    assert ledger.held_by("a") == (span,)


def test_contribution_of_many_pieces_is_refused() -> None:
    """Each gap that an update leaves is assigned on its own: others would fetch a slice for a sample of it."""
    ledger = SampleLedger([1 << 14])
    span = ledger.assign("a")
    pieces = [share(span, first, first + 1) for first in range(1, 1 << 14, 2)]
    assert "skips samples" in str(ledger.check("a", pieces))
    with pytest.raises(ValueError, match="skips samples"):
        ledger.contribute("a", 1, pieces)
    assert ledger.held_by("a") == (span,)
    assert ledger.check("a", [share(span, first, first + 1) for first in range(1 << 13)]) is None


def test_samples_are_contributed_once() -> None:
    ledger = SampleLedger([20])
    span = ledger.assign("a")
    ledger.contribute("a", 1, [share(span, 0, 10)])
    assert ledger.contribute("a", 1, [share(span, 0, 10)]) == (share(span, 0, 10),)  # a repeated statement
    assert "contributed before" in str(ledger.check("a", [share(span, 5, 12)]))
    with pytest.raises(ValueError, match="other samples to round 1"):
        ledger.contribute("a", 1, [share(span, 10, 20)])
    ledger.commit(1, ["a"])
    assert "contributed before" in str(ledger.check("a", [share(span, 0, 10)]))


def test_unstated_contribution_follows_the_reports() -> None:
    ledger = SampleLedger([10] * 3)
    first, second, _ = (ledger.assign("w") for _ in range(3))
    ledger.report("w", {first.index: 8})
    ledger.report("w", {first.index: 2, second.index: 3})
    assert ledger.contribute("w", 1, None) == (first, share(second, 0, 3))
    ledger.report("w", {second.index: 5})
    assert ledger.contribute("w", 2, None) == (share(second, 3, 8),)
    assert ledger.contribute("w", 3, None) == ()


def test_everything_assigned_counts_for_executors_that_report_no_slices() -> None:
    ledger = SampleLedger([10] * 3)
    spans = (ledger.assign("old"), ledger.assign("old"))
    ledger.report("old", None)
    assert ledger.contribute("old", 1, None) == spans
    third = ledger.assign("old")
    assert ledger.release("old") == (*sorted(spans), third) or set(ledger.available) == {*spans, third}


def test_executors_that_report_no_slices_are_not_limited_by_what_they_used() -> None:
    ledger = SampleLedger([10] * 3)
    ledger.report("old", None)
    for _ in range(200):
        ledger.assign("old")
    assert len(ledger.contribute("old", 1, None)) == 200


def test_slice_of_unknown_size_is_contributed_whole() -> None:
    ledger = SampleLedger([None] * 2)
    first = ledger.assign("w")
    assert first.end == ALL
    ledger.report("w", {first.index: 16})
    assert ledger.contribute("w", 1, None) == (first,)
    assert ledger.held_by("w") == ()
    ledger.commit(1, [])
    assert first in ledger.available


def test_slices_of_unknown_size_are_not_limited_by_what_was_used() -> None:
    ledger = SampleLedger([None] * 5)
    for number in range(1, 201):
        given = ledger.assign("w")
        ledger.report("w", {given.index: 16})
        assert ledger.contribute("w", number, None) == (given,)
        ledger.commit(number, ["w"])
    assert ledger.epoch == 39


def test_end_of_a_slice_of_unknown_size_is_known_when_the_next_is_used() -> None:
    ledger = SampleLedger([None] * 2)
    first, second = ledger.assign("w"), ledger.assign("w")
    ledger.contribute("w", 1, [share(first, 0, 100)])
    assert ledger.held_by("w") == (share(first, 100, ALL), second)
    ledger.contribute("w", 2, [share(first, 100, 120), share(second, 0, 8)])
    assert ledger.held_by("w") == (share(second, 8, ALL),)
    ledger.release("w")
    assert ledger.available == (share(first, 0, 120), second)


def test_slices_of_one_contribution_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_ledger, "MAX_RANGES", 100)
    ledger = SampleLedger([1])
    ledger.report("w", None)
    for _ in range(100):
        ledger.assign("w")
    with pytest.raises(LedgerFullError):
        ledger.assign("w")


@pytest.mark.parametrize(("size", "batch", "slices"), [(1, 512, 1024), (8, 1024, 256)])
def test_limit_of_unused_slices_allows_batches_of_many_small_slices(size: int, batch: int, slices: int) -> None:
    ledger = SampleLedger([size] * 3, batch=batch)
    for _ in range(slices):  # one batch is being processed and one is being fetched
        ledger.assign("w")
    with pytest.raises(LedgerFullError):
        for _ in range(10 * batch):
            ledger.assign("w")


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="without slices"):
        SampleLedger([])
    with pytest.raises(NoUsableSliceError, match="no slice has samples"):
        SampleLedger([0, 0]).assign("w")


def test_a_slice_without_samples_is_not_assigned() -> None:
    ledger = SampleLedger([0, 3])
    assert [ledger.assign("w") for _ in range(2)] == [SampleSpan(0, 1, 0, 3), SampleSpan(1, 1, 0, 3)]


def test_others_may_use_a_slice_that_they_hold_when_it_is_set_aside() -> None:
    ledger = SampleLedger([4])
    first, second = ledger.assign("a"), ledger.assign("b")
    assert ledger.set_aside("a", 0, first.epoch)
    assert ledger.held_by("b") == (second,)
    assert ledger.release("b") == ()  # nobody gets it again
    with pytest.raises(NoUsableSliceError, match="all 1 slices"):
        ledger.assign("b")


def test_a_worker_keeps_the_part_of_a_slice_that_it_has_when_it_cannot_get_another() -> None:
    ledger = SampleLedger([100])
    span = ledger.assign("a")
    ledger.contribute("a", 1, [share(span, 0, 40)])
    ledger.withdraw("a", 1)
    assert ledger.assign("a") == share(span, 0, 40)
    assert ledger.set_aside("a", 0, 0)
    assert ledger.held_by("a") == (share(span, 40, 100),)


def test_a_restart_gives_workers_back_what_they_have() -> None:
    ledger = SampleLedger([10, 10])
    ledger.restore([SampleSpan(0, 0, 0, 4)])
    ledger.assigned("a", SampleSpan(0, 0, 4, 8))
    ledger.assigned("b", SampleSpan(1, 1, 0, 10))
    assert ledger.held_by("a") == (SampleSpan(0, 0, 4, 8),)
    assert ledger.contribute("a", 2, [SampleSpan(0, 0, 4, 6)]) == (SampleSpan(0, 0, 4, 6),)
    assert sorted(ledger.available) == [SampleSpan(0, 0, 8, 10), SampleSpan(0, 1, 0, 10), SampleSpan(1, 0, 0, 10)]
    for span in (SampleSpan(0, 0, 4, 8), SampleSpan(0, 0, 0, 2), SampleSpan(0, 1, 0, 11), SampleSpan(0, 5, 0, 1)):
        with pytest.raises(ValueError, match="slice"):
            ledger.assigned("c", span)


def test_spans_are_merged_and_subtracted() -> None:
    parts = [SampleSpan(0, 1, 5, 7), SampleSpan(0, 1, 0, 5), SampleSpan(0, 2, 7, 9), SampleSpan(0, 1, 6, 8)]
    assert merge_spans(parts) == [SampleSpan(0, 1, 0, 8), SampleSpan(0, 2, 7, 9)]
    whole = SampleSpan(0, 1, 0, 10)
    assert subtract_spans(whole, [SampleSpan(0, 1, 2, 3), SampleSpan(0, 1, 8, 12), SampleSpan(1, 1, 0, 9)]) == [
        SampleSpan(0, 1, 0, 2),
        SampleSpan(0, 1, 3, 8),
    ]
    assert subtract_spans(whole, [SampleSpan(0, 1, 20, 30)]) == [whole]
