"""Connections to the schedulers of offers.

Called by `bidding.bidder`. An offer waits for its scheduler for a short time only, because its resources are reserved
meanwhile; a handshake over a long link may take longer. So the attempt goes on without the offer, and the scheduler's
next request finds the connection.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import anyio
import anyio.abc

from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnreachableError
from hypha_proto.ids import PeerId

ATTEMPT_TIMEOUT: Final = 10.0
"""Seconds that one attempt to connect may take."""


@dataclass(slots=True)
class _Attempt:
    """An attempt in progress; afterwards, the reason if it failed."""

    done: anyio.Event = field(default_factory=anyio.Event)
    failure: str = ""


class SchedulerDials:
    """Attempts to connect to schedulers, at most one for each at a time."""

    def __init__(self, endpoint: Endpoint, tasks: anyio.abc.TaskGroup) -> None:
        self._endpoint = endpoint
        self._tasks = tasks
        self._attempts: dict[PeerId, _Attempt] = {}

    async def connect(self, scheduler: PeerId, timeout: float) -> None:
        """Return when the scheduler is connected, and the round trip is measured if that is done in time.

        Raises:
            UnreachableError: there is no connection within `timeout` seconds; an attempt may still be in progress.
        """
        if self._endpoint.round_trip_time(scheduler) is not None:
            return
        attempt = self._join_attempt(scheduler)
        with anyio.move_on_after(timeout):
            await attempt.done.wait()
        if self._endpoint.round_trip_time(scheduler) is None and scheduler not in self._endpoint.connected_peers():
            raise UnreachableError(attempt.failure or f"{scheduler} is not connected after {timeout:g} s")

    def _join_attempt(self, scheduler: PeerId) -> _Attempt:
        """Return the attempt in progress, or a new one."""
        if scheduler not in self._attempts:
            self._attempts[scheduler] = _Attempt()
            self._tasks.start_soon(self._run_attempt, scheduler)
        return self._attempts[scheduler]

    async def _run_attempt(self, scheduler: PeerId) -> None:
        attempt = self._attempts[scheduler]
        try:
            await self._endpoint.connect_peer(scheduler, timeout=ATTEMPT_TIMEOUT)
        except NetError as error:
            attempt.failure = str(error)
        finally:
            del self._attempts[scheduler]
            attempt.done.set()
