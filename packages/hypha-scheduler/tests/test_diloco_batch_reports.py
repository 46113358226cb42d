"""Reports of several batches, and of their durations: how many batches the rounds of a job allocate from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from hypha_proto.ids import PeerId
from hypha_proto.training_reports import Continue, ScheduleUpdate
from hypha_scheduler.strategies.diloco.batch_allocation import MeasuredBatch
from hypha_scheduler.strategies.diloco.rounds import Late, Rounds, RoundSettings, Suspected

A, B, C = (PeerId.from_public_key(bytes([number]) * 32) for number in (1, 2, 3))
BATCH = 16


@dataclass
class Job:
    """A job of two workers."""

    batches: int
    """Target of a round."""
    rounds: Rounds = field(init=False)
    left: dict[PeerId, int | None] = field(default_factory=lambda: dict.fromkeys((A, B)))
    """Batches before the update of each worker, as the answers say."""

    def __post_init__(self) -> None:
        self.rounds = Rounds(RoundSettings(2, BATCH * self.batches, BATCH, min_members=2), (A, B), 0.0)
        for peer in (A, B):
            self.rounds.training_began(peer, 0.0)

    def report(self, peer: PeerId, now: float, *stated: float | None) -> None:
        """Report batches with the durations that their executor states."""
        self.count(peer, self.rounds.batches_done(peer, [MeasuredBatch(BATCH, each) for each in stated], now), stated)

    def report_each(self, peer: PeerId, now: float, *stated: float | None) -> None:
        """Report them one by one at the same moment."""
        for each in stated:
            self.count(peer, self.rounds.batch_done(peer, BATCH, now, each), [each])

    def count(self, peer: PeerId, answer: object, stated: Sequence[float | None]) -> None:
        left = self.left[peer]
        if isinstance(answer, ScheduleUpdate):
            self.left[peer] = answer.counter
        else:
            assert answer == Continue()
            self.left[peer] = None if left is None else left - len(stated)


@pytest.mark.parametrize("stated", [1.0, None, 0.0], ids=["with durations", "without", "with durations of zero"])
@pytest.mark.parametrize("report", [Job.report, Job.report_each], ids=["in one report", "in reports at one moment"])
def test_batches_reported_together_count_like_those_reported_one_by_one(stated: float | None, report: object) -> None:
    job = Job(batches=200)
    for second in range(1, 31):
        job.report(A, float(second), stated)
        if second % 5 == 0:
            report(job, B, float(second), *[stated] * 5)  # type: ignore[operator]
    assert job.rounds.progress_of(A, 1) == job.rounds.progress_of(B, 1) == (30 * BATCH, 30)
    assert job.left == {A: pytest.approx(70, abs=8), B: pytest.approx(70, abs=8)}


@pytest.mark.parametrize("asks", [True, False])
def test_an_executor_that_waits_at_its_last_batch_is_told_what_the_round_lacks(asks: bool) -> None:
    job = Job(batches=100)
    for second in range(1, 11):
        for peer in (A, B):
            job.report(peer, float(second), 1.0)
    count = job.left[A]
    assert count is not None
    job.rounds.update_started(B, 10.0)
    batches = [MeasuredBatch(BATCH, 1.0)] * count
    answer = job.rounds.batches_done(A, batches, 10.0 + count, left=0 if asks else None)
    assert answer == (ScheduleUpdate(counter=80 - count) if asks else Continue())


def test_a_worker_gets_no_batches_that_another_may_train_still() -> None:
    job = Job(batches=100)
    for second in range(1, 11):
        for peer in (A, B):
            job.report(peer, float(second), 1.0)
    count = job.left[A]
    assert count is not None
    batches = [MeasuredBatch(BATCH, 1.0)] * count
    answer = job.rounds.batches_done(A, batches, 10.0 + count, left=0)  # B is silent, and may train 40 batches more
    assert answer == Continue()


def test_a_worker_between_two_reports_is_not_taken_for_slow() -> None:
    job = Job(batches=200)
    for second in range(1, 35):
        job.report(A, float(second), 1.0)
        if second % 10 == 0:
            job.report(B, float(second), *[1.0] * 10)
    assert job.left[A] == pytest.approx(66, abs=8)


def test_a_worker_that_reports_several_batches_at_once_is_not_suspected() -> None:
    job = Job(batches=2000)
    for second in range(5, 31, 5):
        for peer in (A, B):
            job.report(peer, float(second), *[0.1] * 50)
    assert job.rounds.expire(46.9) == ()
    assert [type(effect) for effect in job.rounds.expire(47.1)] == [Suspected, Suspected]  # 2 s and three intervals


def test_impossibly_long_durations_do_not_postpone_the_deadline() -> None:
    job = Job(batches=40)
    for second in range(1, 11):
        job.report(A, float(second), 1.0)
        job.rounds.batch_done(B, BATCH, float(second), 1e308, 1e308)
    due = job.rounds.deadline()
    assert due is not None
    assert due < 120.0


def test_one_stalled_batch_does_not_change_what_is_allocated() -> None:
    job = Job(batches=200)
    for second in range(1, 21):
        for peer in (A, B):
            job.report(peer, float(second), 1.0)
    for second in range(21, 31):
        job.report(A, float(second), 1.0)
    job.report(B, 30.0, 10.0)
    for second in range(31, 34):
        for peer in (A, B):
            job.report(peer, float(second), 1.0)
    done = {peer: job.rounds.progress_of(peer, 1)[1] for peer in (A, B)}
    assert done == {A: 33, B: 24}
    assert job.left == {A: pytest.approx(71, abs=8), B: pytest.approx(71, abs=8)}


def test_a_worker_whose_update_arrives_later_gets_fewer_batches() -> None:
    job = Job(batches=100)
    for second in range(1, 51):
        for peer in (A, B):
            job.report(peer, float(second), 1.0)
    for peer in (A, B):
        job.rounds.update_started(peer, 50.0)
    job.rounds.metrics_reported(A, 1, 0.5, 50.0)
    job.rounds.metrics_reported(B, 1, 0.5, 70.0)
    job.rounds.metrics_reported(B, 1, 0.5, 99.0)  # the answer was lost
    job.rounds.step_committed(1, 100.0)
    for peer in (A, B):
        job.rounds.update_merged(peer, 100.0)
    for peer in (A, B):
        job.report(peer, 101.0, 1.0)
    assert job.left == {A: pytest.approx(59, abs=1), B: pytest.approx(39, abs=1)}


def test_a_round_does_not_need_a_silent_worker_if_another_asks_to_take_its_place() -> None:
    job = Job(batches=100)
    for peer in (A, B):
        job.report(peer, 1.0, 1.0)
    job.rounds.add(C, 2.0)
    assert job.rounds.join(C, 3.0) == (None, ())
    job.rounds.update_started(A, 4.0)
    found: list[object] = []
    while (due := job.rounds.deadline()) is not None and due <= 12.0:
        found += job.rounds.expire(due)
    assert any(isinstance(effect, Late) and effect.peer == B for effect in found)
    assert job.rounds.join(C, 12.0)[0] == 1
