"""Batches: order of samples, completeness, malformed slices; and which slices are requested ahead, and how many."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha.accelerate_executor.bridge.client import Fetched
from hypha.accelerate_executor.data.batches import Batch, Batches, Rows, shuffled
from hypha.accelerate_executor.data.recorded_batches import recorded_batches
from hypha.accelerate_executor.data.slice_prefetch import (
    MAX_PARALLEL,
    MAX_SLICES,
    InHand,
    PrefetchDemand,
    SlicePrefetch,
)
from hypha.accelerate_executor.diloco.contribution import SampleRecord
from hypha.accelerate_executor.errors import BridgeClosed, BridgeRefused, DataError, ExecutorError, NoMoreData
from hypha_proto.contributions import MAX_RANGES, SampleRange


@given(st.integers(1, 200), st.integers(0, 2**64 - 1), st.integers(0, 5), st.integers(0, 1000))
def test_the_order_is_a_permutation_determined_by_seed_epoch_and_slice(
    n: int, seed: int, epoch: int, index: int
) -> None:
    order = shuffled(n, seed, epoch, index)
    assert sorted(order.tolist()) == list(range(n))
    assert np.array_equal(order, shuffled(n, seed, epoch, index))


def _slice(folder: Path, number: int, samples: int) -> Fetched:
    path = folder / f"{number}.safetensors"
    values = np.arange(samples, dtype="i4") + 1000 * number
    safetensors.numpy.save_file({"labels": values, "pixel_values": values.astype("u1").reshape(-1, 1)}, path)
    return Fetched(path, {"slice": str(number), "epoch": "0"})


def _in_turn(files: Iterable[Fetched]) -> Callable[[int], list[Fetched]]:
    """Return a function that fetches one file after the other."""
    left = iter(files)

    def fetch(_count: int) -> list[Fetched]:
        if (following := next(left, None)) is None:
            raise NoMoreData("that was all")
        return [following]

    return fetch


def _all_of(files: Iterable[Fetched], batch_size: int, seed: int = 0) -> list[Batch]:
    return list(Batches(_in_turn(files), batch_size, seed))


@pytest.mark.parametrize("sizes", [[7, 5, 9], [1, 1, 1, 1, 40], [16], [3]])
def test_batches_contain_every_sample_once(tmp_path: Path, sizes: list[int]) -> None:
    batches = _all_of([_slice(tmp_path, number, size) for number, size in enumerate(sizes)], 4)
    assert [batch.samples for batch in batches[:-1]] == [4] * (len(batches) - 1)
    seen = np.concatenate([batch.tensors["labels"] for batch in batches])
    assert sorted(seen.tolist()) == sorted(1000 * n + i for n, size in enumerate(sizes) for i in range(size))
    assert seen.dtype == np.int64
    assert batches[0].tensors["pixel_values"].dtype == np.float32
    assert list(tmp_path.iterdir()) == []


def test_the_next_slice_is_fetched_when_half_is_used(tmp_path: Path) -> None:
    asked: list[int] = []
    again = threading.Event()

    def fetch(_count: int) -> list[Fetched]:
        asked.append(len(asked))
        if len(asked) > 1:
            again.set()
        return [_slice(tmp_path, asked[-1], 12)]

    batches = Batches(fetch, 3, 0)
    next(batches)
    assert asked == [0]
    next(batches)
    assert again.wait(60)
    assert asked == [0, 1]
    batches.close()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a": np.zeros(3, "f4"), "b": np.zeros(4, "f4")}, "first dimension"),
        ({"a": np.zeros((), "f4")}, "first dimension"),
        ({"a": np.zeros((0, 3), "f4")}, "first dimension"),
        (None, r"s\.safetensors"),
    ],
    ids=["lengths", "no dimension", "no sample", "no safetensors"],
)
def test_a_file_that_is_no_slice_is_refused(tmp_path: Path, tensors: dict[str, Any] | None, words: str) -> None:
    path = tmp_path / "s.safetensors"
    path.write_bytes(b"nothing" if tensors is None else safetensors.numpy.save(tensors))
    with pytest.raises(DataError, match=words):
        _all_of([Fetched(path, {"slice": "0", "epoch": "0"})], 2)


def _part(folder: Path, number: int, samples: int, **about: object) -> Fetched:
    """Write slice `number` to a folder of its own, with the given metadata."""
    folder.mkdir()
    made = _slice(folder, number, samples)
    return Fetched(made.path, {**made.metadata, **{name: str(value) for name, value in about.items()}})


def test_only_the_assigned_positions_of_a_slice_are_used(tmp_path: Path) -> None:
    order = shuffled(20, 5, 1, 3)
    [batch] = _all_of([_part(tmp_path / "a", 3, 20, epoch=1, first=4, end=11)], 16, 5)
    assert batch.tensors["labels"].tolist() == [3000 + row for row in order[4:11]]
    assert [part.range for part in batch.rows] == [SampleRange(epoch=1, slice=3, first=4, end=11)]
    assert batch.slices == {"3": 7}
    assert batch.describe_row(2) == f"slice 3, row {order[6]}"
    [rest] = _all_of([_part(tmp_path / "b", 3, 20, epoch=1, first=11)], 16, 5)
    assert rest.tensors["labels"].tolist() == [3000 + row for row in order[11:]]
    [start] = _all_of([_part(tmp_path / "c", 3, 20, epoch=1, end=4)], 16, 5)
    assert start.tensors["labels"].tolist() == [3000 + row for row in order[:4]]


@pytest.mark.parametrize(
    ("first", "end", "named"),
    [
        ("0", "21", "positions 0 to 21"),
        ("20", "20", "positions 20 to 20"),
        ("7", "3", "positions 7 to 3"),
        ("-1", "3", "first is '-1'"),
        ("0", "3.0", "end is '3.0'"),
        ("\u0663", "9", "first is"),
        ("0", "9" * 5000, "end is '999"),
        ("", "9", "first is ''"),
    ],
)
def test_positions_that_a_slice_does_not_have_are_refused(tmp_path: Path, first: str, end: str, named: str) -> None:
    with pytest.raises(DataError, match=named) as caught:
        _all_of([_part(tmp_path / "a", 3, 20, epoch=0, first=first, end=end)], 4)
    assert "slice 3" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("about", [{"epoch": ""}, {"epoch": "-2"}, {"epoch": str(1 << 32)}, {"slice": "x"}])
def test_a_file_without_slice_or_epoch_is_refused(tmp_path: Path, about: dict[str, str]) -> None:
    [name] = about
    with pytest.raises(DataError, match=f"{name} is '{about[name]}', expected a decimal number up to"):
        _all_of([_part(tmp_path / "a", 1, 6, **about)], 4)


def test_adjacent_ranges_are_joined_across_batches_and_assignments(tmp_path: Path) -> None:
    parts = [
        _part(tmp_path / "a", 2, 20, epoch=0, first=0, end=6),
        _part(tmp_path / "b", 2, 20, epoch=0, first=6, end=10),
        _part(tmp_path / "c", 2, 20, epoch=1, first=10, end=12),
        _part(tmp_path / "d", 1, 5, epoch=1),
        _part(tmp_path / "e", 2, 20, epoch=0, first=0, end=3),
    ]
    record = SampleRecord()
    for batch in _all_of(parts, 4):
        record.add(batch)
    found = [(r.epoch, r.slice, r.first, r.end) for r in record.ranges or ()]
    assert found == [(0, 2, 0, 10), (1, 2, 10, 12), (1, 1, 0, 5), (0, 2, 0, 3)]


def _one_sample(index: int, position: int) -> Batch:
    found = SampleRange(epoch=0, slice=index, first=position, end=position + 1)
    return Batch({}, 1, (Rows(found, np.array([0])),))


@pytest.mark.parametrize(("pieces", "stated"), [(MAX_RANGES, True), (MAX_RANGES + 1, False)])
def test_more_ranges_than_a_contribution_may_have_are_not_stated(pieces: int, stated: bool) -> None:
    record = SampleRecord()
    for number in range(pieces):
        record.add(_one_sample(number, 0))
    assert (record.ranges is not None) is stated
    record.add(_one_sample(pieces - 1, 1))
    assert (record.ranges is not None) is stated


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    batch_size=st.integers(1, 8),
    rounds=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_recorded_ranges_give_the_same_batches_again(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], batch_size: int, rounds: list[int], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("recorded")
    kept = {number: _part(folder / f"kept-{number}", number, size).path for number, size in enumerate(sizes)}
    parts = []
    for number, size in enumerate(sizes):
        first = data.draw(st.integers(0, size - 1))
        end = data.draw(st.integers(first + 1, size))
        epoch = data.draw(st.integers(0, 2))
        parts.append(_part(folder / str(number), number, size, epoch=epoch, first=first, end=end))
    coming = iter(_all_of(parts, batch_size, 7))
    for count in rounds:
        used = list(itertools.islice(coming, count))
        record = SampleRecord()
        for batch in used:
            record.add(batch)
        assert record.ranges is not None
        again = list(recorded_batches(kept.__getitem__, record.ranges, batch_size, 7))
        assert [batch.samples for batch in again] == [batch.samples for batch in used]
        for one, other in zip(again, used, strict=True):
            assert all(np.array_equal(one.tensors[name], other.tensors[name]) for name in other.tensors)
    assert all(path.exists() for path in kept.values())


def test_recorded_ranges_of_another_dataset_are_refused(tmp_path: Path) -> None:
    path = _part(tmp_path / "a", 4, 10).path
    wanted = [SampleRange(epoch=0, slice=4, first=8, end=12)]
    with pytest.raises(DataError, match="slice 4: positions 8 to 12 were assigned, and it has 10 samples"):
        list(recorded_batches(lambda _: path, wanted, 4, 0))


NOTHING = InHand(samples=0, slices=0, bytes=0, is_half_used=False)


def _demand(
    *, fetch: float, sample: float, samples: int, size: int = 1000, batch_size: int = 16, batches: int = 3
) -> PrefetchDemand:
    """Return a demand that has measured a fetch, slices of `samples`, and batches at `sample` seconds a sample."""
    demand = PrefetchDemand(batch_size)
    demand.add_fetch(fetch)
    demand.add_slice(samples, size)
    for _ in range(batches):
        demand.add_batch(batch_size, batch_size * sample)
    return demand


def _in_hand(samples: int, slices: int = 1, size: int = 1000, *, half_used: bool = False) -> InHand:
    return InHand(samples, slices, slices * size, half_used)


def test_nothing_is_known_before_the_first_slice_so_one_is_requested() -> None:
    demand = PrefetchDemand(16)
    assert demand.further(1000, NOTHING, 0) == 1
    assert demand.further(1000, NOTHING, 1) == 0


def test_twice_what_is_trained_while_a_fetch_takes_is_in_hand() -> None:
    demand = _demand(fetch=0.3, sample=0.001, samples=100, size=1 << 20)
    assert demand.samples_ahead == pytest.approx(600)
    assert demand.further(demand.samples_ahead, _in_hand(250, 3), 0) == 4
    assert demand.further(demand.samples_ahead, _in_hand(250, 3), 3) == 1
    assert demand.further(demand.samples_ahead, _in_hand(600, 6), 0) == 0


def test_a_whole_batch_is_in_hand_however_fast_a_fetch_is() -> None:
    demand = _demand(fetch=0.0, sample=1.0, samples=5, batch_size=16)
    assert demand.samples_ahead == 16
    assert demand.further(demand.samples_ahead, _in_hand(3), 0) == 3


def test_a_single_slow_batch_or_fetch_changes_nothing() -> None:
    demand = _demand(fetch=0.3, sample=0.001, samples=100, batches=5)
    demand.add_fetch(0.3)
    demand.add_fetch(60.0)
    demand.add_batch(16, 30.0)  # the end of a round
    assert demand.samples_ahead == pytest.approx(600)


def test_speed_counts_after_a_few_batches() -> None:
    assert _demand(fetch=60.0, sample=0.001, samples=100, batches=2).samples_ahead == 16


def test_the_next_slice_is_requested_when_half_of_the_last_is_used_and_none_is_on_its_way() -> None:
    demand = _demand(fetch=0.0, sample=1.0, samples=100)
    assert demand.further(demand.samples_ahead, _in_hand(51), 0) == 0
    assert demand.further(demand.samples_ahead, _in_hand(50, half_used=True), 0) == 1
    assert demand.further(demand.samples_ahead, _in_hand(50, half_used=True), 1) == 0


def test_slices_ahead_are_bounded_in_bytes_and_number() -> None:
    demand = _demand(fetch=100.0, sample=0.001, samples=100, size=64 << 20)
    assert demand.further(demand.samples_ahead, _in_hand(100, 1, 64 << 20), 1) == 2  # of 256 MiB
    assert demand.further(demand.samples_ahead, _in_hand(100, 1, 300 << 20), 0) == 0
    assert demand.further(demand.samples_ahead, _in_hand(10, 1, 300 << 20), 0) == 1  # the next batch needs it
    small = _demand(fetch=100.0, sample=0.001, samples=100)
    assert small.further(small.samples_ahead, _in_hand(500, 5), 2) == MAX_SLICES - 7
    tiny = _demand(fetch=0.0, sample=1.0, samples=1, batch_size=100)
    assert tiny.further(200, NOTHING, 0) == 200  # a batch and the next one


def test_as_many_fetches_at_a_time_as_keep_up_with_training() -> None:
    def found(size: int) -> list[int]:
        times = (0.0, 0.1, 0.15, 0.31, 50.0)
        return [_demand(fetch=fetch, sample=0.001, samples=100, size=size).parallel for fetch in times]

    assert found(1 << 20) == [1, 1, 2, 4, MAX_PARALLEL]
    assert found(1000) == [1, 1, 1, 2, MAX_PARALLEL]  # two slices a request


@pytest.mark.parametrize(
    ("sample", "samples", "size", "each"),
    [
        (0.0001, 180, 46_000, 13),  # the digits demo: trained in 18 ms
        (0.001, 100, 1000, 2),
        (0.001, 300, 1000, 1),
        (0.0001, 10, 1 << 20, 1),
        (0.0001, 10, 300_000, 3),
        (0.0, 10, 1000, 32),
    ],
)
def test_one_request_asks_for_small_slices_together(sample: float, samples: int, size: int, each: int) -> None:
    demand = _demand(fetch=0.01, sample=sample, samples=samples, size=size)
    assert demand.slices_per_request == each
    requested = demand.further(demand.samples_ahead, _in_hand(0, 0), 0)
    assert requested >= each
    assert requested % each == 0
    assert _demand(fetch=0.01, sample=sample, samples=samples, size=size, batches=2).slices_per_request == 1


class SimulatedTraining:
    """A worker that trains batches of 16 samples on slices that take a while to come; time is simulated."""

    def __init__(self, samples: int, fetch: float, speed: float) -> None:
        self.samples, self.fetch, self.speed = samples, fetch, speed
        self.demand, self.random, self.now = PrefetchDemand(16), random.Random(0), 0.0
        self.opened: list[int] = []
        self.coming: list[tuple[float, float, int]] = []
        """When the slices of each request come, how long they are fetched, and their number."""
        self.threads = [0.0]
        """When each thread has done what it was given."""

    def _request(self, wanted: float) -> None:
        opened = self.opened
        half_used = len(opened) == 1 and opened[0] * 2 <= self.samples
        coming = sum(slices for _, _, slices in self.coming)
        count = self.demand.further(wanted, InHand(sum(opened), len(opened), 0, half_used), coming)
        self.threads += [self.now] * (self.demand.parallel - len(self.threads))
        while count > 0:
            seconds = self.fetch * self.random.uniform(0.8, 1.2)
            slices = min(count, self.demand.slices_per_request)
            self.threads.sort()
            self.threads[0] = max(self.threads[0], self.now) + seconds
            self.coming.append((self.threads[0], seconds, slices))
            count -= slices

    def _take(self) -> None:
        at, seconds, slices = self.coming.pop(0)
        self.now = max(self.now, at)
        self.demand.add_fetch(seconds)
        for _ in range(slices):
            self.demand.add_slice(self.samples, 1)
            self.opened.append(self.samples)

    def _take_batch(self) -> float:
        """Take the samples of a batch; return the seconds of waiting for them."""
        began, missing = self.now, 16
        while self.coming and self.coming[0][0] <= self.now:
            self._take()
        while missing:
            while not self.opened:
                self._request(16 + self.demand.samples_ahead)
                self._take()
            taken = min(missing, self.opened[0])
            self.opened[0] -= taken
            self.opened = self.opened if self.opened[0] else self.opened[1:]
            missing -= taken
        self._request(self.demand.samples_ahead)
        return self.now - began

    def waits(self, batches: int) -> list[float]:
        """Train so many batches; return the seconds of waiting before each."""
        found = []
        for _ in range(batches):
            found.append(self._take_batch())
            seconds = 16 / self.speed * self.random.uniform(0.8, 1.2)
            self.demand.add_batch(16, seconds)
            self.now += seconds
        return found


@pytest.mark.parametrize(
    ("samples", "fetch", "speed"),
    [
        (90, 0.01, 4850.0),  # the digits demo
        (180, 0.3, 2000.0),  # on links that delay everything by 50 ms: one fetch at a time gives 600 samples a second
        (16, 0.3, 150.0),
        (5, 0.01, 1000.0),
        (1000, 0.3, 200.0),
    ],
)
def test_training_does_not_wait_for_slices_that_can_be_fetched_in_time(
    samples: int, fetch: float, speed: float
) -> None:
    waits = SimulatedTraining(samples, fetch, speed).waits(500)
    assert sum(waits[50:]) < 0.01 * 450 * 16 / speed


class Slices:
    """Slices of a dataset that are fetched in order; counts what was asked for."""

    def __init__(self, folder: Path, samples: int, count: int = 1000) -> None:
        self.folder, self.samples, self.count = folder, samples, count
        self.asked = 0
        self.fetched = threading.Semaphore(0)

    def __call__(self, _count: int = 1) -> list[Fetched]:
        if self.asked == self.count:
            raise NoMoreData("that was all")
        number, self.asked = self.asked, self.asked + 1
        path = self.folder / f"{number}.safetensors"
        values = np.arange(self.samples, dtype="i4") + 1000 * number
        safetensors.numpy.save_file({"labels": values}, path)
        self.fetched.release()
        return [Fetched(path, {"slice": str(number), "epoch": "0"})]

    def await_fetched(self, count: int) -> None:
        """Wait until so many more slices were fetched."""
        for _ in range(count):
            assert self.fetched.acquire(timeout=20)


def test_slices_smaller_than_a_batch_are_fetched_while_it_is_trained(tmp_path: Path) -> None:
    slices = Slices(tmp_path, samples=5)
    batches = Batches(slices, 16, 0, clock=lambda: 0.0)
    next(batches)
    slices.await_fetched(7)  # four of this batch, with 4 samples left, and three for the next; nobody has asked for it
    batch = next(batches)
    assert list(batch.slices) == ["3", "4", "5", "6"]
    batches.close()


def test_batches_and_their_order_do_not_depend_on_the_time_of_fetches(tmp_path: Path) -> None:
    found = []
    for name, seconds in (("fast", 0.0), ("slow", 5.0)):
        (tmp_path / name).mkdir()
        times = iter(range(100_000))
        slices = Slices(tmp_path / name, samples=7, count=30)
        batches = Batches(slices, 4, 3, clock=lambda times=times, seconds=seconds: next(times) * seconds)  # type: ignore[misc]
        found.append([batch.tensors["labels"].tolist() for batch in batches])
        assert list((tmp_path / name).iterdir()) == []
    assert found[0] == found[1]
    assert len(found[0]) == 53


def test_a_slice_that_is_refused_ahead_of_its_use_is_requested_again_when_it_is_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slices, in_hand = Slices(tmp_path, samples=4), threading.Semaphore(0)
    refused = threading.Event()

    def fetch(_count: int) -> list[Fetched]:
        if slices.asked and not in_hand.acquire(blocking=False):
            refused.set()
            raise BridgeRefused("fetch", 502, "peer-failed", "2 slices were assigned to this worker and not used")
        return slices()

    batches = Batches(fetch, 4, 0, clock=lambda: 0.0)
    assert next(batches).slices == {"0": 4}
    assert refused.wait(20)
    in_hand.release()
    assert next(batches).slices == {"1": 4}
    assert "no slice ahead of its use" in caplog.text
    batches.close()


def test_reports_are_counted_before_a_refused_slice_is_requested_once_more(tmp_path: Path) -> None:
    """A scheduler that knows of no batch refuses further slices to a worker that has used all it has."""
    slices = Slices(tmp_path, samples=4)
    reported = 0

    def fetch(_count: int) -> list[Fetched]:
        if slices.asked == reported + 2:
            raise BridgeRefused("fetch", 502, "peer-failed", "2 slices were assigned to this worker and not used")
        return slices()

    def report() -> None:
        nonlocal reported
        reported = slices.asked

    batches = Batches(fetch, 4, 0, clock=lambda: 0.0)
    batches.before_retry = report
    assert [next(batches).slices for _ in range(9)] == [{str(number): 4} for number in range(9)]
    batches.close()


@pytest.mark.parametrize(
    "error",
    [
        BridgeRefused("fetch", 507, "storage", "the lease's storage is used up"),
        BridgeClosed("fetch: the worker closed the bridge"),
    ],
    ids=["refused", "closed"],
)
def test_an_error_of_a_fetch_is_raised_when_training_needs_the_slice(tmp_path: Path, error: ExecutorError) -> None:
    slices, failed = Slices(tmp_path, samples=6, count=1), threading.Event()

    def fetch(_count: int) -> list[Fetched]:
        try:
            return slices()
        except NoMoreData:
            failed.set()
            raise error from None

    batches = Batches(fetch, 3, 0, clock=lambda: 0.0)
    assert next(batches).samples == 3
    assert failed.wait(20)
    assert next(batches).samples == 3
    with pytest.raises(type(error), match=re.escape(str(error))):
        next(batches)
    batches.close()


def test_dropping_gives_up_all_that_is_on_its_way(tmp_path: Path) -> None:
    slices, begun, goes_on = Slices(tmp_path, samples=3), threading.Event(), threading.Event()
    goes_on.set()

    def fetch(_count: int) -> list[Fetched]:
        begun.set()
        assert goes_on.wait(20)
        return slices()

    batches = Batches(fetch, 8, 0, clock=lambda: 0.0)
    next(batches)  # one sample of its last slice is left
    slices.await_fetched(6)
    batches.drop()
    assert list(tmp_path.iterdir()) == []
    goes_on.clear()
    begun.clear()
    batches.prefetch()  # several slices; the first one has begun
    assert begun.wait(20)
    with ThreadPoolExecutor(1) as thread:
        dropped = thread.submit(batches.drop)
        goes_on.set()
        dropped.result(20)
    assert list(tmp_path.iterdir()) == []
    given_up = {str(number) for number in range(slices.asked)}
    assert set(next(batches).slices).isdisjoint(given_up)
    batches.close()


def _numbered(*numbers: int) -> list[Fetched]:
    return [Fetched(Path(f"{number}"), {"slice": "0", "assigned": str(number)}) for number in numbers]


def _taken(prefetch: SlicePrefetch, count: int) -> list[str]:
    found = [prefetch.take(0, waits=True) for _ in range(count)]
    return [file.path.name for taken in found if taken is not None for file in taken[0]]


@pytest.fixture
def closing() -> Any:
    """Return a function that makes a `SlicePrefetch` which is closed at the end of the test."""
    made: list[SlicePrefetch] = []

    def make(fetch: Callable[[int], list[Fetched]]) -> SlicePrefetch:
        made.append(SlicePrefetch(fetch))
        return made[-1]

    yield make
    for prefetch in made:
        prefetch.close()


def test_slices_that_arrive_out_of_turn_are_used_in_the_order_of_their_assignment(closing: Any) -> None:
    numbers, lock = iter(range(100)), threading.Lock()
    arrived = [threading.Event() for _ in range(6)]

    def fetch(_count: int) -> list[Fetched]:
        with lock:
            number = next(numbers)
        if number in (2, 4):
            assert arrived[number + 1].wait(20)  # the slice after this one comes first
        arrived[min(number, 5)].set()
        return _numbered(number)

    prefetch = closing(fetch)
    prefetch.request(2, in_hand=0)
    assert _taken(prefetch, 2) == ["0", "1"]
    prefetch.request(4, in_hand=1, parallel=2)
    assert _taken(prefetch, 4) == ["2", "3", "4", "5"]


def test_slices_of_requests_that_are_answered_out_of_turn_are_used_in_the_order_of_their_assignment(
    closing: Any,
) -> None:
    numbers, lock, arrived = itertools.count(), threading.Lock(), threading.Event()
    asked: list[int] = []

    def fetch(count: int) -> list[Fetched]:
        with lock:
            asked.append(count)
            first = next(numbers)
            found = [first, *(next(numbers) for _ in range(min(count, 2) - 1))]  # two of three
        if first == 2:
            assert arrived.wait(20)  # the slices after these come first
        elif first == 4:
            arrived.set()
        return _numbered(*found)

    prefetch = closing(fetch)
    prefetch.request(2, in_hand=0, each=3)
    assert _taken(prefetch, 1) == ["0", "1"]
    prefetch.request(5, in_hand=2, parallel=2, each=3)
    assert prefetch.coming == 5
    assert _taken(prefetch, 2) == ["2", "3", "4", "5"]
    assert asked == [2, 3, 2]
    assert prefetch.coming == 0


def test_a_missing_number_is_not_waited_for_when_nothing_is_on_its_way(closing: Any) -> None:
    numbers = iter([0, 3, 4])
    prefetch = closing(lambda _count: _numbered(next(numbers)))
    prefetch.request(1, in_hand=0)
    assert _taken(prefetch, 1) == ["0"]
    prefetch.request(2, in_hand=1, parallel=2)
    assert _taken(prefetch, 2) == ["3", "4"]


def test_slices_without_numbers_are_requested_one_at_a_time(closing: Any) -> None:
    running = highest = 0
    lock, numbers = threading.Lock(), iter(range(100))

    def fetch(_count: int) -> list[Fetched]:
        nonlocal running, highest
        with lock:
            running += 1
            highest = max(highest, running)
        found = [Fetched(Path(str(next(numbers))))]
        with lock:
            running -= 1
        return found

    prefetch = closing(fetch)
    prefetch.request(1, in_hand=0)
    assert _taken(prefetch, 1) == ["0"]
    prefetch.request(20, in_hand=1, parallel=4)
    assert _taken(prefetch, 20) == [str(number) for number in range(1, 21)]
    assert highest == 1
