"""One attempt at a task, from its acceptance to the status update with its end.

Started by `task_sessions`. The end is reported after the executor's processes are gone, the folder is removed and the
lease takes a further task, so that a scheduler that gets the report can send the next one at once.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc
import anyio.to_thread

from hypha_net import instrumentation
from hypha_net.endpoint import Endpoint
from hypha_net.errors import first_leaf_error
from hypha_net.redaction import redact_urls
from hypha_net.transfer import FilePushTarget
from hypha_proto.attempt_id import AttemptId
from hypha_proto.commands import CommandAnswer, TaskCommand
from hypha_proto.ids import PeerId
from hypha_proto.resources import GIGABYTE
from hypha_proto.tasks import (
    MAX_OUTPUT_FILES,
    Draining,
    Ready,
    Started,
    StatusUpdate,
    StoredOutput,
    TaskCancelled,
    TaskFailed,
    TaskFinished,
    TaskProgress,
    TaskSpec,
)
from hypha_proto.texts import one_line, shorten
from hypha_proto.transfer import PushHeader, Refusal
from hypha_worker.connectors.access_policy import AccessPolicy
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.content_cache import ContentCache, SchedulerCache
from hypha_worker.errors import ExecutionError, WorkReturnedError, disk_fault_of
from hypha_worker.leasing.lease_manager import Lease, LeaseManager
from hypha_worker.leasing.retention import Retention
from hypha_worker.task_storage import DEFAULT_STORAGE, TaskStorage
from hypha_worker.tasks.execution import Execution, ExecutionFactory, TaskContext
from hypha_worker.tasks.output_files import OutputError
from hypha_worker.tasks.output_store import OutputOwner, OutputStore
from hypha_worker.tasks.resource_fetcher import ResourceError, ResourceFetcher
from hypha_worker.tasks.resource_pushes import ResourcePushes
from hypha_worker.work_dir import remove_task_files

_log = logging.getLogger(__name__)

_LONGEST: Final = 1000
"""Characters of a reason or line in a status update."""
_ACTIVE: Final = instrumentation.UpDownCounter(
    "hypha.worker.tasks.active", "{task}", "Attempts at tasks that run, by executor."
)
_STARTED: Final = instrumentation.Counter(
    "hypha.worker.tasks.started", "{task}", "Attempts at tasks that were begun, by executor."
)
_ENDED: Final = instrumentation.Counter(
    "hypha.worker.tasks.ended", "{task}", "Attempts at tasks that ended, by executor and outcome."
)
_DURATION: Final = instrumentation.Histogram("hypha.worker.task.duration", "s", "From start to end of an attempt.")


@dataclass(frozen=True, slots=True)
class TaskHost:
    """What all tasks of a worker share."""

    endpoint: Endpoint
    lease_manager: LeaseManager
    work_dir: Path
    """Each attempt gets a folder in it."""
    store: OutputStore
    executors: Mapping[str, ExecutionFactory] = field(default_factory=dict)
    """Makes an execution, by the executor's name in `TaskSpec.executor`."""
    access: AccessPolicy = field(default_factory=AccessPolicy)
    resource_pushes: ResourcePushes = field(default_factory=ResourcePushes)
    default_storage: float = DEFAULT_STORAGE
    """GB that an attempt may store whose lease states none."""
    cache: ContentCache | None = None


