"""Random graphs of tasks with random faults: every task finishes, and what is kept is here, whatever goes wrong.

The runner and the workers are simulated, deterministic for a seed. Time is virtual; copies at the scheduler are real
files, since the operator serves them.
"""

from __future__ import annotations

import heapq
import json
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from hypha_net.errors import NetError, RequestError
from hypha_net.transfer import PullSource
from hypha_proto.ids import PeerId
from hypha_proto.task_resources import (
    FailedHolder,
    LocatedFile,
    LocateResource,
    OutputsReleased,
    PushBegun,
    PushOutput,
    ReleaseOutputs,
)
from hypha_proto.tasks import StoredFile, StoredOutput, TaskSpec
from hypha_proto.transfer import PullRequest
from hypha_scheduler.strategies import base
from hypha_scheduler.strategies.tasks.config import TasksJob
from hypha_scheduler.strategies.tasks.operator import TasksOperator
from hypha_scheduler.strategies.tasks.strategy import STRATEGY

SCHEDULER = PeerId.from_public_key(b"\xff" * 32)
DIGEST = "blake3:" + "0" * 64


@dataclass
class Chances:
    """Probabilities of what goes wrong, and the number of faults after which nothing does."""

    faults: int = 0
    attempt_fails: float = 0.0
    attempt_given_back: float = 0.0
    unreachable: float = 0.0
    worker_killed: float = 0.0
    lease_lost: float = 0.0
    worker_drained: float = 0.0
    restart: float = 0.0
    not_started: float = 0.0
    output_removed: float = 0.0


@dataclass(eq=False)
class Worker:
    """A worker with a store of outputs."""

    peer: PeerId
    slots: int
    is_alive: bool = True
    is_draining: bool = False
    vice: str | None = None
    """What it does with every attempt, a field of `Chances`; None if it is healthy."""
    store: dict[str, StoredOutput] = field(default_factory=dict)


@dataclass(eq=False)
class Attempt:
    """A running attempt at a worker."""

    task: base.TaskRef
    spec: TaskSpec
    lacking: list[str]
    """Resources that are not there yet."""
    failures: list[FailedHolder] = field(default_factory=list)
    asked: int = 0
    is_over: bool = False


class Context:
    """`JobContext` as the strategy uses it."""

    scheduler = SCHEDULER

    def __init__(self, simulation: Simulation, directory: Path) -> None:
        self.simulation = simulation
        self.job_id = uuid.UUID(int=7)
        self.directory = directory
        self.first_attempt = simulation._epoch * 1000

    async def fetch_output(self, output: StoredOutput, holder: PeerId, target: Path) -> int:
        if not self.simulation.has(holder, output.dataset) or self.simulation.strikes("unreachable"):
            raise RequestError(f"{holder} has no {output.name}")
        await anyio.Path(target.parent).mkdir(parents=True, exist_ok=True)
        await anyio.Path(target).write_text(self.simulation.contents[output.dataset])
        return output.files[0].size


