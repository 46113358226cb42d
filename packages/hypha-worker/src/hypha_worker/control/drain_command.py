"""The command ``drain`` of the control socket: drains the worker and tells what has become of its jobs.

The first answer says what is drained; the second, when the worker's jobs have ended and its leases are given back, what
was cancelled. Closing the connection does not stop the drain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import anyio

from hypha_worker.control.server import Answer
from hypha_worker.draining import WorkerDrain
from hypha_worker.leasing.terms import MAX_DRAIN
from hypha_worker.tasks.task_run import TaskRun

_LAST_ANSWERS: Final = 1.0
"""Seconds in which clients must take the last answer."""


@dataclass(slots=True)
class DrainCommand:
    """See the module."""

    draining: WorkerDrain
    drain_timeout: float
    """Seconds of a drain whose client names none."""
    _ended: anyio.Event = field(default_factory=anyio.Event)
    _cancelled: Sequence[TaskRun] = ()
    """Tasks that the end of the drain cancelled."""
    _waiting: int = 0
    """Clients that wait for the end of the drain."""
    _answered: anyio.Event = field(default_factory=anyio.Event)

    async def run(self, arguments: Mapping[str, Any], answer: Answer) -> None:
        """See `server.Command`."""
        timeout = parse_timeout(arguments)
        self._waiting += 1
        try:
            self.draining.request(self.drain_timeout if timeout is None else timeout, "its owner drains it")
            jobs = [_describe(job) for job in self.draining.running]
            await answer({"draining": True, "seconds": round(self.draining.left, 3), "jobs": jobs})
            await self._ended.wait()
            await answer({"drained": True, "cancelled": [_describe(job) for job in self._cancelled]})
        finally:
            self._waiting -= 1
            self._answered.set()
            self._answered = anyio.Event()

    async def report_end(self, cancelled: Sequence[TaskRun]) -> None:
        """Tell the clients that the drain is over.

        Args:
            cancelled: tasks that ran longer than the drain.
        """
        self._cancelled = cancelled
        self._ended.set()
        with anyio.move_on_after(_LAST_ANSWERS):
            while self._waiting:
                await self._answered.wait()


def parse_timeout(arguments: Mapping[str, Any]) -> float | None:
    """Return the seconds of a request to drain; None if it names none.

    Raises:
        ValueError: they are no usable number.
    """
    timeout = arguments.get("timeout")
    if timeout is None:
        return None
    if type(timeout) not in (int, float) or not math.isfinite(timeout) or not 0 <= timeout <= MAX_DRAIN:
        raise ValueError(f"drain.timeout: {str(timeout)[:40]} is not a number of seconds from 0 to {MAX_DRAIN:g}")
    return float(timeout)


def _describe(run: TaskRun) -> dict[str, str]:
    return {
        "job_id": str(run.attempt.job_id),
        "task": run.attempt.task,
        "executor": run.spec.executor,
        "lease": str(run.lease.id),
        "scheduler": str(run.lease.scheduler),
    }
