"""Messages with several batches: lost, doubled, late ones, and those of another round than the worker's."""

from __future__ import annotations

import math

import pytest
from support.diloco_simulation import BATCH, JOB_ID, PEERS, Job, job_table

from hypha_proto.batch_reports import BatchesCounted, ReportBatches
from hypha_proto.ids import PeerId
from hypha_proto.training_reports import BatchDone, ScheduleUpdate, SendingUpdate, TrainedBatch
from hypha_scheduler.strategies.base import TaskEnded, TaskState

A, B, C = PEERS[:3]
LARGE = job_table(rounds={"update_rounds": 3, "avg_samples_between_updates": 4800})


@pytest.fixture
def job() -> Job:
    """Three workers that have begun the first round of many batches."""
    made = Job(table=LARGE)
    made.open()
    made.lease(PEERS[:3])
    return made


def report(
    job: Job, peer: PeerId, first: int, count: int, number: int = 1, seconds: float = 1.0, last: int | None = None
) -> BatchesCounted:
    """Report batches a second later; `last` is what the executor knows of the end of the round."""
    job.now += 1.0
    batch = TrainedBatch(batch_size=BATCH, slices={"0": BATCH}, batch_ms=seconds * 1000)
    task = job.leases[peer]
    message = ReportBatches(attempt=task.id_in(JOB_ID), round=number, first=first, batches=(batch,) * count, last=last)
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


@pytest.mark.parametrize("stated", [3, 1000, (1 << 32) - 1])
def test_a_wrong_statement_of_the_last_batch_takes_nothing_from_others(job: Job, stated: int) -> None:
    for first in (0, 1):
        for peer in (A, B, C):
            report(job, peer, first, 1, last=stated if peer == A else None)
    answers = [report(job, peer, 2, 1, last=stated if peer == A else None).last or 0 for peer in (A, B, C)]
    assert all(350 < last < 450 for last in answers)


def test_the_answer_agrees_with_that_to_single_reports(job: Job) -> None:
    other = Job(table=LARGE)
    other.open()
    other.lease(PEERS[:3])
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


def test_a_late_report_of_an_executor_that_has_ended_counts_nothing() -> None:
    job = Job(table=LARGE)
    job.open()
    job.lease(PEERS[:3])
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
