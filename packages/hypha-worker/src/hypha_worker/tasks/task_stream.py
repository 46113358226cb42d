"""The worker's side of the stream of one lease: definitions of tasks come down, status updates go up.

Opened again whenever it breaks; `hypha_net.message_channel` loses and repeats none. A definition starts an attempt at a
task, by the session of the lease (`task_sessions`), or stops, drains or commands the one that runs.
"""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import anyio

from hypha_net import instrumentation, retries
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import NetError, RequestError
from hypha_net.log_throttle import LogThrottle, OutageLogSchedule
from hypha_net.message_channel import ChannelError, MessageChannel, receive_frame, send_frame
from hypha_proto.attempt_id import AttemptId
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.commands import CommandAnswer, TaskCommand
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.protocols import TASKS
from hypha_proto.tasks import (
    MAX_FRAME,
    SchedulerFrame,
    StatusUpdate,
    Subscribe,
    Subscribed,
    TaskCancelled,
    TaskDefinition,
    TaskFailed,
    TaskSpec,
    WorkerFrame,
)
from hypha_worker.errors import ExecutionError
from hypha_worker.leasing.lease_manager import LeaseError
from hypha_worker.tasks.task_run import TaskRun, status_text

_log = logging.getLogger(__name__)

STABLE: Final = 5.0
"""Seconds for which a stream lasts, though nothing is said, before its end counts as the first failure."""
ANSWER_TIMEOUT: Final = 10.0
"""Seconds for the answer to a subscription."""
MAX_TASKS: Final = 10_000
"""Tasks of a lease whose newest attempt is remembered; the one that was defined first is forgotten first."""
_REFUSED: Final = instrumentation.Counter(
    "hypha.worker.definitions.refused",
    "{definition}",
    "Task definitions that were refused, by why: stale (an older attempt), malformed, unable (not now).",
)


class _WorkerCodec:
    """Encodes what a worker sends and decodes what a scheduler sends."""

    def encode(self, sequence: int, acknowledged: int, message: StatusUpdate | None) -> bytes:
        return to_cbor(WorkerFrame, WorkerFrame(sequence=sequence, acknowledged=acknowledged, report=message))

    def decode(self, data: bytes) -> tuple[int, int, TaskDefinition | None]:
        frame: SchedulerFrame = from_cbor(SchedulerFrame, data, MAX_FRAME)
        return frame.sequence, frame.acknowledged, frame.definition


class StreamRefusedError(RequestError):
    """The scheduler has no stream for the lease, and says why."""


