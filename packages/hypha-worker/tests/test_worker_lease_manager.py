"""The lease manager: expiry, ownership, idle leases, quotas, and capacity that is never exceeded."""

from __future__ import annotations

import uuid
from dataclasses import asdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from hypha_proto.ids import PeerId
from hypha_proto.offers import ExecutorDescriptor, WorkerRequest, WorkerSpec
from hypha_proto.resources import Resources
from hypha_worker.bidding.arbiter import Arbiter
from hypha_worker.bidding.policy import OfferSection
from hypha_worker.bidding.request_batch import ReceivedRequest
from hypha_worker.leasing.capacity import Allocation, Capabilities, Capacity, GpuCapacity
from hypha_worker.leasing.lease_manager import (
    REMEMBERED_ENDS,
    Lease,
    LeaseEnd,
    LeaseError,
    LeaseManager,
    LeaseState,
    UnknownLeaseError,
)
from hypha_worker.leasing.terms import LeaseTerms, LeaseUsage, Quota

PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(3)]
MINE, OTHER = PEERS[0], PEERS[1]
ID = uuid.UUID(int=7)


def offered(now: float = 0.0, **terms: object) -> LeaseManager:
    capacity = Capacity(Resources(cpu=4.0))
    known = LeaseTerms(**terms)  # type: ignore[arg-type]
    manager = LeaseManager(capacity, known)
    allocation = capacity.fit(Resources(cpu=3.0))
    assert allocation is not None
    manager.offer(Lease(ID, MINE, uuid.UUID(int=1), allocation, 100.0, now + known.temporary_lease))
    return manager


@pytest.fixture
def manager() -> LeaseManager:
    return offered()


def test_an_offer_lasts_half_a_second_and_a_renewed_lease_ten(manager: LeaseManager) -> None:
    manager.sweep(0.49)
    assert manager.renew(ID, MINE, 0.49).remaining(0.49) == 10.0
    manager.sweep(10.48)
    assert manager.free.resources.cpu == 1.0
    manager.sweep(10.49)
    assert manager.free.resources.cpu == 4.0
    with pytest.raises(LeaseError, match="no lease"):
        manager.renew(ID, MINE, 10.5)


def test_an_expired_lease_is_not_renewed_before_the_sweep() -> None:
    with pytest.raises(LeaseError, match="is over"):
        offered().renew(ID, MINE, 0.5)


@pytest.mark.parametrize("is_released", [False, True])
def test_what_processes_hold_that_cannot_be_ended_stays_taken_after_the_lease(is_released: bool) -> None:
    manager = offered()
    manager.attach_task(ID, MINE, 0.1)
    freed: list[float] = []
    manager.on_freed = lambda: freed.append(manager.free.resources.cpu)
    if is_released:
        manager.release(ID, MINE)
    manager.retain(ID)
    manager.detach_task(ID)
    assert manager.free.resources.cpu == 1.0
    with pytest.raises(LeaseError):
        manager.attach_task(ID, MINE, 0.2)
    manager.sweep(0.3)
    assert manager.leases == ()
    with pytest.raises(LeaseError, match="it was released" if is_released else "processes of its job cannot be ended"):
        manager.renew(ID, MINE, 0.4)
    assert manager.free.resources.cpu == 1.0
    manager.free_retained(ID)
    assert (manager.free.resources.cpu, freed[-1]) == (4.0, 4.0)


@pytest.mark.parametrize("ended", [5.0, 15.0])
def test_a_lease_without_a_job_is_not_held_without_renewals_when_the_end_is_reported(ended: float) -> None:
    manager = offered(orphan_grace=30.0)
    manager.attach_task(ID, MINE, 0.0, 30.0)
    manager.sweep(ended)
    manager.end_grace(ID)
    assert manager.leases[0].ends == 40.0, "a job runs"
    manager.detach_task(ID)
    manager.end_grace(ID)
    with pytest.raises(LeaseError, match="is over"):
        manager.renew(ID, MINE, 15.1)
    manager.sweep(15.2)
    assert manager.leases == ()


