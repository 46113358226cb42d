"""A DiLoCo job whose workers are found: its tasks, the state of its training, and how it goes on after a restart. Pure.

Built by `operator`, from new leases or from tasks of an earlier run of the scheduler.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.job_spec import Reference
from hypha_scheduler.strategies.base import DatasetView, JobContext, Lease, StartTask, TaskRef, TaskState, WriteJournal
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.records import BeganRecord, TermRecord, write_record
from hypha_scheduler.strategies.diloco.restore import RestoredTraining
from hypha_scheduler.strategies.diloco.result_model import ResultModel
from hypha_scheduler.strategies.diloco.retries import ExecutorRetries
from hypha_scheduler.strategies.diloco.round_effects import AnnounceRound, RoundSettings
from hypha_scheduler.strategies.diloco.rounds import Rounds
from hypha_scheduler.strategies.diloco.sample_ledger import SampleLedger
from hypha_scheduler.strategies.diloco.server_commands import ServerCommands
from hypha_scheduler.strategies.diloco.specs import (
    AGGREGATE,
    TRAIN,
    PlacedJob,
    Slots,
    evaluation_shares,
    round_settings,
)
from hypha_scheduler.strategies.diloco.training_state import TrainingState

_log = logging.getLogger(__name__)

START_TIMEOUT: Final = 5.0
"""Maximum time in seconds for which the first workers are delayed."""


@dataclass(slots=True)
class StartBarrier:
    """Barrier that releases all workers once each has arrived, or `START_TIMEOUT` seconds after the first."""

    expected: int
    """Number of workers."""
    began: float = 0.0
    """Time at which executors were started."""
    _arrived: set[PeerId] = field(default_factory=set)
    _released: bool = False
    _deadline: float | None = None

    def remaining(self, peer: PeerId, now: float) -> float:
        """Record that a worker has arrived; return how many seconds it waits at most, 0 after the release."""
        if peer not in self._arrived:
            self._arrived.add(peer)
            seconds, count = now - self.began, len(self._arrived)
            _log.info("worker %s is ready after %.1f s (%d of %d)", peer, seconds, count, self.expected)
        if self._deadline is None:
            self._deadline = now + START_TIMEOUT
        if len(self._arrived) >= self.expected or now >= self._deadline:
            self._released = True
        return 0.0 if self._released else self._deadline - now


@dataclass(frozen=True, slots=True)
class TrainingData:
    """What a DiLoCo job works with, once it is prepared."""

    dataset: DatasetView
    model: Reference
    """Source of the start model."""
    result: ResultModel
    preprocessor: Reference | None = None
    evaluation: DatasetView | None = None
    manifest_digest: str | None = None
    """Digest of the dataset's manifest; None if the data nodes have none."""
    model_digest: str = ""
    """Digest over the files of the start model."""
    prove: Callable[[], Awaitable[None]] | None = None
    """Audits the job's files when the result is complete; raises `JobFailedError` with what is wrong."""


