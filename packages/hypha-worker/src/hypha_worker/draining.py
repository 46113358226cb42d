"""Draining: ends a worker when its running tasks have ended, or its time is over, and tells its schedulers so.

The leases refuse everything new (`leasing.lease_manager.LeaseManager.close`); what runs is renewed and served as
before.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_net import retries, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnsupportedProtocolError
from hypha_proto.drain import ANNOUNCE_DRAIN, Drain
from hypha_proto.ids import PeerId
from hypha_worker.leasing.lease_manager import LeaseManager
from hypha_worker.tasks.output_server import OutputServer
from hypha_worker.tasks.task_run import TaskRun
from hypha_worker.tasks.task_sessions import TaskSessions

_log = logging.getLogger(__name__)

OUTPUT_GRACE: Final = 10.0
"""Seconds for which outputs are held when no work is left, unless their lease ends or they are released."""
ANNOUNCEMENT_TIMEOUT: Final = 5.0
"""Seconds of one attempt to tell a scheduler."""


@dataclass(slots=True)
class WorkerDrain:
    """The drain of one worker: `request` begins it, `run` returns when it is over."""

    endpoint: Endpoint
    lease_manager: LeaseManager
    tasks: TaskSessions
    outputs: OutputServer
    requested: anyio.Event = field(default_factory=anyio.Event)
    """Set when the drain begins."""
    _time: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _reason: str = ""

    @property
    def left(self) -> float:
        """Seconds until the worker ends whatever still runs; infinite before the drain."""
        return max(0.0, self._time.deadline - anyio.current_time())

    @property
    def running(self) -> tuple[TaskRun, ...]:
        """Attempts at tasks that still have processes."""
        return self.tasks.running

    def request(self, timeout: float, reason: str) -> None:
        """Begin the drain; if it has begun, it may end earlier now, but not later.

        Args:
            timeout: seconds after which the worker ends although tasks run.
            reason: one line for the schedulers; only the first one counts.
        """
        self._time.deadline = min(self._time.deadline, anyio.current_time() + timeout)
        if not self.requested.is_set():
            self._reason = reason
            self.lease_manager.close()
            self.requested.set()

    async def run(self) -> tuple[TaskRun, ...]:
        """Wait for the request, then for the end of all work; return what still runs when the time is over.

        Outputs of tasks that a lease still needs are held a little longer, so that they can be fetched from here.
        """
        await self.requested.wait()
        if running := self.running:
            _log.info("draining: %s; %d tasks have %.0f s to end", self._reason, len(running), self.left)
        async with anyio.create_task_group() as tasks:
            for scheduler, leases in self.lease_manager.held_by_scheduler.items():
                tasks.start_soon(self._announce, scheduler, leases)
            with self._time:
                await self.tasks.wait_until_idle()
                with anyio.move_on_after(OUTPUT_GRACE):
                    await self.outputs.wait_until_fetched()
            tasks.cancel_scope.cancel()
        for work in self.running:
            _log.warning("%s did not end before the drain was over, and is cancelled", work)
        return self.running

    async def _announce(self, scheduler: PeerId, leases: tuple[uuid.UUID, ...]) -> None:
        async def tell() -> None:
            message = Drain(leases=leases, left_ms=int(self.left * 1000), reason=self._reason)
            await rpc.call(self.endpoint, scheduler, ANNOUNCE_DRAIN, message, timeout=ANNOUNCEMENT_TIMEOUT)

        try:
            await retries.REQUEST.retry_unless_refused(f"announcing the drain to {scheduler}", tell)
        except UnsupportedProtocolError:
            _log.debug("%s hears of a drain by the ends of its tasks only", scheduler)
        except NetError as error:
            _log.warning("scheduler %s could not be told of the drain: %s", scheduler, error)
