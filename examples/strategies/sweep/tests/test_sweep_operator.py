"""The sweep's operator as a pure state machine: calls in, effects out."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from pydantic import ValidationError

from hypha_net.transfer import PullSource
from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import All, PeersReference
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.task_resources import LocateResource
from hypha_proto.tasks import StoredOutput
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
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.strategies.base import (
    Effects,
    EmitEvent,
    EndJob,
    JobContext,
    Lease,
    PushTarget,
    RunInBackground,
    SliceToUse,
    StartTask,
    StopTask,
    TaskEnded,
    TaskNotStarted,
    TaskRef,
    TaskStarted,
    TaskState,
    WriteJournal,
)
from hypha_sweep.strategy import CHOICE, CHOOSER, EXECUTOR, STRATEGY, SweepJob, SweepOperator

JOB = {
    "type": "sweep",
    "samples": 40,
    "workers": 2,
    "timeout": 60.0,
    "dataset": {"dataset": "digits"},
    "model": {"path": "start", "type": "vision-classification"},
    "variants": {"slow": {"learning_rate": 0.001}, "fast": {"learning_rate": 0.1}},
}
NOBODY = PeersReference(peers=(), strategy=All())
FINISHED = TaskEnded(TaskState.FINISHED)
CHOSEN = TaskEnded(TaskState.FINISHED, outputs=(StoredOutput(name="best", dataset="x", files=()),))


class Context:
    """Part of `JobContext` that the operator uses."""

    def __init__(self) -> None:
        self.job_id = uuid.uuid4()
        self.directory = Path("/runs/job")
        self.scheduler = PeerId.from_public_key(bytes(32))
        self.first_attempt = 0


def sweep(results: Mapping[str, Any] | None = None, **changes: Any) -> SweepOperator:
    context: JobContext = Context()  # type: ignore[assignment]
    return SweepOperator(SweepJob.model_validate(JOB | changes), context, 3, NOBODY, dict(results or {}))


def a_lease(number: int = 1, role: str = "train") -> Lease:
    return Lease(uuid.UUID(int=number), PeerId.from_public_key(bytes([number]) * 32), role, 100.0)


def choose(operator: SweepOperator, number: int = 9, attempt: int = 0) -> StartTask:
    """Give the operator a lease for the choice, and return its task."""
    [request] = operator.role_requests()
    assert (request.role, request.spec.executor) == ("choose", (ExecutorDescriptor.parse("sweep/choose-best"),))
    [start] = starts(operator.on_leases_acquired([a_lease(number, "choose")], 8.0))
    assert start.task == TaskRef(CHOICE, a_lease(number, "choose"), attempt)
    return start


def locate(operator: SweepOperator, task: TaskRef) -> list[dict[str, Any]]:
    """Return the results that the task of the choice reads."""
    request = LocateResource(attempt=task.id_in(operator.context.job_id), resource="variants")
    answer, effects = operator.on_locate(task, request, 8.0)
    assert effects == ()
    assert answer.pull is not None
    found = []
    for file in answer.pull.files:
        assert file.peers == (operator.context.scheduler,)
        source = operator.on_pull_request(task, PullRequest(dataset=file.dataset, index=file.index))
        assert isinstance(source, PullSource)
        assert isinstance(source.source, bytes)
        found.append(json.loads(source.source))
        assert file.path == f"{found[-1]['name']}.json"
    return found


def starts(effects: Effects) -> list[StartTask]:
    return [effect for effect in effects if isinstance(effect, StartTask)]


def header(operator: SweepOperator, kind: str = PSEUDO_GRADIENT) -> PushHeader:
    digest, context = "blake3:" + "0" * 64, operator.context
    attempt = AttemptId(context.job_id, "fast", 0)
    return PushHeader(attempt, 1, kind, "update-1.safetensors", 10, digest, context.scheduler)


def train(operator: SweepOperator, task: TaskRef, loss: float | None) -> Effects:
    """Let a task push an update, report a loss and end."""
    assert operator.on_task_update(task, TaskStarted(), 1.0) == ()
    target, _ = operator.on_push_request(task, header(operator), 2.0)
    assert isinstance(target, PushTarget)
    assert operator.on_push_complete(task, header(operator), target.path, "", 3.0) == ()
    metrics = {} if loss is None else {"loss": loss}
    assert operator.on_training_report(task, RoundMetrics(round=1, metrics=metrics), 4.0) == (Done(), ())
    return operator.on_task_update(task, FINISHED, 5.0)


def demand(operator: SweepOperator) -> tuple[int, int]:
    [request] = operator.role_requests()
    assert not request.distinct_peers
    return request.count, request.minimum


def test_it_asks_for_one_lease_and_for_more_once_it_has_it() -> None:
    operator = sweep()
    assert demand(operator) == (1, 1)
    operator.on_leases_acquired([a_lease()], 0.0)
    assert demand(operator) == (2, 1)
    assert demand(sweep(workers=9)) == (1, 1)


def test_a_sweep_without_anything_left_to_train_begins_with_the_choice() -> None:
    results = {name: {"name": name, "loss": 1.0, "update": name, "failure": ""} for name in JOB["variants"]}  # type: ignore[attr-defined]
    assert choose(sweep(results)).task.name == CHOICE
    assert sweep().on_start(0.0) == ()


def test_the_next_variant_starts_on_the_lease_of_the_last() -> None:
    operator, lease = sweep(), a_lease()
    [first] = starts(operator.on_leases_acquired([lease], 0.0))
    assert first.task.name == "slow"
    [second] = starts(train(operator, first.task, loss=2.0))
    assert (second.task.name, second.task.lease) == ("fast", lease)


def test_variants_run_side_by_side_and_leases_without_a_variant_are_not_wanted() -> None:
    operator = sweep()
    [slow] = starts(operator.on_leases_acquired([a_lease(1)], 0.0))
    [fast] = starts(operator.on_leases_acquired([a_lease(2)], 0.5))
    assert {slow.task.name, fast.task.name} == {"slow", "fast"}
    assert starts(train(operator, fast.task, loss=1.0)) == []
    assert demand(operator) == (1, 1)
    train(operator, slow.task, loss=2.0)
    assert [(request.role, request.count) for request in operator.role_requests()] == [("choose", 1)]


def test_a_lease_that_is_not_wanted_any_more_takes_no_further_attempt() -> None:
    """The runner has released it, and a task on it would not start."""
    operator, lost = sweep(), a_lease(1)
    [slow] = starts(operator.on_leases_acquired([lost], 0.0))
    [fast] = starts(operator.on_leases_acquired([a_lease(2)], 0.5))
    train(operator, fast.task, loss=1.0)
    operator.on_lease_lost(lost, "no answer", 10.0)
    assert starts(operator.on_task_update(slow.task, TaskEnded(TaskState.FAILED, "no answer"), 10.0)) == []
    assert demand(operator) == (1, 1)
    [again] = starts(operator.on_leases_acquired([a_lease(3)], 11.0))
    assert (again.task.name, again.task.attempt) == ("slow", 1)


def test_each_variant_has_its_learning_rate_and_sends_its_update_to_the_scheduler() -> None:
    operator = sweep()
    tasks = starts(operator.on_leases_acquired([a_lease(1), a_lease(2)], 0.0))
    configs: list[Any] = [task.spec.training for task in tasks]
    assert [config.optimizer.learning_rate for config in configs] == [0.001, 0.1]
    for config in configs:
        assert config.updates.peers == (operator.context.scheduler,)
        assert config.results.peers == ()


def test_the_model_is_that_of_the_lowest_loss() -> None:
    operator = sweep()
    tasks = [start.task for start in starts(operator.on_leases_acquired([a_lease(1), a_lease(2)], 0.0))]
    journal, event, *rest = train(operator, tasks[0], loss=0.5)
    assert rest == []
    assert isinstance(journal, WriteJournal)
    assert isinstance(event, EmitEvent)
    assert journal.fields == event.fields
    train(operator, tasks[1], loss=2.0)
    task = choose(operator).task
    assert [result["loss"] for result in locate(operator, task)] == [0.5, 2.0]
    [work] = operator.on_task_update(task, CHOSEN, 9.0)
    assert isinstance(work, RunInBackground)
    assert operator.on_effect_result(work.tag, operator.results["slow"], 9.0) == (EndJob(),)
    summary = operator.summary({})
    assert (summary["best"], summary["model_dir"]) == ("slow", "/runs/job/model")
    assert [variant["loss"] for variant in summary["variants"]] == [0.5, 2.0]  # type: ignore[attr-defined]


def test_the_count_of_batches_follows_from_the_samples() -> None:
    operator = sweep()
    [start, _] = starts(operator.on_leases_acquired([a_lease(1), a_lease(2)], 0.0))
    found = [operator.on_training_report(start.task, BatchDone(batch_size=16), 1.0)[0] for _ in range(4)]
    assert found == [ScheduleUpdate(counter=counter) for counter in (2, 1, 0, 0)]
    assert operator.on_training_report(start.task, SendingUpdate(), 1.0) == (Acknowledged(), ())
    assert operator.on_training_report(start.task, OuterStepTaken(), 1.0) == (ReportError(), ())


def test_every_variant_gets_the_same_slices() -> None:
    operator = sweep()
    tasks = [start.task for start in starts(operator.on_leases_acquired([a_lease(1), a_lease(2)], 0.0))]
    for task in tasks:
        found = [operator.next_slice(task, "digits", 1.0) for _ in range(5)]
        assert found == [SliceToUse(0, 0), SliceToUse(0, 1), SliceToUse(0, 2), SliceToUse(1, 0), SliceToUse(1, 1)]


def test_files_of_another_kind_are_refused() -> None:
    operator = sweep()
    [start, _] = starts(operator.on_leases_acquired([a_lease(1), a_lease(2)], 0.0))
    refusal, _ = operator.on_push_request(start.task, header(operator, OUTER_UPDATE), 1.0)
    assert isinstance(refusal, Refusal)


def test_a_variant_on_a_lost_lease_is_tried_again_on_another() -> None:
    operator = sweep(variants={"only": {"learning_rate": 0.1}})
    [start] = starts(operator.on_leases_acquired([a_lease(1)], 0.0))
    assert operator.on_lease_lost(a_lease(1), "it ran out", 1.0) == ()
    assert operator.on_task_update(start.task, TaskEnded(TaskState.FAILED, "it ran out"), 1.0) == ()
    assert demand(operator) == (1, 1)
    [again] = starts(operator.on_leases_acquired([a_lease(2)], 2.0))
    assert again.task == TaskRef("only", a_lease(2), attempt=1)
    train(operator, again.task, loss=1.0)
    choose(operator)


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_a_variant_without_a_finite_loss_fails_and_the_sweep_goes_on(loss: float | None) -> None:
    operator = sweep(workers=1)
    effects, names = operator.on_leases_acquired([a_lease()], 0.0), []
    while found := starts(effects):
        names.append(found[0].task.name)
        effects = train(operator, found[0].task, loss=loss if names[-1] == "slow" else 1.0)
    assert names == ["slow", "fast", "slow"]
    assert [result["name"] for result in locate(operator, choose(operator).task)] == ["fast"]
    assert operator.results["slow"]["loss"] is None
    assert "finite loss" in operator.results["slow"]["failure"]


def test_a_job_whose_variants_all_fail_says_why() -> None:
    operator = sweep(variants={"only": {"learning_rate": 0.1}})
    for number in (1, 2):
        [start] = starts(operator.on_leases_acquired([a_lease(number)], 0.0))
        effects = operator.on_task_update(start.task, TaskNotStarted("no room"), 1.0)
    assert isinstance(effects[-1], EndJob)
    assert "no room" in str(effects[-1].failure)


def test_a_variant_that_takes_too_long_is_stopped() -> None:
    operator = sweep()
    assert operator.next_deadline() is None
    [slow] = starts(operator.on_leases_acquired([a_lease(1)], 10.0))
    [fast] = starts(operator.on_leases_acquired([a_lease(2)], 20.0))
    assert operator.next_deadline() == 70.0
    [stop] = operator.on_deadline(70.0)
    assert isinstance(stop, StopTask)
    assert (stop.task, stop.keep_lease) == (slow.task, False)
    assert operator.on_task_update(slow.task, TaskEnded(TaskState.CANCELLED, stop.reason), 70.0) == ()
    assert operator.next_deadline() == 80.0
    [again] = starts(train(operator, fast.task, loss=1.0))
    assert again.task == TaskRef("slow", a_lease(2), attempt=1), "the lease of the stopped task is gone"


def test_a_model_that_cannot_be_written_fails_the_job() -> None:
    operator = sweep(variants={"only": {"learning_rate": 0.1}})
    [start] = starts(operator.on_leases_acquired([a_lease()], 0.0))
    train(operator, start.task, loss=1.0)
    [work] = operator.on_task_update(choose(operator).task, CHOSEN, 9.0)
    assert isinstance(work, RunInBackground)
    assert operator.on_effect_result(work.tag, OSError("disk full"), 9.0) == (EndJob(failure="disk full"),)


def test_a_choice_that_fails_is_tried_once_more() -> None:
    operator = sweep(variants={"only": {"learning_rate": 0.1}})
    [start] = starts(operator.on_leases_acquired([a_lease()], 0.0))
    train(operator, start.task, loss=1.0)
    task = choose(operator).task
    assert operator.on_task_update(task, TaskNotStarted("no room"), 9.0) == ()
    task = choose(operator, number=8, attempt=1).task
    end = TaskEnded(TaskState.FAILED, "status 1")
    assert operator.on_task_update(task, end, 9.0) == (EndJob(failure="no choice: status 1"),)


@pytest.mark.parametrize("name", ["fast", "slow", "nobody"])
def test_the_choice_is_checked(name: str, tmp_path: Path) -> None:
    operator = sweep()
    operator.context.directory = tmp_path  # type: ignore[misc]
    tasks = [start.task for start in starts(operator.on_leases_acquired([a_lease(1), a_lease(2)], 0.0))]
    for task in tasks:
        train(operator, task, loss=1.0)
    operator.results["slow"] = {**operator.results["slow"], "failure": "it diverged"}
    operator.model = tmp_path / "model"
    operator.model.mkdir()
    [work] = operator.on_task_update(choose(operator).task, CHOSEN, 9.0)

    async def fetch_output(_output: StoredOutput, _holder: PeerId, target: Path) -> int:
        return await anyio.Path(target).write_text(name)

    operator.context.fetch_output = fetch_output  # type: ignore[method-assign,assignment]
    assert isinstance(work, RunInBackground)
    said = "update fast-0.safetensors cannot be added" if name == "fast" else "is not a variant that finished"
    with pytest.raises(JobFailedError, match=said):  # there is no model in this test
        anyio.run(work.work, backend="trio")


def test_a_choice_that_an_earlier_run_has_fetched_is_fetched_again(tmp_path: Path) -> None:
    targets = []

    async def fetch_output(_output: StoredOutput, _holder: PeerId, target: Path) -> int:
        targets.append(target)
        with target.open("x") as file:  # as JobContext.fetch_output: it must not exist
            return file.write("nobody")

    for _ in range(2):
        operator = sweep(
            {name: {"name": name, "loss": 1.0, "update": name, "failure": ""} for name in ("slow", "fast")}
        )
        operator.context.directory = tmp_path  # type: ignore[misc]
        operator.context.fetch_output = fetch_output  # type: ignore[method-assign,assignment]
        [work] = operator.on_task_update(choose(operator).task, CHOSEN, 9.0)
        assert isinstance(work, RunInBackground)
        with pytest.raises(JobFailedError, match="is not a variant that finished"):
            anyio.run(work.work, backend="trio")
    assert len(set(targets)) == 2


def test_the_executor_writes_the_name_of_the_smallest_loss(tmp_path: Path) -> None:
    folder = tmp_path / "resources" / "variants"
    folder.mkdir(parents=True)
    for variant, loss in {"slow": 2.0, "fast": 0.5, "other": 1.0}.items():
        (folder / f"{variant}.json").write_text(json.dumps({"name": variant, "loss": loss}))
    (tmp_path / "job.json").write_text(json.dumps({"settings": {"variants": "resources/variants"}}))
    script = Path(__file__).parents[1] / "choose_best.py"
    subprocess.run([sys.executable, script, "job.json"], cwd=tmp_path, check=True, timeout=30)
    assert (tmp_path / "best").read_text() == "fast"


def test_the_example_says_which_executors_workers_need() -> None:
    folder = Path(__file__).parents[1]
    [executor] = tomllib.loads((folder / "worker.toml").read_text())["executors"]
    assert f"{executor['class']}/{executor['name']}" == CHOOSER
    for name in ("README.md", "job.toml"):
        text = (folder / name).read_text()
        assert (CHOOSER in text, EXECUTOR in text, "worker.toml" in text) == (True, True, True), name
    configuration = (folder / "worker.toml").read_text().partition("\n\n")[2]
    assert configuration in (folder / "README.md").read_text()


def test_variants_with_a_result_in_the_journal_are_not_trained_again() -> None:
    before = sweep()
    [slow, _] = starts(before.on_leases_acquired([a_lease(1), a_lease(2)], 0.0))
    journal = [dict(effect.fields) for effect in train(before, slow.task, 0.5) if isinstance(effect, WriteJournal)]
    after = sweep({record["name"]: record for record in journal})
    [fast] = starts(after.on_leases_acquired([a_lease(3)], 0.0))
    assert fast.task.name == "fast"
    train(after, fast.task, loss=0.7)
    assert next(result["update"] for result in locate(after, choose(after).task)) == "slow-0.safetensors"


def test_the_example_of_a_job_is_valid() -> None:
    job = SweepJob.model_validate(tomllib.loads((Path(__file__).parents[1] / "job.toml").read_text()))
    assert list(job.variants) == ["slow", "middle", "fast"]
    assert STRATEGY.job_table is SweepJob
    for wrong in ({"variants": {}}, {"variants": {"../x": {"learning_rate": 1.0}}}, {"samples": 0}, {"rounds": {}}):
        with pytest.raises(ValidationError):
            SweepJob.model_validate(JOB | wrong)