@dataclass(slots=True)
class RunningJob:
    """State of a job that has its first workers: tasks are added and end, the parameter server may be replaced."""

    training: TrainingState
    placed: PlacedJob
    commands: ServerCommands
    barrier: StartBarrier
    slots: Slots
    first_attempt: int
    """Number of the first attempt at a new worker's task."""
    tasks: dict[TaskRef, TaskState] = field(default_factory=dict)
    """States of all attempts at tasks, in the order in which they came."""
    has_server: bool = False
    """Whether the task of a parameter server was started, which workers wait for."""
    retries: ExecutorRetries = field(default_factory=ExecutorRetries)
    unconfirmed: set[TaskRef] = field(default_factory=set)
    """Tasks that were dispatched and not confirmed yet."""
    gone_members: dict[int, set[PeerId]] = field(default_factory=dict)
    """By round: members whose updates the parameter server has refused, or has not received."""
    workers: dict[PeerId, uuid.UUID] = field(default_factory=dict)
    """Lease of each worker that trains, or whose executor starts; in the order in which they came."""
    everybody: dict[PeerId, None] = field(default_factory=dict)
    """All workers so far, in the order in which they came."""
    server: TaskRef | None = None
    """Task of the parameter server; None while another one is sought."""
    server_terms: dict[PeerId, int] = field(default_factory=dict)
    """Term of the parameter server that each worker knows of."""

    @property
    def term(self) -> int:
        """Term of the parameter server, also of one that was lost."""
        return self.placed.term

    def task_of(self, lease: uuid.UUID) -> TaskRef | None:
        """Return the newest task of a lease; None if it has none."""
        return next((task for task in reversed(self.tasks) if task.lease.id == lease), None)

    def add_server(self, lease: Lease) -> TaskRef:
        """Add the task of a parameter server, in the current term."""
        self.server = server_task(lease, self.term)
        self.tasks[self.server] = TaskState.WAITING
        self.has_server = False
        return self.server

    def add_worker(self, lease: Lease) -> int:
        """Add the task of a worker; return its member number."""
        slot = self.slots.add(lease.peer)
        self.training.micro_batches.pop(lease.peer, None)  # of an earlier lease, which had other memory
        self.note_worker(lease.peer, lease.id)
        self.tasks[TaskRef(f"train-{slot.member + 1}", lease, self.first_attempt)] = TaskState.WAITING
        return slot.member

    def note_worker(self, peer: PeerId, lease: uuid.UUID) -> None:
        """Add a worker."""
        self.workers[peer] = lease
        self.everybody.setdefault(peer)

    def remove_worker(self, peer: PeerId) -> None:
        """Remove a worker: its slot is free, and its task of no interest any more."""
        self.workers.pop(peer, None)
        self.server_terms.pop(peer, None)
        self.slots.held.pop(peer, None)

    def mark_ended(self, task: TaskRef, state: TaskState) -> bool:
        """Record the final state of a task; only the first one counts. Return whether this was the first."""
        if self.tasks[task].has_ended:
            return False
        self.tasks[task] = state
        return True

    def running_tasks(self) -> tuple[TaskRef, ...]:
        """Return the tasks that run."""
        return tuple(task for task, state in self.tasks.items() if state is TaskState.RUNNING)

    def start_ready(self, closed: int) -> tuple[StartTask, ...]:
        """Start the tasks whose inputs exist, once the parameter server's is confirmed.

        Args:
            closed: last committed round.
        """
        if any(task.lease.role == AGGREGATE for task in self.unconfirmed):
            return ()
        self.placed = replace(self.placed, closed=closed, workers=tuple(self.workers))
        waiting = [task for task, state in self.tasks.items() if state is TaskState.WAITING]
        ready = [task for task in waiting if task.lease.role == AGGREGATE or self.has_server]
        return tuple(map(self._start, ready))

    def _start(self, ref: TaskRef) -> StartTask:
        self.tasks[ref] = TaskState.RUNNING
        self.unconfirmed.add(ref)
        if ref.lease.role == AGGREGATE:
            self.has_server = True
            return StartTask(ref, self.placed.aggregate_spec())
        peer = ref.lease.peer
        self.server_terms[peer] = self.term
        return StartTask(ref, self.placed.train_spec(self.slots.held[peer], self.retries.micro_batch(ref.lease.id)))


def server_task(lease: Lease, term: int) -> TaskRef:
    """Return the task of the parameter server of a term."""
    return TaskRef(f"aggregate-{term}" if term > 1 else "aggregate", lease)


def task_key(ref: TaskRef) -> str:
    """Return the name of an attempt at a task, for its owner."""
    return f"{ref.name}.{ref.attempt}" if ref.attempt else ref.name


