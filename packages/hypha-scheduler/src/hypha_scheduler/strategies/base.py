"""The boundary between the job runner and strategies: what a strategy provides, and what it may use.

A strategy is a kind of job. It is registered by an entry point of the group ``hypha.strategies`` whose name is the
job's ``type``. Its `Operator` is a pure state machine: it is told what happened and when, and returns effects. The job
runner (`hypha_scheduler.jobs.runner`) carries the effects out and reports their outcome back. All times are seconds of
the local monotonic clock.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol

from hypha_net import retries
from hypha_net.transfer import PullSource
from hypha_proto.attempt_id import AttemptId
from hypha_proto.commands import Command
from hypha_proto.datasets import MANIFEST, UnusableSlice
from hypha_proto.ids import PeerId
from hypha_proto.protocols import RpcMethod
from hypha_proto.task_resources import Gone, LocateResource, ResourceLocation
from hypha_proto.tasks import StoredOutput, TaskProgress, TaskSpec
from hypha_proto.texts import quote
from hypha_proto.training_reports import ReportAnswer, ReportError, TrainingReport
from hypha_proto.transfer import PullRequest, PushHeader, Refusal
from hypha_scheduler.allocation.auction import RoleRequest as RoleRequest
from hypha_scheduler.datasets.dataset import DatasetView as DatasetView
from hypha_scheduler.jobs.artifacts import Artifact as Artifact
from hypha_scheduler.jobs.config import ArtifactTable, DatasetTable, JobTable
from hypha_scheduler.jobs.source_tables import S3Table

CANCEL: Final = "cancel"
"""Command that ends a job."""
BY_OWNER: Final = "its owner cancelled it"
"""Reason for which it ends then."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Lease that the job holds."""

    id: uuid.UUID
    peer: PeerId
    role: str
    price: float
    """Tokens per lease-hour."""


@dataclass(frozen=True, slots=True)
class TaskRef:
    """One attempt at a task on a lease. The runner passes on nothing that is said about an older attempt."""

    name: str
    lease: Lease
    attempt: int = 0
    """Chosen by the operator; grows with each start of the task, from `JobContext.first_attempt` on."""

    def id_in(self, job_id: uuid.UUID) -> AttemptId:
        """Return what messages about it call it."""
        return AttemptId(job_id, self.name, self.attempt)


# ------------------------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class StartTask:
    """Effect: start a task; the outcome is `TaskStarted` or `TaskNotStarted`. Its lease stays when it ends."""

    task: TaskRef
    spec: TaskSpec


@dataclass(frozen=True, slots=True)
class StopTask:
    """Effect: end a task; `Operator.on_task_update` hears of its end. Nothing happens if it has ended by now.

    Its lease is released, so that its worker cancels it, and the operator hears of its end at once. With `keep_lease`
    or `drain_seconds` the lease stays, and the operator hears of the end when the worker reports it.
    """

    task: TaskRef
    reason: str
    keep_lease: bool = False
    """Whether the lease stays for a further task; otherwise it is released."""
    drain_seconds: float = 0.0
    """Seconds for which a task may finish what it has begun; then it is cancelled. Keeps the lease."""


@dataclass(frozen=True, slots=True)
class SendCommand:
    """Effect: send a command to a running task; its `CommandAnswer`, or an error, reaches `on_effect_result`.

    Commands to a task arrive in their order. Nothing is heard of one whose task ends first.
    """

    task: TaskRef
    command: Command
    tag: str
    span: str = "send command"
    """Name of the span, in the trace of the job."""
    about: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Attributes of the span."""


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Effect: call a peer, again after each of `retry_delays` if that fails; the outcome reaches `on_effect_result`."""

    peer: PeerId
    method: RpcMethod[Any, Any]
    message: Any
    tag: str
    retry_delays: tuple[float, ...] = retries.MESSAGE.pauses
    """Seconds before each further attempt, with jitter. A peer that does not speak the protocol is not asked again."""
    span: str = "send message"
    """Name of the span, in the trace of the job."""
    about: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """Attributes of the span."""


@dataclass(frozen=True, slots=True)
class RunInBackground:
    """Effect: run work with files, threads or listeners in the job's task group.

    The outcome reaches `Operator.on_effect_result`. `JobFailedError`, `OSError` and `hypha_net.errors.NetError` are
    outcomes; any other exception fails the job.
    """

    work: Callable[[], Awaitable[object]]
    tag: str


@dataclass(frozen=True, slots=True)
class WriteJournal:
    """Effect: a journal record that is on disk before the effects after it are carried out and anybody is answered.

    If it cannot be written, the job fails. Numbers that are not finite become null. The kinds of
    `jobs.journal.RUNNER_KINDS` and the fields ``record`` and ``format`` are the runner's.
    """

    kind: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class EmitEvent:
    """Effect: an event for ``metrics.jsonl`` and the log."""

    name: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class PostMetric:
    """Effect: a number about a worker for the status bridge, if one is configured."""

    worker: PeerId
    step: int
    """Position on the time axis of a chart."""
    name: str
    value: float


