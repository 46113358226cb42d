"""Operator of a job of tasks: starts what is ready, keeps track of outputs, and makes again what was lost. Pure.

`retries` decides whether another attempt follows one that has not finished. Outputs stay with the workers that made
them until nothing needs them any more; those that are kept are brought to the scheduler. Created by `strategy`.
"""

from __future__ import annotations

import heapq
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from hypha_net.errors import NoSpaceError
from hypha_net.transfer import PullSource
from hypha_proto.ids import PeerId
from hypha_proto.task_resources import (
    RELEASE_OUTPUTS,
    LocateResource,
    NotYet,
    PullFiles,
    PushBegun,
    ReleaseOutputs,
    ResourceLocation,
)
from hypha_proto.tasks import StoredOutput, TaskProgress, TaskResource, TaskSpec
from hypha_proto.texts import quote
from hypha_proto.transfer import PullRequest, Refusal
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.jobs.resource_locations import MAX_LOCATED_FILES, gone
from hypha_scheduler.strategies import base
from hypha_scheduler.strategies.avoidance import Avoidance
from hypha_scheduler.strategies.base import (
    Effect,
    Effects,
    EmitEvent,
    EndJob,
    RoleRequest,
    StartTask,
    StopTask,
    TaskRef,
)
from hypha_scheduler.strategies.tasks import records, retries
from hypha_scheduler.strategies.tasks.graph import Key, Result, TaskGraph
from hypha_scheduler.strategies.tasks.instances import Instance, Instances, Phase
from hypha_scheduler.strategies.tasks.outputs import (
    FETCH,
    MadeOutput,
    OutputCollection,
    OutputHolders,
    answer_to_pull,
    answer_to_push,
)
from hypha_scheduler.strategies.tasks.placement import Placement, TaskLease
from hypha_scheduler.strategies.tasks.summary import summarize

MAX_FAILURES_OF_WORKER: Final = 3
"""Attempts in a row that fail at a worker, of different instances, until it is excluded for a while."""
BACKSTOP: Final = 30.0
"""Seconds after its timeout at which an attempt is stopped whose worker has not ended it."""
RETRY: Final = 1.0
"""Seconds after which a worker asks again for a result that is being made, and for a lease to rest."""
PROGRESS_INTERVAL: Final = 5.0
"""Seconds between two events about the progress of one attempt."""
_MAX_DELIVERIES: Final = 4
"""Answers to one attempt about one resource, alternately to pull and to push; what then fails is lost.

Later answers are to pull: each answer to push has holders send all files.
"""
_MAX_LOCATED: Final = 200
"""Largest number of files whose place is stated with the start of an attempt."""
_RELEASE_DELAY: Final = 0.5
"""Seconds for which outputs that nothing needs any more wait for others, to be released together."""
_RELEASE_AT_ONCE: Final = 64
"""Number of such outputs that does not wait."""
_RELEASE_AT_ONCE_BYTES: Final = 64 << 20
"""Their size in bytes that does not wait: it is taken from the storage of leases."""
_RELEASE_TIMEOUT: Final = 5.0
"""Seconds that the end of the job waits for holders to remove outputs."""
_RELEASE: Final = "release"
_PUSH: Final = "push"
_NO_RUN: Final = "the attempt is not the one that runs"


@dataclass(slots=True, eq=False)
class RunningAttempt:
    """An attempt that runs."""

    task: TaskRef
    instance: Instance
    began: float
    is_lost: bool = False
    """Whether its lease is."""
    stopped: str | None = None
    """Why this operator has stopped it."""
    counts: bool = False
    """Whether it has failed by that."""
    deliveries: Counter[str] = field(default_factory=Counter)
    """Answers about each resource."""
    is_ready: bool = False
    """Whether its executor has started."""
    progress: TaskProgress | None = None
    """The latest progress of which no event tells."""
    progress_due: float = 0.0
    """When an event may tell of progress again."""


