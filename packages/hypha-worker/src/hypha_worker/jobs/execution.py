"""The interface between the job manager and an executor: what an executor is given, and what it must provide.

Implemented by the folders of `executors`; `executors.runtimes` lists them, and the configuration says which one runs a
job. `job_manager` knows only this interface, so a further executor needs no change there.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import anyio

from hypha_net.endpoint import Endpoint
from hypha_net.transfer import FilePushTarget
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import JobSpec
from hypha_proto.leases import Outcome
from hypha_proto.protocols import RpcMethod
from hypha_proto.transfer import PushHeader, Refusal
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.job_storage import JobStorage
from hypha_worker.job_traffic import JobTraffic
from hypha_worker.leasing.capacity import Allocation
from hypha_worker.leasing.retention import FindProcesses


class TaskMessage(Protocol):
    """A request that names the job that it is about."""

    @property
    def job_id(self) -> uuid.UUID:
        """The job."""
        ...


Req = TypeVar("Req", bound=TaskMessage)
Resp = TypeVar("Resp")
MessageHandler = Callable[[PeerId, Any], Awaitable[Any]]
"""Handles a request of a task method: takes the scheduler and the request, returns the response."""


@dataclass(frozen=True, slots=True)
class TaskMethod(Generic[Req, Resp]):
    """An RPC method that executions serve; the job manager routes its requests by job and sender."""

    method: RpcMethod[Req, Resp]
    refuse: Callable[[str], Resp]
    """Makes the response, from a reason, where no execution here is to handle the request."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """One dispatch of a job, as an executor gets it."""

    endpoint: Endpoint
    spec: JobSpec
    lease: uuid.UUID
    scheduler: PeerId
    allocation: Allocation
    work_dir: Path
    """A private folder; it exists while the job runs."""
    storage: JobStorage
    """Bounds everything that is stored in `work_dir`; runs the job's file work."""
    contact: SchedulerContact
    """Reaches the scheduler, and waits for it as long as the job may run on without it."""
    scope: anyio.CancelScope
    """Cancelled when this job is to end. A cancellation from an outer scope means that the worker shuts down."""
    traffic: JobTraffic = field(default_factory=JobTraffic)
    """Counts what is sent and received for the job."""
    traceparent: str | None = None
    """Span that the job's own spans belong to."""
    keep_resources: Callable[[FindProcesses], None] = lambda _find: None
    """Called if processes of the job live on that cannot be ended: its lease's resources then stay taken."""


@dataclass(slots=True)
class ExecutionTrace:
    """Exit code and last output of an execution, for the report of its end."""

    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """How a job ended."""

    outcome: Outcome
    reason: str = ""
    trace: ExecutionTrace = field(default_factory=ExecutionTrace)


class Execution(Protocol):
    """One execution of a job."""

    @property
    def senders(self) -> Set[PeerId]:
        """Peers whose pushes are for this job; empty if it takes none."""
        ...

    @property
    def accepted_push_kind(self) -> str:
        """The kind of push that this job accepts."""
        ...

    @property
    def message_handlers(self) -> Mapping[str, MessageHandler]:
        """Handlers of the scheduler's requests to this job, by `RpcMethod.name` of a `Runtime.task_methods`."""
        ...

    @property
    def trace(self) -> ExecutionTrace:
        """Exit code and last output known so far."""
        ...

    async def run(self) -> None:
        """Run to the end. When it returns, raises or is cancelled, no process of the job is left.

        Raises:
            ExecutionError: the job failed.
        """
        ...

    async def accept_push(self, peer: PeerId, header: PushHeader | None) -> FilePushTarget | Refusal:
        """Return where to store a file that `peer` is about to push, or a refusal."""
        ...


ExecutionFactory = Callable[[JobContext], Execution]
"""Makes an execution; raises `ExecutionError` if the job cannot run here."""
