"""Placement of ready instances on leases: where their inputs are if they can, in their order otherwise. Pure.

An instance avoids workers at which it failed, and those that its role excludes, while there may be another one, as
`avoidance` says. Decides how many leases of each role are wanted.
"""

from __future__ import annotations

import heapq
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hypha_proto.ids import PeerId
from hypha_scheduler.allocation.auction import RoleRequest
from hypha_scheduler.strategies.avoidance import Avoidance
from hypha_scheduler.strategies.base import Lease
from hypha_scheduler.strategies.tasks.graph import Role, TaskGraph
from hypha_scheduler.strategies.tasks.instances import Instance, Instances, Phase

_ANY: Final = ""
"""Name of what is sought for instances that avoid excluded workers only."""

_Heap = list[tuple[int, str]]
"""Positions and names of instances; some are ready no longer."""


@dataclass(slots=True, eq=False)
class TaskLease:
    """A lease of the job."""

    lease: Lease
    instance: Instance | None = None
    """What runs on it."""
    is_draining: bool = False
    is_surplus: bool = False
    """Whether the runner has probably released it: used only if no other free lease suits."""
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
    avoidance: Avoidance
    leases: dict[uuid.UUID, TaskLease] = field(default_factory=dict)
    """In the order in which they were found."""
    _began: bool = False
    _queues: defaultdict[str, _Heap] = field(default_factory=lambda: defaultdict(list))
    """Ready instances by role."""
    _local: defaultdict[tuple[str, PeerId], _Heap] = field(default_factory=lambda: defaultdict(list))
    """Ready instances by role and by a worker that holds inputs."""
    _wary: defaultdict[str, dict[str, Instance]] = field(default_factory=lambda: defaultdict(dict))
    """Instances by role and name that avoid certain workers; some are ready no longer."""
    now: float = 0.0
    """Time of the last `place`."""

    # ---------------------------------------------------------------------------------------------------------- leases

    def add(self, leases: Sequence[Lease]) -> None:
        """Add new leases."""
        self._began = True
        self.leases |= {lease.id: TaskLease(lease) for lease in leases}
        for lease in leases:
            self.avoidance.note_found(lease.role, lease.peer)

    def mark_surplus(self) -> None:
        """Mark the leases that the runner releases now: those at excluded peers, and the newest idle ones of a role."""
        requests = self.requests()
        for request in requests:  # those at excluded peers, unless the role has no other
            of_role = [h for h in self.leases.values() if h.lease.role == request.role and not h.is_surplus]
            unusable = [h for h in of_role if h.instance is None and h.lease.peer in request.excluded]
            for held in unusable if len(unusable) < len(of_role) else ():
                held.is_surplus = True
        wanted = {request.role: request.count for request in requests}
        by_role: defaultdict[str, list[TaskLease]] = defaultdict(list)
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
        if not self._began:  # begin with the first lease that is found
            counts = dict(list(counts.items())[:1])
        requests = (role.request(self.graph.job, count) for role, count in counts.items())
        return [replace(request, excluded=self._unwanted(request.role)) for request in requests]

    def _counts(self) -> dict[Role, int]:
        ready, running = self.instances.ready, self.instances.running
        left = self.graph.job.workers - running.total()
        idle = [held for held in self.leases.values() if held.instance is None and not held.is_surplus]
        draining = [held.lease.role for held in idle if held.is_draining]
        counts = {}
        for role in self.graph.roles:
            more = min(ready[role], max(0, left))
            left -= more
            if running[role] + more:
                counts[role] = running[role] + more + draining.count(role.name)
        return counts

    # -------------------------------------------------------------------------------------------------------- avoidance

    def _unwanted(self, role: str) -> frozenset[PeerId]:
        """Return the peers of which no lease is wanted."""
        unwanted = self.avoidance.unwanted(role, self.now)
        if self.avoidance.gives_in(role, self.now):
            return unwanted
        wary = self._ready_wary(role)
        ready = sum(count for found, count in self.instances.ready.items() if found.name == role)
        if wary and len(wary) == ready:  # nothing would start at a worker that all of them avoid
            unwanted |= frozenset.intersection(*(frozenset(instance.failed_at) for instance in wary))
        return unwanted

    def _ready_wary(self, role: str) -> list[Instance]:
        found = self._wary[role]
        for name in [name for name, instance in found.items() if instance.phase is not Phase.READY]:
            del found[name]
        return list(found.values())

    def _avoids(self, instance: Instance, peer: PeerId) -> bool:
        """Return whether an instance starts at a peer only if there is no other."""
        role = instance.task.role.name
        if peer in instance.failed_at or self.avoidance.is_excluded(role, peer, self.now):
            return True
        return instance.has_used_retries and not self.avoidance.is_proven(role, peer)

    def _has_choice(self, instance: Instance) -> bool:
        """Return whether a worker is held, perhaps busy, that an instance does not avoid."""
        return any(not self._avoids(instance, peer) for peer in self.held_peers(instance.task.role.name))

    def held_peers(self, role: str) -> Iterator[PeerId]:
        """Yield the workers that are held, perhaps busy, and neither drain nor are released."""
        for held in self.leases.values():
            if held.lease.role == role and not held.is_draining and not held.is_surplus:
                yield held.lease.peer

    def _may_start(self, instance: Instance, peer: PeerId) -> bool:
        if not self._avoids(instance, peer):
            return True
        role = instance.task.role.name
        return self.avoidance.gives_in(role, self.now) and self.avoidance.sought_for(role) == self._work(instance)

    def _work(self, instance: Instance) -> str:
        """Return the name under which another worker is sought for an instance: its own if it is wary, else `_ANY`."""
        return instance.name if instance.name in self._wary[instance.task.role.name] else _ANY

    def _seek(self) -> None:
        """Choose for each role what another worker is sought for: the first that avoids all which are held."""
        for role in self.graph.roles:
            stuck = self._stuck(role)
            if not stuck:
                self.avoidance.stop_seeking(role.name)
                continue
            work = self.avoidance.sought_for(role.name)
            if work is None or work not in stuck:
                work = next(iter(stuck))
            may_be_found = self._may_find_other(role, stuck[work])
            self.avoidance.seek_other(role.name, work, stuck[work], self.now, may_be_found=may_be_found)

    def _may_find_other(self, role: Role, avoided: frozenset[PeerId]) -> bool:
        """Return whether another lease is sought; with as many as the job allows, one has to become idle first."""
        held = (held for held in self.leases.values() if held.lease.role == role.name and not held.is_surplus)
        kept = sum(held.instance is not None or held.lease.peer not in avoided for held in held)
        return kept < self._counts().get(role, 0)

    def _stuck(self, role: Role) -> dict[str, frozenset[PeerId]]:
        """Return what is ready and avoids all workers that are held, with the workers that it avoids."""
        excluded = self.avoidance.excluded(role.name, self.now)
        wary = self._ready_wary(role.name)
        stuck = {found.name: excluded | found.failed_at for found in wary if not self._has_choice(found)}
        if excluded and self.instances.ready[role] > len(wary) and excluded.issuperset(self.held_peers(role.name)):
            stuck[_ANY] = excluded
        return stuck

    # --------------------------------------------------------------------------------------------------------- starts

    def enqueue(self, instance: Instance) -> None:
        """Add an instance that has become ready."""
        entry = (instance.order, instance.name)
        role = instance.task.role.name
        heapq.heappush(self._queues[role], entry)
        for peer in self.inputs_at(instance):
            heapq.heappush(self._local[role, peer], entry)
        if instance.failed_at or instance.has_used_retries:
            self._wary[role][instance.name] = instance

    def place(self, now: float) -> Iterator[tuple[TaskLease, Instance]]:
        """Yield what is to start on which lease; the caller starts it before the next."""
        self.now = now
        is_settled = False
        while not is_settled:
            self._seek()
            is_settled = True
            for found in self._place(now):
                is_settled = False
                yield found

    def _place(self, now: float) -> Iterator[tuple[TaskLease, Instance]]:
        for use_surplus in (False, True):
            free = [held for held in self._usable(now) if held.is_surplus is use_surplus]
            for local in (True, False):
                for held in free:
                    if not self.instances.ready.total() or self.instances.running.total() >= self.graph.job.workers:
                        return
                    if held.instance is None and (instance := self._next(held.lease, local)) is not None:
                        held.instance = instance
                        yield held, instance

    def _usable(self, now: float) -> list[TaskLease]:
        """Return the free leases but those at excluded peers, unless nothing else was found."""
        avoidance = self.avoidance
        return [
            held
            for held in self.leases.values()
            if held.is_free(now)
            and (
                not avoidance.is_excluded(held.lease.role, held.lease.peer, now)
                or avoidance.gives_in(held.lease.role, now)
            )
        ]

    def _next(self, lease: Lease, local: bool) -> Instance | None:
        """Take the first instance that may start on a lease."""
        heap = self._local.get((lease.role, lease.peer), []) if local else self._queues[lease.role]
        passed: _Heap = []
        found = None
        while heap and found is None:
            entry = heapq.heappop(heap)
            instance = self.instances.by_name[entry[1]]
            if instance.phase is Phase.READY and self._may_start(instance, lease.peer):
                found = instance
            elif instance.phase is Phase.READY:
                passed.append(entry)
        for entry in passed:
            heapq.heappush(heap, entry)
        return found
