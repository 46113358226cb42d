"""Runs a training job as a process, by the owner's configured command, with a bridge to the network on a Unix socket.

Called by `jobs.job_manager`. The process, such as `hypha.accelerate_executor`, communicates with `bridge` only;
`process_runner` starts it and ends everything that it left running.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path

import anyio

from hypha_net.errors import NoSpaceError
from hypha_net.transfer import FilePushTarget
from hypha_proto.codec import to_json
from hypha_proto.ids import PeerId
from hypha_proto.job_membership import SERVER_CHANGED
from hypha_proto.job_spec import JobSpec, TrainJob
from hypha_proto.transfer import OUTER_UPDATE, PushHeader, Refusal
from hypha_worker.bridge.backend import JobBridgeBackend
from hypha_worker.bridge.delivery_queue import DeliveryQueue
from hypha_worker.bridge.round_commits import RoundCommits
from hypha_worker.bridge.server import open_bridge
from hypha_worker.bridge.server_changes import ServerChanges
from hypha_worker.bridge.uncommitted_updates import UncommittedUpdates
from hypha_worker.bridge.unix_socket import choose_place
from hypha_worker.connectors.peer_files import PeerFiles
from hypha_worker.errors import (
    ExecutionError,
    ExecutorExitError,
    ExecutorStartError,
    WorkReturnedError,
    describe_disk_fault,
    is_disk_fault,
)
from hypha_worker.executors.process.placeholders import make_placeholders
from hypha_worker.executors.process.process_runner import ProcessPlace, ProcessRunner, ProcessSettings
from hypha_worker.jobs.execution import ExecutionTrace, JobContext, MessageHandler
from hypha_worker.jobs.references import job_references, reference_peers, without_secrets
from hypha_worker.logs.run_log import LogFolder


class ProcessExecution:
    """An `Execution` of a training job in a separate process."""

    def __init__(self, context: JobContext, settings: ProcessSettings) -> None:
        self._context = context
        self._settings = settings
        self._disk_fault: str | None = None
        self._failure: ExecutionError | None = None
        """With what the process has failed by itself."""
        self._stopped = anyio.CancelScope()
        self._runner = ProcessRunner(settings, _place(context, settings.logs))
        self._queue = DeliveryQueue(
            job_id=context.spec.job_id,
            work_dir=context.work_dir,
            senders=reference_peers([context.spec.executor.config.results]),
            peers=reference_peers(job_references(context.spec)),
            storage=context.storage,
            kind=self.accepted_push_kind,
            on_disk_error=self._stop_for_disk_error,
            uncommitted=_uncommitted_updates(context),
        )
        self._backend = self._make_backend()
        self._changes = ServerChanges(self._backend, self._queue)

    @property
    def senders(self) -> Set[PeerId]:
        """See `Execution.senders`."""
        return self._queue.senders

    @property
    def accepted_push_kind(self) -> str:
        """See `Execution.accepted_push_kind`."""
        return OUTER_UPDATE

    @property
    def message_handlers(self) -> Mapping[str, MessageHandler]:
        """See `Execution.message_handlers`."""
        return {} if self._backend.server.term is None else {SERVER_CHANGED.name: self._changes.handle}

    @property
    def trace(self) -> ExecutionTrace:
        """See `Execution.trace`."""
        return self._runner.trace

    async def accept_push(self, peer: PeerId, header: PushHeader | None) -> FilePushTarget | Refusal:
        """See `Execution.accept_push`."""
        return self._queue.accept(peer, header)

    async def run(self) -> None:
        """See `Execution.run`."""
        place = choose_place(self._context.work_dir, self._settings.socket_folder)
        backend = self._backend
        async with open_bridge(backend, place) as was_used, anyio.create_task_group() as tasks:
            tasks.start_soon(self._queue.run)
            tasks.start_soon(self._changes.run)
            try:
                await self._run_until_disk_fault(place.path)
            finally:
                self._queue.close()
                backend.close()
                tasks.cancel_scope.cancel()
                self._note_start(was_used())

    def _note_start(self, has_used_bridge: bool) -> None:
        """Note whether the executor has started: it has used its bridge, or ended without an error.

        A signal, a limit of the lease, or a job that the executor does not support says nothing about its start.
        """
        starts, exit_code = self._settings.starts, self._runner.trace.exit_code
        if starts is None:
            return
        if has_used_bridge or exit_code == 0:
            starts.note_success()
        elif isinstance(self._failure, ExecutorStartError | ExecutorExitError):
            starts.note_failure(str(self._failure))

    async def _run_until_disk_fault(self, socket_path: Path) -> None:
        with self._stopped:
            try:
                specification = _specification(self._context.spec)
                await self._runner.run(make_placeholders(self._context.storage.files, socket_path, specification))
            except ExecutionError as error:
                self._failure = None if isinstance(error, WorkReturnedError) else error
                if self._disk_fault is None:
                    raise
        if self._disk_fault is not None:
            raise WorkReturnedError(self._disk_fault)

    def _stop_for_disk_error(self, error: NoSpaceError | OSError) -> None:
        if isinstance(error, NoSpaceError):
            self._stop_for_disk_fault(str(error))
        elif is_disk_fault(error):
            self._stop_for_disk_fault(describe_disk_fault(error, self._context.work_dir))

    def _stop_for_disk_fault(self, reason: str) -> None:
        self._disk_fault = self._disk_fault or reason
        self._stopped.cancel()

    def _make_backend(self) -> JobBridgeBackend:
        context = self._context
        return JobBridgeBackend(
            endpoint=context.endpoint,
            spec=context.spec,
            lease=context.lease,
            scheduler=context.scheduler,
            work_dir=context.work_dir,
            queue=self._queue,
            access=self._settings.access,
            files=PeerFiles(context.endpoint, context.storage, context.traffic),
            traceparent=context.traceparent,
            contact=context.contact,
            on_disk_fault=self._stop_for_disk_fault,
        )


def _place(context: JobContext, logs: LogFolder | None) -> ProcessPlace:
    """Return where a job's process runs; lines name job and lease, since several tasks of a job may run here."""
    job, lease = str(context.spec.job_id), str(context.lease)
    return ProcessPlace(
        work_dir=context.work_dir,
        allocation=context.allocation,
        storage=context.storage.limit,
        scope=context.scope,
        log_name=f"{job:.8}/{lease:.4}",
        attributes={"hypha.job.id": job, "hypha.lease.id": lease},
        log=None if logs is None else logs.new_log(context.spec.job_id, lease, context.scheduler),
        traceparent=context.traceparent,
        keep_resources=context.keep_resources,
    )


def _uncommitted_updates(context: JobContext) -> UncommittedUpdates | None:
    """Return what keeps a job's outer updates until they are committed; None if its scheduler commits none."""
    executor = context.spec.executor
    if not isinstance(executor, TrainJob) or executor.config.term is None:
        return None
    commits = RoundCommits(context.endpoint, context.scheduler, context.spec.job_id, context.lease, context.contact)
    config = executor.config
    return UncommittedUpdates(commits, executor.config.term, config.first_round or 1, joins=bool(config.join))


def _specification(spec: JobSpec) -> str:
    """Return a job as its process sees it."""
    return to_json(JobSpec, without_secrets(spec)).decode()
