"""Rounds end as the scheduler's answers say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hypha.accelerate_executor.diloco.round_countdown import NextStep, RoundCountdown
from hypha_proto.progress import Acknowledged, Continue, Done, ScheduleUpdate


@given(before=st.integers(0, 20), counter=st.integers(0, 20))
def test_a_count_of_n_means_n_more_batches(before: int, counter: int) -> None:
    countdown = RoundCountdown()
    assert all(countdown.after_batch(Continue()) is NextStep.TRAIN for _ in range(before))
    following = countdown.after_batch(ScheduleUpdate(counter=counter))
    more = 0
    while following is NextStep.TRAIN:
        following = countdown.after_batch(Continue())
        more += 1
    assert (following, more) == (NextStep.SYNCHRONISE, counter)
    assert countdown.after_merge(Acknowledged()) is NextStep.TRAIN
    assert countdown.round == 2
    assert countdown.after_batch(Continue()) is NextStep.TRAIN


def test_a_newer_count_replaces_the_older_and_done_ends_all() -> None:
    countdown = RoundCountdown(7)
    countdown.after_batch(ScheduleUpdate(counter=9))
    assert countdown.after_batch(ScheduleUpdate(counter=0)) is NextStep.SYNCHRONISE
    assert countdown.after_merge(Done()) is NextStep.STOP
    assert countdown.round == 7
    assert countdown.after_batch(Done()) is NextStep.STOP


def test_without_data_an_announced_round_is_still_sent() -> None:
    countdown = RoundCountdown()
    assert countdown.without_data() is NextStep.STOP
    countdown.after_batch(ScheduleUpdate(counter=3))
    assert countdown.without_data() is NextStep.SYNCHRONISE
