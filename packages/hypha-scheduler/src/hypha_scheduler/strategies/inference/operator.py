"""The inference operator: assigns slices to workers, and commits each part once. Pure: it returns effects.

Each lease runs one long task, whose executor asks for slices (`next_slice`) and sends a part for each. When all slices
are committed, the results get their manifest, are audited, and the job ends. Created by `strategy`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio.to_thread
import msgspec

from hypha_proto.datasets import UnusableSlice
from hypha_proto.ids import PeerId
from hypha_proto.tasks import TaskSpec
from hypha_proto.texts import quote
from hypha_proto.transfer import TASK_RESULT, PushHeader, Refusal
from hypha_scheduler.errors import files_unusable
from hypha_scheduler.strategies.avoidance import Avoidance
from hypha_scheduler.strategies.base import (
    DatasetView,
    Effect,
    Effects,
    EmitEvent,
    EndJob,
    JobContext,
    Lease,
    Operator,
    PostMetric,
    PushTarget,
    RetryAfter,
    RoleRequest,
    RunInBackground,
    SliceToUse,
    StartTask,
    StopTask,
    TaskDraining,
    TaskEnded,
    TaskNotStarted,
    TaskProgressed,
    TaskRef,
    TaskState,
    TaskUpdate,
    TrafficCounts,
    WriteJournal,
)
from hypha_scheduler.strategies.inference.config import InferenceJobConfig
from hypha_scheduler.strategies.inference.part_check import largest_part
from hypha_scheduler.strategies.inference.parts import PartFiles, PartRecord, part_name, slice_of
from hypha_scheduler.strategies.inference.restore import BEGIN, PART, RestoredInference
from hypha_scheduler.strategies.inference.retries import SliceRetries
from hypha_scheduler.strategies.inference.slice_assignments import SliceAssignments
from hypha_scheduler.strategies.inference.specs import ROLE, role_request
from hypha_scheduler.strategies.inference.summary import Tally
from hypha_scheduler.strategies.inference.workers import InferenceWorker, InferenceWorkers
from hypha_scheduler.strategies.journal_records import journal_record
from hypha_scheduler.strategies.silence import SLOW_RATE

MAX_IN_HAND: Final = 2
"""Slices that are assigned to one executor: one that it computes, and the next."""
STAND_INS: Final = 1
"""Executors that wait at the end of a job, with their models loaded, in case that another is lost."""
FIRST_SLICES: Final = 3
"""Committed parts, with nothing but errors of one kind in them, after which the job fails."""
_FAILURES_OF_WORKER: Final = 2
"""Attempts in a row that fail at one worker, and invalid parts, until its lease is released and it is excluded."""
_BAD_JOB: Final = 2
"""Exit code of an executor that cannot do what its settings say; no other worker could."""
_RETRY_SLICE: Final = 2.0
"""Seconds until a slice is assigned again that no data node could provide."""
_ASK_AGAIN: Final = 5.0
"""Seconds until a worker that waits for a slice is looked at again; events of the job come first."""
REPEAT_AFTER: Final = 30.0
"""Seconds for which an executor waits until a slice is assigned to it again that it has not sent."""
_EXIT_TIMEOUT: Final = 5.0
"""Seconds for executors to exit when everything is committed."""
_DRAIN_MARGIN: Final = 2.0
"""Seconds before a lease ends in which its executor is stopped."""
_MOVED: Final = "move part"
_DISCARDED: Final = "discard part"
_FINISHED: Final = "finish results"
REFUSED: Final = "part refused"


@dataclass(frozen=True, slots=True)
class RefusedPart:
    """A part that did not pass its check."""

    task: TaskRef
    index: int
    reason: str


@dataclass(frozen=True, slots=True)
class InferenceData:
    """What an inference job works with, once it is prepared."""

    dataset: DatasetView
    identity: Mapping[str, Any]
    """What decides the results (`restore.BEGIN`)."""
    spec: TaskSpec
    files: PartFiles
    largest_slice: int
    """Bytes of the largest slice."""
    finish: Callable[[Sequence[PartRecord]], Awaitable[None]]
    """Writes the manifest of the results and audits them; raises `JobFailedError` if something is wrong."""


class InferenceOperator(Operator):
    """One running inference job."""

    def __init__(
        self, job: InferenceJobConfig, context: JobContext, data: InferenceData, restored: RestoredInference
    ) -> None:
        """Start without leases, with the parts that an interrupted run has committed."""
        self._job = job
        self._context = context
        self._data = data
        self._is_resumed = restored.identity is not None
        self._parts = dict(restored.parts)
        self._slices = SliceAssignments(data.files.rows, set(restored.parts))
        self._workers = InferenceWorkers(context.first_attempt)
        self._tally = Tally(began=0.0)
        for part in restored.parts.values():
            self._tally.restore(part)
        self._began = False
        self._moving = 0
        """Parts that are not yet among the results."""
        self._releasing_at: float | None = None
        """When leases that are of no more use were released; until then as many are wanted as have tasks."""
        self._exit_by: float | None = None
        """When the job no longer waits for executors to exit."""
        self._avoidance = Avoidance(_FAILURES_OF_WORKER)
        self._retries = SliceRetries(data.dataset, self._slices, self._workers, self._avoidance)
        self._now = 0.0
        self._is_finishing = False
        self.is_finished = False
        """Whether the results are complete."""
        self._is_over = False

    # ---------------------------------------------------------------------------------------------------------- leases

    def on_start(self, now: float) -> Effects:
        """Record what the job works with; everything may be committed already."""
        self._tally.began = now
        begin = () if self._is_resumed else (WriteJournal(BEGIN, self._data.identity),)
        rows, committed = self._slices.rows, len(self._slices.committed)
        event = EmitEvent("slices", {"slices": len(rows), "rows": sum(rows), "committed": committed})
        return (*begin, event, *self._finish_if_committed(now))

    def role_requests(self) -> Sequence[RoleRequest]:
        """Return as many workers as there are slices for; while leases of no use are released, those with a task."""
        count = self._wanted()
        if self._releasing_at is not None:
            count = min(count, self._workers.busy)
        least = 1 if self._began else self._job.resources.min_workers
        minimum = 0 if self._releasing_at is not None else min(count, least)
        return (replace(role_request(self._job, count, minimum), excluded=self._avoidance.unwanted(ROLE, self._now)),)

    def _seek_other(self, now: float) -> None:
        """Seek another worker while all are avoided."""
        self._now = now
        avoided = self._avoidance.failed(ROLE)
        if avoided and not self._workers.working and self._slices.unfinished:
            self._avoidance.seek_other(ROLE, ROLE, avoided, now)
        else:
            self._avoidance.stop_seeking(ROLE)

    def _rests(self, worker: InferenceWorker) -> bool:
        """Return whether another worker is sought before a task starts on a lease."""
        if worker.is_leaving or self._workers.working or self._avoidance.gives_in(ROLE, self._now):
            return False
        return worker.lease.peer in self._avoidance.failed(ROLE)

    def _wanted(self) -> int:
        unfinished = self._slices.unfinished
        leaving = sum(worker.is_leaving and worker.task is not None for worker in self._workers)
        return min(self._most_workers, unfinished) + (leaving if unfinished else 0)

    @property
    def _most_workers(self) -> int:
        resources = self._job.resources
        return resources.most_workers if self._slices.committed else resources.num_workers

    def on_leases_acquired(self, leases: Sequence[Lease], now: float) -> Effects:
        """Start a task on each lease."""
        if not self._began:
            self._began = True
            self._tally.began = now
        self._workers.add(leases)
        for lease in leases:
            self._avoidance.note_found(ROLE, lease.peer)
        return self._start_tasks(now)

    def _start_tasks(self, now: float) -> Effects:
        """Start tasks on idle leases while there is work for them; the others are released, unless all are avoided."""
        self._seek_other(now)
        idle, effects = self._workers.idle(), list[Effect]()
        for worker in idle:
            is_usable = not worker.is_leaving and not self._rests(worker)
            if is_usable and self._workers.working < self._slices.unfinished:
                effects.append(StartTask(worker.begin(), self._data.spec))
        rest = [worker for worker in idle if worker.task is None]
        if self._releasing_at is None and not all(self._rests(worker) for worker in rest):
            self._releasing_at = now
        self._seek_other(now)
        return tuple(effects)

    def on_lease_lost(self, lease: Lease, reason: str, now: float) -> Effects:
        """Assign the slices of a lost worker to others."""
        worker = self._workers.remove(lease)
        if worker is None or worker.task is None:
            return ()
        held = self._slices.release(worker.task)
        event = EmitEvent("worker_lost", {"worker": str(lease.peer), "reason": reason, "slices": list(held)})
        avoided = self._retries.avoid_worker(worker.task, held, reason, now)
        if held and (failure := self._retries.count_loss(held[0], reason)) is not None:
            return (event, *self._fail(failure))
        return (event, *avoided, *self._start_tasks(now))

    def on_allocation_timeout(self, role: str, reasons: str, now: float) -> Effects:
        """Fail the job unless workers are avoided: there is nobody to compute what is left."""
        return self._start_tasks(now) if self._avoidance.give_in(now) else self._fail(reasons)

    def on_lease_draining(self, lease: Lease, seconds: float, now: float) -> Effects:
        """Let a worker that shuts down finish what it computes, and look for another."""
        worker = self._workers.get(lease)
        if worker is None or worker.is_leaving:
            return ()
        return (*self._leave(worker, "its worker drains", seconds), *self._start_tasks(now))

    def _leave(self, worker: InferenceWorker, reason: str, seconds: float) -> Effects:
        worker.is_leaving = True
        if worker.task is None:
            return ()
        left = max(seconds - _DRAIN_MARGIN, seconds / 2)
        return (StopTask(worker.task, reason, keep_lease=True, drain_seconds=left),)

    # ----------------------------------------------------------------------------------------------------------- tasks

    def on_task_update(self, task: TaskRef, update: TaskUpdate, now: float) -> Effects:
        """Handle what has happened to an attempt: its end, measurements, or that it drains and gets no more slices."""
        worker = self._workers.running(task)
        if worker is None:
            return ()  # a lease that was lost has given its slices back
        match update:
            case TaskDraining():
                worker.is_leaving = True
            case TaskProgressed(progress):
                self._note_report(worker, now)
                values = progress.metrics or {}
                return tuple(PostMetric(task.lease.peer, self._tally.rows, name, values[name]) for name in values)
            case TaskNotStarted(reason):
                worker.task = None
                self._workers.remove(task.lease)
                why = f"it did not start: {reason}"
                return (*self._retry_or_fail(task, worker, why, now), *self._continue(now))
            case TaskEnded():
                return self._task_ended(task, worker, update, now)
        return ()

    def _task_ended(self, task: TaskRef, worker: InferenceWorker, end: TaskEnded, now: float) -> Effects:
        worker.task = None
        held = self._slices.release(task)
        if self._may_end(worker, end, held):
            return self._continue(now)
        reason = end.reason or f"it {end.state.value} before its slices were computed"
        code = "" if end.exit_code is None else f" (exit code {end.exit_code})"
        text = f"{reason}{code}" + "".join(f"\n  | {line}" for line in end.last_lines)
        if end.exit_code == _BAD_JOB and not self._is_other_proven(task.lease.peer):
            return self._fail(f"the executor on {task.lease.peer} cannot do this job: {text}")
        worker.failures += 1
        worker.is_leaving |= worker.failures >= _FAILURES_OF_WORKER or end.exit_code == os.EX_IOERR
        blamed = () if end.state is TaskState.CANCELLED else held
        failed = self._retry_or_fail(task, worker, text, now, blamed)
        if end.exit_code == os.EX_IOERR:
            failed += self._avoidance.exclude(ROLE, task.lease.peer, reason, now)
        return (*failed, *self._continue(now))

    def _is_other_proven(self, peer: PeerId) -> bool:
        """Return whether a worker with a task, and not `peer`, has committed a part."""
        return any(
            worker.works and worker.lease.peer != peer and self._avoidance.is_proven(ROLE, worker.lease.peer)
            for worker in self._workers
        )

    def _may_end(self, worker: InferenceWorker, end: TaskEnded, held: Sequence[int]) -> bool:
        """Return whether an attempt was to end; one that drains may have a slice left that it did not begin."""
        if end.state is TaskState.FAILED:
            return False
        return worker.is_leaving or self._slices.unfinished == 0 or (worker.told_none and not held)

    def _continue(self, now: float) -> Effects:
        if self._is_over:
            return ()
        return (*self._start_tasks(now), *self._end_if_over(now))

    def _retry_or_fail(
        self, task: TaskRef, worker: InferenceWorker, why: str, now: float, held: Sequence[int] = ()
    ) -> Effects:
        """Have the slices of a failed attempt assigned again, or fail the job; the first one is the one computed."""
        if self._slices.unfinished == 0:
            return (EmitEvent("warning", {"text": f"task {task.name} on {task.lease.peer}: {why}"}),)
        fields = {"worker": str(task.lease.peer), "task": task.name, "slices": list(held), "reason": why}
        event = EmitEvent("attempt_failed", fields)
        avoided = self._retries.avoid_worker(task, held, why, now)
        failure = self._retries.count_failure(worker, held, why)
        return (event, *(avoided if failure is None else self._fail(failure)))

    def _note_report(self, worker: InferenceWorker, now: float) -> None:
        if worker.task is not None and self._slices.held_by(worker.task):
            worker.heard(now)

    # ---------------------------------------------------------------------------------------------------------- slices

    def next_slice(self, task: TaskRef, dataset: str, now: float) -> SliceToUse | RetryAfter | None:
        """Assign the next slice to an attempt; None if it is to exit when it has sent what it holds."""
        worker = self._workers.running(task)
        if worker is None or dataset != self._data.dataset.name or self._is_over:
            return None
        held = self._slices.held_by(task)
        is_surplus = not held and self._workers.working > min(self._slices.unfinished + STAND_INS, self._most_workers)
        if worker.is_leaving or self._slices.unfinished == 0 or is_surplus:
            worker.told_none = True
            return None
        may_take = partial(self._retries.may_take, task)
        index = None if len(held) >= MAX_IN_HAND else self._slices.assign(task, now, may_take)
        if index is None:
            return self._wait(worker, held, now)
        worker.got_slice = True
        worker.waits_since = None
        worker.heard_at = now if not held else worker.heard_at
        return SliceToUse(0, index)

    def _wait(self, worker: InferenceWorker, held: Sequence[int], now: float) -> SliceToUse | RetryAfter:
        """Let an executor wait; after some time it gets the first of its slices again.

        It may not know of that slice, if the answer that assigned it was lost. If it does, it computes it twice.
        """
        if worker.waits_since is None:
            worker.waits_since = now
        if held and now - worker.waits_since >= REPEAT_AFTER:
            worker.waits_since = None
            return SliceToUse(0, held[0])
        at = self._slices.next_available_at()
        return RetryAfter(_ASK_AGAIN if at is None else min(_ASK_AGAIN, at - now))

    def on_slice_unusable(self, task: TaskRef, dataset: str, report: UnusableSlice, now: float) -> Effects:
        """Assign a slice again that no data node could provide, in a while; after some attempts the job fails."""
        if not self._slices.give_back(task, report.index, until=now + _RETRY_SLICE):
            return ()
        providers = {str(failure.provider): failure.reason for failure in report.failures}
        event = EmitEvent(
            "slice_unusable", {"slice": report.index, "worker": str(task.lease.peer), "providers": providers}
        )
        failure = self._retries.count_unusable(task, report.index, providers)
        return (event,) if failure is None else (event, *self._fail(failure))

    # ----------------------------------------------------------------------------------------------------------- parts

    def on_push_request(self, task: TaskRef, header: PushHeader, now: float) -> tuple[PushTarget | Refusal, Effects]:
        """Accept the part of a slice, also one that will not count: its sender needs a receipt."""
        if header.kind != TASK_RESULT:
            reason = f"an inference job takes files of the kind {TASK_RESULT}, not {quote(header.kind)}"
            return Refusal(reason=reason), ()
        index = slice_of(header.name)
        if index is None or index >= len(self._slices.rows):
            expected = f"part-N.jsonl, N from 0 to {len(self._slices.rows) - 1}"
            return Refusal(reason=f"{quote(header.name)} is the name of no part; expected {expected}"), ()
        if lacking := self._data.files.lacks_room(header.size):
            return Refusal(reason="the scheduler has no room for the part"), self._fail(lacking)
        if (worker := self._workers.running(task)) is not None:
            self._note_report(worker, now)
        path = self._data.files.new_file(index)
        refuse = partial(RefusedPart, task, index)
        prepare = partial(
            self._data.files.check, index=index, on_invalid=lambda why: self._context.notify(REFUSED, refuse(why))
        )
        return PushTarget(path, largest_part(self._slices.rows[index]), prepare, slot=part_name(index)), ()

    def on_push_complete(self, task: TaskRef, header: PushHeader, path: Path, digest: str, now: float) -> Effects:
        """Commit a part if its slice is assigned to the attempt that sends it; otherwise drop it."""
        index = slice_of(header.name)
        counts = self._data.files.checked.pop(path, None)
        worker = self._workers.running(task)
        if index is None or counts is None or worker is None or not self._slices.commit(task, index):
            return self._drop(task, index, path)
        made, number, peer = msgspec.structs.asdict(counts), len(self._parts) + 1, task.lease.peer
        part = self._parts[index] = PartRecord(
            part=number, slice=index, digest=digest, file=path.name, task=task.name, attempt=task.attempt, worker=peer,
            **made,
        )  # fmt: skip
        self._tally.commit(part, now)
        worker.failures = 0
        self._retries.barren = 0
        self._avoidance.record_success(ROLE, task.lease.peer, part_name(index), now)
        worker.waits_since = None
        self._note_report(worker, now)
        self._moving += 1
        return (
            journal_record(PART, part),
            EmitEvent("part", self._event_of(part)),
            RunInBackground(partial(anyio.to_thread.run_sync, self._data.files.move, part), _MOVED),
            *(self._stop_if_all_fail() or self._finish_if_committed(now)),
        )

    def _stop_if_all_fail(self) -> Effects:
        """Fail the job early if its first slices are nothing but errors of one kind."""
        allowed, count = self._job.inference.max_error_share, len(self._parts)
        if allowed >= 1 or count < FIRST_SLICES or not self._tally.is_one_error or not self._slices.unfinished:
            return ()
        what = f"all {self._tally.rows} rows of the first {count} slices are errors"
        return self._fail(f"{what}; {self._errors_and_remedy()}")

    def _too_many_errors(self) -> str | None:
        """Return why the job fails although it has a result for every row; None if it does not."""
        allowed, tally = self._job.inference.max_error_share, self._tally
        if not tally.errors or tally.errors <= allowed * tally.rows:
            return None
        return (
            f"{tally.errors} of {tally.rows} rows are errors, a larger share than inference.max_error_share = "
            f"{allowed:g}; {self._errors_and_remedy()}"
        )

    def _errors_and_remedy(self) -> str:
        return (
            f"{self._tally.describe_most_frequent_error()}; correct the job or its dataset, or resume the job with a "
            "larger inference.max_error_share"
        )

    def on_late_push(self, task: TaskRef, header: PushHeader, now: float) -> tuple[PushTarget | Refusal, Effects]:
        """Accept a part of an attempt that has ended; it is dropped."""
        return self.on_push_request(task, header, now)

    def on_late_push_complete(self, task: TaskRef, header: PushHeader, path: Path, now: float) -> Effects:
        """Drop the part of an attempt that has ended."""
        self._data.files.checked.pop(path, None)
        return self._drop(task, slice_of(header.name), path)

    def _event_of(self, part: PartRecord) -> dict[str, object]:
        fields: dict[str, object] = {
            "slice": part.slice, "worker": str(part.worker), "rows": part.rows, "errors": part.errors,
            "committed": len(self._slices.committed), "slices": len(self._slices.rows),
        }  # fmt: skip
        return fields | ({"tokens": part.tokens} if part.tokens else {})

    def _drop(self, task: TaskRef, index: int | None, path: Path) -> Effects:
        self._tally.dropped += 1
        is_committed = index in self._slices.committed
        why = "its slice was committed before" if is_committed else "its slice is not assigned to this attempt"
        event = EmitEvent("part_dropped", {"slice": index, "worker": str(task.lease.peer), "reason": why})
        remove = partial(anyio.to_thread.run_sync, partial(path.unlink, missing_ok=True))
        return (event, RunInBackground(remove, _DISCARDED))

    def on_message(self, source: TaskRef | None, name: str, message: Any, now: float) -> tuple[Any, Effects]:
        """Handle that a part was refused."""
        return None, self._part_refused(message, now) if isinstance(message, RefusedPart) else ()

    def _part_refused(self, part: RefusedPart, now: float) -> Effects:
        """Assign the slice of an invalid part again; release the lease of a worker that sends several."""
        self._tally.refused += 1
        fields = {"slice": part.index, "worker": str(part.task.lease.peer), "reason": part.reason}
        effects: list[Effect] = [EmitEvent("part_refused", fields)]
        worker = self._workers.running(part.task)
        if worker is None:
            return tuple(effects)
        if self._slices.give_back(part.task, part.index):
            effects += self._retries.avoid_worker(part.task, (part.index,), f"its part was invalid: {part.reason}", now)
            failure = self._retries.count_slice_failure(part.index, f"its part was invalid: {part.reason}")
            effects += () if failure is None else self._fail(failure)
        worker.refused += 1
        if worker.refused >= _FAILURES_OF_WORKER and not worker.is_leaving:
            worker.is_leaving = True
            reason = f"it sent {worker.refused} invalid parts, the last: {part.reason}"
            effects += self._avoidance.exclude(ROLE, part.task.lease.peer, reason, now)
            effects.append(StopTask(part.task, reason))
        return tuple(effects)

    # ------------------------------------------------------------------------------------------------------------- end

    def on_effect_result(self, tag: str, outcome: object, now: float) -> Effects:
        """Handle that a part is among the results, or that these are complete."""
        if isinstance(outcome, OSError):
            return self._fail(files_unusable(self._context.directory, [outcome]))
        if isinstance(outcome, Exception):
            return self._fail(str(outcome))
        if tag == _MOVED:
            self._moving -= 1
            return self._finish_if_committed(now)
        if tag == _FINISHED:
            self.is_finished = True
            return self._end_if_over(now)
        return ()

    def _finish_if_committed(self, now: float) -> Effects:
        """Complete the results once every part is among them."""
        if self._slices.unfinished or self._is_over:
            return ()
        if self._exit_by is None:
            self._exit_by = now + _EXIT_TIMEOUT
        if self._moving or self._is_finishing:
            return ()
        self._is_finishing = True
        parts = [self._parts[index] for index in sorted(self._parts)]
        return (RunInBackground(partial(self._data.finish, parts), _FINISHED),)

    def _end_if_over(self, now: float) -> Effects:
        """End the job once its results are complete and its executors have exited, or had time to."""
        is_late = self._exit_by is not None and now >= self._exit_by
        if self._is_over or not self.is_finished or (self._workers.busy and not is_late):
            return ()
        self._is_over = True
        return (EndJob(self._too_many_errors()),)

    def _fail(self, reason: str) -> Effects:
        self._is_over = True
        return (EndJob(failure=reason),)

    def next_deadline(self) -> float | None:
        """Return when leases were released, executors are no longer waited for, or avoided workers may be used."""
        avoidance_ends = self._avoidance.next_deadline(self._now)
        found = (
            self._releasing_at,
            self._exit_by if self.is_finished else None,
            avoidance_ends,
            *self._silent_until().values(),
        )
        return None if self._is_over else min((at for at in found if at is not None), default=None)

    def on_deadline(self, now: float) -> Effects:
        """Forget released leases, or end the job."""
        if self._releasing_at is not None:
            self._releasing_at = None
            for worker in self._workers.idle():
                self._workers.remove(worker.lease)
        self._now = now
        silent = self._give_up_silent(now)
        effects = self._start_tasks(now) if not self._is_over and self._slices.unfinished else ()
        return (*silent, *effects, *self._end_if_over(now))

    def _silent_until(self) -> dict[uuid.UUID, float]:
        """Return until when each worker that computes a slice may report nothing, by its lease."""
        found = {}
        for worker in self._workers:
            if worker.task is not None and (held := self._slices.held_by(worker.task)):
                until = worker.silent_until(self._retries.losses[held[0]])
                found[worker.lease.id] = until + self._data.largest_slice / SLOW_RATE  # it may wait for the next one
        return found

    def _give_up_silent(self, now: float) -> Effects:
        """Release and exclude the workers that have been silent for too long, unless they may wait for data."""
        silent = {lease for lease, until in self._silent_until().items() if until <= now}
        if not self._context.reaches(self._data.dataset.name):
            self._postpone(now, silent)
            return ()
        effects: Effects = ()
        for worker in [worker for worker in self._workers if worker.lease.id in silent]:
            assert worker.task is not None
            reason = f"its executor has reported nothing for {now - worker.heard_at:.0f} s"
            stop = StopTask(worker.task, reason)
            excluded = self._avoidance.exclude(ROLE, worker.lease.peer, reason, now)
            effects = (*effects, stop, *excluded, *self.on_lease_lost(worker.lease, reason, now))
        return effects

    def _postpone(self, now: float, leases: Collection[uuid.UUID]) -> None:
        """Count the silence of workers from now."""
        for worker in self._workers:
            if worker.lease.id in leases:
                worker.heard_at = now

    def on_suspended(self, seconds: float, now: float) -> Effects:
        """Count the silence of workers anew: nothing of theirs could be recorded."""
        self._postpone(now, self._silent_until())
        return ()

    def summary(self, traffic: Mapping[PeerId, TrafficCounts]) -> Mapping[str, object]:
        """Return counts and rates, the share of each worker, and where the results are."""
        found = self._tally.summary(traffic, self._slices.assigned_rows)
        found["excluded"] = self._avoidance.summary()
        return {"slices": len(self._slices.rows), **found, "results_dir": str(self._data.files.results)}
