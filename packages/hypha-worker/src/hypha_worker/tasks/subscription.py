"""The stream of task definitions and reports of one lease, opened again whenever it breaks.

Run by `task_session`, which handles the definitions; calls `hypha_net.message_channel`, which loses and repeats none.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

import anyio

from hypha_net import retries
from hypha_net.endpoint import Endpoint, Stream
from hypha_net.errors import NetError, RequestError
from hypha_net.log_throttle import OutageLogSchedule
from hypha_net.message_channel import ChannelError, MessageChannel, receive_frame, send_frame
from hypha_proto.codec import from_cbor, to_cbor
from hypha_proto.errors import DecodeError
from hypha_proto.ids import PeerId
from hypha_proto.protocols import TASKS
from hypha_proto.tasks import (
    MAX_FRAME,
    SchedulerFrame,
    Subscribe,
    Subscribed,
    TaskDefinition,
    TaskReport,
    WorkerFrame,
)

_log = logging.getLogger(__name__)

STABLE: Final = 5.0
"""Seconds for which a stream lasts, though nothing is said, before its end counts as the first failure."""
ANSWER_TIMEOUT: Final = 10.0
"""Seconds for the answer to a subscription."""


class _WorkerCodec:
    """Encodes what a worker sends and decodes what a scheduler sends."""

    def encode(self, sequence: int, acknowledged: int, message: TaskReport | None) -> bytes:
        return to_cbor(WorkerFrame, WorkerFrame(sequence=sequence, acknowledged=acknowledged, report=message))

    def decode(self, data: bytes) -> tuple[int, int, TaskDefinition | None]:
        frame: SchedulerFrame = from_cbor(SchedulerFrame, data, MAX_FRAME)
        return frame.sequence, frame.acknowledged, frame.definition


class SubscriptionRefusedError(RequestError):
    """The scheduler has no stream for the lease, and says why."""


class Subscription:
    """The worker's side of the stream of one lease."""

    def __init__(
        self,
        endpoint: Endpoint,
        scheduler: PeerId,
        lease: uuid.UUID,
        handle: Callable[[TaskDefinition], Awaitable[None]],
    ) -> None:
        self._endpoint = endpoint
        self._scheduler = scheduler
        self._lease = lease
        self._channel = MessageChannel[TaskReport, TaskDefinition](_WorkerCodec(), handle, MAX_FRAME)
        self.job_id: uuid.UUID | None = None
        """Job that holds the lease; None before the first answer."""
        self._sent = 0

    @property
    def pending(self) -> int:
        """Number of reports that the scheduler has not handled."""
        return self._channel.pending

    def send(self, report: TaskReport) -> None:
        """Queue a report; it is sent now or over the next stream.

        Raises:
            ChannelError: too many reports wait.
        """
        self._channel.send(report)
        self._sent += 1

    def give_up(self) -> None:
        """Forget what the scheduler has not handled: the lease is over."""
        self._channel.give_up()

    async def wait_until_handled(self) -> None:
        """Wait until the scheduler has handled all reports that were sent so far."""
        await self._channel.wait_until_handled()

    async def run(self) -> None:
        """Keep a stream open until cancelled."""
        failures, outage = 0, OutageLogSchedule(anyio.current_time)
        while True:
            before, began = self._exchanged, anyio.current_time()
            try:
                await self._exchange()
            except SubscriptionRefusedError as error:  # as while the end of the lease is on its way
                if outage.is_due(type(error).__name__):
                    _log.info("task stream of lease %s to scheduler %s: %s", self._lease, self._scheduler, error)
            except (NetError, DecodeError, TimeoutError) as error:
                if outage.is_due(type(error).__name__):
                    reason = str(error) or "no answer in time"
                    _log.warning("task stream of lease %s to scheduler %s: %s", self._lease, self._scheduler, reason)
            if self._exchanged != before or anyio.current_time() - began >= STABLE:
                failures, outage = 0, OutageLogSchedule(anyio.current_time)
            await retries.STREAM.wait(failures)
            failures += 1

    @property
    def _exchanged(self) -> tuple[int, int]:
        """What changes with each message that is handled here or there."""
        return self._channel.next_wanted, self._sent - self._channel.pending

    async def _exchange(self) -> None:
        """Subscribe once, and exchange messages until the stream ends."""
        stream = await self._endpoint.open_stream(self._scheduler, [TASKS])
        try:
            with anyio.fail_after(ANSWER_TIMEOUT):
                answer = await self._subscribe(stream)
            self.job_id = answer.job_id
            await self._channel.run(stream, answer.next)
        except Exception:
            await stream.reset()
            raise
        finally:  # also where the lease is over: to the scheduler this is a clean end
            with anyio.CancelScope(shield=True):
                await stream.aclose()

    async def _subscribe(self, stream: Stream) -> Subscribed:
        wanted = Subscribe(lease=self._lease, next=self._channel.next_wanted, first=self._channel.oldest)
        await send_frame(stream, to_cbor(Subscribe, wanted))
        data = await receive_frame(stream, MAX_FRAME)
        if data is None:
            raise ChannelError("the stream ended before the answer to the subscription")
        answer: Subscribed = from_cbor(Subscribed, data, MAX_FRAME)
        if answer.refused is not None:
            raise SubscriptionRefusedError(f"refused: {answer.refused[:400]}")
        return answer
