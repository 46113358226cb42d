"""The job runner: carries out what a strategy's operator asks for, and tells it what happens. Knows no strategy.

Holds the job's leases, starts tasks, and checks who speaks before an operator hears of a message. `service` creates
one `JobRunner` per job and passes it the messages of peers; background work runs in the job's own task group.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
import anyio.abc
import anyio.to_thread
from msgspec import structs

from hypha_net import instrumentation, retries, rpc
from hypha_net.errors import (
    NetError,
    TransferError,
    TransferRefusedError,
    UnsupportedProtocolError,
    leaf_errors,
)
from hypha_net.node.health import gateway_outage
from hypha_net.transfer import FilePushTarget, PullSource
from hypha_proto.datasets import (
    NO_FREE_SLICE,
    AssignedSlice,
    DataRequest,
    NotFound,
    SliceAssigned,
    SlicesAnswer,
    SlicesAssigned,
    UnusableSlice,
    WireError,
)
from hypha_proto.drain import Drain
from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEWED_LEASE, Goodbye
from hypha_proto.offers import WorkerOffer
from hypha_proto.task_resources import LocateResource, ResourceLocation
from hypha_proto.tasks import TaskResource
from hypha_proto.texts import quote
from hypha_proto.training_reports import ReportAnswer, ReportError, ReportTraining
from hypha_proto.transfer import PullRequest, PushHeader, Refusal
from hypha_scheduler.allocation.shortage import Shortage
from hypha_scheduler.errors import (
    AllocationError,
    JobCancelledError,
    JobFailedError,
    JobInterruptedError,
    files_unusable,
    waits_for_room,
)
from hypha_scheduler.jobs.artifacts import write_result
from hypha_scheduler.jobs.attempt_register import AttemptRegister
from hypha_scheduler.jobs.config import JobTable
from hypha_scheduler.jobs.context import JobHost, RunnerContext
from hypha_scheduler.jobs.effect_queue import EffectQueue
from hypha_scheduler.jobs.events import EndRecord, JobEvents
from hypha_scheduler.jobs.idempotency_cache import ResponseCache
from hypha_scheduler.jobs.lease_accounts import HOUR, MARK_INTERVAL, LeaseAccounts
from hypha_scheduler.jobs.lease_pool import LeasePool
from hypha_scheduler.jobs.orphaned_tasks import OrphanedTasks, read_orphaned, renew_orphaned
from hypha_scheduler.jobs.resource_locations import checked_location, gone, peer_reason, with_bounded_failures
from hypha_scheduler.jobs.task_lifecycle import TaskLifecycle
from hypha_scheduler.jobs.task_streams import TaskStreams
from hypha_scheduler.jobs.unfinished import read_unfinished
from hypha_scheduler.strategies.base import (
    BY_OWNER,
    CANCEL,
    Effect,
    Effects,
    EmitEvent,
    EndJob,
    Lease,
    Operator,
    PostMetric,
    PushTarget,
    RetryAfter,
    RunInBackground,
    SendCommand,
    SendMessage,
    SliceRefusedError,
    StartTask,
    StopTask,
    Strategy,
    StrategyMethod,
    TaskEnded,
    TaskRef,
    TaskStarted,
    TaskState,
    TaskUpdate,
    TrafficCounts,
)

_log = logging.getLogger(__name__)

_RELEASE_TIMEOUT: Final = 3.0
"""Seconds to release leases when a job ends."""
_CANCEL_LIMIT: Final = 3.0
"""Seconds for the strategy of a cancelled job to end it."""
_BUDGET_CHECK: Final = 1.0
_BUDGET_MARGIN: Final = RENEWED_LEASE + 5.0
"""Seconds of all leases that a budget must leave: for the end of the job, or for leases whose workers do not answer."""
WAITS_AGAIN: Final = "the scheduler was stopped while the job waited; it waits again when the scheduler is started"
_CHECK_INTERVAL: Final = 0.5
"""Seconds between looks at a deadline that stays due."""
_MIN_RETRY: Final = 0.05
"""Shortest time in seconds after which an operator is asked again for a slice."""
_MAX_WAIT: Final = 30.0
"""Longest time in seconds for which a request for a slice waits; the worker then asks again."""
_MAX_ANSWER_WAIT: Final = 20.0
"""Longest time in seconds for which a message or a push waits; the peer then asks again."""
MAX_WAITING: Final = 32
"""Requests of one peer that wait at a time; further ones are told at once to ask again."""
_ATTEMPTS_PER_RUN: Final = 1 << 16
"""Attempts of a run of the job are numbered from this multiple of its number on, so that they grow over all runs."""
_NO_TASK: Final = "no task of this job runs there"
_JOB_OVER: Final = "the job is over"
_NOT_YET: Final = "the job takes no files now"
_REFUSED_QUESTIONS: Final = instrumentation.Counter(
    "hypha.scheduler.resource_questions.refused",
    "{question}",
    "Questions of workers about resources of attempts that they do not run.",
)
_EXPECTED: Final = (JobFailedError, OSError, NetError)
"""Errors of a strategy that are not errors in its code."""

Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class JobRunner:
    """One job: `run` runs it to its end, the ``on_…`` methods handle messages of peers about it."""

    host: JobHost
    strategy: Strategy
    job: JobTable
    job_id: uuid.UUID = field(default_factory=uuid.uuid4)
    is_resumed: bool = False
    """Whether the interrupted job of that id is continued: its strategy gets the records of its journal, and its files
    are appended to."""
    is_taken_up: bool = False
    """Whether the tasks whose workers hold their leases still are continued, too."""
    on_placed: Callable[[], None] | None = None
    """Called when the job has its first leases, for which it then waits without a limit, in a directory that may exist;
    None for a job that fails if workers are missing."""
    directory: Path = field(init=False)
    task_streams: TaskStreams = field(init=False)
    _orphaned: OrphanedTasks = field(default_factory=OrphanedTasks)
    """What the earlier run held, if its tasks are to be continued."""
    _leases_back: anyio.Event = field(default_factory=anyio.Event)
    begun: anyio.Event = field(default_factory=anyio.Event)
    """Set when messages of the job's workers can be handled: while it is taken up, its tasks are not known."""
    _strategy_scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _why_cancelled: str | None = None
    """Why the job is ended before its end; None unless its owner or its budget does so."""
    _lacks: str | None = None
    """Why the job has not found the workers yet with which it begins."""
    _interruption: str | None = None
    """Why the scheduler ends before the job."""
    _earlier: Sequence[Mapping[str, Any]] = ()
    """Records of the journal of an interrupted run."""
    attempts: AttemptRegister = field(default_factory=AttemptRegister)
    _operator: Operator | None = None
    _early_notices: list[tuple[str, object]] = field(default_factory=list)
    """Notices of background work before there is an operator."""
    _progress_responses: ResponseCache[tuple[ReportAnswer, int]] = field(default_factory=ResponseCache)
    """Answers, and the tickets of the effects that precede them."""
    _slice_responses: ResponseCache[SliceAssigned | SlicesAssigned] = field(default_factory=ResponseCache)
    _traffic: defaultdict[PeerId, TrafficCounts] = field(default_factory=lambda: defaultdict(TrafficCounts))
    _placement_seconds: float | None = None
    _found_too_few: bool = False
    _full_since: float = 0.0
    """Time since which the disk has no room for records and events."""
    _ended: anyio.Event = field(default_factory=anyio.Event)
    _failure: str | None = None
    is_closed: bool = False
    _changed: anyio.Event = field(default_factory=anyio.Event)
    _waiting: Counter[PeerId] = field(default_factory=Counter)
    trace: str | None = None
    tasks: anyio.abc.TaskGroup = field(init=False)
    events: JobEvents = field(init=False)
    _accounts: LeaseAccounts = field(init=False)
    effects: EffectQueue = field(init=False)
    _context: RunnerContext = field(init=False)
    pool: LeasePool = field(init=False)
    _lifecycle: TaskLifecycle = field(init=False)

    def __post_init__(self) -> None:
        self.is_resumed |= self.is_taken_up
        if not self.is_taken_up:
            self.begun.set()
        self.directory = self.host.runs / str(self.job_id)
        self.task_streams = TaskStreams(self)

    # ------------------------------------------------------------------------------------------------------------- run

    async def run(self) -> Path:
        """Run the job to its end and return the path of its ``result.json``.

        Raises:
            JobFailedError: the job failed; its executors are stopped and its leases released.
            JobInterruptedError: `interrupt` was called.
        """
        try:
            return await self._run_reported()
        except (JobFailedError, JobInterruptedError):
            raise
        except Exception as error:  # includes background tasks of the job: they fail this job, not the scheduler
            raise JobFailedError(self._describe(error)) from error
        finally:
            self.begun.set()

    def interrupt(self) -> None:
        """End the run before the job's end, and record that; tasks that may outlive the scheduler run on."""
        if self.on_placed is not None and self._placement_seconds is None:
            self._interruption = WAITS_AGAIN
            self._strategy_scope.cancel()
            return
        resume = f"continue it with `hypha-scheduler resume {self.directory} --config FILE`"
        if (grace := self.job.orphan_grace_seconds) > 0:
            how = f"its tasks run on for up to {grace:g} s: start the scheduler again until then, or later {resume}"
        else:
            how = resume
        self._interruption = f"the scheduler was stopped before the job had ended; {how}"
        self._strategy_scope.cancel()

    def cancel(self) -> None:
        """End the job for its owner: its executors are stopped and its leases released, its models stay."""
        self._cancel_because(BY_OWNER)

    def _cancel_because(self, reason: str) -> None:
        if self._why_cancelled is not None:
            return
        self._why_cancelled = reason
        if self._operator is None or self.is_closed:
            self._strategy_scope.cancel()
            return
        self._tell(self._command_cancel, anyio.current_time())
        self.tasks.start_soon(self._end_cancelled)

    def _command_cancel(self, now: float) -> Effects:
        try:
            return self._running_operator.on_command(CANCEL, now)
        except ValueError:  # a strategy without the command
            return (EndJob(failure=BY_OWNER),)

    async def _end_cancelled(self) -> None:
        """End a cancelled job whose strategy does not end it, or whose records find no room on the disk."""
        with anyio.move_on_after(_CANCEL_LIMIT):
            await self._ended.wait()
        self._end(BY_OWNER)

    async def _keep_accounts(self) -> None:
        """Mark accounts and journal as current, and cancel the job before it spends more than its budget."""
        budget, marked = self.job.token_budget, anyio.current_time()
        while True:
            pause = MARK_INTERVAL
            if budget is not None:
                spent, rate = self._accounts.spent(), self._accounts.rate
                if rate > 0 and spent + rate * (_BUDGET_MARGIN + _BUDGET_CHECK) >= budget:
                    self._cancel_because(
                        f"its budget of {budget:g} tokens has to last until its leases have ended, which may take "
                        f"{_BUDGET_MARGIN:g} s: {spent:.4g} are spent, and an hour costs {rate * HOUR:g}. Give it a "
                        "larger one in [scheduler.job] of the --config file, and `hypha-scheduler resume` continues it"
                    )
                    budget = None
                pause = _BUDGET_CHECK
            await anyio.sleep(pause)
            if anyio.current_time() - marked >= MARK_INTERVAL:
                self._accounts.mark()
                self._mark_alive()
                marked = anyio.current_time()

    def _mark_alive(self) -> None:
        """Keep the time of the journal current, by which the next scheduler sees how old the leases are."""
        if self._operator is None or self.job.orphan_grace_seconds <= 0:
            return
        try:
            self.events.journal.touch()
        except OSError as error:
            _log.debug("the time of the journal of job %s stays as it is: %s", self.job_id, error)

    @property
    def waits_because(self) -> str | None:
        """Why the job waits for the workers with which it begins; None if it does not wait."""
        return None if self._placement_seconds is not None else self._lacks

    async def _run_reported(self) -> Path:
        await self._prepare_directory()
        events = JobEvents(self.job_id, self.directory, self.host.bridge, self.is_resumed, self._certificate_names)
        with events as self.events:
            try:
                if not self.is_resumed:
                    self.events.accepted(self.job.model_dump(mode="json"), self.job.planned_steps)
                return await self._run_and_release()
            except BaseException as error:
                is_recorded = not self.is_resumed or self._operator is not None or self._why_cancelled is not None
                if is_recorded:  # a job that cannot be resumed now may be later
                    self.host.ends.record(self._end_record(error))
                raise

    def _certificate_names(self) -> Mapping[PeerId, str]:
        peers = self.host.endpoint.connected_peers().items()
        return {peer: about.certificate_name for peer, about in peers if about.certificate_name is not None}

    def _end_record(self, error: BaseException) -> EndRecord:
        if isinstance(error, JobInterruptedError):
            return self.events.interrupted(str(error), tasks_run_on=self._tasks_outlive)
        if all(isinstance(cause, anyio.get_cancelled_exc_class()) for cause in leaf_errors(error)):
            return self.events.interrupted("the scheduler was stopped", tasks_run_on=False)
        is_cancelled = isinstance(error, JobCancelledError)
        return self.events.failed(self._describe(error), is_cancelled=is_cancelled)

    @property
    def _tasks_outlive(self) -> bool:
        """Whether the tasks run on when the scheduler ends."""
        has_grace = self._interruption is not None and self.job.orphan_grace_seconds > 0
        return has_grace and self._why_cancelled is None

    async def _prepare_directory(self) -> None:
        if not self.is_resumed:
            self.directory.mkdir(parents=True, exist_ok=self.on_placed is not None)
        else:
            self._earlier = await anyio.to_thread.run_sync(read_unfinished, self.directory, self.job.type)
        if self.is_taken_up:
            self._orphaned = read_orphaned(self._earlier)

    def _describe(self, error: BaseException) -> str:
        """Return the reason for a failure as it is recorded."""
        causes = list(leaf_errors(error))
        if all(isinstance(cause, OSError) for cause in causes):
            return files_unusable(self.directory, causes)
        if all(isinstance(cause, JobFailedError) for cause in causes):
            return "; ".join(map(str, causes))
        _log.error("job %s failed by an internal error", self.job_id, exc_info=error)
        return f"internal error: {'; '.join(map(repr, causes))}"

    async def _run_and_release(self) -> Path:
        failure: JobFailedError | None = None
        result = self.directory / "result.json"
        self.trace = instrumentation.current_traceparent()
        async with anyio.create_task_group() as self.tasks:
            self._prepare()
            self.tasks.start_soon(self._keep_accounts)
            try:
                with self._strategy_scope:
                    await self._run_strategy(result)
            except JobCancelledError as error:
                failure = error
            except JobFailedError as error:
                outage = gateway_outage(self.host.endpoint)  # which may be why nobody was found
                failure = error if outage is None else type(error)(f"{error}; {outage}")
            finally:
                self.is_closed = True
                self.effects.close()
                await self._give_leases_back()
                self._accounts.close()
                self._context.remove_served_copies()  # also when the job is cancelled, so not in a thread
            self.tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if self._strategy_scope.cancelled_caught:
            if self._why_cancelled is None:
                raise JobInterruptedError(self._interruption)
            raise JobCancelledError(self._why_cancelled)
        return result

    async def _give_leases_back(self) -> None:
        with anyio.move_on_after(_RELEASE_TIMEOUT, shield=True):
            if self._strategy_scope.cancelled_caught and self._tasks_outlive:
                for lease in self.pool.held:
                    if self.has_task(lease.id):
                        self._accounts.end(lease.id, self.pool.seconds_left(lease.id))
                await self.pool.leave("the scheduler was stopped")
            else:
                if self._operator is None:
                    self.pool.drop_unknown(tuple(self._orphaned.leases.values()), "the job cannot go on now")
                await self.pool.close("the job is over")

    def _prepare(self) -> None:
        epoch = time.time() - anyio.current_time()
        self._accounts = LeaseAccounts(self.directory, lambda: epoch + anyio.current_time())
        runs = sum(record.get("record") in ("accepted", "resumed") for record in self._earlier)
        self._context = RunnerContext(self, runs * _ATTEMPTS_PER_RUN)
        self.effects = EffectQueue(
            self.events.journal, self._carry_out, self.on_file_error, self._on_disk_full, self._on_room
        )
        self.pool = LeasePool(self, self.host.endpoint, self.tasks)
        self._lifecycle = TaskLifecycle(self, self.attempts, self.task_streams, self.pool)

    def on_lease_held(self, lease: Lease) -> None:
        """Charge a lease that is renewed from now on, also one that was not delivered yet."""
        name = self.events.name_of(str(lease.peer))
        self._accounts.begin(lease.id, lease.peer, lease.role, lease.price, name)

    def on_lease_gone(self, lease: uuid.UUID) -> None:
        """Forget a lease that is no longer renewed, also one that was not delivered."""
        self.task_streams.drop(lease)
        self._accounts.end(lease)

    def has_task(self, lease: uuid.UUID) -> bool:
        """Return whether a task runs on a lease, or is about to start."""
        return self.attempts.on(lease) is not None or self.effects.will_start_on(lease)

    async def _run_strategy(self, result: Path) -> None:
        began = anyio.current_time()
        if not self.is_resumed and (lacking := self.job.missing_files()):  # a resumed job may have copies
            raise JobFailedError("\n".join(lacking))
        if self.is_taken_up:  # at once: the workers hold the leases for a limited time
            self.tasks.start_soon(self._renew_orphaned)
        try:
            async with self.strategy.open(self.job, self._context, self._earlier) as operator:
                await self._run_operator(operator)
                summary = await self._summarize(operator, began)
        except (*_EXPECTED, ExceptionGroup):
            raise
        except Exception as error:  # a third party's strategy may raise anything
            raise JobFailedError(self._strategy_error(error)) from error
        write_result(result, summary)
        self.host.ends.record(self.events.finished(summary))

    async def _run_operator(self, operator: Operator) -> None:
        """Run the job until its operator, or an error, ends it."""
        adopted = await self._adopt() if self.is_taken_up else ()
        if self.is_resumed:
            self.events.resumed(adopted)  # only now: a job that its strategy does not resume stays as it is
        self._operator = operator
        self.tasks.start_soon(self.effects.run)
        if not self.is_taken_up:
            self.tasks.start_soon(self.pool.renew)
        self.tasks.start_soon(self._watch_deadlines)
        now = anyio.current_time()
        # with its tasks, before it is asked for the leases that it wants
        self._tell(lambda: operator.on_start(now) + (operator.on_tasks_adopted(adopted, now) if adopted else ()))
        self.begun.set()
        for name, message in self._early_notices:
            self.on_notice(name, message)
        self._settle()
        await self._ended.wait()
        self.is_closed = True
        if self._failure is not None and (why := self._why_cancelled) is not None:
            raise JobCancelledError(self._failure if why == BY_OWNER else why)
        if self._failure is not None:
            raise (AllocationError if self._found_too_few else JobFailedError)(self._failure)

    async def _renew_orphaned(self) -> None:
        """Renew the leases of the earlier run's tasks; release those on which no task has begun."""
        self.tasks.start_soon(self.pool.renew)
        self.pool.drop_unknown(self._orphaned.idle, "the scheduler was started again")
        await renew_orphaned(self.host.endpoint, self._orphaned.tasks.values(), self.pool.take_back)
        self._leases_back.set()

    async def _adopt(self) -> Sequence[TaskRef]:
        """Take over the tasks of the earlier run whose leases are renewed, and return them."""
        await self._leases_back.wait()
        tasks = self._orphaned.tasks
        held = self.pool.adopt([task.lease for task in tasks.values()])
        adopted = [tasks[lease.id] for lease in held]
        for task in adopted:
            self.attempts.adopt(task)
        if adopted:
            self._placement_seconds = 0.0  # nothing was searched for
        _log.info("job %s: %d of %d tasks of its earlier run are continued", self.job_id, len(adopted), len(tasks))
        return adopted

    async def _summarize(self, operator: Operator, began: float) -> Mapping[str, object]:
        """Release the leases and return the content of the result."""
        await self.pool.close("the job is done")
        summary = {
            "job_id": str(self.job_id),
            **operator.summary(self._traffic),
            "placement_seconds": round(self._placement_seconds or 0.0, 4),
            "wall_seconds": round(anyio.current_time() - began, 3),
        }
        json.dumps(summary)  # what cannot be written is an error of the strategy
        return {key: self.events.name_peers_in(value) for key, value in summary.items()}

    async def _watch_deadlines(self) -> None:
        """Tell the operator when its deadlines have passed."""
        operator = self._running_operator
        while not self._ended.is_set():
            at = None if self.effects.is_full else self._call(operator.next_deadline)
            if at is not None and at <= (now := anyio.current_time()):
                self._tell(operator.on_deadline, now)
                if (again := self._call(operator.next_deadline)) is not None and again <= now:
                    await anyio.sleep(_CHECK_INTERVAL)  # it stays due: do not spin
                continue
            with anyio.move_on_after(_MAX_WAIT if at is None else at - anyio.current_time()):
                await self._changed.wait()

    # ----------------------------------------------------------------------------------------------- calls of operators

    def _tell(self, event: Callable[..., Effects], *arguments: object) -> int | None:
        """Call the operator and take its effects; return the ticket for `EffectQueue.wait`, or None if it fails."""
        told = self._ask(lambda: ((), event(*arguments)))
        return None if told is None else told[1]

    def tell_update(self, task: TaskRef, update: TaskUpdate) -> int | None:
        """Tell the operator what has happened to a task; return the ticket of its effects."""
        return self._tell(self._running_operator.on_task_update, task, update, anyio.current_time())

    def tell_result(self, tag: str, outcome: object) -> None:
        """Tell the operator of the outcome of an effect, by its tag."""
        self._tell(self._running_operator.on_effect_result, tag, outcome, anyio.current_time())

    def _ask(self, question: Callable[[], tuple[Answer, Effects]]) -> tuple[Answer, int] | None:
        """Call the operator and take its effects; return its answer and their ticket, or None if it fails."""
        has_changed = True

        def take_effects() -> tuple[Answer, int]:
            nonlocal has_changed
            answer, effects = question()
            has_changed = bool(effects) or not isinstance(answer, RetryAfter)
            return answer, self.effects.submit(effects)

        told = self._call(take_effects)
        if told is not None and has_changed:  # else two questions that wait would wake each other for ever
            self._settle()
        return told

    async def _ask_and_wait(self, question: Callable[[], tuple[Answer, Effects]]) -> Answer | None:
        """Call the operator and wait until its effects are carried out; None if it fails or they were dropped."""
        told = self._ask(question)
        return told[0] if told is not None and await self.effects.wait(told[1]) else None

    def _call(self, question: Callable[[], Answer]) -> Answer | None:
        """Call the operator; None outside of its job, or if it fails: its error fails its own job and no other."""
        if self._operator is None or self.is_closed or self._ended.is_set():
            return None
        try:
            return question()
        except Exception as error:  # noqa: BLE001 - a third party's strategy may raise anything
            self._fail_strategy(error)
            return None

    def _fail_strategy(self, error: Exception) -> None:
        self._end(self._strategy_error(error))

    def _strategy_error(self, error: Exception) -> str:
        _log.error("job %s: strategy %s failed", self.job_id, self.job.type, exc_info=error)
        return f"internal error of strategy {self.job.type!r}: {error!r}"

    def _settle(self) -> None:
        """Let everything that depends on the operator's state look at it again."""
        self._call(lambda: self.pool.set_demand(self._running_operator.role_requests()))
        self._wake()

    def _wake(self) -> None:
        """Wake what waits for an event of the job."""
        self._changed.set()
        self._changed = anyio.Event()

    def on_notice(self, name: str, message: object) -> None:
        """Tell the operator what background work has observed."""
        if self._operator is None:
            self._early_notices.append((name, message))
            return
        self._ask(lambda: self._running_operator.on_message(None, name, message, anyio.current_time()))

    @property
    def _running_operator(self) -> Operator:
        assert self._operator is not None  # `_ask` calls nothing otherwise
        return self._operator

    # --------------------------------------------------------------------------------------------------------- effects

    def _carry_out(self, effect: Effect) -> None:
        """Carry out an effect; what it lacks is an error of the strategy and fails its job.

        Raises:
            OSError: a file cannot be written.
        """
        if self._ended.is_set() and not isinstance(effect, EmitEvent | PostMetric | EndJob):
            return  # the job is over: no new work
        try:
            self._act(effect)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - a third party's strategy may ask for anything
            self._fail_strategy(error)

    def _act(self, effect: Effect) -> None:
        match effect:
            case EmitEvent(name, fields):
                self.events.emit(name, **fields)
            case PostMetric():
                self.events.post(effect)
            case StartTask():
                self._lifecycle.start(effect)
            case StopTask():
                self._lifecycle.stop(effect)
            case SendCommand():
                self._lifecycle.send_command(effect)
            case SendMessage():
                self.tasks.start_soon(self._send, effect)
            case RunInBackground():
                self.tasks.start_soon(self._run_in_background, effect)
            case EndJob(failure):
                self._end(failure)
            case _:
                raise TypeError(f"{effect!r} is not an effect")

    def _end(self, failure: str | None) -> None:
        """End the job; only the first outcome counts."""
        if not self._ended.is_set():
            self._failure = failure
            self._ended.set()
            self.pool.stop_searching()
            self._wake()

    def on_file_error(self, error: OSError) -> None:
        """End the job, as a file of it cannot be written."""
        self._end(files_unusable(self.directory, [error]))

    def _on_disk_full(self, error: OSError) -> None:
        """Pause the job until its records and events can be written."""
        self._full_since = anyio.current_time()
        reason = waits_for_room(self.directory, error)
        _log.warning("job %s pauses: %s", self.job_id, reason)
        self.effects.submit((EmitEvent("paused", {"reason": reason}),))

    def _on_room(self) -> None:
        now = anyio.current_time()
        seconds = now - self._full_since
        self.effects.submit((EmitEvent("continued", {"seconds": round(seconds, 3)}),))
        self._tell(self._running_operator.on_suspended, seconds, now)

    async def _send(self, effect: SendMessage) -> None:
        def on_failure(error: NetError, _pause: float) -> None:
            if isinstance(error, UnsupportedProtocolError):
                raise error
            _log.warning("%s: %s could not be reached, retrying: %s", effect.span, effect.peer, error)

        outcome: object
        with instrumentation.span(effect.span, effect.about, parent=self.trace):
            try:
                policy = replace(retries.MESSAGE, pauses=effect.retry_delays)
                call = partial(rpc.call, self.host.endpoint, effect.peer, effect.method, effect.message)
                outcome = await policy.retry(call, on_failure)
            except NetError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001 - a third party's strategy may send anything
                self._fail_strategy(error)
                return
        self.tell_result(effect.tag, outcome)

    async def _run_in_background(self, effect: RunInBackground) -> None:
        outcome: object
        try:
            outcome = await effect.work()
        except _EXPECTED as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - a third party's strategy may raise anything
            self._fail_strategy(error)
            return
        self.tell_result(effect.tag, outcome)

    def start_background(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a background task on behalf of a request, unless the job has ended."""
        if not self.is_closed:
            self.tasks.start_soon(task)

    # ---------------------------------------------------------------------------------------------------------- leases

    def on_leases_acquired(self, leases: Sequence[Lease], seconds: float) -> None:
        """Tell the operator of new leases."""
        self._found_too_few = False
        try:
            if self._placement_seconds is None:
                self._placement_seconds = seconds
                self.events.placed(leases, seconds)
                if self.on_placed is not None:
                    self.on_placed()
            else:
                self.effects.note(*self.events.leased(leases, seconds), syncs=True)
        except OSError as error:
            self.on_file_error(error)
            return
        self._tell(self._running_operator.on_leases_acquired, leases, anyio.current_time())

    def on_lease_lost(self, lease: Lease, reason: str) -> None:
        """Tell the operator of a lost lease, and of the end of the task on it."""
        now = anyio.current_time()
        attempt = self.attempts.on(lease.id)
        self._tell(self._running_operator.on_lease_lost, lease, reason, now)
        if attempt is not None:
            self._lifecycle.record_end(attempt.task, TaskEnded(TaskState.FAILED, reason))

    def on_allocation_timeout(self, roles: Sequence[str], reasons: str) -> None:
        """Tell the operator that roles lack workers."""
        self._found_too_few = True
        for role in roles:
            self._tell(self._running_operator.on_allocation_timeout, role, reasons, anyio.current_time())

    def on_shortage(self, shortage: Shortage) -> None:
        """Report why workers are missing."""
        self._lacks = f"{shortage.role}: {shortage}"
        self.events.shortage(shortage)

    def on_offer(self, peer: PeerId, offer: WorkerOffer) -> None:
        """Handle an offer of a worker."""
        if self._operator is not None and not self.is_closed:
            self.pool.on_offer(peer, offer)

    # ----------------------------------------------------------------------------------------------- messages of peers

    async def on_slice_request(self, peer: PeerId, request: DataRequest) -> SlicesAnswer:
        """Handle a worker's request for slices."""
        deadline = anyio.current_time() + _MAX_WAIT
        unusable = request.unusable
        while True:
            task = self.attempts.running_at(peer, request.attempt)
            if task is None or not self._context.has_dataset(request.dataset):
                return NotFound()
            if (earlier := self._slice_responses.get(peer, request.id)) is not None:
                return earlier
            if unusable is not None:
                self._set_slice_aside(task, request.dataset, unusable)
                unusable = None  # once, if the request has to wait
            found, refusal = self._next_slices(task, request)
            if found:
                for each in found:
                    self._record_slice(task, request.dataset, each)
                if request.most is None:
                    return self._slice_responses.put(peer, request.id, SliceAssigned(**structs.asdict(found[0])))
                return self._slice_responses.put(peer, request.id, SlicesAssigned(slices=found))
            if not isinstance(refusal, RetryAfter):
                return refusal
            if not await self._wait_to_retry(peer, refusal, deadline):
                return WireError(message=NO_FREE_SLICE)

    def _record_slice(self, task: TaskRef, dataset: str, given: AssignedSlice) -> None:
        """Record an assignment of samples, from which a restarted scheduler knows what its workers have."""
        if given.first is None:
            return
        fields = {
            "worker": str(task.lease.peer),
            "dataset": dataset,
            "epoch": given.epoch,
            "slice": given.index,
            "first": given.first,
            "end": given.end,
        }
        self.effects.note("assigned", fields)

    def _set_slice_aside(self, task: TaskRef, dataset: str, report: UnusableSlice) -> None:
        bounded, now = with_bounded_failures(report), anyio.current_time()
        self._tell(self._running_operator.on_slice_unusable, task, dataset, bounded, now)

    def _next_slices(
        self, task: TaskRef, request: DataRequest
    ) -> tuple[tuple[AssignedSlice, ...], NotFound | WireError | RetryAfter]:
        """Ask the operator for slices, and look up where they are; return them, and why there are no more."""
        found: list[AssignedSlice] = []

        def ask() -> WireError | RetryAfter | None:
            operator = self._running_operator
            choose = operator.slice_ahead if request.ahead else operator.next_slice
            while len(found) < (request.most or 1):
                try:
                    chosen = choose(task, request.dataset, anyio.current_time())
                except SliceRefusedError as error:
                    return WireError(message=str(error))
                if chosen is None or isinstance(chosen, RetryAfter):
                    return chosen
                found.append(self._context.address(request.dataset, chosen))
            return None

        refusal = self._call(ask)
        if found or not isinstance(refusal, RetryAfter):
            self._settle()
        return tuple(found), refusal or NotFound()

    async def on_training_report(self, peer: PeerId, request: ReportTraining) -> ReportAnswer:
        """Handle a report of an executor that trains."""
        task = self.attempts.running_at(peer, request.attempt)
        if task is None:
            return ReportError(reason="this attempt at a task of the job does not run on this peer")
        told = self._progress_responses.get(peer, request.id)
        if told is None:
            now = anyio.current_time()
            told = self._ask(lambda: self._running_operator.on_training_report(task, request.progress, now))
            if told is not None:
                self._progress_responses.put(peer, request.id, told)
        if told is None or not await self.effects.wait(told[1]):
            await self._leave_unanswered()
            return ReportError(reason=_JOB_OVER)
        return told[0]

    def holds(self, lease: uuid.UUID, peer: PeerId) -> bool:
        """Return whether the job holds a lease of a peer, also one that its operator does not know yet."""
        return self._operator is not None and not self.is_closed and self.pool.renews(lease, peer)

    def is_taking(self, lease: uuid.UUID, peer: PeerId) -> bool:
        """Return whether the job has asked a peer for an offered lease and waits for the answer."""
        return self._operator is not None and not self.is_closed and self.pool.is_taking(lease, peer)

    async def on_task_update(self, task: TaskRef, update: TaskUpdate, traffic: TrafficCounts | None) -> None:
        """Tell the operator of a status update about a running task; return when its effects are carried out."""
        if not self.attempts.runs(task):
            return
        if traffic is not None:
            self._traffic[task.lease.peer] += traffic
        if isinstance(update, TaskEnded):
            ticket = self._lifecycle.record_end(task, update)
        elif isinstance(update, TaskStarted):
            ticket = self._lifecycle.record_start(task)
        else:
            ticket = self.tell_update(task, update)
        if ticket is not None:
            await self.effects.wait(ticket)

    async def on_locate(self, peer: PeerId, request: LocateResource) -> ResourceLocation:
        """Handle a worker's question where a resource of its task is."""
        task = self.attempts.running_at(peer, request.attempt)
        attempt = None if task is None else self.attempts.get(task)
        if attempt is None:
            _REFUSED_QUESTIONS.add()
            return gone("this attempt at the task does not run on this peer")
        known = () if attempt.spec is None else attempt.spec.resources
        resource = next((entry for entry in known if entry.name == request.resource), None)
        if resource is None:
            return gone(f"the task has no resource {quote(request.resource)}")
        return await self._locate(attempt.task, resource, with_bounded_failures(request))

    async def _locate(self, task: TaskRef, resource: TaskResource, request: LocateResource) -> ResourceLocation:
        if resource.dataset is not None:
            return self._context.locate(resource.dataset, request.failures)
        if resource.result is None:
            return gone(f"the source of resource {resource.name!r} says where it is")
        now = anyio.current_time()
        found = await self._ask_and_wait(lambda: checked_location(self._running_operator.on_locate(task, request, now)))
        return gone(_JOB_OVER) if found is None else found

    async def on_message(self, peer: PeerId, method: StrategyMethod, message: Any) -> Any:
        """Handle a message of the strategy's own RPC methods."""
        deadline, name = anyio.current_time() + _MAX_ANSWER_WAIT, method.method.name
        while (task := self.attempts.running_at(peer, message.attempt)) is not None:
            ask = partial(self._running_operator.on_message, task, name, message, anyio.current_time())
            answer = await self._ask_and_wait(ask)
            if answer is None:
                await self._leave_unanswered()
                return method.unknown_job
            if not isinstance(answer, RetryAfter):
                return answer
            if not await self._wait_to_retry(peer, answer, deadline):
                return method.unknown_job if method.pending is None else method.pending
        return method.unknown_job

    async def _leave_unanswered(self) -> None:
        """Answer nothing while the scheduler is being stopped: the peer asks the next one, which takes the job up."""
        if self._interruption is not None:
            await anyio.sleep(_MAX_ANSWER_WAIT)

    async def _wait_to_retry(self, peer: PeerId, answer: RetryAfter, deadline: float) -> bool:
        """Wait for the next event, or for the time that an operator has named.

        Returns False when the deadline has passed, or if `MAX_WAITING` requests of the peer wait already.
        """
        if (now := anyio.current_time()) >= deadline or self._waiting[peer] >= MAX_WAITING:
            return False
        self._waiting[peer] += 1
        try:
            with anyio.move_on_after(min(max(answer.seconds, _MIN_RETRY), deadline - now)):
                await self._changed.wait()
        finally:
            self._waiting[peer] -= 1
        return True

    def on_pull_request(self, peer: PeerId, request: PullRequest) -> PullSource | Refusal:
        """Handle a worker's pull of a file of this job."""
        if self._context.serves(request.dataset):
            return self._context.resolve(request)
        task = self.attempts.any_on(peer)
        if task is None:
            return Refusal(reason=_NO_TASK)
        found = self._call(lambda: self._running_operator.on_pull_request(task, request))
        return Refusal(reason=_JOB_OVER) if found is None else found

    async def on_push_request(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        """Handle a file that a task is about to push."""
        deadline = anyio.current_time() + _MAX_ANSWER_WAIT
        while True:
            task = self.attempts.started_at(peer, header.attempt)
            if task is None or self._operator is None:
                return Refusal(reason=_NO_TASK)
            is_running = self.attempts.runs(task)
            ask = self._operator.on_push_request if is_running else self._operator.on_late_push
            target = await self._ask_and_wait(partial(ask, task, header, anyio.current_time()))
            if not isinstance(target, RetryAfter):
                break
            if not await self._wait_to_retry(peer, target, deadline):
                raise TransferError(_NOT_YET)  # no refusal, which is final: the sender tries again
        if target is None:
            return Refusal(reason=_JOB_OVER)
        if isinstance(target, Refusal):
            _log.warning("push of %s refused: %s", peer, target.reason)
            return target
        on_complete = partial(self._push_complete, task, header, target)
        slot = f"{self.directory}/{task.lease.id}/{target.slot}"
        return FilePushTarget(target.path, target.max_bytes, on_complete, slot=slot)

    async def _push_complete(
        self, task: TaskRef, header: PushHeader, target: PushTarget, _size: int, digest: str
    ) -> None:
        """Tell the operator of a complete file; the sender gets its receipt when this returns.

        Raises:
            TransferRefusedError: the task or the job has ended, or what the operator records cannot be written.
        """
        path = target.path
        if target.prepare is not None:
            try:
                await target.prepare(path)
            except OSError as error:
                self.on_file_error(error)
            except JobFailedError as error:
                self._end(str(error))
        now, operator = anyio.current_time(), self._running_operator

        def tell() -> tuple[bool, Effects]:
            if self.attempts.runs(task):
                return True, operator.on_push_complete(task, header, path, digest, now)
            effects = operator.on_late_push_complete(task, header, path, now)
            return effects is not None, effects or ()

        told = await self._ask_and_wait(tell)
        if told is None and self._interruption is not None:
            raise TransferError(_NOT_YET)  # no refusal, which is final: the sender tries again at the next scheduler
        if told is None:
            raise TransferRefusedError(_JOB_OVER)
        if not told:
            raise TransferRefusedError(_NO_TASK)

    def on_goodbye(self, peer: PeerId, goodbye: Goodbye) -> None:
        """Handle a worker's announcement that it is shutting down: its leases end at once."""
        reason = peer_reason(goodbye.reason) or "it is shutting down"
        for lease in self.pool.held:
            if lease.peer == peer and lease.id in goodbye.leases:
                self.pool.drop(lease.id, reason)

    def on_drain(self, peer: PeerId, drain: Drain) -> None:
        """Handle a worker's announcement that it will end: the operator hears once of each lease."""
        if self._operator is None or self.is_closed:
            return
        seconds, reason = drain.left_ms / 1000, peer_reason(drain.reason) or "it drains"
        for lease in self.pool.drain(peer, frozenset(drain.leases), reason):
            self.events.draining(lease, seconds, reason)
            self._tell(self._running_operator.on_lease_draining, lease, seconds, anyio.current_time())
