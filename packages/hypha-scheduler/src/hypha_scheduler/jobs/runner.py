"""The job runner: carries out what a strategy's operator asks for, and tells it what happens. Knows no strategy.

Holds the job's leases, dispatches tasks, and checks who speaks before an operator hears of a message. `service` creates
one `JobRunner` per job and passes it the messages of peers; background work runs in the job's own task group.
"""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import anyio.abc

from hypha_net import backoff, instrumentation, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.error_causes import leaf_errors
from hypha_net.errors import NetError, UnsupportedProtocolError
from hypha_net.transfer import FilePushTarget, PullSource
from hypha_proto.datasets import DataRequest, ProviderFailure, SliceAssigned, UnusableSlice
from hypha_proto.dispatch import Failed, Finished, JobStatus, NotFound, WireError
from hypha_proto.ids import PeerId
from hypha_proto.leases import CANCEL_JOB, CancelJob, Goodbye, JobEnd
from hypha_proto.offers import WorkerOffer
from hypha_proto.progress import ProgressError, ProgressRequest, ProgressResponse
from hypha_proto.protocols import LEASE
from hypha_proto.transfer import PullRequest, PushHeader, Refusal
from hypha_scheduler.allocation.auction import AuctionSettings
from hypha_scheduler.allocation.shortage import Shortage
from hypha_scheduler.datasets.providers import MAX_PROVIDERS
from hypha_scheduler.errors import AllocationError, JobFailedError, files_unusable
from hypha_scheduler.jobs.artifacts import write_result
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.jobs.context import RunnerContext
from hypha_scheduler.jobs.dispatcher import dispatch
from hypha_scheduler.jobs.effect_queue import EffectQueue
from hypha_scheduler.jobs.end_record import EndRecorder
from hypha_scheduler.jobs.events import JobEvents
from hypha_scheduler.jobs.idempotency_cache import ResponseCache
from hypha_scheduler.jobs.lease_pool import LeasePool
from hypha_scheduler.jobs.task_graph import TaskState
from hypha_scheduler.jobs.task_register import TaskRegister
from hypha_scheduler.metrics.status_bridge import StatusBridge
from hypha_scheduler.strategies.base import (
    Effect,
    Effects,
    EmitEvent,
    EndJob,
    Lease,
    Operator,
    PostMetric,
    RetryAfter,
    RunInBackground,
    SendMessage,
    SliceRefusedError,
    SliceToUse,
    StartTask,
    StopTask,
    Strategy,
    StrategyMethod,
    TaskEnded,
    TaskNotStarted,
    TaskRef,
    TaskStarted,
    TrafficCounts,
)

_log = logging.getLogger(__name__)

_RELEASE_TIMEOUT: Final = 3.0
"""Seconds to release leases when a job ends."""
_JOB_END_GRACE: Final = 2.0
"""Seconds to wait for a `JobEnd` with details after a `JobStatus` reported the end of an executor."""
_CANCEL_TIMEOUT: Final = 2.5
_CHECK_INTERVAL: Final = 0.5
"""Seconds between looks at a deadline that stays due."""
_MAX_LINE: Final = 500
_MAX_LINES: Final = 40
_MAX_REASON: Final = 1000
_MAX_TEXT: Final = 400
"""Characters of a peer's reason in an event."""
_MAX_WAIT: Final = 30.0
"""Longest time in seconds for which a request for a slice waits; the worker then asks again."""
_DEFAULT_AUCTION: Final = AuctionSettings()

Answer = TypeVar("Answer")


