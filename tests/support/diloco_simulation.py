"""A job runner, a parameter server and executors for the DiLoCo operator: whole jobs without network or files.

`Job` carries out effects as the runner does and keeps the journal, and can begin anew from any part of it. The
parameter server averages nothing: the digest of an outer update is that of the updates that it was made from, so a
record that names others than the averaged ones is found out.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from hypha_proto.attempt_id import AttemptId
from hypha_proto.commands import ChangeServer, CommandAnswer, SetMembers, SetWorkers
from hypha_proto.contributions import AwaitCommit, CommitStatus, Contribution, SampleRange, StateContribution
from hypha_proto.datasets import SAFETENSORS
from hypha_proto.global_model import RoundState
from hypha_proto.ids import PeerId
from hypha_proto.job_membership import JoinRound, RoundToJoin
from hypha_proto.job_spec import One, PeersReference
from hypha_proto.round_membership import UpdateRefused
from hypha_proto.training_reports import (
    BatchDone,
    OuterStepTaken,
    ReportAnswer,
    RoundMetrics,
    SendingUpdate,
    UpdateMerged,
)
from hypha_proto.transfer import OUTER_UPDATE, PushHeader, Refusal
from hypha_scheduler.strategies.base import (
    EmitEvent,
    EndJob,
    Lease,
    PushTarget,
    RetryAfter,
    RunInBackground,
    SendCommand,
    SliceRefusedError,
    SliceToUse,
    StartTask,
    StopTask,
    TaskEnded,
    TaskRef,
    TaskStarted,
    TaskState,
    WriteJournal,
)
from hypha_scheduler.strategies.diloco.batch_allocation import MeasuredBatch
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.operator import DilocoOperator
from hypha_scheduler.strategies.diloco.restore import restore
from hypha_scheduler.strategies.diloco.rounds import Rounds
from hypha_scheduler.strategies.diloco.running_job import TrainingData

PEERS = [PeerId.from_public_key(bytes([number]) * 32) for number in range(1, 9)]
SERVER = PeerId.from_public_key(bytes([98]) * 32)
SCHEDULER = PeerId.from_public_key(bytes([99]) * 32)
JOB_ID = uuid.UUID(int=5)
DATASET = "digits"
START = "blake3:" + "0" * 64
BATCH = 4


def digest_of(*parts: object) -> str:
    """Return the digest of some values."""
    return f"blake3:{blake3(repr(parts).encode()).hexdigest()}"


def batch_done(
    rounds: Rounds, peer: PeerId, samples: int, now: float, seconds: float | None = None, waited: float = 0.0
) -> ReportAnswer:
    """Report one batch, for which its executor states no durations by default."""
    return rounds.batches_done(peer, (MeasuredBatch(samples, seconds, waited),), now)


def job_table(**changes: Any) -> DilocoJobConfig:
    """Return a job; `changes` replace values in its tables."""
    plain: dict[str, Any] = {
        "dataset": DATASET,
        "model": {"path": "model", "type": "vision-classification"},
        "inner_optimizer": {"learning_rate": 0.001},
        "rounds": {"update_rounds": 3, "avg_samples_between_updates": 48, "batch_size": BATCH},
        "resources": {"num_workers": 3, "min_workers": 1},
    }
    return DilocoJobConfig.model_validate(plain | {key: plain.get(key, {}) | value for key, value in changes.items()})


@dataclass
class FakeDataset:
    """Dataset whose slices have these numbers of samples."""

    samples: Sequence[int | None] = (20, 12, 16, 20, 8)
    name: str = DATASET
    provider: PeerId = SCHEDULER
    format: str | None = SAFETENSORS
    columns: Mapping[str, str] | None = None
    labels: Sequence[str] | None = None

    def describe(self, index: int) -> str:
        return f"slice {index}"


@dataclass
class FakeContext:
    """What the operator uses of the scheduler."""

    directory: Path = Path("/run")
    job_id: uuid.UUID = JOB_ID
    scheduler: PeerId = SCHEDULER
    first_attempt: int = 0
    reachable: bool = True
    """Whether a data node is connected."""
    notices: list[tuple[str, object]] = field(default_factory=list)

    def reaches(self, dataset: str) -> bool:
        return self.reachable

    def notify(self, name: str, message: object = None) -> None:
        self.notices.append((name, message))


@dataclass
class FakeResult:
    """Weights whose digest is that of the outer updates so far."""

    directory: Path = Path("/run")
    updates: dict[Path, str] = field(default_factory=dict)
    """Digest of each file of an outer update."""
    round: int = 0
    weights: str | None = None
    update_bytes: int = 100
    errors: list[OSError] = field(default_factory=list)
    """Raised by the next attempts to write."""
    lacking: str | None = None
    is_finished: bool = False
    advanced: dict[int, str] = field(default_factory=dict)
    """Digest of the weights after each round that is not committed."""
    evaluations: list[tuple[object, ...]] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    """Last committed round whenever a checkpoint might have been written."""
    good: int = 0

    async def discard(self, update: Path) -> None:
        """Delete nothing: there are no files, and a thread would run beside the virtual clock."""

    async def advance(self, update: Path, round_number: int) -> RoundState:
        if self.errors:
            raise self.errors.pop()
        before = self.advanced.get(round_number - 1) or self.weights or START
        self.advanced[round_number] = digest_of(before, self.updates[update])
        self.updates[self._update_of(self.advanced[round_number])] = self.updates[update]
        return RoundState(round_number, before, self.advanced[round_number], None, self.updates[update])

    async def commit(self, round_number: int) -> None:
        assert round_number == self.round + 1
        self.round, self.weights = round_number, self.advanced.pop(round_number)

    def restore(self, round_number: int, weights: str | None) -> None:
        self.round, self.weights = round_number, weights

    def largest_update(self) -> int:
        return 1000

    def model_bytes(self) -> int:
        return 100

    def lacks_room(self, size: int) -> str | None:
        return self.lacking

    def weights_file(self) -> Path | None:
        return self.directory / "weights.safetensors" if self.round else None

    def update_file(self) -> Path | None:
        if self.weights is None:
            return None
        return self._update_of(self.weights)

    @staticmethod
    def _update_of(weights: str) -> Path:
        """Return where the outer update that has led to some weights is kept."""
        return Path("/run/updates") / weights

    def momentum_file(self) -> Path | None:
        return self.directory / "momentum.safetensors" if self.round else None

    def note_good(self, round_number: int) -> None:
        self.good = round_number

    def good_checkpoint(self) -> Path | None:
        return self.directory / "checkpoints" / f"round-{self.good}" if self.good else None

    def summary(self) -> dict[str, object]:
        return {"model_dir": str(self.directory / "model")}

    def evaluated(self, *found: object) -> None:
        self.evaluations.append(found)

    async def write_checkpoint(self) -> Path | None:
        self.checkpoints.append(self.round)
        return None

    async def finish(self) -> None:
        if self.errors:
            raise self.errors.pop()
        self.is_finished = True


@dataclass
class ParameterServer:
    """What the parameter server of one term knows."""

    term: int
    round: int
    """The open round."""
    members: SetMembers | None = None
    """The last announcement of the open round."""
    updates: dict[tuple[int, PeerId], str] = field(default_factory=dict)
    """Digests of the updates that have arrived."""
    averaged: dict[int, list[PeerId]] = field(default_factory=dict)
    """Truth about each round."""
    stepped: PushHeader | None = None
    """Outer update that the scheduler has not received yet."""

    def announce(self, message: SetMembers) -> CommandAnswer:
        if message.round != self.round:
            return CommandAnswer(0, accepted=False, reason=f"round {message.round} is over")
        self.members = message
        return CommandAnswer(0, accepted=True)

    def step(self) -> PushHeader:
        """Average the updates that are there."""
        assert self.members is not None
        used = [m for m in self.members.members if self.updates.get((self.round, m.peer)) == m.update]
        digest = digest_of(self.round, [(str(m.peer), m.samples, m.update) for m in used])
        self.averaged[self.round] = [member.peer for member in used]
        self.stepped = PushHeader(
            AttemptId(JOB_ID, "aggregate", 0),
            self.round,
            OUTER_UPDATE,
            "outer",
            100,
            digest,
            SCHEDULER,
            samples=sum(m.samples for m in used),
            term=self.term,
        )
        self.round, self.members = self.round + 1, None
        return self.stepped


@dataclass
class Executor:
    """Executor of one worker, which uses what it is given in order."""

    peer: PeerId
    round: int = 1
    weights: str = START
    queue: list[SliceToUse] = field(default_factory=list)
    """Samples that it has been given and not used."""
    used: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Ranges that it has used in this round."""
    left: int | None = None
    """Batches that are left in this round."""
    sent: str | None = None
    """Digest of its update of this round."""
    is_waiting: bool = False
    """Whether it has sent its update, and waits for the outer one."""
    attempts: int = 0
    latest: str | None = None
    """Digest of the last update that it has computed."""
    counts: dict[int, int] = field(default_factory=dict)

    def take(self) -> tuple[dict[str, int], int]:
        """Use up to a batch of samples; return how many of each slice, and in all."""
        counts: dict[str, int] = {}
        wanted = BATCH
        while wanted and self.queue:
            given = self.queue.pop(0)
            first, end = given.first or 0, given.end or 0
            stop = min(end, first + wanted)
            self._note(given.epoch, given.index, first, stop)
            counts[str(given.index)] = counts.get(str(given.index), 0) + stop - first
            wanted -= stop - first
            if stop < end:
                self.queue.insert(0, SliceToUse(given.epoch, given.index, stop, end))
        return counts, BATCH - wanted

    def _note(self, epoch: int, index: int, first: int, end: int) -> None:
        if self.used and self.used[-1][:2] == (epoch, index) and self.used[-1][3] == first:
            self.used[-1] = (*self.used[-1][:3], end)
        else:
            self.used.append((epoch, index, first, end))

    def statement(self, task: TaskRef, **changes: Any) -> StateContribution:
        """Return what it states about its update; `changes` replace fields of the contribution."""
        self.attempts += 1
        update = digest_of(str(self.peer), self.round, self.attempts, self.used)
        ranges = tuple(SampleRange(*part) for part in self.used)
        samples = sum(part.end - part.first for part in ranges)
        self.latest = update
        fields: dict[str, Any] = {
            "round": self.round,
            "weights": self.weights,
            "ranges": ranges,
            "batches": -(-samples // BATCH),
            "batch_size": BATCH,
            "seed": self.round,
            "optimizer": "kept",
            "update": update,
        }
        contribution = Contribution(**(fields | changes))
        about = task.id_in(JOB_ID)
        return StateContribution(about, contribution.round, contribution.update, samples, contribution, id=uuid.uuid4())

    def begin_round(self, weights: str) -> None:
        """Go on from new weights."""
        self.weights, self.round = weights, self.round + 1
        self.used, self.left, self.sent, self.is_waiting = [], None, None, False


@dataclass
class Job:
    """A job with its journal; effects are carried out as the runner does."""

    table: DilocoJobConfig = field(default_factory=job_table)
    dataset: FakeDataset = field(default_factory=FakeDataset)
    context: FakeContext = field(default_factory=FakeContext)
    journal: list[dict[str, Any]] = field(default_factory=list)
    now: float = 0.0
    result: FakeResult = field(default_factory=FakeResult)
    events: list[EmitEvent] = field(default_factory=list)
    leases: dict[PeerId, TaskRef] = field(default_factory=dict)
    """Running tasks by their peers."""
    specs: dict[PeerId, StartTask] = field(default_factory=dict)
    server: ParameterServer = field(default_factory=lambda: ParameterServer(1, 1))
    executors: dict[PeerId, Executor] = field(default_factory=dict)
    background: list[RunInBackground] = field(default_factory=list)
    outcome: str | None = None
    """Why the job failed, or "finished"."""
    unanswered: list[SetMembers] = field(default_factory=list)
    """Announcements that are under way, if `holds_messages`."""
    tags: list[str] = field(default_factory=list)
    """Their tags."""
    server_peer: PeerId = SERVER
    listed: tuple[PeerId, ...] = ()
    """Workers that the parameter server was told of last."""
    lists: list[str] = field(default_factory=list)
    """Tags of such messages that are under way."""
    holds_lists: bool = False
    told: dict[PeerId, ChangeServer] = field(default_factory=dict)
    """What each worker was told last of another parameter server."""
    holds_messages: bool = False

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Write a record to the journal."""
        self.journal.append({"record": kind, **fields})

    def open(self) -> None:
        """Begin with what the journal says."""
        restored = restore(self.journal)
        self.result = FakeResult(updates=self.result.updates)
        self.result.restore(restored.closed, restored.weights)
        data = TrainingData(
            self.dataset,
            PeersReference(peers=(SCHEDULER,), strategy=One()),
            self.result,  # type: ignore[arg-type]
            manifest_digest=START,
            model_digest=START,
        )
        self.operator = DilocoOperator(self.table, self.context, data, restored, self.now)  # type: ignore[arg-type]
        self.background, self.unanswered, self.tags, self.outcome = [], [], [], None
        self.apply(self.operator.on_start(self.now))

    def lease(self, peers: Iterable[PeerId]) -> None:
        """Find workers and a parameter server."""
        self.leases.clear()
        self.executors.clear()
        leases = [Lease(uuid.uuid4(), peer, "train", 1.0) for peer in peers]
        leases.append(Lease(uuid.uuid4(), SERVER, "aggregate", 1.0))
        self.apply(self.operator.on_leases_acquired(leases, self.now))
        for peer in list(self.executors):  # nobody begins before all are there
            self.give_slice(peer)

    def acquire(self, peer: PeerId, role: str = "train") -> None:
        """Find another worker or parameter server."""
        self.apply(self.operator.on_leases_acquired([Lease(uuid.uuid4(), peer, role, 1.0)], self.now))

    def join(self, peer: PeerId) -> RoundToJoin | RetryAfter:
        """Let an executor ask with which round it begins."""
        task = self.leases[peer]
        answer, effects = self.operator.on_message(task, "JoinRound", JoinRound(task.id_in(JOB_ID)), self.now)
        self.apply(effects)
        if isinstance(answer, RoundToJoin) and answer.round is not None:
            kept = self.executors[peer].queue if answer.keeps else []
            self.executors[peer] = Executor(peer, answer.round, answer.weights or START)
            self.executors[peer].queue += kept
        found: RoundToJoin | RetryAfter = answer
        return found

    def adopt(self) -> None:
        """Take up the tasks that still run."""
        self.apply(self.operator.on_tasks_adopted(list(self.leases.values()), self.now))

    # -------------------------------------------------------------------------------------------------------- effects

    def apply(self, effects: Iterable[Any]) -> None:
        for effect in effects:
            match effect:
                case WriteJournal(kind, fields):
                    self.write(kind, fields)
                case EmitEvent():
                    self.events.append(effect)
                case StartTask():
                    self._start(effect)
                case StopTask(task):
                    if self.leases.pop(task.lease.peer, None) is not None:
                        self.executors.pop(task.lease.peer, None)
                        self.apply(self.operator.on_task_update(task, TaskEnded(TaskState.CANCELLED), self.now))
                case SendCommand():
                    self._send(effect)
                case RunInBackground():
                    self.background.append(effect)
                case EndJob(failure):
                    self.outcome = self.outcome or failure or "finished"

    def answer_message(self) -> None:
        """Let the parameter server answer the oldest announcement."""
        answer = self.server.announce(self.unanswered.pop(0))
        self.apply(self.operator.on_effect_result(self.tags.pop(0), answer, self.now))

    def answer_lists(self) -> None:
        """Let the parameter server answer what it was told of the workers."""
        while self.lists:
            accepted = CommandAnswer(0, accepted=True)
            self.apply(self.operator.on_effect_result(self.lists.pop(0), accepted, self.now))

    def _send(self, effect: SendCommand) -> None:
        peer = effect.task.lease.peer
        match effect.command:
            case SetMembers():
                self.unanswered.append(effect.command)
                self.tags.append(effect.tag)
                if not self.holds_messages:
                    self.answer_message()
            case SetWorkers():
                self.listed = effect.command.workers
                self.lists.append(effect.tag)
                if not self.holds_lists:
                    self.answer_lists()
            case ChangeServer():
                self.told[peer] = effect.command
                executor = self.executors.get(peer)
                known = CommandAnswer(0, executor is not None, sends=None if executor is None else executor.sent)
                self.apply(self.operator.on_effect_result(effect.tag, known, self.now))

    def _start(self, effect: StartTask) -> None:
        peer, spec = effect.task.lease.peer, effect.spec
        self.leases[peer], self.specs[peer] = effect.task, effect
        if effect.task.lease.role == "aggregate":
            self.server_peer = peer
            assert spec.aggregation is not None
            assert spec.aggregation.term is not None
            self.server = ParameterServer(spec.aggregation.term, self.result.round + 1, averaged=self.server.averaged)
        else:
            assert spec.training is not None
            first = spec.training.first_round or 1
            self.executors[peer] = Executor(peer, first, self.result.weights or START)
        self.apply(self.operator.on_task_update(effect.task, TaskStarted(), self.now))

    async def run_background(self) -> None:
        """Run the work that effects have begun."""
        while self.background:
            effect = self.background.pop(0)
            outcome = await effect.work()
            self.apply(self.operator.on_effect_result(effect.tag, outcome, self.now))
        for name, message in self.context.notices:
            self.apply(self.operator.on_message(None, name, message, self.now)[1])
        self.context.notices.clear()

    @property
    def commits(self) -> dict[int, tuple[str, str]]:
        """Digests of the outer update and the weights of each recorded round."""
        return {r["round"]: (r["update"], r["weights"]) for r in self.rounds}

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Records of rounds."""
        return [record for record in self.journal if record["record"] == "round"]

    def named(self, event: str) -> list[Mapping[str, object]]:
        """Return the fields of the events of a name."""
        return [found.fields for found in self.events if found.name == event]

    # -------------------------------------------------------------------------------------------------------- workers

    def report(self, peer: PeerId, progress: Any) -> ReportAnswer:
        answer, effects = self.operator.on_training_report(self.leases[peer], progress, self.now)
        self.apply(effects)
        return answer

    def give_slice(self, peer: PeerId) -> bool:
        """Give an executor the next samples; return whether it got any."""
        try:
            found = self.operator.next_slice(self.leases[peer], DATASET, self.now)
        except SliceRefusedError:
            return False
        if not isinstance(found, SliceToUse):
            return False
        fields = {"epoch": found.epoch, "slice": found.index, "first": found.first, "end": found.end}
        self.write("assigned", {"worker": str(peer), "dataset": DATASET, **fields})
        self.executors[peer].queue.append(found)
        return True

    def train_batch(self, peer: PeerId) -> ReportAnswer | None:
        """Let an executor train on a batch; None if it gets no samples."""
        executor = self.executors[peer]
        while sum((given.end or 0) - (given.first or 0) for given in executor.queue) < BATCH:
            if not self.give_slice(peer):
                return None
        counts, samples = executor.take()
        answer = self.report(peer, BatchDone(batch_size=samples, slices=counts))
        left = getattr(answer, "counter", None)
        executor.left = left if left is not None else (None if executor.left is None else executor.left - 1)
        return answer

    def hand_in(self, *peers: PeerId, batches: int = 2) -> None:
        """Let workers train, state and send their updates."""
        for peer in peers:
            self.train_round(peer, batches)
        self.contribute(*peers)

    def contribute(self, *peers: PeerId) -> None:
        """Let workers state and send their updates."""
        for peer in peers:
            assert self.state(peer) == (True, "")
            self.send(peer)

    async def finish_round(self, *peers: PeerId) -> None:
        """Let the parameter server push its outer update, and workers merge it."""
        assert await self.push() is None
        for peer in peers:
            self.merge(peer)

    def train_round(self, peer: PeerId, batches: int) -> None:
        """Let an executor train on some batches."""
        for _ in range(batches):
            self.now += 1.0
            self.train_batch(peer)

    def state(self, peer: PeerId, message: StateContribution | None = None, **changes: Any) -> tuple[bool, str]:
        """Let a worker state its executor's update; return whether it may send it, and otherwise why not."""
        executor, task = self.executors[peer], self.leases[peer]
        self.report(peer, SendingUpdate())
        statement = message or executor.statement(task, **changes)
        answer, effects = self.operator.on_message(task, "state", statement, self.now)
        self.apply(effects)
        executor.sent = statement.update
        executor.is_waiting = True
        return answer.accepted, answer.reason

    def send(self, peer: PeerId) -> None:
        """Let the update of an executor arrive at the parameter server."""
        executor = self.executors[peer]
        assert executor.sent is not None
        self.server.updates[executor.round, peer] = executor.sent

    def refuse(self, peer: PeerId, reason: str = "tensor 'w' holds NaN", *, missing: bool = False) -> None:
        """Let the parameter server refuse the update of a member."""
        task = self.leases[self.server_peer]
        message = UpdateRefused(task.id_in(JOB_ID), self.server.round, peer, reason, missing or None)
        _answer, effects = self.operator.on_message(task, "refused", message, self.now)
        self.apply(effects)

    async def push(self, header: PushHeader | None = None) -> str | None:
        """Let the parameter server push its outer update and report the step; return why it was refused, if it was."""
        if header is None:
            header = self.server.stepped or self.server.step()
        target, effects = self.operator.on_push_request(self.leases[self.server_peer], header, self.now)
        self.apply(effects)
        if isinstance(target, Refusal):
            return target.reason
        assert isinstance(target, PushTarget)
        await self.receive(target, header)
        self.server.stepped = None
        await self.run_background()
        if self.outcome is None:
            self.report(self.server_peer, OuterStepTaken())
        return None

    async def receive(self, target: PushTarget, header: PushHeader) -> None:
        """Let the file of an outer update arrive."""
        self.result.updates[target.path] = header.digest
        assert target.prepare is not None
        await target.prepare(target.path)
        task = self.leases[self.server_peer]
        self.apply(self.operator.on_push_complete(task, header, target.path, header.digest, self.now))

    def ask_commit(self, peer: PeerId, number: int, update: str) -> CommitStatus | RetryAfter:
        question = AwaitCommit(self.leases[peer].id_in(JOB_ID), number, update)
        answer, effects = self.operator.on_message(self.leases[peer], "await", question, self.now)
        self.apply(effects)
        found: CommitStatus | RetryAfter = answer
        return found

    def merge(self, peer: PeerId) -> ReportAnswer:
        """Let an executor merge the outer update of its round."""
        executor = self.executors[peer]
        update, weights = self.commits[executor.round]
        status = self.ask_commit(peer, executor.round, update)
        assert status == CommitStatus(committed=True, weights=weights)
        self.report(peer, RoundMetrics(round=executor.round, metrics={"loss": 1.0 / executor.round}))
        answer = self.report(peer, UpdateMerged())
        executor.begin_round(weights)
        return answer

    def lose(self, peer: PeerId, reason: str = "its lease ended") -> None:
        """Lose a worker."""
        task = self.leases.pop(peer)
        self.executors.pop(peer, None)
        self.apply(self.operator.on_lease_lost(task.lease, reason, self.now))
        self.apply(self.operator.on_task_update(task, TaskEnded(TaskState.FAILED, reason), self.now))

    def end_task(
        self,
        peer: PeerId,
        state: TaskState = TaskState.FINISHED,
        reason: str = "",
        exit_code: int | None = None,
        last_lines: tuple[str, ...] = (),
    ) -> None:
        """Let an executor exit."""
        task = self.leases.pop(peer)
        self.executors.pop(peer, None)
        ended = TaskEnded(state, reason, exit_code, last_lines)
        self.apply(self.operator.on_task_update(task, ended, self.now))
