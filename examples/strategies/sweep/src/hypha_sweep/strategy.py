"""The strategy ``sweep``: a train task for each variant of a job, and a task that chooses the best of their results."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
from pydantic import Field

from hypha_net.transfer import PullSource
from hypha_proto import ids, job_spec, offers, resources, task_resources, tasks, training_reports, transfer
from hypha_scheduler import errors
from hypha_scheduler.jobs import artifacts, config, resource_locations, specs
from hypha_scheduler.strategies import base
from hypha_scheduler.strategies.diloco import independent_training as training

EXECUTOR, ATTEMPTS, MAX_UPDATE = "diloco-transformer", 2, 1 << 30
CHOOSER, CHOICE = "sweep/choose-best", "best.variant"  # an executor of tasks, and a name that no variant has
CHOICE_SPEC = specs.task_spec(CHOOSER, {"variants": "variants"}, resources=("variants",), outputs={"best": "best"})
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class SweepJob(config.JobTable):
    """``[scheduler.job]`` of ``type = "sweep"``."""

    type: Literal["sweep"] = Field(description="Strategy.")
    dataset: config.DatasetTable = Field(description="Training data.")
    model: config.ModelTable = Field(description="Model that every variant starts from.")
    variants: dict[Name, config.InnerOptimizerTable] = Field(min_length=1, description="What to try, by name.")
    samples: int = Field(ge=1, description="Samples that each variant trains on.")
    batch_size: int = Field(default=16, ge=1, lt=1 << 32, description="Samples per batch.")
    workers: int = Field(default=1, ge=1, description="Variants that train at the same time.")
    worker: config.Requirements = Field(default=(), description="Requirements on a worker.")
    worker_price: config.PriceTable = Field(default=config.PriceTable(), description="Price of a worker.")
    timeout: float = Field(default=3600.0, gt=0, description="Seconds for one attempt at a variant.")


@dataclass
class SweepOperator(base.Operator):
    """One running sweep: a pure state machine."""

    job: SweepJob
    context: base.JobContext
    slices: int
    start: job_spec.Reference
    results: dict[str, Mapping[str, Any]]

    def __post_init__(self) -> None:
        first = self.context.first_attempt
        self.waiting = [(name, first) for name in self.job.variants if name not in self.results] or [(CHOICE, first)]
        self.leases: dict[uuid.UUID, base.Lease] = {}
        self.running: dict[base.TaskRef, training.Training] = {}
        self.model = self.context.directory / "model"

    @property
    def role(self) -> str:
        return "choose" if len(self.results) == len(self.job.variants) else "train"  # the choice comes last

    def role_requests(self) -> Sequence[base.RoleRequest]:
        trainer, chooser = offers.ExecutorDescriptor("train", EXECUTOR), offers.ExecutorDescriptor.parse(CHOOSER)
        choice = offers.WorkerSpec(resources.Resources(cpu=0.1), (chooser,))
        spec = choice if self.role == "choose" else specs.worker_spec(self.job.worker, trainer)
        price, unfinished = self.job.worker_price, len(self.waiting) + len(self.running)
        count = min(unfinished, self.job.workers if self.leases else 1)  # begin with the first that is found
        return (base.RoleRequest(self.role, spec, price.bid, price.max, count, min(1, count), distinct_peers=False),)

    def on_leases_acquired(self, leases: Sequence[base.Lease], now: float) -> base.Effects:
        self.leases |= {lease.id: lease for lease in leases}
        return self.start_tasks(now)

    def on_lease_lost(self, lease: base.Lease, reason: str, now: float) -> base.Effects:
        self.leases.pop(lease.id, None)
        return ()

    def start_tasks(self, now: float) -> base.Effects:
        busy = {task.lease.id for task in self.running}
        free = [lease for lease in self.leases.values() if lease.id not in busy and lease.role == self.role]
        begun = [base.TaskRef(name, lease, attempt) for lease, (name, attempt) in zip(free, self.waiting, strict=False)]
        del self.waiting[: len(begun)]
        self.leases = {lease.id: lease for lease in self.leases.values() if lease not in free[len(begun) :]}  # released
        return tuple(base.StartTask(task, self.begin(task, now)) for task in begun)

    def begin(self, task: base.TaskRef, now: float) -> tasks.TaskSpec:
        """Record an attempt at a task, and return what is to run."""
        job, path = self.job, self.context.directory / "updates" / f"{task.name}-{task.attempt}.safetensors"
        attempt = training.Training(job.samples, job.batch_size, base.PushTarget(path, MAX_UPDATE), now + job.timeout)
        self.running[task] = attempt
        if task.name == CHOICE:
            return CHOICE_SPEC
        executor, model = specs.executor_of(job.worker, "train", EXECUTOR), specs.model_spec(job.model, self.start)
        return attempt.spec(self.context, executor, model, job.dataset, job.variants[task.name])

    def on_task_update(self, task: base.TaskRef, update: base.TaskUpdate, now: float) -> base.Effects:
        if not isinstance(update, base.TaskNotStarted | base.TaskEnded):
            return ()
        attempt, failure = self.running.pop(task), update.reason
        if isinstance(update, base.TaskNotStarted):
            self.leases.pop(task.lease.id, None)  # the runner has released it
        elif task.name == CHOICE and update.state is base.TaskState.FINISHED:
            return (base.RunInBackground(partial(self.apply, update.outputs[0], task.lease.peer), "model"),)
        elif not failure and not attempt.is_complete:
            failure = f"{update.state.value} without an update and a finite loss"
        if failure and task.attempt + 1 < self.context.first_attempt + ATTEMPTS:
            self.waiting.append((task.name, task.attempt + 1))
            return self.start_tasks(now)
        if task.name == CHOICE:
            return (base.EndJob(failure=f"no choice: {failure}"),)
        return (*self.record(task.name, attempt, failure), *self.start_tasks(now))

    def record(self, name: str, attempt: training.Training, failure: str) -> base.Effects:
        loss = None if failure else attempt.loss
        self.results[name] = {"name": name, "loss": loss, "update": attempt.update, "failure": failure}
        effects = (base.WriteJournal("variant", self.results[name]), base.EmitEvent("variant", self.results[name]))
        self.waiting = [(CHOICE, self.context.first_attempt)] if self.role == "choose" else self.waiting
        if self.role == "choose" and all(result["failure"] for result in self.results.values()):
            return (*effects, base.EndJob(failure=f"every variant failed: {list(self.results.values())}"))
        return effects

    def next_slice(self, task: base.TaskRef, dataset: str, now: float) -> base.SliceToUse:
        return self.running[task].next_slice(self.slices)  # every variant gets the same slices in the same order

    def on_training_report(
        self, task: base.TaskRef, report: training_reports.TrainingReport, now: float
    ) -> tuple[training_reports.ReportAnswer, base.Effects]:
        return self.running[task].on_training_report(report), ()

    def on_push_request(
        self, task: base.TaskRef, header: transfer.PushHeader, now: float
    ) -> tuple[base.PushTarget | transfer.Refusal, base.Effects]:
        return self.running[task].on_push_request(header), ()

    def on_push_complete(
        self, task: base.TaskRef, header: transfer.PushHeader, path: Path, digest: str, now: float
    ) -> base.Effects:
        self.running[task].update = path.name
        return ()

    def next_deadline(self) -> float | None:
        return min((attempt.deadline for attempt in self.running.values()), default=None)

    def on_deadline(self, now: float) -> base.Effects:
        late = {task: task.lease.id for task, attempt in self.running.items() if attempt.deadline <= now}
        self.leases = {key: lease for key, lease in self.leases.items() if key not in late.values()}  # released
        return tuple(base.StopTask(task, f"no result within {self.job.timeout:g} s") for task in late)

    def choice_files(self) -> resource_locations.ServedFiles:
        """Return what the choice reads: a file for each variant that finished."""
        files = {f"{key}.json": json.dumps(it).encode() for key, it in self.results.items() if not it["failure"]}
        return resource_locations.ServedFiles(self.context, "variants", files)

    def on_locate(
        self, task: base.TaskRef, request: task_resources.LocateResource, now: float
    ) -> tuple[task_resources.ResourceLocation, base.Effects]:
        return self.choice_files().location(), ()

    def on_pull_request(self, task: base.TaskRef, request: transfer.PullRequest) -> PullSource | transfer.Refusal:
        return self.choice_files().resolve(request) if task.name == CHOICE else super().on_pull_request(task, request)

    async def apply(self, best: tasks.StoredOutput, holder: ids.PeerId) -> Mapping[str, Any]:
        path = self.context.directory / f"best-{uuid.uuid4().hex}"  # an earlier run may have left one
        await self.context.fetch_output(best, holder, path)
        result = self.results.get(await anyio.Path(path).read_text())
        if result is None or result["failure"]:
            raise errors.JobFailedError(f"{path}: the choice is not a variant that finished")
        await artifacts.add_update(self.model, self.context.directory / "updates" / result["update"])
        return result

    def on_effect_result(self, tag: str, outcome: Any, now: float) -> base.Effects:
        self.best: Mapping[str, Any] = {} if isinstance(outcome, Exception) else outcome
        return (base.EndJob(failure=None if self.best else str(outcome)),)

    def summary(self, traffic: Mapping[Any, Any]) -> Mapping[str, object]:
        variants = [self.results[name] for name in self.job.variants]
        return {"best": self.best["name"], "model_dir": str(self.model), "variants": variants}


class SweepStrategy(base.Strategy):
    job_table = SweepJob

    @asynccontextmanager
    async def open(
        self, job: SweepJob, context: base.JobContext, journal: Sequence[Mapping[str, Any]]
    ) -> AsyncIterator[base.Operator]:
        dataset = await context.open_dataset(job.dataset, timeout=job.allocation_timeout)
        start = await context.prepare_artifact(job.model, "model", context.directory / "model")
        (context.directory / "updates").mkdir(exist_ok=True)
        results = {record["name"]: record for record in journal if record["record"] == "variant"}
        yield SweepOperator(job, context, len(dataset.samples), start.reference, results)


STRATEGY = SweepStrategy()
