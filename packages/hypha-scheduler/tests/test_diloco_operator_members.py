"""The DiLoCo operator when members come and go: executors that die, workers and parameter servers that are replaced."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from support.diloco_simulation import DATASET, JOB_ID, PEERS, SERVER, Job, job_table

from hypha_net.transfer import PullSource
from hypha_proto.job_membership import RoundToJoin
from hypha_proto.job_spec import TrainConfig
from hypha_proto.training_reports import Done
from hypha_proto.transfer import PullRequest
from hypha_scheduler.strategies.base import Lease, RetryAfter, SliceToUse, StartTask, TaskState
from hypha_scheduler.strategies.diloco.specs import AGGREGATE, TRAIN

pytestmark = pytest.mark.virtual_clock

A, B, C, D, E = PEERS[:5]
OTHER_SERVER = PEERS[7]
WORKERS = (A, B, C)


def begin(peers: tuple[Any, ...] = WORKERS, **changes: Any) -> Job:
    """Return a job in its first round."""
    job = Job(table=job_table(**changes))
    job.open()
    job.lease(peers)
    for peer in peers:
        assert job.join(peer).round == 1
        job.give_slice(peer)
    return job


@pytest.fixture
def job() -> Job:
    return begin(rounds={"update_rounds": 9})


def members(job: Job, number: int) -> set[str]:
    return {member["peer"] for member in job.rounds[number - 1]["members"]}


def names(*peers: Any) -> set[str]:
    return {str(peer) for peer in peers}


def train_config(start: StartTask) -> TrainConfig:
    assert start.spec.training is not None
    return start.spec.training


# ------------------------------------------------------------------------------------------------------------ executors


def test_the_first_workers_begin_when_all_of_them_are_ready() -> None:
    job = Job(table=job_table(resources={"num_workers": 2, "min_workers": 1}))
    job.open()
    roles = {A: TRAIN, B: TRAIN, SERVER: AGGREGATE}
    leases = [Lease(uuid.uuid4(), peer, role, 1.0) for peer, role in roles.items()]
    job.apply(job.operator.on_leases_acquired(leases, job.now))
    assert job.operator.slice_ahead(job.leases[B], DATASET, job.now)  # which does not say that it is ready
    assert isinstance(job.join(A), RetryAfter)
    assert [job.join(peer).round for peer in (B, A)] == [1, 1]


def test_samples_that_were_assigned_ahead_are_recorded_again_when_their_worker_joins(job: Job) -> None:
    job.acquire(D)
    found = job.operator.slice_ahead(job.leases[D], DATASET, job.now)
    assert isinstance(found, SliceToUse)
    for peer in WORKERS:
        job.end_task(peer, TaskState.FAILED, "it was killed", -9)  # nobody trains in the open round any more
    before = len(job.journal)
    assert job.join(D).keeps
    [joined, assigned] = [record for record in job.journal[before:] if record.get("worker") == str(D)]
    assert (joined["record"], assigned["record"]) == ("joined", "assigned")
    assert (assigned["epoch"], assigned["slice"], assigned["first"]) == (found.epoch, found.index, found.first)


async def test_update_that_was_made_again_counts_after_the_first_one_did_not_arrive() -> None:
    job = begin((A,), resources={"num_workers": 1, "min_workers": 1})
    job.train_round(A, 2)
    assert job.state(A) == (True, "")
    job.end_task(A, TaskState.FAILED, "it was killed", -9)
    job.refuse(A, "it did not arrive in time", missing=True)
    assert job.join(A).round == 1
    job.hand_in(A)
    await job.finish_round(A)
    assert members(job, 1) == names(A)
    assert job.outcome is None


async def _train_without_a(job: Job) -> None:
    """End the round that B has begun with the updates of B and C."""
    job.train_round(B, 1)
    job.hand_in(C)
    assert job.state(B) == (True, "")
    job.send(B)
    await job.finish_round(B, C)


@pytest.mark.parametrize("is_released", [False, True])
async def test_worker_that_gives_its_task_up_gets_no_other_one(is_released: bool) -> None:
    """Its disk is full, and is the next time, too. What the job itself has stopped says nothing about the worker."""
    job = begin(resources={"num_workers": 3, "min_workers": 2})
    if is_released:
        job.apply(job.operator._membership.release(A, "3 rounds in succession went on without it", job.now))
    else:
        job.end_task(A, TaskState.CANCELLED, "no room for the file in /work: No space left on device")
    [train] = [request for request in job.operator.role_requests() if request.role == TRAIN]
    assert train.excluded == (frozenset() if is_released else frozenset({A}))
    assert train.count == 3


@pytest.mark.parametrize("counts", [True, False])
async def test_worker_is_excluded_when_it_is_released_twice_and_no_update_counted_between(counts: bool) -> None:
    job = begin(rounds={"update_rounds": 9})
    job.apply(job.operator._membership.release(A, "3 rounds in succession went on without it", job.now))
    job.acquire(A)
    if counts:
        job.train_round(B, 1)
        assert isinstance(job.join(A), RetryAfter)
        await _train_without_a(job)
        assert isinstance(job.join(A), RoundToJoin)
        job.hand_in(*WORKERS)
        await job.finish_round(*WORKERS)
        assert members(job, 2) == names(*WORKERS)
    job.apply(job.operator._membership.release(A, "3 rounds in succession went on without it", job.now))
    assert len(job.named("worker_excluded")) == (0 if counts else 1)


async def test_executors_that_end_after_a_refusal_are_started_again_and_end_no_job() -> None:
    job = begin()
    job.hand_in(*WORKERS)
    for peer in (A, B):
        job.refuse(peer)
        job.end_task(peer, TaskState.FAILED, "the update was refused", 1, ("NaN",))
    assert [found["worker"] for found in job.named("worker_restarted")] == [str(A), str(B)]
    await job.finish_round(C)
    assert members(job, 1) == names(C)
    assert job.outcome is None


# -------------------------------------------------------------------------------------------------------------- workers


async def test_worker_that_is_found_before_anybody_trains_joins_at_once() -> None:
    job = Job(table=job_table())
    job.open()
    job.lease(WORKERS)
    job.acquire(D)
    assert job.join(D).round == 1


async def test_worker_that_comes_back_has_a_number_of_its_own(job: Job) -> None:
    job.lose(A)
    job.acquire(A)
    assert train_config(job.specs[A]).member == 3
    job.hand_in(B)
    assert isinstance(job.join(A), RetryAfter)
    job.hand_in(C)
    await job.finish_round(B, C)
    assert isinstance(job.join(A), RoundToJoin)
    job.hand_in(*WORKERS)
    await job.finish_round(*WORKERS)
    assert members(job, 2) == names(*WORKERS)


async def test_all_workers_follow_one_learning_rate_schedule() -> None:
    schedule = {"learning_rate": 1e-3, "schedule": "cosine-with-warmup"}
    job = begin((A, B), resources={"num_workers": 3, "min_workers": 2}, inner_optimizer=schedule)
    job.acquire(C)
    first, joiner = train_config(job.specs[A]), train_config(job.specs[C])
    assert first.round_steps == joiner.round_steps == 4.0
    assert first.scheduler == joiner.scheduler


async def test_no_worker_joins_before_the_parameter_server_knows_it(job: Job) -> None:
    job.hand_in(*WORKERS)
    await job.finish_round(*WORKERS)
    job.holds_lists = True
    for peer in WORKERS:
        job.lose(peer)
    job.acquire(D)
    assert isinstance(job.join(D), RetryAfter)
    job.holds_lists = False
    job.answer_lists()
    assert isinstance(job.join(D), RoundToJoin)


# ----------------------------------------------------------------------------------------------------- parameter server


async def test_worker_that_has_not_kept_its_update_is_left_out_of_a_round_that_is_not_complete(job: Job) -> None:
    job.hand_in(A, C)
    stated, job.executors[C].sent = job.executors[C].sent, None
    job.lose(SERVER)
    job.acquire(OTHER_SERVER, AGGREGATE)
    job.executors[C].sent = stated
    assert [missing["worker"] for missing in job.named("update_missing")] == [str(C)]
    job.send(A)
    job.hand_in(B)
    await job.finish_round(A, B)
    assert members(job, 1) == names(A, B)


async def test_parameter_server_decides_whether_an_update_that_was_not_kept_has_arrived(job: Job) -> None:
    """The executor of its worker may have been started again since the update arrived."""
    job.hand_in(*WORKERS)
    stated, job.executors[C].sent = job.executors[C].sent, None
    job.lose(SERVER)
    job.acquire(OTHER_SERVER, AGGREGATE)
    job.executors[C].sent = stated
    assert job.named("update_missing") == []
    for peer in WORKERS:
        job.send(peer)
    await job.finish_round(*WORKERS)
    assert members(job, 1) == names(*WORKERS)


async def test_last_outer_update_is_served_to_workers(job: Job) -> None:
    job.hand_in(*WORKERS)
    await job.finish_round(*WORKERS)
    found = job.operator.on_pull_request(job.leases[A], PullRequest(dataset=f"{JOB_ID}/outer-update", index=0))
    assert isinstance(found, PullSource)
    assert job.result.updates[found.source] == job.commits[1][0]


async def test_outer_update_of_a_parameter_server_that_was_replaced_is_refused(job: Job) -> None:
    job.hand_in(*WORKERS)
    old, header = job.leases[SERVER], job.server.step()
    job.lose(SERVER)
    job.acquire(OTHER_SERVER, AGGREGATE)
    target, _ = job.operator.on_push_request(old, header, job.now)
    assert "another peer is the job's parameter server now" in target.reason  # type: ignore[union-attr]
    for peer in WORKERS:
        job.send(peer)
    await job.finish_round(*WORKERS)
    assert job.rounds[0]["term"] == 2


async def test_members_that_a_parameter_server_rejects_replace_it(job: Job) -> None:
    job.server.round = 7
    job.hand_in(*WORKERS)
    assert job.outcome is None
    assert SERVER not in job.leases
    assert [found["worker"] for found in job.named("worker_replaced")] == [str(SERVER)]


@pytest.mark.parametrize("have_merged", [0, 2])
async def test_job_ends_without_a_parameter_server_once_all_rounds_are_recorded(have_merged: int) -> None:
    job = begin(rounds={"update_rounds": 1})
    job.hand_in(*WORKERS)
    assert await job.push() is None
    for peer in WORKERS[:have_merged]:
        assert isinstance(job.merge(peer), Done)
    job.lose(SERVER)
    for peer in WORKERS[:have_merged]:
        job.end_task(peer)
    assert job.leases == {}
    await job.run_background()
    assert job.outcome == "finished"


async def test_worker_that_prepares_does_not_hold_up_the_end_of_the_job() -> None:
    job = begin(rounds={"update_rounds": 1})
    job.lose(C)
    job.hand_in(A)
    job.acquire(D)
    job.hand_in(B)
    await job.finish_round(A, B)
    assert D not in job.leases
    for peer in (A, B, SERVER):
        job.end_task(peer)
    await job.run_background()
    assert job.outcome == "finished"


# ----------------------------------------------------------------------------------------------------------------- data


async def test_job_pauses_while_no_data_node_is_reachable() -> None:
    """No worker counts as late for what it cannot fetch, and the deadlines go on where they stood."""
    job = begin()
    for peer in WORKERS:
        job.train_round(peer, 1)
    job.context.reachable = False
    due = job.operator.next_deadline()
    assert due is not None
    for number in range(200):
        job.now = due + number
        assert job.operator.next_deadline() == job.now
        job.apply(job.operator.on_deadline(job.now))
    [paused] = job.named("paused")
    assert "no data node of dataset" in str(paused["reason"])
    job.context.reachable = True
    job.now += 1
    job.apply(job.operator.on_deadline(job.now))
    [continued] = job.named("continued")
    assert continued["seconds"] == pytest.approx(200)
    assert job.operator.next_deadline() == pytest.approx(due + 200)
    assert job.named("worker_late") == job.named("worker_suspected") == []
    job.apply(job.operator.on_deadline(due + 200))
    assert job.named("worker_suspected") != []