@dataclass(slots=True)
class TaskRun:
    """An attempt that runs on a lease; implements `execution.TaskControl`."""

    host: TaskHost
    lease: Lease
    attempt: AttemptId
    spec: TaskSpec
    settings: Mapping[str, Any]
    send_update: Callable[[StatusUpdate], None]
    wait_until_sent: Callable[[], Awaitable[None]]
    """Waits until the scheduler has handled all status updates that were sent so far."""
    retention: Retention
    ended: anyio.Event = field(default_factory=anyio.Event)
    _scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _stop_reason: str = "the worker is shutting down"
    _stored: dict[str, StoredOutput] = field(default_factory=dict)
    _storing: anyio.Lock = field(default_factory=anyio.Lock)
    _progress: TaskProgress | None = None
    """The latest progress that was not sent yet."""
    _is_sending: bool = False
    _tasks: anyio.abc.TaskGroup | None = None
    _context: TaskContext = field(init=False)
    execution: Execution = field(init=False)
    span: instrumentation.Span = field(init=False)
    """Covers the attempt; ended by `run`, or by the caller if it never runs."""

    def __post_init__(self) -> None:
        about = {
            "hypha.job.id": str(self.attempt.job_id),
            "hypha.task": self.attempt.task,
            "hypha.lease.id": str(self.lease.id),
        }
        self.span = instrumentation.start_span("execute task", about, parent=self.spec.traceparent)
        try:
            self._context = self._make_context()
            self.execution = self.host.executors[self.spec.executor](self._context)
        except ExecutionError as error:
            instrumentation.end_span(self.span, error)
            raise

    def __str__(self) -> str:
        return f"task {self.attempt.task} (job {self.attempt.job_id!s:.8}, attempt {self.attempt.number})"

    @property
    def is_ending(self) -> bool:
        """Whether it was stopped."""
        return self._scope.cancel_called

    @property
    def contact(self) -> SchedulerContact:
        """How it reaches its scheduler."""
        return self._context.contact

    @property
    def owner(self) -> OutputOwner:
        """Whose outputs it makes."""
        return OutputOwner(self.lease.scheduler, self.attempt, self.lease.id)

    def _make_context(self) -> TaskContext:
        host, lease = self.host, self.lease
        work_dir = host.work_dir / f"hypha-{uuid.uuid4()}"
        limit = (lease.allocation.resources.storage or host.default_storage) * GIGABYTE
        cache = None if host.cache is None else SchedulerCache(host.cache, str(lease.scheduler))
        storage = TaskStorage(work_dir, max(0, int(limit) - host.store.lease_bytes(lease.id)), cache)
        may_outlast = partial(host.lease_manager.may_outlast_renewals, lease.id)
        contact = SchedulerContact(host.endpoint, lease.scheduler, lambda: may_outlast(anyio.current_time()))
        return TaskContext(
            attempt=self.attempt,
            spec=self.spec,
            settings=self.settings,
            lease=lease.id,
            scheduler=lease.scheduler,
            allocation=lease.allocation,
            work_dir=work_dir,
            storage=storage,
            scope=self._scope,
            contact=contact,
            control=self,
            traceparent=instrumentation.traceparent_of(self.span),
            keep_resources=partial(self.retention.keep, lease.id),
            fetcher=ResourceFetcher(
                contact=contact,
                attempt=self.attempt,
                storage=storage,
                access=host.access,
                store=host.store,
                resource_pushes=host.resource_pushes,
            ),
        )

    # --------------------------------------------------------------------------------------------- from the scheduler

    def stop(self, reason: str) -> None:
        """End the attempt now; it is reported as cancelled."""
        if not self._scope.cancel_called:
            self._stop_reason = reason
            self._scope.cancel()

    def drain(self, left_ms: int, reason: str) -> None:
        """Let the attempt end by itself within a time; then it is stopped."""
        if not self._scope.cancel_called:
            self._stop_reason = f"the time to end by itself is over: {reason}"
            self._scope.deadline = anyio.current_time() + left_ms / 1000
            self._send(draining=Draining(left_ms))

    def handle_command(self, command: TaskCommand) -> CommandAnswer:
        """Carry out a command of the strategy."""
        return self.execution.handle_command(command)

    async def accept_push(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        """Return where to store a file that a peer is about to push, or a refusal."""
        target = await self.execution.accept_push(peer, header)
        return target if isinstance(target, Refusal) else self._context.storage.traffic.counting(target)

    # ---------------------------------------------------------------------------------------------- from the executor

    @property
    def drain_seconds(self) -> float | None:
        """See `TaskControl.drain_seconds`."""
        left = self._scope.deadline - anyio.current_time()
        return None if left == float("inf") else max(0.0, left)

    def report_ready(self) -> None:
        """See `TaskControl.report_ready`."""
        self._send(ready=Ready())

    def report_progress(self, progress: TaskProgress) -> None:
        """See `TaskControl.report_progress`."""
        self._progress = progress
        if not self._is_sending and self._tasks is not None:
            self._is_sending = True
            self._tasks.start_soon(self._send_progress)

    async def _send_progress(self) -> None:
        try:
            while self._flush_progress():
                await self.wait_until_sent()
        finally:
            self._is_sending = False

    def _flush_progress(self) -> bool:
        progress, self._progress = self._progress, None
        if progress is not None:
            self._send(progress=progress)
        return progress is not None

    async def store_output(self, name: str, path: str) -> StoredOutput:
        """See `TaskControl.store_output`."""
        if all(name != output.name for output in self.spec.outputs):
            known = ", ".join(output.name for output in self.spec.outputs) or "it has none"
            raise OutputError(f"the task has no output {name!r}; its outputs: {known}")
        async with self._storing:
            before = self._stored.get(name)
            stored = await self._store(name, path, copy=True)
            if before is not None:
                await self._discard([before])
        return stored

    async def _store(self, name: str, path: str, *, copy: bool) -> StoredOutput:
        storage, now = self._context.storage, anyio.current_time()
        stored = await self.host.store.store(self.owner, name, path, storage, now, copy=copy)
        self._stored[name] = stored
        return stored

    # -------------------------------------------------------------------------------------------------------- running

    async def run(self) -> None:
        """Run the attempt on its lease, to which it is attached, and report its end."""
        about = {"hypha.executor": self.spec.executor}
        _STARTED.add(1, about)
        _ACTIVE.add(1, about)
        started = anyio.current_time()
        result: StatusUpdate | None = None
        try:
            with instrumentation.current(self.span), self._scope:
                self._send(started=Started())
                result = await self._execute()
                self._describe_end(result)
        finally:
            result = result or self._cancelled(self._stop_reason)
            with anyio.CancelScope(shield=True):
                try:
                    await self._clean_up(result)
                except Exception:  # noqa: BLE001 - logged: the end is reported all the same, or nobody hears of it
                    _log.exception("the files of %s were not removed because of an error in this worker", self)
            self.host.lease_manager.detach_task(self.lease.id, outcome=_outcome(result))
            self._log_end(result)
            _ACTIVE.add(-1, about)
            ended = {**about, "hypha.outcome": _outcome(result)}
            _ENDED.add(1, ended)
            _DURATION.record(anyio.current_time() - started, ended)
            self._flush_progress()
            self.send_update(result)
            self.ended.set()

    def _describe_end(self, result: StatusUpdate) -> None:
        self.span.set_attribute("hypha.outcome", _outcome(result))
        if (code := self.execution.trace.exit_code) is not None:
            self.span.set_attribute("process.exit.code", code)

    async def _clean_up(self, result: StatusUpdate) -> None:
        if result.finished is None:
            await self._discard(list(self._stored.values()))
        # a thread of its own: it must wait neither for other tasks' threads nor for abandoned ones of this task
        await anyio.to_thread.run_sync(remove_task_files, self._context.storage.files, limiter=anyio.CapacityLimiter(1))

    async def _discard(self, outputs: list[StoredOutput]) -> None:
        held = [found for output in outputs for found in self.host.store.held if found.output is output]
        await self.host.store.remove(held)
        for found in held:
            self._context.storage.release(found.path)

    async def _execute(self) -> StatusUpdate:
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                if self.contact.may_wait():
                    tasks.start_soon(self.contact.keep)
                outputs = await self._run_executor()
                tasks.cancel_scope.cancel()
        except Exception as error:  # noqa: BLE001 - logged and reported: it ends this attempt only
            return self._result_of(first_leaf_error(error))
        except BaseExceptionGroup as errors:  # it failed while it was being cancelled: the cancellation counts
            cancelled, failures = errors.split(anyio.get_cancelled_exc_class())
            if cancelled is None or not isinstance(failures, ExceptionGroup):
                raise
            _log.warning("%s failed while it was cancelled: %s", self, first_leaf_error(failures))
            raise cancelled from None
        finally:
            self._tasks = None
        return self._make_update(finished=TaskFinished(outputs=outputs, **self._transferred))

    async def _run_executor(self) -> tuple[StoredOutput, ...]:
        context = self._context
        context.storage.files.create()
        if self._tasks is not None:
            self._tasks.start_soon(context.storage.watch)
        context.resources.update(await context.fetcher.fetch_all(self.spec.resources))
        await self.execution.run()
        for output in self.spec.outputs:
            if output.name not in self._stored:
                await self._store(output.name, output.path, copy=False)
        outputs = tuple(self._stored[output.name] for output in self.spec.outputs)
        if (count := sum(len(output.files) for output in outputs)) > MAX_OUTPUT_FILES:
            raise OutputError(f"the outputs hold {count} files, over the limit of {MAX_OUTPUT_FILES}")
        return outputs

    def _result_of(self, cause: Exception) -> StatusUpdate:
        is_returned = isinstance(cause, WorkReturnedError)
        if (reason := str(cause) if is_returned else disk_fault_of(cause, self._context.work_dir)) is not None:
            _log.error("%s is given back to its scheduler: %s", self, reason)
            return self._cancelled(reason)
        if isinstance(cause, ExecutionError | OSError):
            return self._failed(str(cause), cause.resource if isinstance(cause, ResourceError) else None)
        _log.error("%s failed because of an error in this worker", self, exc_info=cause)
        return self._failed(f"error in the worker: {cause!r}", None)

    # ------------------------------------------------------------------------------------------------- status updates

    def _failed(self, reason: str, resource: str | None) -> StatusUpdate:
        trace = self.execution.trace
        return self._make_update(
            failed=TaskFailed(
                reason=status_text(reason),
                exit_code=trace.exit_code,
                last_lines=tuple(shorten(redact_urls(line), _LONGEST) for line in trace.last_lines),
                resource=resource,
                **self._transferred,
            )
        )

    def _cancelled(self, reason: str) -> StatusUpdate:
        return self._make_update(cancelled=TaskCancelled(reason=status_text(reason), **self._transferred))

    @property
    def _transferred(self) -> dict[str, int]:
        traffic = self._context.storage.traffic
        return {"bytes_sent": traffic.sent, "bytes_received": traffic.received}

    def _make_update(self, **fields: Any) -> StatusUpdate:
        return StatusUpdate(attempt=self.attempt, **fields)

    def _send(self, **fields: Any) -> None:
        self.send_update(self._make_update(**fields))

    def _log_end(self, result: StatusUpdate) -> None:
        if result.failed is not None:
            tail = "".join(f"\n    {line}" for line in result.failed.last_lines[-10:])
            _log.error("%s failed: %s%s", self, result.failed.reason, tail)
        elif result.cancelled is not None:
            _log.info("%s cancelled: %s", self, result.cancelled.reason)
        else:
            _log.info("%s finished", self)


def status_text(text: str) -> str:
    """Return a text as the reason in a status update: one line of bounded length, in UTF-8, no secret parts of URLs."""
    return one_line(redact_urls(text).encode(errors="replace").decode(), _LONGEST)


def _outcome(result: StatusUpdate) -> str:
    if result.finished is not None:
        return "finished"
    return "failed" if result.failed is not None else "cancelled"