class Simulation:
    """One job, run to its end."""

    def __init__(
        self,
        job: TasksJob,
        seed: int,
        chances: Chances,
        directory: Path,
        workers: int = 3,
        vices: Sequence[str] = (),
    ) -> None:
        self.job, self.chances, self.directory = job, chances, directory
        self.random = random.Random(seed)
        self.now = 0.0
        self.journal: list[dict[str, Any]] = []
        self.operator: TasksOperator
        self.ended: base.EndJob | None = None
        self.contents: dict[str, str] = {}
        """What each stored output is, by its name in a store."""
        self.finished: Counter[str] = Counter()
        self.starts: list[base.StartTask] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.background: list[base.RunInBackground] = []
        self.held: dict[uuid.UUID, base.Lease] = {}
        self.running: dict[uuid.UUID, Attempt] = {}
        self.most_leases = 0
        self.steps = 0
        self._number = 0
        self._epoch = 0
        self._acquiring = False
        self.workers: dict[PeerId, Worker] = {}
        for _ in range(workers):
            self.add_worker()
        for vice in vices:
            self.add_worker(vice)
        self.open: Any = None

    # -------------------------------------------------------------------------------------------------------- machinery

    def number(self) -> int:
        self._number += 1
        return self._number

    def at(self, delay: float, action: Callable[[], None]) -> None:
        """Do something later, unless the scheduler restarts before."""
        epoch = self._epoch

        def guarded() -> None:
            if epoch == self._epoch:
                action()

        heapq.heappush(self.events, (self.now + delay, self.number(), guarded))

    def strikes(self, kind: str) -> bool:
        """Return whether something goes wrong now; it counts."""
        if self.chances.faults <= 0 or self.random.random() >= getattr(self.chances, kind):
            return False
        self.chances.faults -= 1
        return True

    def delay(self) -> float:
        return self.random.uniform(0.01, 1.0)

    def add_worker(self, vice: str | None = None) -> None:
        peer = PeerId.from_public_key(self.number().to_bytes(32, "big"))
        self.workers[peer] = Worker(peer, self.random.randint(1, 2), vice=vice)

    def fails(self, attempt: Attempt, kind: str) -> bool:
        """Return whether something goes wrong with an attempt: its worker sees to it, or it happens."""
        return self.workers[attempt.task.lease.peer].vice == kind or self.strikes(kind)

    def has(self, peer: PeerId, dataset: str) -> bool:
        worker = self.workers.get(peer)
        return worker is not None and worker.is_alive and dataset in worker.store

    async def run(self) -> None:
        """Run the job until it ends."""
        await self._begin()
        while self.ended is None:
            self.steps += 1
            assert self.steps < 40_000, f"no end after {self.now:g} s"
            taken, self.background = self.background, []
            for effect in taken:
                outcome = await self._outcome(effect)
                self.at(0.05, lambda tag=effect.tag, outcome=outcome: self._result(tag, outcome))  # type: ignore[misc]
            if self.strikes("restart"):
                await self._end_run()
                await self._begin()
                continue
            self._misfortune()
            deadline = self.operator.next_deadline()
            if deadline is not None and (not self.events or deadline <= self.events[0][0]):
                self.now = max(self.now, deadline)
                self.tell(lambda: self.operator.on_deadline(self.now))
                assert self.operator.next_deadline() is None or self.operator.next_deadline() > self.now  # type: ignore[operator]
                continue
            assert self.events, f"nothing happens any more: {self.describe()}"
            self.now, _, action = heapq.heappop(self.events)
            action()
        await self._end_run()

    async def _outcome(self, effect: base.RunInBackground) -> object:
        try:
            return await effect.work()
        except (NetError, OSError) as error:
            return error

    async def _begin(self) -> None:
        context: Any = Context(self, self.directory)
        self.open = STRATEGY.open(self.job, context, list(self.journal))
        self.operator = await self.open.__aenter__()
        self.tell(lambda: self.operator.on_start(self.now))

    async def _end_run(self) -> None:
        """End the scheduler; what its workers run ends with their leases."""
        if self.ended is not None:
            await self.open.__aexit__(None, None, None)
        else:
            with suppress(KeyboardInterrupt):  # as when a scheduler is stopped
                await self.open.__aexit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        self._epoch += 1
        self.held.clear()
        self.running.clear()
        self.background.clear()
        self._acquiring = False

    def tell(self, event: Callable[[], base.Effects]) -> None:
        """Tell the operator of an event and carry out its effects, as the runner does."""
        for effect in event():
            self._carry_out(effect)
        self._settle()

    def _settle(self) -> None:
        if self.ended is not None:
            return
        requests = {request.role: request for request in self.operator.role_requests()}
        draining = sum(self.workers[lease.peer].is_draining for lease in self.held.values())
        assert sum(request.count for request in requests.values()) <= self.job.workers + draining
        for request in requests.values():
            unusable = self._unusable(request)
            if len(unusable) < sum(lease.role == request.role for lease in self.held.values()):
                for lease in unusable:
                    del self.held[lease.id]
        counts = Counter(lease.role for lease in self.held.values())
        for role, count in counts.items():
            wanted = requests[role].count if role in requests else 0
            idle = [lease for lease in self.held.values() if lease.role == role and lease.id not in self.running]
            for lease in idle[::-1][: max(0, count - wanted)]:
                del self.held[lease.id]
        self.most_leases = max(self.most_leases, len(self.held) - draining)
        if not self._acquiring:
            self._acquiring = True
            self.at(self.delay(), self._acquire)

    def _unusable(self, request: base.RoleRequest) -> list[base.Lease]:
        """Return the idle leases at peers that a role excludes."""
        at_excluded = [h for h in self.held.values() if h.role == request.role and h.peer in request.excluded]
        return [lease for lease in at_excluded if lease.id not in self.running]

    def _acquire(self) -> None:
        """Find a lease for a role that lacks one."""
        self._acquiring = False
        used = Counter(lease.peer for lease in self.held.values())
        free = [w for w in self.workers.values() if w.is_alive and not w.is_draining and used[w.peer] < w.slots]
        counts = Counter(lease.role for lease in self.held.values())
        short = [r for r in self.operator.role_requests() if counts[r.role] - len(self._unusable(r)) < r.count]
        free = [w for w in free if short and w.peer not in short[0].excluded]
        if short and free:
            worker = self.random.choice(free)
            lease = base.Lease(uuid.UUID(int=self.number()), worker.peer, short[0].role, 1.0)
            self.held[lease.id] = lease
            self.tell(lambda: self.operator.on_leases_acquired([lease], self.now))
        elif short:
            self._acquiring = True
            self.at(1.0, self._acquire)

    # ---------------------------------------------------------------------------------------------------------- effects

    def _carry_out(self, effect: base.Effect) -> None:
        match effect:
            case base.WriteJournal(kind, fields):
                self.journal.append({"record": kind, **fields})
            case base.EndJob():
                assert self.ended is None
                self.ended = effect
            case base.StartTask():
                self._start(effect)
            case base.StopTask():
                self._stop(effect)
            case base.SendMessage(peer, _, message, tag):
                self.at(self.delay(), lambda: self._send(peer, message, tag))
            case base.RunInBackground():
                self.background.append(effect)
            case base.EmitEvent():
                pass
            case _:
                raise AssertionError(effect)

    def _start(self, effect: base.StartTask) -> None:
        task, spec = effect.task, effect.spec
        self.starts.append(effect)
        if task.lease.id not in self.held:
            self.tell(lambda: self.operator.on_task_update(task, base.TaskNotStarted("no lease"), self.now))
            return
        assert task.lease.id not in self.running
        assert not self.workers[task.lease.peer].is_draining
        lacking = [resource.name for resource in spec.resources if resource.result is not None]
        attempt = self.running[task.lease.id] = Attempt(task, spec, lacking)
        self.at(self.delay(), lambda: self._started(attempt))

    def _stop(self, effect: base.StopTask) -> None:
        attempt = self.running.get(effect.task.lease.id)
        if attempt is None or attempt.task != effect.task:
            return
        end = base.TaskEnded(base.TaskState.CANCELLED, effect.reason)
        if effect.keep_lease:
            self.at(effect.drain_seconds or self.delay(), lambda: self._end(attempt, end))
        else:
            del self.held[effect.task.lease.id]
            self._end(attempt, end)

    def _send(self, peer: PeerId, message: object, tag: str) -> None:
        worker = self.workers.get(peer)
        if worker is None or not worker.is_alive:
            self._result(tag, RequestError(f"{peer} cannot be reached"))
        elif isinstance(message, ReleaseOutputs):
            removed = [worker.store.pop(name) for name in message.datasets if name in worker.store]
            self._result(tag, OutputsReleased(removed=len(removed)))
        else:
            assert isinstance(message, PushOutput)
            accepted = all(file.dataset in worker.store for file in message.files)
            self._result(tag, PushBegun(accepted=accepted))

    def _result(self, tag: str, outcome: object) -> None:
        self.tell(lambda: self.operator.on_effect_result(tag, outcome, self.now))

    # --------------------------------------------------------------------------------------------------------- attempts

    def _started(self, attempt: Attempt) -> None:
        if attempt.is_over:
            return
        if self.fails(attempt, "not_started"):
            del self.held[attempt.task.lease.id]
            self._update(attempt, base.TaskNotStarted("nobody is there"))
            return
        self.tell(lambda: self.operator.on_task_update(attempt.task, base.TaskStarted(), self.now))
        if self.workers[attempt.task.lease.peer].vice == "lease_lost":
            self.lose(attempt.task.lease)
        else:
            self._fetch_next(attempt)

    def _fetch_next(self, attempt: Attempt) -> None:
        if attempt.is_over:
            return
        if not attempt.lacking:
            self.tell(lambda: self.operator.on_task_update(attempt.task, base.TaskReady(), self.now))
            self.at(self.delay(), lambda: self._execute(attempt))
            return
        resource, task = attempt.lacking[0], attempt.task
        attempt.asked += 1
        if attempt.asked > 40:
            end = base.TaskEnded(base.TaskState.FAILED, "asked too often", resource=resource)
            self._end(attempt, end)
            return
        about = task.id_in(uuid.UUID(int=7))
        request = LocateResource(attempt=about, resource=resource, failures=tuple(attempt.failures))
        attempt.failures = []
        answer, effects = self.operator.on_locate(task, request, self.now)
        self.tell(lambda: effects)
        if attempt.is_over:
            return
        if answer.pull is not None:
            self._pull(attempt, answer.pull.files)
        elif answer.pushed is not None:
            pushed = answer.pushed
            self.at(2.0, lambda: self._receive(attempt, pushed.files, pushed.senders))
        elif answer.not_yet is not None:
            attempt.asked -= 1
            self.at(answer.not_yet.retry_ms / 1000, lambda: self._fetch_next(attempt))
        else:
            assert answer.gone is not None
            assert self.ended is not None, answer.gone
            self._end(attempt, base.TaskEnded(base.TaskState.FAILED, answer.gone.reason, resource=resource))

    def _pull(self, attempt: Attempt, files: tuple[LocatedFile, ...]) -> None:
        for file in files:
            failures = []
            for peer in file.peers:
                failure = self._try(attempt, file, peer)
                if failure is None:
                    break
                failures.append(failure)
            else:
                attempt.failures += failures
        self._got(attempt, files)

    def _try(self, attempt: Attempt, file: LocatedFile, peer: PeerId) -> FailedHolder | None:
        if peer == SCHEDULER:
            source = self.operator.on_pull_request(attempt.task, PullRequest(dataset=file.dataset, index=file.index))
            assert isinstance(source, PullSource)
            assert isinstance(source.source, Path)
            assert source.source.read_text() == self.contents[file.dataset]
            return None
        if not self.workers[peer].is_alive or self.strikes("unreachable"):
            return FailedHolder(peer=peer, reason="it cannot be reached")
        if file.dataset not in self.workers[peer].store:
            return FailedHolder(peer=peer, reason="it has no such file", is_permanent=True)
        return None

    def _receive(self, attempt: Attempt, files: tuple[LocatedFile, ...], senders: tuple[PeerId, ...]) -> None:
        """Take what was pushed, if its senders could."""
        missing = [f for f in files if not any(self.has(peer, f.dataset) for peer in senders)]
        if not attempt.is_over and (missing or self.strikes("unreachable")):
            self.at(1.0, lambda: self._fetch_next(attempt))
        else:
            self._got(attempt, files)

    def _got(self, attempt: Attempt, files: tuple[LocatedFile, ...]) -> None:
        if attempt.is_over:
            return
        if not attempt.failures:
            resource = next(r for r in attempt.spec.resources if r.name == attempt.lacking[0])
            assert resource.result is not None
            maker = next(task for task in self.job.tasks if task.name == resource.result.task)
            names = [maker.name] if maker.count == 1 else [f"{maker.name}[{index}]" for index in range(maker.count)]
            assert [self.contents[f.dataset] for f in files] == [f"{name}.{resource.result.output}" for name in names]
            assert [f.path for f in files] == ([""] if maker.count == 1 else [str(i) for i in range(maker.count)])
            attempt.lacking.pop(0)
        self.at(self.delay(), lambda: self._fetch_next(attempt))

    def _execute(self, attempt: Attempt) -> None:
        if attempt.is_over:
            return
        if self.fails(attempt, "attempt_fails"):
            self._end(attempt, base.TaskEnded(base.TaskState.FAILED, "it failed", 1, ("a line",)))
        elif self.fails(attempt, "attempt_given_back"):
            self._end(attempt, base.TaskEnded(base.TaskState.CANCELLED, "the disk is full"))
        else:
            self._end(attempt, base.TaskEnded(base.TaskState.FINISHED, outputs=tuple(self._store(attempt))))

    def _store(self, attempt: Attempt) -> Iterator[StoredOutput]:
        for output in attempt.spec.outputs:
            dataset = f"{attempt.task.name}.{output.name}.{self.number()}"
            text = self.contents[dataset] = f"{attempt.task.name}.{output.name}"
            files = (StoredFile(path="", size=len(text), digest=DIGEST),)
            stored = StoredOutput(name=output.name, dataset=dataset, files=files)
            self.workers[attempt.task.lease.peer].store[dataset] = stored
            yield stored

    def _end(self, attempt: Attempt, end: base.TaskEnded) -> None:
        if not attempt.is_over:
            if end.state is base.TaskState.FINISHED:
                self.finished[attempt.task.name] += 1
            self._update(attempt, end)

    def _update(self, attempt: Attempt, update: base.TaskUpdate) -> None:
        attempt.is_over = True
        self.running.pop(attempt.task.lease.id, None)
        if self.ended is None:
            self.tell(lambda: self.operator.on_task_update(attempt.task, update, self.now))

    # ------------------------------------------------------------------------------------------------------- misfortune

    def _misfortune(self) -> None:
        alive = [worker for worker in self.workers.values() if worker.is_alive and not worker.is_draining]
        if self.strikes("worker_killed"):
            self._kill(self.random.choice(alive))
        elif self.strikes("lease_lost") and self.held:
            self.lose(self.random.choice(list(self.held.values())))
        elif self.strikes("worker_drained"):
            self._drain(self.random.choice(alive))
        elif self.strikes("output_removed"):
            store = self.random.choice(alive).store
            if store:
                del store[self.random.choice(list(store))]

    def _kill(self, worker: Worker) -> None:
        if not worker.is_alive:
            return
        worker.is_alive = False
        self.add_worker()
        for lease in [lease for lease in self.held.values() if lease.peer == worker.peer]:
            self.lose(lease)

    def lose(self, lease: base.Lease) -> None:
        """Lose a lease; what its worker stores stays."""
        if self.held.pop(lease.id, None) is None:
            return
        attempt = self.running.get(lease.id)
        self.tell(lambda: self.operator.on_lease_lost(lease, "no answer", self.now))
        if attempt is not None:
            self._end(attempt, base.TaskEnded(base.TaskState.FAILED, "no answer"))

    def _drain(self, worker: Worker) -> None:
        worker.is_draining = True
        seconds = self.random.uniform(0.5, 5.0)
        for lease in [lease for lease in self.held.values() if lease.peer == worker.peer]:
            self.tell(lambda lease=lease: self.operator.on_lease_draining(lease, seconds, self.now))  # type: ignore[misc]
        heapq.heappush(self.events, (self.now + seconds + 0.1, self.number(), lambda: self._kill(worker)))

    def describe(self) -> str:
        """Return the states of all tasks, for a failed test."""
        states = {name: found.phase.value for name, found in self.operator.instances.by_name.items()}
        return f"{self.now:g} s, {len(self.held)} leases, {states}, {list(self.operator.role_requests())}"


