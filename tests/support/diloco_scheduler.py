"""A simulated scheduler with the real DiLoCo operator: carries out its effects as the job runner does."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import (
    EmitEvent,
    EndJob,
    Lease,
    RoleRequest,
    RunInBackground,
    SendCommand,
    StartTask,
    StopTask,
    TaskEnded,
    TaskNotStarted,
    TaskRef,
    TaskStarted,
    TaskState,
    WriteJournal,
)
from hypha_scheduler.strategies.diloco.operator import DilocoOperator
from support.diloco_simulation import FakeContext, FakeResult

if TYPE_CHECKING:
    from support.diloco_network import Network

LEASE = 10.0
"""Seconds for which a lease lasts without renewal."""

T = TypeVar("T")


class SchedulerDied(Exception):
    """The scheduler has died after a record."""


class NotRunning(Exception):
    """The scheduler knows no such task, or the task is over."""


@dataclass(eq=False)
class Scheduler:
    """One run of the scheduler: carries out the operator's effects as the job runner does."""

    network: Network
    operator: DilocoOperator
    context: FakeContext
    result: FakeResult
    tasks: anyio.abc.TaskGroup
    held: dict[uuid.UUID, Lease] = field(default_factory=dict)
    running: dict[uuid.UUID, TaskRef] = field(default_factory=dict)
    changed: anyio.Event = field(default_factory=anyio.Event)
    has_begun: bool = False
    """Whether the first leases were delivered."""
    unreachable: dict[uuid.UUID, float] = field(default_factory=dict)
    """Times since which leases could not be renewed."""
    draining: set[uuid.UUID] = field(default_factory=set)
    found: list[Lease] = field(default_factory=list)
    """Leases that were not delivered yet."""
    ordered: defaultdict[TaskRef, anyio.Lock] = field(default_factory=lambda: defaultdict(anyio.Lock))
    """Held while a command is delivered to a task."""

    @property
    def now(self) -> float:
        return anyio.current_time()

    def tell(self, event: Callable[[], Iterable[Any]]) -> None:
        """Tell the operator of an event, and carry out its effects.

        Raises:
            SchedulerDied: it has died of it.
        """
        self.ask(lambda: (None, event()))

    def ask(self, question: Callable[[], tuple[T, Iterable[Any]]]) -> T:
        """Ask the operator, and carry out the effects before the answer is known.

        Raises:
            SchedulerDied: it has died meanwhile.
        """
        if self.network.scheduler is not self or self.network.outcome is not None:
            raise SchedulerDied
        answer, effects = question()
        for effect in effects:
            self._carry_out(effect)
        self.changed.set()
        self.changed = anyio.Event()
        return answer

    def _carry_out(self, effect: Any) -> None:
        network = self.network
        match effect:
            case WriteJournal(kind, fields):
                self.write(kind, fields)
            case EmitEvent(name, fields):
                network.events.append((self.now, name, fields))
            case StartTask():
                self._start_task(effect)
            case StopTask():
                self._stop_task(effect)
            case SendCommand():
                self.tasks.start_soon(self._send, effect)
            case RunInBackground():
                self.tasks.start_soon(self._work, effect)
            case EndJob(failure):
                network.end(failure or "finished")

    def write(self, kind: str, fields: Mapping[str, object]) -> None:
        """Write a record.

        Raises:
            SchedulerDied: it was the last one.
        """
        network = self.network
        network.journal.append({"record": kind, **fields})
        network.written(kind)
        if network.dies_after is not None and len(network.journal) >= network.dies_after:
            network.dies_after = None
            network.kill_scheduler()
            raise SchedulerDied

    # ----------------------------------------------------------------------------------------------------------- tasks

    def _start_task(self, effect: StartTask) -> None:
        task = effect.task
        if task.lease.id not in self.held:
            self.later(lambda: self.operator.on_task_update(task, TaskNotStarted("its lease is lost"), self.now))
            return
        assert task.lease.id not in self.running, f"{task} is started on a lease that has a task"
        self.network.starts.append((self.now, effect))
        self.running[task.lease.id] = task
        self.tasks.start_soon(self._dispatch, effect)

    async def _dispatch(self, effect: StartTask) -> None:
        network, task = self.network, effect.task
        await network.delay("message")
        node = network.nodes[task.lease.peer]
        for _ in range(4):
            if node.is_connected:
                break
            await anyio.sleep(1.0)
        if not self._runs(task):
            return
        if not (node.is_connected and node.start(task, effect)):
            del self.running[task.lease.id]
            self.release(task.lease.id)
            self.try_tell(lambda: self.operator.on_task_update(task, TaskNotStarted("it is not there"), self.now))
            return
        await network.delay("message")
        network.dispatched[task.lease.id] = task
        if self._runs(task):
            self.try_tell(lambda: self.operator.on_task_update(task, TaskStarted(), self.now))

    def _runs(self, task: TaskRef) -> bool:
        return self.running.get(task.lease.id) == task and self.network.scheduler is self

    def _stop_task(self, effect: StopTask) -> None:
        task = effect.task
        if not self._runs(task):
            return
        if effect.keep_lease:
            self.network.nodes[task.lease.peer].end(task, TaskEnded(TaskState.CANCELLED, effect.reason))
            return
        self.release(task.lease.id)
        self.later(lambda: self._task_ended(task, TaskEnded(TaskState.CANCELLED, effect.reason)))

    def task_over(self, task: TaskRef, end: TaskEnded) -> None:
        """Tell the operator of the end of a task, once.

        Raises:
            SchedulerDied: it has died of it.
        """
        self.tell(lambda: self._task_ended(task, end))

    def _task_ended(self, task: TaskRef, end: TaskEnded) -> Iterable[Any]:
        if self.running.get(task.lease.id) != task:
            return ()
        del self.running[task.lease.id]
        self.network.dispatched.pop(task.lease.id, None)
        return self.operator.on_task_update(task, end, self.now)

    def release(self, lease: uuid.UUID) -> None:
        """Release a lease, which ends what runs on it."""
        held = self.held.pop(lease, None)
        self.draining.discard(lease)
        if held is not None:
            self.network.nodes[held.peer].release_soon(lease)

    def later(self, event: Callable[[], Iterable[Any]]) -> None:
        """Tell the operator of an event after the effects that are being carried out."""

        async def tell() -> None:
            self.try_tell(event)

        self.tasks.start_soon(tell)

    def try_tell(self, event: Callable[[], Iterable[Any]]) -> None:
        """Tell the operator of an event, unless the scheduler dies."""
        try:
            self.tell(event)
        except SchedulerDied:
            return

    async def _send(self, effect: SendCommand) -> None:
        """Deliver a command as soon as its worker can be reached; commands to a task keep their order."""
        async with self.ordered[effect.task]:
            while self._runs(effect.task):
                await self.network.delay("message")
                answer = self.network.deliver(effect.task, effect.command)
                if answer is not None:
                    break
                await anyio.sleep(0.5)
        await self.network.delay("message")
        if self._runs(effect.task):
            self.try_tell(lambda: self.operator.on_effect_result(effect.tag, answer, self.now))

    async def _work(self, effect: RunInBackground) -> None:
        outcome = await effect.work()
        self.try_tell(lambda: self.operator.on_effect_result(effect.tag, outcome, self.now))

    # ---------------------------------------------------------------------------------------------------------- leases

    def task_on(self, lease: uuid.UUID) -> TaskRef | None:
        """Return the task that runs on a lease."""
        return self.running.get(lease)

    def lose(self, lease: Lease, reason: str) -> None:
        """Lose a lease."""
        if self.held.pop(lease.id, None) is None:
            return
        self.draining.discard(lease.id)
        task = self.task_on(lease.id)
        self.try_tell(lambda: self.operator.on_lease_lost(lease, reason, self.now))
        if task is not None:
            self.try_tell(lambda: self._task_ended(task, TaskEnded(TaskState.FAILED, reason)))

    def drain(self, lease: Lease, seconds: float) -> None:
        """Hear that the worker of a lease drains."""
        if lease.id in self.held and lease.id not in self.draining:
            self.draining.add(lease.id)
            self.try_tell(lambda: self.operator.on_lease_draining(lease, seconds, self.now))

    async def renew(self) -> None:
        """Renew leases; lose those of peers that are away for too long, or have no such lease."""
        while True:
            await anyio.sleep(1.0)
            for lease in list(self.held.values()):
                node = self.network.nodes[lease.peer]
                if not node.is_connected:
                    if self.now - self.unreachable.setdefault(lease.id, self.now) > LEASE:
                        self.lose(lease, "it did not answer")
                    continue
                self.unreachable.pop(lease.id, None)
                if lease.id in node.leases:
                    node.leases[lease.id] = self.now + LEASE
                else:
                    self.lose(lease, "its worker has no such lease")
            for lease in self.found:
                node = self.network.nodes[lease.peer]
                if node.is_connected and lease.id in node.leases:
                    node.leases[lease.id] = self.now + LEASE

    async def search(self) -> None:
        """Find the leases that the operator wants."""
        minimum_since: float | None = None
        short_since: dict[str, float] = {}
        while True:
            await self.network.delay("auction")
            requests = self.operator.role_requests()
            self._release_surplus(requests)
            self.found = [lease for lease in self.found if lease.id in self.network.nodes[lease.peer].leases]
            for request in requests:
                have = [lease for lease in (*self.held.values(), *self.found) if lease.role == request.role]
                usable = [lease for lease in have if self._is_usable(lease, request)]
                if len(usable) < request.count:
                    self.found += self._acquire(request, request.count - len(usable), {lease.peer for lease in have})
            short = [r for r in requests if self._count(r) < r.minimum]
            minimum_since = None if short else minimum_since or self.now
            if self._may_deliver(requests, minimum_since):
                self.has_begun = True
                leases, self.found = self.found, []
                self.held |= {lease.id: lease for lease in leases}
                self.try_tell(lambda leases=leases: self.operator.on_leases_acquired(leases, self.now))  # type: ignore[misc]
            self._time_out({request.role for request in short}, short_since)

    def _may_deliver(self, requests: Sequence[RoleRequest], since: float | None) -> bool:
        if not self.found or self.has_begun:
            return bool(self.found)
        whole = all(self._count(request) >= request.count for request in requests)
        timeout = self.network.table.resources.allocation_timeout
        settle = max((getattr(request, "settle", timeout) for request in requests), default=0.0)
        return whole or (since is not None and self.now - since >= settle)

    def _count(self, request: RoleRequest) -> int:
        leases = (*self.held.values(), *self.found)
        return sum(lease.role == request.role and self._is_usable(lease, request) for lease in leases)

    def _is_usable(self, lease: Lease, request: RoleRequest) -> bool:
        return lease.peer not in request.excluded or lease.id in self.running

    def _time_out(self, short: set[str], since: dict[str, float]) -> None:
        for role in [role for role in since if role not in short]:
            del since[role]
        for role in sorted(short):
            timeout = self.network.table.resources.allocation_timeout
            if self.now - since.setdefault(role, self.now) > timeout:
                del since[role]
                reasons = f"too few workers of the role {role!r} within {timeout:g} s"
                self.try_tell(lambda role=role, reasons=reasons: self._timed_out(role, reasons))  # type: ignore[misc]

    def _timed_out(self, role: str, reasons: str) -> Iterable[Any]:
        return self.operator.on_allocation_timeout(role, reasons, self.now)

    def _acquire(self, request: RoleRequest, missing: int, taken: set[PeerId]) -> list[Lease]:
        """Take some of the free machines."""
        network = self.network
        free = [
            node
            for node in network.nodes.values()
            if node.is_free and node.role == request.role and node.peer not in {*request.excluded, *taken}
        ]
        some = network.random.randint(1, missing)
        leases = []
        for node in network.random.sample(free, min(some, len(free))):
            lease = Lease(uuid.UUID(int=network.number()), node.peer, request.role, 1.0)
            node.leases[lease.id] = self.now + LEASE
            leases.append(lease)
        return leases

    def _release_surplus(self, requests: Sequence[RoleRequest]) -> None:
        wanted = {request.role: request for request in requests}
        counts = Counter(lease.role for lease in self.held.values())
        for lease in list(self.held.values())[::-1]:
            request = wanted.get(lease.role)
            if lease.id in self.running:
                continue
            if request is None or counts[lease.role] > request.count or lease.peer in request.excluded:
                counts[lease.role] -= 1
                self.release(lease.id)

    # ------------------------------------------------------------------------------------------------------- main loop

    async def watch_deadlines(self) -> None:
        """Tell the operator when its deadlines have passed."""
        while True:
            at = self.operator.next_deadline()
            if at is not None and at <= self.now:
                self.try_tell(lambda: self.operator.on_deadline(self.now))
                again = self.operator.next_deadline()
                if again is not None and again <= self.now:
                    await anyio.sleep(0.5)
                await anyio.lowlevel.checkpoint()
                continue
            with anyio.move_on_after(30.0 if at is None else at - self.now):
                await self.changed.wait()

    async def pass_notices(self) -> None:
        """Tell the operator what background work has observed."""
        while True:
            while self.context.notices:
                name, message = self.context.notices.pop(0)
                self.try_tell(lambda n=name, m=message: self.operator.on_message(None, n, m, self.now)[1])  # type: ignore[misc]
            await self.changed.wait()