@dataclass(frozen=True, slots=True)
class JobBuilder:
    """Builds the state of a job with its workers."""

    job: DilocoJobConfig
    context: JobContext
    data: TrainingData
    restored: RestoredTraining

    def begin(self, leases: Sequence[Lease], now: float) -> RunningJob:
        """Return the state of a job with new workers, after the last recorded round, in a new term."""
        trains = sorted((lease for lease in leases if lease.role == TRAIN), key=lambda lease: lease.peer)
        [server] = [lease for lease in leases if lease.role == AGGREGATE]
        peers = [lease.peer for lease in trains]
        term = self.restored.term + 1
        running = self._build(server.peer, server_task(server, term), peers, peers, term, now)
        running.add_server(server)
        for lease in trains:
            if (known := self.restored.members.get(lease.peer)) is not None:
                running.slots.restore(lease.peer, known)
            running.add_worker(lease)
        running.barrier = StartBarrier(len(trains), now)
        return running

    def adopt(self, refs: Sequence[TaskRef], now: float) -> RunningJob | None:
        """Return the state of a job whose tasks still run, in the same term; None if none trains.

        It has no parameter server if that of the term does not run any more, or was not started yet.
        """
        restored = self.restored
        servers = [ref for ref in refs if ref.lease.role == AGGREGATE and ref.lease.peer == restored.server]
        trains = [ref for ref in refs if ref.lease.role == TRAIN and ref.lease.peer in restored.workers]
        if restored.server is None or not trains:
            return None
        peers = [ref.lease.peer for ref in trains]
        training = [peer for peer in peers if peer not in restored.starting]
        server = servers[0] if servers else None
        running = self._build(restored.server, server, (), training, restored.term, now)
        running.tasks.update(dict.fromkeys((*servers[:1], *trains), TaskState.RUNNING))
        running.server, running.has_server = server, True
        for ref in trains:
            running.slots.restore(ref.lease.peer, restored.members[ref.lease.peer])
            running.note_worker(ref.lease.peer, ref.lease.id)
            running.server_terms[ref.lease.peer] = 0 if restored.continues else restored.term
        for peer in set(peers) - set(training):
            running.training.worker_added(peer, now)
        self._restore_round(running, peers, now)
        return running

    def _build(
        self,
        server: PeerId,
        task: TaskRef | None,
        workers: Sequence[PeerId],
        members: Sequence[PeerId],
        term: int,
        now: float,
    ) -> RunningJob:
        """Return the state of a job without tasks.

        Args:
            server: the parameter server.
            task: its task; None if that does not run any more.
            workers: all workers.
            members: those of them that the open round expects.
            term: term of the parameter server.
            now: the time.
        """
        restored, settings = self.restored, self._settings()
        ledger = SampleLedger(self.data.dataset.samples, self.job.seed, settings.batch_size)
        restored.restore_ledger(ledger, members if term == restored.term else ())
        training = TrainingState(
            Rounds(settings, members, now, closed=restored.closed),
            ledger,
            server,
            samples=restored.samples.copy(),
            batches=restored.batches.copy(),
            loss=restored.loss,
            committed=restored.closed,
        )
        data, slots = self.data, Slots(self.job.resources.num_workers, restored.next_member)
        placed = PlacedJob(
            self.context.job_id, self.job, self.context.scheduler, server, (), data.model, data.preprocessor,
            {} if data.evaluation is None else evaluation_shares(slots.shares, data.evaluation), restored.closed, term,
            data.result.momentum_file() is not None, settings.batch_size, scheduled_for=slots.shares,
        )  # fmt: skip
        return RunningJob(
            training,
            placed,
            self.commands(training, task, term, workers),
            StartBarrier(0, now),
            slots,
            self.context.first_attempt,
        )

    def commands(
        self, training: TrainingState, server: TaskRef | None, term: int, workers: Iterable[PeerId]
    ) -> ServerCommands:
        """Return the commands to a parameter server, which knows these workers."""
        return ServerCommands(server, term, training.contributions, frozenset(workers), self.job.rounds.timeout)

    def _restore_round(self, running: RunningJob, peers: Sequence[PeerId], now: float) -> None:
        """Restore the workers' updates in the open round, and whether its members were announced."""
        training, restored = running.training, self.restored
        training.honours_ranges |= restored.stating
        training.contributions.refusals.update(restored.refusals)
        for peer, unused in restored.refused.items():
            training.contributions.refused.add((restored.closed + 1, peer))
            if unused is not None:
                training.contributions.unused.append(unused)
        posted = {}
        for peer, update in restored.contributed.items():
            if peer not in peers and restored.announced is None:
                continue  # it does not count, and its samples are available
            if peer not in peers:
                training.keep_until_commit(update)
            training.contributions.add(update)
            posted[peer] = (update.samples, update.batches)
        announced = restored.announced
        members = None if announced is None else [peer for peer, _ in announced.members]
        for peer in peers:
            training.rounds.members[peer].joins = True
        training.taken_up.update(peers)
        away = [peer for peer in peers if restored.closed and peer not in restored.present]
        training.rounds.resume_round(posted, members, now, restored.refused.keys(), away)
        if announced is not None:
            running.commands.restore([AnnounceRound(each.round, each.members) for each in restored.announcements])

    def term_record(self, running: RunningJob, *, continues: bool = False) -> WriteJournal:
        """Return the record of the parameter server's appointment."""
        placed, slots = running.placed, running.slots.held
        return write_record(
            TermRecord(
                term=placed.term,
                server=placed.server,
                workers=tuple(running.workers),
                members=tuple(slots[peer].member for peer in running.workers),
                scheduled_for=placed.scheduled_for,
                continues=continues,
            )
        )

    def began(self, workers: Sequence[PeerId]) -> BeganRecord:
        """Return what the job works with, which must not change when it is resumed."""
        settings = self.job.model_dump(mode="json", include={"inner_optimizer", "outer_optimizer", "preprocessor"})
        return BeganRecord(
            dataset=self.data.dataset.name,
            manifest=self.data.manifest_digest,
            model=self.data.model_digest,
            seed=self.job.seed,
            batch_size=self._settings().batch_size,
            settings=settings,
            workers=tuple(workers),
        )

    def _settings(self) -> RoundSettings:
        """Return the settings of the rounds; the batch size stays as it was in an earlier run."""
        evaluation = () if self.data.evaluation is None else self.data.evaluation.samples
        settings = round_settings(self.job, self.job.resources.num_workers, self.data.result.model_bytes(), evaluation)
        began = self.restored.began
        return settings if began is None else replace(settings, batch_size=began.batch_size)
