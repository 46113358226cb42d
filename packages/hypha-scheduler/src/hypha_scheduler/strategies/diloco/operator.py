"""The DiLoCo operator: a job's leases, tasks and end, around the training state. Pure: it returns effects.

Allocation → tasks (parameter server, then trainers) → training (`training_state`) → wait for the executors to exit →
complete the model → end. Created by `strategy`; the job runner calls it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Final

from hypha_net import instrumentation
from hypha_net.transfer import PullSource
from hypha_proto.datasets import UnusableSlice
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import JobSpec, Reference
from hypha_proto.progress import Progress, ProgressError, ProgressResponse
from hypha_proto.round_membership import RefusalKnown, UpdateRefused
from hypha_proto.task_resources import Gone, LocateResource, ResourceLocation
from hypha_proto.transfer import OUTER_UPDATE, PullRequest, PushHeader, Refusal
from hypha_scheduler.errors import files_unusable
from hypha_scheduler.jobs.task_graph import Task, TaskGraph, TaskState
from hypha_scheduler.strategies.base import (
    DatasetView,
    Effects,
    EmitEvent,
    EndJob,
    JobContext,
    Lease,
    PushTarget,
    RetryAfter,
    RoleRequest,
    RunInBackground,
    SliceRefusedError,
    SliceToUse,
    StartTask,
    TaskEnded,
    TaskNotice,
    TaskNotStarted,
    TaskRef,
    TaskStarted,
    TaskUpdate,
    TrafficCounts,
)
from hypha_scheduler.strategies.diloco import round_announcer, rounds
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.events import late_event, left_event, measured_effects, round_closed_effects
from hypha_scheduler.strategies.diloco.restore import Restored
from hypha_scheduler.strategies.diloco.result_model import ResultModel
from hypha_scheduler.strategies.diloco.round_announcer import RoundAnnouncer
from hypha_scheduler.strategies.diloco.rounds import AnnounceRound, Fail, Late, Left, Measured, RoundClosed, Rounds
from hypha_scheduler.strategies.diloco.slices import LedgerFullError, NoUsableSliceError, SliceLedger
from hypha_scheduler.strategies.diloco.specs import (
    AGGREGATE,
    TRAIN,
    PlacedJob,
    evaluation_shares,
    role_requests,
    round_settings,
)
from hypha_scheduler.strategies.diloco.start_barrier import StartBarrier
from hypha_scheduler.strategies.diloco.summary import summarize
from hypha_scheduler.strategies.diloco.training_state import TrainingState

_log = logging.getLogger(__name__)

START_MODEL: Final = "start-model"
PARAMETER_SERVER: Final = "parameter-server"
_EXECUTOR_EXIT_TIMEOUT: Final = 30.0
"""Seconds for executors to exit after they were sent `Done`."""
_LAST_UPDATE_TIMEOUT: Final = 30.0
"""Seconds to wait for the last outer update after all workers have merged it."""
_SET_ASIDE: Final = instrumentation.Counter(
    "hypha.scheduler.slices.set_aside", "{slice}", "Slices that no provider had as the manifest describes them."
)
_APPLY: Final = "apply outer update"
_FINISH: Final = "finish model"
_CANCEL: Final = "cancel"


def diloco_tasks(server: tuple[PeerId, uuid.UUID], workers: Iterable[tuple[PeerId, uuid.UUID]]) -> list[Task]:
    """Build the tasks of a job from (peer, lease) pairs; train tasks depend on the parameter server's task."""
    model = frozenset({START_MODEL})
    aggregate = Task("aggregate", AGGREGATE, *server, inputs=model, outputs=frozenset({PARAMETER_SERVER}))
    trains = [
        Task(f"train-{number}", TRAIN, *worker, inputs=model | {PARAMETER_SERVER})
        for number, worker in enumerate(workers, 1)
    ]
    return [aggregate, *trains]


