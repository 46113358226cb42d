"""Runs jobs on leases: dispatch, cancellation, pushes to jobs, and the report of each job's end.

Called by `service` when a scheduler dispatches or cancels a job, or a peer pushes a file; calls the execution that the
configured factory makes. A job's end is reported after its processes are gone, its folder is removed and its resources
are free, or its lease takes another job, so that a scheduler that gets the report can use them at once.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import anyio
import anyio.abc
import anyio.to_thread

from hypha_net import instrumentation
from hypha_net.endpoint import Endpoint
from hypha_net.error_causes import first_leaf_error
from hypha_net.errors import NetError, UnhandledRequestError, UnsupportedProtocolError
from hypha_net.redaction import redact_urls
from hypha_net.transfer import FilePushTarget
from hypha_proto.dispatch import (
    JOB_STATUS,
    Dispatched,
    DispatchFailed,
    DispatchJob,
    DispatchResult,
    Failed,
    Finished,
    JobStatus,
    Running,
)
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import JobSpec, executor_class
from hypha_proto.leases import JOB_END, JobEnd, JobEndReceived
from hypha_proto.offers import AggregateExecutor, ExecutorDescriptor, TrainExecutor
from hypha_proto.transfer import NO_JOB, PushHeader, Refusal
from hypha_worker.connectors.peer_protocols import speaks_lease_protocol
from hypha_worker.connectors.rpc_retry import RETRY_DELAYS, call_with_retries
from hypha_worker.connectors.scheduler_contact import SchedulerContact
from hypha_worker.content_cache import ContentCache, cache_of
from hypha_worker.errors import ExecutionError, reason_to_return_work
from hypha_worker.job_storage import DEFAULT_STORAGE, GIGABYTE, JobStorage
from hypha_worker.job_traffic import JobTraffic
from hypha_worker.jobs.execution import (
    Execution,
    ExecutionFactory,
    ExecutionResult,
    JobContext,
    TaskMessage,
    TaskMethod,
)
from hypha_worker.leasing.expiry import expiry_fields
from hypha_worker.leasing.lease_manager import Attempt, Lease, LeaseError, LeaseManager, LeaseState
from hypha_worker.leasing.retention import Retention
from hypha_worker.work_dir import remove_job_files

_log = logging.getLogger(__name__)

END_REPORT_DELAYS: Final = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each attempt to report a job's end to its scheduler."""
SHUTDOWN_REPORT_TIMEOUT: Final = 1.0
"""Seconds that this report may take when the worker itself shuts down."""
TAKE_UP_TIME: Final = 15.0
"""Seconds for which an end is reported again that a scheduler has acknowledged after it was lost, unless it renews."""
LINE_LIMIT: Final = 1000
"""Characters of a reason or an output line in a report."""
_ACTIVE: Final = instrumentation.UpDownCounter("hypha.worker.jobs.active", "{job}", "Jobs that run, by class.")
_STARTED: Final = instrumentation.Counter("hypha.worker.jobs.started", "{job}", "Jobs that were begun, by class.")
_ENDED: Final = instrumentation.Counter(
    "hypha.worker.jobs.ended", "{job}", "Jobs that have ended, by class and outcome."
)
_DURATION: Final = instrumentation.Histogram("hypha.worker.job.duration", "s", "From dispatch to the end of a job.")
_DISPATCHES: Final = instrumentation.Counter(
    "hypha.worker.dispatches", "{dispatch}", "Dispatches by outcome: accepted, refused, stranger (no such lease here)."
)
Req = TypeVar("Req", bound=TaskMessage)
Resp = TypeVar("Resp")


