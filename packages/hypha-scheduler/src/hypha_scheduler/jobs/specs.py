"""Translation of the tables that strategies share into what workers and executors get. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import convert

from hypha_proto.job_spec import (
    Adam,
    CosineWithWarmup,
    LearningRateSchedule,
    LinearWithWarmup,
    Model,
    Reference,
    WarmupStableDecay,
)
from hypha_proto.offers import ExecutorDescriptor, WorkerSpec
from hypha_proto.tasks import OutputPath, ResultSource, TaskResource, TaskSpec
from hypha_scheduler.jobs.config import InnerOptimizerTable, ModelTable, Requirement, amounts, kinds

_DECAY_SHARE: Final = 10  # a wsd schedule without decay_steps decays in the last tenth


def worker_spec(requirements: tuple[Requirement, ...], default: ExecutorDescriptor) -> WorkerSpec:
    """Return the requirements on a worker; `default` is its executor unless they name one."""
    executors = tuple(ExecutorDescriptor(default.kind, name) for name in kinds(requirements, default.name))
    return WorkerSpec(resources=amounts(requirements), executor=executors)


def executor_of(requirements: tuple[Requirement, ...], kind: str, default: str) -> str:
    """Return the executor, as ``class/name``, that runs a task of a class on a worker with these requirements."""
    return f"{kind}/{kinds(requirements, default)[0]}"


def model_spec(table: ModelTable, artifact: Reference) -> Model:
    """Return the model to train, which executors fetch from `artifact`."""
    return Model(task=table.task, artifact=artifact, input_names=table.inputs)


def optimizer_spec(table: InnerOptimizerTable) -> Adam:
    """Return the optimizer of an executor."""
    return convert(table, Adam, from_attributes=True)


def schedule_spec(table: InnerOptimizerTable, steps: int) -> LearningRateSchedule | None:
    """Return the learning-rate schedule of an executor, over `steps` steps unless the table names their number."""
    total, warmup = table.total_steps or steps, table.warmup_steps
    match table.schedule:
        case "cosine-with-warmup":
            return CosineWithWarmup(warmup_steps=warmup, training_steps=total)
        case "linear-with-warmup":
            return LinearWithWarmup(warmup_steps=warmup, training_steps=total)
        case "wsd":
            decay = table.decay_steps or max(1, total // _DECAY_SHARE)
            return WarmupStableDecay(warmup_steps=warmup, decay_steps=decay, training_steps=total)
    return None


def task_spec(
    executor: str,
    settings: Mapping[str, object],
    *,
    resources: Sequence[str] = (),
    outputs: Mapping[str, str] | None = None,
) -> TaskSpec:
    """Return a task of an executor ``class/name`` whose resources the operator locates, in `Operator.on_locate`.

    A setting that equals a resource's name becomes its path. `outputs` are paths in the work directory, by name.
    """
    sources = (TaskResource(name=name, result=ResultSource(task=name, output=name)) for name in resources)
    paths = (OutputPath(name=name, path=path) for name, path in (outputs or {}).items())
    return TaskSpec(executor=executor, settings=json.dumps(settings), resources=tuple(sources), outputs=tuple(paths))