def run_simulation(simulation: Simulation) -> None:
    """Run a job, which must succeed."""
    anyio.run(simulation.run, backend="trio")
    assert simulation.ended == base.EndJob()


SEEDS = [seed if seed < 10 else pytest.param(seed, marks=pytest.mark.nightly) for seed in range(25)]
FAULTS: dict[str, Chances] = {
    "none": Chances(),
    "failed attempts": Chances(faults=3, attempt_fails=0.2, attempt_given_back=0.2, not_started=0.05),
    "killed workers": Chances(faults=5, worker_killed=0.02),
    "lost leases": Chances(faults=8, lease_lost=0.05),
    "lost outputs": Chances(faults=8, output_removed=0.1, unreachable=0.1),
    "drained workers": Chances(faults=4, worker_drained=0.02),
    "restarts": Chances(faults=4, restart=0.02),
    "everything": Chances(9, 0.02, 0.02, 0.05, 0.01, 0.01, 0.01, 0.01, 0.01, 0.02),
}


def random_job(seed: int) -> TasksJob:
    """Return a job whose tasks use results of earlier ones, listed in any order."""
    chance = random.Random(seed)
    tasks: list[dict[str, Any]] = []
    for number in range(chance.randint(1, 9)):
        used = chance.sample(tasks, min(len(tasks), chance.choice([0, 1, 1, 2, 3])))
        results = [{"task": maker["name"], "output": chance.choice(list(maker["outputs"]))} for maker in used]
        task = {
            "name": f"t{number}",
            "driver": {chance.choice(["shell/a", "shell/a", "b"]): {}},
            "resources": [{"name": f"r{index}", "result": result} for index, result in enumerate(results)],
            "outputs": {f"o{index}": f"out/{index}" for index in range(chance.randint(1, 2))},
            "needs": {"cpu": chance.choice([1, 1, 2])},
            "count": chance.choice([1, 1, 1, 3]),
            "retries": 3,
            "timeout": chance.choice([None, 600.0]),
        }
        if chance.random() < 0.2:
            task["keep"] = chance.choice([[], ["o0"]])
        tasks.append(task)
    chance.shuffle(tasks)
    return TasksJob.model_validate(
        {"type": "tasks", "tasks": tasks, "workers": chance.randint(1, 4), "transfer": chance.choice(["pull", "push"])}
    )


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_task_finishes_and_what_is_kept_is_here(faults: str, seed: int, tmp_path: Path) -> None:
    job = random_job(seed)
    simulation = Simulation(job, seed, replace(FAULTS[faults]), tmp_path)
    run_simulation(simulation)
    names = [name for task in simulation.operator.graph.tasks.values() for name in task.names]
    assert set(simulation.finished) >= set(names)
    assert simulation.most_leases <= job.workers
    summary: Any = json.loads(json.dumps(simulation.operator.summary({})))
    assert sorted(task["task"] for task in summary["tasks"]) == sorted(names)
    used = {(r.result.task, r.result.output) for task in job.tasks for r in task.resources if r.result is not None}
    for task in job.tasks:
        kept = [name for name in task.outputs if (task.name, name) not in used] if task.keep is None else task.keep
        for output in kept:
            folder = tmp_path / "results" / task.name / output
            if task.count == 1:
                assert folder.read_text() == f"{task.name}.{output}"
            else:
                assert sorted(path.name for path in folder.iterdir()) == [str(index) for index in range(task.count)]
    left = [name for worker in simulation.workers.values() if worker.is_alive for name in worker.store]
    assert left == [] or faults not in ("none", "failed attempts"), "outputs that nothing needs are released"
    assert not (tmp_path / "copies").exists()
    assert not list((tmp_path / "incoming").glob("*"))
    if faults == "none":
        assert set(simulation.finished.values()) == {1}


VICES = {
    "attempts fail": ["attempt_fails"] * 3,
    "attempts are given back": ["attempt_given_back"] * 3,
    "attempts do not start": ["not_started"] * 3,
    "leases are lost": ["lease_lost"] * 3,
    "each another": ["attempt_fails", "attempt_given_back", "lease_lost"],
}


@pytest.mark.parametrize("vices", VICES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_finishes_if_one_worker_is_healthy(vices: str, seed: int, tmp_path: Path) -> None:
    job = random_job(seed)
    simulation = Simulation(job, seed, Chances(), tmp_path, workers=1, vices=VICES[vices])
    run_simulation(simulation)
    names = {name for task in simulation.operator.graph.tasks.values() for name in task.names}
    assert set(simulation.finished) == names
    excluded: Any = simulation.operator.summary({})["excluded"]
    healthy = next(str(worker.peer) for worker in simulation.workers.values() if worker.vice is None)
    assert healthy not in [found["worker"] for found in excluded]