@dataclass(slots=True)
class Job:
    """One dispatched job."""

    lease: uuid.UUID
    task_id: uuid.UUID
    """Id of its dispatch, which statuses carry: the lease's, or one of the scheduler's own."""
    scheduler: PeerId
    spec: JobSpec
    execution: Execution
    scope: anyio.CancelScope
    span: instrumentation.Span
    traffic: JobTraffic
    storage: JobStorage
    contact: SchedulerContact
    attempt: int | None = None
    """Number of its dispatch on the lease, if its scheduler numbers them."""
    keep_lease: bool = False
    """Whether its lease is kept when it ends by itself."""
    report_until: float = -math.inf
    """When the report of its end waits for the scheduler no longer, on the local clock; set when it has ended."""
    cancel_reason: str = "the worker is shutting down"

    def __str__(self) -> str:
        return f"{executor_class(self.spec)} job {self.spec.job_id}"

    @property
    def work_dir(self) -> Path:
        """Its private folder."""
        return self.storage.files.work_dir


class _NoLeaseError(LeaseError):
    """A dispatch by a scheduler without a lease here that it could be for."""


class JobManager:
    """All jobs of a worker, at most one at a time per lease."""

    def __init__(
        self,
        endpoint: Endpoint,
        lease_manager: LeaseManager,
        executors: Mapping[ExecutorDescriptor, ExecutionFactory],
        work_dir: Path,
        tasks: anyio.abc.TaskGroup,
        clock: Callable[[], float] = anyio.current_time,
        *,
        default_storage: float = DEFAULT_STORAGE,
        cache: ContentCache | None = None,
    ) -> None:
        """Prepare; nothing runs before `dispatch`.

        Args:
            endpoint: where schedulers and peers are reached.
            lease_manager: the leases that jobs run on.
            executors: what makes an execution, by descriptor.
            work_dir: each job gets a folder in it.
            tasks: jobs run in it.
            clock: seconds of the local monotonic clock.
            default_storage: GB that a job may store whose lease states none.
            cache: what keeps fetched content for further jobs.
        """
        self._cache = cache
        self._endpoint = endpoint
        self._lease_manager = lease_manager
        self._executors = executors
        self._work_dir = work_dir
        self._tasks = tasks
        self._clock = clock
        self._default_storage = default_storage
        self._retention = Retention(lease_manager, tasks)
        self._jobs: dict[uuid.UUID, Job] = {}
        self._unreported: list[Job] = []
        """Jobs whose end was not reported yet."""
        self._idle = anyio.Event()

    @property
    def running(self) -> tuple[Job, ...]:
        """Jobs that still have processes."""
        return tuple(self._jobs.values())

    async def wait_until_idle(self) -> None:
        """Wait until no job runs and the ends of all are reported."""
        while self._unreported:
            self._idle = anyio.Event()
            await self._idle.wait()

    # ----------------------------------------------------------------------------------------------- starting, ending

    async def dispatch(self, scheduler: PeerId, message: DispatchJob) -> DispatchResult:
        """Start a job on a lease of `scheduler`. A repeated dispatch is confirmed and starts nothing.

        A numbered dispatch counts as repeated also when its job has ended.
        """
        try:
            lease = self._find_repeated(scheduler, message) or self._start(scheduler, message)
        except (LeaseError, ExecutionError) as error:
            _log.warning("dispatch of job %s by %s refused: %s", message.spec.job_id, scheduler, error)
            _DISPATCHES.add(1, {"hypha.outcome": "stranger" if isinstance(error, _NoLeaseError) else "refused"})
            return DispatchFailed()
        _DISPATCHES.add(1, {"hypha.outcome": "accepted"})
        timeout, timeout_ms = expiry_fields(lease.remaining(self._clock()))
        return Dispatched(id=message.id, timeout=timeout, timeout_ms=timeout_ms)

    def _find_repeated(self, scheduler: PeerId, message: DispatchJob) -> Lease | None:
        """Return the lease of the job that this very dispatch has started, if the lease is still held."""
        for job in self._jobs.values():
            running = (job.scheduler, job.task_id, job.attempt, job.spec)
            if running == (scheduler, message.id, message.attempt, message.spec):
                lease = self._lease_manager.find(job.lease, scheduler)
                return None if lease is None or lease.has_ended else lease
        return None

    def _start(self, scheduler: PeerId, message: DispatchJob) -> Lease:
        if self._tasks.cancel_scope.cancel_called:
            raise ExecutionError("this worker is shutting down")
        lease = self._find_lease(scheduler, message)
        attempt = None if message.attempt is None else Attempt(message.attempt, message.spec)
        if attempt is not None and self._lease_manager.is_repeated(lease.id, scheduler, attempt, self._clock()):
            return lease
        job = self._create_job(lease, message, self._find_factory(message.spec))
        try:
            self._check_distinguishable(job)
            grace = (message.orphan_grace_ms or 0) / 1000
            self._lease_manager.attach_job(lease.id, scheduler, self._clock(), attempt, grace, message.spec.job_id)
        except (LeaseError, ExecutionError) as error:
            job.span.end(error)
            raise
        self._jobs[lease.id] = job
        self._unreported.append(job)
        _log.info("%s started on lease %s for scheduler %s", job, lease.id, scheduler)
        self._tasks.start_soon(self._run, job)
        return lease

    def _find_lease(self, scheduler: PeerId, message: DispatchJob) -> Lease:
        """Return the lease of a dispatch: the one of its id, or any suitable one for schedulers with ids of their own.

        Our schedulers use a lease's id. Theirs that is over must not take another of their leases.
        """
        if speaks_lease_protocol(self._endpoint, scheduler):
            lease = self._lease_manager.find(message.id, scheduler)
        else:
            lease = self._lease_manager.find_for_dispatch(message.id, scheduler, _descriptor(message.spec))
        if lease is None:  # the same answer for other schedulers' leases, so that it reveals nothing about them
            raise _NoLeaseError(f"{scheduler} has no lease for dispatch {message.id} here")
        return lease

    def cancel(self, lease: uuid.UUID, scheduler: PeerId, reason: str, attempt: int | None = None) -> bool:
        """Cancel the job on a lease of `scheduler`; return whether there is one.

        Args:
            attempt: number of its dispatch; the job of another one is not cancelled. None means any job.
        """
        job = self._jobs.get(lease)
        if job is None or job.scheduler != scheduler or attempt not in (None, job.attempt):
            return False
        if not job.scope.cancel_called:
            job.cancel_reason = reason
            job.scope.cancel()
        return True

    def on_renewed(self, lease: uuid.UUID) -> None:
        """Note that a scheduler has renewed a lease, and so knows the job on it."""
        for job in self._unreported:
            if job.lease == lease:
                job.contact.on_renewed()

    def on_orphaned(self, lease: uuid.UUID) -> None:
        """Note that a scheduler does not renew a lease any more."""
        for job in self._unreported:
            if job.lease == lease:
                job.contact.on_silence()

    def _find_factory(self, spec: JobSpec) -> ExecutionFactory:
        kind, descriptor = executor_class(spec), _descriptor(spec)
        if descriptor not in self._executors:
            raise ExecutionError(f"no executor {kind}/{descriptor.name[:80]} is configured")
        return self._executors[descriptor]

    def _check_distinguishable(self, job: Job) -> None:
        """Check that no push or request for another task of the same job could be meant for this one.

        Jobs of other schedulers cannot be confused with it, whatever their ids: pushes name the scheduler. A task on
        an orphaned lease is ended: its scheduler has given it up, and begun it anew on another lease.

        Raises:
            ExecutionError: it could.
        """
        for other in self._jobs_of(job.spec.job_id, job.scheduler):
            both = _common_messages(other.execution, job.execution)
            lease = self._lease_manager.find(other.lease, other.scheduler)
            if both and lease is not None and lease.state is LeaseState.ORPHANED:
                self.cancel(other.lease, other.scheduler, "its scheduler has begun it anew on another lease")
            elif both:
                raise ExecutionError(f"another task of this job runs here, and both {both}")

    def _create_job(self, lease: Lease, message: DispatchJob, factory: ExecutionFactory) -> Job:
        about = {"hypha.job.id": str(message.spec.job_id), "hypha.job.class": executor_class(message.spec)}
        span = instrumentation.span("execute job", {**about, "hypha.lease.id": str(lease.id)})
        work_dir = self._work_dir / f"hypha-{uuid.uuid4()}"
        limit = lease.allocation.resources.storage or self._default_storage
        context = JobContext(
            endpoint=self._endpoint,
            spec=message.spec,
            lease=lease.id,
            scheduler=lease.scheduler,
            allocation=lease.allocation,
            work_dir=work_dir,
            storage=JobStorage(work_dir, int(limit * GIGABYTE), cache_of(self._cache, lease.scheduler)),
            contact=SchedulerContact(self._endpoint, lease.scheduler, partial(self._may_outlast, lease.id)),
            scope=anyio.CancelScope(),
            traceparent=span.traceparent,
            keep_resources=partial(self._retention.keep, lease.id),
        )
        return Job(
            lease=lease.id,
            task_id=message.id,
            scheduler=lease.scheduler,
            spec=message.spec,
            execution=factory(context),
            scope=context.scope,
            span=span,
            attempt=message.attempt,
            keep_lease=bool(message.keep_lease),
            traffic=context.traffic,
            storage=context.storage,
            contact=context.contact,
        )

    def _may_outlast(self, lease: uuid.UUID) -> bool:
        return self._lease_manager.may_outlast_renewals(lease, self._clock())

    # -------------------------------------------------------------------------------------------------------- running

    async def _run(self, job: Job) -> None:
        about = {"hypha.job.class": executor_class(job.spec)}
        _STARTED.add(1, about)
        _ACTIVE.add(1, about)
        try:
            with job.span:
                await self._run_in_contact(job)
        finally:
            _ACTIVE.add(-1, about)
            self._unreported = [other for other in self._unreported if other is not job]
            self._idle.set()

    async def _run_in_contact(self, job: Job) -> None:
        """Run a job, and reconnect to its scheduler while it may run on without it."""
        if not job.contact.may_wait():
            await self._run_to_end(job)
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job.contact.keep)
            await self._run_to_end(job)
            tasks.cancel_scope.cancel()

    async def _run_to_end(self, job: Job) -> None:
        started = self._clock()
        result: ExecutionResult | None = None
        try:
            with job.scope:
                result = await self._execute(job)
        finally:
            if result is None:
                result = ExecutionResult("cancelled", job.cancel_reason, job.execution.trace)
            with anyio.CancelScope(shield=True):
                # a thread of its own: it must wait neither for other jobs' threads nor for abandoned ones of this job
                await anyio.to_thread.run_sync(remove_job_files, job.storage.files, limiter=anyio.CapacityLimiter(1))
            del self._jobs[job.lease]
            self._bound_report(job)
            keep = job.scope.cancel_called if result.outcome == "cancelled" else job.keep_lease
            self._lease_manager.detach_job(job.lease, keep=keep, outcome=result.outcome)
            _log_result(job, result)
            _record_result(job, result, self._clock() - started)
            await self._report_end(job, result)

    def _bound_report(self, job: Job) -> None:
        """Let the report of a job's end wait for the scheduler as long as the job might have run on."""
        lease = self._lease_manager.find(job.lease, job.scheduler)
        if lease is not None and job.contact.may_wait():
            job.report_until = lease.ends
        job.contact.may_wait = lambda: self._clock() < job.report_until

    async def _execute(self, job: Job) -> ExecutionResult:
        try:
            await self._execute_with_status(job)
        except Exception as error:  # noqa: BLE001 - logged and reported: it ends this job only
            cause = first_leaf_error(error)
            if (reason := reason_to_return_work(cause, job.work_dir)) is not None:
                _log.error("%s is given back to its scheduler: %s", job, reason)
                return ExecutionResult("cancelled", reason, job.execution.trace)
            if isinstance(cause, ExecutionError | OSError):
                return ExecutionResult("failed", str(cause), job.execution.trace)
            _log.exception("%s failed because of an error in this worker", job)
            return ExecutionResult("failed", f"error in the worker: {cause!r}", job.execution.trace)
        except BaseExceptionGroup as errors:  # it failed while it was being cancelled: the cancellation counts
            cancelled, failures = errors.split(anyio.get_cancelled_exc_class())
            if cancelled is None or not isinstance(failures, ExceptionGroup):
                raise
            _log.warning("%s failed while it was cancelled: %s", job, first_leaf_error(failures))
            raise cancelled from None
        return ExecutionResult("finished", "", job.execution.trace)

    async def _execute_with_status(self, job: Job) -> None:
        job.storage.files.create()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._report_running, job)
            tasks.start_soon(job.storage.watch)
            await job.execution.run()
            tasks.cancel_scope.cancel()

    async def _report_running(self, job: Job) -> None:
        try:
            await self._send_status(job, Running(), RETRY_DELAYS)
        except NetError as error:
            _log.warning("%s is running, but this could not be reported to its scheduler: %s", job, error)

    async def _send_status(self, job: Job, status: Running | Finished | Failed, delays: tuple[float, ...]) -> None:
        """Report a status. Older schedulers whose job is over do not listen any more, which is no error."""
        message = JobStatus(task_id=job.task_id, status=status, attempt=job.attempt)
        try:
            await call_with_retries(
                self._endpoint, job.scheduler, JOB_STATUS, message, delays=delays, final=(UnhandledRequestError,)
            )
        except UnhandledRequestError as error:
            _log.debug("%s: %s", job, error)

    async def _report_end(self, job: Job, result: ExecutionResult) -> None:
        """Report the end with retries; when the worker itself shuts down, try once and briefly."""
        try:
            await self._send_end(job, result, END_REPORT_DELAYS)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(SHUTDOWN_REPORT_TIMEOUT, shield=True):
                await self._send_end(job, result, (0.0,))
            raise

    async def _send_end(self, job: Job, result: ExecutionResult, delays: tuple[float, ...]) -> None:
        end = JobEnd(
            lease=job.lease,
            job_id=job.spec.job_id,
            outcome=result.outcome,
            reason=redact_urls(result.reason)[:LINE_LIMIT],
            exit_code=result.trace.exit_code,
            last_lines=tuple(line[:LINE_LIMIT] for line in result.trace.last_lines),
            attempt=job.attempt,
            bytes_sent=job.traffic.sent,
            bytes_received=job.traffic.received,
        )
        try:
            try:
                repeats = partial(self._repeats_end, job)
                await job.contact.call(JOB_END, end, is_refusal=repeats, timeout=10.0, delays=delays)
            except UnsupportedProtocolError:
                _log.debug("%s does not support end reports and gets a status only", job.scheduler)
            await self._send_status(job, Finished() if result.outcome == "finished" else Failed(), delays)
        except NetError as error:
            _log.warning("the end of %s could not be reported to %s: %s", job, job.scheduler, error)

    def _repeats_end(self, job: Job, _answer: JobEndReceived) -> bool:
        """Return True: a scheduler that has not taken up the job yet acknowledges its end, too; bound its time for it.

        One that has taken it up, and renews the lease no more because of this report, gets it again until then.
        """
        job.report_until = min(job.report_until, self._clock() + TAKE_UP_TIME)
        return True

    # ------------------------------------------------------------------------------------------- messages for jobs

    async def accept_push(self, peer: PeerId, header: PushHeader | None) -> FilePushTarget | Refusal:
        """Return where to store a pushed file, or a refusal.

        A push belongs to the job that its header names; one without a header, to the only job that expects its sender.
        """
        found = self._jobs_by_sender(peer) if header is None else self._jobs_by_header(peer, header)
        if len(found) == 1:
            target = await found[0].execution.accept_push(peer, header)
            return target if isinstance(target, Refusal) else found[0].traffic.counting(target)
        about = "without a header" if header is None else f"of job {header.job_id}"
        why = f"{NO_JOB} {about}" if not found else f"a push {about} matches {len(found)} jobs"
        _log.warning("push from %s refused: %s", peer, why)
        return Refusal(reason=why)

    def _jobs_by_header(self, peer: PeerId, header: PushHeader) -> list[Job]:
        """Return the jobs that a push may be for; a single one that does not accept it refuses it with the reason."""
        jobs = self._jobs_of(header.job_id, header.scheduler)
        jobs = [job for job in jobs if job.execution.accepted_push_kind == header.kind] or jobs
        return jobs if len(jobs) == 1 else [job for job in jobs if peer in job.execution.senders]

    def _jobs_by_sender(self, peer: PeerId) -> list[Job]:
        jobs = [job for job in self._jobs.values() if not job.scope.cancel_called]
        return [job for job in jobs if peer in job.execution.senders]

    def _jobs_of(self, job_id: uuid.UUID, scheduler: PeerId | None) -> list[Job]:
        """Return the tasks of a scheduler's job; of every scheduler's with this id for peers that name none.

        Those that are being ended do not count: another one may run in their place already.
        """
        jobs = [job for job in self._jobs.values() if job.spec.job_id == job_id and not job.scope.cancel_called]
        return [job for job in jobs if scheduler in (None, job.scheduler)]

    def message_handler(self, served: TaskMethod[Req, Resp]) -> Callable[[PeerId, Req], Awaitable[Resp]]:
        """Return a handler that passes the requests of a scheduler on to the execution of the job that they name."""
        name = served.method.name

        async def handle(scheduler: PeerId, message: Req) -> Resp:
            jobs = self._jobs_of(message.job_id, scheduler)
            handlers = [job.execution.message_handlers[name] for job in jobs if name in job.execution.message_handlers]
            if not handlers:
                return served.refuse(f"no task of job {message.job_id} of this scheduler here handles {name}")
            response: Resp = await handlers[0](scheduler, message)
            return response

        return handle


