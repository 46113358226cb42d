"""The DiLoCo operator: which updates count, when a round is committed, checkpoints, and restarts of the scheduler."""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.diloco_invariants import positions
from support.diloco_simulation import (
    BATCH,
    DATASET,
    JOB_ID,
    PEERS,
    SCHEDULER,
    SERVER,
    FakeDataset,
    Job,
    digest_of,
    job_table,
)

from hypha_net.transfer import PullSource
from hypha_proto.attempt_id import AttemptId
from hypha_proto.batch_reports import BatchesCounted, ReportBatches
from hypha_proto.contributions import CommitStatus, SampleRange
from hypha_proto.job_spec import AggregateConfig, TrainConfig
from hypha_proto.training_reports import Continue, Done, RoundMetrics, SendingUpdate, TrainedBatch, UpdateMerged
from hypha_proto.transfer import NO_ROOM, PullRequest, PushHeader, Refusal
from hypha_scheduler.strategies.base import EmitEvent, PushTarget, RetryAfter, SliceToUse, TaskState
from hypha_scheduler.strategies.diloco.restore import restore
from hypha_scheduler.strategies.diloco.sample_ledger import SampleLedger

pytestmark = pytest.mark.virtual_clock

A, B, C = PEERS[:3]
WORKERS = (A, B, C)
STEPPED = AttemptId(JOB_ID, "aggregate", 0)


def begin(**changes: Any) -> Job:
    """Return a job with three workers in its first round."""
    job = Job(table=job_table(**changes))
    job.open()
    job.lease(WORKERS)
    return job


@pytest.fixture
def job() -> Job:
    return begin()


def train(job: Job, *peers: Any, batches: int = 2) -> None:
    for peer in peers:
        job.train_round(peer, batches)


async def whole_round(job: Job) -> None:
    job.hand_in(*WORKERS)
    await job.finish_round(*WORKERS)


def kinds(job: Job) -> list[str]:
    return [record["record"] for record in job.journal if record["record"] != "assigned"]


def members(job: Job, number: int = 1) -> list[str]:
    return [member["peer"] for member in job.rounds[number - 1]["members"]]


def used(job: Job) -> list[tuple[int, int, int]]:
    """Return every sample that a record names, as epoch, slice and position."""
    return [each for record in job.rounds for member in record["members"] for each in positions(member["ranges"])]


# -------------------------------------------------------------------------------------------------------------- records


async def test_job_fails_if_the_model_would_not_load_with_the_trained_weights(job: Job) -> None:
    for _ in range(3):
        await whole_round(job)
    job.end_task(A)
    job.end_task(B, TaskState.FAILED, "the delivered model does not load: 1 tensor differs", exit_code=65)
    assert f"worker {B}" in str(job.outcome)
    assert "exit code 65: the delivered model does not load" in str(job.outcome)
    assert not job.result.is_finished


async def test_weight_of_a_member_is_the_number_of_samples_that_it_states(job: Job) -> None:
    train(job, *WORKERS)
    executor = job.executors[A]
    executor.take()  # a batch of which no report has come, as while the scheduler was away
    job.contribute(*WORKERS)
    await job.finish_round(*WORKERS)
    samples = {member["peer"]: member["samples"] for member in job.rounds[0]["members"]}
    assert samples == {str(A): 3 * BATCH, str(B): 2 * BATCH, str(C): 2 * BATCH}


# ----------------------------------------------------------------------------------------------------------- statements


async def test_worker_that_states_its_updates_is_not_waited_for_without_the_statement(job: Job) -> None:
    train(job, *WORKERS)
    job.contribute(A, B)
    job.report(C, SendingUpdate())
    assert "announced" not in kinds(job)
    job.contribute(C)
    assert kinds(job)[-1] == "announced"


async def test_statement_that_is_repeated_is_accepted_and_recorded_once(job: Job) -> None:
    train(job, A)
    statement = job.executors[A].statement(job.leases[A])
    assert job.state(A, statement) == job.state(A, statement) == (True, "")
    assert kinds(job).count("contributed") == 1