@dataclass(frozen=True, slots=True)
class EndJob:
    """Effect: the job is over; without `failure` it succeeded. The runner releases its leases and writes the result."""

    failure: str | None = None


Effect = (
    StartTask | StopTask | SendCommand | SendMessage | RunInBackground | WriteJournal | EmitEvent | PostMetric | EndJob
)
Effects = tuple[Effect, ...]


# -------------------------------------------------------------------------------------------------- what operators hear


class TaskState(Enum):
    """State of a task."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def has_ended(self) -> bool:
        """Whether the state is final."""
        return self in (TaskState.FINISHED, TaskState.FAILED, TaskState.CANCELLED)


@dataclass(frozen=True, slots=True)
class TaskStarted:
    """Its worker has confirmed the task."""


@dataclass(frozen=True, slots=True)
class TaskNotStarted:
    """Its worker did not take the task; the lease is released."""

    reason: str


@dataclass(frozen=True, slots=True)
class TaskReady:
    """The resources of a task are there, and its executor runs."""


@dataclass(frozen=True, slots=True)
class TaskProgressed:
    """The executor of a task has reported progress."""

    progress: TaskProgress


@dataclass(frozen=True, slots=True)
class TaskDraining:
    """A task drains: it ends by itself, or is cancelled when its time is over."""

    seconds: float


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """An attempt has ended. Its resources are free, unless its lease ended too: the worker may be ending it still."""

    state: TaskState
    reason: str = ""
    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()
    """Last lines of its output, oldest first."""
    outputs: tuple[StoredOutput, ...] = ()
    """What a task that finished has made; its worker keeps it until `ReleaseOutputs`."""
    resource: str | None = None
    """Name of the resource that it could not be given, where that is why it failed."""


@dataclass(frozen=True, slots=True)
class TrafficCounts:
    """Bytes of files that a peer sent and received for one job, as it states them at the ends of its tasks."""

    sent: int | None = None
    """None if the peer does not state it."""
    received: int | None = None

    def __add__(self, other: TrafficCounts) -> TrafficCounts:
        return TrafficCounts(_sum(self.sent, other.sent), _sum(self.received, other.received))


def _sum(first: int | None, second: int | None) -> int | None:
    return second if first is None else first + (second or 0)


TaskUpdate = TaskStarted | TaskNotStarted | TaskReady | TaskProgressed | TaskDraining | TaskEnded
"""What has happened to an attempt at a task, as its worker or the runner says it."""


@dataclass(frozen=True, slots=True)
class PushTarget:
    """Where a pushed file may be written, and its largest size in bytes."""

    path: Path
    max_bytes: int
    prepare: Callable[[Path], Awaitable[None]] | None = None
    """Work on the complete file, awaited before `Operator.on_push_complete` hears of it; an `OSError` or a
    `JobFailedError` fails the job, and the sender of a file that `TransferRefusedError` refuses gets its reason."""
    slot: str = ""
    """A new push of the same lease to a slot cancels the one that is being received there, such as one that hangs."""


@dataclass(frozen=True, slots=True)
class SliceToUse:
    """Slice of a dataset, in one pass over it."""

    epoch: int
    """Pass over the dataset, from 0."""
    index: int
    first: int | None = None
    """Position of the first sample to use in the slice's order; None for a whole slice, whose assignment is not
    recorded."""
    end: int | None = None
    """Position after the last sample to use; None means all that follow."""


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Not yet: the runner asks again after the next event, at the latest in `seconds`."""

    seconds: float


class SliceRefusedError(Exception):
    """A worker gets no slice; the message says why."""


# ----------------------------------------------------------------------------------------------------------- interfaces


def not_served(request: PullRequest) -> Refusal:
    """Return the refusal of a file that no job of this scheduler serves to the peer."""
    return Refusal(reason=f"this scheduler does not serve {quote(request.dataset)}")


