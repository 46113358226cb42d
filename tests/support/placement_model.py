"""Discrete-event model of placement: the pure parts of workers and schedulers, with every message and timer explicit.

The lease manager, arbiter and request batch of a worker and the auction and held leases of a scheduler are the real
ones; what `service`, `bidder`, `allocator` and `renewal` do with them is modelled as events on one clock. Messages are
lost, duplicated, delayed and so reordered. A stopped node (SIGSTOP) handles nothing until it continues, while the clock
goes on; what arrived meanwhile is handled then, in any order with its timers.
"""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final, TypeVar

from hypha_proto.ids import PeerId
from hypha_proto.leases import LEASE_SWEEP, RENEWED_LEASE
from hypha_proto.offers import REQUEST_BATCH_WINDOW, ExecutorDescriptor, WorkerOffer, WorkerRequest, WorkerSpec
from hypha_proto.resources import Resources
from hypha_scheduler.allocation.auction import AcceptedOffer, Auction, AuctionSettings, RoleRequest
from hypha_scheduler.allocation.leases import HeldLease, HeldLeases
from hypha_worker.bidding.arbiter import Arbiter, OfferPolicy
from hypha_worker.bidding.request_batch import ReceivedRequest
from hypha_worker.bidding.request_queue import RequestQueue
from hypha_worker.leasing.capacity import Allocation, Capabilities, Capacity, GpuCapacity
from hypha_worker.leasing.lease_manager import Lease, LeaseError, LeaseManager, LeaseState
from hypha_worker.leasing.terms import LeaseTerms

A = TypeVar("A")

TRAIN, SERVER = ExecutorDescriptor("train", "train"), ExecutorDescriptor("aggregate", "server")
CAPACITY: Final = Capacity(
    Resources(cpu=3.0, memory=8.0), (GpuCapacity(0, 8.0), GpuCapacity(1, 8.0), GpuCapacity(2, 16.0))
)
WANTED: Final = Resources(gpu=8.0, cpu=1.0, memory=2.0)
TERMS: Final = LeaseTerms(idle_lease=25.0)
_DIAL_TIMEOUT: Final = 2.0
_ACCEPT_TIMEOUT: Final = 5.0
_RENEWAL_TIMEOUT: Final = 2.5
_REPUBLISH: Final = 1.0
_SCHEDULER_TICK: Final = 0.05
_WORKER_TICK: Final = LEASE_SWEEP / 2


@dataclass(slots=True)
class Conditions:
    """What happens to messages from now on."""

    loss: float = 0.0
    """Probability that a message is lost."""
    duplication: float = 0.0
    """Probability that it arrives twice."""
    delay: float = 0.1
    """Longest ordinary delay in seconds; delays are uniform, and so messages overtake each other."""
    late: float = 0.0
    """Probability that it takes up to twelve seconds, longer than a lease lasts."""