FOREIGN = (SampleRange(7, 0, 0, 4),)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ranges": FOREIGN}, "not assigned"),
        ({"weights": digest_of("stale")}, "it began from weights with digest"),
        ({"round": 1}, "it is of round 1, and this worker is in round 2"),
        ({"round": 3}, "it is of round 3, and this worker is in round 2"),
        ({"ranges": (SampleRange(0, 0, 0, 2**63),)}, "a range ends at"),
        ({"optimizer": "x" * 500_000}, "optimizer"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
async def test_statement_that_does_not_fit_is_refused_and_costs_the_round_only(
    job: Job, changes: dict[str, Any], why: str
) -> None:
    await whole_round(job)
    train(job, *WORKERS)
    accepted, reason = job.state(A, **changes)
    assert not accepted
    assert why in reason
    [refused] = job.named("update_refused")
    assert (refused["worker"], refused["count"]) == (str(A), 1)
    if changes.get("round") == 1:
        assert job.state(A) == (True, "")  # a replay costs nothing
        return
    job.contribute(B, C)
    if changes.get("round") == 3:
        return
    await job.finish_round(*WORKERS)
    assert members(job, 2) == [str(B), str(C)]
    assert job.outcome is None
    job.hand_in(*WORKERS)
    await job.finish_round(*WORKERS)
    assert str(A) in members(job, 3)


async def test_digest_of_the_file_must_be_the_one_that_is_stated(job: Job) -> None:
    train(job, A)
    message = job.executors[A].statement(job.leases[A])
    assert message.contribution is not None
    other = type(message)(message.attempt, message.round, digest_of("other"), 8, message.contribution, id=None)
    accepted, reason = job.state(A, other)
    assert not accepted
    assert "the executor states an update with digest" in reason


async def test_second_update_of_a_round_is_refused(job: Job) -> None:
    train(job, A)
    assert job.state(A) == (True, "")
    accepted, reason = job.state(A)
    assert not accepted
    assert "has stated an update of round 1 with digest" in reason


# ------------------------------------------------------------------------------------------------------------- refusals


async def test_update_that_the_parameter_server_refuses_costs_its_round() -> None:
    job = begin(resources={"num_workers": 3, "min_workers": 3})
    job.hand_in(*WORKERS)
    job.refuse(A)
    await job.finish_round(*WORKERS)
    assert job.outcome is None
    assert members(job) == [str(B), str(C)]
    [unused] = job.rounds[0]["unused"]
    assert (unused["peer"], unused["why"]) == (str(A), "tensor 'w' holds NaN")
    await whole_round(job)
    assert str(A) in members(job, 2)


async def refuse_in_two_rounds(job: Job) -> None:
    for _ in range(2):
        job.hand_in(*WORKERS)
        job.refuse(A)
        await job.finish_round(*WORKERS)


async def refuse_in_three_rounds(job: Job) -> None:
    await refuse_in_two_rounds(job)
    train(job, *WORKERS)
    job.state(A, ranges=FOREIGN)


async def test_third_refusal_excludes_the_worker() -> None:
    job = begin(rounds={"update_rounds": 5}, resources={"num_workers": 3, "min_workers": 2})
    await refuse_in_three_rounds(job)
    [excluded] = job.named("worker_excluded")
    assert excluded["worker"] == str(A)
    assert "3 of its updates were refused, the last because" in str(excluded["reason"])
    assert A not in job.leases
    train_request, _ = job.operator.role_requests()
    assert (train_request.count, train_request.excluded) == (3, {A})
    job.contribute(B, C)
    await job.finish_round(B, C)
    assert (job.outcome, members(job, 3)) == (None, [str(B), str(C)])


@pytest.mark.parametrize("rounds", [[1], [1, 2, 3, 4], range(2, 100)])
async def test_flood_of_refused_statements_has_few_effects(job: Job, rounds: Sequence[int]) -> None:
    """A worker that is stopped may take its time over it, and state whatever it likes meanwhile."""
    train(job, *WORKERS)
    task, effects = job.leases[A], []
    for number in range(100):
        stated = job.executors[A].statement(
            task, round=rounds[number % len(rounds)], ranges=FOREIGN, update=digest_of(str(number))
        )
        answer, found = job.operator.on_message(task, "state", stated, job.now)
        assert not answer.accepted
        effects += found
    events = [effect.name for effect in effects if isinstance(effect, EmitEvent)]
    assert events.count("update_refused") == min(len(rounds), 3)
    assert events.count("worker_excluded") == (len(rounds) >= 3)


async def test_job_pauses_if_too_few_workers_remain_after_an_exclusion() -> None:
    job = begin(rounds={"update_rounds": 5}, resources={"num_workers": 3, "min_workers": 3})
    await refuse_in_three_rounds(job)
    job.contribute(B, C)
    await job.finish_round(B, C)
    assert job.outcome is None
    [paused] = job.named("paused")
    assert "2 of at least 3 remain" in str(paused["reason"])


async def test_missing_update_is_no_refusal() -> None:
    job = begin(rounds={"update_rounds": 9})
    for _ in range(4):
        job.hand_in(*WORKERS)
        job.refuse(A, "it did not arrive in time", missing=True)
        await job.finish_round(*WORKERS)
    assert job.named("worker_excluded") == []
    assert len(job.named("update_missing")) == 4


# ------------------------------------------------------------------------------------------------ lost and late members


async def test_record_waits_until_the_parameter_server_says_who_is_a_member() -> None:
    job = begin()
    job.hand_in(*WORKERS)
    job.holds_messages = True
    header = job.server.step()
    job.lose(C)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job.push, header)
        await anyio.sleep(1)
        assert job.rounds == []
        job.answer_message()
    assert sorted(members(job)) == sorted(map(str, WORKERS))


