"""Graph of the tasks of a job: instances, what they use of each other, and the leases that they need. Never changes.

Instances of one task depend on all instances of another, so that dependencies are kept between tasks and not between
instances.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any, Final

from hypha_proto.ids import PeerId
from hypha_proto.job_spec import HuggingFaceReference
from hypha_proto.offers import ExecutorDescriptor, WorkerSpec
from hypha_proto.tasks import (
    DatasetSource,
    DhtSource,
    FileSource,
    OutputPath,
    PeersSource,
    ResultSource,
    S3Source,
    TaskResource,
    TaskSpec,
    UriSource,
)
from hypha_scheduler.allocation.auction import RoleRequest
from hypha_scheduler.strategies.tasks.config import ResourceTable, TasksJob, TaskTable

Result = tuple[str, str]
"""Name of a task and of one of its outputs, of all instances."""
Key = tuple[str, str]
"""Name of an instance and of one of its outputs."""

_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class Role:
    """Leases on which the tasks of one executor with the same needs run."""

    name: str
    spec: WorkerSpec

    def request(self, job: TasksJob, count: int) -> RoleRequest:
        """Ask for leases; without at least one of them the job cannot go on."""
        price = job.worker_price
        return RoleRequest(
            self.name, self.spec, price.bid, price.max, count, minimum=1, distinct_peers=False, starts_at_minimum=True
        )


@dataclass(frozen=True, slots=True, eq=False)
class GraphTask:
    """A task, of one or more instances."""

    table: TaskTable
    role: Role
    inputs: tuple[Result, ...]
    """Results that it uses, each once."""
    keep: frozenset[str]
    """Outputs that are brought to the scheduler."""
    names: tuple[str, ...]
    """Names of its instances, by their index."""
    first: int
    """Position of its first instance in the order in which instances are started; after what they depend on."""

    @property
    def name(self) -> str:
        """Name as the user wrote it."""
        return self.table.name

    def resource(self, name: str) -> ResourceTable | None:
        """Return a resource by its name."""
        return next((found for found in self.table.resources if found.name == name), None)

    def spec(self, index: int) -> TaskSpec:
        """Return what an instance runs."""
        table = self.table
        several = table.count > 1
        return TaskSpec(
            executor=table.executor,
            settings=json.dumps(table.settings, ensure_ascii=False),
            resources=tuple(_source(resource) for resource in table.resources),
            outputs=tuple(OutputPath(name=name, path=path) for name, path in table.outputs.items()),
            index=index if several else None,
            count=table.count if several else None,
            timeout_ms=None if table.timeout is None else max(1, round(table.timeout * _MS)),
        )


def _source(table: ResourceTable) -> TaskResource:
    """Return a resource as it is sent."""
    source: dict[str, Any] = {}
    if table.result is not None:
        source["result"] = ResultSource(task=table.result.task, output=table.result.output)
    elif table.dataset is not None:
        source["dataset"] = DatasetSource(name=table.dataset.name, slices=table.dataset.slices)
    elif (hub := table.huggingface) is not None:
        token = None if hub.token is None else hub.token.get_secret_value()
        source["huggingface"] = HuggingFaceReference(
            repository=hub.repository, revision=hub.revision, filenames=hub.filenames, token=token
        )
    elif (peers := table.peers) is not None:
        found = tuple(PeerId.parse(peer) for peer in peers.peers)
        source["peers"] = PeersSource(peers=found, dataset=peers.dataset, index=peers.index, filenames=peers.filenames)
    elif table.file is not None:
        source["file"] = FileSource(path=table.file.path)
    elif table.uri is not None:
        source["uri"] = UriSource(value=table.uri.value)
    elif table.s3 is not None:
        source["s3"] = S3Source(bucket=table.s3.bucket, key=table.s3.key)
    elif table.dht is not None:
        source["dht"] = DhtSource(sha256=table.dht.sha256)
    return TaskResource(name=table.name, **source)


@dataclass(slots=True)
class TaskGraph:
    """Tasks of a job in an order in which each follows those whose results it uses."""

    job: TasksJob
    tasks: dict[str, GraphTask] = field(default_factory=dict)
    """By name, in this order."""
    consumers: dict[Result, tuple[GraphTask, ...]] = field(default_factory=dict)
    """Tasks that use a result."""
    roles: tuple[Role, ...] = ()

    def __post_init__(self) -> None:
        used = {(found.task, found.output) for table in self.job.tasks for found in _results(table)}
        roles: dict[tuple[str, Any], Role] = {}
        consumers: defaultdict[Result, list[GraphTask]] = defaultdict(list)
        first = 0
        for table in _in_order(self.job.tasks):
            inputs = tuple(dict.fromkeys((found.task, found.output) for found in _results(table)))
            unused = frozenset(name for name in table.outputs if (table.name, name) not in used)
            keep = unused if table.keep is None else frozenset(table.keep)
            names = (table.name,) if table.count == 1 else (f"{table.name}[{index}]" for index in range(table.count))
            task = GraphTask(table, _role_of(table, roles), inputs, keep, tuple(names), first)
            first += table.count
            self.tasks[table.name] = task
            for result in inputs:
                consumers[result].append(task)
        self.consumers = {result: tuple(found) for result, found in consumers.items()}
        self.roles = tuple(roles.values())

    def digest(self) -> str:
        """Return what identifies the list of tasks, without secrets."""
        tasks = [table.model_dump(mode="json") for table in self.job.tasks]
        return hashlib.sha256(json.dumps(tasks, sort_keys=True).encode()).hexdigest()


def _results(table: TaskTable) -> Iterator[Any]:
    return (resource.result for resource in table.resources if resource.result is not None)


def _role_of(table: TaskTable, known: dict[tuple[str, Any], Role]) -> Role:
    """Return the role of a task, named after its executor; `known` are those of earlier ones by executor and needs."""
    need = (table.executor, table.needs)
    if need not in known:
        number = sum(executor == table.executor for executor, _ in known) + 1
        name = table.executor if number == 1 else f"{table.executor} {number}"
        spec = WorkerSpec(resources=table.needs.resources(), executor=(ExecutorDescriptor.parse(table.executor),))
        known[need] = Role(name, spec)
    return known[need]


def _in_order(tables: tuple[TaskTable, ...]) -> Iterator[TaskTable]:
    """Yield tasks after those whose results they use, otherwise in the user's order. There are no cycles."""
    by_name = {table.name: index for index, table in enumerate(tables)}
    sorter = TopologicalSorter(
        {index: {by_name[found.task] for found in _results(table)} for index, table in enumerate(tables)}
    )
    sorter.prepare()
    ready: list[int] = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(ready, index)
        yield tables[index := heapq.heappop(ready)]
        sorter.done(index)
