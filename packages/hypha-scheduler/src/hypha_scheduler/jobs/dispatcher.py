"""Task dispatch: starts a task on a leased worker, with retries.

Called by `runner`. The worker starts an executor, which then reports progress.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from hypha_net import backoff, instrumentation, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnsupportedProtocolError
from hypha_proto.dispatch import DISPATCH_JOB, Dispatched, DispatchJob, DispatchResult
from hypha_proto.job_spec import JobSpec
from hypha_scheduler.strategies.base import StartTask, TaskRef

_log = logging.getLogger(__name__)

_DISPATCH_TIMEOUT: Final = 30.0
_RETRY_DELAYS: Final = (0.5, 2.0)
"""Seconds before each retry."""


async def dispatch(
    endpoint: Endpoint,
    start: StartTask,
    spec: JobSpec,
    attempt: int | None,
    is_running: Callable[[], bool],
    *,
    orphan_grace: float = 0.0,
) -> str | None:
    """Dispatch a task; return why its worker did not start it, or None.

    Args:
        endpoint: network endpoint of the scheduler.
        start: the task.
        spec: its specification.
        attempt: number of earlier dispatches on its lease; None if the lease takes this one only.
        is_running: returns whether the task has not ended yet: its executor may end before the response arrives.
        orphan_grace: seconds for which the task may run on when its lease is no longer renewed.
    """
    task = start.task
    about = {"hypha.task": task.name, "hypha.peer.id": str(task.lease.peer)}
    keep_lease = start.keep_lease if attempt is not None else None
    grace_ms = int(orphan_grace * 1000) or None
    message = DispatchJob(id=task.lease.id, spec=spec, keep_lease=keep_lease, attempt=attempt, orphan_grace_ms=grace_ms)
    try:
        with instrumentation.span("dispatch", about):
            answer = await _send(endpoint, task, message, is_running)
    except NetError as error:
        return f"task {task.name} could not be dispatched to worker {task.lease.peer}: {error}"
    if not isinstance(answer, Dispatched):
        return f"worker {task.lease.peer} did not start task {task.name}; its log says why"
    return None


async def _send(
    endpoint: Endpoint, task: TaskRef, message: DispatchJob, is_running: Callable[[], bool]
) -> DispatchResult:
    """Send the dispatch, with retries: a worker confirms again a task that it has already started."""
    last: NetError | None = None
    peer = task.lease.peer

    async def attempt() -> DispatchResult:
        if last is not None and not is_running():  # its lease was lost, or its executor has already ended
            raise last
        return await rpc.call(endpoint, peer, DISPATCH_JOB, message, timeout=_DISPATCH_TIMEOUT)

    def on_failure(error: NetError, _pause: float) -> None:
        nonlocal last
        if isinstance(error, UnsupportedProtocolError) or error is last:
            raise error
        last = error
        _log.warning("task %s could not be dispatched to worker %s, retrying: %s", task.name, peer, error)

    return await backoff.retry(attempt, _RETRY_DELAYS, on_failure)