class World:
    """All nodes, and the events that are to come."""

    def __init__(self, seed: int, workers: int, schedulers: int) -> None:
        """Make idle nodes at time 100."""
        self.random = Random(f"model/{seed}")
        self.now = 100.0
        self.conditions = Conditions()
        self.events = 0
        self._queue: list[tuple[float, int, PeerId, Callable[[], None]]] = []
        self._order = 0
        self._stopped: dict[PeerId, float] = {}
        self.workers = {worker.peer: worker for worker in (WorkerNode(self, number) for number in range(workers))}
        self.schedulers = [SchedulerNode(self, 100 + number) for number in range(schedulers)]

    def make_id(self) -> uuid.UUID:
        """Draw an identifier."""
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

    def stop(self, peer: PeerId, seconds: float) -> None:
        """Let a node handle nothing for some seconds."""
        self._stopped[peer] = max(self.now + seconds, self._stopped.get(peer, 0.0))

    def after(self, seconds: float, peer: PeerId, action: Callable[[], None]) -> None:
        """Let a node do something later."""
        self._order += 1
        heapq.heappush(self._queue, (self.now + seconds, self._order, peer, action))

    def send(self, to: PeerId, action: Callable[[], None]) -> None:
        """Let a message arrive under the present conditions; `action` handles it there."""
        conditions = self.conditions
        for _ in range(2 if self.random.random() < conditions.duplication else 1):
            if self.random.random() >= conditions.loss:
                longest = 12.0 if self.random.random() < conditions.late else conditions.delay
                self.after(self.random.uniform(0.0, longest), to, action)

    def call(
        self, caller: PeerId, to: PeerId, handle: Callable[[], A], on_answer: Callable[[A | None], None], timeout: float
    ) -> None:
        """Send a request and call `on_answer` once: with the answer, or with None at the timeout."""
        done = False

        def finish(answer: A | None) -> None:
            nonlocal done
            if not done:
                done = True
                on_answer(answer)

        def respond() -> None:
            answer = handle()
            self.send(caller, lambda: finish(answer))

        self.after(timeout, caller, lambda: finish(None))
        self.send(to, respond)

    def run(self, seconds: float) -> None:
        """Handle the events of the next seconds; check the invariants after each."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            at, order, peer, action = heapq.heappop(self._queue)
            resume = self._stopped.get(peer, 0.0)
            if resume > at:
                heapq.heappush(self._queue, (resume + self.random.random() / 1000, order, peer, action))
                continue
            self.now = at
            action()
            self.events += 1
            self.check()
        self.now = end

    def check(self) -> None:
        """Assert what must hold at every moment."""
        for worker in self.workers.values():
            worker.check()
        for scheduler in self.schedulers:
            for held in scheduler.leases.held():
                if held.expires > self.now:
                    lease = self.workers[held.peer].manager.find(held.lease, scheduler.peer)
                    assert lease is not None, f"{held} is believed at {self.now}, and its worker has given it away"

    def settle(self) -> None:
        """End all jobs and stops, and wait until no lease can be left."""
        self._stopped.clear()
        for scheduler in self.schedulers:
            scheduler.close()
        self.conditions = Conditions()
        self.run(12.0 + 2 * RENEWED_LEASE)

    def check_quiescence(self) -> None:
        """Assert that nothing is leased."""
        for worker in self.workers.values():
            assert worker.manager.leases == ()
            assert worker.manager.free == CAPACITY
        for scheduler in self.schedulers:
            assert len(scheduler.leases) == 0


class WorkerNode:
    """A worker as `bidding.bidder` and `service` run it."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.peer = PeerId.from_public_key(bytes([number]) * 32)
        self.manager = LeaseManager(CAPACITY, TERMS)
        arbiter = Arbiter(OfferPolicy(price=1.0), Capabilities(CAPACITY, frozenset((TRAIN, SERVER))))
        self._queue = RequestQueue(arbiter, self.manager)
        self.manager.on_freed = self._on_freed
        self.deferred = 0
        """Offers for requests that had waited longer than a batch window."""
        self._processes: dict[uuid.UUID, Allocation] = {}
        """What the processes of jobs use."""
        world.after(world.random.uniform(0, _WORKER_TICK), self.peer, self._tick)

    def check(self) -> None:
        """Assert that leases and processes take no more than there is, and no device twice."""
        taken = {lease.id: lease.allocation for lease in self.manager.leases} | self._processes
        total = sum((allocation.resources for allocation in taken.values()), Resources())
        assert CAPACITY.resources.covers(total), f"{total} is taken of {CAPACITY.resources}"
        devices = [device for allocation in taken.values() for device in allocation.devices]
        assert len(set(devices)) == len(devices), f"a device is taken twice: {devices}"
        assert set(devices) <= set(CAPACITY.devices)

    def _tick(self) -> None:
        self._sweep()
        self._decide()
        self.world.after(_WORKER_TICK, self.peer, self._tick)

    def _on_freed(self) -> None:
        self._queue.note_freed()
        self.world.after(0.0, self.peer, self._decide)

    def _decide(self) -> None:
        now = self.world.now
        if self._queue.seconds_until_due(now) != 0.0:
            return
        for plan in self._queue.decide(now).offers:
            received = plan.received_request
            self.deferred += now > received.received_at + REQUEST_BATCH_WINDOW + _WORKER_TICK
            lease = self.manager.offer(
                self.world.make_id(), received.scheduler, received.request.id, plan.allocation, plan.price, now,
                received.request.spec.executor, life=_DIAL_TIMEOUT,
            )  # fmt: skip
            self._dial(lease)

    def _sweep(self) -> None:
        for lease in self.manager.sweep(self.world.now):
            self._kill_job(lease)

    def _kill_job(self, lease: Lease) -> None:
        """End the processes of a cancelled job, which takes a while."""
        self.world.after(self.world.random.uniform(0, 1.0), self.peer, lambda: self._processes_gone(lease.id))

    def _processes_gone(self, lease: uuid.UUID) -> None:
        self._processes.pop(lease, None)
        self.manager.detach_job(lease)

    def _dial(self, lease: Lease) -> None:
        def connected() -> None:
            try:
                started = self.manager.start_offer(lease.id, self.world.now, self.world.conditions.delay)
            except LeaseError:
                self.manager.cancel_offer(lease.id)
                return
            self._send_offer(started, started.remaining(self.world.now))

        seconds = self.world.random.choice((0.0, self.world.conditions.delay, 1.5, 3.0))
        if seconds > _DIAL_TIMEOUT:
            self.world.after(_DIAL_TIMEOUT, self.peer, lambda: self.manager.cancel_offer(lease.id))
        else:
            self.world.after(seconds, self.peer, connected)

    def _send_offer(self, lease: Lease, life: float) -> None:
        [scheduler] = [node for node in self.world.schedulers if node.peer == lease.scheduler]
        offer = WorkerOffer(
            id=lease.id,
            request_id=lease.request_id,
            price=lease.price,
            resources=lease.allocation.resources,
            timeout_ms=int(life * 1000),
        )

        def on_answer(answer: bool | None) -> None:
            if answer is None:
                self.manager.cancel_offer(lease.id)

        self.world.call(self.peer, scheduler.peer, lambda: scheduler.on_offer(self.peer, offer), on_answer, life)

    def on_request(self, scheduler: PeerId, request: WorkerRequest) -> None:
        """Take a request from the topic."""
        self._queue.add(ReceivedRequest(scheduler, request, self.world.now))

    def on_renew(self, scheduler: PeerId, lease: uuid.UUID) -> float:
        """Renew a lease; return its life in whole milliseconds as the message states it, in seconds, or 0."""
        try:
            return int(self.manager.renew(lease, scheduler, self.world.now).remaining(self.world.now) * 1000) / 1000
        except LeaseError:
            return 0.0

    def on_release(self, scheduler: PeerId, lease: uuid.UUID) -> bool:
        """End a lease and its job."""
        try:
            ended = self.manager.release(lease, scheduler)
        except LeaseError:
            return False
        if ended.has_job:
            self._kill_job(ended)
        return True

    def on_dispatch(self, scheduler: PeerId, lease: uuid.UUID) -> bool:
        """Start a job on a lease."""
        try:
            attached = self.manager.attach_job(lease, scheduler, self.world.now)
        except LeaseError:
            return False
        self._processes[lease] = attached.allocation
        return True

    def end_job(self) -> None:
        """Let the oldest job end by itself."""
        for lease in self.manager.leases:
            if lease.has_job and lease.state is LeaseState.HELD:
                self._processes_gone(lease.id)
                return


