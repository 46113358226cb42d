"""The boundary of strategies: what an operator does that leaves out the methods it does not need."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from hypha_proto.ids import PeerId
from hypha_proto.progress import Done, Progress, ProgressResponse
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.strategies.base import (
    CANCEL,
    Effects,
    EndJob,
    JobContext,
    Lease,
    Operator,
    RoleRequest,
    Strategy,
    TaskRef,
    TaskUpdate,
)


class LeastOperator(Operator):
    """Operator with the methods that every operator must define."""

    def role_requests(self) -> Sequence[RoleRequest]:
        return ()

    def on_leases_acquired(self, leases: Sequence[Lease], now: float) -> Effects:
        return ()

    def on_task_update(self, task: TaskRef, update: TaskUpdate, now: float) -> Effects:
        return ()

    def on_training_report(self, task: TaskRef, progress: Progress, now: float) -> tuple[ProgressResponse, Effects]:
        return Done(), ()


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


def test_files_that_an_operator_does_not_expect_are_refused() -> None:
    operator = LeastOperator()
    target, effects = operator.on_push_request(TASK, None, 1.0)
    assert isinstance(target, Refusal)
    assert effects == ()
    found = operator.on_pull_request(TASK, PullRequest(dataset="secret", index=0))
    assert isinstance(found, Refusal)
    assert "'secret'" in found.reason


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
