"""All tasks of a worker: a session for each lease that may run them, and the outputs that it holds for others."""

from __future__ import annotations

import logging
import math
import uuid
from contextlib import suppress
from typing import Final

import anyio
import anyio.abc

from hypha_net import instrumentation, retries, transfer
from hypha_net.errors import NetError
from hypha_net.transfer import FilePushTarget, PullSource
from hypha_proto.ids import PeerId
from hypha_proto.resources import GIGABYTE
from hypha_proto.task_resources import (
    OutputsReleased,
    PushBegun,
    PushedFile,
    PushOutput,
    ReleaseOutputs,
)
from hypha_proto.transfer import NO_JOB, TASK_RESOURCE, PullRequest, PushHeader, Refusal
from hypha_worker.leasing.lease_manager import Lease, LeaseError, LeaseState
from hypha_worker.leasing.retention import Retention
from hypha_worker.tasks.output_store import HeldOutput
from hypha_worker.tasks.task_run import TaskHost, TaskRun
from hypha_worker.tasks.task_session import TaskSession

_log = logging.getLogger(__name__)

MAX_PUSHES: Final = 64
"""Requests to push outputs that are served at once; further ones are refused."""
MAX_PUSHED_FILES: Final = 4000
"""Files in one of them; a resource has at most as many."""
_CONCURRENT_PUSHES: Final = 4
_OUTPUT_REQUESTS: Final = instrumentation.Counter(
    "hypha.worker.output.requests",
    "{request}",
    "Requests to pull, push or remove outputs, by kind and outcome; refused are those for outputs that the peer may "
    "not ask for, or that are not here.",
)
_HELD: Final = instrumentation.Level("hypha.worker.outputs.held", "By", "Bytes of outputs that are held for others.")


