"""Runs a task as a process, by the owner's configured command, with a bridge on a Unix socket.

Called by `tasks.task_run`, after the task's resources were fetched; `process_runner` starts the process and ends
everything that it left running.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio

from hypha_worker.bridge.server import open_bridge
from hypha_worker.bridge.task_backend import TaskBridgeBackend
from hypha_worker.bridge.unix_socket import choose_place
from hypha_worker.errors import ExecutionError, ExecutorStartError, WorkReturnedError
from hypha_worker.executors.process.placeholders import make_placeholders
from hypha_worker.executors.process.process_runner import ProcessPlace, ProcessRunner, ProcessSettings
from hypha_worker.jobs.execution import ExecutionTrace
from hypha_worker.logs.run_log import LogFolder
from hypha_worker.tasks.definition import with_paths
from hypha_worker.tasks.execution import TaskContext


class TaskProcess:
    """A `tasks.execution.TaskExecution` in a separate process."""

    def __init__(self, context: TaskContext, settings: ProcessSettings) -> None:
        self._context = context
        self._settings = settings
        self._runner = ProcessRunner(settings, _place(context, settings.logs))
        self._disk_fault: str | None = None
        self._stopped = anyio.CancelScope()

    @property
    def trace(self) -> ExecutionTrace:
        """See `TaskExecution.trace`."""
        return self._runner.trace

    async def run(self) -> None:
        """See `TaskExecution.run`."""
        place = choose_place(self._context.work_dir, self._settings.socket_folder)
        backend = TaskBridgeBackend(self._context, self._stop_for_disk_fault)
        async with open_bridge(backend, place):
            with self._stopped:
                try:
                    await self._run_in_time(place.path)
                    self._note_start(None)
                except ExecutionError as error:
                    self._note_start(error)
                    if self._disk_fault is None:
                        raise
            if self._disk_fault is not None:
                raise WorkReturnedError(self._disk_fault)

    def _note_start(self, failure: ExecutionError | None) -> None:
        """Note whether the executor has started. How its process ends may depend on the task, so only 0 counts."""
        starts = self._settings.starts
        if starts is None:
            return
        if failure is None:
            starts.note_success()
        elif isinstance(failure, ExecutorStartError):
            starts.note_failure(str(failure))

    async def _run_in_time(self, socket_path: Path) -> None:
        timeout = self._context.spec.timeout_ms
        with anyio.move_on_after(None if timeout is None else timeout / 1000) as limit:
            specification = json.dumps(task_json(self._context))
            placeholders = make_placeholders(self._context.storage.files, socket_path, specification)
            await self._runner.run(placeholders, self._context.control.executor_started)
        if limit.cancelled_caught and timeout is not None:
            raise ExecutionError(f"executor {self._settings.cmd} was ended after {timeout / 1000:g} s, its timeout")

    def _stop_for_disk_fault(self, reason: str) -> None:
        self._disk_fault = self._disk_fault or reason
        self._stopped.cancel()


def _place(context: TaskContext, logs: LogFolder | None) -> ProcessPlace:
    """Return where a task's process runs; its lines name job and task."""
    job = str(context.job_id)
    return ProcessPlace(
        work_dir=context.work_dir,
        allocation=context.allocation,
        storage=context.storage.limit,
        scope=context.scope,
        log_name=f"{job:.8}/{context.task}",
        attributes={"hypha.job.id": job, "hypha.lease.id": str(context.lease)},
        log=None if logs is None else logs.new_log(context.job_id, context.task, context.scheduler),
        traceparent=context.traceparent,
        keep_resources=context.keep_resources,
    )


def task_json(context: TaskContext) -> dict[str, Any]:
    """Return a task as its process sees it: resources are paths, and there are neither sources nor tokens."""
    spec = context.spec
    return {
        "job_id": str(context.job_id),
        "task": context.task,
        "attempt": context.attempt,
        "scheduler": str(context.scheduler),
        "index": spec.index,
        "count": spec.count,
        "settings": with_paths(dict(context.settings), context.resources),
        "resources": dict(context.resources),
        "outputs": {output.name: output.path for output in spec.outputs},
        "timeout_ms": spec.timeout_ms,
    }