async def test_sum_of_the_weights_tells_which_announcement_was_followed(job: Job) -> None:
    train(job, A, B)
    train(job, C, batches=3)
    job.contribute(*WORKERS)
    job.holds_messages = True
    job.lose(C)
    job.server.announce(job.unanswered[0])  # accepted, but the response is lost; the repetition comes too late
    header = job.server.step()
    job.answer_message()
    assert await job.push(header) is None
    assert members(job) == [str(A), str(B)] == [str(peer) for peer in job.server.averaged[1]]


async def test_late_update_may_be_sent_and_does_not_count() -> None:
    job = begin(rounds={"update_rounds": 5, "timeout": 60.0})
    train(job, *WORKERS)
    job.contribute(A, B)
    job.now += 200.0
    job.apply(job.operator.on_deadline(job.now))
    assert [late["worker"] for late in job.named("worker_late")] == [str(C)]
    held = set(positions(job.executors[C].used))
    await job.finish_round(A, B)
    assert job.state(C) == (True, "")
    assert job.named("update_refused") == []
    job.merge(C)
    train(job, A, batches=8)
    assert held <= set(positions(job.executors[A].used))
    train(job, B, C)
    job.contribute(*WORKERS)
    await job.finish_round(*WORKERS)
    assert [unused["peer"] for unused in job.rounds[1]["unused"]] == [str(C)]


def available(job: Job) -> list[tuple[int, int, int]]:
    """Return the samples that are free after what the journal says."""
    state = restore(job.journal)
    ledger = SampleLedger(job.dataset.samples, 0, BATCH)
    state.restore_ledger(ledger, list(job.executors))
    return [(span.epoch, span.index, at) for span in ledger.available for at in range(span.first, span.end)]


