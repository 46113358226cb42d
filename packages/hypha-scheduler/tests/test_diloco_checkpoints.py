"""A DiLoCo job and its model: checkpoints after commits, evaluations that choose the best, a full disk at the end."""

from __future__ import annotations

import errno

import anyio
import pytest
from support.diloco_simulation import PEERS, SERVER, Job, job_table

from hypha_proto.training_reports import RoundMetrics
from hypha_scheduler.strategies.diloco.restore import restore

pytestmark = pytest.mark.virtual_clock

WORKERS = PEERS[:3]
A = WORKERS[0]


async def train_to_the_end(job: Job, rounds: int) -> None:
    for _ in range(rounds):
        for peer in WORKERS:
            job.train_round(peer, 2)
        for peer in WORKERS:
            assert job.state(peer) == (True, "")
            job.send(peer)
        assert await job.push() is None
        for peer in WORKERS:
            job.merge(peer)


async def train_with(job: Job, losses: list[float | None]) -> None:
    """Train rounds in which one worker reports a loss, as long as the job goes on."""
    for number, loss in enumerate(losses, 1):
        for peer in WORKERS:
            job.train_round(peer, 2)
            assert job.state(peer) == (True, "")
            job.send(peer)
        job.report(A, RoundMetrics(round=number, metrics={"samples": 8.0} if loss is None else {"loss": loss}))
        assert await job.push() is None
        if job.outcome is not None:
            return
        for peer in WORKERS:
            job.merge(peer)


def begin(rounds: int) -> Job:
    job = Job(table=job_table(rounds={"update_rounds": rounds}))
    job.open()
    job.lease(WORKERS)
    return job


async def test_a_checkpoint_is_written_after_each_commit() -> None:
    job = begin(3)
    await train_to_the_end(job, 2)
    assert job.result.checkpoints == [1, 2]


async def test_what_workers_evaluate_decides_on_the_best_checkpoint() -> None:
    job = begin(3)
    await train_to_the_end(job, 1)
    job.report(A, RoundMetrics(round=1, metrics={"loss": 2.0, "batches": 4.0}))
    metrics = {"evaluation_loss": 1.5, "accuracy": 0.25, "evaluation_samples": 12.0}
    job.report(A, RoundMetrics(round=1, metrics=metrics))
    job.report(A, RoundMetrics(round=1, metrics={"evaluation_loss": 0.5, "evaluation_samples": 1.0}))
    assert job.result.evaluations == [(1, 1.5, 0.25, 12.0), (1, 0.5, None, 1.0)]


@pytest.mark.parametrize(
    ("losses", "outcome"),
    [
        (
            [2.0, 1.5, 1.0, 6.1, 1e9, 2e9],
            "the loss has exploded: it is 2e+09 by round 6, and was 2 in the first; the last good model is "
            "/run/checkpoints/round-2. Start from it with a lower learning rate",
        ),
        (
            [2.0, 30.0, 30.0, 30.0],
            "the loss has exploded: it is 30 by round 4, and was 2 in the first; the last good model is the start "
            "model. Start from it with a lower learning rate",
        ),
        ([2.0, 7.0, 7.0, 6.0, 7.0, 7.0, None], None),
        ([None, -1.0, 0.01, 2.9, 2.9, 2.9, 1.0], None),
        ([None] * 7, None),
    ],
    ids=["after three rounds", "from the start", "it recovers", "small ones", "without labels"],
)
async def test_a_loss_that_explodes_over_rounds_ends_the_job(losses: list[float | None], outcome: str | None) -> None:
    job = begin(10)
    await train_with(job, losses)
    assert job.outcome == outcome


@pytest.mark.parametrize("losses", [[2.0, 1.5, 1.5e9], [2.0, 1.5e9, None]], ids=["stated", "not stated"])
async def test_a_loss_that_has_exploded_in_the_last_round_fails_the_job(losses: list[float | None]) -> None:
    """Also in a scheduler that was killed when it had recorded that round."""
    job = begin(3)
    await train_with(job, losses)
    why = "the loss has exploded: it is 1.5e+09 by round 3, and was 2 in the first; the last good model is "
    assert str(job.outcome).startswith(why)
    job.outcome = None
    job.open()
    assert str(job.outcome).startswith(why)


async def test_a_scheduler_that_is_started_again_knows_the_losses_before() -> None:
    job = begin(10)
    await train_with(job, [2.0, 1.5, 30.0, 30.0])
    again = restore(job.journal)
    assert (again.losses.first, again.losses.good, again.losses.exploded) == (2.0, 1, 2)


async def test_a_full_disk_at_the_end_pauses_the_job() -> None:
    job = begin(1)
    await train_to_the_end(job, 1)
    for peer in (*WORKERS, SERVER):
        job.end_task(peer)
    job.result.errors = [OSError(errno.ENOSPC, "No space left on device")] * 2
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job.run_background)
        await anyio.sleep(1)
        assert (job.outcome, job.result.is_finished) == (None, False)
        await anyio.sleep(60)
    assert (job.outcome, job.result.is_finished) == ("finished", True)