def test_an_offer_that_could_not_be_sent_is_cancelled(manager: LeaseManager) -> None:
    manager.cancel_offer(ID)
    assert manager.leases == ()
    manager = offered()
    manager.renew(ID, MINE, 0.1)
    manager.cancel_offer(ID)
    assert len(manager.leases) == 1


def small_leases(count: int, scheduler: PeerId, **terms: object) -> tuple[LeaseManager, list[uuid.UUID]]:
    """Make a manager with `count` offers of one core to a scheduler."""
    capacity = Capacity(Resources(cpu=8.0))
    manager = LeaseManager(capacity, LeaseTerms(**terms))  # type: ignore[arg-type]
    ids = [uuid.UUID(int=number) for number in range(count)]
    for made in ids:
        allocation = manager.free.fit(Resources(cpu=1.0))
        assert allocation is not None
        manager.offer(Lease(made, scheduler, made, allocation, 100.0, expires=0.5))
    return manager, ids


@pytest.mark.parametrize(
    ("temporary_lease", "round_trip", "life"),
    [
        (0.5, None, 0.5),
        (0.5, 0.01, 0.52),
        (0.5, 0.6, 1.7),
        (0.5, 5.0, 2.0),
        (1.5, 0.0, 1.5),
        (1.5, 0.5, 2.0),
    ],
)
def test_an_offer_lives_two_round_trips_longer(temporary_lease: float, round_trip: float | None, life: float) -> None:
    manager = offered(temporary_lease=temporary_lease)
    assert manager.start_offer(ID, 0.3, round_trip).remaining(0.3) == pytest.approx(life)
    assert manager.renew(ID, MINE, 0.3 + life - 0.01).state is LeaseState.HELD


def test_a_provisional_offer_is_dropped_and_cannot_start_afterwards() -> None:
    capacity = Capacity(Resources(cpu=4.0))
    manager = LeaseManager(capacity)
    manager.offer(Lease(ID, MINE, uuid.UUID(int=1), capacity.whole(), 100.0, expires=2.0))
    manager.sweep(1.9)
    assert manager.free.resources.cpu == 0.0
    with pytest.raises(LeaseError, match="is over"):
        manager.start_offer(ID, 2.0, 0.0)
    manager.sweep(2.0)
    assert manager.free.resources.cpu == 4.0
    with pytest.raises(LeaseError, match="is over"):
        manager.start_offer(ID, 2.1, 0.0)


def test_an_accepted_offer_does_not_start_again(manager: LeaseManager) -> None:
    manager.renew(ID, MINE, 0.1)
    with pytest.raises(LeaseError):
        manager.start_offer(ID, 0.2, 0.0)


def renew_until(manager: LeaseManager, start: float, end: float) -> None:
    """Renew and sweep regularly, as a scheduler and a worker do."""
    now = start
    while now < end:
        manager.sweep(now)
        manager.renew(ID, MINE, now)
        now += 3.0


def test_a_lease_on_which_no_job_ever_ran_ends(manager: LeaseManager) -> None:
    manager.renew(ID, MINE, 0.4)
    renew_until(manager, 0.4, 60.0)
    [lease] = manager.leases
    with pytest.raises(LeaseError, match="no job ran on it for 60 s"):
        manager.renew(ID, MINE, 60.4)
    with pytest.raises(LeaseError, match="no job ran on it for 60 s"):
        manager.attach_task(ID, MINE, 60.4)
    manager.sweep(60.4)
    assert (lease.end, manager.free.resources.cpu) == (LeaseEnd.IDLE, 4.0)
    with pytest.raises(LeaseError, match="here any more: no job ran on it"):
        manager.renew(ID, MINE, 60.5)


def test_a_scheduler_is_told_when_an_idle_lease_ends() -> None:
    manager = offered(idle_lease=12.0)
    assert manager.renew(ID, MINE, 0.4).remaining(0.4) == pytest.approx(10.0)
    assert manager.renew(ID, MINE, 4.4).remaining(4.4) == pytest.approx(8.0)
    assert manager.attach_task(ID, MINE, 10.0).remaining(10.0) == pytest.approx(10.0), "a job makes it last again"
    manager.detach_task(ID)
    told = manager.leases[0].expires
    manager.sweep(11.0)
    manager.sweep(told - 0.01)
    assert len(manager.leases) == 1, "it never ends before the time that was stated"


