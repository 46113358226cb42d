"""The boundary of strategies: an operator that leaves out what it does not need, and one that trains on one worker."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import Model, PeersReference, SchedulerReference, TrainConfig
from hypha_proto.training_reports import (
    Acknowledged,
    BatchDone,
    Done,
    OuterStepTaken,
    ReportError,
    RoundMetrics,
    ScheduleUpdate,
    SendingUpdate,
)
from hypha_proto.transfer import OUTER_UPDATE, PSEUDO_GRADIENT, PullRequest, PushHeader, Refusal
from hypha_scheduler.jobs.config import DatasetTable, InnerOptimizerTable, JobTable
from hypha_scheduler.strategies.base import (
    CANCEL,
    Effects,
    EndJob,
    JobContext,
    Lease,
    Operator,
    PushTarget,
    RoleRequest,
    SliceToUse,
    Strategy,
    TaskRef,
    TaskUpdate,
)
from hypha_scheduler.strategies.diloco.independent_training import Training


class LeastOperator(Operator):
    """Operator with the methods that every operator must define."""

    def role_requests(self) -> Sequence[RoleRequest]:
        return ()

    def on_leases_acquired(self, leases: Sequence[Lease], now: float) -> Effects:
        return ()

    def on_task_update(self, task: TaskRef, update: TaskUpdate, now: float) -> Effects:
        return ()


WORKER = PeerId(bytes.fromhex("002408011220") + bytes(32))
TASK = TaskRef("a", Lease(uuid.uuid4(), WORKER, "train", 1.0))


def test_methods_that_an_operator_leaves_out_do_nothing() -> None:
    operator = LeastOperator()
    assert operator.on_lease_lost(TASK.lease, "gone", 1.0) == ()
    assert operator.on_lease_draining(TASK.lease, 60.0, 1.0) == ()
    assert operator.next_slice(TASK, "digits", 1.0) is None
    assert operator.on_push_complete(TASK, None, Path("x"), "", 1.0) == ()
    assert operator.on_message(None, "notice", object(), 1.0) == (None, ())
    assert operator.on_effect_result("tag", None, 1.0) == ()
    assert operator.next_deadline() is None
    assert operator.on_deadline(1.0) == ()
    assert operator.summary({}) == {}


def test_files_and_reports_that_an_operator_does_not_expect_are_refused() -> None:
    operator = LeastOperator()
    target, effects = operator.on_push_request(TASK, None, 1.0)
    assert isinstance(target, Refusal)
    assert effects == ()
    found = operator.on_pull_request(TASK, PullRequest(dataset="secret", index=0))
    assert isinstance(found, Refusal)
    assert "'secret'" in found.reason
    answer, effects = operator.on_training_report(TASK, SendingUpdate(), 1.0)
    assert isinstance(answer, ReportError)
    assert effects == ()


def test_a_job_fails_without_its_workers_or_if_its_owner_cancels_it() -> None:
    operator = LeastOperator()
    assert operator.on_allocation_timeout("train", "0 of 3 suitable", 1.0) == (EndJob(failure="0 of 3 suitable"),)
    [end] = operator.on_command(CANCEL, 1.0)
    assert end == EndJob(failure="its owner cancelled it")
    with pytest.raises(ValueError, match="no command 'pause'; known: cancel"):
        operator.on_command("pause", 1.0)


def test_a_strategy_without_methods_of_its_own_serves_none() -> None:
    class LeastStrategy(Strategy):
        job_table = JobTable

        def open(
            self, job: Any, context: JobContext, journal: Sequence[Mapping[str, Any]]
        ) -> AbstractAsyncContextManager[Operator]:
            return nullcontext(LeastOperator())

    assert LeastStrategy().rpc_methods == ()


HERE = PeerId.from_public_key(bytes(32))
TARGET = PushTarget(Path("/runs/job/updates/a.safetensors"), 100)


def training(samples: int = 40, batch_size: int = 16) -> Training:
    return Training(samples, batch_size, TARGET)


def header(kind: str) -> PushHeader:
    attempt = AttemptId(uuid.UUID(int=7), "fast", 0)
    return PushHeader(attempt, 1, kind, "update-1.safetensors", 10, "blake3:" + "0" * 64, HERE)


def train_config(optimizer: InnerOptimizerTable) -> TrainConfig:
    context: Any = SimpleNamespace(job_id=uuid.UUID(int=7), scheduler=HERE)
    source = SchedulerReference(peer=HERE, dataset="model")
    model = Model(task="image-classification", artifact=source, input_names=())
    spec = training().spec(context, "train/kind", model, DatasetTable(dataset="digits"), optimizer)
    assert spec.executor == "train/kind"
    assert spec.training is not None
    return spec.training


def test_the_update_goes_to_the_scheduler_and_nobody_sends_outer_updates() -> None:
    config = train_config(InnerOptimizerTable(learning_rate=0.5))
    assert isinstance(config.updates, PeersReference)
    assert isinstance(config.results, PeersReference)
    assert (config.updates.peers, config.results.peers) == ((HERE,), ())
    assert config.data == SchedulerReference(peer=HERE, dataset="digits")
    assert (config.batch_size, config.optimizer.learning_rate, config.scheduler) == (16, 0.5, None)


def test_the_schedule_covers_all_batches_the_last_of_which_may_be_smaller() -> None:
    config = train_config(InnerOptimizerTable(learning_rate=0.5, schedule="linear-with-warmup", warmup_steps=1))
    schedule: Any = config.scheduler
    assert schedule.training_steps == 3


def test_the_executor_is_told_how_many_batches_are_left() -> None:
    attempt = training()
    found = [attempt.on_training_report(BatchDone(batch_size=size)) for size in (16, 8, 16, 16)]
    assert found == [ScheduleUpdate(counter=counter) for counter in (2, 1, 0, 0)]


def test_reports_of_the_end_are_answered_and_others_refused() -> None:
    attempt = training()
    assert attempt.on_training_report(SendingUpdate()) == Acknowledged()
    assert attempt.on_training_report(RoundMetrics(round=1, metrics={"loss": 0.5})) == Done()
    assert attempt.loss == 0.5
    assert attempt.on_training_report(OuterStepTaken()) == ReportError()


@pytest.mark.parametrize(
    ("loss", "update", "is_complete"),
    [(0.5, "a", True), (0.5, "", False), (math.nan, "a", False), (math.inf, "a", False), (None, "a", False)],
)
def test_it_is_complete_with_an_update_and_a_finite_loss(loss: float | None, update: str, is_complete: bool) -> None:
    attempt = training()
    assert not attempt.is_complete
    attempt.on_training_report(RoundMetrics(round=1, metrics={} if loss is None else {"loss": loss}))
    attempt.update = update
    assert attempt.is_complete is is_complete


def test_slices_come_in_their_order_one_pass_after_another() -> None:
    attempt = training()
    found = [attempt.next_slice(2) for _ in range(3)]
    assert found == [SliceToUse(0, 0), SliceToUse(0, 1), SliceToUse(1, 0)]


def test_only_the_update_may_be_pushed() -> None:
    assert training().on_push_request(header(PSEUDO_GRADIENT)) == TARGET
    assert isinstance(training().on_push_request(header(OUTER_UPDATE)), Refusal)
