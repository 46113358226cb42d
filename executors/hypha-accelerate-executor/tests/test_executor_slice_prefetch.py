"""Prefetching: how many slices are requested ahead, in which order they are used, and what becomes of refusals."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from hypha.accelerate_executor.bridge.client import Fetched
from hypha.accelerate_executor.data.batches import Batches
from hypha.accelerate_executor.data.slice_prefetch import (
    MAX_PARALLEL,
    MAX_SLICES,
    InHand,
    PrefetchDemand,
    SlicePrefetch,
)
from hypha.accelerate_executor.errors import BridgeClosed, BridgeRefused, NoMoreData

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
    demand = _demand(fetch=0.3, sample=0.001, samples=100)
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
    found = [_demand(fetch=fetch, sample=0.001, samples=100).parallel for fetch in (0.0, 0.1, 0.15, 0.31, 50.0)]
    assert found == [1, 1, 2, 4, MAX_PARALLEL]


class SimulatedTraining:
    """A worker that trains batches of 16 samples on slices that take a while to come; time is simulated."""

    def __init__(self, samples: int, fetch: float, speed: float) -> None:
        self.samples, self.fetch, self.speed = samples, fetch, speed
        self.demand, self.random, self.now = PrefetchDemand(16), random.Random(0), 0.0
        self.opened: list[int] = []
        self.coming: list[tuple[float, float]] = []
        """When each slice comes, and how long it is fetched."""
        self.threads = [0.0]
        """When each thread has done what it was given."""

    def _request(self, wanted: float) -> None:
        opened = self.opened
        half_used = len(opened) == 1 and opened[0] * 2 <= self.samples
        count = self.demand.further(wanted, InHand(sum(opened), len(opened), 0, half_used), len(self.coming))
        self.threads += [self.now] * (self.demand.parallel - len(self.threads))
        for _ in range(count):
            seconds = self.fetch * self.random.uniform(0.8, 1.2)
            self.threads.sort()
            self.threads[0] = max(self.threads[0], self.now) + seconds
            self.coming.append((self.threads[0], seconds))

    def _take(self) -> None:
        at, seconds = self.coming.pop(0)
        self.now = max(self.now, at)
        self.demand.add_fetch(seconds)
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

    def __call__(self) -> list[Fetched]:
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

    def fetch() -> list[Fetched]:
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

    def fetch() -> list[Fetched]:
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


def test_a_refused_slice_that_is_needed_is_an_error(tmp_path: Path) -> None:
    slices = Slices(tmp_path, samples=4, count=1)

    def fetch() -> list[Fetched]:
        try:
            return slices()
        except NoMoreData:
            raise BridgeRefused("fetch", 507, "storage", "the lease's storage is used up") from None

    batches = Batches(fetch, 4, 0, clock=lambda: 0.0)
    assert next(batches).samples == 4
    with pytest.raises(BridgeRefused, match="storage is used up"):
        next(batches)
    batches.close()


def test_other_errors_of_a_fetch_are_raised_when_training_needs_the_slice(tmp_path: Path) -> None:
    slices, failed = Slices(tmp_path, samples=6, count=1), threading.Event()

    def fetch() -> list[Fetched]:
        try:
            return slices()
        except NoMoreData:
            failed.set()
            raise BridgeClosed("fetch: the worker closed the bridge") from None

    batches = Batches(fetch, 3, 0, clock=lambda: 0.0)
    assert next(batches).samples == 3
    assert failed.wait(20)
    assert next(batches).samples == 3
    with pytest.raises(BridgeClosed):
        next(batches)
    batches.close()


def test_dropping_gives_up_all_that_is_on_its_way(tmp_path: Path) -> None:
    slices, begun, goes_on = Slices(tmp_path, samples=2), threading.Event(), threading.Event()
    goes_on.set()

    def fetch() -> list[Fetched]:
        begun.set()
        assert goes_on.wait(20)
        return slices()

    batches = Batches(fetch, 8, 0, clock=lambda: 0.0)
    next(batches)
    slices.await_fetched(9)
    batches.drop()
    assert list(tmp_path.iterdir()) == []
    goes_on.clear()
    begun.clear()
    batches.prefetch()  # four slices; the first one has begun
    assert begun.wait(20)
    with ThreadPoolExecutor(1) as thread:
        dropped = thread.submit(batches.drop)
        goes_on.set()
        dropped.result(20)
    assert list(tmp_path.iterdir()) == []
    assert set(next(batches).slices).isdisjoint({str(number) for number in range(10)})
    batches.close()


def _numbered(number: int) -> list[Fetched]:
    return [Fetched(Path(f"{number}"), {"slice": "0", "assigned": str(number)})]


def _taken(prefetch: SlicePrefetch, count: int) -> list[str]:
    found = [prefetch.take(0, waits=True) for _ in range(count)]
    return [taken[0][0].path.name for taken in found if taken is not None]


@pytest.fixture
def closing() -> Any:
    """Return a function that makes a `SlicePrefetch` which is closed at the end of the test."""
    made: list[SlicePrefetch] = []

    def make(fetch: Callable[[], list[Fetched]]) -> SlicePrefetch:
        made.append(SlicePrefetch(fetch))
        return made[-1]

    yield make
    for prefetch in made:
        prefetch.close()


def test_slices_that_arrive_out_of_turn_are_used_in_the_order_of_their_assignment(closing: Any) -> None:
    numbers, lock = iter(range(100)), threading.Lock()
    arrived = [threading.Event() for _ in range(6)]

    def fetch() -> list[Fetched]:
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


def test_a_missing_number_is_not_waited_for_when_nothing_is_on_its_way(closing: Any) -> None:
    numbers = iter([0, 3, 4])
    prefetch = closing(lambda: _numbered(next(numbers)))
    prefetch.request(1, in_hand=0)
    assert _taken(prefetch, 1) == ["0"]
    prefetch.request(2, in_hand=1, parallel=2)
    assert _taken(prefetch, 2) == ["3", "4"]


def test_slices_without_numbers_are_requested_one_at_a_time(closing: Any) -> None:
    running = highest = 0
    lock, numbers = threading.Lock(), iter(range(100))

    def fetch() -> list[Fetched]:
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
