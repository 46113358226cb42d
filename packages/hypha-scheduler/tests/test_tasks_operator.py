"""The operator of ``type = "tasks"`` as a pure state machine: calls in, effects out."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hypha_net.errors import ContentMismatchError, NoSpaceError, RequestError, UnsupportedProtocolError
from hypha_net.transfer import PullSource
from hypha_proto.ids import PeerId
from hypha_proto.task_resources import (
    PUSH_OUTPUT,
    RELEASE_OUTPUTS,
    FailedHolder,
    LocateResource,
    ResourceLocation,
)
from hypha_proto.tasks import StoredFile, StoredOutput, TaskProgress
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.strategies.base import (
    Effect,
    Effects,
    EmitEvent,
    EndJob,
    Lease,
    RunInBackground,
    SendMessage,
    StartTask,
    StopTask,
    TaskEnded,
    TaskNotStarted,
    TaskProgressed,
    TaskReady,
    TaskRef,
    TaskState,
    WriteJournal,
)
from hypha_scheduler.strategies.tasks import records
from hypha_scheduler.strategies.tasks.config import TasksJob
from hypha_scheduler.strategies.tasks.graph import TaskGraph
from hypha_scheduler.strategies.tasks.operator import TasksOperator
from hypha_scheduler.strategies.tasks.retries import LOST_TASK
from hypha_scheduler.strategies.tasks.strategy import TasksStrategy

DIGEST = "blake3:" + "0" * 64
LOST = TaskEnded(TaskState.FAILED, "no answer")
AnyEffect = TypeVar("AnyEffect", bound=Effect)


class Context:
    """Part of `JobContext` that the operator uses."""

    job_id = uuid.UUID(int=1)
    scheduler = PeerId.from_public_key(b"\xff" * 32)

    def __init__(self, directory: Path = Path("/runs/job"), first_attempt: int = 0) -> None:
        self.directory = directory
        self.first_attempt = first_attempt


def a_task(name: str, *inputs: str, **changes: Any) -> dict[str, Any]:
    """Return a task with the output ``o`` that uses that of others."""
    resources = [{"name": other, "result": {"task": other, "output": "o"}} for other in inputs]
    return {"name": name, "driver": {"x": {}}, "resources": resources, "outputs": {"o": "o"}, "keep": []} | changes


def operator(
    *tasks: dict[str, Any], journal: Sequence[Effect] = (), directory: Path = Path("/runs/job"), **job: Any
) -> TasksOperator:
    """Return an operator, with the journal that another has written."""
    graph = TaskGraph(TasksJob.model_validate({"type": "tasks", "tasks": list(tasks)} | job))
    written = [{"record": e.kind, **e.fields} for e in journal if isinstance(e, WriteJournal)]
    context: Any = Context(directory, len(written))
    return TasksOperator(graph, context, records.read(written, graph.digest()))


def a_lease(number: int = 1, peer: int | None = None, role: str = "x") -> Lease:
    return Lease(uuid.UUID(int=number), a_peer(peer or number), role, 1.0)


def a_peer(number: int) -> PeerId:
    return PeerId.from_public_key(bytes([number]) * 32)


def of_kind(kind: type[AnyEffect], effects: Effects) -> list[AnyEffect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def started(effects: Effects) -> dict[str, TaskRef]:
    """Return what was started, by task."""
    return {start.task.name: start.task for start in of_kind(StartTask, effects)}


def failure(effects: Effects) -> str:
    [end] = of_kind(EndJob, effects)
    return str(end.failure)


def done(task: TaskRef, *, files: int = 1) -> TaskEnded:
    """Return the end of an attempt that has made its output."""
    path = "" if files == 1 else "part"
    stored = tuple(StoredFile(path=f"{path}{n}" if path else "", size=10, digest=DIGEST) for n in range(files))
    return TaskEnded(
        TaskState.FINISHED, outputs=(StoredOutput(name="o", dataset=f"{task.name}-{task.attempt}", files=stored),)
    )


def one_task(**changes: Any) -> tuple[TasksOperator, TaskRef]:
    """Return an operator whose only task a runs on the first lease."""
    op = operator(a_task("a", **changes))
    return op, started(op.on_leases_acquired([a_lease()], 0.0))["a"]


def on_two_leases(*tasks: dict[str, Any], **job: Any) -> tuple[TasksOperator, dict[str, TaskRef]]:
    """Return an operator whose first tasks run on two leases, and these by their names."""
    op = operator(*tasks, **job)
    return op, started(op.on_leases_acquired([a_lease(1), a_lease(2)], 0.0))


def until_started(op: TasksOperator, effects: Effects) -> tuple[TaskRef, float]:
    """Let time pass until task a starts; return the attempt and the time, 0 if it starts at once."""
    now = 0.0
    while "a" not in started(effects):
        at = op.next_deadline()
        assert at is not None
        now = at
        effects = op.on_deadline(now)
    return started(effects)["a"], now


def finish(op: TasksOperator, task: TaskRef, now: float = 1.0) -> Effects:
    return op.on_task_update(task, done(task), now)


def locate(op: TasksOperator, task: TaskRef, resource: str, *failed: FailedHolder) -> tuple[ResourceLocation, Effects]:
    request = LocateResource(attempt=task.id_in(op.context.job_id), resource=resource, failures=failed)
    return op.on_locate(task, request, 2.0)


def unavailable(
    op: TasksOperator, task: TaskRef, resource: str, *failed: FailedHolder
) -> tuple[ResourceLocation, Effects]:
    """Report that holders lack a result, which the scheduler finds, too; return what it then says and does."""
    answer, effects = locate(op, task, resource, *failed)
    for fetch in of_kind(RunInBackground, effects):
        effects += op.on_effect_result(fetch.tag, RequestError("it has no such file"), 2.0)
        answer, more = locate(op, task, resource)
        effects += more
    return answer, effects


def pulled_from(answer: ResourceLocation) -> list[tuple[str, tuple[PeerId, ...]]]:
    assert answer.pull is not None, answer
    return [(file.dataset, file.peers) for file in answer.pull.files]


def released(effects: Effects) -> list[tuple[PeerId, tuple[str, ...]]]:
    sent = of_kind(SendMessage, effects)
    return [(send.peer, send.message.datasets) for send in sent if send.method is RELEASE_OUTPUTS]


def demand(op: TasksOperator) -> dict[str, int]:
    assert not any(request.distinct_peers for request in op.role_requests())
    return {request.role: request.count for request in op.role_requests()}


def chain(
    first: Lease, second: Lease | None = None, directory: Path = Path("/runs/job"), **job: Any
) -> tuple[TasksOperator, TaskRef, Effects]:
    """Return an operator whose task a has finished on the first lease and whose b runs, on the second if there is one.

    With `second`, a third task keeps the first lease busy.
    """
    tasks = [a_task("a"), a_task("b", "a")]
    if second is None:
        op = operator(*tasks, directory=directory, **job)
        a = started(op.on_leases_acquired([first], 0.0))["a"]
        effects = finish(op, a)
        return op, started(effects)["b"], effects
    op = operator(*tasks, a_task("c"), **job)
    a = started(op.on_leases_acquired([first], 0.0))["a"]
    op.on_lease_draining(first, 100.0, 0.5)  # nothing more starts there, and what it does is done
    effects = finish(op, a)
    effects += op.on_leases_acquired([second], 1.5)
    return op, started(effects)["b"], effects


# --------------------------------------------------------------------------------------------------------------- leases


def test_a_job_begins_with_the_first_lease_and_wants_one_for_each_task_that_can_run() -> None:
    op = operator(a_task("a"), a_task("b", driver={"y": {}}), a_task("c", "a"), a_task("d"), workers=3)
    assert demand(op) == {"x": 2}  # leases of another role are sought when it has begun
    assert all(request.starts_at_minimum and request.minimum == 1 for request in op.role_requests())
    op.on_leases_acquired([a_lease()], 0.0)
    assert demand(op) == {"x": 2, "y": 1}


def test_a_task_runs_where_its_input_is() -> None:
    op, first = on_two_leases(a_task("a"), a_task("b"), a_task("earlier"), a_task("b2", "b"))
    assert started(finish(op, first["b"])) == {"b2": TaskRef("b2", first["b"].lease, 1)}
    assert started(finish(op, first["a"])) == {"earlier": TaskRef("earlier", first["a"].lease, 1)}


def test_the_spec_says_what_to_run_and_the_lease_stays() -> None:
    op = operator(a_task("a", count=2, driver={"shell/x": {"k": 1}}))
    [start] = of_kind(StartTask, op.on_leases_acquired([a_lease(role="shell/x")], 0.0))
    assert (start.task.name, start.task.attempt) == ("a[0]", 1)
    assert (start.spec.executor, start.spec.settings, start.spec.index, start.spec.count) == (
        "shell/x",
        '{"k": 1}',
        0,
        2,
    )


def test_a_job_whose_workers_are_missing_fails_unless_something_runs() -> None:
    op = operator(a_task("a"), a_task("b", driver={"y": {}}))
    assert failure(operator(a_task("a")).on_allocation_timeout("x", "0 of 1 suitable", 60.0)) == "0 of 1 suitable"
    op.on_leases_acquired([a_lease()], 0.0)
    assert op.on_allocation_timeout("y", "0 of 1 suitable", 60.0) == ()


# ------------------------------------------------------------------------------------------------------------- attempts


def test_a_task_that_keeps_failing_fails_the_job_with_its_reason_and_last_lines() -> None:
    op, task = one_task(retries=1)
    end = TaskEnded(TaskState.FAILED, "exit code 1", 1, ("Traceback", "ValueError: x"))
    effects = op.on_task_update(task, end, 1.0)
    assert [event.name for event in of_kind(EmitEvent, effects)] == ["task_retry"]
    again, _ = until_started(op, effects)
    assert again.attempt == task.attempt + 1
    effects = op.on_task_update(again, end, 5.0)
    assert of_kind(EmitEvent, effects) == [], "it is not tried again"
    said = failure(effects)
    assert said == "task a failed after 2 attempts: exit code 1; last lines: Traceback; ValueError: x"


def test_a_lost_lease_does_not_count_as_failure_but_a_task_that_loses_many_fails_the_job() -> None:
    op = operator(a_task("a", retries=0))
    effects: Effects = ()
    for number in range(1, LOST_TASK.times + 2):
        lease = a_lease(number)
        task = started(op.on_leases_acquired([lease], 0.0))["a"]
        assert task.attempt == number
        assert not of_kind(EndJob, effects)
        op.on_lease_lost(lease, "no answer", 1.0)
        effects = op.on_task_update(task, LOST, 1.0)
    assert "task a was lost 11 times, the last time because its lease was lost: no answer" in failure(effects)


def test_what_a_worker_gives_back_starts_again_after_a_pause_that_grows() -> None:
    op, task = one_task(retries=0)
    pauses = []
    now = 0.0
    for _ in range(4):
        ended = now
        effects = op.on_task_update(task, TaskEnded(TaskState.CANCELLED, "its disk is full"), ended)
        assert not started(effects)
        task, now = until_started(op, effects)
        pauses.append(now - ended)
    assert pauses == [3.5, 1.0, 2.0, 4.0], "at first another worker is sought after it"


def test_a_lease_that_was_released_meanwhile_costs_no_loss() -> None:
    op, first = on_two_leases(a_task("a"), a_task("b"), a_task("c", "a", "b"), a_task("d", "c"), a_task("e", "c"))
    finish(op, first["b"])  # c waits for a: the newest lease is not needed
    c = started(finish(op, first["a"]))["c"]
    assert c.lease == a_lease(1)
    begun = started(finish(op, c))
    assert begun["d"].lease == a_lease(1)
    assert begun["e"].lease == a_lease(2), "it may be there still"
    assert not started(op.on_task_update(begun["e"], TaskNotStarted("its lease is no longer held"), 2.0))
    assert op.instances.by_name["e"].losses == 0
    assert started(op.on_leases_acquired([a_lease(3)], 3.0))["e"].lease == a_lease(3)


def test_an_attempt_that_its_worker_does_not_end_is_stopped_and_has_failed() -> None:
    op, task = one_task(timeout=100.0, retries=0)
    assert op.next_deadline() == 3600.0, "it fetches"
    for _ in range(100):
        op.on_task_update(task, TaskReady(), 5.0)
    assert op.next_deadline() == 135.0
    [stop] = of_kind(StopTask, op.on_deadline(135.0))
    assert (stop.task, stop.keep_lease) == (task, False)
    said = failure(op.on_task_update(task, TaskEnded(TaskState.CANCELLED, stop.reason), 136.0))
    assert "its worker did not end it after its timeout of 100 s" in said


def test_an_attempt_that_fetches_for_ever_is_stopped_and_has_failed() -> None:
    op, task = one_task(fetch_timeout=50.0, retries=0)
    assert op.on_deadline(49.0) == ()
    [stop] = of_kind(StopTask, op.on_deadline(50.0))
    assert (stop.task, stop.keep_lease) == (task, False)
    said = failure(op.on_task_update(task, TaskEnded(TaskState.CANCELLED, stop.reason), 51.0))
    assert "failed after 1 attempt: its executor did not start within its fetch_timeout of 50 s" in said


def test_an_attempt_whose_executor_runs_or_whose_input_is_made_again_may_take_longer() -> None:
    op, first = on_two_leases(a_task("a"), a_task("b", "a", fetch_timeout=50.0), a_task("c", fetch_timeout=50.0))
    op.on_task_update(first["c"], TaskReady(), 5.0)
    b = started(finish(op, first["a"]))["b"]
    unavailable(op, b, "a", FailedHolder(peer=a_peer(1), reason="x", is_permanent=True))
    assert of_kind(StopTask, op.on_deadline(55.0)) == []
    [stop] = of_kind(
        StopTask, finish(op, started(op.on_leases_acquired([a_lease(3)], 60.0))["a"]) + op.on_deadline(110.0)
    )
    assert stop.task == b


def test_progress_is_told_at_most_every_few_seconds_and_the_last_with_the_end() -> None:
    op, task = one_task()

    def told(effects: Effects) -> list[dict[str, object]]:
        found = events(effects, "task_progress")
        assert all(fields["worker"] == str(a_peer(1)) for fields in found)
        return [{key: fields.get(key) for key in ("fraction", "message", "metrics")} for fields in found]

    said: list[dict[str, object]] = []
    for tenth in range(120):
        progress = TaskProgress(fraction=tenth / 120, metrics={"loss": 2.0})
        said += told(op.on_task_update(task, TaskProgressed(progress), tenth / 10))
    assert [entry["fraction"] for entry in said] == [0.0, 50 / 120, 100 / 120]
    assert said[0]["metrics"] == {"loss": 2.0}
    op.on_task_update(task, TaskProgressed(TaskProgress(fraction=1.0, message="written")), 12.0)
    assert told(finish(op, task, 12.5)) == [{"fraction": 1.0, "message": "written", "metrics": None}]


def test_what_is_said_about_an_older_attempt_changes_nothing() -> None:
    op, task = one_task()
    again, _ = until_started(op, op.on_task_update(task, TaskEnded(TaskState.FAILED, "x"), 1.0))
    assert finish(op, task) == ()
    answer, effects = locate(op, task, "x")
    assert answer.gone is not None
    assert effects == ()
    finish(op, again)
    assert op.instances.by_name["a"].worker == a_peer(1)


# ------------------------------------------------------------------------------------------- workers on which all fails


FAILED = TaskEnded(TaskState.FAILED, "exit code 1", 1)
GIVEN_BACK = TaskEnded(TaskState.CANCELLED, "its disk is full")


def excluded(op: TasksOperator) -> set[PeerId]:
    return {peer for request in op.role_requests() for peer in request.excluded}


def events(effects: Effects, name: str) -> list[Any]:
    return [event.fields for event in of_kind(EmitEvent, effects) if event.name == name]


@pytest.mark.parametrize("end", [FAILED, GIVEN_BACK, TaskNotStarted("no answer")])
def test_what_failed_starts_at_another_worker_that_is_held_however_long_that_is_busy(end: Any) -> None:
    op, first = on_two_leases(a_task("a"), a_task("b"))
    assert not started(op.on_task_update(first["a"], end, 1.0))
    for hour in range(1, 5):
        assert not started(op.on_deadline(3600.0 * hour))
    assert started(finish(op, first["b"], 20_000.0))["a"].lease == a_lease(2)


def test_what_failed_waits_until_another_worker_is_sought_and_no_longer() -> None:
    op = operator(a_task("a"), workers=1)
    task = started(op.on_leases_acquired([a_lease(1)], 0.0))["a"]
    effects = op.on_task_update(task, FAILED, 1.0)
    assert not started(effects)
    assert excluded(op) == {a_peer(1)}
    assert demand(op) == {"x": 1}
    again, at = until_started(op, effects)
    assert (again.lease, at) == (a_lease(1), 4.0), "there is nobody else"
    assert excluded(op) == set()
    last, _ = until_started(op, op.on_task_update(again, FAILED, 5.0))
    assert last.lease == a_lease(1), "and nobody is sought again at once"


def test_a_worker_at_which_three_tasks_fail_in_a_row_is_excluded_for_a_minute() -> None:
    op = operator(*(a_task(f"t{n}") for n in range(9)))
    running = started(op.on_leases_acquired([a_lease(1), a_lease(2)], 0.0))
    at_bad = next(task for task in running.values() if task.lease == a_lease(1))
    said: list[Any] = []
    for now in (1.0, 2.0, 3.0):
        effects = op.on_task_update(at_bad, FAILED, now)
        said += events(effects, "worker_excluded")
        if begun := started(effects):
            [at_bad] = begun.values()
    assert said == [{"worker": str(a_peer(1)), "role": "x", "failures": 3, "seconds": 60.0, "reason": "exit code 1"}]
    assert not begun, "though its lease is free and there is work"
    assert excluded(op) == {a_peer(1)}
    [found] = op.summary({})["excluded"]  # type: ignore[misc]
    assert found == {"worker": str(a_peer(1)), "role": "x", "times": 1, "reason": "exit code 1"}
    assert op.next_deadline() == 63.0
    op.on_deadline(63.0)
    assert excluded(op) == set()
    [again] = started(op.on_leases_acquired([a_lease(3, peer=1)], 64.0)).values()
    [exclusion] = events(op.on_task_update(again, FAILED, 65.0), "worker_excluded")
    assert exclusion["seconds"] == 120.0, "one more failure excludes it again"


def test_a_success_in_between_clears_a_worker() -> None:
    op = operator(*(a_task(f"t{n}") for n in range(9)))
    [task] = started(op.on_leases_acquired([a_lease(1)], 0.0)).values()
    said: list[Any] = []
    for end in (FAILED, FAILED, None, FAILED, FAILED):
        effects = op.on_task_update(task, end or done(task), 1.0)
        said += events(effects, "worker_excluded")
        [task] = started(effects).values()
    assert said == []


def test_a_worker_that_fails_again_and_again_at_what_another_can_do_is_excluded() -> None:
    op = operator(a_task("a", retries=9), workers=1)
    task = started(op.on_leases_acquired([a_lease(1)], 0.0))["a"]
    for _ in range(3):
        effects = op.on_task_update(task, FAILED, 1.0)
        assert events(effects, "worker_excluded") == [], "the task may be at fault"
        task, _ = until_started(op, effects)
    op.on_lease_lost(a_lease(1), "no answer", 30.0)
    op.on_task_update(task, LOST, 30.0)
    task = started(op.on_leases_acquired([a_lease(2)], 31.0))["a"]
    [said] = events(finish(op, task, 32.0), "worker_excluded")
    assert (said["worker"], said["failures"]) == (str(a_peer(1)), 4)


def test_an_excluded_worker_is_used_if_there_is_nobody_else() -> None:
    op = operator(*(a_task(f"t{n}") for n in range(4)))
    [task] = started(op.on_leases_acquired([a_lease(1)], 0.0)).values()
    for now in (1.0, 2.0, 3.0):
        effects = op.on_task_update(task, FAILED, now)
        task = next(iter(started(effects).values()), task)
    assert not started(effects)
    at = op.next_deadline()
    assert at == 4.0, "another one is sought since the first failure"
    effects = op.on_deadline(at)
    assert [task.lease for task in started(effects).values()] == [a_lease(1)]
    [used] = events(effects, "excluded_worker_used")
    assert used["worker"] == str(a_peer(1))


def test_a_search_that_times_out_while_workers_are_avoided_does_not_fail_the_job() -> None:
    op, task = one_task()
    op.on_task_update(task, FAILED, 1.0)
    effects = op.on_allocation_timeout("x", "0 of 1 suitable: 1 excluded", 2.0)
    assert started(effects)["a"].lease == a_lease(1)


def test_failures_at_different_workers_use_up_the_retries() -> None:
    op, first = one_task(retries=1)
    op.on_task_update(first, FAILED, 1.0)
    second = started(op.on_leases_acquired([a_lease(2)], 2.0))["a"]
    assert "task a failed after 2 attempts: exit code 1" in failure(op.on_task_update(second, FAILED, 3.0))


@pytest.mark.parametrize("fails_again", [True, False])
def test_a_task_that_failed_only_where_all_fails_gets_one_more_attempt_where_others_finish(fails_again: bool) -> None:
    op, first = on_two_leases(a_task("a", retries=0), a_task("b"), a_task("c"))
    b = started(finish(op, first["b"], 1.0))["c"]
    effects = op.on_task_update(first["a"], FAILED, 2.0)
    assert not of_kind(EndJob, effects)
    again = started(finish(op, b, 3.0))["a"]
    assert again.lease == a_lease(2)
    if fails_again:
        assert "task a failed after 2 attempts" in failure(op.on_task_update(again, FAILED, 4.0))
    else:
        finish(op, again, 4.0)
        assert op.instances.unfinished == 0


# -------------------------------------------------------------------------------------------------------------- outputs


def test_outputs_are_released_together_but_many_or_large_ones_at_once() -> None:
    op = operator(*(a_task(f"t{n}", *([f"t{n - 1}"] if n else ())) for n in range(200)))
    asked, [task] = [], started(op.on_leases_acquired([a_lease()], 0.0)).values()
    for _ in range(100):
        effects = finish(op, task)
        asked += [len(datasets) for _, datasets in released(effects)]
        [task] = started(effects).values()
    assert asked == [64]
    large = StoredOutput(name="o", dataset="large", files=(StoredFile(path="", size=1 << 30, digest=DIGEST),))
    [task] = started(op.on_task_update(task, TaskEnded(TaskState.FINISHED, outputs=(large,)), 1.0)).values()
    [(_, datasets)] = released(finish(op, task))
    assert datasets[-1] == "large"


def test_a_holder_that_does_not_answer_delays_the_end_for_seconds_only() -> None:
    op, b, _ = chain(a_lease())
    finish(op, b, 10.0)
    assert op.next_deadline() == 15.0
    assert of_kind(EndJob, op.on_deadline(15.0)) == [EndJob()]


def test_what_is_kept_is_fetched_at_once_and_two_at_a_time() -> None:
    op = operator(*(a_task(f"a{n}", keep=["o"]) for n in range(3)))
    effects = begun = op.on_leases_acquired([a_lease()], 0.0)
    for _ in range(3):
        [task] = started(begun).values()
        begun = finish(op, task)
        effects += begun
    first, second = of_kind(RunInBackground, effects)
    assert not of_kind(EndJob, effects)
    effects = op.on_effect_result(first.tag, 10, 2.0)
    [third] = of_kind(RunInBackground, effects)
    assert released(effects) == []
    assert released(op.on_deadline(2.5)) == [(a_peer(1), ("a0-1",))]
    [record] = of_kind(WriteJournal, effects)
    assert (record.kind, record.fields["path"]) == ("output_fetched", "/runs/job/results/a0/o")
    op.on_effect_result(second.tag, 10, 2.0)
    op.on_effect_result(third.tag, 10, 2.0)
    assert op.next_deadline() is not None


def test_what_cannot_be_fetched_is_tried_again_and_then_made_again() -> None:
    op, task = one_task(keep=["o"])
    effects = finish(op, task)
    for _ in range(2):
        [fetch] = of_kind(RunInBackground, effects)
        assert not started(op.on_effect_result(fetch.tag, RequestError("no answer"), 2.0))
        at = op.next_deadline()
        assert at is not None
        effects = op.on_deadline(at)
    [fetch] = of_kind(RunInBackground, effects)
    again = started(op.on_effect_result(fetch.tag, RequestError("no answer"), 9.0))["a"]
    assert again.attempt == 2


def test_what_is_not_as_its_worker_reported_is_made_again_at_once() -> None:
    op, task = one_task(keep=["o"])
    [fetch] = of_kind(RunInBackground, finish(op, task))
    effects = op.on_effect_result(fetch.tag, ContentMismatchError("another digest"), 2.0)
    assert started(effects)["a"].attempt == 2
    [lost] = events(effects, "output_lost")
    assert lost["reason"] == "another digest"


@pytest.mark.parametrize("error", [OSError("disk full"), NoSpaceError("disk full")])
def test_a_full_disk_at_the_scheduler_fails_the_job(error: Exception) -> None:
    op, task = one_task(keep=["o"])
    [fetch] = of_kind(RunInBackground, finish(op, task))
    assert "output o of task a cannot be stored: disk full; free space" in failure(
        op.on_effect_result(fetch.tag, error, 2.0)
    )


def test_an_output_that_is_lost_again_and_again_fails_the_job() -> None:
    op, b, _ = chain(a_lease())
    permanent = FailedHolder(peer=a_peer(1), reason="a false digest", is_permanent=True)
    for _ in range(LOST_TASK.times):
        [stop] = of_kind(StopTask, unavailable(op, b, "a", permanent)[1])
        a = started(op.on_task_update(b, TaskEnded(TaskState.CANCELLED, stop.reason), 3.0))["a"]
        b = started(finish(op, a))["b"]
    said = failure(unavailable(op, b, "a", permanent)[1])
    assert said == "output o of task a was lost 11 times: it has no such file"


def test_a_consumer_stays_if_there_is_a_lease_for_what_it_waits_for() -> None:
    op, b, _ = chain(a_lease(1), a_lease(2))
    op.on_leases_acquired([a_lease(3)], 1.6)  # runs c
    c = op.placement.leases[a_lease(3).id]
    assert c.instance is not None
    finish(op, TaskRef("c", a_lease(3), 1))
    op.on_leases_acquired([a_lease(4)], 1.7)
    permanent = FailedHolder(peer=a_peer(1), reason="no such file", is_permanent=True)
    locate(op, b, "a", permanent)
    effects = op.on_effect_result("fetch:1", RequestError("it has no such file"), 2.0)
    answer, more = locate(op, b, "a")
    effects += more
    assert answer.not_yet is not None
    assert started(effects)["a"].attempt == 2
    assert not of_kind(StopTask, effects)


def test_a_holder_that_lives_and_cannot_be_reached_is_asked_to_push() -> None:
    op, b, _ = chain(a_lease(1), a_lease(2))
    unreachable = FailedHolder(peer=a_peer(1), reason="no answer")
    assert locate(op, b, "a")[0].pull is not None
    answer, effects = locate(op, b, "a", unreachable)
    assert answer.pushed is not None
    assert answer.pushed.senders == (a_peer(1),)
    [push] = [send for send in of_kind(SendMessage, effects) if send.method is PUSH_OUTPUT]
    assert push.peer == a_peer(1)
    assert (push.message.to, push.message.delivery) == (a_peer(2), answer.pushed.delivery)
    assert [(file.dataset, file.index, file.name) for file in push.message.files] == [("a-1", 0, "0")]
    assert locate(op, b, "a")[0].pull is not None, "and then pulled again"
    assert locate(op, b, "a", unreachable)[0].pushed is not None
    answer, _ = locate(op, b, "a", unreachable)
    assert answer.not_yet is not None, "after two of each it is made again"


def test_a_job_may_say_that_results_are_pushed() -> None:
    op, b, _ = chain(a_lease(1), a_lease(2), transfer="push")
    answer, effects = locate(op, b, "a")
    assert answer.pushed is not None
    [push] = of_kind(SendMessage, effects)
    op.on_effect_result(push.tag, UnsupportedProtocolError("it does not speak it"), 3.0)
    assert pulled_from(locate(op, b, "a")[0]) == [("a-1", (a_peer(1),))], "what was not pushed is pulled"
    assert locate(op, b, "a", FailedHolder(peer=a_peer(1), reason="no answer"))[0].not_yet is not None


def test_a_worker_that_asks_without_end_makes_no_holder_push_without_end() -> None:
    op, b, _ = chain(a_lease(1), a_lease(2), transfer="push")
    pushes = [push for _ in range(100) for push in of_kind(SendMessage, locate(op, b, "a")[1])]
    assert 1 <= len(pushes) <= 4


def test_a_worker_that_has_the_result_itself_is_told_so_even_if_results_are_pushed() -> None:
    op, b, _ = chain(a_lease(), transfer="push")
    assert pulled_from(locate(op, b, "a")[0]) == [("a-1", (a_peer(1),))]


def test_a_result_of_several_instances_is_a_folder_with_an_entry_for_each() -> None:
    op, first = on_two_leases(a_task("a", count=2), a_task("b", "a"))
    op.on_task_update(first["a[0]"], done(first["a[0]"], files=2), 1.0)
    b = started(finish(op, first["a[1]"]))["b"]
    answer, _ = locate(op, b, "a")
    assert answer.pull is not None
    assert [(file.path, file.dataset, file.index) for file in answer.pull.files] == [
        ("0/part0", "a[0]-1", 0),
        ("0/part1", "a[0]-1", 1),
        ("1", "a[1]-1", 0),
    ]


def test_a_task_that_cannot_be_given_a_result_has_not_failed_and_the_result_is_suspect() -> None:
    op, b, _ = chain(a_lease())
    effects = op.on_task_update(b, TaskEnded(TaskState.FAILED, "a cannot be fetched", resource="a"), 2.0)
    [check] = of_kind(RunInBackground, effects)
    effects = op.on_effect_result(check.tag, RequestError("it has no such file"), 2.1)
    assert until_started(op, effects)[0].attempt == 2, "it is made again"
    assert op.instances.by_name["b"].failures == 0


def test_a_worker_that_three_tasks_cannot_be_given_a_result_at_is_excluded() -> None:
    consumers = ("b", "c", "d")
    op = operator(a_task("a"), *(a_task(name, "a") for name in consumers))
    effects = finish(op, started(op.on_leases_acquired([a_lease()], 0.0))["a"])
    said: list[dict[str, Any]] = []
    for name in consumers:
        assert not said
        task = started(effects)[name]
        effects = op.on_task_update(task, TaskEnded(TaskState.FAILED, "a cannot be fetched", resource="a"), 2.0)
        said += events(effects, "worker_excluded")
    assert [exclusion["worker"] for exclusion in said] == [str(a_peer(1))]


def test_a_resource_of_another_kind_that_cannot_be_fetched_is_a_failure() -> None:
    op, task = one_task(resources=[{"name": "u", "uri": "https://x/"}], retries=0)
    said = failure(op.on_task_update(task, TaskEnded(TaskState.FAILED, "u: not found", resource="u"), 1.0))
    assert "task a failed after 1 attempt: u: not found" in said


def test_a_result_of_too_many_files_fails_the_job() -> None:
    op = operator(a_task("a"), a_task("b", "a"))
    a = started(op.on_leases_acquired([a_lease()], 0.0))["a"]
    b = started(op.on_task_update(a, done(a, files=4001), 1.0))["b"]
    answer, effects = locate(op, b, "a")
    assert answer.gone is not None
    said = failure(effects)
    assert said == "task b uses o of a, which has 4001 files, over the limit of 4000; pack them into an archive"


def test_other_resources_are_not_located_here() -> None:
    op, b, _ = chain(a_lease())
    assert locate(op, b, "nothing")[0].gone is not None


# ---------------------------------------------------------------------------------------------------------------- drain


def test_a_result_is_not_made_again_because_one_worker_says_that_it_cannot_be_had() -> None:
    op, b, begun = chain(a_lease(1), a_lease(2))
    false = FailedHolder(peer=a_peer(1), reason="no such file", is_permanent=True)
    answer, effects = locate(op, b, "a", false)
    assert answer.not_yet is not None
    assert not started(effects)
    [check] = of_kind(RunInBackground, begun)  # the worker drains: it is fetched anyway
    effects = op.on_effect_result(check.tag, 10, 3.0)
    assert not events(effects, "output_lost")
    assert locate(op, b, "a")[0].pushed is not None
    assert pulled_from(locate(op, b, "a")[0]) == [("a-1", (a_peer(1), op.context.scheduler))], "or from the copy"
    assert op.instances.by_name["a"].attempts == 1


def test_a_result_that_two_workers_cannot_get_is_made_again_at_once() -> None:
    op = operator(a_task("a"), a_task("b", "a"), a_task("c", "a"))
    a = started(op.on_leases_acquired([a_lease(1)], 0.0))["a"]
    op.on_lease_draining(a_lease(1), 100.0, 0.5)
    finish(op, a)
    op.collection.end("fetch:1")
    first = started(op.on_leases_acquired([a_lease(2), a_lease(3)], 1.0))
    failed = FailedHolder(peer=a_peer(1), reason="no such file", is_permanent=True)
    assert not events(locate(op, first["b"], "a", failed)[1], "output_lost")
    assert events(locate(op, first["c"], "a", failed)[1], "output_lost")


def test_a_worker_that_drains_gets_nothing_more_and_its_outputs_are_brought_here(tmp_path: Path) -> None:
    op = operator(a_task("a"), a_task("b", "a"), a_task("c"), directory=tmp_path)
    a = started(op.on_leases_acquired([a_lease(1)], 0.0))["a"]
    [stop] = of_kind(StopTask, op.on_lease_draining(a_lease(1), 20.0, 0.5))
    assert (stop.task, stop.keep_lease, stop.drain_seconds) == (a, True, 20.0)
    effects = finish(op, a)
    assert not started(effects)
    assert demand(op) == {"x": 3}, "the lease that drains does not count"
    [fetch] = of_kind(RunInBackground, effects)
    op.on_effect_result(fetch.tag, 10, 2.0)
    op.on_lease_lost(a_lease(1), "it has ended", 3.0)
    b = started(op.on_leases_acquired([a_lease(2)], 4.0))["b"]
    assert pulled_from(locate(op, b, "a")[0]) == [("a-1", (a_peer(1), op.context.scheduler))]
    answer, _ = locate(op, b, "a", FailedHolder(peer=a_peer(1), reason="no answer"))
    assert pulled_from(answer) == [("a-1", (op.context.scheduler,))]
    source = op.on_pull_request(b, PullRequest(dataset="a-1", index=0))
    assert isinstance(source, PullSource)
    assert source.source == tmp_path / "copies" / "a" / "o"
    assert isinstance(op.on_pull_request(b, PullRequest(dataset="a-1", index=1)), Refusal)
    assert isinstance(op.on_pull_request(b, PullRequest(dataset="a-2", index=0)), Refusal)


def test_a_worker_cannot_replace_a_copy_by_storing_an_output_under_its_name(tmp_path: Path) -> None:
    op, first = on_two_leases(
        a_task("a", keep=["o"]), a_task("b", keep=["o"]), a_task("c", "a", "b"), directory=tmp_path
    )
    fetches = of_kind(RunInBackground, finish(op, first["a"]))
    false = StoredOutput(name="o", dataset="a-1", files=(StoredFile(path="", size=1, digest=DIGEST),))
    effects = op.on_task_update(first["b"], TaskEnded(TaskState.FINISHED, outputs=(false,)), 1.0)
    c = started(effects)["c"]
    for fetch in (*fetches, *of_kind(RunInBackground, effects)):
        op.on_effect_result(fetch.tag, 10, 2.0)
    found = op.on_pull_request(c, PullRequest(dataset="a-1", index=0))
    assert isinstance(found, PullSource)
    assert found.source == tmp_path / "results" / "a" / "o"


def test_a_copy_that_cannot_be_had_is_made_again(tmp_path: Path) -> None:
    op, b, _ = chain(a_lease(), directory=tmp_path)
    [fetch] = of_kind(RunInBackground, op.on_lease_draining(a_lease(), 20.0, 2.0))
    op.on_effect_result(fetch.tag, 10, 3.0)
    op.on_task_update(b, TaskEnded(TaskState.CANCELLED, "drained"), 4.0)
    b = started(op.on_leases_acquired([a_lease(2)], 5.0))["b"]
    gone = [FailedHolder(peer=peer, reason="x", is_permanent=True) for peer in (a_peer(1), op.context.scheduler)]
    assert pulled_from(locate(op, b, "a", *gone)[0]) == [("a-1", (op.context.scheduler,))]
    assert locate(op, b, "a", *gone)[0].not_yet is not None


def test_an_attempt_that_a_drain_ends_is_no_loss() -> None:
    op, a = one_task(retries=0)
    op.on_lease_draining(a_lease(1), 20.0, 0.5)
    op.on_task_update(a, TaskEnded(TaskState.CANCELLED, "drained"), 20.0)
    assert started(op.on_leases_acquired([a_lease(2)], 21.0))["a"].attempt == 2
    assert (op.instances.by_name["a"].losses, op.instances.by_name["a"].failures) == (0, 0)


# -------------------------------------------------------------------------------------------------------------- restart


def test_a_restarted_job_does_not_run_again_what_has_finished() -> None:
    tasks = [a_task("a"), a_task("b", "a", retries=1)]
    first = operator(*tasks)
    journal = first.on_start(0.0)
    a = started(first.on_leases_acquired([a_lease(1)], 0.0))["a"]
    effects = finish(first, a)
    journal += effects
    b = started(effects)["b"]
    journal += first.on_task_update(b, TaskEnded(TaskState.FAILED, "x"), 1.5)
    second = operator(*tasks, journal=journal)
    journal += second.on_start(0.0)
    again = started(second.on_leases_acquired([a_lease(2)], 0.0))
    assert again.keys() == {"b"}
    assert again["b"].attempt > b.attempt
    assert pulled_from(locate(second, again["b"], "a")[0]) == [("a-1", (a_peer(1),))]
    answer, effects = locate(second, again["b"], "a", FailedHolder(peer=a_peer(1), reason="no answer"))
    assert answer.not_yet is not None, "its holder was not seen since: it is tried once"
    journal += effects
    third = operator(*tasks, journal=journal)
    assert list(started(third.on_leases_acquired([a_lease(3)], 0.0))) == ["a"]
    [stop] = of_kind(StopTask, effects)
    a = started(second.on_task_update(again["b"], TaskEnded(TaskState.CANCELLED, stop.reason), 3.0))["a"]
    b = started(finish(second, a))["b"]
    effects = second.on_task_update(b, TaskEnded(TaskState.FAILED, "x"), 5.0)
    assert failure(effects) == "task b failed after 2 attempts: x"


def test_a_journal_of_other_tasks_is_refused() -> None:
    journal = operator(a_task("a")).on_start(0.0)
    with pytest.raises(JobFailedError, match="the journal is of another list of tasks; submit this one as a new job"):
        operator(a_task("b"), journal=journal)


@pytest.mark.parametrize("missing", ["task", "worker", "outputs", "attempts"])
def test_a_malformed_record_is_refused(missing: str) -> None:
    op = operator(a_task("a"), a_task("b", "a"))
    journal = op.on_start(0.0)
    task = started(op.on_leases_acquired([a_lease(1)], 0.0))["a"]
    [record] = of_kind(WriteJournal, finish(op, task))
    spoilt = WriteJournal(record.kind, {name: value for name, value in record.fields.items() if name != missing})
    with pytest.raises(JobFailedError, match="is malformed"):
        operator(a_task("a"), a_task("b", "a"), journal=[*journal, spoilt])


def test_a_restarted_job_in_which_all_was_done_ends() -> None:
    op = operator(a_task("a"))
    journal = op.on_start(0.0)
    task = started(op.on_leases_acquired([a_lease(1)], 0.0))["a"]
    journal += finish(op, task)
    assert of_kind(EndJob, operator(a_task("a"), journal=journal).on_start(0.0)) == [EndJob()]


# ------------------------------------------------------------------------------------------------------------ the rest


def test_its_owner_cancels_a_job_and_holders_are_told() -> None:
    op, _, _ = chain(a_lease())
    with pytest.raises(ValueError, match="jobs of this type have no command"):
        op.on_command("pause", 2.0)
    effects = op.on_command("cancel", 2.0)
    assert released(effects) == [(a_peer(1), ("a-1",))]
    assert failure(effects) == "its owner cancelled it"


def test_the_result_lists_tasks_in_the_users_order_with_what_they_made() -> None:
    op = operator(a_task("b", "a", keep=["o"]), a_task("a"), name="mine")
    a = started(op.on_leases_acquired([a_lease()], 0.0))["a"]
    b = started(finish(op, a, 2.5))["b"]
    [fetch] = of_kind(RunInBackground, op.on_task_update(b, done(b, files=2), 4.0))
    op.on_effect_result(fetch.tag, 20, 5.0)
    worker = {"attempts": 1, "failures": 0, "losses": 0, "worker": str(a_peer(1))}
    files = [{"path": f"part{n}", "size": 10, "digest": DIGEST} for n in range(2)]
    of_b = {"o": {"path": "/runs/job/results/b/o", "size": 20, "files": files}}
    of_a = {"o": {"path": None, "size": 10, "digest": DIGEST}}
    summary = op.summary({})
    assert summary["tasks"] == [
        {"task": "b", **worker, "seconds": 1.5, "outputs": of_b},
        {"task": "a", **worker, "seconds": 2.5, "outputs": of_a},
    ]
    assert summary["totals"] == {
        "tasks": 2,
        "attempts": 2,
        "failures": 0,
        "losses": 0,
        "outputs": 2,
        "bytes": 30,
        "bytes_received": 0,
    }


def lines_run(call: Callable[[], Effects]) -> tuple[int, Effects]:
    """Return how many lines of Python a call runs, and its result: a measure of work that no other process disturbs."""
    count = 0

    def trace(_frame: object, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        effects = call()
    finally:
        sys.settrace(before)
    return count, effects


def test_the_end_of_one_of_many_consumers_costs_no_look_at_all_of_them() -> None:
    op = operator(a_task("a"), *(a_task(f"t{n:04}", "a") for n in range(1000)), workers=1)
    task = started(finish(op, started(op.on_leases_acquired([a_lease()], 0.0))["a"])).popitem()[1]
    counts = []
    for _ in range(900):
        count, effects = lines_run(partial(finish, op, task))
        counts.append(count)
        [task] = started(effects).values()
    assert max(counts[-100:]) < 2 * max(counts[:100])


@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_the_start_says_where_results_are_unless_they_are_pushed(transfer: str) -> None:
    op = operator(a_task("a"), a_task("b", "a"), transfer=transfer)
    first = started(op.on_leases_acquired([a_lease(1)], 0.0))["a"]
    [start] = of_kind(StartTask, finish(op, first))
    [resource] = start.spec.resources
    places = [] if resource.location is None else pulled_from(ResourceLocation(pull=resource.location))
    assert places == ([("a-1", (a_peer(1),))] if transfer == "pull" else [])


async def test_a_job_with_signed_urls_goes_on_after_its_own_journal(tmp_path: Path) -> None:
    """Each start signs anew; the journal names the tasks as their owner has defined them."""
    bucket = {"bucket": "models", "key": "a.bin", "presigned": True}
    job = TasksJob.model_validate({"type": "tasks", "tasks": [a_task("a", resources=[{"name": "r", "s3": bucket}])]})

    class Signing(Context):
        starts = 0

        async def presign(self, _table: Any) -> str:
            Signing.starts += 1
            return f"https://models/a.bin?signature={Signing.starts}"

    journal: list[dict[str, Any]] = []
    for _ in range(2):
        context: Any = Signing(tmp_path)
        async with TasksStrategy().open(job, context, journal) as opened:
            effects = opened.on_start(0.0)
        journal += [{"record": e.kind, **e.fields} for e in of_kind(WriteJournal, effects)]
    assert len(journal) >= 2
    assert Signing.starts == 2
