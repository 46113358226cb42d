"""The tasks of one lease: receives their definitions, runs one at a time, and reports.

Started by `task_manager` when the lease is held; ends with the lease.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import anyio
import anyio.abc

from hypha_net import instrumentation
from hypha_net.log_throttle import LogThrottle
from hypha_net.message_channel import ChannelError
from hypha_proto.commands import CommandAnswer, TaskCommand
from hypha_proto.tasks import TaskCancelled, TaskDefinition, TaskFailed, TaskReport
from hypha_worker.errors import ExecutionError
from hypha_worker.leasing.lease_manager import Lease, LeaseError
from hypha_worker.leasing.retention import Retention
from hypha_worker.tasks.definition import DefinitionError, check_start
from hypha_worker.tasks.subscription import Subscription
from hypha_worker.tasks.task_run import TaskHost, TaskRun, one_line

_log = logging.getLogger(__name__)

LAST_REPORT_TIMEOUT: Final = 1.0
"""Seconds that the last reports of a lease that is over, or of a worker that shuts down, may take."""
MAX_TASKS: Final = 10_000
"""Tasks of a lease whose newest attempt is remembered; the one that was defined first is forgotten first."""
_REFUSED: Final = instrumentation.Counter(
    "hypha.worker.definitions.refused",
    "{definition}",
    "Task definitions that were refused, by why: stale (an older attempt), malformed, unable (not now).",
)


class TaskSession:
    """What a worker does for the tasks of one lease."""

    def __init__(self, host: TaskHost, lease: Lease, retention: Retention, check: Callable[[TaskRun], None]) -> None:
        """Prepare.

        Args:
            host: what all tasks share.
            lease: the lease.
            retention: keeps what processes hold that cannot be ended.
            check: raises `LeaseError` if an attempt cannot run beside those of other leases.
        """
        self.lease = lease
        self._check_beside = check
        self._retention = retention
        self._host = host
        self._subscription = Subscription(host.endpoint, lease.scheduler, lease.id, self._handle)
        self._newest: OrderedDict[str, int] = OrderedDict()
        """Newest attempt that was defined, by task."""
        self._end_reason = ""
        self._end = anyio.Event()
        self._stream = anyio.CancelScope(shield=True)
        """Of the stream, which lasts longer than the attempts."""
        self._refusals = LogThrottle(anyio.current_time)
        self._tasks: anyio.abc.TaskGroup | None = None
        self.running: TaskRun | None = None
        """The attempt that runs."""

    async def run(self) -> None:
        """Serve the lease until `end` is called or the worker shuts down, and the attempt that runs then has ended.

        The end is reported in both cases, if that takes no longer than `LAST_REPORT_TIMEOUT`.
        """
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._serve_stream)
            try:
                await self._end.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await self.wait_until_idle(LAST_REPORT_TIMEOUT)
                self._stream.cancel()
                tasks.cancel_scope.cancel()  # nobody hears any more of what an attempt waits to have reported
                self._subscription.give_up()

    async def _serve_stream(self) -> None:
        with self._stream:
            await self._subscription.run()

    async def wait_until_idle(self, report_timeout: float) -> None:
        """Wait until no attempt runs, and then at most `report_timeout` seconds until its end is reported."""
        if self.running is not None:
            await self.running.ended.wait()
        if self._subscription.pending:
            with anyio.move_on_after(report_timeout):
                await self._subscription.wait_until_handled()

    def end(self, reason: str) -> None:
        """End the session, because its lease is over; the attempt that runs is cancelled."""
        self._end_reason = reason
        self._end.set()
        if self.running is not None:
            self.running.cancel(reason)

    async def _handle(self, definition: TaskDefinition) -> None:
        task, number = definition.attempt.task, definition.attempt.number
        newest = self._newest.get(task, -1)
        is_new = number > newest
        if number < newest or (not is_new and definition.start is not None):
            self._refuse("stale", definition, f"attempt {newest} is the newest")
            return
        if is_new:
            self._newest[task] = number
            if len(self._newest) > MAX_TASKS:
                self._newest.popitem(last=False)
        parts = (definition.start, definition.stop, definition.drain, definition.command)
        given = [part for part in parts if part is not None]
        if len(given) > 1:
            self._refuse("malformed", definition, "it has several of start, stop, drain and command")
            self._report_failed(definition, "the definition has several of start, stop, drain and command")
        elif definition.command is not None:
            self._command(definition, definition.command)
        elif definition.start is not None:
            self._start(definition)
        elif given:
            self._stop_or_drain(definition, is_new=is_new)

    def _stop_or_drain(self, definition: TaskDefinition, *, is_new: bool) -> None:
        """Stop or drain the attempt; one that never began is reported as cancelled."""
        run = self._find(definition)
        if run is None:
            if is_new:
                self._report_cancelled(definition, "it was never begun on this lease")
            return
        if definition.stop is not None:
            run.cancel(definition.stop.reason)
        elif definition.drain is not None:
            run.drain(definition.drain.left_ms, definition.drain.reason)

    def _command(self, definition: TaskDefinition, command: TaskCommand) -> None:
        """Let the attempt carry out a command, and answer it."""
        run = self._find(definition)
        if run is None:
            reason = f"attempt {definition.attempt.number} at it does not run on this lease"
            answer = CommandAnswer(number=command.number, accepted=False, reason=reason)
        else:
            answer = run.handle(command)
        self._report(definition, answered=answer)

    def _find(self, definition: TaskDefinition) -> TaskRun | None:
        """Return the attempt that a definition is about, if it runs."""
        run = self.running
        return run if run is not None and run.attempt == definition.attempt else None

    def _start(self, definition: TaskDefinition) -> None:
        spec, lease = definition.start, self.lease
        assert spec is not None
        try:
            settings = self._check(definition)
            sent = self._subscription.wait_until_handled
            run = TaskRun(self._host, lease, definition.attempt, spec, settings, self._send, sent, self._retention)
            self._attach(run)
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

    def _attach(self, run: TaskRun) -> None:
        """Attach an attempt to the lease. Raises `ExecutionError` or `LeaseError` if it cannot run now."""
        lease, grace = self.lease, (run.spec.orphan_grace_ms or 0) / 1000
        try:
            self._check_beside(run)
            now, job_id = self._host.clock(), run.attempt.job_id
            self._host.lease_manager.attach_job(lease.id, lease.scheduler, now, grace, job_id)
        except (ExecutionError, LeaseError) as error:
            instrumentation.end_span(run.span, error)
            raise

    def _check(self, definition: TaskDefinition) -> dict[str, Any]:
        """Check that an attempt can begin; return its settings."""
        spec = definition.start
        assert spec is not None
        if definition.attempt.job_id != self._subscription.job_id:
            raise DefinitionError(f"job {definition.attempt.job_id} is not the one that holds this lease")
        settings = check_start(spec, self.lease.executors)
        if spec.executor not in self._host.executors:
            raise DefinitionError(f"no executor {spec.executor[:80]} is configured here")
        if self._end.is_set():
            raise LeaseError(self._end_reason)
        return settings

    async def _run(self, run: TaskRun) -> None:
        try:
            await run.run()
        finally:
            run.ended.set()  # also after an error, or nobody could wait for it
            if self.running is run:
                self.running = None
        await self._subscription.wait_until_handled()
        if self.running is None:
            self._host.lease_manager.end_grace(self.lease.id)

    def _send(self, report: TaskReport) -> None:
        try:
            self._subscription.send(report)
        except ChannelError as error:
            _log.error("a report of task %s on lease %s is lost: %s", report.attempt.task, self.lease.id, error)

    def _report_failed(self, about: TaskDefinition, reason: str) -> None:
        self._report(about, failed=TaskFailed(reason=one_line(reason)))

    def _report_cancelled(self, about: TaskDefinition, reason: str) -> None:
        self._report(about, cancelled=TaskCancelled(reason=one_line(reason)))

    def _report(self, about: TaskDefinition, **fields: Any) -> None:
        self._send(TaskReport(attempt=about.attempt, **fields))

    def _refuse(self, why: str, definition: TaskDefinition, reason: str) -> None:
        """Count a refused definition, and log it, each kind once a minute."""
        _REFUSED.add(1, {"hypha.reason": why})
        task = f"task {definition.attempt.task}, attempt {definition.attempt.number}"
        text = "definition of %s by %s refused: %s"
        self._refusals.log(_log, logging.WARNING, why, text, task, self.lease.scheduler, one_line(reason))
