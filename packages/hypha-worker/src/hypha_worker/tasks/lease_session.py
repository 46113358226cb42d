"""The tasks of one lease: receives their definitions, runs one at a time, and reports.

Started by `task_manager` when the lease is held; ends with the lease.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any, Final

import anyio
import anyio.abc

from hypha_net import instrumentation
from hypha_net.log_throttle import LogThrottle
from hypha_net.message_channel import ChannelError
from hypha_proto.tasks import TaskCancelled, TaskDefinition, TaskFailed, TaskReport
from hypha_worker.errors import ExecutionError
from hypha_worker.leasing.lease_manager import Lease, LeaseError
from hypha_worker.leasing.retention import Retention
from hypha_worker.tasks.definition import MAX_TASK_NAME, DefinitionError, check_start
from hypha_worker.tasks.subscription import Subscription
from hypha_worker.tasks.task_run import TaskHost, TaskRun, one_line

_log = logging.getLogger(__name__)

LAST_REPORT_TIMEOUT: Final = 1.0
"""Seconds that the last reports of a lease that is over, or of a draining worker, may take."""
MAX_TASKS: Final = 10_000
"""Tasks of a lease whose newest attempt is remembered; the one that was defined first is forgotten first."""
_REFUSED: Final = instrumentation.Counter(
    "hypha.worker.definitions.refused",
    "{definition}",
    "Task definitions that were refused, by why: stale (an older attempt), malformed, unable (not now).",
)


class LeaseSession:
    """What a worker does for the tasks of one lease."""

    def __init__(self, host: TaskHost, lease: Lease, retention: Retention) -> None:
        self.lease = lease
        self._retention = retention
        self._host = host
        self._subscription = Subscription(host.endpoint, lease.scheduler, lease.id, self._handle)
        self._newest: OrderedDict[str, int] = OrderedDict()
        """Newest attempt that was defined, by task."""
        self._end_reason = ""
        self._end = anyio.Event()
        self._refusals = LogThrottle(anyio.current_time)
        self._tasks: anyio.abc.TaskGroup | None = None
        self.running: TaskRun | None = None
        """The attempt that runs."""

    async def run(self) -> None:
        """Serve the lease until `end` is called, and the attempt that runs then has ended."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._subscription.run)
            await self._end.wait()
            await self.wait_until_idle()
            tasks.cancel_scope.cancel()

    async def wait_until_idle(self) -> None:
        """Wait until no attempt runs and its end is reported, for which there is a bounded time."""
        if self.running is not None:
            await self.running.ended.wait()
        if self._subscription.pending:
            with anyio.move_on_after(LAST_REPORT_TIMEOUT):
                await self._subscription.wait_until_handled()

    def end(self, reason: str) -> None:
        """End the session, because its lease is over; the attempt that runs is cancelled."""
        self._end_reason = reason
        self._end.set()
        self.cancel(reason)

    def cancel(self, reason: str) -> bool:
        """Cancel the attempt that runs; return whether there is one."""
        if self.running is not None:
            self.running.cancel(reason)
        return self.running is not None

    async def _handle(self, definition: TaskDefinition) -> None:
        if len(definition.task) > MAX_TASK_NAME:  # it is neither remembered nor repeated in a report: both take memory
            self._refuse("malformed", definition, f"its task's name has more than {MAX_TASK_NAME} characters")
            return
        newest = self._newest.get(definition.task, -1)
        is_new = definition.attempt > newest
        if definition.attempt < newest or (not is_new and definition.start is not None):
            self._refuse("stale", definition, f"attempt {newest} is the newest")
            return
        if is_new:
            self._newest[definition.task] = definition.attempt
            if len(self._newest) > MAX_TASKS:
                self._newest.popitem(last=False)
        given = [part for part in (definition.start, definition.stop, definition.drain) if part is not None]
        if len(given) > 1:
            self._refuse("malformed", definition, "it has several of start, stop and drain")
            self._report_failed(definition, "the definition has several of start, stop and drain")
        elif definition.start is not None:
            self._start(definition)
        elif given:
            self._change(definition, is_new=is_new)

    def _change(self, definition: TaskDefinition, *, is_new: bool) -> None:
        """Stop or drain the attempt; one that never began is reported as cancelled."""
        run = self.running
        if run is None or (run.definition.task, run.definition.attempt) != (definition.task, definition.attempt):
            if is_new:
                self._report_cancelled(definition, "it was never begun on this lease")
            return
        if definition.stop is not None:
            run.cancel(definition.stop.reason)
        elif definition.drain is not None:
            run.drain(definition.drain.left_ms, definition.drain.reason)

    def _start(self, definition: TaskDefinition) -> None:
        spec = definition.start
        assert spec is not None
        try:
            settings = self._check(definition)
            host, lease = self._host, self.lease
            sent = self._subscription.wait_until_handled
            run = TaskRun(host, lease, definition, spec, settings, self._send, sent, self._retention)
            host.lease_manager.attach_job(lease.id, lease.scheduler, host.clock(), job_id=definition.job_id)
        except ExecutionError as error:
            self._refuse("malformed", definition, str(error))
            self._report_failed(definition, str(error))
        except LeaseError as error:
            self._refuse("unable", definition, str(error))
            self._report_cancelled(definition, str(error))
        else:
            _log.info("%s started on lease %s for scheduler %s", run, lease.id, lease.scheduler)
            self.running = run
            assert self._tasks is not None
            self._tasks.start_soon(self._run, run)

    def _check(self, definition: TaskDefinition) -> dict[str, Any]:
        """Check that an attempt can begin; return its settings."""
        spec = definition.start
        assert spec is not None
        if definition.job_id != self._subscription.job_id:
            raise DefinitionError(f"job {definition.job_id} is not the one that holds this lease")
        settings = check_start(definition, spec, self.lease.executors)
        if spec.executor not in self._host.executors:
            raise DefinitionError(f"no executor {spec.executor[:80]} is configured here")
        if self._end.is_set():
            raise LeaseError(self._end_reason)
        return settings

    async def _run(self, run: TaskRun) -> None:
        try:
            await run.run()
        finally:
            if self.running is run:
                self.running = None

    def _send(self, report: TaskReport) -> None:
        try:
            self._subscription.send(report)
        except ChannelError as error:
            _log.error("a report of task %s on lease %s is lost: %s", report.task, self.lease.id, error)

    def _report_failed(self, about: TaskDefinition, reason: str) -> None:
        failed = TaskFailed(reason=one_line(reason))
        self._send(TaskReport(job_id=about.job_id, task=about.task, attempt=about.attempt, failed=failed))

    def _report_cancelled(self, about: TaskDefinition, reason: str) -> None:
        cancelled = TaskCancelled(reason=one_line(reason))
        self._send(TaskReport(job_id=about.job_id, task=about.task, attempt=about.attempt, cancelled=cancelled))

    def _refuse(self, why: str, definition: TaskDefinition, reason: str) -> None:
        """Count a refused definition, and log it, each kind once a minute."""
        _REFUSED.add(1, {"hypha.reason": why})
        suppressed = self._refusals.suppressed_count(why)
        if suppressed is not None:
            more = f" ({suppressed} more since it was last logged)" if suppressed else ""
            task = f"task {definition.task[:80]!r}, attempt {definition.attempt}"
            _log.warning("definition of %s by %s refused: %s%s", task, self.lease.scheduler, one_line(reason), more)
