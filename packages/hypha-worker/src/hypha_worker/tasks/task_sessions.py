"""The tasks of a worker: a session for each lease, which starts the attempts at tasks on it.

A session begins with the first renewal of its lease and ends with the lease. It gets definitions from its
`task_stream`, and runs one `task_run` at a time.

A push of a resource names its delivery, which `resource_pushes` knows. Any other is for a running task that accepts its
kind from its sender; tasks for which that would be ambiguous do not run beside each other.
"""

from __future__ import annotations

import logging
import math
import uuid
from contextlib import suppress
from typing import Any, Final

import anyio
import anyio.abc

from hypha_net import instrumentation
from hypha_net.transfer import FilePushTarget
from hypha_proto.attempt_id import AttemptId
from hypha_proto.ids import PeerId
from hypha_proto.tasks import TaskSpec
from hypha_proto.transfer import NO_JOB, PushHeader, Refusal
from hypha_worker.errors import ExecutionError
from hypha_worker.leasing.lease_manager import Lease, LeaseError, LeaseState
from hypha_worker.leasing.retention import Retention
from hypha_worker.tasks.definition_check import DefinitionError, check_start
from hypha_worker.tasks.task_run import TaskHost, TaskRun
from hypha_worker.tasks.task_stream import TaskStream

_log = logging.getLogger(__name__)

LAST_UPDATE_TIMEOUT: Final = 1.0
"""Seconds that the last status updates of a lease that is over, or of a worker that shuts down, may take."""


class TaskSession:
    """The tasks of one lease."""

    def __init__(self, sessions: TaskSessions, lease: Lease) -> None:
        self.lease = lease
        self._sessions = sessions
        self._host = host = sessions.host
        self._stream = TaskStream(host.endpoint, lease.scheduler, lease.id, self.start, self._find)
        self._end_reason = ""
        self._end = anyio.Event()
        self._stream_scope = anyio.CancelScope(shield=True)
        """Of the stream, which lasts longer than the attempts."""
        self._tasks: anyio.abc.TaskGroup | None = None
        self.running: TaskRun | None = None
        """The attempt that runs."""

    async def run(self) -> None:
        """Serve the lease until `end` is called or the worker shuts down, and the attempt that runs then has ended.

        The end is reported in both cases, if that takes no longer than `LAST_UPDATE_TIMEOUT`.
        """
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._run_stream)
            try:
                await self._end.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await self.wait_until_idle(LAST_UPDATE_TIMEOUT)
                self._stream_scope.cancel()
                tasks.cancel_scope.cancel()  # nobody hears any more of what an attempt waits to have reported
                self._stream.channel.give_up()

    async def _run_stream(self) -> None:
        with self._stream_scope:
            await self._stream.run()

    async def wait_until_idle(self, update_timeout: float) -> None:
        """Wait until no attempt runs, and then at most `update_timeout` seconds until its end is reported."""
        if self.running is not None:
            await self.running.ended.wait()
        if self._stream.channel.pending:
            with anyio.move_on_after(update_timeout):
                await self._stream.channel.wait_until_handled()

    def end(self, reason: str) -> None:
        """End the session, because its lease is over; the attempt that runs is stopped."""
        self._end_reason = reason
        self._end.set()
        if self.running is not None:
            self.running.stop(reason)

    # ----------------------------------------------------------------------------------------------------- definitions

    def start(self, attempt: AttemptId, spec: TaskSpec) -> None:
        """Start an attempt on the lease.

        Raises:
            ExecutionError: its definition is malformed, or cannot run on this worker.
            LeaseError: it cannot run here now.
        """
        settings = self._check(attempt, spec)
        stream = self._stream
        run = TaskRun(
            self._host,
            self.lease,
            attempt,
            spec,
            settings,
            stream.send_update,
            stream.channel.wait_until_handled,
            self._sessions.retention,
        )
        self._attach(run)
        _log.info("%s started on lease %s for scheduler %s", run, self.lease.id, self.lease.scheduler)
        self.running = run
        assert self._tasks is not None
        self._tasks.start_soon(self._run, run)

    def _find(self, attempt: AttemptId) -> TaskRun | None:
        """Return an attempt if it runs."""
        run = self.running
        return run if run is not None and run.attempt == attempt else None

    def _check(self, attempt: AttemptId, spec: TaskSpec) -> dict[str, Any]:
        """Check that an attempt can begin; return its settings."""
        if attempt.job_id != self._stream.job_id:
            raise DefinitionError(f"job {attempt.job_id} is not the one that holds this lease")
        settings = check_start(spec, self.lease.executors)
        if spec.executor not in self._host.executors:
            raise DefinitionError(f"no executor {spec.executor} is configured here")
        if self._end.is_set():
            raise LeaseError(self._end_reason)
        return settings

    def _attach(self, run: TaskRun) -> None:
        """Attach an attempt to the lease. Raises `ExecutionError` or `LeaseError` if it cannot run now."""
        lease, grace = self.lease, (run.spec.orphan_grace_ms or 0) / 1000
        try:
            self._sessions.check_unambiguous(run)
            now, job_id = anyio.current_time(), run.attempt.job_id
            self._host.lease_manager.attach_task(lease.id, lease.scheduler, now, grace, job_id)
        except (ExecutionError, LeaseError) as error:
            instrumentation.end_span(run.span, error)
            raise

    async def _run(self, run: TaskRun) -> None:
        try:
            await run.run()
        finally:
            run.ended.set()  # also after an error, or nobody could wait for it
            if self.running is run:
                self.running = None
        await self._stream.channel.wait_until_handled()
        if self.running is None:
            self._host.lease_manager.end_grace(self.lease.id)