@dataclass(slots=True)
class TasksOperator(base.Operator):
    """One running job."""

    graph: TaskGraph
    context: base.JobContext
    earlier: Sequence[Mapping[str, Any]] = ()
    """What earlier runs of the job have recorded."""
    definition: str | None = None
    """Digest of the tasks as their owner has defined them; that of `graph` if None. URLs in `graph` may be signed."""
    instances: Instances = field(init=False)
    holders: OutputHolders = field(default_factory=OutputHolders)
    avoidance: Avoidance = field(default_factory=lambda: Avoidance(MAX_FAILURES_OF_WORKER))
    placement: Placement = field(init=False)
    collection: OutputCollection = field(init=False)
    _running: dict[uuid.UUID, RunningAttempt] = field(default_factory=dict)
    """By lease."""
    _made: dict[Key, StoredOutput] = field(default_factory=dict)
    """What the last attempt has made, also when it is released."""
    _losses: Counter[Key] = field(default_factory=Counter)
    """How often an output was lost."""
    _copies_missing: int = 0
    """Outputs that are kept and not yet here."""
    _deadlines: list[tuple[float, int, Callable[[float], object]]] = field(default_factory=list)
    """When something is due, and what is called with the time then."""
    _count: int = 0
    """Deadlines so far."""
    _releases: int = 0
    """Requests for releases that are not answered."""
    _release_at: float | None = None
    """When outputs that nothing needs are released at the latest; None while there are none."""
    _ends_at: float | None = None
    """When the job ends at the latest: all is done but releases."""
    _is_over: bool = False
    _starts: list[Effect] = field(default_factory=list)
    _records: list[Effect] = field(default_factory=list)
    _others: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.instances = Instances(
            self.graph, lambda ready: self.placement.enqueue(ready), self.context.first_attempt + 1
        )
        self.placement = Placement(self.graph, self.instances, self._input_holders, self.avoidance)
        self.collection = OutputCollection(self.context, self.holders)
        self._copies_missing = sum(len(task.keep) * len(task.names) for task in self.graph.tasks.values())
        self.instances.begin()
        self._replay()

    def _input_holders(self, instance: Instance) -> list[PeerId]:
        """Return the workers that hold inputs of an instance; results of several instances are everywhere."""
        found = []
        for task, output in instance.task.inputs:
            names = self.graph.tasks[task].names
            stored = self.holders.get((names[0], output)) if len(names) == 1 else None
            if stored is not None and stored.holder is not None:
                found.append(stored.holder)
        return found

    # --------------------------------------------------------------------------------------------------------- restart

    def _replay(self) -> None:
        """Take the records of earlier runs.

        Raises:
            JobFailedError: a record is malformed.
        """
        for record in self.earlier:
            try:
                self._replay_record(record)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise JobFailedError(f"journal: the record {quote(record)} is malformed: {error!r}") from None
        for instance in self.instances.by_name.values():
            for key in ((instance.name, output) for output in sorted(instance.task.keep)):
                if (stored := self.holders.get(key)) is not None and stored.copy is None:
                    self.collection.add(key)
        list(self.holders.released())
        self._records.clear()

    def _replay_record(self, record: Mapping[str, Any]) -> None:
        instance = self.instances.by_name[record["task"]]
        match record["record"]:
            case records.TASK_FINISHED:
                instance.attempts, instance.seconds = int(record["attempts"]), float(record["seconds"])
                instance.worker = PeerId.parse(record["worker"])
                self._finish(instance, instance.worker, None, records.outputs_of(record))
            case records.TASK_FAILED:
                instance.failures += 1
            case records.OUTPUT_LOST:
                self._lose((instance.name, record["output"]), record["reason"])
            case records.OUTPUT_FETCHED:
                key, path = (instance.name, record["output"]), Path(record["path"])
                if key in self.holders and path.exists():
                    self._take_copy(key, path)

    # ---------------------------------------------------------------------------------------------------------- events

    def on_start(self, now: float) -> Effects:
        """Begin the job, or go on with it."""
        self._records.append(records.begun(self.definition or self.graph.digest()))
        return self._settle(now)

    def role_requests(self) -> Sequence[RoleRequest]:
        """Return the leases that are wanted."""
        return [] if self._is_over or self._ends_at is not None else self.placement.requests()

    def on_leases_acquired(self, leases: Sequence[base.Lease], now: float) -> Effects:
        """Use new leases."""
        self.placement.add(leases)
        return self._settle(now)

    def on_lease_lost(self, lease: base.Lease, reason: str, now: float) -> Effects:
        """Note that what was made on a lease may be gone; the end of what runs on it is reported after this."""
        self.placement.leases.pop(lease.id, None)
        self.holders.suspect(lease.id)
        if (run := self._running.get(lease.id)) is not None:
            run.is_lost = True
        return self._settle(now)

    def on_lease_draining(self, lease: base.Lease, seconds: float, now: float) -> Effects:
        """Start nothing more on a lease; let what runs there end, and bring here what was made there."""
        if (held := self.placement.leases.get(lease.id)) is None:
            return ()
        held.is_draining = True
        if (run := self._running.get(lease.id)) is not None and run.stopped is None:
            run.stopped = "its worker drains"
            self._others.append(StopTask(run.task, run.stopped, keep_lease=True, drain_seconds=seconds))
        self._evacuate(lease.id)
        return self._settle(now)

    def on_allocation_timeout(self, role: str, reasons: str, now: float) -> Effects:
        """Fail the job if nothing runs that could free workers, and none are avoided."""
        if self._running:
            return ()
        if not self.avoidance.give_in(now):
            self._fail(reasons)
        return self._settle(now)

    def on_task_update(self, task: TaskRef, update: base.TaskUpdate, now: float) -> Effects:
        """Handle what has happened to an attempt."""
        run = self._run_of(task)
        if run is None:
            return ()
        match update:
            case base.TaskReady():
                self._ready(run, now)
            case base.TaskProgressed(progress):
                run.progress = progress
                if now >= run.progress_due:
                    run.progress_due = now + PROGRESS_INTERVAL
                    return self._progress_events(run)
            case base.TaskNotStarted() | base.TaskEnded():
                return self._attempt_ended(run, update, now)
        return ()

    def _attempt_ended(self, run: RunningAttempt, update: base.TaskNotStarted | base.TaskEnded, now: float) -> Effects:
        task = run.task
        del self._running[task.lease.id]
        self._records += self._progress_events(run)
        held = self.placement.leases.get(task.lease.id)
        if held is not None:
            held.instance = None
        if isinstance(update, base.TaskNotStarted):
            self._not_started(run, held, update.reason, now)
        elif update.state is base.TaskState.FINISHED:
            self._finished(run, update, now)
        else:
            self._retry_or_fail(run, held, update, now)
        return self._settle(now)

    def _ready(self, run: RunningAttempt, now: float) -> None:
        """Set the deadline of an attempt whose executor has started."""
        timeout = run.instance.task.table.timeout
        if timeout is not None and not run.is_ready:
            reason = f"its worker did not end it after its timeout of {timeout:g} s"
            self._set_deadline(now + timeout + BACKSTOP, lambda _now: self._stop_for_good(run, reason))
        run.is_ready = True

    def _progress_events(self, run: RunningAttempt) -> tuple[EmitEvent, ...]:
        """Return the event about progress that none tells of yet."""
        progress, run.progress = run.progress, None
        if progress is None:
            return ()
        said = {key: value for key, value in msgspec.structs.asdict(progress).items() if value is not None}
        return (EmitEvent("task_progress", self._fields(run) | said),)

    def next_deadline(self) -> float | None:
        """Return when something is due."""
        avoided = None if self._is_over else self.avoidance.next_deadline(self.placement.now)
        first = self._deadlines[0][0] if self._deadlines else None
        return min((at for at in (self._ends_at, avoided, first) if at is not None), default=None)

    def on_deadline(self, now: float) -> Effects:
        """Go on with what was to wait."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, act = heapq.heappop(self._deadlines)
            act(now)
        if self._ends_at is not None and self._ends_at <= now:
            self._releases = 0
        return self._settle(now)

    def on_command(self, command: str, now: float) -> Effects:
        """Handle a command of the job's owner.

        Raises:
            ValueError: it is not ``cancel``.
        """
        base.Operator.on_command(self, command, now)
        self._fail(base.BY_OWNER)
        return self._settle(now)

    def on_effect_result(self, tag: str, outcome: object, now: float) -> Effects:
        """Handle that something was fetched, released, or is being pushed."""
        kind = tag.partition(":")[0]
        if kind == FETCH:
            self._fetched(tag, outcome, now)
        elif kind == _RELEASE:
            self._releases = max(0, self._releases - 1)
        elif kind == _PUSH:
            self._push_begun(tag, outcome)
        return self._settle(now)

    def summary(self, traffic: Mapping[PeerId, base.TrafficCounts]) -> Mapping[str, object]:
        """Return the tasks and their outputs for ``result.json``."""
        paths = {key: stored.copy for key in self._made if (stored := self.holders.get(key)) is not None}
        found = summarize(self.graph.job, self.instances.by_name.values(), self._made, paths, traffic)
        return {**found, "excluded": self.avoidance.summary()}

    # ----------------------------------------------------------------------------------------------- ends of attempts

    def _run_of(self, task: TaskRef) -> RunningAttempt | None:
        run = self._running.get(task.lease.id)
        return run if run is not None and run.task == task and not self._is_over else None

    def _not_started(self, run: RunningAttempt, held: TaskLease | None, reason: str, now: float) -> None:
        self.placement.leases.pop(run.task.lease.id, None)  # the runner has released it
        if held is not None and held.is_surplus:
            self.instances.run_again(run.instance)
        else:
            self._retry_lost(run, f"it was not started: {reason}", now)

    def _finished(self, run: RunningAttempt, end: base.TaskEnded, now: float) -> None:
        instance, worker = run.instance, run.task.lease.peer
        instance.worker, instance.seconds = worker, now - run.began
        self._records.append(records.finished(instance.name, instance.attempts, worker, instance.seconds, end.outputs))
        self._finish(instance, worker, None if run.is_lost else run.task.lease.id, end.outputs)
        self._records += self.avoidance.record_success(run.task.lease.role, worker, instance.name, now)
        if run.task.lease.id in self.placement.leases and self.placement.leases[run.task.lease.id].is_draining:
            self._evacuate(run.task.lease.id)

    def _finish(
        self, instance: Instance, worker: PeerId, lease: uuid.UUID | None, outputs: Iterable[StoredOutput]
    ) -> None:
        """Record that an instance has finished, what exists by that, and what is needed no longer."""
        for output in outputs:
            key = (instance.name, output.name)
            if key in self.holders:  # it was lost only in part, and this attempt made the rest
                self.holders.release(worker, output)
                continue
            self._made[key] = output
            self.holders.add(key, MadeOutput(output, worker, lease, is_suspect=lease is None))
            self.instances.add_output(instance, output.name)
            if output.name in instance.task.keep:
                self.collection.add(key)
        is_last = self.instances.mark_finished(instance)
        for output in outputs:
            self._release_if_unneeded((instance.name, output.name))
        if is_last:
            for result in instance.task.inputs:
                if not self.instances.is_used(result):
                    for key in self.instances.keys(result):
                        self._release_if_unneeded(key)

    def _retry_or_fail(self, run: RunningAttempt, held: TaskLease | None, end: base.TaskEnded, now: float) -> None:
        """Let another attempt follow one that has not finished, or fail the job."""
        instance = run.instance
        if run.counts:
            self.placement.leases.pop(run.task.lease.id, None)  # it was stopped with its lease
            self._retry_failed(run, end, run.stopped or end.reason, now)
        elif run.stopped is not None:
            self.instances.run_again(instance)
        elif run.is_lost:
            self._retry_lost(run, f"its lease was lost: {end.reason}", now)
        elif end.state is base.TaskState.CANCELLED:
            if held is not None:
                held.rests_until = now + RETRY
                self._set_deadline(held.rests_until)
            self._retry_lost(run, f"its worker gave it back: {end.reason}", now)
        elif end.resource is not None and (table := instance.task.resource(end.resource)) is not None and table.result:
            self._retry_lacking(run, (table.result.task, table.result.output), end.reason, now)
        else:
            self._retry_failed(run, end, end.reason, now)

    def _retry_failed(self, run: RunningAttempt, end: base.TaskEnded, reason: str, now: float) -> None:
        instance = run.instance
        self._records.append(records.failed(instance.name, reason))
        self._avoid_worker(run, reason, now)
        role, held = instance.task.role.name, self.placement.held_peers(instance.task.role.name)
        usable = (peer for peer in held if not self.avoidance.is_excluded(role, peer, self.placement.now))
        may_be_workers = self.avoidance.may_be_at_fault(role, instance.failed_at, usable)
        failure = retries.count_failure(instance, reason, end.last_lines, may_be_workers=may_be_workers)
        self._fail_or_tell(run, failure, f"failed: {reason}")
        self.instances.run_again(instance)

    def _avoid_worker(self, run: RunningAttempt, reason: str, now: float) -> None:
        """Start the next attempts elsewhere if possible; exclude a worker at which several fail."""
        lease = run.task.lease
        run.instance.failed_at.add(lease.peer)
        self._records += self.avoidance.record_failure(lease.role, lease.peer, run.instance.name, reason, now)

    def _retry_lost(self, run: RunningAttempt, reason: str, now: float) -> None:
        instance = run.instance
        self._avoid_worker(run, reason, now)
        self._fail_or_tell(run, retries.count_loss(instance, reason), reason)
        if run.is_lost:
            self.instances.run_again(instance)
        else:
            self._run_again_later(instance, instance.losses, now)

    def _retry_lacking(self, run: RunningAttempt, result: Result, reason: str, now: float) -> None:
        """Handle that an attempt could not be given a result: it is tried once more, then made again."""
        instance = run.instance
        failure = retries.count_lack(instance, result, reason)
        self._fail_or_tell(run, failure, f"it could not be given {result[1]} of {result[0]}: {reason}")
        for key in list(self.instances.keys(result)):
            if (stored := self.holders.get(key)) is not None:
                self._doubt(run, key, stored, reason)
        self._avoid_worker(run, reason, now)
        self._run_again_later(instance, instance.lacks, now)

    def _fail_or_tell(self, run: RunningAttempt, failure: str | None, reason: str) -> None:
        """Fail the job, or tell that an attempt is followed by another one."""
        if failure is not None:
            self._fail(failure)
        else:
            self._records.append(EmitEvent("task_retry", {**self._fields(run), "reason": reason}))

    def _run_again_later(self, instance: Instance, losses: int, now: float) -> None:
        self.instances.run_again(instance, after_pause=True)
        self._set_deadline(now + retries.pause_after(losses), lambda _now: self.instances.end_pause(instance))

    def _stop_unready(self, run: RunningAttempt, now: float) -> None:
        """Stop an attempt whose executor has not started, unless an input of it is being made again."""
        seconds = run.instance.task.table.fetch_timeout
        if run.is_ready or self._running.get(run.task.lease.id) is not run:
            return
        if all(self.instances.is_complete(result) for result in run.instance.task.inputs):
            self._stop_for_good(run, f"its executor did not start within its fetch_timeout of {seconds:g} s")
        else:
            self._set_deadline(now + seconds, partial(self._stop_unready, run))

    def _stop_for_good(self, run: RunningAttempt, reason: str) -> None:
        """Stop an attempt, with its lease; it has failed."""
        if self._running.get(run.task.lease.id) is run and not run.counts:
            run.stopped = reason
            run.counts = True
            self._others.append(StopTask(run.task, reason))

    def _set_deadline(self, at: float, act: Callable[[float], object] = lambda _now: None) -> None:
        """Call `act` with the time when it is due, and settle."""
        self._count += 1
        heapq.heappush(self._deadlines, (at, self._count, act))

    def _fields(self, run: RunningAttempt) -> dict[str, object]:
        return {"task": run.instance.name, "attempt": run.task.attempt, "worker": str(run.task.lease.peer)}

    # --------------------------------------------------------------------------------------------------------- outputs

    def _is_kept(self, key: Key) -> bool:
        return key[1] in self.instances.by_name[key[0]].task.keep

    def _is_needed(self, key: Key) -> bool:
        """Return whether an output is used by something unfinished, or is to be brought here."""
        instance = self.instances.by_name[key[0]]
        if self.instances.is_used((instance.task.name, key[1])):
            return True
        stored = self.holders.get(key)
        return self._is_kept(key) and (stored is None or stored.copy is None)

    def _release_if_unneeded(self, key: Key) -> None:
        """Have an output removed at its holder that nothing needs; a copy of what is kept stays."""
        stored = self.holders.get(key)
        if stored is None or self._is_needed(key):
            return
        self.holders.release(stored.holder, stored.output)
        stored.holder = None
        if stored.copy is None:
            self._remove(key)

    def _remove(self, key: Key) -> None:
        stored = self.holders.remove(key)
        if stored is not None:
            self.instances.remove_output(self.instances.by_name[key[0]], key[1])
            if stored.copy is not None and self._is_kept(key):
                self._copies_missing += 1

    def _lose_holder(self, key: Key, reason: str) -> None:
        """Use an output of this holder no longer: its copy, or make it again."""
        stored = self.holders.get(key)
        if stored is None:
            return
        if stored.copy is not None and stored.holder is not None:
            stored.holder = None
            return
        self._records.append(records.lost(*key, reason))
        self._records.append(EmitEvent("output_lost", {"task": key[0], "output": key[1], "reason": reason}))
        self._lose(key, reason)

    def _lose(self, key: Key, reason: str) -> None:
        """Record that an output does not exist, and have it made again if it is needed."""
        stored = self.holders.get(key)
        if stored is None:
            return
        self.holders.release(stored.holder, stored.output)
        self._remove(key)
        if (failure := retries.count_lost_output(self._losses, key, reason)) is not None:
            self._fail(failure)
        elif self._is_needed(key):
            self._make_again(self.instances.by_name[key[0]])

    def _make_again(self, instance: Instance) -> None:
        """Run an instance again, and before it those whose results it lacks; without recursion, chains are long."""
        again = [instance]
        while again:
            instance = again.pop()
            if instance.phase is not Phase.FINISHED:
                continue
            self.instances.run_again(instance)
            for result in instance.task.inputs:
                if not self.instances.is_complete(result):
                    lacking = (key for key in self.instances.keys(result) if key not in self.holders)
                    again += [self.instances.by_name[name] for name, _ in lacking]

    def _take_copy(self, key: Key, path: Path) -> None:
        self.holders.add_copy(key, path)
        if self._is_kept(key):
            self._copies_missing -= 1
        self._release_if_unneeded(key)

    def _evacuate(self, lease: uuid.UUID) -> None:
        """Bring here what was made on a lease whose worker ends."""
        for key in self.holders.of_lease(lease):
            self.collection.add(key, first=True)

    def _fetched(self, tag: str, outcome: object, now: float) -> None:
        """Handle that an output was brought here, or could not be."""
        key = self.collection.end(tag)
        if key is None or (stored := self.holders.get(key)) is None:
            return
        is_check = bool(stored.reporters)
        if isinstance(outcome, OSError | NoSpaceError) and not (is_check and not self._is_kept(key)):
            self._fail(f"output {key[1]} of task {key[0]} cannot be stored: {outcome}; free space on that disk")
        elif not isinstance(outcome, Exception):
            path = self.collection.path(self.instances.by_name[key[0]], key[1])
            self._records.append(records.fetched(*key, str(path)))
            stored.reporters.clear()
            self._take_copy(key, path)
        elif not stored.is_suspect and not is_check and self.collection.may_try_again(stored.output.dataset, outcome):
            self._set_deadline(now + RETRY, lambda _now: self.collection.add(key))
        elif self._is_needed(key):
            self._lose_holder(key, str(outcome))

    # ------------------------------------------------------------------------------------------------------- resources

    def on_locate(self, task: TaskRef, request: LocateResource, now: float) -> tuple[ResourceLocation, Effects]:
        """Say where a result is, after what the worker has found about its holders."""
        run = self._run_of(task)
        if run is None:
            return gone(_NO_RUN), ()
        table = run.instance.task.resource(request.resource)
        if table is None or table.result is None:
            return gone(f"task {run.instance.name} uses no result under this name"), ()
        result = (table.result.task, table.result.output)
        self._take_failures(run, request, result)
        if self._is_over:
            return gone("the job is over"), self._settle(now)
        if (checked := self._checked(result)) is not None:
            return ResourceLocation(not_yet=NotYet(task=checked, retry_ms=round(RETRY * 1000))), self._settle(now)
        if self.instances.is_complete(result):
            return self._deliver(run, request.resource, result), self._settle(now)
        effects = self._settle(now)
        lacking = next(key for key in self.instances.keys(result) if key not in self.holders)
        if self.instances.ready.total() and run.stopped is None:  # no lease is free for what makes it, or leads to it
            run.stopped = f"it waits for {result[1]} of {lacking[0]}, which is made again"
            effects = (*effects, StopTask(run.task, run.stopped, keep_lease=True))
        return ResourceLocation(not_yet=NotYet(task=lacking[0], retry_ms=round(RETRY * 1000))), effects

    def _checked(self, result: Result) -> str | None:
        """Return a maker of a result whose output is being checked."""
        found = ((key, self.holders.get(key)) for key in self.instances.keys(result))
        return next(
            (key[0] for key, stored in found if stored is not None and stored.reporters and not stored.copy), None
        )

    def _take_failures(self, run: RunningAttempt, request: LocateResource, result: Result) -> None:
        """Note which holders a worker could not get a result from."""
        reasons = {failure.peer: failure for failure in request.failures}
        if not reasons:
            return
        run.deliveries[request.resource] = max(1, run.deliveries[request.resource])  # the first came with the start
        for key in list(self.instances.keys(result)):
            stored = self.holders.get(key)
            if stored is None:
                continue
            failure = reasons.get(stored.holder or self.context.scheduler)
            if failure is None:
                continue
            tried_all = run.deliveries[request.resource] >= _MAX_DELIVERIES
            if failure.is_permanent or stored.is_suspect or tried_all:
                self._doubt(run, key, stored, f"{failure.peer}: {failure.reason}")

    def _doubt(self, run: RunningAttempt, key: Key, stored: MadeOutput, reason: str) -> None:
        """Handle that a worker cannot get an output: it is lost if another one cannot, or the scheduler.

        The way between the two may be at fault, and not the holder. What the scheduler fetches serves as a copy.
        """
        stored.reporters.add(run.task.lease.peer)
        if stored.is_suspect or stored.copy is not None or len(stored.reporters) > 1:
            self._lose_holder(key, reason)
        else:
            self.collection.add(key, first=True)

    def _deliver(self, run: RunningAttempt, resource: str, result: Result) -> ResourceLocation:
        """Answer how a worker gets a result that exists: as the job says, and the next time the other way."""
        parts = self._parts(result)
        if (count := sum(len(part.output.files) for part in parts)) > MAX_LOCATED_FILES:
            what = f"task {run.instance.name} uses {result[1]} of {result[0]}, which has {count} files"
            self._fail(f"{what}, over the limit of {MAX_LOCATED_FILES}; pack them into an archive")
            return gone("it has too many files")
        number = run.deliveries[resource]
        run.deliveries[resource] += 1
        consumer = run.task.lease.peer
        can_push = all(part.holder is not None and part.holder != consumer for part in parts)
        wants_push = number < _MAX_DELIVERIES and (self.graph.job.transfer == "push") is (number % 2 == 0)
        if not (can_push and wants_push and any(part.output.files for part in parts)):
            return answer_to_pull(parts, self.context.scheduler)
        job, attempt = self.context.job_id, run.task.attempt
        delivery = uuid.uuid5(job, f"{run.instance.name}/{attempt}/{resource}/{number}")
        tag = f"{_PUSH}:{run.task.lease.id}:{attempt}:{resource}"
        answer, messages = answer_to_push(parts, job, delivery, consumer, tag)
        self._others += messages
        return answer

    def _push_begun(self, tag: str, outcome: object) -> None:
        """Suspect what a holder does not push; the worker that waits for it asks again."""
        if isinstance(outcome, PushBegun) and outcome.accepted:
            return
        _, lease, _, resource, holder = tag.split(":")
        run = self._running.get(uuid.UUID(lease))
        table = None if run is None else run.instance.task.resource(resource)
        if table is None or table.result is None:
            return
        for key in self.instances.keys((table.result.task, table.result.output)):
            if (stored := self.holders.get(key)) is not None and str(stored.holder) == holder:
                stored.is_suspect = True

    def on_pull_request(self, task: TaskRef, request: PullRequest) -> PullSource | Refusal:
        """Serve the files of copies."""
        stored = self.holders.copy_of(request.dataset)
        if stored is None or stored.copy is None or request.index >= len(stored.output.files):
            return base.Operator.on_pull_request(self, task, request)
        file = stored.output.files[request.index]
        return PullSource(stored.copy / file.path if file.path else stored.copy, file.digest)

    # --------------------------------------------------------------------------------------------------------- effects

    def _settle(self, now: float) -> Effects:
        """Start what can start, and return the effects: starts first, since they wait for no record."""
        if not self._is_over:
            for held, instance in self.placement.place(now):
                self._start(held, instance, now)
            self.placement.mark_surplus()
            self._others += self.collection.start(self.instances.by_name)
            self._end_if_done(now)
            self._release_some(now)
        effects = (*self._starts, *self._records, *self._others)
        self._starts, self._records, self._others = [], [], []
        return effects

    def _start(self, held: TaskLease, instance: Instance, now: float) -> None:
        task = TaskRef(instance.name, held.lease, self.instances.mark_running(instance))
        run = self._running[held.lease.id] = RunningAttempt(task, instance, now)
        if self.avoidance.is_excluded(held.lease.role, held.lease.peer, now):
            self._records.append(EmitEvent("excluded_worker_used", {**self._fields(run), "role": held.lease.role}))
        self._set_deadline(now + instance.task.table.fetch_timeout, partial(self._stop_unready, run))
        self._starts.append(StartTask(task, self._with_locations(run)))

    def _with_locations(self, run: RunningAttempt) -> TaskSpec:
        """Return what an attempt runs, and where its results are, which saves the worker the question."""
        spec = run.instance.task.spec(run.instance.index)
        located = {resource.name: self._locate_now(resource) for resource in spec.resources}
        if not 0 < sum(len(found.files) for found in located.values() if found is not None) <= _MAX_LOCATED:
            return spec
        resources = (msgspec.structs.replace(resource, location=located[resource.name]) for resource in spec.resources)
        return msgspec.structs.replace(spec, resources=tuple(resources))

    def _locate_now(self, resource: TaskResource) -> PullFiles | None:
        if resource.result is None or self.graph.job.transfer == "push":
            return None
        result = (resource.result.task, resource.result.output)
        if len(self.graph.tasks[result[0]].names) > _MAX_LOCATED:  # do not look at all of them for each attempt
            return None
        return answer_to_pull(self._parts(result), self.context.scheduler).pull

    def _parts(self, result: Result) -> list[MadeOutput]:
        return [stored for key in self.instances.keys(result) if (stored := self.holders.get(key)) is not None]

    def _release_some(self, now: float) -> None:
        """Have outputs removed if there are many, or some have waited."""
        count, size = self.holders.releasable
        is_due = self._release_at is not None and self._release_at <= now
        if count and (count >= _RELEASE_AT_ONCE or size >= _RELEASE_AT_ONCE_BYTES or is_due):
            self._release()
        elif count and self._release_at is None:
            self._release_at = now + _RELEASE_DELAY
            self._set_deadline(self._release_at)

    def _release(self) -> None:
        self._release_at = None
        for holder, datasets in self.holders.released():
            self._releases += 1
            message = ReleaseOutputs(job_id=self.context.job_id, datasets=datasets)
            send = base.SendMessage(holder, RELEASE_OUTPUTS, message, _RELEASE, retry_delays=(), span="release outputs")
            self._others.append(send)

    def _end_if_done(self, now: float) -> None:
        """End the job when all has finished and is here, and holders were told what to remove."""
        if self.instances.unfinished or self._copies_missing or not self.collection.is_idle:
            return
        self._release()
        if self._ends_at is None:
            self._ends_at = now + _RELEASE_TIMEOUT
        if not self._releases:
            self._is_over = True
            self._others.append(EndJob())

    def _fail(self, failure: str) -> None:
        """End the job with the effects that are returned next."""
        if not self._is_over:
            self._is_over = True
            self.holders.release_all()
            self._release()
            self._others.append(EndJob(failure=failure))