def test_a_lease_ends_when_no_job_follows_the_last() -> None:
    manager = offered(idle_lease=30.0)
    manager.attach_task(ID, MINE, 0.4)
    renew_until(manager, 0.4, 100.0)
    manager.detach_task(ID)
    renew_until(manager, 100.0, 130.0)
    manager.sweep(129.9)
    assert len(manager.leases) == 1
    manager.sweep(130.0)
    assert manager.leases == ()


def test_the_quota_of_jobs_is_checked_at_dispatch() -> None:
    manager, ids = small_leases(4, MINE, quota=Quota(max_jobs=2))
    for made in ids[:2]:
        manager.attach_task(made, MINE, 0.1)
    with pytest.raises(LeaseError, match=r"runs 2 jobs here, and offer\.max_jobs of this worker is 2"):
        manager.attach_task(ids[2], MINE, 0.1)
    assert manager.leases[2].state is LeaseState.OFFERED, "a refused dispatch does not accept the offer"
    manager.release(ids[0], MINE)
    with pytest.raises(LeaseError, match="max_jobs"):
        manager.attach_task(ids[2], MINE, 0.1)
    manager.detach_task(ids[0])
    manager.attach_task(ids[2], MINE, 0.1)


def test_usage_counts_what_each_scheduler_has() -> None:
    manager, ids = small_leases(4, MINE)
    assert manager.usage == {MINE: LeaseUsage(offers=4)}
    manager.renew(ids[0], MINE, 0.1)
    for made in ids[1:3]:
        manager.attach_task(made, MINE, 0.1)
    assert manager.usage == {MINE: LeaseUsage(offers=1, leases=3, jobs=2)}
    manager.detach_task(ids[1])
    manager.release(ids[2], MINE)
    assert manager.usage == {MINE: LeaseUsage(offers=1, leases=3, jobs=1)}


def test_a_scheduler_whose_lease_is_over_is_not_a_stranger(manager: LeaseManager) -> None:
    manager.sweep(0.5)
    for use in (lambda: manager.renew(ID, MINE, 0.6), lambda: manager.release(ID, MINE)):
        with pytest.raises(LeaseError, match="not renewed in time") as caught:
            use()
        assert not isinstance(caught.value, UnknownLeaseError)
    for stranger, lease in ((OTHER, ID), (MINE, uuid.UUID(int=99))):
        with pytest.raises(UnknownLeaseError):
            manager.renew(lease, stranger, 0.6)


def test_few_ended_leases_are_remembered() -> None:
    capacity = Capacity(Resources(cpu=1.0))
    manager = LeaseManager(capacity)
    for number in range(REMEMBERED_ENDS + 1):
        manager.offer(Lease(uuid.UUID(int=number), MINE, ID, capacity.whole(), 1.0, expires=0.5))
        manager.cancel_offer(uuid.UUID(int=number))
    with pytest.raises(UnknownLeaseError):
        manager.renew(uuid.UUID(int=0), MINE, 0.1)
    with pytest.raises(LeaseError, match="could not be delivered"):
        manager.renew(uuid.UUID(int=1), MINE, 0.1)


QUOTA = Quota(max_offers=2, max_leases=3, max_jobs=1)
TRAIN = ExecutorDescriptor("train", "x")


Owned = tuple[uuid.UUID, PeerId]
CPU = st.sampled_from([0.0, 1.0, 2.5, 6.0])
GPU = st.sampled_from([0.0, 1.0, 24.0, 30.0])
STRANGER = st.sampled_from([None, None, None, *PEERS])
"""Who sends a message about a lease instead of its scheduler, if anybody."""


OWNERS_GRACE = 12.0


