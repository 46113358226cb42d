"""Slice assignment: each slice is used exactly once per epoch, whatever workers do."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypha_scheduler.strategies.diloco.slices import (
    Assignment,
    LedgerFullError,
    NoUsableSliceError,
    SliceLedger,
    SliceState,
)

SIZES = [10, 7, 1, 12, 5]
WORKERS = st.sampled_from(["a", "b", "c"])


class LedgerMachine(RuleBasedStateMachine):
    """Random workers that take, use and keep slices or are lost, compared with a simple model."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SliceLedger(SIZES, seed=3)
        self.used: Counter[Assignment] = Counter()
        self.held: dict[str, dict[Assignment, int]] = {}
        self.unusable: set[int] = set()

    @rule(worker=WORKERS)
    def take(self, worker: str) -> None:
        try:
            given = self.ledger.assign(worker)
        except LedgerFullError:
            return
        except NoUsableSliceError:
            assert len(self.unusable) == len(SIZES)
            return
        assert given.index not in self.unusable
        assert given not in self.used
        assert all(given not in held for held in self.held.values())
        self.held.setdefault(worker, {})[given] = 0

    @rule(worker=WORKERS, index=st.integers(-1, 6), samples=st.integers(0, 30))
    def report(self, worker: str, index: int, samples: int) -> None:
        self.ledger.report(worker, {index: samples})
        held = self.held.get(worker, {})
        for assignment in sorted(a for a in held if a.index == index):
            taken = min(samples, SIZES[index] - held[assignment])
            held[assignment] += taken
            samples -= taken
            if held[assignment] == SIZES[index]:
                del held[assignment]
                self.used[assignment] += 1
            if samples <= 0:
                break

    @rule(worker=WORKERS)
    def vanish(self, worker: str) -> None:
        returned = {given for given in self.held.pop(worker, {}) if given.index not in self.unusable}
        assert set(self.ledger.release(worker)) == returned

    @rule(worker=WORKERS, index=st.integers(-1, 6))
    def cannot_use(self, worker: str, index: int) -> None:
        held = [given for given in self.held.get(worker, {}) if given.index == index]  # in the order of assignment
        assert self.ledger.set_aside(worker, index) == bool(held)
        if held:
            self.unusable.add(index)
            del self.held[worker][held[0]]

    @invariant()
    def agrees(self) -> None:
        for worker, held in self.held.items():
            assert set(self.ledger.held_by(worker)) == set(held)
            assert all(self.ledger.state(a.epoch, a.index) is SliceState.ASSIGNED for a in held)
        assert all(count == 1 for count in self.used.values())
        used = [given for given in self.used if given.index not in self.unusable]
        assert all(self.ledger.state(a.epoch, a.index) is SliceState.USED for a in used)
        assert self.ledger.usable == len(SIZES) - len(self.unusable)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
test_each_slice_is_used_exactly_once_per_epoch = LedgerMachine.TestCase


def test_overlapping_epochs_contain_every_slice_once() -> None:
    ledger = SliceLedger(SIZES, seed=1)
    given = [ledger.assign(worker) for worker in ("a", "b") * len(SIZES)]
    assert sorted(given) == [Assignment(epoch, index) for epoch in (0, 1) for index in range(len(SIZES))]


def test_seed_determines_the_order() -> None:
    def order(seed: int) -> list[Assignment]:
        ledger = SliceLedger([1] * 50, seed)
        return [ledger.assign(number) for number in range(100)]

    assert order(5) == order(5)
    assert order(5) != order(6)
    assert [a.index for a in order(5)[:50]] != [a.index for a in order(5)[50:]]


def test_slices_of_a_lost_worker_are_assigned_next() -> None:
    ledger = SliceLedger([4] * 6)
    lost = [ledger.assign("gone"), ledger.assign("gone")]
    ledger.assign("stays")
    ledger.report("gone", {lost[0].index: 4})
    assert ledger.release("gone") == (lost[1],)
    assert ledger.assign("stays") == lost[1]


def test_slices_count_as_used_for_executors_that_do_not_report_them() -> None:
    ledger = SliceLedger([None] * 3)
    first = ledger.assign("old")
    ledger.report("old", None)
    second = ledger.assign("old")
    assert ledger.state(0, first.index) is SliceState.USED
    assert ledger.release("old") == (second,)


def test_slice_of_unknown_size_is_used_at_the_next_request() -> None:
    ledger = SliceLedger([None] * 5)
    for _ in range(200):
        given = ledger.assign("w")
        ledger.report("w", {given.index: 16})
        assert ledger.held_by("w") == (given,)
    assert ledger.epoch == 39


def test_unused_slices_per_worker_are_limited() -> None:
    ledger = SliceLedger([1])
    with pytest.raises(LedgerFullError):
        for _ in range(1000):
            ledger.assign("hoarder")


@pytest.mark.parametrize(("size", "batch", "slices"), [(1, 512, 1024), (8, 1024, 256), (0, 16, 64)])
def test_limit_of_unused_slices_allows_batches_of_many_small_slices(size: int, batch: int, slices: int) -> None:
    ledger = SliceLedger([size] * 3, batch=batch)
    for _ in range(slices):  # one batch is being processed and one is being fetched
        ledger.assign("w")
    with pytest.raises(LedgerFullError):
        for _ in range(10 * batch):
            ledger.assign("w")


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="without slices"):
        SliceLedger([])


def test_a_slice_that_is_set_aside_is_assigned_to_nobody_again() -> None:
    ledger = SliceLedger([4] * 3)
    bad = ledger.assign("a")
    assert ledger.set_aside("a", bad.index, bad.epoch)
    assert ledger.state(0, bad.index) is ledger.state(7, bad.index) is SliceState.SET_ASIDE
    assert ledger.held_by("a") == ()
    given = [ledger.assign(worker) for worker in ("a", "b") * 4]
    assert bad.index not in {assignment.index for assignment in given}
    assert [assignment.epoch for assignment in given] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_worker_sets_aside_only_what_it_holds() -> None:
    ledger = SliceLedger([4] * 3)
    held = ledger.assign("a")
    assert not ledger.set_aside("b", held.index)
    assert not ledger.set_aside("a", held.index, epoch=9)
    assert not ledger.set_aside("a", 99)
    assert ledger.usable == 3


def test_others_may_use_a_slice_that_they_hold_when_it_is_set_aside() -> None:
    ledger = SliceLedger([4])
    first, second = ledger.assign("a"), ledger.assign("b")
    assert ledger.set_aside("a", 0, first.epoch)
    assert ledger.held_by("b") == (second,)
    assert ledger.release("b") == ()  # nobody gets it again
    with pytest.raises(NoUsableSliceError, match="all 1 slices"):
        ledger.assign("b")