@pytest.mark.parametrize("reports_batches", [False, True])
async def test_update_under_way_is_not_late_while_its_worker_computes_the_digest(reports_batches: bool) -> None:
    job = begin(rounds={"update_rounds": 5, "timeout": 60.0})
    train(job, *WORKERS)
    job.contribute(A, B)
    job.now = 59.0
    if reports_batches:
        task, batch = job.leases[C], TrainedBatch(batch_size=BATCH)
        message = ReportBatches(attempt=task.id_in(JOB_ID), round=1, first=1, batches=(batch,))
        answer, _ = job.operator.on_message(task, "ReportBatches", message, job.now)
        assert answer == BatchesCounted(counted=2, last=2)
    else:
        job.report(C, SendingUpdate())
    deadline = job.operator.next_deadline()
    assert deadline == 59.0 + 60.0


# -------------------------------------------------------------------------------------------------------------- commits


async def test_outer_update_is_committed_by_its_digest_only(job: Job) -> None:
    job.hand_in(*WORKERS)
    header = job.server.step()
    assert isinstance(job.ask_commit(A, 1, header.digest), RetryAfter)
    assert await job.push(header) is None
    assert job.ask_commit(A, 1, header.digest) == CommitStatus(committed=True, weights=job.rounds[0]["weights"])
    other = job.ask_commit(A, 1, digest_of("other"))
    assert isinstance(other, CommitStatus)
    assert not other.committed
    assert "committed with another outer update" in other.reason


async def test_older_term_is_refused(job: Job) -> None:
    await whole_round(job)
    job.open()
    job.lease(WORKERS)
    assert job.server.term == 2
    for peer in WORKERS:
        job.executors[peer].round = 2
    job.hand_in(*WORKERS)
    header = job.server.step()
    old = PushHeader(STEPPED, 2, header.kind, "outer", 100, digest_of("old"), SCHEDULER, term=1)
    assert await job.push(old) == "term 1 is over: the parameter server is of term 2"
    assert await job.push(header) is None
    assert [record["term"] for record in job.rounds] == [1, 2]


async def test_outer_update_that_comes_again_is_received_and_recorded_once(job: Job) -> None:
    job.hand_in(*WORKERS)
    header = job.server.step()
    assert await job.push(header) is None
    assert await job.push(header) is None
    assert len(job.rounds) == 1
    again = PushHeader(STEPPED, 1, header.kind, "outer", 100, digest_of("other"), SCHEDULER, term=1)
    assert await job.push(again) == "the outer update of round 1 was already received"


async def test_outer_update_of_members_that_were_not_announced_is_refused(job: Job) -> None:
    train(job, *WORKERS)
    header = PushHeader(STEPPED, 1, "outer-update", "outer", 100, digest_of("early"), SCHEDULER, term=1)
    assert await job.push(header) == "the members of round 1 were not announced"


async def test_newest_weights_are_served_to_workers_and_the_momentum_to_the_parameter_server(job: Job) -> None:
    def pull(peer: Any, name: str) -> PullSource | Refusal:
        return job.operator.on_pull_request(job.leases[peer], PullRequest(dataset=f"{JOB_ID}/{name}", index=0))

    assert isinstance(pull(A, "weights"), Refusal)
    await whole_round(job)
    assert pull(A, "weights") == PullSource(Path("/run/weights.safetensors"))
    assert pull(SERVER, "momentum") == PullSource(Path("/run/momentum.safetensors"))
    assert isinstance(pull(A, "momentum"), Refusal)
    assert isinstance(pull(A, "journal.jsonl"), Refusal)


async def test_worker_that_fetches_the_weights_is_counted(job: Job) -> None:
    train(job, A)
    job.report(A, RoundMetrics(round=1, metrics={"loss": 0.5}))
    job.report(A, RoundMetrics(round=1, metrics={"weights_fetched": 1.0}))
    assert job.named("weights_fetched") == [{"worker": str(A), "round": 1}]
    job.contribute(A)
    train(job, B, C)
    job.contribute(B, C)
    assert await job.push() is None
    assert job.rounds[0]["loss"] == 0.5  # the second report takes nothing back


