"""Streams of tasks to workers: one for each lease, with definitions down and status updates up (`hypha_proto.tasks`).

Both outlive a stream: the worker opens the next one, which continues, also with a scheduler that was started again. An
update is looked up in `attempt_register`, and checked by `task_updates`, before the job hears of it.
`service` calls `serve_task_streams`; each job's `runner` has a `TaskStreams`.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import anyio
from msgspec.structs import replace

from hypha_net import instrumentation
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import NetError, RequestError, StreamResetError
from hypha_net.log_throttle import LogThrottle
from hypha_net.message_channel import ChannelError, MessageChannel, receive_frame, send_frame
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.commands import Command, TaskCommand
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.protocols import TASKS
from hypha_proto.tasks import (
    MAX_FRAME,
    DrainTask,
    SchedulerFrame,
    StatusUpdate,
    Stop,
    Subscribe,
    Subscribed,
    TaskDefinition,
    WorkerFrame,
)
from hypha_scheduler.jobs.attempt_register import Attempt
from hypha_scheduler.jobs.task_updates import InvalidUpdateError, read_update, traffic_of
from hypha_scheduler.strategies.base import TaskEnded, TaskRef, TaskStarted, TaskState, TaskUpdate

if TYPE_CHECKING:
    from hypha_scheduler.jobs.runner import JobRunner

_log = logging.getLogger(__name__)

MAX_STREAMS: Final = 64
"""Streams of one peer at a time."""
SUBSCRIBE_TIMEOUT: Final = 10.0
"""Seconds for a peer to send its first message on a stream."""
_MAX_SUBSCRIBE: Final = 1 << 10
_NO_JOB: Final = uuid.UUID(int=0)
_STREAMS: Final = instrumentation.UpDownCounter("hypha.scheduler.task_streams.active", "{stream}", "Open task streams.")
_REFUSED: Final = instrumentation.Counter(
    "hypha.scheduler.task_reports.refused",
    "{report}",
    "Status updates of workers on attempts at tasks that do not run on their leases, or that contradict the task.",
)
_REFUSED_STREAMS: Final = instrumentation.Counter(
    "hypha.scheduler.task_streams.refused", "{stream}", "Task streams of leases that no job holds at their peer."
)
_OTHER_ATTEMPT: Final = "it is about an attempt that does not run on its lease"


class SchedulerCodec:
    """Frames as the scheduler sends and receives them."""

    def encode(self, sequence: int, acknowledged: int, message: TaskDefinition | None) -> bytes:
        """Encode a `SchedulerFrame`."""
        return to_cbor(SchedulerFrame, SchedulerFrame(sequence=sequence, acknowledged=acknowledged, definition=message))

    def decode(self, data: bytes) -> tuple[int, int, StatusUpdate | None]:
        """Decode a `WorkerFrame`.

        Raises:
            DecodeError: it is malformed.
        """
        frame: WorkerFrame = from_cbor(WorkerFrame, data, MAX_FRAME)
        return frame.sequence, frame.acknowledged, frame.report


@dataclass(slots=True)
class _LeaseStream:
    """Messages about the tasks of one lease."""

    channel: MessageChannel[TaskDefinition, StatusUpdate]
    scope: anyio.CancelScope | None = None
    """Of the newest stream; None before the first."""


@dataclass(slots=True)
class TaskStreams:
    """Streams of one job's leases."""

    runner: JobRunner
    """Hears what has happened to running attempts; an update is acknowledged when it has handled it."""
    _leases: dict[uuid.UUID, _LeaseStream] = field(default_factory=dict)
    _refusals: LogThrottle = field(default_factory=LogThrottle)

    # --------------------------------------------------------------------------------------------------- for the runner

    def send_start(self, attempt: Attempt) -> None:
        """Tell the worker to start an attempt.

        Raises:
            ChannelError: the worker does not acknowledge what it gets.
        """
        assert attempt.spec is not None
        start = replace(attempt.spec, traceparent=instrumentation.current_traceparent())
        self._send(attempt.task, start=start)

    def send_stop(self, attempt: Attempt, reason: str) -> None:
        """Tell the worker once to end an attempt.

        Raises:
            ChannelError: it does not acknowledge what it gets.
        """
        if not attempt.is_stopping:
            attempt.is_stopping = True
            self._send(attempt.task, stop=Stop(reason=reason))

    def send_drain(self, attempt: Attempt, reason: str, seconds: float) -> None:
        """Tell the worker to let an attempt finish within some seconds.

        Raises:
            ChannelError: it does not acknowledge what it gets.
        """
        if not attempt.is_stopping:
            self._send(attempt.task, drain=DrainTask(left_ms=round(seconds * 1000), reason=reason))

    def send_command(self, attempt: Attempt, command: Command) -> int:
        """Send a command to an attempt; return its number, which the answer repeats.

        Raises:
            ChannelError: the worker does not acknowledge what it gets.
        """
        number = attempt.commands
        self._send(attempt.task, command=TaskCommand.of(number, command))
        attempt.commands += 1
        return number

    def drop(self, lease: uuid.UUID) -> None:
        """Forget a lease that is gone, and close its stream."""
        found = self._leases.pop(lease, None)
        if found is not None and found.scope is not None:
            found.scope.cancel()

    def _lease(self, lease: uuid.UUID) -> _LeaseStream:
        if lease not in self._leases:
            channel = MessageChannel[TaskDefinition, StatusUpdate](
                SchedulerCodec(), lambda update: self._handle(lease, update), MAX_FRAME
            )
            self._leases[lease] = _LeaseStream(channel)
        return self._leases[lease]

    def _send(self, task: TaskRef, **what: Any) -> None:
        self._lease(task.lease.id).channel.send(TaskDefinition(attempt=task.id_in(self.runner.job_id), **what))

    # ------------------------------------------------------------------------------------------------- status updates

    async def _handle(self, lease: uuid.UUID, received: StatusUpdate) -> None:
        attempt = self.runner.attempts.on(lease)
        if attempt is None or received.attempt != attempt.task.id_in(self.runner.job_id):
            self._count_refusal(lease, received, _OTHER_ATTEMPT)
            return
        if received.answered is not None:
            attempt.add_answer(received.answered)
        try:
            update = read_update(received, attempt.spec)
        except InvalidUpdateError as error:
            self._count_refusal(lease, received, str(error))
            update = self._failed(attempt, received, error)
        if isinstance(update, TaskEnded):
            await self.runner.on_task_update(attempt.task, update, traffic_of(received))
        elif update is not None and not (isinstance(update, TaskStarted) and attempt.confirmed.is_set()):
            await self._pass_on(attempt, update)

    async def _pass_on(self, attempt: Attempt, update: TaskUpdate) -> None:
        """Tell the job of an update before the end, the first time that the attempt has started."""
        if not attempt.confirmed.is_set():
            attempt.confirmed.set()
            if not isinstance(update, TaskStarted):  # what runs has been started
                await self.runner.on_task_update(attempt.task, TaskStarted(), None)
        if not attempt.ended.is_set():
            await self.runner.on_task_update(attempt.task, update, None)

    def _failed(self, attempt: Attempt, received: StatusUpdate, error: InvalidUpdateError) -> TaskEnded:
        """Return the end of an attempt whose worker reported what cannot be; what may still run is stopped."""
        reason = f"its worker reported {error}"
        if traffic_of(received) is None:
            with suppress(ChannelError):  # then the next start fails, and the lease is released
                self.send_stop(attempt, reason)
        return TaskEnded(TaskState.FAILED, reason)

    def _count_refusal(self, lease: uuid.UUID, received: StatusUpdate, reason: str) -> None:
        _REFUSED.add()
        about = f"attempt {received.attempt.number} at task {received.attempt.task} on lease {lease}"
        self._refusals.log(_log, logging.WARNING, (lease, reason), "status update on %s refused: %s", about, reason)

    # ---------------------------------------------------------------------------------------------------------- streams

    async def serve(self, stream: Stream, subscribe: Subscribe) -> None:
        """Exchange messages with the worker of a lease until the stream ends, a newer one comes or the lease is gone.

        Raises:
            ChannelError: the worker breaks the rules.
            StreamResetError: the stream broke.
        """
        lease = self._lease(subscribe.lease)
        if lease.scope is None:  # an earlier run of this scheduler may have begun the exchange
            lease.channel.take_over(subscribe.next, subscribe.first)
        with anyio.CancelScope() as scope:
            lease.scope = scope
            await _answer(stream, Subscribed(job_id=self.runner.job_id, next=lease.channel.next_wanted))
            try:
                await lease.channel.run(stream, subscribe.next)
            except StreamResetError:
                self.runner.pool.check(subscribe.lease)  # its worker may have ended
                raise


