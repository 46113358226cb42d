"""Leases: which scheduler holds which part of this machine, and until when.

Pure: the clock is passed in. `bidding.bidder` reserves what it offers here, `service` renews, releases and sweeps, and
`tasks.task_sessions` attaches tasks. A lease's resources are free again when its task's processes are gone, not when
the lease expires.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEWED_LEASE
from hypha_proto.offers import ExecutorDescriptor
from hypha_proto.resources import Resources
from hypha_worker.leasing.capacity import Allocation, Capacity
from hypha_worker.leasing.terms import LeaseTerms, LeaseUsage

REMEMBERED_ENDS: Final = 256
"""Leases that are remembered after their end, so that their scheduler is told why and not counted as a stranger."""

LAPSE_MEMORY: Final = 10.0
"""Seconds for which an offer that ended without an answer counts against its scheduler."""


class LeaseError(Exception):
    """A lease cannot be used as requested; the message says why."""


class UnknownLeaseError(LeaseError):
    """The peer has and had no such lease here."""


class LeaseState(Enum):
    """The states of a lease."""

    OFFERED = "offered"
    """Its resources are reserved for an offer that is not accepted yet."""
    HELD = "held"
    """A scheduler accepted the offer and renews the lease."""
    ORPHANED = "orphaned"
    """It was not renewed in time, but its task may run on, or its end be reported; a renewal takes it back."""
    ENDING = "ending"
    """It is over, but its task still has processes."""


class LeaseEnd(Enum):
    """How a lease ended."""

    EXPIRED = "expired"
    IDLE = "idle"
    RELEASED = "released"
    UNDELIVERED = "undelivered"
    WITHDRAWN = "withdrawn"
    STUCK = "stuck"

    @property
    def reason(self) -> str:
        """The end in words."""
        return _END_REASONS[self]


_END_REASONS: Final = {
    LeaseEnd.EXPIRED: "it was not renewed in time",
    LeaseEnd.IDLE: "no job ran on it for too long",
    LeaseEnd.RELEASED: "it was released",
    LeaseEnd.UNDELIVERED: "its offer could not be delivered",
    LeaseEnd.WITHDRAWN: "the worker drains, and its offer had not been accepted",
    LeaseEnd.STUCK: "processes of its job cannot be ended",
}


@dataclass(slots=True)
class Lease:
    """A part of the machine, reserved for one scheduler."""

    id: uuid.UUID
    scheduler: PeerId
    request_id: uuid.UUID
    allocation: Allocation
    price: float
    expires: float
    """Seconds of the local monotonic clock; an orphaned lease ends later, at `ends`."""
    state: LeaseState = LeaseState.OFFERED
    has_task: bool = False
    """Whether a task is attached."""
    executors: tuple[ExecutorDescriptor, ...] = ()
    """The executors that its request asked for."""
    idle_since: float | None = None
    """When it was accepted or its last task ended, on the local clock; None until that is known."""
    end: LeaseEnd | None = None
    """How it ended; None while it may be renewed."""
    job_id: uuid.UUID | None = None
    """The job whose task ran on it last, or runs."""
    task_began: float | None = None
    """When its task was attached, on the local clock; None while it has none."""
    outcome: str = ""
    """How the task that ran on it last has ended; empty while it runs, and if there was none."""
    orphan_grace: float = 0.0
    """Seconds after `expires` for which its newest task may run on, and its end be reported, without a renewal."""
    charged: float = 0.0
    """Seconds for which its scheduler owes the price so far: it was held, and not orphaned."""
    charged_until: float | None = None
    """Time up to which `charged` counts, on the local clock; None before it is accepted."""

    @property
    def ends(self) -> float:
        """When it ends unless it is renewed, on the local clock."""
        return self.expires + self.orphan_grace

    @property
    def has_ended(self) -> bool:
        """Whether it takes no renewal any more."""
        return self.end is not None or self.state is LeaseState.ENDING

    def remaining(self, now: float) -> float:
        """Return the seconds left until it expires."""
        return max(0.0, self.expires - now)

    @property
    def owed(self) -> float:
        """Tokens that its scheduler owes for `charged`."""
        return self.price * self.charged / 3600

    def charge(self, now: float) -> None:
        """Charge the time since it was last charged, up to its expiry."""
        if self.charged_until is not None:
            until = max(self.charged_until, min(now, self.expires))
            self.charged += until - self.charged_until
            self.charged_until = until


class LeaseManager:
    """All leases of one worker. Together they never hold more than the machine has."""

    def __init__(self, capacity: Capacity, terms: LeaseTerms | None = None) -> None:
        self._capacity = capacity
        self._terms = terms or LeaseTerms()
        self._leases: dict[uuid.UUID, Lease] = {}
        self._ended: OrderedDict[uuid.UUID, Lease] = OrderedDict()
        self._lapsed: deque[tuple[float, PeerId]] = deque(maxlen=REMEMBERED_ENDS)
        self._retained: dict[uuid.UUID, Allocation] = {}
        self.is_closed = False
        """Whether there are no more offers and jobs."""
        self.is_paused = False
        """Whether there are no more offers although leases take jobs, because the owner wants so."""
        self._settled = 0.0
        """Tokens owed for leases that are over."""
        self.on_freed: Callable[[], None] = lambda: None
        """Called when resources have become free."""
        self.on_held: Callable[[Lease], None] = lambda _lease: None
        """Called when a scheduler has accepted an offer."""
        self.retained_storage: Callable[[], float] = lambda: 0.0
        """Returns the GB that are in use although no lease holds them."""

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Every known lease."""
        return tuple(self._leases.values())

    @property
    def held_by_scheduler(self) -> Mapping[PeerId, tuple[uuid.UUID, ...]]:
        """The leases of each scheduler that has taken some and not lost them."""
        held: dict[PeerId, tuple[uuid.UUID, ...]] = {}
        for lease in self.leases:
            if lease.state in (LeaseState.HELD, LeaseState.ORPHANED):
                held[lease.scheduler] = (*held.get(lease.scheduler, ()), lease.id)
        return held

    @property
    def owed(self) -> float:
        """Tokens that schedulers owe for all leases so far, as of the last sweep."""
        return self._settled + sum(lease.owed for lease in self._leases.values())

    def close(self) -> None:
        """Refuse further offers and jobs, and withdraw the offers that were not accepted. Leases and jobs stay."""
        self.is_closed = True
        for lease in self.leases:
            if lease.state is LeaseState.OFFERED:
                self._end(lease, LeaseEnd.WITHDRAWN)

    @property
    def free(self) -> Capacity:
        """Capacity that no lease and no process holds, without `retained_storage`."""
        held = {lease.id: lease.allocation for lease in self._leases.values()}
        taken = [*(self._retained | held).values()]
        if retained := self.retained_storage():
            taken.append(Allocation(Resources(storage=retained)))
        return self._capacity.without(taken)

    @property
    def leased_requests(self) -> frozenset[tuple[PeerId, uuid.UUID]]:
        """Schedulers and requests with a lease.

        Anybody can copy the id of a published request, so an id alone names none.
        """
        return frozenset((lease.scheduler, lease.request_id) for lease in self._leases.values())

    @property
    def usage(self) -> Mapping[PeerId, LeaseUsage]:
        """What each scheduler has; those with nothing are left out."""
        lapses = Counter(scheduler for _, scheduler in self._lapsed)
        found = {scheduler: LeaseUsage(lapsed=count) for scheduler, count in lapses.items()}
        for lease in self._leases.values():
            known, offered = found.get(lease.scheduler, LeaseUsage()), lease.state is LeaseState.OFFERED
            found[lease.scheduler] = LeaseUsage(
                known.offers + offered, known.leases + (not offered), known.jobs + lease.has_task, known.lapsed
            )
        return found

    def offer(self, lease: Lease) -> None:
        """Reserve what a new lease has allocated, for an offer; the reservation is dropped when the lease expires.

        Raises:
            LeaseError: it is not free, or the id is in use, or there are no more offers.
        """
        self._check_open()
        free, allocation = self.free, lease.allocation
        if lease.id in self._leases:
            raise LeaseError(f"lease {lease.id} already exists")
        if not free.resources.covers(allocation.resources) or not set(allocation.devices) <= set(free.devices):
            raise LeaseError(f"{allocation.resources} is no longer free: free is {free.resources}")
        self._leases[lease.id] = lease

    def start_offer(self, lease_id: uuid.UUID, now: float, round_trip: float | None) -> Lease:
        """Start the temporary lease of an offer, now that the connection to its scheduler stands.

        Args:
            round_trip: round trip of that connection in seconds, None if it is not known.

        Raises:
            LeaseError: the reservation was dropped meanwhile.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.state is not LeaseState.OFFERED or now >= lease.expires:
            raise LeaseError(f"the reservation for offer {lease_id} is over")
        lease.expires = now + self._terms.offer_life(round_trip)
        return lease

    def renew(self, lease_id: uuid.UUID, scheduler: PeerId, now: float) -> Lease:
        """Extend a lease by `RENEWED_LEASE`; one without a task at most to the end of the time that it may be idle.

        Raises:
            UnknownLeaseError: there was no such lease of this scheduler.
            LeaseError: it is over.
        """
        lease = self._owned_lease(lease_id, scheduler)
        if self._is_idle(lease, now):
            raise LeaseError(f"lease {lease_id} is over: no job ran on it for {self._terms.idle_lease:g} s")
        if now >= lease.ends or lease.state is LeaseState.ENDING:
            raise LeaseError(f"lease {lease_id} is over")
        if lease.charged_until is None:
            self.on_held(lease)
        lease.charge(now)
        lease.charged_until = now
        if lease.state is LeaseState.ORPHANED:
            lease.idle_since = None
        lease.state = LeaseState.HELD
        lease.expires = now + RENEWED_LEASE
        if not lease.has_task:
            lease.idle_since = now if lease.idle_since is None else lease.idle_since
            lease.expires = min(lease.expires, lease.idle_since + self._terms.idle_lease)
        return lease

    def attach_task(
        self,
        lease_id: uuid.UUID,
        scheduler: PeerId,
        now: float,
        orphan_grace: float = 0.0,
        job_id: uuid.UUID | None = None,
    ) -> Lease:
        """Attach a task to a lease, which also renews it.

        Args:
            orphan_grace: seconds for which its scheduler asks the task to run on without renewals; the owner's
                `LeaseTerms.orphan_grace` bounds them.
            job_id: the job, for the owner.

        Raises:
            UnknownLeaseError: there was no such lease of this scheduler.
            LeaseError: the lease is over or has a task, or the scheduler has `Quota.max_jobs` jobs; or the worker
                takes no more.
        """
        lease = self._owned_lease(lease_id, scheduler)
        self._check_open()
        if lease.has_task:
            raise LeaseError(f"a job already runs on lease {lease_id}")
        self._check_job_quota(scheduler)
        self.renew(lease_id, scheduler, now)
        lease.has_task = True
        lease.job_id, lease.task_began, lease.outcome = job_id, now, ""
        lease.expires = now + RENEWED_LEASE
        lease.orphan_grace = min(orphan_grace, self._terms.orphan_grace)
        return lease

    def detach_task(self, lease_id: uuid.UUID, outcome: str = "") -> None:
        """Detach the task of a lease, after its last process has ended; the lease takes another one, unless it is over.

        Until `end_grace` it is held as long without a renewal as the task might have run on, so that the task's end
        can be reported.

        Args:
            outcome: how it has ended, for the owner.
        """
        lease = self._leases.get(lease_id)
        if lease is None or not lease.has_task:
            return
        lease.has_task, lease.task_began, lease.outcome = False, None, outcome
        lease.idle_since = None  # the next sweep or renewal starts the time
        if lease.state is LeaseState.ENDING:
            self._forget(lease)
        elif lease_id in self._retained:
            lease.expires = -math.inf  # the next sweep ends it

    def end_grace(self, lease_id: uuid.UUID) -> None:
        """End the time for which a lease without a task is held beyond its expiry: the end of its task is reported."""
        lease = self._leases.get(lease_id)
        if lease is not None and not lease.has_task:
            lease.orphan_grace = 0.0

    def may_outlast_renewals(self, lease_id: uuid.UUID, now: float) -> bool:
        """Return whether the newest task of a lease may run on, or report its end, now without a renewal."""
        lease = self._leases.get(lease_id)
        return lease is not None and lease.orphan_grace > 0 and not lease.has_ended and now < lease.ends

    def retain(self, lease_id: uuid.UUID) -> None:
        """Keep what a lease has allocated taken beyond its end, because processes of its task cannot be ended.

        The lease takes no further task and ends with the next sweep after `detach_task`.
        """
        lease = self._leases.get(lease_id)
        if lease is not None:
            self._retained[lease_id] = lease.allocation

    def free_retained(self, lease_id: uuid.UUID) -> None:
        """Free what `retain` has kept taken, now that the processes are gone."""
        if self._retained.pop(lease_id, None) is not None:
            self.on_freed()

    def release(self, lease_id: uuid.UUID, scheduler: PeerId) -> Lease:
        """End a lease. If it has a task, its resources stay reserved until `detach_task`.

        Raises:
            UnknownLeaseError: there was no such lease of this scheduler.
            LeaseError: it is over.
        """
        lease = self._owned_lease(lease_id, scheduler)
        self._end(lease, LeaseEnd.RELEASED)
        return lease

    def cancel_offer(self, lease_id: uuid.UUID) -> None:
        """Remove an offer that could not be sent; keep it if it was accepted meanwhile."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.state is LeaseState.OFFERED:
            self._end(lease, LeaseEnd.UNDELIVERED)

    def sweep(self, now: float) -> None:
        """End leases that have expired; those with a task stay until it is detached.

        Idle leases end only then, too: `renew` has told the scheduler this time. One whose task may run on without
        renewals is orphaned first.
        """
        while self._lapsed and self._lapsed[0][0] <= now - LAPSE_MEMORY:
            self._lapsed.popleft()
        for lease in self.leases:
            if lease.idle_since is None and lease.state is LeaseState.HELD and not lease.has_task:
                lease.idle_since = now
            if lease.state is LeaseState.HELD:
                lease.charge(now)
                if lease.expires <= now < lease.ends:
                    lease.state = LeaseState.ORPHANED
            if now >= lease.ends and lease.state is not LeaseState.ENDING:
                if lease.state is LeaseState.OFFERED:
                    self._lapsed.append((now, lease.scheduler))
                self._end(lease, self._how_ended(lease, now))

    def find(self, lease_id: uuid.UUID, scheduler: PeerId) -> Lease | None:
        """Return the lease if it is known and belongs to `scheduler`, else None."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and lease.scheduler == scheduler else None

    def _owned_lease(self, lease_id: uuid.UUID, scheduler: PeerId) -> Lease:
        lease = self.find(lease_id, scheduler)
        if lease is not None:
            return lease
        ended = self._ended.get(lease_id)
        if ended is not None and ended.end is not None and ended.scheduler == scheduler:
            raise LeaseError(f"{scheduler} has no lease {lease_id} here any more: {ended.end.reason}")
        # the same answer for other schedulers' leases, so that it reveals nothing about them
        raise UnknownLeaseError(f"{scheduler} has no lease {lease_id} here")

    def _is_idle(self, lease: Lease, now: float) -> bool:
        is_open = lease.state is LeaseState.HELD and not lease.has_task and now >= lease.expires
        return is_open and lease.idle_since is not None and now >= lease.idle_since + self._terms.idle_lease

    def _how_ended(self, lease: Lease, now: float) -> LeaseEnd:
        if lease.id in self._retained:
            return LeaseEnd.STUCK
        return LeaseEnd.IDLE if self._is_idle(lease, now) else LeaseEnd.EXPIRED

    def _check_open(self) -> None:
        if self.is_closed:
            raise LeaseError("this worker drains: it makes no offers and starts no jobs any more")

    def _check_job_quota(self, scheduler: PeerId) -> None:
        limit = self._terms.quota.max_jobs
        running = self.usage.get(scheduler, LeaseUsage()).jobs
        if limit is not None and running >= limit:
            raise LeaseError(f"{scheduler} runs {running} jobs here, and offer.max_jobs of this worker is {limit}")

    def _end(self, lease: Lease, how: LeaseEnd) -> None:
        lease.end = lease.end or how
        if lease.has_task:
            lease.state = LeaseState.ENDING
        else:
            self._forget(lease)

    def _forget(self, lease: Lease) -> None:
        """Remove a lease; remember how it ended while there is room."""
        del self._leases[lease.id]
        self._settled += lease.owed
        self._ended[lease.id] = lease
        if len(self._ended) > REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        self.on_freed()