class JobRunner:
    """One job: `run` runs it to its end, the ``on_…`` methods handle messages of peers about it."""

    def __init__(
        self,
        endpoint: Endpoint,
        strategy: Strategy,
        job: JobTable,
        runs: Path,
        bridge: StatusBridge | None = None,
        job_id: uuid.UUID | None = None,
        auction: AuctionSettings = _DEFAULT_AUCTION,
        ends: EndRecorder | None = None,
    ) -> None:
        """Create a job with a directory in `runs`, under a new id unless one is given; nothing runs before `run`.

        `ends` records the end of the job, also after `run`.
        """
        self.job_id = job_id or uuid.uuid4()
        self.directory = runs / str(self.job_id)
        self._endpoint = endpoint
        self._strategy = strategy
        self._job = job
        self._bridge = bridge
        self._ends = ends or EndRecorder()
        self._auction_settings = auction
        self._operator: Operator | None = None
        self._register = TaskRegister()
        self._attempts: dict[TaskRef, int] = {}
        """Numbers of the dispatches of running tasks on leases that take several."""
        self._stopping: set[TaskRef] = set()
        """Tasks that were cancelled and whose leases stay."""
        self._progress_responses: ResponseCache[ProgressResponse] = ResponseCache()
        self._slice_responses: ResponseCache[SliceAssigned] = ResponseCache()
        self._traffic: defaultdict[PeerId, TrafficCounts] = defaultdict(TrafficCounts)
        self._placement_seconds = 0.0
        self._found_too_few = False
        self._ended = anyio.Event()
        self._failure: str | None = None
        self._closed = False
        self._changed = anyio.Event()
        self._trace: str | None = None
        self._tasks: anyio.abc.TaskGroup
        self._events: JobEvents
        self._effects: EffectQueue
        self._context: RunnerContext
        self._pool: LeasePool

    # ------------------------------------------------------------------------------------------------------------- run

    async def run(self) -> Path:
        """Run the job to its end and return the path of its ``result.json``.

        Raises:
            JobFailedError: the job failed; its executors are stopped and its leases released.
        """
        why = ""
        try:
            return await self._run_reported()
        except* OSError as errors:  # includes background tasks of the job: they fail this job, not the scheduler
            why = files_unusable(self.directory, leaf_errors(errors))
        raise JobFailedError(why)

    async def _run_reported(self) -> Path:
        self.directory.mkdir(parents=True)
        with JobEvents(self.job_id, self.directory, self._bridge) as self._events:
            try:
                self._events.accepted(self._job.model_dump(mode="json"))
                return await self._run_and_release()
            except BaseException as error:
                self._ends.record(self._events.failed(self._describe(error)))
                raise

    def _describe(self, error: BaseException) -> str:
        """Return the reason for a failure as it is recorded."""
        causes = list(leaf_errors(error))
        if all(isinstance(cause, OSError) for cause in causes):
            return files_unusable(self.directory, causes)
        if isinstance(error, JobFailedError):
            return str(error)
        interrupted = isinstance(error, anyio.get_cancelled_exc_class())
        return "the scheduler was stopped" if interrupted else f"internal error: {error!r}"

    async def _run_and_release(self) -> Path:
        failure: JobFailedError | None = None
        result = self.directory / "result.json"
        self._trace = instrumentation.current_traceparent()
        async with anyio.create_task_group() as self._tasks:
            self._prepare()
            try:
                await self._run_strategy(result)
            except JobFailedError as error:
                failure = error
            finally:
                self._closed = True
                with anyio.move_on_after(_RELEASE_TIMEOUT, shield=True):
                    await self._pool.close("the job is over")
            self._tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return result

    def _prepare(self) -> None:
        self._context = RunnerContext(self._endpoint, self.job_id, self.directory, self._tasks, self._on_notice)
        self._effects = EffectQueue(self._events.journal, self._carry_out, self._on_file_error)
        self._pool = LeasePool(
            self._endpoint,
            self._tasks,
            self._auction_settings,
            self._job.allocation_timeout,
            observer=self,
            has_task=self._has_task,
        )

    def _has_task(self, lease: uuid.UUID) -> bool:
        """Return whether a task runs on a lease, or is about to start."""
        return self._register.has_task(lease) or self._effects.will_start_on(lease)

    async def _run_strategy(self, result: Path) -> None:
        began = anyio.current_time()
        if lacking := self._job.missing_files():
            raise JobFailedError("\n".join(lacking))
        async with self._strategy.open(self._job, self._context, ()) as operator:
            self._operator = operator
            self._tasks.start_soon(self._effects.run)
            self._tasks.start_soon(self._pool.renew)
            self._tasks.start_soon(self._watch_deadlines)
            self._settle()
            await self._ended.wait()
            self._closed = True
            if self._failure is not None:
                raise (AllocationError if self._found_too_few else JobFailedError)(self._failure)
            await self._finish(operator, result, began)

    async def _finish(self, operator: Operator, result: Path, began: float) -> None:
        """Release the leases and write the result."""
        await self._pool.close("the job is done")
        summary = {
            "job_id": str(self.job_id),
            **operator.summary(self._traffic),
            "placement_seconds": round(self._placement_seconds, 4),
            "wall_seconds": round(anyio.current_time() - began, 3),
        }
        write_result(result, summary)
        self._ends.record(self._events.finished(summary))

    async def _watch_deadlines(self) -> None:
        """Tell the operator when its deadlines have passed."""
        while not self._ended.is_set() and self._operator is not None:
            at = self._operator.next_deadline()
            if at is not None and at <= (now := anyio.current_time()):
                self._tell(self._operator.on_deadline, now)
                if (again := self._operator.next_deadline()) is not None and again <= now:
                    await anyio.sleep(_CHECK_INTERVAL)  # it stays due: do not spin
                continue
            with anyio.move_on_after(_MAX_WAIT if at is None else at - anyio.current_time()):
                await self._changed.wait()

    # ----------------------------------------------------------------------------------------------- calls of operators

    def _tell(self, event: Callable[..., Effects], *arguments: object) -> int:
        """Call the operator and take its effects; return the ticket for `EffectQueue.wait`."""
        return self._ask(lambda: ((), event(*arguments)))[1]

    def _ask(self, question: Callable[[], tuple[Answer, Effects]]) -> tuple[Answer | None, int]:
        """Call the operator and take its effects; return its answer, or None if it fails, and their ticket."""
        found = self._call(question)
        if found is None:
            return None, 0
        answer, effects = found
        ticket = self._effects.submit(effects)
        self._settle()
        return answer, ticket

    def _call(self, question: Callable[[], Answer]) -> Answer | None:
        """Call the operator; None if there is none, or if it fails: its error fails its own job and no other.

        Raises:
            SliceRefusedError: the operator refuses a slice.
        """
        if self._closed or self._operator is None:
            return None
        try:
            return question()
        except SliceRefusedError:
            raise
        except Exception as error:  # noqa: BLE001 - a third party's strategy may raise anything
            self._fail_strategy(error)
            return None

    def _fail_strategy(self, error: Exception) -> None:
        _log.error("job %s: strategy %s failed", self.job_id, self._job.type, exc_info=error)
        self._end(f"internal error of strategy {self._job.type!r}: {error!r}")

    def _settle(self) -> None:
        """Let everything that depends on the operator's state look at it again."""
        if self._operator is not None and not self._closed:
            self._pool.set_demand(self._operator.role_requests())
        self._changed.set()
        self._changed = anyio.Event()

    def _on_notice(self, name: str, message: object) -> None:
        self._ask(lambda: self._running_operator.on_message(None, name, message, anyio.current_time()))

    @property
    def _running_operator(self) -> Operator:
        assert self._operator is not None  # `_ask` calls nothing otherwise
        return self._operator

    # --------------------------------------------------------------------------------------------------------- effects

    def _carry_out(self, effect: Effect) -> None:
        if self._ended.is_set() and not isinstance(effect, EmitEvent | PostMetric | EndJob):
            return  # the job is over: no new work
        match effect:
            case EmitEvent(name, fields):
                self._events.emit(name, **fields)
            case PostMetric():
                self._events.post(effect)
            case StartTask():
                self._start_task(effect)
            case StopTask():
                self._stop_task(effect)
            case SendMessage():
                self._tasks.start_soon(self._send, effect)
            case RunInBackground():
                self._tasks.start_soon(self._run_in_background, effect)
            case EndJob(failure):
                self._end(failure)

    def _end(self, failure: str | None) -> None:
        """End the job; only the first outcome counts."""
        if not self._ended.is_set():
            self._failure = failure
            self._ended.set()

    def _on_file_error(self, error: OSError) -> None:
        self._end(files_unusable(self.directory, [error]))

    def _start_task(self, effect: StartTask) -> None:
        earlier = self._register.start(effect.task)
        if effect.keep_lease or earlier:  # else the lease has one task only, and older workers know no numbers
            self._attempts[effect.task] = earlier
        self._start_background(partial(self._dispatch, effect))

    async def _dispatch(self, effect: StartTask) -> None:
        task = effect.task
        why = await dispatch(
            self._endpoint, effect, self._attempts.get(task), is_running=partial(self._register.runs, task)
        )
        if why is None:
            if self._register.runs(task):
                self._tell(self._running_operator.on_task_update, task, TaskStarted(), anyio.current_time())
        elif self._register.end(task):
            self._pool.release(task.lease.id, "its task did not start")
            self._tell(self._running_operator.on_task_update, task, TaskNotStarted(why), anyio.current_time())

    def _stop_task(self, effect: StopTask) -> None:
        if effect.keep_lease:
            self._stopping.add(effect.task)
            self._start_background(partial(self._cancel, effect))
        else:
            self._pool.release(effect.task.lease.id, effect.reason)
            self._task_over(effect.task, TaskEnded(TaskState.CANCELLED, effect.reason))

    async def _cancel(self, effect: StopTask) -> None:
        """Cancel a task on a lease that is kept; the worker reports its end."""
        lease = effect.task.lease
        try:
            message = CancelJob(id=lease.id, reason=effect.reason, attempt=self._attempts.get(effect.task))
            await rpc.call(self._endpoint, lease.peer, CANCEL_JOB, message, timeout=_CANCEL_TIMEOUT)
        except NetError as error:
            _log.warning("task %s at %s could not be cancelled, releasing its lease: %s",
                         effect.task.name, lease.peer, error)  # fmt: skip
            self._pool.release(lease.id, effect.reason)
            self._task_over(effect.task, TaskEnded(TaskState.CANCELLED, effect.reason))

    async def _send(self, effect: SendMessage) -> None:
        def on_failure(error: NetError, _pause: float) -> None:
            if isinstance(error, UnsupportedProtocolError):
                raise error
            _log.warning("%s: %s could not be reached, retrying: %s", effect.span, effect.peer, error)

        outcome: object
        with instrumentation.span(effect.span, effect.about, parent=self._trace):
            try:
                outcome = await backoff.retry(
                    lambda: rpc.call(self._endpoint, effect.peer, effect.method, effect.message),
                    effect.retry_delays,
                    on_failure,
                )
            except NetError as error:
                outcome = error
        self._tell(self._running_operator.on_effect_result, effect.tag, outcome, anyio.current_time())

    async def _run_in_background(self, effect: RunInBackground) -> None:
        outcome: object
        try:
            outcome = await effect.work()
        except (JobFailedError, OSError, NetError) as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - a third party's strategy may raise anything
            self._fail_strategy(error)
            return
        self._tell(self._running_operator.on_effect_result, effect.tag, outcome, anyio.current_time())

    def _start_background(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a background task on behalf of a request, unless the job has ended."""
        if not self._closed:
            self._tasks.start_soon(task)

    # ---------------------------------------------------------------------------------------------------------- leases

    def on_acquired(self, leases: Sequence[Lease], seconds: float) -> None:
        """Tell the operator of new leases."""
        is_first = not self._placement_seconds
        try:
            if is_first:
                self._placement_seconds = seconds
                self._events.placed(leases, seconds)
            else:
                self._events.leased(leases, seconds)
        except OSError as error:
            self._on_file_error(error)
            return
        self._tell(self._running_operator.on_leases_acquired, leases, anyio.current_time())

    def on_lost(self, lease: Lease, reason: str) -> None:
        """Tell the operator of a lost lease, and of the end of the task on it."""
        now = anyio.current_time()
        self._tell(self._running_operator.on_lease_lost, lease, reason, now)
        task = self._register.on(lease)
        if task is not None:
            self._task_over(task, TaskEnded(TaskState.FAILED, reason))

    def on_timeout(self, roles: Sequence[str], reasons: str) -> None:
        """Tell the operator that roles lack workers."""
        self._found_too_few = True
        for role in roles:
            self._tell(self._running_operator.on_allocation_timeout, role, reasons, anyio.current_time())

    def on_shortage(self, shortage: Shortage) -> None:
        """Report why workers are missing."""
        self._events.shortage(shortage)

    def on_offer(self, peer: PeerId, offer: WorkerOffer) -> None:
        """Handle an offer of a worker."""
        if self._operator is not None and not self._closed:
            self._pool.on_offer(peer, offer)

    # ----------------------------------------------------------------------------------------------- messages of peers

    def involves(self, peer: PeerId) -> bool:
        """Return whether a task of this job runs or ran on `peer`."""
        return self._register.involves(peer)

    async def on_data(self, peer: PeerId, request: DataRequest) -> SliceAssigned | NotFound | WireError:
        """Handle a worker's request for a slice."""
        deadline = anyio.current_time() + _MAX_WAIT
        unusable = request.unusable
        while True:
            task = self._register.of_peer(peer, request.lease)
            if task is None or not self._context.has_dataset(request.dataset):
                return NotFound()
            if (earlier := self._slice_responses.get(peer, request.id)) is not None:
                return earlier
            if unusable is not None:
                self._set_slice_aside(task, request.dataset, unusable)
                unusable = None  # once, if the request has to wait
            try:
                found = self._next_slice(task, request.dataset)
            except SliceRefusedError as error:
                return WireError(message=str(error))
            if found is None:
                return NotFound()
            if not isinstance(found, RetryAfter):
                return self._slice_responses.put(peer, request.id, self._context.address(request.dataset, found))
            if (now := anyio.current_time()) >= deadline:
                return WireError(message=f"no slice was free within {_MAX_WAIT:g} s")
            with anyio.move_on_after(min(found.seconds, deadline - now)):
                await self._changed.wait()

    def _set_slice_aside(self, task: TaskRef, dataset: str, report: UnusableSlice) -> None:
        failures = tuple(
            ProviderFailure(provider=failure.provider, reason=_one_line(failure.reason))
            for failure in report.failures[:MAX_PROVIDERS]
        )
        bounded = UnusableSlice(index=report.index, epoch=report.epoch, failures=failures)
        self._tell(self._running_operator.on_slice_unusable, task, dataset, bounded, anyio.current_time())

    def _next_slice(self, task: TaskRef, dataset: str) -> SliceToUse | RetryAfter | None:
        found = self._call(lambda: self._running_operator.next_slice(task, dataset, anyio.current_time()))
        if not isinstance(found, RetryAfter):
            self._settle()
        return found

    async def on_report(self, peer: PeerId, request: ProgressRequest) -> ProgressResponse:
        """Handle a progress report of an executor."""
        task = self._register.of_peer(peer, request.lease)
        if task is None:
            return ProgressError(reason="no task of the job runs on this peer under this lease")
        if (earlier := self._progress_responses.get(peer, request.id)) is not None:
            return earlier
        now = anyio.current_time()
        answer, ticket = self._ask(lambda: self._running_operator.on_progress(task, request.progress, now))
        if answer is None:
            return ProgressError(reason="the job is over")
        self._progress_responses.put(peer, request.id, answer)
        await self._effects.wait(ticket)
        return answer

    async def on_message(self, peer: PeerId, method: StrategyMethod, message: Any) -> Any:
        """Handle a message of the strategy's own RPC methods."""
        task = self._register.of_peer(peer)
        if task is None:
            return method.unknown_job
        name, now = method.method.name, anyio.current_time()
        answer, ticket = self._ask(lambda: self._running_operator.on_message(task, name, message, now))
        await self._effects.wait(ticket)
        return method.unknown_job if answer is None else answer

    def on_pull(self, peer: PeerId, request: PullRequest) -> PullSource | Refusal:
        """Handle a worker's pull of a file of this job."""
        if self._context.serves(request.dataset):
            return self._context.resolve(request)
        task = self._register.of_peer(peer)
        if task is None:
            return Refusal(reason="no task of this job runs there")
        found = self._call(lambda: self._running_operator.on_pull_request(task, request))
        return Refusal(reason="the job is over") if found is None else found

    def on_push(self, peer: PeerId, header: PushHeader | None) -> FilePushTarget | Refusal:
        """Handle a file that a task is about to push."""
        task = self._register.of_peer(peer, None if header is None else header.lease)
        if task is None:
            return Refusal(reason="no task of this job runs there")
        target, _ = self._ask(lambda: self._running_operator.on_push_request(task, header, anyio.current_time()))
        if target is None:
            return Refusal(reason="the job is over")
        if isinstance(target, Refusal):
            _log.warning("push of %s refused: %s", peer, target.reason)
            return target
        path = target.path

        async def on_complete(_size: int, digest: str) -> None:
            ticket = self._tell(
                self._running_operator.on_push_complete, task, header, path, digest, anyio.current_time()
            )
            await self._effects.wait(ticket)

        return FilePushTarget(path, target.max_bytes, on_complete, slot=f"{self.directory}/{task.name}")

    def on_goodbye(self, peer: PeerId, goodbye: Goodbye) -> None:
        """Handle a worker's announcement that it is shutting down: its leases end at once."""
        reason = _one_line(goodbye.reason) or "it is shutting down"
        for lease in self._pool.held:
            if lease.peer == peer and lease.id in goodbye.leases:
                self._pool.drop(lease.id, reason)

    def on_job_end(self, peer: PeerId, end: JobEnd) -> None:
        """Handle a worker's report on how an executor ended."""
        task = self._register.on_lease(end.lease, peer, end.attempt)
        if task is None:
            return
        self._traffic[peer] += TrafficCounts(end.bytes_sent, end.bytes_received)
        states = {"finished": TaskState.FINISHED, "cancelled": TaskState.CANCELLED}
        state = states.get(end.outcome, TaskState.FAILED)
        lines = tuple(line[:_MAX_LINE] for line in end.last_lines[-_MAX_LINES:])
        ended = TaskEnded(state, end.reason[:_MAX_REASON], end.exit_code, lines)
        was_stopped = task in self._stopping  # by `CancelJob`, which leaves its lease
        self._task_over(task, ended)
        if state is TaskState.CANCELLED and not was_stopped:
            self._pool.drop(task.lease.id, ended.reason or "its worker cancelled the task")

    def on_job_status(self, peer: PeerId, status: JobStatus) -> None:
        """Handle a worker's status report; older workers send only this, newer ones also `JobEnd` with details."""
        task = self._register.on_lease(status.task_id, peer, status.attempt)
        if task is not None and isinstance(status.status, Finished | Failed):
            self._start_background(partial(self._wait_for_job_end, task, isinstance(status.status, Finished)))

    async def _wait_for_job_end(self, task: TaskRef, finished: bool) -> None:
        about = self._endpoint.connected_peers().get(task.lease.peer)
        if about is None or not about.protocols or LEASE in about.protocols:
            await anyio.sleep(_JOB_END_GRACE)
        state = TaskState.FINISHED if finished else TaskState.FAILED
        self._task_over(task, TaskEnded(state, "" if finished else "its worker gave no reason; its log says why"))

    def _task_over(self, task: TaskRef, end: TaskEnded) -> None:
        """Tell the operator of the end of a task, once."""
        if not self._register.end(task) or self._closed:
            return
        self._stopping.discard(task)
        self._attempts.pop(task, None)
        try:
            self._events.task_ended(task, end)
        except OSError as error:
            self._on_file_error(error)
        self._tell(self._running_operator.on_task_update, task, end, anyio.current_time())


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_TEXT]
