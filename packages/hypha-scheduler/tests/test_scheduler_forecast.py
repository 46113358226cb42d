"""Shares by measured speed: everyone finishes near the same moment, the target is met and not exceeded by much."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.diloco.forecast import Speed, Standing, divide

PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(6)]
SPEEDS = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=6)


@settings(derandomize=True)
@example(speeds=[1.0, 1.0, 1.0, 1.0], target=21, size=1)  # all end together: no single one gives up what is too much
@given(speeds=SPEEDS, target=st.integers(1, 3000), size=st.integers(1, 64))
def test_the_target_is_met_with_less_than_a_batch_too_much_and_nobody_waits_long(
    speeds: list[float], target: int, size: int
) -> None:
    standings = [
        Standing(peer, size, batch_seconds=speed, next_at=speed) for peer, speed in zip(PEERS, speeds, strict=False)
    ]
    shares = divide(standings, target)
    total = sum(shares.batches.values()) * size
    assert target <= total < target + size
    assert shares.samples == total
    for standing in standings:
        if batches := shares.batches[standing.peer]:
            finish = standing.finish_of(batches)
            assert finish <= shares.finish + 1e-6
            # nobody could have done two more batches in the time that the slowest takes
            assert shares.finish - finish <= 2 * standing.batch_seconds + 1e-6


def test_a_four_times_slower_worker_gets_a_quarter() -> None:
    seconds = [1.0, 1.0, 4.0]
    shares = divide([Standing(p, 16, batch_seconds=s, next_at=s) for p, s in zip(PEERS, seconds, strict=False)], 1440)
    assert [shares.batches[peer] for peer in PEERS[:3]] == [40, 40, 10]


def test_whoever_owes_a_batch_does_it() -> None:
    standings = [
        Standing(PEERS[0], 10, done=100, batch_seconds=1.0, next_at=1.0),
        Standing(PEERS[1], 10, owed=1),
        Standing(PEERS[2], 10, batch_seconds=1000.0, next_at=1000.0, owed=1),
    ]
    assert divide(standings, 50).batches == {PEERS[0]: 0, PEERS[1]: 1, PEERS[2]: 1}


def test_a_settled_share_stays() -> None:
    standings = [
        Standing(PEERS[0], 10, done=40, batch_seconds=1.0, next_at=1.0, over=True),
        Standing(PEERS[1], 10, done=10, batch_seconds=1.0, next_at=1.0),
    ]
    assert divide(standings, 100).batches == {PEERS[0]: 0, PEERS[1]: 5}


def test_warm_up_gives_way_to_the_second_measurement() -> None:
    speed = Speed()
    speed.observe(10, 50.0)
    assert not speed.known
    speed.observe(10, 1.0)
    assert speed.known
    assert speed.seconds_per_sample == pytest.approx(0.1)
    for bad in (float("nan"), float("inf"), -1.0):
        speed.observe(10, bad)
    speed.observe(0, 1.0)
    assert speed.seconds_per_sample == pytest.approx(0.1)
