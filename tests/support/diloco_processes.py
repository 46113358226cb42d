"""Simulated executors, with what their workers do for them, and parameter servers of a DiLoCo job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel

from hypha_proto.batch_reports import MAX_BATCHES, BatchesCounted, ReportBatches
from hypha_proto.commands import ChangeServer, CommandAnswer, SetMembers, SetWorkers
from hypha_proto.contributions import AwaitCommit, CommitStatus, ContributionKnown
from hypha_proto.ids import PeerId
from hypha_proto.job_membership import JoinRound, RoundToJoin
from hypha_proto.job_spec import AggregateConfig, TrainConfig
from hypha_proto.round_membership import UpdateRefused
from hypha_proto.training_reports import (
    BatchDone,
    Done,
    OuterStepTaken,
    ReportAnswer,
    ReportError,
    RoundMetrics,
    SendingUpdate,
    TrainedBatch,
    UpdateMerged,
)
from hypha_proto.transfer import OUTER_UPDATE, PullRequest, PushHeader, Refusal
from hypha_scheduler.jobs.artifacts import artifact_dataset
from hypha_scheduler.strategies.base import (
    PushTarget,
    RetryAfter,
    SliceRefusedError,
    SliceToUse,
    TaskEnded,
    TaskRef,
    TaskState,
)
from hypha_scheduler.strategies.diloco.specs import MOMENTUM, WEIGHTS
from support.diloco_scheduler import NotRunning, Scheduler, SchedulerDied
from support.diloco_simulation import (
    BATCH,
    DATASET,
    JOB_ID,
    SCHEDULER,
    START,
    Executor,
    digest_of,
)

if TYPE_CHECKING:
    from support.diloco_processes import Training

AHEAD = 8
"""Batches that are trained and not counted while the end of the round is not known."""
TIMEOUT = 1.0
"""Seconds after which a worker waits no longer for an answer."""
SILENCE = 10.0
"""Seconds for which a silent scheduler is waited for at the end of a round, or where that is not known."""
SETTLED_AHEAD = 2
"""Batches before the end of a round at which it is settled."""
LATEST = 3.0
"""Seconds by which a doubled message is late."""


@dataclass(eq=False)
class BackgroundReports:
    """The reports of one round, as the executor and its worker send them."""

    training: Training
    number: int
    kept: list[TrainedBatch] = field(default_factory=list)
    """Batches that are not counted."""
    first: int = 0
    last: int | None = None
    settled: int | None = None
    """Number of batches after which the round ends, if the scheduler will not change it."""
    is_done: bool = False
    silent_since: float | None = None
    refusal: str = ""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    changed: anyio.Event = field(default_factory=anyio.Event)

    @property
    def trained(self) -> int:
        return self.first + len(self.kept)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be trained in the round, as far as is known."""
        return self.is_done or (self.last is not None and self.trained >= self.last)

    async def ends(self) -> bool:
        """Return whether nothing more is to be trained in the round. Raises `NotRunning`."""
        if self.is_over and not self.is_done:
            await self.confirm_end()
        return self.is_over

    async def add(self, batch: TrainedBatch) -> None:
        """Hand a batch over; wait if too many are unanswered.

        Raises:
            NotRunning: the scheduler has refused a report.
        """
        self.kept.append(batch)
        self._change()
        while len(self.kept) > AHEAD and self.last is None and not (self.is_done or self.is_silent_for(SILENCE)):
            await self._wait()

    def is_silent_for(self, seconds: float) -> bool:
        """Return whether the scheduler has been silent for so long."""
        return self.silent_since is not None and anyio.current_time() - self.silent_since >= seconds

    async def confirm_end(self) -> None:
        """Wait until it is settled that the last batch is trained: an answer may allocate more. Raises `NotRunning`."""
        self.training.network.seen["ends confirmed"] += 1
        with anyio.move_on_after(SILENCE):
            while self.kept and not self.is_done and self.settled != self.last:
                await self._wait()

    async def _wait(self) -> None:
        if self.refusal:
            raise NotRunning
        await self.changed.wait()

    def _change(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def run(self) -> None:
        """Send what gathers, one message at a time."""
        with self.scope:
            while not self.refusal:
                while not self.kept:
                    await self.changed.wait()
                while self.training.resumed is not None:
                    await self.training.resumed.wait()
                task, batches = self.training.task, tuple(self.kept[:MAX_BATCHES])
                message = ReportBatches(
                    attempt=task.id_in(JOB_ID),
                    round=self.number,
                    first=self.first,
                    batches=batches,
                    last=self.last,
                    settles=(self.last is not None and self.last - self.trained <= SETTLED_AHEAD) or None,
                )
                self._apply(message, await self._send(message))
                self._change()
                await anyio.sleep(0.0 if self.silent_since is None else 0.25)

    def _apply(self, message: ReportBatches, answer: BatchesCounted | None) -> None:
        if answer is None:
            self.silent_since = anyio.current_time() if self.silent_since is None else self.silent_since
            return
        self.silent_since = None
        counted = max(self.first, min(answer.counted, self.trained))
        del self.kept[: counted - self.first]
        self.first, self.refusal = counted, answer.reason
        self.last = self.last if answer.last is None else answer.last
        if message.settles and answer.last == message.last:
            self.settled = answer.last
        self.is_done |= answer.done is True

    async def _send(self, message: ReportBatches) -> BatchesCounted | None:
        """Send a message; return the answer, None if none comes."""
        network = self.training.network
        probability = network.message_faults or 0.0
        if network.happens("batches lost", probability):
            await anyio.sleep(TIMEOUT)
            return None
        if network.happens("batches doubled", probability):
            network.tasks.start_soon(self._deliver_late, message)
        await network.delay("message")
        answer = self._deliver(message)
        await network.delay("message")
        if network.happens("answer to batches lost", probability):
            await anyio.sleep(TIMEOUT)
            return None
        return answer

    async def _deliver_late(self, message: ReportBatches) -> None:
        await anyio.sleep(self.training.network.random.uniform(0.0, LATEST))
        self._deliver(message)

    def _deliver(self, message: ReportBatches) -> BatchesCounted | None:
        """Let a message reach the scheduler; None if there is none that runs the task."""
        scheduler, task = self.training.network.scheduler, self.training.task
        if scheduler is None or not self.training.node.is_connected or scheduler.task_on(task.lease.id) != task:
            return None
        try:
            answer: BatchesCounted = scheduler.ask(
                lambda: scheduler.operator.on_message(task, "ReportBatches", message, scheduler.now)
            )
        except SchedulerDied:
            return None
        return answer

    def check(self) -> None:
        """Note a fault unless the scheduler has counted each batch once, and all of which it has said so."""
        network, peer = self.training.network, self.training.peer
        scheduler = network.scheduler
        running = None if scheduler is None else scheduler.operator._running
        if running is None or running.training.rounds.round_of(peer) != self.number:
            return
        counted = running.training.rounds.progress_of(peer, self.number)[1]
        network.seen["reports checked"] += 1
        if not self.first <= counted <= self.trained and not network.died:
            network.faults.append(f"round {self.number}: {counted} of {self.trained} batches of {peer} are counted")


if TYPE_CHECKING:
    from support.diloco_network import Network, Node

T = TypeVar("T")


@dataclass(eq=False)
class Process:
    """An executor or a parameter server."""

    network: Network
    node: Node
    task: TaskRef
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    end: TaskEnded | None = None
    """How it was ended from outside, if its worker reports that."""
    resumed: anyio.Event | None = None
    """Set when it is continued; None while it is not stopped."""
    phase: str = "start"

    @property
    def peer(self) -> PeerId:
        return self.node.peer

    async def reach(self, phase: str) -> None:
        """Note that the process is at a point of its work, where something may happen to it."""
        self.phase = phase
        self.network.reached(phase, self)
        await anyio.lowlevel.checkpoint()
        while self.resumed is not None:
            await self.resumed.wait()

    async def spend(self, kind: str) -> None:
        """Work for a while."""
        factors = {"batch": self.node.slowness, "start": self.node.start_factor}
        await self.network.delay(kind, factors.get(kind, 1.0))
        while self.resumed is not None:
            await self.resumed.wait()

    def stop(self) -> None:
        """Stop it as SIGSTOP does."""
        self.resumed = self.resumed or anyio.Event()

    def resume(self) -> None:
        """Continue it."""
        if self.resumed is not None:
            self.resumed.set()
            self.resumed = None

    async def ask(self, question: Callable[[Scheduler, TaskRef], T | RetryAfter]) -> T:
        """Ask the scheduler until it answers; the same question may reach it twice.

        Raises:
            NotRunning: it knows no such task.
        """
        network, unknown = self.network, 0
        while True:
            await network.delay("message")
            scheduler = network.scheduler
            if scheduler is None or not self.node.is_connected:
                await anyio.sleep(0.5)
                continue
            task = scheduler.task_on(self.task.lease.id)
            if task != self.task:
                unknown += 1
                if unknown > 3:
                    raise NotRunning
                await anyio.sleep(1.0)
                continue
            try:
                answer = question(scheduler, task)
            except SchedulerDied:
                continue
            if isinstance(answer, RetryAfter):
                with anyio.move_on_after(min(max(answer.seconds, 0.05), 20.0)):
                    await scheduler.changed.wait()
                continue
            await network.delay("message")
            if not self.node.is_connected or network.happens("answer lost", network.answer_loss):
                await anyio.sleep(0.5)
                continue
            while self.resumed is not None:
                await self.resumed.wait()
            return answer

    async def report(self, progress: Any) -> ReportAnswer:
        """Report to the scheduler; a repeated report reaches one run of it once."""
        known: dict[Scheduler, ReportAnswer] = {}

        def tell(scheduler: Scheduler, task: TaskRef) -> ReportAnswer:
            if scheduler not in known:
                report = scheduler.operator.on_training_report
                known[scheduler] = scheduler.ask(lambda: report(task, progress, scheduler.now))
            return known[scheduler]

        return await self.ask(tell)

    async def send(self, name: str, message: Any) -> Any:
        """Send the scheduler a message of the strategy."""
        return await self.ask(
            lambda scheduler, task: scheduler.ask(
                lambda: scheduler.operator.on_message(task, name, message, scheduler.now)
            )
        )

    async def pull(self, name: str) -> str | None:
        """Pull a file of the job; return what it is, None if the scheduler has none now."""
        await self.spend("weights")
        request = PullRequest(dataset=name, index=0)

        def ask(scheduler: Scheduler, task: TaskRef) -> str | None:
            found = scheduler.operator.on_pull_request(task, request)
            return None if isinstance(found, Refusal) else scheduler.network.content(scheduler, found.source)

        return await self.ask(ask)

    async def run(self) -> TaskEnded:
        raise NotImplementedError


@dataclass(eq=False)
class Training(Process):
    """An executor and what its worker does for it."""

    config: TrainConfig = field(kw_only=True)
    server: PeerId = field(init=False)
    term: int = field(init=False)
    executor: Executor = field(init=False)
    stated: tuple[int, str] | None = None
    """Round and digest of the last update that may be sent."""
    outer: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    """Digests of outer updates that have arrived, by round."""
    received: set[tuple[int, str]] = field(default_factory=set)
    arrived: anyio.Event = field(default_factory=anyio.Event)
    pushing: anyio.CancelScope | None = None

    def __post_init__(self) -> None:
        self.server, self.term = self.config.updates.peers[0], self.config.term or 0  # type: ignore[union-attr]
        self.executor = Executor(self.peer, self.config.first_round or 1)

    # -------------------------------------------------------------------------------------------------------- executor

    async def run(self) -> TaskEnded:
        """Train until the scheduler says that the job is done."""
        await self.reach("preparing")
        joins = bool(getattr(self.config, "join", None))
        if joins:
            await self.fetch_slice(ahead=True)
        await self.spend("start")
        if joins:
            if not await self.join():
                return TaskEnded(TaskState.FINISHED)
        elif self.executor.round > 1:
            self.executor.weights = await self.pull(artifact_dataset(JOB_ID, WEIGHTS)) or START
        while True:
            if not await self.train():
                return TaskEnded(TaskState.FINISHED)
            known = await self.hand_in()
            if known is None:
                return TaskEnded(TaskState.FINISHED)
            if known.rejoin:
                self.network.seen["rejoined"] += 1
                self.executor.queue.clear()
                if not await self.join():
                    return TaskEnded(TaskState.FINISHED)
                continue
            if not await self.merge():
                return TaskEnded(TaskState.FINISHED)

    async def join(self) -> bool:
        """Begin with the round that the scheduler names; return False if there is none."""
        executor = self.executor
        while True:
            await self.reach("joining")
            answer: RoundToJoin = await self.send("JoinRound", JoinRound(self.task.id_in(JOB_ID)))
            if answer.reason:
                return False
            if answer.round is None:
                await anyio.sleep(0.3)
                continue
            if answer.keeps:
                self.network.seen["kept slices"] += 1
            else:
                executor.queue.clear()
            weights = START if answer.weights is None else await self.pull(artifact_dataset(JOB_ID, WEIGHTS))
            if answer.weights not in (None, weights):
                self.network.seen["joined too late"] += 1
                continue
            executor.round, executor.weights = answer.round, weights or START
            executor.used, executor.left = [], None
            for number in [number for number in self.outer if number < executor.round]:
                del self.outer[number]
            await self.reach("joined")
            return True

    async def train(self) -> bool:
        """Train until the update is due; return False if there is nothing left to do."""
        if self.network.message_faults is not None:
            return await self.train_ahead()
        executor = self.executor
        while executor.left is None or executor.left > 0:
            counts, samples = await self.train_batch()
            answer = await self.report(BatchDone(batch_size=samples, slices=counts))
            if isinstance(answer, Done):
                return False
            if isinstance(answer, ReportError):
                raise NotRunning
            left = getattr(answer, "counter", None)
            executor.left = left if left is not None else (None if executor.left is None else executor.left - 1)
        return True

    async def train_batch(self) -> tuple[dict[str, int], int]:
        """Train one batch; return how many samples of each slice it had, and in all."""
        executor = self.executor
        while sum((given.end or 0) - (given.first or 0) for given in executor.queue) < BATCH:
            if not await self.fetch_slice():
                await anyio.sleep(0.5)
        counts, samples = executor.take()
        await self.reach("training")
        await self.spend("batch")
        return counts, samples

    async def train_ahead(self) -> bool:
        """Train as `train` does, and report in the background."""
        reports = BackgroundReports(self, self.executor.round)
        self.network.tasks.start_soon(reports.run)
        try:
            while not await reports.ends():
                began = anyio.current_time()
                counts, samples = await self.train_batch()
                seconds = anyio.current_time() - began
                await reports.add(TrainedBatch(batch_size=samples, slices=counts, batch_ms=1000 * seconds))
            reports.check()
        finally:
            reports.scope.cancel()
        return not reports.is_done

    async def fetch_slice(self, *, ahead: bool = False) -> bool:
        """Get the next samples, perhaps ahead of the first round; return whether there were any."""

        def ask(scheduler: Scheduler, task: TaskRef) -> SliceToUse | RetryAfter | None:
            try:
                operator = scheduler.operator
                found = (operator.slice_ahead if ahead else operator.next_slice)(task, DATASET, scheduler.now)
            except SliceRefusedError:
                return None
            if isinstance(found, SliceToUse):
                fields = {"epoch": found.epoch, "slice": found.index, "first": found.first, "end": found.end}
                scheduler.write("assigned", {"worker": str(self.peer), "dataset": DATASET, **fields})
                scheduler.tell(tuple)
            return found

        found = await self.ask(ask)
        if isinstance(found, SliceToUse):
            self.executor.queue.append(found)
        return found is not None

    async def hand_in(self) -> ContributionKnown | None:
        """State the update, and begin to send it if it counts; None if the job is done."""
        executor = self.executor
        await self.reach("sending")
        if isinstance(await self.report(SendingUpdate()), Done):
            return None
        statement = executor.statement(self.task, **self.network.lies.pop(self.peer, {}))
        self.network.note_update(self, statement.update)
        known: ContributionKnown = await self.send("StateContribution", statement)
        self.network.seen["accepted" if known.accepted else "rejoin" if known.rejoin else "refused"] += 1
        await self.reach("stated")
        if known.accepted:
            self.stated = executor.round, statement.update
            self.begin_push()
        return known

    async def merge(self) -> bool:
        """Merge the outer update of the round when it is committed; return False if the job is done."""
        executor = self.executor
        await self.reach("waiting")
        status, update = await self.wait_for_commit()
        await self.reach("merging")
        await self.spend("merge")
        weights = digest_of(executor.weights, update)
        if weights != status.weights:
            self.network.seen["weights fetched"] += 1
            self.network.faults.append(f"{self.peer}: weights after round {executor.round} differ")
        await self.report(RoundMetrics(round=executor.round, metrics={"loss": 1.0 / executor.round}))
        answer = await self.report(UpdateMerged())
        if isinstance(answer, Done):
            return False
        if isinstance(answer, ReportError):
            raise NotRunning
        self.network.merged(self, weights)
        executor.begin_round(weights)
        return True

    async def wait_for_commit(self) -> tuple[CommitStatus, str]:
        """Return the committed outer update of the executor's round."""
        while True:
            while not self.outer[self.executor.round]:
                await self.arrived.wait()
            update, number = self.outer[self.executor.round].pop(0), self.executor.round
            question = AwaitCommit(self.task.id_in(JOB_ID), number, update)
            status: CommitStatus = await self.send("AwaitCommit", question)
            if status.committed:
                return status, update
            self.network.seen["outer update discarded"] += 1

    # ---------------------------------------------------------------------------------------------------------- worker

    def begin_push(self) -> None:
        """Send the stated update to the parameter server, until it has it."""
        if self.pushing is not None:
            self.pushing.cancel()
        assert self.stated is not None
        self.pushing = anyio.CancelScope()
        self.network.tasks.start_soon(self._push, self.pushing, self.stated)

    async def _push(self, scope: anyio.CancelScope, stated: tuple[int, str]) -> None:
        network = self.network
        with scope:
            while self.node.process is self:
                await network.delay("push")
                server = network.server_at(self.server)
                if server is not None and self.node.is_reachable and server.receive(self, *stated):
                    network.reached("pushed", self)
                    return
                await anyio.sleep(0.5)

    def receive(self, server: ParameterServer, number: int, update: str) -> bool:
        """Receive an outer update; return False if it is refused."""
        if server.term != self.term or server.peer != self.server:
            self.network.seen["outer update of another term"] += 1
            return False
        self.keep(number, update)
        return True

    def keep(self, number: int, update: str) -> None:
        """Give an outer update to the executor when it wants it."""
        if (number, update) not in self.received:
            self.received.add((number, update))
            self.outer[number].append(update)
            self.arrived.set()
            self.arrived = anyio.Event()

    def change_server(self, message: ChangeServer) -> CommandAnswer:
        """Send to another parameter server from now on."""
        if message.term < self.term:
            return CommandAnswer(0, accepted=False, reason="an older term")
        self.term, self.server = message.term, message.server
        if message.update is not None and message.outer_update is not None:
            self.network.tasks.start_soon(self._pull_outer, message.round - 1, message.update, message.outer_update)
        if self.stated is None or self.stated[0] != message.round:
            return CommandAnswer(0, accepted=True)
        self.begin_push()
        return CommandAnswer(0, accepted=True, sends=self.stated[1])

    async def _pull_outer(self, number: int, update: str, address: Any) -> None:
        """Pull the outer update of a round that the last parameter server has not sent, while it is served."""
        term = self.term
        while self.node.process is self and self.term == term and self.executor.round <= number:
            if (number, update) in self.received:
                return
            try:
                if await self.pull(address.dataset) == update:
                    self.network.seen["outer update pulled"] += 1
                    self.keep(number, update)
            except NotRunning:
                return
            await anyio.sleep(0.5)


@dataclass(eq=False)
class ParameterServer(Process):
    """A parameter server."""

    config: AggregateConfig = field(kw_only=True)
    term: int = field(init=False)
    workers: tuple[PeerId, ...] = field(init=False)
    round: int = 0
    """The open round; 0 while it starts."""
    momentum: str = START
    """Digest of the weights that belong to its momentum."""
    members: SetMembers | None = None
    announced_at: float = 0.0
    updates: dict[tuple[int, PeerId], str] = field(default_factory=dict)
    refused: set[tuple[int, PeerId]] = field(default_factory=set)
    changed: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.term = self.config.term or 0
        self.workers = tuple(self.config.updates.peers)  # type: ignore[union-attr]

    async def run(self) -> TaskEnded:
        """Take outer steps until the job is done."""
        await self.reach("server starts")
        await self.spend("start")
        if self.config.momentum is not None:
            self.momentum = await self.pull(artifact_dataset(JOB_ID, MOMENTUM)) or START
        self.round = self.network.rounds_after(self.momentum) + 1
        async with anyio.create_task_group() as pushes:
            while True:
                number, used = await self.collect()
                await self.reach("before the step")
                await self.spend("step")
                header = self.step(number, used)
                await self.reach("in the step")
                receivers = [peer for peer in self.workers if peer != SCHEDULER]
                half = len(receivers) // 2
                for position, peer in enumerate(receivers):
                    pushes.start_soon(self.push, peer, header, position >= half)
                if not await self.hand_in(header):
                    pushes.cancel_scope.cancel()
                    return TaskEnded(TaskState.FAILED, "the scheduler has refused the outer update")
                await self.reach("after the step")
                answer = await self.report(OuterStepTaken())
                if isinstance(answer, Done):
                    break
                if isinstance(answer, ReportError):
                    raise NotRunning
        return TaskEnded(TaskState.FINISHED)

    async def collect(self) -> tuple[int, list[Any]]:
        """Close the open round once no update is waited for; return it, and the members whose updates are there."""
        while True:
            for peer in self.not_finite:
                self.network.seen["NaN"] += 1
                await self.refuse(peer, "tensor 'w' holds NaN")
            missing = self.missing
            if self.members is not None and not missing:
                found = [m for m in self.members.members if (self.round, m.peer) not in self.refused]
                if found:
                    self.round, self.members = self.round + 1, None
                    return self.round - 1, found
            until = 3600.0 if self.members is None else self.announced_at + self.members.deadline_ms / 1000
            changed = self.changed
            with anyio.move_on_after(max(0.0, until - anyio.current_time())) as waiting:
                await changed.wait()
            if waiting.cancelled_caught and self.members is not None:
                self.announced_at = anyio.current_time()
                for peer in missing:
                    self.network.seen["missing"] += 1
                    await self.refuse(peer, "it did not arrive in time", missing=True)

    @property
    def not_finite(self) -> list[PeerId]:
        """Members whose updates hold NaN, of which the scheduler does not know."""
        members = () if self.members is None else self.members.members
        found = [member.peer for member in members if self.updates.get((self.round, member.peer)) in self.network.nan]
        return [peer for peer in found if (self.round, peer) not in self.refused]

    @property
    def missing(self) -> list[PeerId]:
        members = () if self.members is None else self.members.members
        number = self.round
        return [
            member.peer
            for member in members
            if self.updates.get((number, member.peer)) != member.update and (number, member.peer) not in self.refused
        ]

    async def refuse(self, peer: PeerId, reason: str, *, missing: bool = False) -> None:
        """Tell the scheduler that an update cannot be used."""
        self.refused.add((self.round, peer))
        message = UpdateRefused(self.task.id_in(JOB_ID), self.round, peer, reason, missing or None)
        await self.send("UpdateRefused", message)

    def step(self, number: int, used: Sequence[Any]) -> PushHeader:
        """Average updates."""
        digest = digest_of(number, self.momentum, [(str(m.peer), m.samples, m.update) for m in used])
        self.network.steps[digest] = number, self.term, [member.peer for member in used]
        self.network.momenta[digest] = self.momentum
        self.momentum = digest_of(self.momentum, digest)
        samples = sum(member.samples for member in used)
        about = self.task.id_in(JOB_ID)
        return PushHeader(about, number, OUTER_UPDATE, "outer", 100, digest, SCHEDULER, samples=samples, term=self.term)

    async def hand_in(self, header: PushHeader) -> bool:
        """Push the outer update to the scheduler; return False if it is refused for good."""

        def ask(scheduler: Scheduler, task: TaskRef) -> tuple[Scheduler, Any] | RetryAfter:
            found = scheduler.ask(lambda: scheduler.operator.on_push_request(task, header, scheduler.now))
            return found if isinstance(found, RetryAfter) else (scheduler, found)

        while True:
            scheduler, target = await self.ask(ask)
            if isinstance(target, Refusal):
                self.network.seen[f"push refused: {target.reason[:24]}"] += 1
                return "already" in target.reason
            assert isinstance(target, PushTarget)
            await self.network.delay("push")
            if await self.network.receive_push(scheduler, self.task, target, header):
                return True
            await anyio.sleep(0.5)

    async def push(self, peer: PeerId, header: PushHeader, is_late: bool) -> None:
        """Push the outer update to a worker, for a minute at most."""
        network = self.network
        for _ in range(60):
            await network.delay("push")
            await self.reach("second half of the pushes" if is_late else "first half of the pushes")
            node = network.nodes[peer]
            process = node.process if node.is_reachable and self.node.is_reachable else None
            if isinstance(process, Training) and (
                process.receive(self, header.round, header.digest) or process.term > self.term
            ):
                return
            if not node.is_alive or peer not in self.workers:
                return
            await anyio.sleep(1.0)

    def announce(self, message: SetMembers) -> CommandAnswer:
        """Process the members of a round."""
        if self.round and message.round != self.round:
            return CommandAnswer(0, accepted=False, reason=f"round {message.round} is not open but {self.round}")
        self.members, self.announced_at = message, anyio.current_time()
        self._wake()
        return CommandAnswer(0, accepted=True)

    def change_workers(self, message: SetWorkers) -> CommandAnswer:
        """Process the list of workers."""
        self.workers = message.workers
        return CommandAnswer(0, accepted=True)

    def receive(self, training: Training, number: int, update: str) -> bool:
        """Receive an update; return False if it is to be sent again later."""
        if training.term != self.term or training.peer not in self.workers or not self.node.is_reachable:
            return False
        self.updates[number, training.peer] = update
        self._wake()
        return True

    def _wake(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()
