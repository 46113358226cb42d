"""The training workers of a running job: they are added, start again, leave, and are replaced. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.job_membership import JoinRound, RoundToJoin
from hypha_scheduler.allocation.auction import RoleRequest
from hypha_scheduler.strategies.avoidance import Avoidance
from hypha_scheduler.strategies.base import (
    Effect,
    EmitEvent,
    Lease,
    RetryAfter,
    StopTask,
    TaskEnded,
    TaskRef,
    TaskState,
)
from hypha_scheduler.strategies.diloco import training_state
from hypha_scheduler.strategies.diloco.commit import RoundCommits
from hypha_scheduler.strategies.diloco.events import member_event, replaced_event
from hypha_scheduler.strategies.diloco.records import JoinedRecord, LeftRecord, assigned_record, write_record
from hypha_scheduler.strategies.diloco.retries import FailJob, Replace, Restart, describe
from hypha_scheduler.strategies.diloco.round_effects import Fail, NoRoom, StartReady
from hypha_scheduler.strategies.diloco.running_job import RunningJob
from hypha_scheduler.strategies.diloco.specs import TRAIN

_ASK_AGAIN: Final = 5.0
"""Seconds after which a worker that may not begin yet is looked at again."""
MAX_RELEASES: Final = 2
"""How often a worker is released, because it is overdue or its task did not start, until it is excluded."""

AnyEffect = Effect | training_state.Effect | NoRoom | StartReady
"""Effect for the runner, or one that the operator translates."""
Effects = tuple[AnyEffect, ...]


@dataclass(slots=True)
class Membership:
    """The workers of one job. `running` has their tasks, and `training` what they do."""

    running: RunningJob
    commits: RoundCommits
    avoidance: Avoidance
    dataset: str
    """Name of the job's dataset."""
    draining: set[uuid.UUID] = field(default_factory=set)
    """Leases of workers that end when their tasks have ended."""
    _stopped: set[uuid.UUID] = field(default_factory=set)
    """Leases whose tasks this job has stopped."""

    # ---------------------------------------------------------------------------------------------------------- demand

    def demand(self, request: RoleRequest, now: float) -> RoleRequest:
        """Return the demand for workers: replacements for the draining ones are sought while those finish a round."""
        if self.is_over:
            return replace(request, count=0, minimum=0)
        unwanted = self.avoidance.unwanted(TRAIN, now)
        return replace(request, count=request.count + len(self.draining), excluded=unwanted)

    @property
    def is_over(self) -> bool:
        """Whether all rounds are recorded: nobody begins any more."""
        return self.commits.last >= self.running.training.rounds.settings.rounds

    # ------------------------------------------------------------------------------------------------ workers that come

    def add(self, lease: Lease, now: float) -> Effects:
        """Start the task of another worker, which trains as soon as it has joined a round."""
        running, peer = self.running, lease.peer
        if self.is_over or peer in running.workers:
            return ()
        joined = write_record(JoinedRecord(worker=peer, member=running.add_worker(lease)))
        added = running.training.worker_added(peer, now)
        return (joined, *added, *running.commands.set_workers(running.workers), StartReady())

    def join(self, source: TaskRef, question: JoinRound, now: float) -> tuple[RoundToJoin | RetryAfter, Effects]:
        """Answer with which round a worker begins, once the parameter server knows it and the weights are there.

        The first ones begin together.
        """
        running, peer = self.running, source.lease.peer
        if running.workers.get(peer) != source.lease.id:
            return RoundToJoin(reason="the job goes on without this worker"), ()
        if not self.commits.is_settled:
            return RetryAfter(_ASK_AGAIN), ()
        if peer not in running.commands.known:
            return RetryAfter(_ASK_AGAIN), running.commands.list_workers()
        if (seconds := running.barrier.remaining(peer, now)) > 0:
            return RetryAfter(seconds), ()
        weights = self.commits.weights_before(self.commits.last + 1)
        answer, effects = running.training.join_round(peer, weights, now)
        is_answer = answer.round is not None or answer.reason
        return answer if is_answer else RetryAfter(_ASK_AGAIN), effects

    def joined(self, peer: PeerId, number: int) -> Effects:
        """Record with which round a worker begins, unless the slices that it was assigned tell that."""
        slot = self.running.slots.held.get(peer)
        if slot is None:
            return ()
        fields = {"worker": str(peer), "round": number, "member": slot.member}
        event = member_event("worker_joined", "its executor is ready", **fields)
        if not self.running.training.rounds.joins(peer):
            return (event,)
        ahead = (assigned_record(peer, self.dataset, span) for span in self.running.training.slices.held_by(peer))
        return (write_record(JoinedRecord(worker=peer, member=slot.member, round=number)), *ahead, event)

    # -------------------------------------------------------------------------------------------------- workers that go

    def left(self, peer: PeerId, number: int) -> Effects:
        """Go on without a draining worker, after a round in which its update counts."""
        why = "its worker ends, and its update counts"
        return (member_event("worker_left", why, worker=str(peer), round=number), *self._remove(peer, "it drains"))

    def lost(self, peer: PeerId, why: str, now: float) -> Effects:
        """Go on without a worker, and let another one take its place."""
        event = EmitEvent("worker_lost", {"worker": str(peer), "reason": why})
        removed = self._remove(peer, why)
        if not self.is_over:
            removed = (replaced_event(peer, TRAIN, why), *removed)
        return (event, *removed, *self.running.training.worker_lost(peer, why, now))

    def _remove(self, peer: PeerId, why: str) -> Effects:
        running = self.running
        running.remove_worker(peer)
        return (write_record(LeftRecord(worker=peer, reason=why)), *running.commands.set_workers(running.workers))

    def lost_before(self, workers: Iterable[PeerId], why: str) -> Effects:
        """Report workers of an earlier run of the scheduler that do not train any more."""
        effects: list[Effect] = []
        for peer in workers:
            if peer not in self.running.workers:
                effects.append(EmitEvent("worker_lost", {"worker": str(peer), "reason": why}))
                effects.append(replaced_event(peer, TRAIN, why))
                effects.append(write_record(LeftRecord(worker=peer, reason=why)))
        return tuple(effects)

    def release(self, peer: PeerId, why: str, now: float, *, exclude: bool = False) -> Effects:
        """Cancel the task of a worker and give its lease back; it is lost when that has ended."""
        lease = self.running.workers.get(peer)
        task = None if lease is None else self.running.task_of(lease)
        if exclude:
            excluded = self.avoidance.exclude(TRAIN, peer, why, now)
        else:
            excluded = self.avoidance.record_failure(TRAIN, peer, None, why, now)
        if task is None:
            return excluded
        self._stopped.add(task.lease.id)
        return (*excluded, StopTask(task, why))

    def retry_or_fail(self, task: TaskRef, end: TaskEnded, now: float) -> Effects:
        """Start an executor again that has ended before the job was done, go on without its worker, or fail."""
        peer, lease = task.lease.peer, task.lease.id
        if end.state is TaskState.CANCELLED:
            why = f"its executor was cancelled: {end.reason or 'no reason was given'}"
            if lease in self._stopped or lease in self.draining:
                return self.lost(peer, why, now)
            return self._avoid(peer, why, now)  # its worker gave it up: the disk is full
        is_refused = self.running.training.contributions.refusals[peer] > 0
        known = replace(end, exit_code=None) if is_refused else end  # what a refusal ends is no fault of the job
        at_once = self.running.training.micro_batches.get(peer, self.running.training.rounds.settings.batch_size)
        match self.running.retries.count_failure(peer, lease, known, at_once):
            case FailJob(reason):
                server = self.running.placed.server
                named = f"\n({server} is the job's parameter server)" if str(server) in reason else ""
                return (Fail(f"task {task.name} on worker {peer}: {reason}{named}"),)
            case Replace(reason):
                return self._avoid(peer, reason, now)
            case Restart() as restart:
                return self._restart(task, end, restart, now)

    def _avoid(self, peer: PeerId, why: str, now: float) -> Effects:
        """Go on without a worker, and let one at another peer take its place."""
        return (*self.avoidance.exclude(TRAIN, peer, why, now), *self.lost(peer, why, now))

    def _restart(self, task: TaskRef, end: TaskEnded, restart: Restart, now: float) -> Effects:
        running, peer, why = self.running, task.lease.peer, describe(end)
        if self.is_over or task.lease.id in self.draining:
            return self.lost(peer, why, now)
        effects = running.training.executor_lost(peer, why, now)
        running.tasks[replace(task, attempt=task.attempt + 1)] = TaskState.WAITING
        slot = running.slots.add(peer)
        fields = {"worker": str(peer), "round": self.commits.last + 1, "micro_batch": restart.micro_batch}
        event = member_event("worker_restarted", why, **fields)
        return (*effects, write_record(JoinedRecord(worker=peer, member=slot.member)), event, StartReady())
