"""Batches: order of samples, completeness, prefetch, malformed slices."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from hypha.accelerate_executor.bridge.client import Fetched
from hypha.accelerate_executor.data.batches import Batches, shuffled
from hypha.accelerate_executor.errors import DataError, NoMoreData


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
    return Fetched(path, {"slice": str(number)})


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
    assert again.wait(10)
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
        next(Batches(lambda: [Fetched(tmp_path / "s.safetensors")], 2, 0))


def test_a_slice_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.safetensors").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"s\.safetensors"):
        next(Batches(lambda: [Fetched(tmp_path / "s.safetensors")], 2, 0))