class TaskManager:
    """The tasks of all leases of a worker."""

    def __init__(self, host: TaskHost, tasks: anyio.abc.TaskGroup) -> None:
        """Prepare; nothing runs before a lease is renewed.

        Args:
            host: what all tasks share.
            tasks: sessions and pushes run in it.
        """
        self._host = host
        self._tasks = tasks
        self._retention = Retention(host.lease_manager, tasks)
        self._sessions: dict[uuid.UUID, TaskSession] = {}
        self._pushes = 0
        self._push_places = anyio.CapacityLimiter(_CONCURRENT_PUSHES)
        host.lease_manager.retained_storage = self._retained_storage
        host.store.on_removed = lambda: host.lease_manager.on_freed()
        self._swept = anyio.Event()

    @property
    def running(self) -> tuple[TaskRun, ...]:
        """Attempts that run."""
        return tuple(session.running for session in self._sessions.values() if session.running is not None)

    @property
    def held(self) -> tuple[HeldOutput, ...]:
        """Outputs that are held for others."""
        return self._host.store.held

    # --------------------------------------------------------------------------------------------------------- leases

    def on_renewed(self, lease: Lease) -> None:
        """Begin to serve a lease with its first renewal; after others, its task may rely on its scheduler again."""
        self._host.store.renew(lease.id, self._host.clock())
        session = self._sessions.get(lease.id)
        if session is None:
            session = self._sessions[lease.id] = TaskSession(self._host, lease, self._retention, self._check_beside)
            self._tasks.start_soon(self._serve, session)
        elif session.running is not None:
            session.running.contact.on_renewed()

    def on_orphaned(self, lease: uuid.UUID) -> None:
        """Note that a scheduler does not renew a lease any more."""
        session = self._sessions.get(lease)
        if session is not None and session.running is not None:
            session.running.contact.on_silence()

    async def _serve(self, session: TaskSession) -> None:
        try:
            await session.run()
        except Exception:  # noqa: BLE001 - logged: it ends the tasks of this lease only
            _log.exception("serving tasks on lease %s failed because of an error in this worker", session.lease.id)
            self._give_up(session.lease)
        finally:
            del self._sessions[session.lease.id]

    def _give_up(self, lease: Lease) -> None:
        """End a lease whose session failed: its scheduler hears it with the next renewal, and runs the task elsewhere.

        A new session would not know what was said over the stream.
        """
        with suppress(LeaseError):  # it is over
            self._host.lease_manager.release(lease.id, lease.scheduler)

    def end_lease(self, lease: uuid.UUID, reason: str) -> None:
        """Stop serving a lease that is over."""
        if lease in self._sessions:
            self._sessions[lease].end(reason)

    async def wait_until_idle(self) -> None:
        """Wait until no attempt runs and the ends of all are reported; no new ones may begin meanwhile."""
        for session in list(self._sessions.values()):
            await session.wait_until_idle(math.inf)

    @property
    def has_leased_outputs(self) -> bool:
        """Whether outputs are held whose lease is still renewed: its scheduler may need them."""
        leases = {lease.id for lease in self._host.lease_manager.leases if lease.state is LeaseState.HELD}
        return any(held.owner.lease in leases for held in self._host.store.held)

    async def wait_until_fetched(self) -> None:
        """Wait until no output of a living lease is held."""
        while self.has_leased_outputs:
            await self._swept.wait()

    async def sweep(self, now: float) -> None:
        """Remove outputs whose lease was last renewed too long ago."""
        if expired := self._host.store.expired(now):
            _log.info("removing %d outputs of tasks: their leases were not renewed for an hour", len(expired))
            await self._host.store.remove(expired)
        if instrumentation.enabled():
            _HELD.set(self._host.store.bytes_without_lease(()))
        self._swept.set()
        self._swept = anyio.Event()

    def _retained_storage(self) -> float:
        """Return the GB of outputs whose leases are over, and hold no storage any more."""
        held = self._host.store.held
        if not held:
            return 0.0
        leases = {lease.id for lease in self._host.lease_manager.leases}
        return self._host.store.bytes_without_lease(leases) / GIGABYTE

    # ---------------------------------------------------------------------------------------------------------- pushes

    async def accept_push(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        """Return where to store a file that a peer is about to push to a task, or a refusal."""
        if header.delivery is not None:
            target = await self._host.deliveries.accept(peer, header)
        elif len(found := self._receivers(peer, header)) == 1:
            return await found[0].accept_push(peer, header)
        else:
            about = f"of job {header.attempt.job_id}"
            target = Refusal(reason=f"a push {about} matches {len(found)} tasks" if found else f"{NO_JOB} {about}")
        if isinstance(target, Refusal):
            _log.warning("push of %s from %s refused: %s", header.kind[:40], peer, target.reason)
        return target

    def _receivers(self, peer: PeerId, header: PushHeader) -> list[TaskRun]:
        """Return the tasks that a push may be for; a single one that does not accept it refuses it with the reason."""
        runs = self._runs_of(header.attempt.job_id, header.scheduler)
        runs = [run for run in runs if run.execution.accepted_push_kind == header.kind] or runs
        return runs if len(runs) == 1 else [run for run in runs if peer in run.execution.senders]

    def _runs_of(self, job_id: uuid.UUID, scheduler: PeerId) -> list[TaskRun]:
        """Return the attempts of a scheduler's job.

        Those that are being ended do not count: another one may run in their place already.
        """
        job = (job_id, scheduler)
        return [run for run in self.running if (run.attempt.job_id, run.lease.scheduler) == job and not run.is_ending]

    def _check_beside(self, run: TaskRun) -> None:
        """Check that no push for another task of the same job could be meant for this one.

        Jobs of other schedulers cannot be confused with it, whatever their ids: pushes name the scheduler. A task on
        an orphaned lease is ended: its scheduler has given it up, and begun it anew on another lease.

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
            other.cancel("its scheduler has begun it anew on another lease")

    # ---------------------------------------------------------------------------------------------- files of resources

    async def resolve_pull(self, peer: PeerId, request: PullRequest) -> PullSource | Refusal:
        """Return a file of an output, or a refusal."""
        found = self._host.store.resolve(request)
        if isinstance(found, Refusal):
            _log.info("pull by %s refused: %s", peer, found.reason)
        _count_request("pull", not isinstance(found, Refusal))
        return found

    async def push_output(self, scheduler: PeerId, message: PushOutput) -> PushBegun:
        """Push files of outputs to another worker, in the background."""
        if len(message.files) > MAX_PUSHED_FILES:
            return _refuse_push(f"{len(message.files)} files are over the limit of {MAX_PUSHED_FILES} in one request")
        owned = self._host.store.find_owned(scheduler, message.job_id, ())
        outputs = {held.output.dataset: held for held in owned}
        for file in message.files:
            held = outputs.get(file.dataset)
            if held is None or file.index >= len(held.output.files):
                return _refuse_push(f"this worker has no file {file.dataset[:80]}/{file.index} of that job")
        if message.to == self._host.endpoint.peer_id:
            return _refuse_push("the files are to be pushed to this worker itself, which has them")
        if self._pushes >= MAX_PUSHES:
            return _refuse_push(f"{MAX_PUSHES} pushes are in progress")
        _count_request("push", is_served=True)
        self._pushes += 1
        self._tasks.start_soon(self._push_files, message, outputs)
        return PushBegun(accepted=True)

    async def _push_files(self, message: PushOutput, outputs: dict[str, HeldOutput]) -> None:
        try:
            async with self._push_places:
                for file in message.files:
                    await self._push_file(message, file, outputs[file.dataset])
        except (NetError, OSError) as error:
            _log.warning("push of outputs to %s failed: %s", message.to, error)
        finally:
            self._pushes -= 1

    async def _push_file(self, message: PushOutput, file: PushedFile, held: HeldOutput) -> None:
        """Push one file; retry also after a refusal, because the receiver may not know of the delivery yet."""
        stored = held.output.files[file.index]
        header = PushHeader(
            attempt=held.owner.attempt,
            round=0,
            kind=TASK_RESOURCE,
            name=file.name,
            size=stored.size,
            digest=stored.digest,
            delivery=message.delivery,
            scheduler=held.owner.scheduler,
        )
        path = held.file_path(file.index)
        await retries.REQUEST.retry(lambda: transfer.push(self._host.endpoint, message.to, path, header))

    async def release_outputs(self, scheduler: PeerId, message: ReleaseOutputs) -> OutputsReleased:
        """Remove outputs of a scheduler's job."""
        owned = self._host.store.find_owned(scheduler, message.job_id, message.datasets)
        _count_request("release", is_served=len(owned) >= len(set(message.datasets)))
        return OutputsReleased(removed=await self._host.store.remove(owned))


def _refuse_push(reason: str) -> PushBegun:
    _count_request("push", is_served=False)
    return PushBegun(accepted=False, reason=reason)


def _count_request(kind: str, is_served: bool) -> None:
    _OUTPUT_REQUESTS.add(1, {"hypha.request": kind, "hypha.outcome": "served" if is_served else "refused"})