def _descriptor(spec: JobSpec) -> ExecutorDescriptor:
    """Return the executor that a job asks for."""
    kind = TrainExecutor if executor_class(spec) == "train" else AggregateExecutor
    return kind(name=spec.executor.descriptor.name)


def _common_messages(first: Execution, second: Execution) -> str:
    """Return which pushes or requests could be meant for both executions; empty if none could."""
    senders = first.senders & second.senders
    if senders and first.accepted_push_kind == second.accepted_push_kind:
        return f"accept pushes of kind {second.accepted_push_kind} from {min(senders)}"
    methods = first.message_handlers.keys() & second.message_handlers.keys()
    return f"handle {min(methods)} requests" if methods else ""


def _record_result(job: Job, result: ExecutionResult, seconds: float) -> None:
    about = {"hypha.job.class": executor_class(job.spec), "hypha.outcome": result.outcome}
    _ENDED.add(1, about)
    _DURATION.record(seconds, about)
    code = result.trace.exit_code
    job.span.set({"hypha.outcome": result.outcome} | ({} if code is None else {"process.exit.code": code}))


def _log_result(job: Job, result: ExecutionResult) -> None:
    if result.outcome == "failed":
        tail = "".join(f"\n    {line}" for line in result.trace.last_lines[-10:])
        _log.error("%s failed: %s%s", job, result.reason, tail)
    else:
        _log.info("%s %s%s", job, result.outcome, f": {result.reason}" if result.reason else "")
