"""Starts and stops the attempts at tasks of one job, and records the end of each once. Created by `runner`.

Definitions go out by `task_streams`. A worker that does not confirm a start in time, or does not end what it was told
to stop, loses its lease. The operator hears of each start and end.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from hypha_net import instrumentation
from hypha_net.errors import RequestTimeoutError
from hypha_net.message_channel import ChannelError
from hypha_scheduler.jobs.attempt_register import Attempt, AttemptRegister
from hypha_scheduler.jobs.lease_pool import LeasePool
from hypha_scheduler.jobs.task_streams import TaskStreams
from hypha_scheduler.strategies.base import (
    SendCommand,
    StartTask,
    StopTask,
    TaskEnded,
    TaskNotStarted,
    TaskRef,
    TaskStarted,
    TaskState,
)

if TYPE_CHECKING:
    from hypha_scheduler.jobs.runner import JobRunner

_log = logging.getLogger(__name__)

_START_TIMEOUT: Final = 30.0
"""Seconds for a worker to confirm a task; after that the lease is released."""
_STOP_TIMEOUT: Final = 60.0
"""Seconds for a stopped task on a kept lease to end; after that the lease is released."""
_COMMAND_TIMEOUT: Final = 60.0
"""Seconds for a running task to answer a command."""


@dataclass(frozen=True, slots=True)
class TaskLifecycle:
    """The starts and ends of the attempts of one job."""

    runner: JobRunner
    attempts: AttemptRegister
    streams: TaskStreams
    pool: LeasePool

    @property
    def orphan_grace(self) -> float:
        """Seconds for which tasks outlive the scheduler."""
        return self.runner.job.orphan_grace_seconds

    # ----------------------------------------------------------------------------------------------------------- start

    def start(self, effect: StartTask) -> None:
        """Start a task on its lease, and wait in the background until its worker confirms that."""
        task = effect.task
        if task.lease.id not in self.pool:  # it was lost before this effect's turn
            self.runner.tell_update(task, TaskNotStarted("its lease is no longer held"))
            return
        grace_ms = int(self.orphan_grace * 1000) or None
        attempt = self.attempts.register(task, msgspec.structs.replace(effect.spec, orphan_grace_ms=grace_ms))
        about = {"hypha.task": task.name, "hypha.peer.id": str(task.lease.peer)}
        try:
            with instrumentation.span("dispatch", about, parent=self.runner.trace):
                self.streams.send_start(attempt)
        except ChannelError as error:
            self._not_started(task, f"worker {task.lease.peer}: {error}")
        else:
            self.runner.start_background(partial(self._expect_confirmation, attempt))

    async def _expect_confirmation(self, attempt: Attempt) -> None:
        task = attempt.task
        if not await _happens(attempt.confirmed, _START_TIMEOUT):
            why = f"did not confirm task {task.name} within {_START_TIMEOUT:g} s; its log says why"
            self._not_started(task, f"worker {task.lease.peer} {why}")

    def _not_started(self, task: TaskRef, why: str) -> None:
        """Release the lease of a task that its worker did not take; nothing if it has ended."""
        if self.attempts.record_end(task):
            self.pool.release(task.lease.id, "its task did not start")
            self.runner.tell_update(task, TaskNotStarted(why))

    def record_start(self, task: TaskRef) -> int | None:
        """Record that a worker has confirmed a task; return the ticket of the operator's effects."""
        try:
            record = self.runner.events.task_started(task)
            if self.orphan_grace > 0:  # the next scheduler may take the task up
                self.runner.effects.note(*record)
        except OSError as error:
            self.runner.on_file_error(error)
        return self.runner.tell_update(task, TaskStarted())

    # ------------------------------------------------------------------------------------------------------------ stop

    def stop(self, effect: StopTask) -> None:
        """Stop a task; one that has ended by now is left alone, its lease may have the next."""
        attempt = self.attempts.get(effect.task)
        if attempt is None:
            return
        if effect.keep_lease or effect.drain_seconds > 0:
            self._stop_and_keep_lease(effect, attempt)
        else:
            self._release_and_end(effect)

    def _release_and_end(self, effect: StopTask) -> None:
        self.pool.release(effect.task.lease.id, effect.reason)
        self.record_end(effect.task, TaskEnded(TaskState.CANCELLED, effect.reason))

    def _stop_and_keep_lease(self, effect: StopTask, attempt: Attempt) -> None:
        """Let a task stop, or drain first; its lease stays unless the worker does not report the end."""
        try:
            if effect.drain_seconds > 0:
                self.streams.send_drain(attempt, effect.reason, effect.drain_seconds)
            else:
                self.streams.send_stop(attempt, effect.reason)
        except ChannelError as error:
            self._release_unstopped(effect, str(error))
        else:
            self.runner.start_background(partial(self._expect_end, effect, attempt))

    async def _expect_end(self, effect: StopTask, attempt: Attempt) -> None:
        """Wait for the end of a task that was told to drain or to stop."""
        try:
            if effect.drain_seconds > 0 and not await _happens(attempt.ended, effect.drain_seconds):
                self.streams.send_stop(attempt, effect.reason)
            if not await _happens(attempt.ended, _STOP_TIMEOUT):
                self._release_unstopped(effect, "its end was not reported")
        except ChannelError as error:
            self._release_unstopped(effect, str(error))

    def _release_unstopped(self, effect: StopTask, why: str) -> None:
        """Release the lease of a task that its worker does not end; nothing if it has ended."""
        task = effect.task
        if self.attempts.runs(task):
            _log.warning("task %s at %s cannot be cancelled, releasing its lease: %s", task.name, task.lease.peer, why)
            self._release_and_end(effect)

    def record_end(self, task: TaskRef, end: TaskEnded) -> int | None:
        """Record the end of a task, once; return the ticket of the operator's effects."""
        if not self.attempts.record_end(task) or self.runner.is_closed:
            return None
        self.pool.task_ended()
        try:
            record = self.runner.events.task_ended(task, end)
            # synced where the next scheduler would take the task up otherwise
            self.runner.effects.note(*record, syncs=self.orphan_grace > 0)
        except OSError as error:
            self.runner.on_file_error(error)
        return self.runner.tell_update(task, end)

    # -------------------------------------------------------------------------------------------------------- commands

    def send_command(self, effect: SendCommand) -> None:
        """Send a command to a task; nothing if it has ended."""
        attempt = self.attempts.get(effect.task)
        if attempt is None:
            return
        try:
            number = self.streams.send_command(attempt, effect.command)
        except ChannelError as error:
            self.runner.tell_result(effect.tag, error)
        else:
            self.runner.start_background(partial(self._expect_answer, effect, attempt, number))

    async def _expect_answer(self, effect: SendCommand, attempt: Attempt, number: int) -> None:
        """Tell the operator of the answer to a command, or that there is none; nothing once the task has ended."""
        with instrumentation.span(effect.span, effect.about, parent=self.runner.trace):
            with anyio.move_on_after(_COMMAND_TIMEOUT):
                while number not in attempt.answers and not attempt.ended.is_set():
                    await attempt.answered.wait()
        outcome: object = attempt.answers.pop(number, None)
        if attempt.ended.is_set():
            return
        if outcome is None:
            outcome = RequestTimeoutError(f"{effect.task.lease.peer} did not answer within {_COMMAND_TIMEOUT:g} s")
        self.runner.tell_result(effect.tag, outcome)


async def _happens(event: anyio.Event, seconds: float) -> bool:
    """Wait for an event, for at most so many seconds; return whether it has come."""
    with anyio.move_on_after(seconds):
        await event.wait()
    return event.is_set()
