"""Placement of ready instances on leases: where their inputs are if they can, in their order otherwise. Pure.

An instance avoids workers at which it failed, and those that its role excludes, while the job has another one, and for
`PATIENCE` seconds in which another is sought. Decides how many leases of each role are wanted. Called by `operator`.
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
from hypha_scheduler.allocation.exclusions import Exclusions
from hypha_scheduler.strategies.base import Lease
from hypha_scheduler.strategies.tasks.graph import Role, TaskGraph
from hypha_scheduler.strategies.tasks.instances import Instance, Instances, Phase

PATIENCE: Final = 3.0
"""Seconds for which another worker is sought before an instance starts at one that it avoids."""

_ALONE: Final = 30.0
"""Seconds for which no other worker is sought again after none was found."""
_ANY: Final = ""
"""Name of what is sought for instances that avoid excluded workers only."""

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
class _Sought:
    """An instance for which another worker is sought."""

    name: str
    avoided: frozenset[PeerId]
    ends: float | None = None
    """When it may start at any; None while the job holds all the leases that it may, so that none is sought."""


@dataclass(slots=True)
class Placement:
    """Leases and ready instances by role."""

    graph: TaskGraph
    instances: Instances
    inputs_at: Callable[[Instance], Sequence[PeerId]]
    """Returns the workers that hold an instance's inputs."""
    exclusions: Exclusions
    leases: dict[uuid.UUID, HeldLease] = field(default_factory=dict)
    """In the order in which they were found."""
    _began: bool = False
    _queues: defaultdict[str, _Heap] = field(default_factory=lambda: defaultdict(list))
    """Ready instances by role."""
    _local: defaultdict[tuple[str, PeerId], _Heap] = field(default_factory=lambda: defaultdict(list))
    """Ready instances by role and by a worker that holds inputs."""
    _wary: defaultdict[str, dict[str, Instance]] = field(default_factory=lambda: defaultdict(dict))
    """Instances by role and name that avoid certain workers; some are ready no longer."""
    _sought: dict[str, _Sought] = field(default_factory=dict)
    """What another worker is sought for, by role."""
    _alone: dict[str, tuple[frozenset[PeerId], float]] = field(default_factory=dict)
    """Peers beside which none was found, by role, and how long no other is sought before they are used."""
    _now: float = 0.0
    """Time of the last `place`."""

    # ---------------------------------------------------------------------------------------------------------- leases

    def add(self, leases: Sequence[Lease]) -> None:
        """Add new leases."""
        self._began = True
        self.leases |= {lease.id: HeldLease(lease) for lease in leases}
        for lease in leases:
            if lease.peer not in self._alone.get(lease.role, (frozenset(), 0.0))[0]:
                self._alone.pop(lease.role, None)

    def mark_surplus(self) -> None:
        """Mark the leases that the runner releases now: those at excluded peers, and the newest idle ones of a role."""
        requests = self.requests()
        for request in requests:
            self._mark_excluded(request)
        wanted = {request.role: request.count for request in requests}
        by_role: defaultdict[str, list[HeldLease]] = defaultdict(list)
        for held in self.leases.values():
            if not held.is_surplus:
                by_role[held.lease.role].append(held)
        for role, found in by_role.items():
            idle = [held for held in found if held.instance is None]
            for held in idle[::-1][: max(0, len(found) - wanted.get(role, 0))]:
                held.is_surplus = True

    def _mark_excluded(self, request: RoleRequest) -> None:
        """Mark idle leases at excluded peers, unless the role has no other lease."""
        held = [h for h in self.leases.values() if h.lease.role == request.role and not h.is_surplus]
        unusable = [h for h in held if h.instance is None and h.lease.peer in request.excluded]
        if len(unusable) < len(held):
            for lease in unusable:
                lease.is_surplus = True

    def requests(self) -> list[RoleRequest]:
        """Return the leases that are wanted: as many as there is to run, all together at most as the job allows.

        A lease that drains without a task does not count: its worker ends.
        """
        counts = self._counts()
        if not self._began:  # begin with the first that is found
            counts = dict.fromkeys(list(counts)[:1], 1)
        requests = (role.request(self.graph.job, count) for role, count in counts.items())
        return [replace(request, excluded=self._excluded(request.role)) for request in requests]

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

    # -------------------------------------------------------------------------------------------------------- avoidance

    def next_deadline(self) -> float | None:
        """Return when an instance may start at workers that it avoids, or an exclusion ends."""
        ends = (sought.ends for sought in self._sought.values())
        times = (*ends, self.exclusions.next_end(self._now))
        return min((at for at in times if at is not None and at > self._now), default=None)

    def give_in(self, now: float) -> bool:
        """Let instances start at workers that they avoid, as no other was found; return whether there are any."""
        waiting = [sought for sought in self._sought.values() if sought.ends is None or sought.ends > now]
        for sought in waiting:
            sought.ends = now
        return bool(waiting)

    def _excluded(self, role: str) -> frozenset[PeerId]:
        """Return the peers of which no lease is wanted."""
        if self._gives_in(role):
            return frozenset()
        excluded = self.exclusions.peers(role, self._now)
        if (sought := self._sought.get(role)) is not None:
            excluded |= sought.avoided
        wary = self._ready_wary(role)
        ready = sum(count for found, count in self.instances.ready.items() if found.name == role)
        if wary and len(wary) == ready:  # nothing would start at a worker that all of them avoid
            excluded |= frozenset.intersection(*(frozenset(instance.failed_at) for instance in wary))
        return excluded

    def _gives_in(self, role: str) -> bool:
        """Return whether another worker was sought in vain for what avoids all workers that are held."""
        sought = self._sought.get(role)
        if sought is None:
            return False
        if sought.ends is not None and sought.ends <= self._now:
            return True
        avoided, until = self._alone.get(role, (frozenset(), 0.0))
        return self._now < until and avoided <= sought.avoided

    def _ready_wary(self, role: str) -> list[Instance]:
        found = self._wary[role]
        for name in [name for name, instance in found.items() if instance.phase is not Phase.READY]:
            del found[name]
        return list(found.values())

    def _avoids(self, instance: Instance, peer: PeerId) -> bool:
        """Return whether an instance starts at a peer only if there is no other."""
        role = instance.task.role.name
        if peer in instance.failed_at or self.exclusions.is_excluded(role, peer, self._now):
            return True
        return instance.has_used_retries and not self.exclusions.is_proven(role, peer)

    def _has_choice(self, instance: Instance) -> bool:
        """Return whether a worker is held, perhaps busy, that an instance does not avoid."""
        role = instance.task.role.name
        return any(
            not self._avoids(instance, held.lease.peer)
            for held in self.leases.values()
            if held.lease.role == role and not held.is_draining and not held.is_surplus
        )

    def holds_proven(self, role: str) -> bool:
        """Return whether a worker is held, and not excluded, that has finished an instance of a role."""
        return any(
            self.exclusions.is_proven(role, held.lease.peer)
            and not self.exclusions.is_excluded(role, held.lease.peer, self._now)
            for held in self.leases.values()
            if held.lease.role == role and not held.is_draining and not held.is_surplus
        )

    def _may_start(self, instance: Instance, peer: PeerId) -> bool:
        if not self._avoids(instance, peer):
            return True
        role = instance.task.role.name
        return self._gives_in(role) and self._sought[role].name == self._sought_name(instance)

    def _sought_name(self, instance: Instance) -> str:
        return instance.name if instance.name in self._wary[instance.task.role.name] else _ANY

    def _seek(self) -> None:
        """Choose for each role what another worker is sought for: the first that avoids all which are held."""
        for role in self.graph.roles:
            stuck = self._stuck(role)
            sought = self._sought.get(role.name)
            if not stuck:
                self._sought.pop(role.name, None)
                continue
            if sought is None or sought.name not in stuck:
                sought = self._sought[role.name] = _Sought(*next(iter(stuck.items())))
            self._update_end(role, sought)

    def _update_end(self, role: Role, sought: _Sought) -> None:
        if not self._is_searching(role, sought):
            sought.ends = None
        elif sought.ends is None:
            sought.ends = self._now + PATIENCE
        elif sought.ends <= self._now:
            self._alone[role.name] = (sought.avoided, self._now + _ALONE)

    def _is_searching(self, role: Role, sought: _Sought) -> bool:
        """Return whether another lease is sought; with as many as the job allows, one has to become idle first."""
        held = (held for held in self.leases.values() if held.lease.role == role.name and not held.is_surplus)
        kept = sum(held.instance is not None or held.lease.peer not in sought.avoided for held in held)
        return kept < self._counts().get(role, 0)

    def _stuck(self, role: Role) -> dict[str, frozenset[PeerId]]:
        """Return what is ready and avoids all workers that are held, with the workers that it avoids."""
        excluded = self.exclusions.peers(role.name, self._now)
        wary = self._ready_wary(role.name)
        stuck = {found.name: excluded | found.failed_at for found in wary if not self._has_choice(found)}
        if excluded and self.instances.ready[role] > len(wary) and not self._holds_other_than(role, excluded):
            stuck[_ANY] = excluded
        return stuck

    def _holds_other_than(self, role: Role, peers: frozenset[PeerId]) -> bool:
        return any(
            held.lease.peer not in peers and not held.is_draining and not held.is_surplus
            for held in self.leases.values()
            if held.lease.role == role.name
        )

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

    def place(self, now: float) -> Iterator[tuple[HeldLease, Instance]]:
        """Yield what is to start on which lease; the caller starts it before the next."""
        self._now = now
        is_settled = False
        while not is_settled:
            self._seek()
            is_settled = True
            for found in self._place(now):
                is_settled = False
                yield found

    def _place(self, now: float) -> Iterator[tuple[HeldLease, Instance]]:
        for use_surplus in (False, True):
            free = [held for held in self._usable(now) if held.is_surplus is use_surplus]
            for local in (True, False):
                for held in free:
                    if not self.instances.ready_total or self.instances.running_total >= self.graph.job.workers:
                        return
                    if held.instance is None and (instance := self._next(held.lease, local)) is not None:
                        held.instance = instance
                        yield held, instance

    def _usable(self, now: float) -> list[HeldLease]:
        """Return the free leases but those at excluded peers, unless nothing else was found."""
        free = (held for held in self.leases.values() if held.is_free(now))
        return [
            held
            for held in free
            if not self.exclusions.is_excluded(held.lease.role, held.lease.peer, now) or self._gives_in(held.lease.role)
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
