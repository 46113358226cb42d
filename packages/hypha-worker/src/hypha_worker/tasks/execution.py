"""The interface between the runs of tasks and an executor: what an executor is given, and what it must provide.

Implemented by the folders of `executors`; `task_run` knows only this interface, so a further runtime needs no change
there.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, MutableMapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import anyio

from hypha_net.transfer import FilePushTarget
from hypha_proto.attempt_id import AttemptId
from hypha_proto.commands import CommandAnswer, TaskCommand
from hypha_proto.ids import PeerId
from hypha_proto.tasks import StoredOutput, TaskProgress, TaskSpec
from hypha_proto.transfer import NO_JOB, PushHeader, Refusal
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.leasing.capacity import Allocation
from hypha_worker.leasing.retention import FindProcesses
from hypha_worker.task_storage import TaskStorage
from hypha_worker.tasks.resource_fetcher import ResourceFetcher


class TaskControl(Protocol):
    """What an executor says about its task while it runs."""

    @property
    def drain_seconds(self) -> float | None:
        """Seconds that the attempt still has, or None if it does not drain."""
        ...

    def report_ready(self) -> None:
        """Report that the executor runs."""
        ...

    def report_progress(self, progress: TaskProgress) -> None:
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

    attempt: AttemptId
    spec: TaskSpec
    settings: Mapping[str, Any]
    """Settings of the executor, as the definition has them."""
    lease: uuid.UUID
    scheduler: PeerId
    allocation: Allocation
    work_dir: Path
    """A private folder; it exists while the attempt runs."""
    storage: TaskStorage
    """Bounds what is stored in `work_dir`, counts what is sent and received, and runs the attempt's file work."""
    scope: anyio.CancelScope
    """Cancelled when the attempt is to end. A cancellation from an outer scope means that the worker shuts down."""
    contact: SchedulerContact
    """Reaches the scheduler, and waits for it as long as the attempt may run on without it."""
    fetcher: ResourceFetcher
    control: TaskControl
    resources: MutableMapping[str, str] = field(default_factory=dict)
    """Path of each resource, relative to `work_dir`; filled before the executor runs."""
    traceparent: str | None = None
    """Span that the attempt's own spans belong to."""
    keep_resources: Callable[[FindProcesses], None] = lambda _find: None
    """Called if processes of the attempt live on that cannot be ended: its lease's resources then stay taken."""


@dataclass(slots=True)
class ExecutionTrace:
    """Exit code and last output of an execution, for the report of its end."""

    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()


class Execution:
    """One run of an executor for a task. A runtime that takes neither files nor commands overrides `run` alone."""

    @property
    def senders(self) -> Set[PeerId]:
        """Peers whose pushes are for this task; empty if it takes none."""
        return frozenset()

    @property
    def accepted_push_kind(self) -> str:
        """The kind of push that this task accepts; empty if it takes none."""
        return ""

    @property
    def trace(self) -> ExecutionTrace:
        """Exit code and last output known so far."""
        return ExecutionTrace()

    async def run(self) -> None:
        """Run to the end. When it returns, raises or is cancelled, no process of the attempt is left.

        Raises:
            ExecutionError: the task failed.
            WorkReturnedError: this worker cannot continue it.
        """
        raise NotImplementedError

    async def accept_push(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        """Return where to store a file that `peer` is about to push, or a refusal."""
        return Refusal(reason=f"{NO_JOB} from {peer}")

    def handle_command(self, command: TaskCommand) -> CommandAnswer:
        """Carry out a command of the scheduler."""
        return CommandAnswer(number=command.number, accepted=False, reason="this task takes no such command")


ExecutionFactory = Callable[[TaskContext], Execution]
"""Makes an execution; raises `ExecutionError` if the task cannot run here."""
