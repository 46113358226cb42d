"""Translation of an inference job into role requests and tasks, and the check of its dataset. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from hypha_proto.job_spec import HuggingFaceReference, PeersReference, Reference, UriReference
from hypha_proto.offers import ExecutorDescriptor, WorkerSpec
from hypha_proto.tasks import FileSource, PeersSource, SlicesSource, TaskResource, TaskSpec, UriSource
from hypha_scheduler.allocation.auction import RoleRequest
from hypha_scheduler.jobs.config import amounts, kinds
from hypha_scheduler.strategies.base import DatasetView
from hypha_scheduler.strategies.inference.config import (
    EXECUTOR,
    OPTIONAL_COLUMNS,
    RESULT_COLUMNS,
    ROW_COLUMNS,
    InferenceJobConfig,
)

ROLE: Final = "inference"
_LABELS: Final = "labels"
_SCALARS: Final = {"int": "integer", "uint": "integer", "float": "number", "bfloat": "number", "bool": "boolean"}


def role_request(job: InferenceJobConfig, count: int, minimum: int) -> RoleRequest:
    """Return the demand for `count` workers; the job starts with `minimum` of them."""
    needs, price = job.resources.worker, job.resources.worker_price
    executors = tuple(ExecutorDescriptor.parse(kind) for kind in kinds(needs, EXECUTOR))
    spec = WorkerSpec(resources=amounts(needs), executor=executors)
    return RoleRequest(ROLE, spec, price.bid, price.max, count, minimum, starts_at_minimum=True)


def task_spec(job: InferenceJobConfig, dataset: str, model: Reference, preprocessor: Reference | None) -> TaskSpec:
    """Return the task that every lease runs: it computes slices of `dataset` until there are no more."""
    resources = [_resource("model", model), TaskResource(name="slices", slices=SlicesSource(dataset))]
    if preprocessor is not None:
        resources.append(_resource("preprocessor", preprocessor))
    return TaskSpec(executor=job.executor, settings=json.dumps(_settings(job)), resources=tuple(resources), sends=True)


def _resource(name: str, reference: Reference) -> TaskResource:
    match reference:
        case HuggingFaceReference():
            return TaskResource(name=name, huggingface=reference)
        case PeersReference(resource=address) if address is not None:
            source = PeersSource(reference.peers, address.dataset, address.index, reference.filenames)
            return TaskResource(name=name, peers=source)
        case UriReference(value=uri):
            folder = _path_of(uri)
            shared = None if folder is None else FileSource(folder)
            return TaskResource(name=name, file=shared, uri=UriSource(uri) if shared is None else None)
    raise TypeError(f"{name}: a reference of type {type(reference).__name__} cannot be fetched by a task")


def _path_of(uri: str) -> str | None:
    """Return the path of a ``file:`` URL."""
    parts = urlsplit(uri)
    return unquote(parts.path) if parts.scheme == "file" else None


def _settings(job: InferenceJobConfig) -> dict[str, Any]:
    model, chosen = job.model, job.preprocessor
    inputs = model.input_names or tuple(name for name in model.inputs if name != _LABELS)
    preprocessor = None
    if chosen is not None:
        preprocessor = {
            "type": job.preprocessor_task, "input_names": list(chosen.input_names), "path": "preprocessor",
        }  # fmt: skip
    return {
        "task": job.inference.task,
        "model": {"type": model.task, "input_names": list(inputs), "path": "model"},
        "preprocessor": preprocessor,
        "inference": {key: value for key, value in job.sampling().items() if key != "task"},
        "columns": list(job.results.columns),
    }


# ------------------------------------------------------------------------------------------------------------- dataset


def result_columns(job: InferenceJobConfig, dataset: DatasetView) -> Mapping[str, str]:
    """Return the kind of each column of the results, as their manifest states it."""
    task, given = job.inference.task, dataset.columns or {}
    asked = {
        name: OPTIONAL_COLUMNS[task].get(name) or _kind_in_rows(given[name])
        for name in job.results.columns
        if name in OPTIONAL_COLUMNS[task] or name in given
    }
    return {**ROW_COLUMNS, **RESULT_COLUMNS[task], **asked}


def _kind_in_rows(kind: str) -> str:
    """Return the kind of a column of a row for that of a tensor, such as ``float32[8,8]``; others stay."""
    name, bracket, shape = kind.partition("[")
    if bracket and shape.rstrip("]").strip():
        return "list"
    return _SCALARS.get(name.rstrip("0123456789"), name)