@dataclass(slots=True)
class TaskStream:
    """The worker's side of the stream of one lease; nothing is opened before `run`."""

    endpoint: Endpoint
    """Opens the streams."""
    scheduler: PeerId
    """The holder of the lease."""
    lease: uuid.UUID
    start: Callable[[AttemptId, TaskSpec], None]
    """Starts an attempt; raises `ExecutionError` if its definition is malformed or cannot run on this worker, and
    `LeaseError` if it cannot run here now."""
    find: Callable[[AttemptId], TaskRun | None]
    """Returns an attempt if it runs."""
    channel: MessageChannel[StatusUpdate, TaskDefinition] = field(init=False)
    """Has the status updates that the scheduler has not handled."""
    job_id: uuid.UUID | None = None
    """Job that holds the lease; None before the first answer."""
    _newest: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Newest attempt that was defined, by task."""
    _refusals: LogThrottle = field(default_factory=LogThrottle)
    _sent: int = 0

    def __post_init__(self) -> None:
        self.channel = MessageChannel(_WorkerCodec(), self._handle, MAX_FRAME)

    # -------------------------------------------------------------------------------------------------- status updates

    def send_update(self, update: StatusUpdate) -> None:
        """Queue a status update; it is sent now or over the next stream."""
        try:
            self.channel.send(update)
        except ChannelError as error:
            _log.error("a status update of task %s on lease %s is lost: %s", update.attempt.task, self.lease, error)
        else:
            self._sent += 1

    # ----------------------------------------------------------------------------------------------------- definitions

    async def _handle(self, definition: TaskDefinition) -> None:
        attempt, newest = definition.attempt, self._newest.get(definition.attempt.task, -1)
        is_new = attempt.number > newest
        if attempt.number < newest or (not is_new and definition.start is not None):
            self._refuse("stale", attempt, f"attempt {newest} is the newest")
            return
        if is_new:
            self._newest[attempt.task] = attempt.number
            if len(self._newest) > MAX_TASKS:
                self._newest.popitem(last=False)
        parts = (definition.start, definition.stop, definition.drain, definition.command)
        if sum(part is not None for part in parts) > 1:
            reason = "the definition has several of start, stop, drain and command"
            self._refuse("malformed", attempt, reason, failed=TaskFailed(reason=reason))
        elif definition.command is not None:
            self._update(attempt, answered=self._answer(attempt, definition.command))
        elif definition.start is not None:
            self._try_to_start(attempt, definition.start)
        elif (run := self.find(attempt)) is not None:
            if definition.stop is not None:
                run.stop(definition.stop.reason)
            elif definition.drain is not None:
                run.drain(definition.drain.left_ms, definition.drain.reason)
        elif is_new and (definition.stop or definition.drain):
            self._update(attempt, cancelled=TaskCancelled(reason="it was never begun on this lease"))

    def _try_to_start(self, attempt: AttemptId, spec: TaskSpec) -> None:
        try:
            self.start(attempt, spec)
        except ExecutionError as error:
            self._refuse("malformed", attempt, str(error), failed=TaskFailed(reason=status_text(str(error))))
        except LeaseError as error:
            self._refuse("unable", attempt, str(error), cancelled=TaskCancelled(reason=status_text(str(error))))

    def _answer(self, attempt: AttemptId, command: TaskCommand) -> CommandAnswer:
        if (run := self.find(attempt)) is not None:
            return run.handle_command(command)
        reason = f"attempt {attempt.number} at it does not run on this lease"
        return CommandAnswer(number=command.number, accepted=False, reason=reason)

    def _update(self, attempt: AttemptId, **fields: Any) -> None:
        self.send_update(StatusUpdate(attempt=attempt, **fields))

    def _refuse(self, why: str, attempt: AttemptId, reason: str, **update: Any) -> None:
        """Count a refused definition, log it, each kind once a minute, and send the end of the attempt, if any."""
        _REFUSED.add(1, {"hypha.reason": why})
        task = f"task {attempt.task}, attempt {attempt.number}"
        text = "definition of %s by %s refused: %s"
        self._refusals.log(_log, logging.WARNING, why, text, task, self.scheduler, reason)
        if update:
            self._update(attempt, **update)

    # ---------------------------------------------------------------------------------------------------------- stream

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        failures, outage = 0, OutageLogSchedule()
        while True:
            before, began = self._exchanged, anyio.current_time()
            try:
                await self._exchange()
            except StreamRefusedError as error:  # as while the end of the lease is on its way
                if outage.is_due(type(error).__name__):
                    _log.info("task stream of lease %s to scheduler %s: %s", self.lease, self.scheduler, error)
            except (NetError, DecodeError, TimeoutError) as error:
                if outage.is_due(type(error).__name__):
                    reason = str(error) or "no answer in time"
                    _log.warning("task stream of lease %s to scheduler %s: %s", self.lease, self.scheduler, reason)
            if self._exchanged != before or anyio.current_time() - began >= STABLE:
                failures, outage = 0, OutageLogSchedule()
            await retries.STREAM.wait(failures)
            failures += 1

    @property
    def _exchanged(self) -> tuple[int, int]:
        """What changes with each message that is handled here or there."""
        return self.channel.next_wanted, self._sent - self.channel.pending

    async def _exchange(self) -> None:
        """Subscribe once, and exchange messages until the stream ends."""
        stream = await self.endpoint.open_stream(self.scheduler, [TASKS])
        try:
            with anyio.fail_after(ANSWER_TIMEOUT):
                answer = await self._subscribe(stream)
            self.job_id = answer.job_id
            await self.channel.run(stream, answer.next)
        except Exception:
            await stream.reset()
            raise
        finally:  # also where the lease is over: to the scheduler this is a clean end
            with anyio.CancelScope(shield=True):
                await stream.aclose()

    async def _subscribe(self, stream: Stream) -> Subscribed:
        wanted = Subscribe(lease=self.lease, next=self.channel.next_wanted, first=self.channel.oldest)
        await send_frame(stream, to_cbor(Subscribe, wanted))
        data = await receive_frame(stream, MAX_FRAME)
        if data is None:
            raise ChannelError("the stream ended before the answer to the subscription")
        answer: Subscribed = from_cbor(Subscribed, data, MAX_FRAME)
        if answer.refused is not None:
            raise StreamRefusedError(f"refused: {answer.refused}")
        return answer
