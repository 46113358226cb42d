"""The strategy ``tasks``. Registered as an entry point."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread

from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.strategies.base import DatasetView, JobContext, Operator, StrategyMethod
from hypha_scheduler.strategies.tasks import records
from hypha_scheduler.strategies.tasks.collection import remove_copies, remove_incomplete
from hypha_scheduler.strategies.tasks.config import TasksJob, UriTable
from hypha_scheduler.strategies.tasks.graph import TaskGraph
from hypha_scheduler.strategies.tasks.operator import TasksOperator


class TasksStrategy:
    """Implements `strategies.base.Strategy`."""

    job_table = TasksJob
    rpc_methods: Sequence[StrategyMethod] = ()

    def open(
        self, job: TasksJob, context: JobContext, journal: Sequence[Mapping[str, Any]]
    ) -> AbstractAsyncContextManager[Operator]:
        """Find the datasets that tasks use, and go on after the records of the journal.

        Raises:
            JobFailedError: a dataset was not found or has too few slices, or the journal is of other tasks.
        """
        return _open(job, context, journal)


@asynccontextmanager
async def _open(job: TasksJob, context: JobContext, journal: Sequence[Mapping[str, Any]]) -> AsyncIterator[Operator]:
    graph = TaskGraph(job)
    definition = graph.digest()
    earlier = records.read(journal, definition)
    await anyio.to_thread.run_sync(remove_incomplete, context.directory)
    await _open_datasets(job, context)
    yield TasksOperator(await _with_presigned_urls(graph, context), context, earlier, definition)
    await anyio.to_thread.run_sync(remove_copies, context.directory)


async def _with_presigned_urls(graph: TaskGraph, context: JobContext) -> TaskGraph:
    """Return a graph whose tasks name objects by URLs that need no keys, where the job wants it.

    Raises:
        JobFailedError: a URL cannot be signed.
    """
    tables = []
    for task in graph.job.tasks:
        resources = []
        for resource in task.resources:
            if resource.s3 is not None and resource.s3.presigned:
                uri = UriTable.model_construct(value=await context.presign(resource.s3))
                resource = resource.model_copy(update={"s3": None, "uri": uri})
            resources.append(resource)
        tables.append(task.model_copy(update={"resources": tuple(resources)}))
    return TaskGraph(graph.job.model_copy(update={"tasks": tuple(tables)}))


async def _open_datasets(job: TasksJob, context: JobContext) -> None:
    """Have the datasets found from which the runner answers workers.

    Raises:
        JobFailedError: one was not found, or has too few slices.
    """
    used: dict[str, set[int]] = {}
    for source in (resource.dataset for task in job.tasks for resource in task.resources):
        if source is not None:
            used.setdefault(source.name, set()).update(source.slices or ())
    failures: list[JobFailedError] = []
    async with anyio.create_task_group() as tasks:
        for number, (name, slices) in enumerate(used.items()):
            tasks.start_soon(partial(_open_dataset, job, context, name, number, slices, failures))
    if failures:
        raise JobFailedError("; ".join(map(str, failures)))


async def _open_dataset(
    job: TasksJob, context: JobContext, name: str, number: int, slices: set[int], failures: list[JobFailedError]
) -> None:
    try:
        dataset = await context.open_dataset(name, timeout=job.allocation_timeout, manifest=f"dataset-{number}.json")
        _check_slices(dataset, slices)
    except JobFailedError as error:
        failures.append(error)


def _check_slices(dataset: DatasetView, slices: set[int]) -> None:
    if slices and max(slices) >= len(dataset.samples):
        raise JobFailedError(
            f"dataset {dataset.name!r} has {len(dataset.samples)} slices, numbered from 0, and a task uses slice "
            f"{max(slices)}; correct slices"
        )


STRATEGY: Final = TasksStrategy()
