"""Keeps the resources of a lease taken while processes of its job live on although they were killed.

A process that waits for a device or a network file system takes no signal. The end of its job is reported all the same;
what the lease had allocated is free when the process is gone.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import anyio
import anyio.abc

from hypha_net import instrumentation
from hypha_worker.leasing.lease_manager import LeaseManager

_log = logging.getLogger(__name__)

FindProcesses = Callable[[], Awaitable[Sequence[int]]]
"""Returns the ids of the processes that still live."""
RETENTION_POLL: Final = 1.0
"""Seconds between two looks at the processes at first; twice as long each time, up to `_SLOWEST_POLL`."""
_SLOWEST_POLL: Final = 15.0
_RETAINED: Final = instrumentation.UpDownCounter(
    "hypha.worker.leases.retained", "{lease}", "Leases that are over, but hold resources: processes cannot be ended."
)


class Retention:
    """The jobs of a worker that have left processes which cannot be ended."""

    def __init__(self, lease_manager: LeaseManager, tasks: anyio.abc.TaskGroup) -> None:
        """Prepare.

        Args:
            lease_manager: holds the resources.
            tasks: the processes are watched in it; when it is cancelled, they are forgotten.
        """
        self._lease_manager = lease_manager
        self._tasks = tasks

    def keep(self, lease: uuid.UUID, find: FindProcesses) -> None:
        """Keep the resources of a lease taken until `find` returns no process."""
        self._lease_manager.retain(lease)
        self._tasks.start_soon(self._watch, lease, find)

    async def _watch(self, lease: uuid.UUID, find: FindProcesses) -> None:
        pause = RETENTION_POLL
        _RETAINED.add(1)
        try:
            while pids := await find():
                if pause == RETENTION_POLL:
                    _log.warning(
                        "processes %s of the job on lease %s live on after SIGKILL: its resources stay taken; look at "
                        "them with ps, a restart of the machine may be needed",
                        ", ".join(map(str, pids)),
                        lease,
                    )
                await anyio.sleep(pause)
                pause = min(2 * pause, _SLOWEST_POLL)
        finally:
            _RETAINED.add(-1)
        _log.info("the processes of the job on lease %s are gone: its resources are free", lease)
        self._lease_manager.free_retained(lease)