@dataclass(slots=True)
class _Search:
    """One job's search."""

    auction: Auction
    next_publish: float = 0.0
    requests: list[WorkerRequest] = field(default_factory=list)


class SchedulerNode:
    """A scheduler as `allocator` and `renewal` run it, with one job at a time."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.peer = PeerId.from_public_key(bytes([number]) * 32)
        self.leases = HeldLeases(world.random)
        self._search: _Search | None = None
        self.placed = 0
        """How often all leases of a job were held."""
        world.after(world.random.uniform(0, _SCHEDULER_TICK), self.peer, self._tick)

    def ask(self, train: int) -> None:
        """Begin a job with some training workers and a parameter server; the job before it ends."""
        self.close()
        roles = (
            RoleRequest("train", WorkerSpec(resources=WANTED, executor=(TRAIN,)), 10.0, 10.0, train),
            RoleRequest("aggregate", WorkerSpec(resources=WANTED, executor=(SERVER,)), 10.0, 10.0, 1),
        )
        self._search = _Search(Auction(roles, AuctionSettings(), self.world.random))

    def close(self) -> None:
        """End the job and release its leases."""
        if self._search is not None:
            self._search.auction.close()
            self._search = None
        for held in self.leases.held():
            self._release(held.peer, held.lease)

    def give_up(self) -> None:
        """Release an incomplete set of leases and go on searching."""
        if self._search is not None and not self._search.auction.complete:
            for offer in self._search.auction.give_up():
                self._release(offer.peer, offer.lease)

    def dispatch(self) -> None:
        """Dispatch a job to every held lease."""
        for held in self.leases.held():
            worker = self.world.workers[held.peer]
            self.world.call(
                self.peer, held.peer, lambda w=worker, h=held: w.on_dispatch(self.peer, h.lease), lambda _: None, 5.0
            )

    def _release(self, peer: PeerId, lease: uuid.UUID) -> None:
        self.leases.drop(lease)
        worker = self.world.workers[peer]
        self.world.send(peer, lambda: worker.on_release(self.peer, lease))

    def _tick(self) -> None:
        now, search = self.world.now, self._search
        for lost in self.leases.expire(now):
            self._lost(lost)
        for held in self.leases.begin_renewals(now):
            self._renew(held)
        if search is not None and not search.auction.complete:
            search.auction.mark_late(now)
            if now >= search.next_publish:
                self._publish(search)
            at = search.auction.decide_at(now)
            if at is not None and now >= at:
                for offer in search.auction.decide(now):
                    self._accept(search, offer)
        self.world.after(_SCHEDULER_TICK, self.peer, self._tick)

    def _publish(self, search: _Search) -> None:
        search.next_publish = self.world.now + _REPUBLISH
        missing = search.auction.missing()
        for role_request in search.auction.role_requests:
            if missing[role_request.role]:
                request = WorkerRequest(
                    id=self.world.make_id(), spec=role_request.spec, bid=role_request.bid, timeout_ms=5000,
                )  # fmt: skip
                search.auction.register_request(request.id, role_request.role)
                for worker in self.world.workers.values():
                    self.world.send(worker.peer, lambda w=worker, r=request: w.on_request(self.peer, r))

    def on_offer(self, peer: PeerId, offer: WorkerOffer) -> bool:
        """Take an offer."""
        if self._search is None or self._search.auction.complete:
            self._release(peer, offer.id)
        else:
            self._search.auction.add_offer(peer, offer, self.world.now, self.world.conditions.delay)
        return True

    def _accept(self, search: _Search, offer: AcceptedOffer) -> None:
        asked_at, worker = self.world.now, self.world.workers[offer.peer]

        def on_answer(life: float | None) -> None:
            if not life:
                search.auction.deny(offer.lease, self.world.now)
                if life is None:
                    self._release(offer.peer, offer.lease)
            elif search.auction.confirm(offer.lease):
                self.leases.record_renewal(offer.lease, offer.peer, asked_at, life)
                self.placed += search.auction.complete
            else:
                self._release(offer.peer, offer.lease)

        self.world.call(
            self.peer, offer.peer, lambda: worker.on_renew(self.peer, offer.lease), on_answer, _ACCEPT_TIMEOUT
        )

    def _renew(self, held: HeldLease) -> None:
        asked_at, worker = self.world.now, self.world.workers[held.peer]

        def on_answer(life: float | None) -> None:
            if life is None:
                self.leases.schedule_retry(held.lease, self.world.now)
            elif held.lease in self.leases:
                if life:
                    self.leases.record_renewal(held.lease, held.peer, asked_at, life)
                else:
                    self.leases.drop(held.lease)
                    self._lost(held)

        timeout = min(_RENEWAL_TIMEOUT, max(0.5, held.expires - asked_at))
        self.world.call(self.peer, held.peer, lambda: worker.on_renew(self.peer, held.lease), on_answer, timeout)

    def _lost(self, held: HeldLease) -> None:
        if self._search is not None:
            self._search.auction.lease_lost(held.lease, self.world.now)
