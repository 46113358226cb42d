"""The interface between the runs of tasks and an executor: what an executor is given, and what it must provide.

Implemented by the folders of `executors` whose runtimes run tasks; `task_run` knows only this interface. The bridge of
a task is built on it, too.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio

from hypha_proto.ids import PeerId
from hypha_proto.tasks import StoredOutput, TaskProgress, TaskSpec
from hypha_worker.job_storage import JobStorage
from hypha_worker.job_traffic import JobTraffic
from hypha_worker.jobs.execution import ExecutionTrace
from hypha_worker.leasing.capacity import Allocation
from hypha_worker.leasing.retention import FindProcesses
from hypha_worker.tasks.resource_fetcher import ResourceFetcher


class TaskControl(Protocol):
    """What an executor says about its task while it runs."""

    @property
    def drain_seconds(self) -> float | None:
        """Seconds that the attempt still has, or None if it does not drain."""
        ...

    def executor_started(self) -> None:
        """Report that the executor runs."""
        ...

    def progressed(self, progress: TaskProgress) -> None:
        """Report progress; of several reports that wait for a slow scheduler only the last is sent."""
        ...

    async def store_output(self, name: str, path: str) -> StoredOutput:
        """Store a file or folder of the work directory as an output now; it stays there, too.

        Raises:
            OutputError: the task has no output of this name, or there is no such file.
            StorageExceededError: it would exceed the task's storage.
            OSError: it cannot be stored.
        """
        ...


@dataclass(frozen=True, slots=True)
class TaskContext:
    """One attempt at a task, as an executor gets it."""

    job_id: uuid.UUID
    task: str
    attempt: int
    spec: TaskSpec
    settings: Mapping[str, Any]
    """Settings of the executor, as the definition has them."""
    lease: uuid.UUID
    scheduler: PeerId
    allocation: Allocation
    work_dir: Path
    """A private folder; it exists while the attempt runs."""
    storage: JobStorage
    """Bounds everything that is stored in `work_dir`; runs the attempt's file work."""
    traffic: JobTraffic
    scope: anyio.CancelScope
    """Cancelled when the attempt is to end. A cancellation from an outer scope means that the worker shuts down."""
    fetcher: ResourceFetcher
    control: TaskControl
    resources: MutableMapping[str, str] = field(default_factory=dict)
    """Path of each resource, relative to `work_dir`; filled before the executor runs."""
    traceparent: str | None = None
    """Span that the attempt's own spans belong to."""
    keep_resources: Callable[[FindProcesses], None] = lambda _find: None
    """Called if processes of the attempt live on that cannot be ended: its lease's resources then stay taken."""


class TaskExecution(Protocol):
    """One run of an executor for a task."""

    @property
    def trace(self) -> ExecutionTrace:
        """Exit code and last output known so far."""
        ...

    async def run(self) -> None:
        """Run to the end. When it returns, raises or is cancelled, no process of the attempt is left.

        Raises:
            ExecutionError: the task failed.
            WorkReturnedError: this worker cannot continue it.
        """
        ...


TaskExecutionFactory = Callable[[TaskContext], TaskExecution]