async def test_a_round_is_closed_by_the_report_of_a_worker_without_labels(job: Job) -> None:
    job.hand_in(*WORKERS)
    assert await job.push() is None
    for peer, loss in ((B, {"loss": 0.5}), (C, {"loss": 0.5}), (A, {})):
        assert job.named("round") == []
        job.report(peer, RoundMetrics(round=1, metrics=loss | {"samples": 16.0, "micro_batch": 4.0}))
    assert [(each["round"], each["loss"]) for each in job.named("round")] == [(1, 0.5)]


async def test_summary_adds_up_where_the_time_of_a_worker_has_gone(job: Job) -> None:
    spent = {"compute_seconds": 3.0, "data_wait_seconds": 0.25, "report_wait_seconds": 0.5}
    job.report(A, RoundMetrics(round=1, metrics={"loss": 0.5} | spent))
    job.report(A, RoundMetrics(round=1, metrics={"weights_fetched": 1.0, "compute_seconds": 7.0}))
    job.report(A, RoundMetrics(round=2, metrics={"loss": 0.5, "sync_seconds": 1.5, "other_seconds": 9.0} | spent))
    job.report(B, RoundMetrics(round=1, metrics={"loss": 0.5, "compute_seconds": -1.0, "sync_seconds": math.nan}))
    job.report(SERVER, RoundMetrics(round=1, metrics={"loss": 0.5, "compute_seconds": 1.0}))
    found = {worker["peer"]: worker["seconds"] for worker in job.operator.summary({})["workers"]}  # type: ignore[attr-defined]
    assert found[str(A)] == {
        "compute_seconds": 6.0,
        "data_wait_seconds": 0.5,
        "report_wait_seconds": 1.0,
        "sync_seconds": 1.5,
    }
    assert found[str(B)] is None


# ------------------------------------------------------------------------------------------------------------ full disk


async def test_job_pauses_while_the_weights_find_no_room() -> None:
    job = begin(rounds={"update_rounds": 3, "timeout": 60.0})
    job.hand_in(*WORKERS)
    job.result.errors = [OSError(errno.ENOSPC, "No space left on device")] * 3
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job.push)
        await anyio.sleep(3)
        await job.run_background()
        assert "free space on that disk, then the job goes on" in str(job.named("paused")[0]["reason"])
        assert job.operator.next_deadline() is None
        job.now += 5000.0
    assert len(job.rounds) == 1
    assert job.outcome is None
    assert [event["seconds"] for event in job.named("continued")] == [5000.0]
    deadline = job.operator.next_deadline()
    assert deadline is not None
    assert deadline > job.now


async def test_push_that_finds_no_room_is_refused_until_there_is_some(job: Job) -> None:
    job.hand_in(*WORKERS)
    header = job.server.step()
    job.result.lacking = "100 bytes are free; free space on that disk"
    for _ in range(2):
        assert str(await job.push(header)).startswith(NO_ROOM)
    job.now += 5000.0
    assert job.operator.next_deadline() is None
    job.result.lacking = None
    assert await job.push(header) is None
    assert (len(job.named("paused")), len(job.named("continued"))) == (1, 1)
    assert job.outcome is None


# ------------------------------------------------------------------------------------------------------ restart, resume


async def test_first_job_has_no_momentum_and_no_first_round(job: Job) -> None:
    train_config = job.specs[A].spec.training
    assert isinstance(train_config, TrainConfig)
    assert (train_config.first_round, train_config.term, train_config.weights is not None) == (None, 1, True)
    aggregate = job.specs[SERVER].spec.aggregation
    assert isinstance(aggregate, AggregateConfig)
    assert aggregate.momentum is None


async def test_resumed_job_that_had_all_rounds_just_finishes() -> None:
    job = begin(rounds={"update_rounds": 1})
    job.hand_in(*WORKERS)
    assert await job.push() is None
    job.open()
    assert job.operator.role_requests() == ()
    await job.run_background()
    assert (job.outcome, job.result.is_finished) == ("finished", True)
    assert job.operator.summary({})["rounds"] == 1
    assert job.operator.summary({})["samples"] == 6 * BATCH


