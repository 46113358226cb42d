"""Task dispatch: starts tasks on leased workers in the order of their dependencies.

Called by `training` with a strategy's `tasks.TaskGraph`. The worker starts an executor, which then reports progress.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import anyio

from hypha_net import backoff, instrumentation, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnsupportedProtocolError
from hypha_proto.dispatch import DISPATCH_JOB, Dispatched, DispatchJob, DispatchResult
from hypha_proto.job_spec import JobSpec
from hypha_scheduler.jobs.task_graph import Task, TaskGraph

_log = logging.getLogger(__name__)

_DISPATCH_TIMEOUT: Final = 30.0
_RETRY_DELAYS: Final = (0.5, 2.0)
"""Seconds before each retry."""


async def dispatch_ready(
    endpoint: Endpoint, graph: TaskGraph, spec_of: Callable[[Task], JobSpec], failed: Callable[[Task, str], None]
) -> None:
    """Dispatch every task that is ready, and those that become ready by it.

    Args:
        endpoint: network endpoint of the scheduler.
        graph: tasks of the job; their states are updated.
        spec_of: returns the job spec of a task.
        failed: called with each task that its worker did not start, and the reason.
    """
    while ready := graph.ready():
        async with anyio.create_task_group() as tasks:
            for task in ready:
                graph.start(task.name)  # before it is sent: the executor may end before the response arrives
                tasks.start_soon(_dispatch, endpoint, task, spec_of(task), graph, failed)
        if any(task.outputs and graph.state(task.name).over for task in ready):
            return  # tasks that depend on its outputs cannot run


async def _dispatch(
    endpoint: Endpoint, task: Task, spec: JobSpec, graph: TaskGraph, failed: Callable[[Task, str], None]
) -> None:
    about = {"hypha.task": task.name, "hypha.peer.id": str(task.peer)}
    try:
        with instrumentation.span("dispatch", about):
            answer = await _send(endpoint, task, DispatchJob(id=task.lease, spec=spec), graph)
    except NetError as error:
        failed(task, f"task {task.name} could not be dispatched to worker {task.peer}: {error}")
        return
    if not isinstance(answer, Dispatched):
        failed(task, f"worker {task.peer} did not start task {task.name}; its log says why")


async def _send(endpoint: Endpoint, task: Task, message: DispatchJob, graph: TaskGraph) -> DispatchResult:
    """Send the dispatch, with retries: a worker confirms again a task that it has already started."""
    last: NetError | None = None

    async def attempt() -> DispatchResult:
        if last is not None and graph.state(task.name).over:  # its lease was lost, or its executor has already ended
            raise last
        return await rpc.call(endpoint, task.peer, DISPATCH_JOB, message, timeout=_DISPATCH_TIMEOUT)

    def on_failure(error: NetError, _pause: float) -> None:
        nonlocal last
        if isinstance(error, UnsupportedProtocolError) or error is last:
            raise error
        last = error
        _log.warning("task %s could not be dispatched to worker %s, retrying: %s", task.name, task.peer, error)

    return await backoff.retry(attempt, _RETRY_DELAYS, on_failure)
