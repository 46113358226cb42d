"""Runs a task as a process, by the owner's configured command, with a bridge to the network on a Unix socket.

The process, such as `hypha.accelerate_executor`, communicates with `bridge` only; `process_runner` starts it and ends
everything that it left running.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import anyio

from hypha_net.errors import NoSpaceError
from hypha_net.transfer import FilePushTarget
from hypha_proto.codec import to_plain
from hypha_proto.commands import CommandAnswer, TaskCommand
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import TrainConfig
from hypha_proto.transfer import OUTER_UPDATE, PushHeader, Refusal
from hypha_worker.bridge.backend import BridgeBackend
from hypha_worker.bridge.server import BridgeServer, open_bridge
from hypha_worker.bridge.training import TrainingBridge
from hypha_worker.bridge.unix_socket import choose_place
from hypha_worker.errors import (
    ExecutionError,
    ExecutorExitError,
    ExecutorStartError,
    WorkReturnedError,
    disk_fault_of,
)
from hypha_worker.executors.process.environment import make_placeholders
from hypha_worker.executors.process.idleness import IDLE_LIMIT, wait_until_idle
from hypha_worker.executors.process.process_runner import ProcessPlace, ProcessRunner
from hypha_worker.executors.runtimes import ExecutorSection, HostSettings
from hypha_worker.logs.run_log import LogFolder
from hypha_worker.tasks.definition_check import with_paths
from hypha_worker.tasks.execution import Execution, ExecutionTrace, TaskContext
from hypha_worker.tasks.spec_references import without_secrets


class ProcessExecution(Execution):
    """An execution in a separate process."""

    def __init__(self, context: TaskContext, settings: ExecutorSection, host: HostSettings) -> None:
        if context.spec.aggregation is not None:
            raise ExecutionError(f"executor {context.spec.executor} is a process and no parameter server")
        self._context = context
        self._settings = settings
        self._host = host
        self._disk_fault: str | None = None
        self._failure: ExecutionError | None = None
        """With what the process has failed by itself."""
        self._is_idle = False
        """Whether the process was ended because it did nothing any more."""
        self._stopped = anyio.CancelScope()
        self._runner = ProcessRunner(settings, host, _place(context, host.logs))
        config = context.spec.training
        self._training = None if config is None else TrainingBridge(context, config, self._stop_for_disk_error)
        self._backend = BridgeBackend(context, self._training, self._stop_for_disk_fault)

    @property
    def senders(self) -> Set[PeerId]:
        """See `Execution.senders`."""
        return frozenset() if self._training is None else self._training.queue.senders

    @property
    def accepted_push_kind(self) -> str:
        """See `Execution.accepted_push_kind`."""
        return "" if self._training is None else OUTER_UPDATE

    @property
    def trace(self) -> ExecutionTrace:
        """See `Execution.trace`."""
        return self._runner.trace

    async def accept_push(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        """See `Execution.accept_push`."""
        if self._training is None:
            return await super().accept_push(peer, header)
        return self._training.queue.accept(peer, header)

    def handle_command(self, command: TaskCommand) -> CommandAnswer:
        """See `Execution.handle_command`."""
        if self._training is None or command.server is None:
            return super().handle_command(command)
        return self._training.changes.handle(command.number, command.server)

    async def run(self) -> None:
        """See `Execution.run`."""
        place = choose_place(self._context.work_dir, self._host.socket_folder)
        opened = open_bridge(self._backend, place, self._runner.owns)
        async with opened as bridge, anyio.create_task_group() as tasks:
            if self._training is not None:
                tasks.start_soon(self._training.run)
            elif self._context.spec.timeout_ms is None:
                tasks.start_soon(self._end_when_idle, bridge)
            try:
                await self._run_until_disk_fault(place.path)
            finally:
                if self._training is not None:
                    self._training.close()
                tasks.cancel_scope.cancel()
                self._note_start(bridge.was_used())

    def _note_start(self, has_used_bridge: bool) -> None:
        """Note whether the executor has started: it has used its bridge, or ended without an error.

        A signal, a limit of the lease, or a job that the executor does not support says nothing about its start. How
        the process of a task that does not train ends may depend on the task, so that only 0 counts there.
        """
        health, exit_code = self._host.health, self._runner.trace.exit_code
        if health is None:
            return
        failures = ExecutorStartError if self._training is None else (ExecutorStartError, ExecutorExitError)
        if has_used_bridge or exit_code == 0:
            health.note_success()
        elif isinstance(self._failure, failures):
            health.note_failure(str(self._failure))

    async def _run_until_disk_fault(self, socket_path: Path) -> None:
        with self._stopped:
            try:
                await self._run_in_time(socket_path)
            except ExecutionError as error:
                self._failure = None if isinstance(error, WorkReturnedError) else error
                if self._disk_fault is None:
                    raise
        if self._disk_fault is not None:
            raise WorkReturnedError(self._disk_fault)
        if self._is_idle:
            raise ExecutionError(
                f"executor {self._settings.cmd} was ended: it has used no processor time, and has asked its bridge "
                f"nothing, for {IDLE_LIMIT:g} s; a task that may wait for longer states its timeout"
            )

    async def _end_when_idle(self, bridge: BridgeServer) -> None:
        """End the process when it does nothing any more; a scheduler watches over training by its reports."""
        await wait_until_idle(lambda: self._runner.pid, bridge.is_asked)
        self._is_idle = True
        self._stopped.cancel()

    async def _run_in_time(self, socket_path: Path) -> None:
        timeout = self._context.spec.timeout_ms
        with anyio.move_on_after(None if timeout is None else timeout / 1000) as limit:
            specification = json.dumps(task_json(self._context))
            placeholders = make_placeholders(self._context.storage.files, socket_path, specification)
            await self._runner.run(placeholders, self._context.control.report_ready)
        if limit.cancelled_caught and timeout is not None:
            raise ExecutionError(f"executor {self._settings.cmd} was ended after {timeout / 1000:g} s, its timeout")

    def _stop_for_disk_error(self, error: NoSpaceError | OSError) -> None:
        if (reason := disk_fault_of(error, self._context.work_dir)) is not None:
            self._stop_for_disk_fault(reason)

    def _stop_for_disk_fault(self, reason: str) -> None:
        self._disk_fault = self._disk_fault or reason
        self._stopped.cancel()


def _place(context: TaskContext, logs: LogFolder) -> ProcessPlace:
    """Return where a task's process runs; its lines name job and task."""
    job, task = context.attempt.job_id, context.attempt.task
    return ProcessPlace(
        work_dir=context.work_dir,
        allocation=context.allocation,
        storage=context.storage.limit,
        scope=context.scope,
        log_name=f"{job!s:.8}/{task}",
        attributes={"hypha.job.id": str(job), "hypha.lease.id": str(context.lease)},
        log=logs.new_log(job, task, context.scheduler),
        traceparent=context.traceparent,
        keep_resources=context.keep_resources,
    )


def task_json(context: TaskContext) -> dict[str, Any]:
    """Return a task as its process sees it: resources are paths, and there are neither sources nor tokens."""
    spec = context.spec
    if spec.training is None:
        settings = with_paths(dict(context.settings), context.resources)
    else:
        settings = to_plain(TrainConfig, without_secrets(spec.training))
    return {
        "job_id": str(context.attempt.job_id),
        "task": context.attempt.task,
        "attempt": context.attempt.number,
        "executor": spec.executor,
        "scheduler": str(context.scheduler),
        "index": spec.index,
        "count": spec.count,
        "settings": settings,
        "resources": dict(context.resources),
        "outputs": {output.name: output.path for output in spec.outputs},
        "timeout_ms": spec.timeout_ms,
    }