class _Phase(Enum):
    ALLOCATING = "allocating"
    TRAINING = "training"
    EXITING = "exiting"
    """The outcome is known; executors exit."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class JobData:
    """What a DiLoCo job works with, once it is prepared."""

    dataset: DatasetView
    model: Reference
    """Source of the start model."""
    result: ResultModel
    preprocessor: Reference | None = None
    evaluation: DatasetView | None = None


@dataclass(slots=True)
class _Running:
    """State of a job whose workers are allocated."""

    graph: TaskGraph
    tasks: dict[str, TaskRef]
    training: TrainingState
    placed: PlacedJob
    announcer: RoundAnnouncer
    barrier: StartBarrier
    unconfirmed: set[str]
    """Tasks that were dispatched and not confirmed yet."""


class DilocoOperator:
    """One running DiLoCo job."""

    def __init__(
        self, job: DilocoJobConfig, context: JobContext, data: JobData, restored: Restored, now: float
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
        self._began = now
        self._demand: tuple[RoleRequest, ...] = role_requests(job)
        self._phase = _Phase.ALLOCATING
        self._running: _Running | None = None
        self._received_round = data.result.round
        """Last round whose outer update was received."""
        self._gone: set[uuid.UUID] = set()
        """Leases that are no longer held."""
        self._exit_deadline: float | None = None
        self._last_update_deadline: float | None = None

    # ---------------------------------------------------------------------------------------------------------- leases

    def on_start(self, now: float) -> Effects:
        """Wait for leases."""
        return ()

    def role_requests(self) -> Sequence[RoleRequest]:
        """Return the configured workers, and once they are found those that are held: none is replaced."""
        return self._demand

    def on_leases_acquired(self, leases: Sequence[Lease], now: float) -> Effects:
        """Start the parameter server; the trainers follow when its worker has confirmed it."""
        if self._running is not None:
            return ()
        counts = {role: sum(lease.role == role for lease in leases) for role in (TRAIN, AGGREGATE)}
        self._demand = tuple(replace(request, count=counts[request.role]) for request in self._demand)
        self._running = self._prepare(leases, now)
        self._phase = _Phase.TRAINING
        self._running.graph.provide(START_MODEL)
        return self._start_ready(self._running, now)

    def _prepare(self, leases: Sequence[Lease], now: float) -> _Running:
        trains = sorted((lease for lease in leases if lease.role == TRAIN), key=lambda lease: lease.peer)
        [server] = [lease for lease in leases if lease.role == AGGREGATE]
        peers = tuple(lease.peer for lease in trains)
        settings = round_settings(self._job, len(trains))
        ledger = SliceLedger(self._data.dataset.samples, self._job.seed, settings.batch_size)
        ledger.restore(self._restored.used_slices)
        training = TrainingState(
            Rounds(settings, peers, now, closed=self._restored.closed),
            ledger,
            server.peer,
            samples=self._restored.samples.copy(),
            batches=self._restored.batches.copy(),
            loss=self._restored.loss,
        )
        graph = TaskGraph(diloco_tasks((server.peer, server.id), [(lease.peer, lease.id) for lease in trains]))
        by_lease = {lease.id: lease for lease in leases}
        return _Running(
            graph=graph,
            tasks={task.name: TaskRef(task.name, by_lease[task.lease]) for task in graph.tasks},
            training=training,
            placed=self._placed_job(server.peer, peers),
            announcer=RoundAnnouncer(self._context.job_id, server.peer, settings.timeout),
            barrier=StartBarrier(len(trains), now),
            unconfirmed=set(),
        )

    def _placed_job(self, server: PeerId, peers: tuple[PeerId, ...]) -> PlacedJob:
        data, shares = self._data, dict[PeerId, Reference]()
        if (found := data.evaluation) is not None:
            shares = evaluation_shares(peers, [found.provider], found.name, len(found.samples))
        return PlacedJob(
            self._context.job_id, self._job, self._context.scheduler, server, peers, data.model, data.preprocessor,
            shares, self._restored.closed,
        )  # fmt: skip

    def on_lease_lost(self, lease: Lease, reason: str, now: float) -> Effects:
        """Continue without a lost worker."""
        self._drop_demand(lease)
        task = self._task_on(lease)
        return () if task is None else self._task_lost(task, reason, now)

    def on_lease_draining(self, lease: Lease, seconds: float, now: float) -> Effects:
        """Let a training worker leave after its round; the parameter server runs on until its worker ends."""
        if self._running is not None and lease.role == TRAIN:
            self._running.training.rounds.drain(lease.peer)
        return ()

    def _drop_demand(self, lease: Lease) -> None:
        """Ask for no lease in place of one that is no longer held."""
        if lease.id in self._gone:
            return
        self._gone.add(lease.id)
        self._demand = tuple(
            replace(request, count=max(0, request.count - 1)) if request.role == lease.role else request
            for request in self._demand
        )

    def _task_on(self, lease: Lease) -> Task | None:
        return None if self._running is None else self._running.graph.of_lease(lease.id)

    def on_allocation_timeout(self, role: str, reasons: str, now: float) -> Effects:
        """Fail the job: it cannot begin without its workers."""
        return self._fail(reasons)

    # ----------------------------------------------------------------------------------------------------------- tasks

    def _start_ready(self, running: _Running, now: float) -> Effects:
        """Start the tasks whose inputs exist, once those before them are confirmed."""
        if running.unconfirmed:
            return ()
        ready = running.graph.ready()
        for task in ready:
            running.graph.start(task.name)
            running.unconfirmed.add(task.name)
        if not ready:
            return (EmitEvent("dispatched", {"seconds": round(now - self._began, 3)}),)
        return tuple(StartTask(running.tasks[task.name], self._spec_of(running, task)) for task in ready)

    def _spec_of(self, running: _Running, task: Task) -> JobSpec:
        return running.placed.aggregate_spec() if task.role == AGGREGATE else running.placed.train_spec(task.peer)

    def on_task_update(self, task: TaskRef, update: TaskUpdate, now: float) -> Effects:
        """Handle the start or the end of a task."""
        running, graph_task = self._running, self._task_on(task.lease)
        if running is None or graph_task is None:
            return ()
        was_unconfirmed = task.name in running.unconfirmed
        running.unconfirmed.discard(task.name)
        match update:
            case TaskStarted():
                return self._start_ready(running, now) if was_unconfirmed else ()
            case TaskNotStarted(reason):
                self._drop_demand(task.lease)
                return self._task_lost(graph_task, reason, now) + self._continue_start(running, was_unconfirmed, now)
            case TaskEnded():
                return self._task_ended(graph_task, update, now) + self._continue_start(running, was_unconfirmed, now)

    def _continue_start(self, running: _Running, was_unconfirmed: bool, now: float) -> Effects:
        """Start what waited for the confirmation of a task that has ended without it."""
        return self._start_ready(running, now) if was_unconfirmed and self._phase is _Phase.TRAINING else ()

    def _task_lost(self, task: Task, why: str, now: float) -> Effects:
        assert self._running is not None
        if not self._running.graph.end(task.name, TaskState.FAILED):
            return ()
        if self._is_unneeded(task):
            return self._finish_if_over()
        if task.role == AGGREGATE:
            return self._fail(f"the parameter server {task.peer} was lost: {why}")
        return self._worker_lost(task.peer, why, now)

    def _is_unneeded(self, task: Task) -> bool:
        """Return whether the job is complete without a task: it waits for exits, or the task's worker has left."""
        assert self._running is not None
        return self._phase is not _Phase.TRAINING or task.peer in self._running.training.left

    def _worker_lost(self, peer: PeerId, why: str, now: float) -> Effects:
        assert self._running is not None
        event = EmitEvent("worker_lost", {"worker": str(peer), "reason": why})
        effects = self._translate(self._running.training.worker_lost(peer, why, now))
        return (event, *effects, *self._check_outcome(now))

    def _task_ended(self, task: Task, end: TaskEnded, now: float) -> Effects:
        assert self._running is not None
        if not self._running.graph.end(task.name, end.state):
            return ()
        self._drop_demand(self._running.tasks[task.name].lease)
        reason = end.reason or "it exited before the job was done"
        unneeded = self._is_unneeded(task)
        if end.state is TaskState.CANCELLED and task.role == TRAIN and not unneeded:
            return self._worker_lost(task.peer, f"its executor was cancelled: {reason}", now)
        told_done = task.peer in self._running.training.told_done
        if (end.state is TaskState.FINISHED and told_done) or (end.state is TaskState.CANCELLED and unneeded):
            return self._finish_if_over()
        code = "" if end.exit_code is None else f", exit code {end.exit_code}"
        lines = "".join(f"\n  | {line}" for line in end.last_lines)
        return self._task_failed(task, f"executor {end.state.value}{code}: {reason}{lines}")

    def _task_failed(self, task: Task, what: str) -> Effects:
        assert self._running is not None
        server = self._running.placed.server
        text = f"task {task.name} on worker {task.peer}: {what}"
        if server != task.peer and str(server) in what:
            text += f"\n({server} is the job's parameter server)"
        if not self._is_unneeded(task):
            return self._fail(text)
        return (EmitEvent("warning", {"text": text}), *self._finish_if_over())

    # --------------------------------------------------------------------------------------------------- data, reports

    def next_slice(self, task: TaskRef, dataset: str, now: float) -> SliceToUse | RetryAfter | None:
        """Assign the next slice to a member; the first ones wait until all workers are there."""
        running = self._running
        if running is None or dataset != self._data.dataset.name or task.lease.role != TRAIN:
            return None
        peer = task.lease.peer
        if peer not in running.training.rounds.members:
            return None
        if (seconds := running.barrier.remaining(peer, now)) > 0:
            return RetryAfter(seconds)
        try:
            assignment = running.training.slice_for(peer, now)
        except (LedgerFullError, NoUsableSliceError) as error:
            raise SliceRefusedError(str(error)) from None
        return None if assignment is None else SliceToUse(assignment.epoch, assignment.index)

    def on_slice_unusable(self, task: TaskRef, dataset: str, report: UnusableSlice, now: float) -> Effects:
        """Continue the job without a slice that a worker could not get from any provider."""
        running, peer = self._running, task.lease.peer
        if running is None or not running.training.slice_unusable(peer, report):
            _log.warning("%s cannot use slice %d, which is not assigned to it", peer, report.index)
            return ()
        _SET_ASIDE.add(1)
        left, what = running.training.slices.usable, self._describe_unusable(report)
        _log.warning("the job continues with %d slices, without %s", left, what)
        providers = {str(failure.provider): failure.reason for failure in report.failures}
        fields = {"slice": report.index, "worker": str(peer), "left": left, "providers": providers}
        event = EmitEvent("slice_set_aside", fields)
        if left:
            return (event,)
        count = len(self._data.dataset.samples)
        return (event, *self._fail(f"dataset {dataset!r}: all {count} slices were set aside; the last, {what}"))

    def _describe_unusable(self, report: UnusableSlice) -> str:
        """Return what is wrong with a slice, and what to do."""
        reasons = "; ".join(f"data node {failure.provider}: {failure.reason}" for failure in report.failures)
        where = self._data.dataset.describe(report.index)
        return f"{where} at {reasons}; restore the file there, the data node's log says more"

    def on_progress(self, task: TaskRef, progress: Progress, now: float) -> tuple[ProgressResponse, Effects]:
        """Process the report of an executor."""
        if self._running is None:
            return ProgressError(reason="the job has no workers yet"), ()
        answer, effects = self._running.training.report(task.lease.peer, progress, now)
        return answer, (*self._translate(effects), *self._check_outcome(now))

    def on_message(self, source: TaskRef | None, name: str, message: Any, now: float) -> tuple[Any, Effects]:
        """Handle the parameter server's refusal of a member's update."""
        running = self._running
        if not isinstance(message, UpdateRefused) or source is None or running is None:
            return RefusalKnown(), ()
        if source.lease.role != AGGREGATE:
            return RefusalKnown(), ()
        number, member, why = message.round, message.peer, message.reason
        event = EmitEvent("update_refused", {"round": number, "worker": str(member), "reason": why})
        effects = self._translate(running.training.update_refused(number, member, why, now))
        return RefusalKnown(), (event, *effects)

    def on_task_notice(self, task: TaskRef, notice: TaskNotice, now: float) -> Effects:
        """Ignore it: no task of this job is a `TaskSpec`."""
        return ()

    def on_locate(self, task: TaskRef, request: LocateResource, now: float) -> tuple[ResourceLocation, Effects]:
        """Say that there are no results."""
        return ResourceLocation(gone=Gone(reason="tasks of this job have no resources")), ()

    def on_pull_request(self, task: TaskRef, request: PullRequest) -> PullSource | Refusal:
        """Refuse: executors pull the start model and the preprocessor only."""
        return Refusal(reason=f"this scheduler does not serve {request.dataset[:80]!r}")

    def on_push_request(
        self, task: TaskRef, header: PushHeader | None, now: float
    ) -> tuple[PushTarget | Refusal, Effects]:
        """Accept the next outer update of the parameter server."""
        if task.lease.role != AGGREGATE:
            return Refusal(reason="only the job's parameter server may push to its scheduler"), ()
        if header is not None and header.kind != OUTER_UPDATE:
            return Refusal(reason=f"a scheduler accepts {OUTER_UPDATE}, not {header.kind[:40]}"), ()
        expected = self._received_round + 1
        number = expected if header is None else header.round
        if number < expected:
            return Refusal(reason=f"the outer update of round {number} was already received"), ()
        if number > expected:
            why = f"the outer update of round {expected} never came: the parameter server sends that of {number}"
            return Refusal(reason=f"the outer update of round {expected} is missing"), self._fail(why)
        if header is not None and (lacking := self._data.result.lacks_room(header.size)):
            return Refusal(reason="the scheduler has no room for the outer update"), self._fail(lacking)
        name = f"round-{number}-{uuid.uuid4().hex[:8]}.safetensors"
        return PushTarget(self._context.directory / "updates" / name, self._data.result.largest_update()), ()

    def on_late_push(
        self, task: TaskRef, header: PushHeader | None, now: float
    ) -> tuple[PushTarget | Refusal, Effects]:
        """Refuse: an outer update of a lost parameter server is of no use."""
        return Refusal(reason="no task of this job runs there"), ()

    def on_late_push_complete(self, task: TaskRef, header: PushHeader | None, path: Any, now: float) -> None:
        """Refuse it."""

    def on_push_complete(self, task: TaskRef, header: PushHeader | None, path: Any, digest: str, now: float) -> Effects:
        """Add an outer update to the model."""
        self._received_round += 1
        apply = partial(self._data.result.apply_update, path, self._received_round)
        return (RunInBackground(apply, _APPLY),)

    # --------------------------------------------------------------------------------------------------------- effects

    def on_effect_result(self, tag: str, outcome: object, now: float) -> Effects:
        """Handle that an update was applied, the model completed, or an announcement answered."""
        running = self._running
        if tag == round_announcer.TAG and running is not None:
            failure, following = running.announcer.on_result(outcome, running.training.rounds.closed)
            return (*(self._fail(failure) if failure is not None else ()), *following)
        if isinstance(outcome, OSError):
            return self._fail(files_unusable(self._context.directory, [outcome]))
        if isinstance(outcome, Exception):
            return self._fail(str(outcome))
        if tag == _APPLY:
            return self._check_outcome(now)
        if tag == _FINISH and running is not None:
            self._phase = _Phase.ENDED
            return (*self._translate(running.training.finish()), EndJob())
        return ()

    def _translate(self, effects: Iterable[rounds.Effect]) -> Effects:
        """Return the runner's effects for those of the training state."""
        assert self._running is not None
        found: list[Any] = []
        for effect in effects:
            match effect:
                case Fail(reason):
                    found += self._fail(reason)
                case RoundClosed():
                    used = self._running.training.slices.take_used()
                    found += round_closed_effects(effect, self._data.result.update_bytes, used)
                case Measured():
                    found += measured_effects(effect)
                case Late():
                    found.append(late_event(effect))
                case Left():
                    found.append(left_event(effect))
                case AnnounceRound():
                    found += self._running.announcer.announce(effect)
        return tuple(found)

    # ------------------------------------------------------------------------------------------------------------- end

    def _fail(self, reason: str) -> Effects:
        self._phase = _Phase.ENDED
        return (EndJob(failure=reason),)

    def _check_outcome(self, now: float) -> Effects:
        """Wait for the executors to exit once all rounds are closed and the last outer update was applied."""
        assert self._running is not None
        if self._phase is not _Phase.TRAINING or not self._running.training.rounds.over:
            return ()
        if self._data.result.round < self._job.rounds.update_rounds:
            self._last_update_deadline = self._last_update_deadline or now + _LAST_UPDATE_TIMEOUT
            return ()
        self._phase = _Phase.EXITING
        self._exit_deadline = now + _EXECUTOR_EXIT_TIMEOUT
        return self._finish_if_over()

    def _finish_if_over(self) -> Effects:
        """Complete the model when all executors have exited."""
        assert self._running is not None
        if self._phase is not _Phase.EXITING or not self._running.graph.over or self._exit_deadline is None:
            return ()
        self._exit_deadline = None
        return (RunInBackground(self._data.result.finish, _FINISH),)

    def next_deadline(self) -> float | None:
        """Return the deadline of the open round, of the last outer update, or of executors that exit."""
        if self._phase is _Phase.EXITING:
            return self._exit_deadline
        if self._phase is not _Phase.TRAINING or self._running is None:
            return None
        if self._running.training.rounds.over:
            return self._last_update_deadline
        return self._running.training.rounds.deadline()

    def on_deadline(self, now: float) -> Effects:
        """Continue without what is late, or fail."""
        assert self._running is not None
        if self._phase is _Phase.EXITING:
            return self._stop_waiting(self._running)
        if self._running.training.rounds.over:
            missing = self._data.result.round + 1
            return self._fail(f"the outer update of round {missing} did not come from the parameter server")
        return (*self._translate(self._running.training.expire(now)), *self._check_outcome(now))

    def _stop_waiting(self, running: _Running) -> Effects:
        """Complete the model although executors have not exited."""
        text = "task {} at {} did not end in time"
        warnings = tuple(
            EmitEvent("warning", {"text": text.format(task.name, task.peer)}) for task in running.graph.running()
        )
        self._exit_deadline = None
        return (*warnings, RunInBackground(self._data.result.finish, _FINISH))

    def on_command(self, command: str, now: float) -> Effects:
        """Cancel the job.

        Raises:
            ValueError: another command.
        """
        if command != _CANCEL:
            raise ValueError(f"a DiLoCo job has no command {command!r}; known: {_CANCEL}")
        return self._fail("its owner cancelled it")

    def summary(self, traffic: Mapping[PeerId, TrafficCounts]) -> Mapping[str, object]:
        """Return rounds, samples, loss, the share of each peer, and where the model is."""
        assert self._running is not None
        found = summarize(self._running.training, self._running.placed.workers, traffic)
        return {**found, "model_dir": str(self._data.result.directory)}