FindStreams = Callable[[PeerId, uuid.UUID], Awaitable[TaskStreams | None]]
"""Returns the streams of the job that holds a lease of a peer."""


def serve_task_streams(endpoint: Endpoint, find: FindStreams) -> None:
    """Serve streams of tasks to the workers whose leases a job of this scheduler holds."""
    open_streams: Counter[PeerId] = Counter()
    complaints = LogThrottle()

    async def handle(stream: Stream) -> None:
        if not endpoint.is_authorized(stream.peer, TASKS):
            await stream.reset()
            return
        _STREAMS.add(1)
        open_streams[stream.peer] += 1
        try:
            if open_streams[stream.peer] > MAX_STREAMS:
                await _refuse(stream, f"over {MAX_STREAMS} streams")
            else:
                await _serve_stream(stream, find)
        except TimeoutError:
            await stream.reset()
        except (NetError, DecodeError) as error:
            await stream.reset()
            if isinstance(error, RequestError | DecodeError):  # a violation of the protocol; streams break every day
                complaints.log(_log, logging.WARNING, stream.peer, "task stream of %s ended: %s", stream.peer, error)
        finally:
            _STREAMS.add(-1)
            open_streams[stream.peer] -= 1
            if not open_streams[stream.peer]:
                del open_streams[stream.peer]

    endpoint.handle(TASKS, handle)


async def _serve_stream(stream: Stream, find: FindStreams) -> None:
    """Answer the first message of a stream and serve it.

    Raises:
        TimeoutError: the first message did not come in time.
        DecodeError: it is malformed.
        NetError: the stream broke, or its peer breaks the rules.
    """
    with anyio.fail_after(SUBSCRIBE_TIMEOUT):
        data = await receive_frame(stream, _MAX_SUBSCRIBE)
        if data is None:
            raise ChannelError("it ended before its first message")
        subscribe: Subscribe = from_cbor(Subscribe, data, _MAX_SUBSCRIBE)
        found = await find(stream.peer, subscribe.lease)
    if found is None:
        await _refuse(stream, "no job of this scheduler holds that lease")
    else:
        await found.serve(stream, subscribe)


async def _refuse(stream: Stream, why: str) -> None:
    _REFUSED_STREAMS.add()
    with anyio.fail_after(SUBSCRIBE_TIMEOUT):
        await _answer(stream, Subscribed(job_id=_NO_JOB, next=0, refused=why))
        await stream.send_eof()


async def _answer(stream: Stream, answer: Subscribed) -> None:
    await send_frame(stream, to_cbor(Subscribed, answer))
