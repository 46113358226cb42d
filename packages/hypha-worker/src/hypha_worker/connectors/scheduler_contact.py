"""A job's contact with its scheduler, which may be gone for a while: requests that wait for it, and redials.

Made by `tasks.task_run` for each attempt, and used by whatever a task asks its scheduler: `bridge.training` and the
parameter server. A task that was started without a grace waits as long as `rpc_retry.REPORT_DELAYS`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import anyio

from hypha_net import backoff
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError
from hypha_net.events import Disconnected
from hypha_proto.ids import PeerId
from hypha_proto.protocols import RpcMethod
from hypha_worker.connectors.rpc_retry import (
    OUTAGE_PAUSES,
    REPORT_DELAYS,
    call_through_outage,
    retry_through_outage,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")
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

    def on_renewed(self) -> None:
        """Note that the scheduler has renewed the job's lease."""
        self.is_confirmed = True

    def on_silence(self) -> None:
        """Note that the scheduler did not answer, or does not renew the job's lease."""
        self.is_confirmed = False

    async def call(
        self,
        method: RpcMethod[Req, Resp],
        request: Req,
        *,
        is_refusal: Callable[[Resp], bool] = lambda _answer: False,
        timeout: float = 30.0,
        delays: Sequence[float] = REPORT_DELAYS,
        final: tuple[type[NetError], ...] = (),
    ) -> Resp:
        """Call `rpc_retry.call_through_outage` for this job. Raises `NetError`."""
        return await call_through_outage(
            self.endpoint, self.scheduler, method, request, until=self._is_over, confirmed=self._confirmed,
            is_refusal=is_refusal, timeout=timeout, delays=delays, final=final,
        )  # fmt: skip

    async def retry(
        self,
        what: str,
        attempt: Callable[[], Awaitable[T]],
        *,
        delays: Sequence[float] = REPORT_DELAYS,
        final: tuple[type[NetError], ...] = (),
    ) -> T:
        """Call `rpc_retry.retry_through_outage` for this job, for example to push a file. Raises `NetError`."""
        return await retry_through_outage(
            what, attempt, until=self._is_over, confirmed=self._confirmed, delays=delays, final=final
        )

    def _is_over(self) -> bool:
        """Return whether there is no outage (any longer) that the job may wait out."""
        return not self.may_wait() or (self.is_connected and self.is_confirmed)

    def _confirmed(self) -> bool:
        return self.is_confirmed

    async def keep(self) -> None:
        """Reconnect to the scheduler whenever the connection is lost, until cancelled; it dials this worker, too."""
        with self.endpoint.events.follow(Disconnected) as events:
            async for event in events:
                if isinstance(event, Disconnected) and event.peer == self.scheduler and not self.is_connected:
                    self.on_silence()
                    await self._reconnect()

    async def _reconnect(self) -> None:
        while not self.is_connected:
            try:
                await self.endpoint.connect_peer(self.scheduler, timeout=DIAL_TIMEOUT)
            except NetError as error:
                _log.debug("scheduler %s cannot be reached: %s", self.scheduler, error)
                await anyio.sleep(backoff.jittered(OUTAGE_PAUSES, len(OUTAGE_PAUSES)))
