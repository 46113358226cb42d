"""The strategy ``tasks``. Registered as an entry point."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from hypha_proto.job_spec import PeersReference
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.config import ArtifactTable
from hypha_scheduler.strategies.base import JobContext, Operator, StrategyMethod
from hypha_scheduler.strategies.tasks import records
from hypha_scheduler.strategies.tasks.config import HuggingFaceTable, PeersTable, TasksJob, UriTable
from hypha_scheduler.strategies.tasks.graph import TaskGraph
from hypha_scheduler.strategies.tasks.operator import TasksOperator
from hypha_scheduler.strategies.tasks.outputs import copies_of_hubs, remove_copies, remove_incomplete


class TasksStrategy:
    """Implements `strategies.base.Strategy`."""

    job_table = TasksJob
    rpc_methods: Sequence[StrategyMethod] = ()

    @asynccontextmanager
    async def open(
        self, job: TasksJob, context: JobContext, journal: Sequence[Mapping[str, Any]]
    ) -> AsyncIterator[Operator]:
        """Find the datasets that tasks use, and go on after the records of the journal.

        Raises:
            JobFailedError: a dataset was not found or has too few slices, or the journal is of other tasks.
        """
        graph = TaskGraph(job)
        definition = graph.digest()
        earlier = records.read(journal, definition)
        await anyio.to_thread.run_sync(remove_incomplete, context.directory)
        await _open_datasets(job, context)
        yield TasksOperator(await _with_locations(graph, context), context, earlier, definition)
        await anyio.to_thread.run_sync(remove_copies, context.directory)


async def _with_locations(graph: TaskGraph, context: JobContext) -> TaskGraph:
    """Return a graph whose tasks name objects by presigned URLs, and files of hubs as served here, where that is due.

    Raises:
        JobFailedError: a URL cannot be signed, or files cannot be fetched from a hub.
    """
    tables = []
    served: dict[HuggingFaceTable, PeersTable | None] = {}
    for number, task in enumerate(graph.job.tasks):
        resources = []
        for place, resource in enumerate(task.resources):
            if resource.s3 is not None and resource.s3.presigned:
                uri = UriTable.model_construct(value=await context.presign(resource.s3))
                resource = resource.model_copy(update={"s3": None, "uri": uri})
            elif (hub := resource.huggingface) is not None:
                if hub not in served:
                    key = f"tasks[{number}].resources[{place}].huggingface"
                    served[hub] = await _serve(hub, key, copies_of_hubs(context.directory) / key, context)
                if (peers := served[hub]) is not None:
                    resource = resource.model_copy(update={"huggingface": None, "peers": peers})
            resources.append(resource)
        tables.append(task.model_copy(update={"resources": tuple(resources)}))
    return TaskGraph(graph.job.model_copy(update={"tasks": tuple(tables)}))


async def _serve(hub: HuggingFaceTable, key: str, copy: Path, context: JobContext) -> PeersTable | None:
    """Return where workers get files of a repository from this scheduler; None if they fetch them from their hub."""
    table = ArtifactTable.model_validate(hub.model_dump())
    artifact = await context.prepare_artifact(table, key, copy, unchanged=True)
    reference = artifact.reference
    if not isinstance(reference, PeersReference):
        return None
    assert reference.resource is not None
    peers = tuple(map(str, reference.peers))
    return PeersTable(peers=peers, dataset=reference.resource.dataset, filenames=reference.filenames)


async def _open_datasets(job: TasksJob, context: JobContext) -> None:
    """Have the datasets found from which the runner answers workers.

    Raises:
        JobFailedError: one was not found, or has too few slices.
    """
    failures: list[JobFailedError] = []
    async with anyio.create_task_group() as tasks:
        for number, name in enumerate(job.dataset_names):
            tasks.start_soon(_open_dataset, job, context, name, number, failures)
    if failures:
        raise JobFailedError("; ".join(map(str, failures)))


async def _open_dataset(
    job: TasksJob, context: JobContext, name: str, number: int, failures: list[JobFailedError]
) -> None:
    try:
        await context.open_dataset(name, timeout=job.allocation_timeout, manifest=f"dataset-{number}.json")
    except JobFailedError as error:
        failures.append(error)


STRATEGY: Final = TasksStrategy()
