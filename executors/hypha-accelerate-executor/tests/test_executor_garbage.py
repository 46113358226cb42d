"""Garbage collection: once after the start, and not of what was loaded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from hypha.accelerate_executor.environment import collected_at_end


class Cycle:
    """Refers to itself, as loaders do."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_garbage_of_the_start_is_collected_and_the_rest_is_left_out() -> None:
    collections = gc.get_stats()[2]["collections"]
    with collected_at_end():
        kept = [Cycle() for _ in range(100_000)]
        dropped = weakref.ref(Cycle())
        assert gc.get_stats()[2]["collections"] == collections
        assert dropped() is not None
    assert dropped() is None
    assert gc.isenabled()
    assert gc.get_stats()[2]["collections"] == collections + 1
    assert gc.get_freeze_count() >= len(kept)


def test_a_start_that_fails_leaves_the_collector_as_it_was() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(ValueError, match="no model"), collected_at_end():
        raise ValueError("no model")
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
