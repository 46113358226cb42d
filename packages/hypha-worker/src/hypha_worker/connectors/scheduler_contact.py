"""A job's contact with its scheduler, which may be gone for a while: requests that wait for it, and redials.

Made by `tasks.task_run` for each attempt, and used by whatever a task asks its scheduler: its bridge and the parameter
server. A task that was started without a grace waits as long as `retries.REPORT` says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import anyio

from hypha_net import retries, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import MessageTooLargeError, NetError, TransferRefusedError, UnsupportedProtocolError
from hypha_net.events import Disconnected
from hypha_net.retries import RetryPolicy
from hypha_proto.ids import PeerId
from hypha_proto.protocols import RpcMethod

_log = logging.getLogger(__name__)

Req = TypeVar("Req")
Resp = TypeVar("Resp")

DIAL_TIMEOUT: Final = 10.0
"""Seconds that one attempt to connect to a lost scheduler may take."""


@dataclass(slots=True)
class SchedulerContact:
    """Reaches the scheduler of one job."""

    endpoint: Endpoint
    scheduler: PeerId
    may_wait: Callable[[], bool] = lambda: False
    """Whether the job may run on now although its scheduler cannot be reached."""
    is_confirmed: bool = True
    """Whether the scheduler has renewed the job's lease since the connection to it was last lost, it did not answer, or
    the lease was orphaned. One that was started again does not know the job before."""

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to the scheduler."""
        return self.scheduler in self.endpoint.connected_peers()

    async def call(
        self,
        method: RpcMethod[Req, Resp],
        request: Req,
        *,
        is_refusal: Callable[[Resp], bool] = lambda _answer: False,
        timeout: float = 30.0,
        policy: RetryPolicy = retries.REPORT,
    ) -> Resp:
        """Call `rpc.call`, which dials the scheduler where it was known if needed, until it succeeds.

        That is as often as `policy` says, and besides while the job may wait. A scheduler that was started
        again answers before it has taken its jobs up: until it is confirmed, neither a refusal nor a protocol that it
        does not speak is its last word. The request must carry an idempotency key if it may not count twice.

        Args:
            method: what is called.
            request: the message.
            is_refusal: returns whether an answer refuses the request because of the state of the job.
            timeout: seconds of one attempt.
            policy: how often it is tried again without an outage, and after one; if it repeats, only a message that is
                too large is an error.

        Raises:
            NetError: the error of the last attempt.
        """
        what = f"{method.variant or method.protocol} to {self.scheduler}"
        attempts = failures = 0
        while True:
            is_last_word = self.is_settled  # as it is asked: what changes meanwhile does not change the answer
            try:
                answer = await rpc.call(self.endpoint, self.scheduler, method, request, timeout=timeout)
                if not is_refusal(answer) or is_last_word:
                    return answer
                problem = "it has not taken up the job yet"
            except NetError as error:
                failures = failures + 1 if self._is_over() else 0
                if isinstance(error, MessageTooLargeError):
                    raise
                is_final = isinstance(error, (TransferRefusedError, UnsupportedProtocolError)) and self.is_settled
                if not policy.repeats and (is_final or failures > policy.times):
                    raise
                problem = str(error)
            pause = policy.pause(failures - 1) if failures else retries.OUTAGE.pause(attempts)
            level = logging.INFO if attempts < retries.OUTAGE.times else logging.DEBUG
            _log.log(level, "%s failed (%s), again in %.1f s", what, problem, pause)
            attempts += 1
            await anyio.sleep(pause)

    def _is_over(self) -> bool:
        """Return whether there is no outage (any longer) that the job may wait out."""
        return not self.may_wait() or (self.is_connected and self.is_confirmed)

    @property
    def is_settled(self) -> bool:
        """Whether a refusal is the scheduler's last word."""
        return self.is_confirmed or self._is_over()

    async def keep(self) -> None:
        """Reconnect to the scheduler whenever the connection is lost, until cancelled; it dials this worker, too."""
        with self.endpoint.events.follow(Disconnected) as events:
            async for event in events:
                if isinstance(event, Disconnected) and event.peer == self.scheduler and not self.is_connected:
                    self.is_confirmed = False
                    await self._reconnect()

    async def _reconnect(self) -> None:
        while not self.is_connected:
            try:
                await self.endpoint.connect_peer(self.scheduler, timeout=DIAL_TIMEOUT)
            except NetError as error:
                _log.debug("scheduler %s cannot be reached: %s", self.scheduler, error)
                await retries.OUTAGE.wait(retries.OUTAGE.times)