class JobContext(Protocol):
    """What a strategy may use of the scheduler: its own job's part and nothing else."""

    @property
    def job_id(self) -> uuid.UUID:
        """Id of the job."""
        ...

    @property
    def directory(self) -> Path:
        """Directory of the job's files; it exists."""
        ...

    @property
    def scheduler(self) -> PeerId:
        """This scheduler."""
        ...

    @property
    def first_attempt(self) -> int:
        """Number of the first attempt at a task in this run: larger than those of earlier runs of the job."""
        ...

    def reaches(self, dataset: str) -> bool:
        """Return whether a data node of an opened dataset is connected; tasks wait for one meanwhile."""
        ...

    async def open_dataset(
        self, source: str | DatasetTable, *, timeout: float, manifest: str = MANIFEST
    ) -> DatasetView:
        """Find a dataset by its name, or fetch and serve the one of a table, and store its manifest in a file.

        Raises:
            JobFailedError: no usable data node announced it within `timeout` seconds, it cannot be fetched, or the job
                has `dataset_faults`.
        """
        ...

    async def fetch_output(self, output: StoredOutput, holder: PeerId, target: Path) -> int:
        """Pull an output of a task to `target`, a file or folder that does not exist; return its size in bytes.

        It appears whole or not at all.

        Raises:
            NetError: the holder cannot be reached, no longer has it, or has other content than it has announced; or it
                has more bytes than the disk has room for.
            OSError: it cannot be stored.
        """
        ...

    async def prepare_artifact(
        self, table: ArtifactTable, name: str, copy: Path, *, unchanged: bool = False
    ) -> Artifact:
        """Make a model or preprocessor available to executors: served from `copy` here, or fetched from its own source.

        A plain `ArtifactTable` names other files of a repository, which are copied only if they are served from here.
        With `unchanged` the job leaves the copy as it is: there is always one, and one that exists already is used
        whatever the table says.

        Raises:
            JobFailedError: it does not exist or has no usable files.
        """
        ...

    async def presign(self, table: S3Table) -> str:
        """Return a URL of an object that anybody may read for 7 days, signed with this scheduler's keys; it is secret.

        Raises:
            JobFailedError: this scheduler has no keys.
        """
        ...

    def notify(self, name: str, message: object = None) -> None:
        """Deliver what background work observed to `Operator.on_message`, with no source."""
        ...