async def test_refusals_before_a_restart_count() -> None:
    job = begin(rounds={"update_rounds": 5}, resources={"num_workers": 3, "min_workers": 2})
    await refuse_in_two_rounds(job)
    job.open()
    job.adopt()
    job.hand_in(*WORKERS)
    await job.finish_round(*WORKERS)
    train(job, *WORKERS)
    job.state(A, ranges=FOREIGN)
    assert [excluded["worker"] for excluded in job.named("worker_excluded")] == [str(A)]


async def test_update_that_was_refused_before_a_restart_does_not_count(job: Job) -> None:
    train(job, *WORKERS)
    held = set(positions(job.executors[A].used))
    job.contribute(*WORKERS)
    job.refuse(A)
    job.open()
    job.adopt()
    assert held <= set(available(job))
    assert not job.state(A)[0]
    await job.finish_round(*WORKERS)
    assert members(job) == [str(B), str(C)]


async def test_worker_that_was_lost_before_the_restart_counts_if_it_was_averaged(job: Job) -> None:
    """The members without it were announced, and nobody knows whether the parameter server has accepted that."""
    job.hand_in(*WORKERS)
    header = job.server.step()
    job.holds_messages = True
    job.lose(C)
    job.holds_messages = False
    job.open()
    job.adopt()
    assert await job.push(header) is None
    assert sorted(members(job)) == sorted(map(str, WORKERS))


async def test_worker_that_has_merged_the_last_committed_update_is_told_to_continue(job: Job) -> None:
    job.hand_in(*WORKERS)
    assert await job.push() is None
    job.merge(A)
    job.open()
    job.adopt()
    assert isinstance(job.merge(B), Continue)
    job.merge(C)
    await whole_round(job)
    assert len(job.rounds) == 2


async def test_tasks_of_a_job_that_had_all_rounds_are_stopped() -> None:
    job = begin(rounds={"update_rounds": 1})
    job.hand_in(*WORKERS)
    assert await job.push() is None
    job.open()
    job.adopt()
    await job.run_background()
    assert (job.leases, job.outcome) == ({}, "finished")


async def test_executors_that_fail_are_lost_or_stay_when_all_is_merged_fail_no_job() -> None:
    job = begin(rounds={"update_rounds": 1})
    await whole_round(job)
    job.end_task(A, TaskState.FAILED, "it crashed at its exit", 1)
    job.lose(B)
    job.end_task(SERVER)
    job.now = job.operator.next_deadline() or 0.0
    job.apply(job.operator.on_deadline(job.now))
    await job.run_background()
    crashed, late = [str(warning["text"]) for warning in job.named("warning")]
    assert "it crashed at its exit" in crashed
    assert late == f"task train-3 at {C} did not end in time"
    assert job.outcome == "finished"


# ---------------------------------------------------------------------------------------------------------- older peers


async def test_executors_that_have_stated_nothing_get_whole_slices(job: Job) -> None:
    given: list[SliceToUse] = []
    train(job, *WORKERS)
    job.lose(C)
    for _ in range(9):
        found = job.operator.next_slice(job.leases[A], DATASET, job.now)
        assert isinstance(found, SliceToUse)
        given.append(found)
    assert all((each.first, each.end) == (0, FakeDataset().samples[each.index]) for each in given)


def test_slice_of_unknown_size_is_given_without_an_end() -> None:
    """An end that no slice has would be refused by executors, which check it against their file."""
    job = Job(table=job_table(), dataset=FakeDataset(samples=(None, None)))
    job.open()
    job.lease((A, B))
    found = job.operator.next_slice(job.leases[A], DATASET, job.now)
    assert isinstance(found, SliceToUse)
    assert (found.first, found.end) == (0, None)