class LeaseMachine(RuleBasedStateMachine):
    """Random actions of schedulers, jobs, links and the clock; the machine is never over-committed."""

    ids = Bundle("ids")
    """Leases, each with its scheduler."""
    jobs = Bundle("jobs")

    @initialize(devices=st.booleans(), quota=st.sampled_from([Quota(), QUOTA]), defaults=st.booleans())
    def start(self, devices: bool, quota: Quota, defaults: bool) -> None:
        amounts = Resources(cpu=8.0, memory=16.0, gpu=48.0, storage=30.0)
        self.capacity = Capacity(amounts, (GpuCapacity(0, 24.0), GpuCapacity(1, 24.0)) if devices else ())
        self.manager = LeaseManager(self.capacity, LeaseTerms(idle_lease=8.0, quota=quota, orphan_grace=OWNERS_GRACE))
        default = Resources(storage=10.0, gpu=4.0) if defaults else Resources()
        self.arbiter = Arbiter(OfferSection(**asdict(quota)), Capabilities(self.capacity, frozenset({TRAIN}), default))
        self.quota = quota
        self.now = 0.0
        self.running: dict[uuid.UUID, Allocation] = {}
        self.told: dict[uuid.UUID, float] = {}
        """Until when each scheduler may count on its lease."""
        self.graces: dict[uuid.UUID, float] = {}
        """Seconds that the job of each lease may run on, and its end be reported, without a renewal."""
        self.count = 0

    def next_id(self) -> uuid.UUID:
        self.count += 1
        return uuid.UUID(int=self.count)

    @rule(target=ids, cpu=CPU, gpu=GPU, peer=st.sampled_from(PEERS), stale=st.booleans())
    def reserve(self, cpu: float, gpu: float, peer: PeerId, stale: bool) -> object:
        """Reserve what is free, or what was free once."""
        if self.quota.reached(self.manager.usage.get(peer, LeaseUsage())):
            return multiple()
        source = self.capacity if stale else self.manager.free
        allocation = source.fit(Resources(cpu=cpu, gpu=gpu))
        if allocation is None:
            return multiple()
        made = self.next_id()
        try:
            self.manager.offer(Lease(made, peer, made, allocation, 1.0, self.now + 2.0))
        except LeaseError:
            assert stale, "what is free can be offered"
            return multiple()
        return made, peer

    @rule(target=ids, wanted=st.lists(st.tuples(st.sampled_from(PEERS), CPU, GPU), max_size=6))
    def decide(self, wanted: list[tuple[PeerId, float, float]]) -> object:
        """Let the arbiter decide a batch, and reserve what it plans."""
        batch = []
        for peer, cpu, gpu in wanted:
            spec = WorkerSpec(resources=Resources(cpu=cpu, gpu=gpu), executor=(TRAIN,))
            request = WorkerRequest(id=self.next_id(), spec=spec, timeout_ms=5000, bid=100.0)
            batch.append(ReceivedRequest(peer, request, self.now))
        manager = self.manager
        planned = self.arbiter.decide(batch, manager.free, self.now, manager.leased_requests, manager.usage)
        for plan in planned:
            received = plan.received_request
            made = received.request.id
            manager.offer(Lease(made, received.scheduler, made, plan.allocation, plan.price, self.now + 2.0))
        return multiple(*((plan.received_request.request.id, plan.received_request.scheduler) for plan in planned))

    @rule(lease=ids, round_trip=st.none() | st.floats(0, 3))
    def connect(self, lease: Owned, round_trip: float | None) -> None:
        try:
            started = self.manager.start_offer(lease[0], self.now, round_trip)
        except LeaseError:
            return
        assert 0.5 <= started.remaining(self.now) + 1e-6 <= 2.0 + 2e-6

    @rule(lease=ids)
    def fail_to_connect(self, lease: Owned) -> None:
        self.manager.cancel_offer(lease[0])

    @rule(lease=ids, stranger=STRANGER)
    def renew(self, lease: Owned, stranger: PeerId | None) -> None:
        made, owner = lease
        try:
            held = self.manager.renew(made, stranger or owner, self.now)
        except LeaseError:
            is_owner, runs = stranger in (None, owner), made in self.told.keys() & self.running.keys()
            assert not (is_owner and runs and self.now < self.told[made] + self.graces[made]), "it can be taken back"
            return
        assert stranger in (None, owner)
        assert held.state is LeaseState.HELD
        self.told[made] = held.expires

    @rule(
        target=jobs,
        lease=ids,
        stranger=STRANGER,
        grace=st.sampled_from([0.0, 2.0, 15.0, 2 * OWNERS_GRACE]),
    )
    def dispatch(self, lease: Owned, stranger: PeerId | None, grace: float) -> object:
        made, owner = lease
        try:
            held = self.manager.attach_task(made, stranger or owner, self.now, grace)
        except LeaseError:
            return multiple()
        assert stranger in (None, owner)
        assert made not in self.running
        self.running[made] = held.allocation
        self.graces[made] = min(grace, OWNERS_GRACE)
        self.told[made] = held.expires
        return made

    @rule(lease=jobs)
    def take_back(self, lease: uuid.UUID) -> None:
        """Renew the lease of a running job, which may be orphaned."""
        [owner] = [held.scheduler for held in self.manager.leases if held.id == lease]
        self.renew((lease, owner), None)

    @rule(lease=consumes(jobs), is_reported=st.booleans())
    def finish(self, lease: uuid.UUID, is_reported: bool) -> None:
        self.running.pop(lease, None)
        self.manager.detach_task(lease)
        if is_reported:
            self.manager.end_grace(lease)
            self.graces[lease] = 0.0

    @rule(lease=ids, stranger=STRANGER)
    def release(self, lease: Owned, stranger: PeerId | None) -> None:
        made, owner = lease
        try:
            self.manager.release(made, stranger or owner)
        except LeaseError:
            return
        assert stranger in (None, owner)
        self.told.pop(made, None)

    @rule(seconds=st.sampled_from([0.1, 0.4, 1.0, 3.0, 6.0, 11.0, 20.0]))
    def wait(self, seconds: float) -> None:
        charged = {lease.id: lease.charged for lease in self.manager.leases if lease.id in self.told and lease.has_task}
        begun, self.now = self.now, self.now + seconds
        self.manager.sweep(self.now)
        for lease in self.manager.leases:
            if lease.id in charged:
                due = max(0.0, min(self.now, self.told[lease.id]) - begun)
                assert lease.charged - charged[lease.id] == pytest.approx(due), "time after the expiry is not charged"
        if seconds == 20.0:
            held = {lease.id for lease in self.manager.leases}
            kept = held - {lease for lease, grace in self.graces.items() if grace}
            assert self.running.keys() - held == set()
            assert kept <= self.running.keys(), "only jobs, and ends to report, keep resources that long"

    @invariant()
    def a_job_runs_on_for_its_grace_and_no_longer(self) -> None:
        states = {lease.id: lease.state for lease in self.manager.leases}
        for lease in self.told.keys() & self.running.keys():
            over = self.now - self.told[lease]
            expected = LeaseState.HELD if over < 0 else LeaseState.ENDING
            assert states[lease] is (LeaseState.ORPHANED if 0 <= over < self.graces[lease] else expected)

    @invariant()
    def only_leases_with_a_grace_are_orphaned(self) -> None:
        for lease in self.manager.leases:
            assert lease.state is not LeaseState.ORPHANED or self.graces[lease.id] or not lease.has_task

    @invariant()
    def what_runs_fits_the_machine(self) -> None:
        self.check_sum(list(self.running.values()))
        assert set(self.running) == {lease.id for lease in self.manager.leases if lease.has_task}

    @invariant()
    def what_is_leased_fits_the_machine(self) -> None:
        held = [lease.allocation for lease in self.manager.leases]
        self.check_sum(held)
        assert set(self.manager.free.devices).isdisjoint(device for each in held for device in each.devices)

    def check_sum(self, held: list[Allocation]) -> None:
        for name in ("cpu", "memory", "gpu", "storage"):
            total = getattr(self.capacity.resources, name)
            assert sum(getattr(each.resources, name) for each in held) <= total + 1e-6
        devices = [device for each in held for device in each.devices]
        assert len(devices) == len(set(devices))

    @invariant()
    def no_lease_ends_before_the_time_that_its_scheduler_was_told(self) -> None:
        known = {lease.id for lease in self.manager.leases if lease.state in (LeaseState.HELD, LeaseState.ENDING)}
        assert {lease for lease, told in self.told.items() if self.now < told} <= known

    @invariant()
    def no_scheduler_exceeds_its_quota(self) -> None:
        for usage in self.manager.usage.values() if self.quota == QUOTA else ():
            assert usage.offers <= 2
            assert usage.reservations <= 3
            assert usage.jobs <= 1


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