class TaskSessions:
    """The sessions of all leases of a worker."""

    def __init__(self, host: TaskHost, tasks: anyio.abc.TaskGroup) -> None:
        """Prepare; nothing runs before a lease is renewed.

        Args:
            host: what all tasks share.
            tasks: sessions run in it.
        """
        self.host = host
        self.retention = Retention(host.lease_manager, tasks)
        """Keeps what processes hold that cannot be ended."""
        self._tasks = tasks
        self._sessions: dict[uuid.UUID, TaskSession] = {}

    @property
    def running(self) -> tuple[TaskRun, ...]:
        """Attempts that run."""
        return tuple(session.running for session in self._sessions.values() if session.running is not None)

    def on_renewed(self, lease: Lease) -> None:
        """Begin a session with the first renewal of a lease; with others, its task may rely on its scheduler again."""
        self.host.store.renew(lease.id, anyio.current_time())
        session = self._sessions.get(lease.id)
        if session is None:
            session = self._sessions[lease.id] = TaskSession(self, lease)
            self._tasks.start_soon(self._run, session)
        elif session.running is not None:
            session.running.contact.is_confirmed = True

    def on_orphaned(self, lease: uuid.UUID) -> None:
        """Note that a scheduler does not renew a lease any more."""
        session = self._sessions.get(lease)
        if session is not None and session.running is not None:
            session.running.contact.is_confirmed = False

    async def _run(self, session: TaskSession) -> None:
        try:
            await session.run()
        except Exception:  # noqa: BLE001 - logged: it ends the tasks of this lease only
            _log.exception("serving tasks on lease %s failed because of an error in this worker", session.lease.id)
            self._release_failed(session.lease)
        finally:
            del self._sessions[session.lease.id]

    def _release_failed(self, lease: Lease) -> None:
        """End a lease whose session failed: its scheduler hears it with the next renewal, and runs the task elsewhere.

        A new session would not know what was said over the stream.
        """
        with suppress(LeaseError):  # it is over
            self.host.lease_manager.release(lease.id, lease.scheduler)

    def end(self, lease: uuid.UUID, reason: str) -> None:
        """End the session of a lease that is over."""
        if lease in self._sessions:
            self._sessions[lease].end(reason)

    async def wait_until_idle(self) -> None:
        """Wait until no attempt runs and the ends of all are reported; no new ones may begin meanwhile."""
        for session in list(self._sessions.values()):
            await session.wait_until_idle(math.inf)

    # ---------------------------------------------------------------------------------------------------------- pushes

    async def accept_push(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        """Return where to store a file that a peer is about to push, or a refusal."""
        if header.delivery is not None:
            target = await self.host.resource_pushes.accept(peer, header)
        elif len(found := self._receivers(peer, header)) == 1:
            return await found[0].accept_push(peer, header)
        else:
            about = f"of job {header.attempt.job_id}"
            target = Refusal(reason=f"a push {about} matches {len(found)} tasks" if found else f"{NO_JOB} {about}")
        if isinstance(target, Refusal):
            _log.warning("push of %s from %s refused: %s", header.kind, peer, target.reason)
        return target

    def _receivers(self, peer: PeerId, header: PushHeader) -> list[TaskRun]:
        """Return the tasks that a push may be for; a single one that does not accept it refuses it with the reason."""
        runs = self._runs_of(header.attempt.job_id, header.scheduler)
        runs = [run for run in runs if run.execution.accepted_push_kind == header.kind] or runs
        return runs if len(runs) == 1 else [run for run in runs if peer in run.execution.senders]

    def _runs_of(self, job_id: uuid.UUID, scheduler: PeerId) -> list[TaskRun]:
        """Return the attempts of a scheduler's job.

        Those that are being stopped do not count: another one may run in their place already.
        """
        job = (job_id, scheduler)
        return [run for run in self.running if (run.attempt.job_id, run.lease.scheduler) == job and not run.is_ending]

    def check_unambiguous(self, run: TaskRun) -> None:
        """Check that no push for another task of the same job could be meant for this one.

        Jobs of other schedulers cannot be confused with it, whatever their ids: pushes name the scheduler. A task on
        an orphaned lease is stopped: its scheduler has given it up, and started it again on another lease.

        Raises:
            LeaseError: it could, so that the task must run elsewhere, or later.
        """
        for other in self._runs_of(run.attempt.job_id, run.lease.scheduler):
            kind, senders = run.execution.accepted_push_kind, run.execution.senders & other.execution.senders
            is_ambiguous = bool(senders) and kind == other.execution.accepted_push_kind
            if not is_ambiguous and other.attempt.task != run.attempt.task:
                continue
            if other.lease.state is not LeaseState.ORPHANED:
                if not is_ambiguous:
                    continue
                raise LeaseError(f"{other} runs here, and both accept pushes of kind {kind} from {min(senders)}")
            other.stop("its scheduler has begun it anew on another lease")
