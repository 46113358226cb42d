"""Placement of ready instances on leases: where their inputs are if they can, in their order otherwise. Pure.

Decides how many leases of each role are wanted. Called by `operator`.
"""

from __future__ import annotations

import heapq
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hypha_proto.ids import PeerId
from hypha_scheduler.allocation.auction import RoleRequest
from hypha_scheduler.strategies.base import Lease
from hypha_scheduler.strategies.tasks.graph import Role, TaskGraph
from hypha_scheduler.strategies.tasks.instances import Instance, Instances, Phase

_Heap = list[tuple[int, str]]
"""Positions and names of instances; some are ready no longer."""


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease of the job."""

    lease: Lease
    instance: Instance | None = None
    """What runs on it."""
    is_draining: bool = False
    is_surplus: bool = False
    """Whether the runner is expected to have released it; it is tried when there is no other."""
    rests_until: float = 0.0
    """When it may be used again."""

    def is_free(self, now: float) -> bool:
        """Return whether an instance may start on it."""
        return self.instance is None and not self.is_draining and self.rests_until <= now


@dataclass(slots=True)
class Placement:
    """Leases and ready instances by role."""

    graph: TaskGraph
    instances: Instances
    inputs_at: Callable[[Instance], Sequence[PeerId]]
    """Returns the workers that hold an instance's inputs."""
    leases: dict[uuid.UUID, HeldLease] = field(default_factory=dict)
    """In the order in which they were found."""
    _began: bool = False
    _queues: defaultdict[str, _Heap] = field(default_factory=lambda: defaultdict(list))
    """Ready instances by role."""
    _local: defaultdict[tuple[str, PeerId], _Heap] = field(default_factory=lambda: defaultdict(list))
    """Ready instances by role and by a worker that holds inputs."""

    # ---------------------------------------------------------------------------------------------------------- leases

    def add(self, leases: Sequence[Lease]) -> None:
        """Add new leases."""
        self._began = True
        self.leases |= {lease.id: HeldLease(lease) for lease in leases}

    def mark_surplus(self) -> None:
        """Mark the leases that the runner releases now: it does so with the newest idle ones of a role."""
        wanted = {request.role: request.count for request in self.requests()}
        by_role: defaultdict[str, list[HeldLease]] = defaultdict(list)
        for held in self.leases.values():
            if not held.is_surplus:
                by_role[held.lease.role].append(held)
        for role, found in by_role.items():
            idle = [held for held in found if held.instance is None]
            for held in idle[::-1][: max(0, len(found) - wanted.get(role, 0))]:
                held.is_surplus = True

    def requests(self) -> list[RoleRequest]:
        """Return the leases that are wanted: as many as there is to run, all together at most as the job allows.

        A lease that drains without a task does not count: its worker ends.
        """
        counts = self._counts()
        if not self._began:  # begin with the first that is found
            counts = dict.fromkeys(list(counts)[:1], 1)
        return [role.request(self.graph.job, count) for role, count in counts.items()]

    def _counts(self) -> dict[Role, int]:
        ready, running = self.instances.ready, self.instances.running
        left = self.graph.job.workers - self.instances.running_total
        idle = [held for held in self.leases.values() if held.instance is None and not held.is_surplus]
        draining = [held.lease.role for held in idle if held.is_draining]
        counts = {}
        for role in self.graph.roles:
            more = min(ready[role], max(0, left))
            left -= more
            if running[role] + more:
                counts[role] = running[role] + more + draining.count(role.name)
        return counts

    # --------------------------------------------------------------------------------------------------------- starts

    def enqueue(self, instance: Instance) -> None:
        """Add an instance that has become ready."""
        entry = (instance.order, instance.name)
        role = instance.task.role.name
        heapq.heappush(self._queues[role], entry)
        for peer in self.inputs_at(instance):
            heapq.heappush(self._local[role, peer], entry)

    def place(self, now: float) -> Iterator[tuple[HeldLease, Instance]]:
        """Yield what is to start on which lease; the caller starts it before the next."""
        for use_surplus in (False, True):
            free = [held for held in self.leases.values() if held.is_free(now) and held.is_surplus is use_surplus]
            for local in (True, False):
                for held in free:
                    if not self.instances.ready_total or self.instances.running_total >= self.graph.job.workers:
                        return
                    if held.instance is None and (instance := self._next(held.lease, local)) is not None:
                        held.instance = instance
                        yield held, instance

    def _next(self, lease: Lease, local: bool) -> Instance | None:
        heap = self._local.get((lease.role, lease.peer), []) if local else self._queues[lease.role]
        while heap:
            instance = self.instances.by_name[heapq.heappop(heap)[1]]
            if instance.phase is Phase.READY:
                return instance
        return None
