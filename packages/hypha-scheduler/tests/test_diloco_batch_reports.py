"""Reports of several batches: lost, doubled, and late ones, and how many batches rounds allocate from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.diloco_simulation import BATCH, JOB_ID, PEERS, Job, batch_done, job_table

from hypha_proto.batch_reports import BatchesCounted, ReportBatches
from hypha_proto.ids import PeerId
from hypha_proto.training_reports import BatchDone, Continue, ScheduleUpdate, SendingUpdate, TrainedBatch
from hypha_scheduler.strategies.base import EmitEvent, TaskEnded, TaskState
from hypha_scheduler.strategies.diloco.batch_allocation import MeasuredBatch
from hypha_scheduler.strategies.diloco.round_effects import RoundSettings
from hypha_scheduler.strategies.diloco.rounds import Rounds

A, B, C = PEERS[:3]


@dataclass
class TwoWorkers:
    """Rounds of two workers."""

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

    def work(self, seconds: range, *stated: float) -> None:
        """Let both report these batches at the end of each of these seconds."""
        for second in seconds:
            for peer in (A, B):
                self.report(peer, float(second), *stated)

    def report_each(self, peer: PeerId, now: float, *stated: float | None) -> None:
        """Report them one by one at the same moment."""
        for each in stated:
            self.count(peer, batch_done(self.rounds, peer, BATCH, now, each), [each])

    def count(self, peer: PeerId, answer: object, stated: Sequence[float | None]) -> None:
        left = self.left[peer]
        if isinstance(answer, ScheduleUpdate):
            self.left[peer] = answer.counter
        else:
            assert answer == Continue()
            self.left[peer] = None if left is None else left - len(stated)


@pytest.mark.parametrize("stated", [1.0, None, 0.0], ids=["with durations", "without", "with durations of zero"])
@pytest.mark.parametrize(
    "report", [TwoWorkers.report, TwoWorkers.report_each], ids=["in one report", "in reports at one moment"]
)
def test_batches_reported_together_count_like_those_reported_one_by_one(stated: float | None, report: object) -> None:
    job = TwoWorkers(batches=200)
    for second in range(1, 31):
        job.report(A, float(second), stated)
        if second % 5 == 0:
            report(job, B, float(second), *[stated] * 5)  # type: ignore[operator]
    assert job.rounds.progress_of(A, 1) == job.rounds.progress_of(B, 1) == (30 * BATCH, 30)
    assert job.left == {A: pytest.approx(70, abs=8), B: pytest.approx(70, abs=8)}


@pytest.mark.parametrize(
    ("asks", "other_trains", "lacking"),
    [(True, False, 80), (False, False, None), (True, True, None)],
    ids=["it waits", "it does not wait", "another one is silent, and may train 40 batches more"],
)
def test_an_executor_that_waits_at_its_last_batch_is_told_what_the_round_lacks(
    asks: bool, other_trains: bool, lacking: int | None
) -> None:
    job = TwoWorkers(batches=100)
    job.work(range(1, 11), 1.0)
    count = job.left[A]
    assert count is not None
    if not other_trains:
        job.rounds.update_started(B, 10.0)
    batches = [MeasuredBatch(BATCH, 1.0)] * count
    answer = job.rounds.batches_done(A, batches, 10.0 + count, left=0 if asks else None)
    assert answer == (Continue() if lacking is None else ScheduleUpdate(counter=lacking - count))


def test_a_worker_between_two_reports_is_not_taken_for_slow() -> None:
    job = TwoWorkers(batches=200)
    for second in range(1, 35):
        job.report(A, float(second), 1.0)
        if second % 10 == 0:
            job.report(B, float(second), *[1.0] * 10)
    assert job.left[A] == pytest.approx(66, abs=8)


def test_a_worker_that_reports_several_batches_at_once_is_not_suspected() -> None:
    job = TwoWorkers(batches=2000)
    job.work(range(5, 31, 5), *[0.1] * 50)
    assert job.rounds.expire(46.9) == ()
    suspected = [effect.name for effect in job.rounds.expire(47.1) if isinstance(effect, EmitEvent)]
    assert suspected == ["worker_suspected", "worker_suspected"]  # 2 s and three intervals


def test_impossibly_long_durations_do_not_postpone_the_deadline() -> None:
    job = TwoWorkers(batches=40)
    for second in range(1, 11):
        job.report(A, float(second), 1.0)
        batch_done(job.rounds, B, BATCH, float(second), 1e308, 1e308)
    due = job.rounds.deadline()
    assert due is not None
    assert due < 120.0


def test_one_stalled_batch_does_not_change_what_is_allocated() -> None:
    job = TwoWorkers(batches=200)
    job.work(range(1, 21), 1.0)
    for second in range(21, 31):
        job.report(A, float(second), 1.0)
    job.report(B, 30.0, 10.0)
    job.work(range(31, 34), 1.0)
    done = {peer: job.rounds.progress_of(peer, 1)[1] for peer in (A, B)}
    assert done == {A: 33, B: 24}
    assert job.left == {A: pytest.approx(71, abs=8), B: pytest.approx(71, abs=8)}


def test_a_worker_whose_update_arrives_later_gets_fewer_batches() -> None:
    job = TwoWorkers(batches=100)
    job.work(range(1, 51), 1.0)
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
    job = TwoWorkers(batches=100)
    for peer in (A, B):
        job.report(peer, 1.0, 1.0)
    job.rounds.add(C, 2.0)
    assert job.rounds.join(C, 3.0) == (None, ())
    job.rounds.update_started(A, 4.0)
    found: list[object] = []
    while (due := job.rounds.deadline()) is not None and due <= 12.0:
        found += job.rounds.expire(due)
    assert any(isinstance(effect, EmitEvent) and effect.name == "worker_late" for effect in found)
    assert job.rounds.join(C, 12.0)[0] == 1


LARGE = job_table(rounds={"update_rounds": 3, "avg_samples_between_updates": 4800})


def large() -> Job:
    made = Job(table=LARGE)
    made.open()
    made.lease(PEERS[:3])
    return made


@pytest.fixture
def job() -> Job:
    """Three workers that have begun the first round of many batches."""
    return large()


def report(
    job: Job, peer: PeerId, first: int, count: int, number: int = 1, seconds: float = 1.0, **more: Any
) -> BatchesCounted:
    """Report batches a second later; `more` are further fields of the message."""
    job.now += 1.0
    batch = TrainedBatch(batch_size=BATCH, slices={"0": BATCH}, batch_ms=seconds * 1000)
    task = job.leases[peer]
    message = ReportBatches(attempt=task.id_in(JOB_ID), round=number, first=first, batches=(batch,) * count, **more)
    answer, effects = job.operator.on_message(task, "ReportBatches", message, job.now)
    job.apply(effects)
    assert isinstance(answer, BatchesCounted)
    return answer


def counted(job: Job, peer: PeerId, number: int = 1) -> tuple[int, int]:
    """Return the samples and batches that the scheduler has counted."""
    running = job.operator._running
    assert running is not None
    return running.training.rounds.progress_of(peer, number)


def test_batches_are_counted_once_however_often_they_are_reported(job: Job) -> None:
    assert report(job, A, 0, 3) == BatchesCounted(counted=3)
    assert counted(job, A) == (3 * BATCH, 3)
    assert report(job, A, 0, 3).counted == 3, "the message was doubled"
    assert counted(job, A) == (3 * BATCH, 3)
    assert report(job, A, 1, 4).counted == 5, "some of them are new"
    assert report(job, A, 0, 2).counted == 2, "a late message"
    assert counted(job, A) == (5 * BATCH, 5)
    assert counted(job, B) == (0, 0)


def test_the_end_of_the_round_counts_from_its_first_batch(job: Job) -> None:
    for first in (0, 1):
        for peer in (A, B, C):
            answer = report(job, peer, first, 1)
    assert answer.last is not None
    assert 350 < answer.last < 450, "a third of 1,200 batches"
    ahead = report(job, C, 2, 8)
    assert ahead.last is not None
    assert ahead.last > 10
    assert report(job, C, 2, 8) == ahead, "the answer was lost"
    assert report(job, C, 0, 1).last == ahead.last


@pytest.mark.parametrize("settles", [True, None])
def test_an_end_is_settled_also_if_the_batches_were_counted_before(job: Job, settles: bool | None) -> None:
    for first in (0, 1):
        for peer in (A, B, C):
            report(job, peer, first, 1)
    last = report(job, C, 2, 8).last
    assert last is not None
    assert report(job, C, 2, 8, last=last, settles=settles).last == last, "the answer was lost"
    later = {report(job, C, first, min(100, last - first), last=last).last for first in range(10, last, 100)}
    assert (later == {last}) == (settles is True), "others have trained little, so that the round lacks many batches"


@pytest.mark.parametrize("stated", [3, 1000, (1 << 32) - 1])
def test_a_wrong_statement_of_the_last_batch_takes_nothing_from_others(job: Job, stated: int) -> None:
    for first in (0, 1):
        for peer in (A, B, C):
            report(job, peer, first, 1, last=stated if peer == A else None)
    answers = [report(job, peer, 2, 1, last=stated if peer == A else None).last or 0 for peer in (A, B, C)]
    assert all(350 < last < 450 for last in answers)


def test_the_answer_agrees_with_that_to_single_reports(job: Job) -> None:
    other = large()
    for first in range(3):
        for peer in (A, B, C):
            answer = report(job, peer, first, 1)
            other.now += 1.0
            single = other.report(peer, BatchDone(batch_size=BATCH, slices={"0": BATCH}, batch_ms=1000.0))
            if isinstance(single, ScheduleUpdate):
                assert answer.last == first + 1 + single.counter
    assert answer.last is not None


def test_a_scheduler_that_was_started_again_counts_from_where_the_worker_is(job: Job) -> None:
    assert report(job, A, 20, 2).counted == 22
    assert counted(job, A) == (2 * BATCH, 2)
    assert report(job, A, 21, 2).counted == 23
    assert counted(job, A) == (3 * BATCH, 3)


@pytest.mark.parametrize("number", [0, 2, 3, (1 << 32) - 1])
def test_a_report_of_another_round_counts_nothing_and_ends_that_round(job: Job, number: int) -> None:
    assert report(job, A, 5, 3, number=number) == BatchesCounted(counted=8, last=8)
    assert counted(job, A) == counted(job, A, number) == (0, 0)
    assert report(job, A, 0, 1).counted == 1


def test_a_report_after_the_update_changes_no_samples(job: Job) -> None:
    report(job, A, 0, 2)
    executor = job.executors[A]
    executor.take()
    job.report(A, SendingUpdate())
    job.state(A)
    before = counted(job, A)
    report(job, A, 2, 5)
    assert counted(job, A) == before


def test_a_late_report_of_an_executor_that_has_ended_counts_nothing(job: Job) -> None:
    for peer in PEERS[:3]:
        job.join(peer)
    task = job.leases[A]
    report(job, A, 0, 2)
    job.apply(job.operator.on_task_update(task, TaskEnded(TaskState.FAILED, "it exited", 1), job.now))
    job.leases[A] = task
    answer = report(job, A, 2, 2)
    assert counted(job, A) == (0, 0)
    assert answer == BatchesCounted(counted=4)


def test_a_peer_without_a_training_task_is_refused(job: Job) -> None:
    answer = report(job, job.server_peer, 0, 1)
    assert answer.reason == "no training task of the job runs on this peer"


def test_impossible_numbers_do_no_harm(job: Job) -> None:
    task = job.leases[A]
    for seconds in (math.nan, math.inf, -1.0, 1e300):
        batch = TrainedBatch(batch_size=(1 << 32) - 1, slices={"x": 1, "9" * 30: 7}, batch_ms=seconds, wait_ms=seconds)
        message = ReportBatches(attempt=task.id_in(JOB_ID), round=1, first=(1 << 32) - 1, batches=(batch,) * 256)
        answer, effects = job.operator.on_message(task, "ReportBatches", message, job.now)
        job.apply(effects)
        assert answer.counted == (1 << 32) - 1
        assert answer.last is None or answer.last == (1 << 32) - 1
    assert counted(job, A) == (256 * BATCH, 256)
    assert report(job, B, 0, 1).counted == 1
