"""The DiLoCo operator: a job's leases, tasks and end, around the training state. Pure: it returns effects.

Allocation → tasks (parameter server, then trainers) → training (`training_state`) → wait for the executors to exit →
complete the model → end. Created by `strategy`; the job runner calls it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, Final

from hypha_net import instrumentation
from hypha_net.transfer import PullSource
from hypha_proto.batch_reports import BatchesCounted, ReportBatches
from hypha_proto.contributions import AwaitCommit, CommitStatus, ContributionKnown, StateContribution
from hypha_proto.datasets import UnusableSlice
from hypha_proto.ids import PeerId
from hypha_proto.job_membership import JoinRound, RoundToJoin
from hypha_proto.round_membership import RefusalKnown, UpdateRefused
from hypha_proto.training_reports import ReportAnswer, ReportError, TrainingReport
from hypha_proto.transfer import PullRequest, PushHeader, Refusal
from hypha_scheduler.errors import files_unusable
from hypha_scheduler.jobs.resource_locations import peer_reason
from hypha_scheduler.strategies.avoidance import Avoidance
from hypha_scheduler.strategies.base import (
    Effects,
    EmitEvent,
    EndJob,
    JobContext,
    Lease,
    Operator,
    PushTarget,
    RetryAfter,
    RoleRequest,
    RunInBackground,
    SliceToUse,
    StopTask,
    TaskEnded,
    TaskNotStarted,
    TaskRef,
    TaskStarted,
    TaskState,
    TaskUpdate,
    TrafficCounts,
)
from hypha_scheduler.strategies.diloco import membership
from hypha_scheduler.strategies.diloco.commit import PAUSED, RoundCommits
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.contributions import MAX_REFUSALS
from hypha_scheduler.strategies.diloco.events import (
    continued_event,
    measured_effects,
    member_event,
    refused_event,
    round_closed_effects,
)
from hypha_scheduler.strategies.diloco.membership import MAX_RELEASES, Membership
from hypha_scheduler.strategies.diloco.records import (
    AnnouncedRecord,
    ContributedRecord,
    RefusedRecord,
    round_record,
    write_record,
)
from hypha_scheduler.strategies.diloco.restore import RestoredTraining
from hypha_scheduler.strategies.diloco.retries import OTHER_MODEL, describe, end_of_process
from hypha_scheduler.strategies.diloco.round_effects import (
    AnnounceRound,
    Fail,
    Joined,
    Left,
    Measured,
    NoRoom,
    Overdue,
    RoundClosed,
    StartReady,
    StepOverdue,
)
from hypha_scheduler.strategies.diloco.running_job import JobBuilder, RunningJob, TrainingData, task_key
from hypha_scheduler.strategies.diloco.sample_ledger import ALL
from hypha_scheduler.strategies.diloco.server_handover import ServerHandover
from hypha_scheduler.strategies.diloco.specs import AGGREGATE, TRAIN, role_requests
from hypha_scheduler.strategies.diloco.summary import summarize, summarize_restored

_log = logging.getLogger(__name__)

_EXECUTOR_EXIT_TIMEOUT: Final = 30.0
"""Seconds for executors to exit after they were sent `Done`."""
_CHECK_RATE: Final = 10e6
"""Bytes a second of a model that executors at least write, load and compare before they exit."""
_LAST_UPDATE_TIMEOUT: Final = 30.0
"""Seconds to wait for the last outer update after all workers have merged it."""
_DATA_INTERVAL: Final = 1.0
"""Seconds between two looks whether a data node is connected, while none is."""
_SET_ASIDE: Final = instrumentation.Counter(
    "hypha.scheduler.slices.set_aside", "{slice}", "Slices that no provider had as the manifest describes them."
)
_NO_TRAINER: Final = "no training task of the job runs on this peer"
_COMMIT: Final = "commit round"
_CHECKPOINT: Final = "write checkpoint"
_FINISH: Final = "finish model"


class _Phase(Enum):
    ALLOCATING = "allocating"
    TRAINING = "training"
    EXITING = "exiting"
    """The outcome is known; executors exit."""
    ENDED = "ended"


class DilocoOperator(Operator):
    """One running DiLoCo job."""

    def __init__(
        self, job: DilocoJobConfig, context: JobContext, data: TrainingData, restored: RestoredTraining, now: float
    ) -> None:
        """Start without leases.

        Args:
            job: configuration of the job.
            context: id, directory and scheduler of the job.
            data: its datasets and models.
            restored: what the journal of an interrupted run says.
            now: time at which the job began.
        """
        self._job = job
        self._context = context
        self._data = data
        self._restored = restored
        self._avoidance = Avoidance(MAX_RELEASES)
        self._used_avoided: set[str] = set()
        """Roles that took workers which they avoid, for lack of others, since the last recorded round."""
        self._began = self._now = now
        self._builder = JobBuilder(job, context, data, restored)
        self._phase = _Phase.ALLOCATING
        self._running: RunningJob | None = None
        self._membership: Membership
        self._handover: ServerHandover
        self._commits = RoundCommits(context, data.result, dict(restored.commits))
        self._update_bytes = 0
        self._is_dispatched = False
        self._exit_deadline: float | None = None
        self._last_update_deadline: float | None = None
        self._paused_since: float | None = None
        """Time since which the disk has no room for an outer update or its weights."""
        self._without_data: float | None = None
        """Time since which workers wait for a data node to be reachable."""
        self._look_again = now
        """Time at which to look whether one is."""

    # ---------------------------------------------------------------------------------------------------------- leases

    def on_start(self, now: float) -> Effects:
        """Wait for leases; a job whose rounds were all recorded by an earlier run is completed."""
        if self._restored.closed < self._job.rounds.update_rounds:
            return ()
        self._phase = _Phase.EXITING
        return self._stop_if_lost(self._restored.closed) or (RunInBackground(self._finish, _FINISH),)

    def role_requests(self) -> Sequence[RoleRequest]:
        """Return the workers that the job wants now: it looks for further ones and replacements until it ends."""
        if self._phase is _Phase.ALLOCATING:
            return role_requests(self._job)
        if self._running is None:
            return ()
        workers, server = role_requests(self._job, has_begun=True)
        return (self._membership.demand(workers, self._now), self._handover.demand(server, self._now))

    def on_leases_acquired(self, leases: Sequence[Lease], now: float) -> Effects:
        """Start the parameter server; the trainers follow when its worker has confirmed it. Later ones join."""
        self._now = now
        if self._phase is _Phase.TRAINING and self._running is not None:
            effects: membership.Effects = ()
            for lease in leases:
                self._avoidance.stop_seeking(lease.role)
                add = self._membership.add if lease.role == TRAIN else self._handover.add
                effects = (*effects, *add(lease, now))
            return self._translate(effects)
        if self._running is not None or self._phase is not _Phase.ALLOCATING:
            return ()
        running = self._begin(self._builder.begin(leases, now))
        term = self._builder.term_record(running)
        began = () if self._restored.began is not None else (write_record(self._builder.began(tuple(running.workers))),)
        return (*began, term, *self._start_ready())

    def _begin(self, running: RunningJob) -> RunningJob:
        self._membership = Membership(running, self._commits, self._avoidance, self._data.dataset.name)
        self._handover = ServerHandover(self._builder, running, self._membership)
        self._running = running
        self._phase = _Phase.TRAINING
        return running

    def on_tasks_adopted(self, tasks: Sequence[TaskRef], now: float) -> Effects:
        """Go on with the open round and seek who is missing, or begin it anew with other workers if none is left."""
        self._now = now
        can_go_on = self._running is None and self._phase is _Phase.ALLOCATING
        running = self._builder.adopt(tasks, now) if can_go_on else None
        if running is None:
            return tuple(StopTask(task, "the job goes on without this task") for task in tasks)
        self._begin(running)
        self._is_dispatched = True
        fields = {"round": self._restored.closed + 1, "workers": [str(task.lease.peer) for task in tasks]}
        why = "it was lost while the scheduler was away"
        lost = self._membership.lost_before(self._restored.workers, why)
        if running.server is None:
            effects = self._handover.seek(why, now)
        else:
            effects = running.training.rounds.announce_again(now)
            effects = (*effects, *running.commands.set_workers(running.workers), *running.commands.open())
            effects = (*effects, *self._handover.tell_workers())
        others = (task for task in tasks if task not in running.tasks)
        stops = (StopTask(task, "the job goes on without this task") for task in others)
        return self._translate((EmitEvent("taken_up", fields), *lost, *effects, *stops))

    def on_lease_lost(self, lease: Lease, reason: str, now: float) -> Effects:
        """Continue without a lost worker or parameter server until another one takes its place."""
        self._now = now
        if self._running is None:
            return ()
        self._membership.draining.discard(lease.id)
        self._handover.lease_lost(lease)
        task = self._running.task_of(lease.id)
        return () if task is None else self._task_lost(task, reason, now)

    def on_lease_draining(self, lease: Lease, seconds: float, now: float) -> Effects:
        """Let a training worker leave after its round, and the parameter server after its next one."""
        running = self._running
        if running is None:
            return ()
        if lease.role == TRAIN:
            self._membership.draining.add(lease.id)
            running.training.rounds.drain(lease.peer)
        elif running.server is not None and running.server.lease.id == lease.id:
            self._handover.is_draining = True
        return ()

    def on_allocation_timeout(self, role: str, reasons: str, now: float) -> Effects:
        """Fail the job, which cannot go on without the workers that it needs, unless there are some that it avoids."""
        self._now = now
        if self._phase not in (_Phase.ALLOCATING, _Phase.TRAINING):
            return ()
        avoided = self._avoidance.excluded(role, now)
        if avoided and role not in self._used_avoided:
            self._used_avoided.add(role)
            self._avoidance.seek_other(role, role, avoided, now)
            self._avoidance.give_in(now)
            return ()
        paused = None if self._running is None else self._running.training.rounds.pause.reason
        return self._fail(reasons if paused is None else f"{paused}\n{reasons}")

    # ----------------------------------------------------------------------------------------------------------- tasks

    def _start_ready(self) -> Effects:
        """Start the tasks whose inputs exist; they fetch the weights and the momentum of the last recorded round."""
        running = self._running
        if running is None or self._phase is not _Phase.TRAINING or not self._commits.is_settled:
            return ()
        started = running.start_ready(self._commits.last)
        if started or running.unconfirmed or self._is_dispatched:
            return started
        self._is_dispatched = True
        return (EmitEvent("dispatched", {"seconds": round(self._now - self._began, 3)}),)

    def on_task_update(self, task: TaskRef, update: TaskUpdate, now: float) -> Effects:
        """Handle the start or the end of a task; training says more by its reports."""
        running, self._now = self._running, now
        if running is None or task not in running.tasks:
            return ()
        running.unconfirmed.discard(task)
        match update:
            case TaskStarted():
                effects = self._translate(self._handover.started(now)) if task == running.server else ()
            case TaskNotStarted(reason):
                effects = self._task_lost(task, reason, now, is_failure=True)
            case TaskEnded():
                effects = self._task_ended(task, update, now)
            case _:
                return ()
        return (*effects, *self._start_ready())

    def _task_lost(self, task: TaskRef, why: str, now: float, *, is_failure: bool = False) -> Effects:
        """Go on without a task; `is_failure` counts it at its worker, which did not take it."""
        assert self._running is not None
        unneeded = self._is_unneeded(task)
        if not self._running.mark_ended(task, TaskState.FAILED):
            return ()
        if unneeded:
            return self._finish_if_over()
        role, peer = task.lease.role, task.lease.peer
        counted = self._avoidance.record_failure(role, peer, None, why, now) if is_failure else ()
        lost = self._handover.lost(why, now) if role == AGGREGATE else self._membership.lost(peer, why, now)
        return self._settle((*counted, *lost), now)

    def _is_unneeded(self, task: TaskRef) -> bool:
        """Return whether the job goes on without a task: it waits for exits, or another one has taken its place."""
        running = self._running
        assert running is not None
        if self._phase is not _Phase.TRAINING:
            return True
        if task.lease.role == AGGREGATE:
            return running.server is None or running.server.lease.id != task.lease.id
        return running.workers.get(task.lease.peer) != task.lease.id

    def _task_ended(self, task: TaskRef, end: TaskEnded, now: float) -> Effects:
        running = self._running
        assert running is not None
        unneeded = self._is_unneeded(task)
        if not running.mark_ended(task, end.state):
            return ()
        peer = task.lease.peer
        told_done = peer in running.training.told_done
        if (end.state is TaskState.FINISHED and told_done) or (end.state is TaskState.CANCELLED and unneeded):
            return self._finish_if_over()
        if told_done and end_of_process(end).exit_code == OTHER_MODEL:
            return self._fail(f"worker {peer}: {describe(end, with_lines=True)}")
        if unneeded:
            text = f"task {task_key(task)} on worker {peer}: {describe(end, with_lines=True)}"
            return (EmitEvent("warning", {"text": text}), *self._finish_if_over())
        if task.lease.role == AGGREGATE:
            why = describe(end, with_lines=True)
            excluded = self._avoidance.exclude(AGGREGATE, peer, why, now)
            return self._settle((*excluded, *self._handover.lost(why, now)), now)
        return self._settle(self._membership.retry_or_fail(task, end, now), now)

    # --------------------------------------------------------------------------------------------------- data, reports

    def slice_ahead(self, task: TaskRef, dataset: str, now: float) -> SliceToUse | RetryAfter | None:
        """Assign the next slice to a member that joins a round later."""
        return self.next_slice(task, dataset, now, ahead=True)

    def next_slice(
        self, task: TaskRef, dataset: str, now: float, *, ahead: bool = False
    ) -> SliceToUse | RetryAfter | None:
        """Assign the next slice to a member; the first ones wait until all workers are there, but for those `ahead`."""
        running = self._running
        if running is None or dataset != self._data.dataset.name or task.lease.role != TRAIN:
            return None
        peer = task.lease.peer
        if peer not in running.training.rounds.members:
            return None
        if not ahead and (seconds := running.barrier.remaining(peer, now)) > 0:
            return RetryAfter(seconds)
        span = running.training.slice_for(peer, now, ahead=ahead)
        if span is None:
            return None
        return SliceToUse(span.epoch, span.index, span.first, None if span.end == ALL else span.end)

    def on_slice_unusable(self, task: TaskRef, dataset: str, report: UnusableSlice, now: float) -> Effects:
        """Continue the job without a slice that a worker could not get from any provider."""
        running, peer = self._running, task.lease.peer
        if running is None or not running.training.slice_unusable(peer, report):
            _log.warning("%s cannot use slice %d, which is not assigned to it", peer, report.index)
            return ()
        _SET_ASIDE.add(1)
        left = running.training.slices.usable
        reasons = "; ".join(f"data node {failure.provider}: {failure.reason}" for failure in report.failures)
        where = self._data.dataset.describe(report.index)
        what = f"{where} at {reasons}; restore the file there, the data node's log says more"
        _log.warning("the job continues with %d slices, without %s", left, what)
        providers = {str(failure.provider): failure.reason for failure in report.failures}
        fields = {"slice": report.index, "worker": str(peer), "left": left, "providers": providers}
        event = EmitEvent("slice_set_aside", fields)
        if left:
            return (event,)
        count = len(self._data.dataset.samples)
        return (event, *self._fail(f"dataset {dataset!r}: all {count} slices were set aside; the last, {what}"))

    def on_training_report(self, task: TaskRef, report: TrainingReport, now: float) -> tuple[ReportAnswer, Effects]:
        """Process the report of an executor."""
        self._now = now
        if self._running is None:
            return ReportError(reason="the job has no workers yet"), ()
        peer = task.lease.peer
        answer, effects = self._running.training.report(peer, report, now)
        return answer, self._settle(effects, now)

    # -------------------------------------------------------------------------------------------------------- messages

    def on_message(self, source: TaskRef | None, name: str, message: Any, now: float) -> tuple[Any, Effects]:
        """Handle what workers state and ask about rounds, and what background work observes."""
        self._now = now
        if source is None:
            return None, self._pause(str(message), now) if name == PAUSED else self._continue(now)
        match message:
            case StateContribution():
                return self._state_contribution(source, message, now)
            case AwaitCommit() if source.lease.role != TRAIN:
                return CommitStatus(committed=False, reason=_NO_TRAINER), ()
            case AwaitCommit():
                return self._commits.answer(message), ()
            case JoinRound():
                return self._join(source, message, now)
            case ReportBatches():
                return self._report_batches(source, message, now)
            case UpdateRefused():
                return RefusalKnown(), self._update_refused(source, message, now)
        raise ValueError(f"a DiLoCo job has no message {name!r}")

    def _state_contribution(
        self, source: TaskRef, message: StateContribution, now: float
    ) -> tuple[ContributionKnown, Effects]:
        running = self._running
        if running is None or source.lease.role != TRAIN:
            return ContributionKnown(accepted=False, reason=_NO_TRAINER), ()
        weights = self._commits.weights_before(message.round)
        answer, effects = running.training.state_contribution(source.lease.peer, message, weights, now)
        return answer, self._settle(effects, now)

    def _report_batches(self, source: TaskRef, message: ReportBatches, now: float) -> tuple[BatchesCounted, Effects]:
        running = self._running
        if running is None or source.lease.role != TRAIN:
            return BatchesCounted(counted=0, reason=_NO_TRAINER), ()
        answer, effects = running.training.report_batches(source.lease.peer, message, now)
        return answer, self._settle(effects, now)

    def _join(self, source: TaskRef, question: JoinRound, now: float) -> tuple[RoundToJoin | RetryAfter, Effects]:
        if self._running is None or self._phase is not _Phase.TRAINING:
            return RoundToJoin(reason="the job trains no more"), ()
        answer, effects = self._membership.join(source, question, now)
        return answer, self._settle(effects, now)

    def _update_refused(self, source: TaskRef, message: UpdateRefused, now: float) -> Effects:
        """Continue a round without an update that the parameter server has refused or not received."""
        running, number = self._running, message.round
        if running is None or source != running.server or number <= self._commits.last:
            return ()
        running.gone_members.setdefault(number, set()).add(message.peer)
        training = running.training
        reason = peer_reason(message.reason)
        if not message.missing:
            return self._settle(training.update_refused(number, message.peer, reason, now), now)
        event = EmitEvent("update_missing", {"round": number, "worker": str(message.peer), "reason": reason})
        return self._settle((event, *training.update_missing(number, message.peer, reason, now)), now)

    def _pause(self, reason: str, now: float) -> Effects:
        """Let no deadline run out until there is room on the disk."""
        if self._paused_since is not None:
            return ()
        self._paused_since = now
        return (member_event("paused", reason),)

    def _continue(self, now: float) -> Effects:
        if self._paused_since is None:
            return ()
        seconds, self._paused_since = now - self._paused_since, None
        return (continued_event(seconds, "the disk has room again"), *self.on_suspended(seconds, now))

    def _wait_for_data(self, now: float) -> Effects:
        """Let no deadline run out until a data node is connected; workers train on with what they have."""
        name = self._data.dataset.name
        if self._without_data is not None and self._context.reaches(name):
            seconds, self._without_data = now - self._without_data, None
            why = f"a data node of dataset {name} is connected again"
            return (continued_event(seconds, why), *self.on_suspended(seconds, now))
        self._look_again = now + _DATA_INTERVAL
        if self._without_data is not None:
            return ()
        self._without_data = now
        return (member_event("paused", f"no data node of dataset {name} can be reached"),)

    def on_suspended(self, seconds: float, now: float) -> Effects:
        """Move all deadlines."""
        if self._running is not None:
            self._running.training.rounds.postpone(seconds, now - seconds)
        if self._last_update_deadline is not None:
            self._last_update_deadline += seconds
        return ()

    # ----------------------------------------------------------------------------------------------------------- files

    def on_pull_request(self, task: TaskRef, request: PullRequest) -> PullSource | Refusal:
        """Serve what `RoundCommits` has; the runner serves the start model."""
        return self._commits.find(task, request)

    def on_push_request(
        self, task: TaskRef, header: PushHeader, now: float
    ) -> tuple[PushTarget | Refusal | RetryAfter, Effects]:
        """Accept the next outer update of the parameter server."""
        self._now = now
        answer, effects = self._commits.receive(self._running, task, header)
        return answer, self._continue(now) if isinstance(answer, PushTarget) else self._translate(effects)

    def on_push_complete(self, task: TaskRef, header: PushHeader, path: Any, digest: str, now: float) -> Effects:
        """Record the round, which commits it."""
        self._now = now
        running, number = self._running, header.round
        state = None if running is None or task != running.server else self._commits.record(number, running.term)
        if running is None or state is None:
            return ()
        gone = running.gone_members.pop(number, set())
        members = running.commands.agreed_members(number, gone, header.samples or None)
        loss = running.training.rounds.loss_of(number, members)
        self._restored.losses.add(number, loss)
        self._data.result.note_good(self._restored.losses.good)
        updates, unused = running.training.commit(number, members)
        self._update_bytes = self._data.result.update_bytes
        record = round_record(number, running.term, updates, unused, state, loss)
        states_term = header.term is not None
        closing = running.training.rounds.step_committed(number, now) if states_term else ()
        commit = RunInBackground(partial(self._commits.commit, number), _COMMIT)
        for peer in members:
            running.retries.round_counted(peer)
            if not self._avoidance.is_excluded(TRAIN, peer, now):
                self._avoidance.record_success(TRAIN, peer, TRAIN, now)
        self._used_avoided.clear()
        effects = self._translate((record, commit, *closing, *self._handover.round_committed(now)))
        return (*effects, *(self._stop_if_lost(number) or self._check_outcome(now)))

    def _stop_if_lost(self, number: int) -> Effects:
        """End the job if its loss has exploded for good by the record of a round."""
        losses = self._restored.losses
        if not losses.is_lost(is_last=number >= self._job.rounds.update_rounds):
            return ()
        return self._fail(
            f"the loss has exploded: it is {losses.last:.3g} by round {number}, and was {losses.first:.3g} in the "
            f"first; {self._describe_good(losses.good)}. Start from it with a lower learning rate"
        )

    def _describe_good(self, good: int) -> str:
        """Return where the last good model is."""
        if (checkpoint := self._data.result.good_checkpoint()) is not None:
            return f"the last good model is {checkpoint}"
        missing = ", as no checkpoint was due after it (rounds.checkpoint_every)" if good else ""
        return f"the last good model is the start model{missing}"

    # --------------------------------------------------------------------------------------------------------- effects

    def on_effect_result(self, tag: str, outcome: object, now: float) -> Effects:
        """Handle that an update was applied, the model completed, or an announcement answered."""
        self._now = now
        running = self._running
        if running is not None and (effects := self._message_answered(running, tag, outcome, now)) is not None:
            return self._settle(effects, now)
        if isinstance(outcome, OSError):
            return self._fail(files_unusable(self._context.directory, [outcome]))
        if isinstance(outcome, Exception):
            return self._fail(str(outcome))
        if tag == _COMMIT:
            checkpoint = RunInBackground(self._data.result.write_checkpoint, _CHECKPOINT)
            return (checkpoint, *self._start_ready(), *self._check_outcome(now))
        if tag == _FINISH:
            self._phase = _Phase.ENDED
            return (*(self._translate(running.training.rounds.finish()) if running is not None else ()), EndJob())
        return ()

    def _message_answered(
        self, running: RunningJob, tag: str, outcome: object, now: float
    ) -> membership.Effects | None:
        """Handle the response to a message, also to one that is out of date; None if `tag` is of something else."""
        if tag == running.commands.members_tag:
            return self._members_answered(running, outcome, now)
        if tag == running.commands.workers_tag:
            return running.commands.workers_answered(outcome)
        told = self._handover.on_answer(tag, outcome, now)
        return () if told is None and tag not in (_COMMIT, _CHECKPOINT, _FINISH) else told

    def _members_answered(self, running: RunningJob, outcome: object, now: float) -> membership.Effects:
        failure, following = running.commands.members_answered(outcome, running.training.rounds.closed)
        if (agreed := running.commands.agreed) is not None:
            running.training.members_agreed(agreed.round, [peer for peer, _ in agreed.members])
        self._commits.wake()
        return (*(self._handover.replace(failure, now) if failure is not None else ()), *following)

    def _settle(self, effects: membership.Effects, now: float) -> Effects:
        """Return the runner's effects, and those of the end if all rounds are closed."""
        return (*self._translate(effects), *self._check_outcome(now))

    def _translate(self, effects: membership.Effects) -> Effects:
        """Return the runner's effects for those of the job."""
        return tuple(found for effect in effects for found in self._translated(effect))

    def _translated(self, effect: membership.AnyEffect) -> Effects:
        assert self._running is not None
        match effect:
            case Fail(reason):
                return self._fail(reason)
            case NoRoom(reason):
                return self._pause(reason, self._now)
            case StartReady():
                return self._start_ready()
            case RoundClosed():
                self._running.training.loss = effect.loss
                return round_closed_effects(effect, self._update_bytes)
            case Measured():
                self._note_evaluation(effect)
                return measured_effects(effect)
            case Left(peer, number):
                return self._translate(self._membership.left(peer, number))
            case Joined(peer, number):
                return self._translate(self._membership.joined(peer, number))
            case Overdue(peer, reason):
                return self._translate(self._membership.release(peer, reason, self._now))
            case StepOverdue(reason):
                return self._translate(self._handover.replace(reason, self._now))
            case ContributedRecord():  # without terms, a worker may be ahead of the records
                return (write_record(effect),) if effect.round == self._commits.last + 1 else ()
            case RefusedRecord():
                return self._update_was_refused(self._running, effect)
            case AnnounceRound(number, members):
                self._running.gone_members.get(number, set()).difference_update(peer for peer, _ in members)
                announced = AnnouncedRecord(round=number, term=self._running.term, members=members)
                recorded = (write_record(announced),) if number == self._commits.last + 1 else ()
                return (*recorded, *self._running.commands.announce(effect))
            case _:
                return (effect,)

    def _update_was_refused(self, running: RunningJob, refused: RefusedRecord) -> Effects:
        """Record a refusal; go on without a worker of which too many updates were refused."""
        peer, count = refused.worker, running.training.contributions.refusals[refused.worker]
        known = (write_record(refused), refused_event(refused, count))
        if count < MAX_REFUSALS or peer not in running.workers:
            return known
        why = f"{count} of its updates were refused, the last because {refused.reason}"
        return (*known, *self._translate(self._membership.release(peer, why, self._now, exclude=True)))

    def _note_evaluation(self, measured: Measured) -> None:
        """Let what a worker has evaluated decide on the best checkpoint."""
        found = measured.values
        if (loss := found.get("evaluation_loss")) is not None:
            samples = found.get("evaluation_samples", 1.0)
            self._data.result.evaluated(measured.round, loss, found.get("accuracy"), samples)

    # ------------------------------------------------------------------------------------------------------------- end

    def _fail(self, reason: str) -> Effects:
        self._phase = _Phase.ENDED
        return (EndJob(failure=reason),)

    def _check_outcome(self, now: float) -> Effects:
        """Wait for the executors to exit once all rounds are closed and the last outer update was applied."""
        running = self._running
        assert running is not None
        if self._phase is not _Phase.TRAINING:
            return ()
        is_recorded = self._data.result.round >= self._job.rounds.update_rounds
        if not running.training.rounds.is_over and not (is_recorded and running.server is None):
            return ()
        if not is_recorded:
            self._last_update_deadline = self._last_update_deadline or now + _LAST_UPDATE_TIMEOUT
            return ()
        self._phase = _Phase.EXITING
        # executors that were told `Done` evaluate the last weights and check the model before they exit
        check = self._data.result.model_bytes() / _CHECK_RATE
        self._exit_deadline = now + max(_EXECUTOR_EXIT_TIMEOUT, running.training.rounds.evaluation_timeout) + check
        return (*self._stop_idle(running), *self._finish_if_over())

    def _stop_idle(self, running: RunningJob) -> Effects:
        """Stop the executors that nothing tells of the end: they prepare, or their parameter server is gone."""
        training = running.training
        return tuple(
            StopTask(task, "the job is done")
            for task in running.running_tasks()
            if task.lease.role == TRAIN
            and task.lease.peer not in training.told_done
            and (running.server is None or training.rounds.is_preparing(task.lease.peer))
        )

    def _finish_if_over(self) -> Effects:
        """Complete the model when all executors have exited."""
        assert self._running is not None
        if self._phase is not _Phase.EXITING or self._running.running_tasks() or self._exit_deadline is None:
            return ()
        self._exit_deadline = None
        return (RunInBackground(self._finish, _FINISH),)

    def next_deadline(self) -> float | None:
        """Return the deadline of the open round, of the last outer update, or of executors that exit."""
        if self._phase is _Phase.EXITING:
            return self._exit_deadline
        if self._paused_since is not None or self._phase is not _Phase.TRAINING or self._running is None:
            return None
        if self._running.training.rounds.is_over:
            return self._last_update_deadline
        return self._running.training.rounds.deadline() if self._without_data is None else self._look_again

    def on_deadline(self, now: float) -> Effects:
        """Continue without what is late, or fail."""
        self._now = now
        assert self._running is not None
        if self._phase is _Phase.EXITING:
            return self._stop_waiting(self._running)
        if self._running.training.rounds.is_over:
            missing = self._data.result.round + 1
            return self._fail(f"the outer update of round {missing} did not come from the parameter server")
        if self._without_data is not None or not self._context.reaches(self._data.dataset.name):
            return self._wait_for_data(now)
        return self._settle(self._running.training.rounds.expire(now), now)

    async def _finish(self) -> None:
        """Complete the result, then audit the job."""
        await self._commits.finish()
        if self._data.prove is not None:
            await self._data.prove()

    def _stop_waiting(self, running: RunningJob) -> Effects:
        """Complete the model although executors have not exited."""
        text = "task {} at {} did not end in time"
        warnings = tuple(
            EmitEvent("warning", {"text": text.format(task_key(task), task.lease.peer)})
            for task in running.running_tasks()
        )
        self._exit_deadline = None
        return (*warnings, RunInBackground(self._finish, _FINISH))

    def summary(self, traffic: Mapping[PeerId, TrafficCounts]) -> Mapping[str, object]:
        """Return rounds, samples, loss, the share of each peer, and where the model is."""
        running, restored = self._running, self._restored
        if running is None:  # all rounds were recorded by an earlier run
            found = summarize_restored(restored)
        else:
            found = summarize(running.training, running.everybody, traffic)
        return {**found, **self._data.result.summary()}
