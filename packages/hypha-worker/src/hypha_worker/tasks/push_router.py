"""Which task of this worker a pushed file is for: the one that its header, its sender and its kind name.

A push of a resource names its delivery, which `resource_pushes` knows. Any other is for a running task that accepts its
kind from its sender; tasks for which that would be ambiguous do not run beside each other.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypha_net.transfer import FilePushTarget
from hypha_proto.ids import PeerId
from hypha_proto.transfer import NO_JOB, PushHeader, Refusal
from hypha_worker.leasing.lease_manager import LeaseError, LeaseState
from hypha_worker.tasks.resource_pushes import ResourcePushes
from hypha_worker.tasks.task_run import TaskRun

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushRouter:
    """Passes each push to the task or resource that it is for."""

    resources: ResourcePushes
    running: Callable[[], Sequence[TaskRun]]
    """Returns the attempts that run on this worker."""

    async def accept_push(self, peer: PeerId, header: PushHeader) -> FilePushTarget | Refusal:
        """Return where to store a file that a peer is about to push, or a refusal."""
        if header.delivery is not None:
            target = await self.resources.accept(peer, header)
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

        Those that are being stopped do not count: another one may run in their place already.
        """
        job = (job_id, scheduler)
        return [run for run in self.running() if (run.attempt.job_id, run.lease.scheduler) == job and not run.is_ending]

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
