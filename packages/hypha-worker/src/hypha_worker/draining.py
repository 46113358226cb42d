"""Draining: ends a worker when its running jobs have ended, or its time is over, and tells its schedulers so.

Called by `service`, which requests it at SIGTERM, and by `control.server` for the command ``hypha-worker drain``. The
leases refuse everything new (`leasing.lease_manager.LeaseManager.close`); what runs is renewed and served as before.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from typing import Final

import anyio

from hypha_net import rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnsupportedProtocolError
from hypha_proto.drain import ANNOUNCE_DRAIN, Drain
from hypha_proto.ids import PeerId
from hypha_worker.connectors.rpc_retry import RETRY_DELAYS, retry
from hypha_worker.jobs.job_manager import Job, JobManager
from hypha_worker.leasing.lease_manager import LeaseManager, LeaseState

_log = logging.getLogger(__name__)

ANNOUNCEMENT_TIMEOUT: Final = 5.0
"""Seconds of one attempt to tell a scheduler."""


class Draining:
    """The drain of one worker: `request` begins it, `run` returns when it is over."""

    def __init__(self, endpoint: Endpoint, lease_manager: LeaseManager, jobs: JobManager) -> None:
        self._endpoint = endpoint
        self._lease_manager = lease_manager
        self._jobs = jobs
        self._time = anyio.CancelScope()
        self._reason = ""
        self.requested = anyio.Event()
        """Set when the drain begins."""

    @property
    def left(self) -> float:
        """Seconds until the worker ends whatever still runs; infinite before the drain."""
        return max(0.0, self._time.deadline - anyio.current_time())

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Jobs that still have processes."""
        return self._jobs.running

    def request(self, timeout: float, reason: str) -> None:
        """Begin the drain; if it has begun, it may end earlier now, but not later.

        Args:
            timeout: seconds after which the worker ends although jobs run.
            reason: one line for the schedulers; only the first one counts.
        """
        self._time.deadline = min(self._time.deadline, anyio.current_time() + timeout)
        if not self.requested.is_set():
            self._reason = reason
            self._lease_manager.close()
            self.requested.set()

    async def run(self) -> tuple[Job, ...]:
        """Wait for the request, then for the end of all jobs; return those that still run when the time is over."""
        await self.requested.wait()
        if running := self._jobs.running:
            _log.info("draining: %s; %d jobs have %.0f s to end", self._reason, len(running), self.left)
        async with anyio.create_task_group() as tasks:
            if running:
                for scheduler, leases in self._held_leases().items():
                    tasks.start_soon(self._announce, scheduler, leases)
            with self._time:
                await self._jobs.wait_until_idle()
            tasks.cancel_scope.cancel()
        for job in self._jobs.running:
            _log.warning("%s did not end before the drain was over, and is cancelled", job)
        return self._jobs.running

    def _held_leases(self) -> Mapping[PeerId, tuple[uuid.UUID, ...]]:
        held: dict[PeerId, tuple[uuid.UUID, ...]] = {}
        for lease in self._lease_manager.leases:
            if lease.state is LeaseState.HELD:
                held[lease.scheduler] = (*held.get(lease.scheduler, ()), lease.id)
        return held

    async def _announce(self, scheduler: PeerId, leases: tuple[uuid.UUID, ...]) -> None:
        async def tell() -> None:
            message = Drain(leases=leases, left_ms=int(self.left * 1000), reason=self._reason)
            await rpc.call(self._endpoint, scheduler, ANNOUNCE_DRAIN, message, timeout=ANNOUNCEMENT_TIMEOUT)

        try:
            await retry(f"announcing the drain to {scheduler}", tell, RETRY_DELAYS)
        except UnsupportedProtocolError:
            _log.debug("%s hears of a drain by the ends of its jobs only", scheduler)
        except NetError as error:
            _log.warning("scheduler %s could not be told of the drain: %s", scheduler, error)