async def test_older_worker_that_drains_and_merges_before_the_record_is_part_of_it(job: Job) -> None:
    job.hand_in(*WORKERS)
    held = set(positions(job.executors[C].used))
    header = job.server.step()
    job.apply(job.operator.on_lease_draining(job.leases[C].lease, 60.0, job.now))
    assert isinstance(job.report(C, UpdateMerged()), Done)  # it has not asked whether the update is committed
    job.end_task(C)
    for _ in range(6):
        job.give_slice(A)
    given = [(part.epoch, part.index, part.first or 0, part.end or 0) for part in job.executors[A].queue]
    assert held.isdisjoint(positions(given))
    assert await job.push(header) is None
    assert str(C) in members(job)
    assert held <= set(used(job))
    assert held.isdisjoint(available(job))


async def test_parameter_server_without_terms_closes_the_round_by_its_report(job: Job) -> None:
    job.hand_in(*WORKERS)
    header = job.server.step()
    plain = PushHeader(STEPPED, 1, header.kind, "outer", 100, header.digest, SCHEDULER)
    target, effects = job.operator.on_push_request(job.leases[SERVER], plain, job.now)
    job.apply(effects)
    assert isinstance(target, PushTarget)
    await job.receive(target, plain)
    await job.run_background()
    assert job.named("round") == []
    assert await job.push(plain) is None  # and reports the step
    for peer in WORKERS:
        assert not isinstance(job.report(peer, RoundMetrics(round=1, metrics={"loss": 1.0})), Done)
    assert len(job.named("round")) == len(job.rounds) == 1


async def train_with(job: Job, losses: list[float | None]) -> None:
    """Train rounds in which one worker reports a loss, as long as the job goes on."""
    for number, loss in enumerate(losses, 1):
        job.hand_in(*WORKERS)
        job.report(A, RoundMetrics(round=number, metrics={"samples": 8.0} if loss is None else {"loss": loss}))
        assert await job.push() is None
        if job.outcome is not None:
            return
        for peer in WORKERS:
            job.merge(peer)


async def test_a_checkpoint_is_written_after_each_commit() -> None:
    job = begin(rounds={"update_rounds": 3})
    for _ in range(2):
        await whole_round(job)
    assert job.result.checkpoints == [1, 2]


async def test_what_workers_evaluate_decides_on_the_best_checkpoint() -> None:
    job = begin(rounds={"update_rounds": 3})
    await whole_round(job)
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
    job = begin(rounds={"update_rounds": 10})
    await train_with(job, losses)
    assert job.outcome == outcome


@pytest.mark.parametrize("losses", [[2.0, 1.5, 1.5e9], [2.0, 1.5e9, None]], ids=["stated", "not stated"])
async def test_a_loss_that_has_exploded_in_the_last_round_fails_the_job(losses: list[float | None]) -> None:
    """Also in a scheduler that was killed when it had recorded that round."""
    job = begin(rounds={"update_rounds": 3})
    await train_with(job, losses)
    why = "the loss has exploded: it is 1.5e+09 by round 3, and was 2 in the first; the last good model is "
    assert str(job.outcome).startswith(why)
    job.outcome = None
    job.open()
    assert str(job.outcome).startswith(why)


async def test_a_scheduler_that_is_started_again_knows_the_losses_before() -> None:
    job = begin(rounds={"update_rounds": 10})
    await train_with(job, [2.0, 1.5, 30.0, 30.0])
    again = restore(job.journal)
    assert (again.losses.first, again.losses.good, again.losses.exploded) == (2.0, 1, 2)


async def test_a_full_disk_at_the_end_pauses_the_job() -> None:
    job = begin(rounds={"update_rounds": 1})
    await whole_round(job)
    for peer in (*WORKERS, SERVER):
        job.end_task(peer)
    job.result.errors = [OSError(errno.ENOSPC, "No space left on device")] * 2
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job.run_background)
        await anyio.sleep(1)
        assert (job.outcome, job.result.is_finished) == (None, False)
        await anyio.sleep(60)
    assert (job.outcome, job.result.is_finished) == ("finished", True)
