"""Hands tasks to the workers whose leases are held, in the order that their needs allow.

Before it: `leases` and the strategy's tasks. After it: the worker's `jobs` start an executor, which reports back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import anyio

from hypha_net import instrumentation, rpc
from hypha_net.endpoint import Endpoint
from hypha_net.errors import NetError, UnsupportedProtocolError
from hypha_proto.dispatch import DISPATCH_JOB, Dispatched, DispatchJob, DispatchResult
from hypha_proto.job_spec import JobSpec
from hypha_scheduler.tasks import Task, TaskGraph

_log = logging.getLogger(__name__)

_DISPATCH_TIMEOUT: Final = 30.0
_RETRY_DELAYS: Final = (0.5, 2.0)
"""Seconds before each further attempt."""


async def dispatch_ready(
    endpoint: Endpoint, graph: TaskGraph, spec_of: Callable[[Task], JobSpec], failed: Callable[[Task, str], None]
) -> None:
    """Dispatch every task that is ready, and those that become so by it.

    Args:
        failed: told of each worker that cannot be reached or does not start its task, and why.
    """
    while ready := graph.ready():
        async with anyio.create_task_group() as tasks:
            for task in ready:
                graph.start(task.name)  # before the worker is told: its executor may end before the answer is here
                tasks.start_soon(_dispatch, endpoint, task, spec_of(task), graph, failed)
        if any(task.outputs and graph.state(task.name).over for task in ready):
            return  # the others would wait in vain for what it gives


async def _dispatch(
    endpoint: Endpoint, task: Task, spec: JobSpec, graph: TaskGraph, failed: Callable[[Task, str], None]
) -> None:
    about = {"hypha.task": task.name, "hypha.peer.id": str(task.peer)}
    try:
        with instrumentation.span("dispatch", about):
            answer = await _send(endpoint, task, DispatchJob(id=task.lease, spec=spec), graph)
    except NetError as error:
        failed(task, f"task {task.name} could not be handed to worker {task.peer}: {error}")
        return
    if not isinstance(answer, Dispatched):
        failed(task, f"worker {task.peer} did not start task {task.name}; its log says why")


async def _send(endpoint: Endpoint, task: Task, message: DispatchJob, graph: TaskGraph) -> DispatchResult:
    """Hand a task over, a few times if need be: a worker confirms what it has begun already."""
    for pause in _RETRY_DELAYS:
        try:
            return await rpc.call(endpoint, task.peer, DISPATCH_JOB, message, timeout=_DISPATCH_TIMEOUT)
        except UnsupportedProtocolError:
            raise
        except NetError as error:
            _log.warning("task %s was not handed to worker %s, trying again: %s", task.name, task.peer, error)
            await anyio.sleep(pause)
            if graph.state(task.name).over:  # its lease was lost, or its executor has ended already
                raise
    return await rpc.call(endpoint, task.peer, DISPATCH_JOB, message, timeout=_DISPATCH_TIMEOUT)