class Operator(Protocol):
    """One running job. The runner has checked who speaks: a `TaskRef` is a running task of this job on that peer.

    A class that derives from it defines what it needs: the other methods do nothing, or refuse. Methods that a later
    version adds have such defaults, too.
    """

    def on_start(self, now: float) -> Effects:
        """Begin the job: the first call, before any lease is sought. A resumed job may have nothing left to do."""
        return ()

    def role_requests(self) -> Sequence[RoleRequest]:
        """Return the leases that the job wants now, one request a role; asked again after each event.

        A larger count means growth or replacement, a smaller one that surplus leases without a task are released.
        The operator is not told of those: it has to forget them, since a task on one is answered with `TaskNotStarted`.
        """
        ...

    def on_leases_acquired(self, leases: Sequence[Lease], now: float) -> Effects:
        """Handle new leases. The first call has all leases of the first search, which found every role's minimum.

        If all requests have `starts_at_minimum`, the first call has the minimum, and others follow as they are found.
        """
        ...

    def on_tasks_adopted(self, tasks: Sequence[TaskRef], now: float) -> Effects:
        """Handle tasks of an earlier run of the scheduler that still run and whose leases were renewed.

        Called once, after `on_start` and in place of the first `on_leases_acquired`, if the scheduler was started again
        in time and there are such tasks; those of the journal that are not among them are lost. `role_requests` is not
        asked before. Only jobs whose `JobTable.orphan_grace_seconds` is not 0 have tasks that live on. By default they
        are stopped, and the job begins with a new search.
        """
        return tuple(StopTask(task, "the job does not continue tasks of an earlier run") for task in tasks)

    def on_lease_lost(self, lease: Lease, reason: str, now: float) -> Effects:
        """Handle a lost lease, before the end of the task on it is reported.

        Not called for a lease that the runner releases together with a task that was stopped or did not start.
        """
        return ()

    def on_lease_draining(self, lease: Lease, seconds: float, now: float) -> Effects:
        """Handle that the worker of a lease will end when the task on it has ended, after `seconds` in any case.

        The worker starts no further task on the lease, which is lost when the worker ends, unless it is released with
        its task before.
        """
        return ()

    def on_allocation_timeout(self, role: str, reasons: str, now: float) -> Effects:
        """Handle that a role has less than its minimum of leases after the search has timed out; fails the job."""
        return (EndJob(failure=reasons),)

    def on_task_update(self, task: TaskRef, update: TaskUpdate, now: float) -> Effects:
        """Handle what has happened to a task: `TaskNotStarted` and `TaskEnded` come last, and one of them once."""
        ...

    def on_training_report(self, task: TaskRef, report: TrainingReport, now: float) -> tuple[ReportAnswer, Effects]:
        """Handle a report of an executor that trains. Repeated requests never arrive here twice."""
        return ReportError(reason="this job takes no reports of training; a task reports by /task/update"), ()

    def next_slice(self, task: TaskRef, dataset: str, now: float) -> SliceToUse | RetryAfter | None:
        """Return the next samples for a task, or None if there are none for it.

        Raises:
            SliceRefusedError: the task gets no slice now.
        """
        return None

    def slice_ahead(self, task: TaskRef, dataset: str, now: float) -> SliceToUse | RetryAfter | None:
        """Return the next samples for a task whose executor is not ready to use them; by default as `next_slice`."""
        return self.next_slice(task, dataset, now)

    def on_slice_unusable(self, task: TaskRef, dataset: str, report: UnusableSlice, now: float) -> Effects:
        """Handle that a task cannot get a slice from any provider; it asks for one in its place next."""
        return ()

    def on_locate(self, task: TaskRef, request: LocateResource, now: float) -> tuple[ResourceLocation, Effects]:
        """Say where a task gets a resource whose source is a result; the runner answers for datasets."""
        return ResourceLocation(gone=Gone(reason="this job has no results")), ()

    def on_pull_request(self, task: TaskRef, request: PullRequest) -> PullSource | Refusal:
        """Return a file of the strategy's own; artifacts of `JobContext.prepare_artifact` are served without asking."""
        return not_served(request)

    def on_push_request(
        self, task: TaskRef, header: PushHeader, now: float
    ) -> tuple[PushTarget | Refusal | RetryAfter, Effects]:
        """Return where a file may be written that is about to arrive, or when to ask again."""
        return Refusal(reason="this job takes no files"), ()

    def on_push_complete(self, task: TaskRef, header: PushHeader, path: Path, digest: str, now: float) -> Effects:
        """Handle a complete file; the sender gets its receipt once journal records among the effects are on disk."""
        return ()

    def on_late_push(self, task: TaskRef, header: PushHeader, now: float) -> tuple[PushTarget | Refusal, Effects]:
        """Return where a file may be written whose task has ended: for its sender's receipt, as it cannot count."""
        return Refusal(reason="no task of this job runs there"), ()

    def on_late_push_complete(self, task: TaskRef, header: PushHeader, path: Path, now: float) -> Effects | None:
        """Handle a complete file whose task has ended, which may have been before it arrived; None refuses it."""
        return None

    def on_message(self, source: TaskRef | None, name: str, message: Any, now: float) -> tuple[Any, Effects]:
        """Handle a message of the strategy's own RPC methods, by the method's name, or a `JobContext.notify`.

        The answer may be `RetryAfter`, to be asked again; after some seconds the sender gets `StrategyMethod.pending`.
        """
        return None, ()

    def on_effect_result(self, tag: str, outcome: object, now: float) -> Effects:
        """Handle the outcome of `SendMessage` or `RunInBackground`: what it returned or the exception it raised."""
        return ()

    def next_deadline(self) -> float | None:
        """Return when `on_deadline` is due, or None; asked again after each event."""
        return None

    def on_deadline(self, now: float) -> Effects:
        """Handle that a deadline has passed."""
        return ()

    def on_suspended(self, seconds: float, now: float) -> Effects:
        """Handle that for lack of room on the disk nothing could be recorded for `seconds`: deadlines may move."""
        return ()

    def on_command(self, command: str, now: float) -> Effects:
        """Handle a command of the job's owner; ``cancel`` fails the job.

        Raises:
            ValueError: the strategy has no such command.
        """
        if command != CANCEL:
            raise ValueError(f"jobs of this type have no command {command!r}; known: {CANCEL}")
        return (EndJob(failure=BY_OWNER),)

    def summary(self, traffic: Mapping[PeerId, TrafficCounts]) -> Mapping[str, object]:
        """Return the strategy's part of ``result.json``; `traffic` counts the bytes of peers for it."""
        return {}


@dataclass(frozen=True, slots=True)
class StrategyMethod:
    """RPC method of a strategy. The field ``attempt`` of each request, an `AttemptId`, names the task that sends it."""

    method: RpcMethod[Any, Any]
    unknown_job: Any
    """Response to a peer that runs no task of such a job."""
    pending: Any = None
    """Response if `Operator.on_message` has answered with `RetryAfter` for too long; `unknown_job` if None."""


class Strategy(Protocol):
    """A kind of job; the object that the entry point names."""

    @property
    def job_table(self) -> type[JobTable]:
        """Model of ``[scheduler.job]`` for this type."""
        ...

    @property
    def rpc_methods(self) -> Sequence[StrategyMethod]:
        """Methods that executors call beside the scheduler's own; `Operator.on_message` handles them."""
        return ()

    def open(
        self, job: Any, context: JobContext, journal: Sequence[Mapping[str, Any]]
    ) -> AbstractAsyncContextManager[Operator]:
        """Prepare datasets, models and listeners, and return the operator as it stood after the journal's records.

        Raises:
            JobFailedError: it cannot begin, or the journal belongs to another model, dataset or version.
        """
        ...
