"""A simulated network for one DiLoCo job: scheduler, workers, executors and parameter servers on a virtual clock.

`Network.run` runs a job to its end with the real operator, under `hypha_net.testing.simulate`. Everything else is
simulated: leases and auctions, processes, messages, transfers, and what goes wrong with them. Nothing is averaged: the
digest of an outer update is that of the updates that it was made from, and the digest of weights that of the outer
updates so far. `diloco_invariants` checks what must hold afterwards.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel

from hypha_net.errors import TransferRefusedError
from hypha_proto.commands import ChangeServer, Command, CommandAnswer, SetMembers, SetWorkers
from hypha_proto.ids import PeerId
from hypha_proto.job_spec import One, PeersReference
from hypha_proto.transfer import PushHeader
from hypha_scheduler.strategies.base import (
    PushTarget,
    StartTask,
    TaskEnded,
    TaskRef,
    TaskState,
)
from hypha_scheduler.strategies.diloco.config import DilocoJobConfig
from hypha_scheduler.strategies.diloco.operator import DilocoOperator
from hypha_scheduler.strategies.diloco.restore import restore
from hypha_scheduler.strategies.diloco.running_job import TrainingData
from hypha_scheduler.strategies.diloco.specs import AGGREGATE, TRAIN
from support.diloco_processes import ParameterServer, Process, Training
from support.diloco_scheduler import LEASE, NotRunning, Scheduler, SchedulerDied
from support.diloco_simulation import (
    SCHEDULER,
    START,
    FakeContext,
    FakeDataset,
    FakeResult,
    job_table,
)

ORPHAN_GRACE = 60.0
"""Seconds for which workers keep the tasks of a scheduler that does not renew."""
LONGEST = 3600.0
"""Virtual seconds after which a job that has not ended never will."""


@dataclass
class Delays:
    """Seconds that things take, each the mean of a uniform distribution from half to one and a half of it."""

    message: float = 0.02
    start: float = 2.0
    """Starting an executor or a parameter server."""
    weights: float = 0.5
    """Fetching weights, or the momentum."""
    batch: float = 0.4
    push: float = 0.5
    """Sending an update, to the parameter server or from it."""
    step: float = 0.4
    merge: float = 0.2
    auction: float = 0.8
    """Finding a worker that is free."""


# ---------------------------------------------------------------------------------------------------------------- nodes


@dataclass(eq=False)
class Node:
    """A machine with one worker, which takes one task at a time."""

    network: Network
    peer: PeerId
    role: str
    slowness: float = 1.0
    """Factor of the seconds of a batch."""
    is_alive: bool = True
    is_reachable: bool = True
    hears_scheduler: bool = True
    """Whether it is connected with the scheduler, while it is reachable."""
    start_factor: float = 1.0
    """Factor of the seconds of a start."""
    is_draining: bool = False
    leases: dict[uuid.UUID, float] = field(default_factory=dict)
    """Leases with the times until which they last."""
    process: Process | None = None

    @property
    def is_connected(self) -> bool:
        """Whether messages between it and the scheduler arrive."""
        return self.is_alive and self.is_reachable and self.hears_scheduler

    @property
    def is_free(self) -> bool:
        """Whether it offers its resources."""
        usable = self.is_connected and not self.is_draining
        return usable and not self.leases and self.process is None

    def start(self, task: TaskRef, effect: StartTask) -> bool:
        """Start a task; return False if it cannot."""
        if not self.is_alive or task.lease.id not in self.leases or self.process is not None:
            return False
        spec = effect.spec
        kind: Any = ParameterServer if spec.training is None else Training
        self.process = kind(self.network, self, task, config=spec.training or spec.aggregation)
        self.network.tasks.start_soon(self._run, self.process)
        return True

    async def _run(self, process: Process) -> None:
        end: TaskEnded | None = None
        with process.scope:
            try:
                end = await process.run()
            except NotRunning:
                end = TaskEnded(TaskState.FAILED, "the scheduler does not know the task", 1)
        end = process.end if process.scope.cancelled_caught else end
        if self.process is process:
            self.process = None
        if isinstance(process, Training) and process.pushing is not None and end is None:
            process.pushing.cancel()
        if end is not None:
            await self._report_end(process, end)

    async def _report_end(self, process: Process, end: TaskEnded) -> None:
        lease, network = process.task.lease.id, self.network
        while lease in self.leases and self.is_alive:
            await network.delay("message")
            scheduler = network.scheduler
            if scheduler is not None and self.is_connected:
                try:
                    scheduler.task_over(process.task, end)
                except SchedulerDied:
                    continue
                if self.is_draining:
                    self.leave()
                return
            await anyio.sleep(0.5)

    def end(self, task: TaskRef, end: TaskEnded) -> None:
        """End a task; its worker reports how."""
        if self.process is not None and self.process.task == task:
            self.process.end = end
            self.process.scope.cancel()
            self.process = None

    def fail(self, end: TaskEnded) -> None:
        """Let the executor die; its worker reports how."""
        if self.process is not None:
            self.end(self.process.task, end)

    def crash(self) -> None:
        """Kill the worker and its executor."""
        self.is_alive = False
        self._end_silently()
        self.leases.clear()

    def leave(self) -> None:
        """End the worker, which says so."""
        leases, scheduler = set(self.leases), self.network.scheduler
        is_heard = self.is_connected
        self.crash()
        if scheduler is not None and is_heard:
            for lease in [lease for lease in scheduler.held.values() if lease.id in leases]:
                scheduler.lose(lease, "it is shutting down")

    def come_back(self) -> None:
        """Start the worker again."""
        self.is_alive, self.is_reachable, self.is_draining = True, True, False

    async def _leave_in_the_end(self) -> None:
        await anyio.sleep(60.0)
        if self.is_draining and self.is_alive:
            self.leave()

    def drain(self) -> None:
        """Announce that the worker ends after its task."""
        self.is_draining = True
        if not self.leases:
            self.leave()
            return
        self.network.tasks.start_soon(self._leave_in_the_end)
        scheduler = self.network.scheduler
        for lease in [] if scheduler is None else list(scheduler.held.values()):
            if lease.peer == self.peer and scheduler is not None:
                scheduler.drain(lease, 60.0)

    def release_soon(self, lease: uuid.UUID) -> None:
        """Hear that a lease is released, if the worker can be reached; else it expires."""

        async def release() -> None:
            await self.network.delay("message")
            if self.is_connected:
                self.drop(lease)

        self.network.tasks.start_soon(release)

    def drop(self, lease: uuid.UUID) -> None:
        """End a lease, and the process on it."""
        has_process = self.process is not None and self.process.task.lease.id == lease
        if self.leases.pop(lease, None) is not None and has_process:
            self._end_silently()

    def _end_silently(self) -> None:
        if self.process is not None:
            self.process.end = None
            self.process.scope.cancel()
            self.process = None

    def expire(self, grace: float) -> None:
        """End the leases that nobody has renewed."""
        for lease in [lease for lease, until in self.leases.items() if anyio.current_time() > until + grace]:
            self.drop(lease)


# -------------------------------------------------------------------------------------------------------------- network


@dataclass(eq=False)
class Network:
    """Everything of one job; `on_phase` is called at each point that a process reaches."""

    seed: int = 0
    table: DilocoJobConfig = field(default_factory=job_table)
    workers: int = 4
    servers: int = 2
    delays: Delays = field(default_factory=Delays)
    slowness: Sequence[float] = (1.0,)
    """Factors of the workers' batch times, in turn."""
    answer_loss: float = 0.0
    """Probability that the answer to a question is lost, and the question repeated."""
    message_faults: float | None = None
    """Probability that a message with batches is lost, is doubled and late, or has no answer; None if executors report
    one batch at a time, and wait."""
    dataset: FakeDataset = field(default_factory=FakeDataset)
    on_phase: Callable[[str, Process], None] = lambda phase, process: None
    during: Callable[[Network], Coroutine[Any, Any, None]] | None = None
    """Runs beside the job."""
    downtime: Callable[[Random], float] = lambda random: random.uniform(0.5, 5.0)
    """Seconds for which a scheduler that has died is away."""
    loses_power: float = 0.0
    """Probability that a scheduler that dies also loses assignments that no later record has synced."""

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.journal: list[dict[str, Any]] = []
        self.events: list[tuple[float, str, Mapping[str, object]]] = []
        self.starts: list[tuple[float, StartTask]] = []
        self.nodes: dict[PeerId, Node] = {}
        self.scheduler: Scheduler | None = None
        self.dispatched: dict[uuid.UUID, TaskRef] = {}
        """Tasks that workers have confirmed, as the journal of the runner has them."""
        self.updates: dict[Path, str] = {}
        self.outcome: str | None = None
        self.dies_after: int | None = None
        """Number of records after which the scheduler dies."""
        self.died = 0
        self.is_resumed = False
        """Whether the scheduler was ever started again without taking tasks up."""
        self.seen: Counter[str] = Counter()
        self.phases: Counter[str] = Counter()
        self.faults: list[str] = []
        """What must not happen, and did."""
        self.truth: dict[str, tuple[PeerId, int, str, list[tuple[int, int, int, int]]]] = {}
        """Peer, round, weights and samples of each update, by its digest."""
        self.nan: set[str] = set()
        """Digests of updates that hold NaN."""
        self.lies: dict[PeerId, dict[str, Any]] = {}
        """What is false in the next statement of a worker about its update."""
        self.steps: dict[str, tuple[int, int, list[PeerId]]] = {}
        """Round, term and members of each outer update, by its digest."""
        self.momenta: dict[str, str] = {}
        self.record_times: list[tuple[float, str, int | None]] = []
        self.absences: list[tuple[float, float]] = []
        """Times from and to which there was no scheduler."""
        self._number = 0
        self._scope: anyio.CancelScope | None = None
        for position in range(self.workers):
            self.add_node(TRAIN, self.slowness[position % len(self.slowness)])
        for _ in range(self.servers):
            self.add_node(AGGREGATE)

    # -------------------------------------------------------------------------------------------------------- machinery

    def number(self) -> int:
        """Return a number that nobody has."""
        self._number += 1
        return self._number

    def add_node(self, role: str, slowness: float = 1.0) -> Node:
        """Add a machine."""
        peer = PeerId.from_public_key((1000 + self.number()).to_bytes(32, "big"))
        self.nodes[peer] = Node(self, peer, role, slowness)
        return self.nodes[peer]

    async def delay(self, kind: str, factor: float = 1.0) -> None:
        """Wait as long as something takes."""
        mean: float = getattr(self.delays, kind) * factor
        await anyio.sleep(self.random.uniform(0.5 * mean, 1.5 * mean))

    def happens(self, what: str, probability: float) -> bool:
        """Return whether something random happens now."""
        if probability <= 0.0 or self.random.random() >= probability:
            return False
        self.seen[what] += 1
        return True

    def end(self, outcome: str) -> None:
        """End the job."""
        if self.outcome is None:
            self.outcome = outcome
            assert self._scope is not None
            self._scope.cancel()

    def reached(self, phase: str, process: Process) -> None:
        self.phases[phase] += 1
        self.on_phase(phase, process)

    def written(self, kind: str) -> None:
        record = self.journal[-1]
        self.record_times.append((anyio.current_time(), kind, record.get("round")))

    def merged(self, training: Training, weights: str) -> None:
        found = self.weights_after(training.executor.round)
        if weights != found:
            self.faults.append(f"{training.peer} has other weights after round {training.executor.round}")

    def note_update(self, training: Training, update: str) -> None:
        executor = training.executor
        self.truth[update] = training.peer, executor.round, executor.weights, list(executor.used)

    # ------------------------------------------------------------------------------------------------------------- run

    async def run(self) -> None:
        """Run the job to its end."""
        with anyio.fail_after(LONGEST):
            async with anyio.create_task_group() as self.tasks:
                self._scope = self.tasks.cancel_scope
                self.tasks.start_soon(self._expire_leases)
                if self.during is not None:
                    self.tasks.start_soon(self.during, self)
                await self._run_schedulers()
        assert self.outcome is not None, "the job has not ended"

    async def _run_schedulers(self) -> None:
        adopts = False
        while self.outcome is None:
            await self._run_scheduler(adopts)
            self.died += 1
            if self.happens("power lost", self.loses_power):
                while self.journal and self.journal[-1]["record"] == "assigned":
                    self.journal.pop()
            down = self.downtime(self.random)
            self.absences.append((anyio.current_time(), anyio.current_time() + down))
            adopts = down < ORPHAN_GRACE
            self.seen["taken up" if adopts else "resumed"] += 1
            self.is_resumed |= not adopts
            await anyio.sleep(down)

    async def _run_scheduler(self, adopts: bool) -> None:
        restored = restore(self.journal)
        result = FakeResult(updates=self.updates)
        result.restore(restored.closed, restored.weights)
        source = PeersReference(peers=(SCHEDULER,), strategy=One())
        data = TrainingData(self.dataset, source, result, manifest_digest=START, model_digest=START)  # type: ignore[arg-type]
        context = FakeContext()
        operator = DilocoOperator(self.table, context, data, restored, anyio.current_time())  # type: ignore[arg-type]
        async with anyio.create_task_group() as tasks:
            self._scheduler_scope = tasks.cancel_scope
            scheduler = Scheduler(self, operator, context, result, tasks)
            adopted = self._tasks_to_adopt(scheduler) if adopts else []
            self.scheduler = scheduler
            scheduler.try_tell(lambda: self._begin(operator, adopted))
            for service in (scheduler.renew, scheduler.search, scheduler.watch_deadlines, scheduler.pass_notices):
                tasks.start_soon(service)

    def _begin(self, operator: DilocoOperator, adopted: list[TaskRef]) -> Iterable[Any]:
        now = anyio.current_time()
        effects = tuple(operator.on_start(now))
        return (*effects, *(operator.on_tasks_adopted(adopted, now) if adopted else ()))

    def _tasks_to_adopt(self, scheduler: Scheduler) -> list[TaskRef]:
        adopted = []
        for lease, task in list(self.dispatched.items()):
            node = self.nodes[task.lease.peer]
            if lease in node.leases and node.is_connected:
                node.leases[lease] = anyio.current_time() + LEASE
                scheduler.held[lease] = task.lease
                scheduler.running[lease] = task
                adopted.append(task)
            else:
                del self.dispatched[lease]
        for node in self.nodes.values():
            for lease in [lease for lease in node.leases if lease not in scheduler.held]:
                node.release_soon(lease)
        scheduler.has_begun = bool(adopted)
        return adopted

    def kill_scheduler(self) -> None:
        """Kill the scheduler, which starts again after `downtime`."""
        self.scheduler = None
        self._scheduler_scope.cancel()

    async def _expire_leases(self) -> None:
        while True:
            await anyio.sleep(1.0)
            grace = ORPHAN_GRACE if self.scheduler is None else 0.0
            for node in self.nodes.values():
                node.expire(grace)

    # -------------------------------------------------------------------------------------------------------- messages

    def deliver(self, task: TaskRef, command: Command) -> CommandAnswer | None:
        """Deliver a command to a task; return the answer, None if its worker cannot be reached."""
        node = self.nodes[task.lease.peer]
        process = node.process if node.is_connected else None
        if process is None or process.task != task:
            return None
        match command, process:
            case SetMembers(), ParameterServer():
                return process.announce(command)
            case SetWorkers(), ParameterServer():
                return process.change_workers(command)
            case ChangeServer(), Training():
                return process.change_server(command)
        raise AssertionError(f"{task} gets {command}")

    def server_at(self, peer: PeerId) -> ParameterServer | None:
        """Return the parameter server that runs on a peer, if it can be reached."""
        process = self.nodes[peer].process
        return process if isinstance(process, ParameterServer) and process.node.is_reachable else None

    async def receive_push(self, scheduler: Scheduler, task: TaskRef, target: PushTarget, header: PushHeader) -> bool:
        """Let the file of an outer update arrive at the scheduler; return whether its sender gets a receipt."""
        self.updates[target.path] = header.digest
        assert target.prepare is not None
        done = anyio.Event()

        async def prepare() -> None:  # it ends with the scheduler
            assert target.prepare is not None
            try:
                await target.prepare(target.path)
            except TransferRefusedError:
                return
            if scheduler.task_on(task.lease.id) == task:
                scheduler.try_tell(
                    lambda: scheduler.operator.on_push_complete(task, header, target.path, header.digest, scheduler.now)
                )
                if self.scheduler is scheduler:
                    done.set()

        if self.scheduler is not scheduler:
            return False
        scheduler.tasks.start_soon(prepare)
        with anyio.move_on_after(60.0):
            while self.scheduler is scheduler and not done.is_set():
                with anyio.move_on_after(1.0):
                    await done.wait()
        return done.is_set() and self.nodes[task.lease.peer].is_connected

    def content(self, scheduler: Scheduler, path: object) -> str | None:
        """Return what a file that the scheduler serves is: the digest of an outer update, or of the weights."""
        return self.updates[path] if isinstance(path, Path) and path in self.updates else scheduler.result.weights

    # ----------------------------------------------------------------------------------------------------------- truth

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Records of rounds."""
        return [record for record in self.journal if record["record"] == "round"]

    def weights_after(self, number: int) -> str:
        """Return the digest of the weights after a recorded round."""
        return START if number == 0 else str(self.rounds[number - 1]["weights"])

    def rounds_after(self, weights: str) -> int:
        """Return the number of the round that ended with these weights."""
        return next((record["round"] for record in self.rounds if record["weights"] == weights), 0)

    def named(self, event: str) -> list[Mapping[str, object]]:
        """Return the fields of the events of a name."""
        return [fields for _, name, fields in self.events if name == event]

    def processes(self, role: str) -> list[Process]:
        """Return what runs of a role, in a fixed order."""
        return [node.process for node in self.nodes.values() if node.role == role and node.process is not None]
