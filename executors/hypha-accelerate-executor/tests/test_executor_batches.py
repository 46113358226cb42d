"""Batches: order of samples, completeness, prefetch, malformed slices."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from hypha.accelerate_executor.bridge.client import Fetched
from hypha.accelerate_executor.data.batches import Batch, Batches, shuffled
from hypha.accelerate_executor.data.recorded_batches import recorded_batches
from hypha.accelerate_executor.diloco.contribution import SampleRecord
from hypha.accelerate_executor.errors import DataError, NoMoreData
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


@pytest.mark.parametrize("sizes", [[7, 5, 9], [1, 1, 1, 1, 40], [16], [3]])
def test_batches_contain_every_sample_once(tmp_path: Path, sizes: list[int]) -> None:
    files = iter([_slice(tmp_path, number, size) for number, size in enumerate(sizes)])

    def fetch() -> list[Fetched]:
        try:
            return [next(files)]
        except StopIteration:
            raise NoMoreData("that was all") from None

    batches = list(Batches(fetch, 4, 0))
    assert [batch.samples for batch in batches[:-1]] == [4] * (len(batches) - 1)
    seen = np.concatenate([batch.tensors["labels"] for batch in batches])
    assert sorted(seen.tolist()) == sorted(1000 * n + i for n, size in enumerate(sizes) for i in range(size))
    assert seen.dtype == np.int64
    assert batches[0].tensors["pixel_values"].dtype == np.float32
    assert list(tmp_path.iterdir()) == []


def test_the_next_slice_is_fetched_when_half_is_used(tmp_path: Path) -> None:
    asked: list[int] = []
    again = threading.Event()

    def fetch() -> list[Fetched]:
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
    "tensors",
    [
        {"a": np.zeros(3, "f4"), "b": np.zeros(4, "f4")},
        {"a": np.zeros((), "f4")},
        {"a": np.zeros((0, 3), "f4")},
    ],
)
def test_a_slice_with_mismatched_tensors_is_refused(tmp_path: Path, tensors: dict[str, Any]) -> None:
    safetensors.numpy.save_file(tensors, tmp_path / "s.safetensors")
    with pytest.raises(DataError, match="first dimension"):
        next(Batches(lambda: [Fetched(tmp_path / "s.safetensors", {"slice": "0", "epoch": "0"})], 2, 0))


def test_a_slice_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"s\.safetensors"):
        next(Batches(lambda: [Fetched(tmp_path / "s.safetensors", {"slice": "0", "epoch": "0"})], 2, 0))


def _part(folder: Path, number: int, samples: int, **about: object) -> Fetched:
    """Write slice `number` to a folder of its own, with the given metadata."""
    folder.mkdir()
    made = _slice(folder, number, samples)
    return Fetched(made.path, {**made.metadata, **{name: str(value) for name, value in about.items()}})


def _all_of(parts: list[Fetched], batch_size: int, seed: int = 0) -> list[Batch]:
    left = iter(parts)

    def fetch() -> list[Fetched]:
        if (following := next(left, None)) is None:
            raise NoMoreData("that was all")
        return [following]

    return list(Batches(fetch, batch_size, seed))


def test_only_the_assigned_positions_of_a_slice_are_used(tmp_path: Path) -> None:
    order = shuffled(20, 5, 1, 3)
    [batch] = _all_of([_part(tmp_path / "a", 3, 20, epoch=1, first=4, end=11)], 16, 5)
    assert batch.tensors["labels"].tolist() == [3000 + row for row in order[4:11]]
    assert batch.ranges == (SampleRange(epoch=1, slice=3, first=4, end=11),)
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


@pytest.mark.parametrize(("pieces", "stated"), [(MAX_RANGES, True), (MAX_RANGES + 1, False)])
def test_more_ranges_than_a_contribution_may_have_are_not_stated(pieces: int, stated: bool) -> None:
    record = SampleRecord()
    for number in range(pieces):
        found = (SampleRange(epoch=0, slice=number, first=0, end=1),)
        record.add(Batch({}, 1, {}, ranges=found))
    assert (record.ranges is not None) is stated
    record.add(Batch({}, 1, {}, ranges=(SampleRange(epoch=0, slice=pieces - 1, first=1, end=2),)))
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
