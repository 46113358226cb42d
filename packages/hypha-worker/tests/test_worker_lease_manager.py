"""The lease manager: expiry, ownership, and capacity that is never exceeded."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from hypha_proto.ids import PeerId
from hypha_proto.resources import Resources
from hypha_worker.leasing.capacity import Capacity, Device
from hypha_worker.leasing.lease_manager import LeaseError, LeaseManager, LeaseState

PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(3)]
MINE, OTHER = PEERS[0], PEERS[1]
ID = uuid.UUID(int=7)


def offered(now: float = 0.0) -> LeaseManager:
    capacity = Capacity(Resources(cpu=4.0))
    manager = LeaseManager(capacity)
    allocation = capacity.fit(Resources(cpu=3.0))
    assert allocation is not None
    manager.offer(ID, MINE, uuid.UUID(int=1), allocation, 100.0, now)
    return manager


def test_an_offer_lasts_half_a_second_and_a_renewed_lease_ten() -> None:
    manager = offered()
    assert manager.sweep(0.49) == []
    assert manager.renew(ID, MINE, 0.49).remaining(0.49) == 10.0
    assert manager.sweep(10.48) == []
    assert manager.free.resources.cpu == 1.0
    assert manager.sweep(10.49) == []
    assert manager.free.resources.cpu == 4.0
    with pytest.raises(LeaseError, match="no lease"):
        manager.renew(ID, MINE, 10.5)


def test_an_expired_lease_is_not_renewed_before_the_sweep() -> None:
    with pytest.raises(LeaseError, match="is over"):
        offered().renew(ID, MINE, 0.5)


def test_another_schedulers_lease_cannot_be_used_and_looks_unknown() -> None:
    manager = offered()
    for use in (
        lambda: manager.renew(ID, OTHER, 0.1),
        lambda: manager.attach_job(ID, OTHER, 0.1),
        lambda: manager.release(ID, OTHER),
    ):
        with pytest.raises(LeaseError, match="has no lease"):
            use()
    assert manager.find(ID, OTHER) is None
    manager.renew(ID, MINE, 0.1)


@pytest.mark.parametrize("how", ["release", "sweep"])
def test_resources_are_free_only_after_the_processes_have_ended(how: str) -> None:
    manager = offered()
    manager.attach_job(ID, MINE, 0.1)
    if how == "release":
        manager.release(ID, MINE)
    else:
        assert [lease.id for lease in manager.sweep(10.1)] == [ID]
        assert manager.sweep(10.4) == [], "a job is cancelled once"
    assert manager.free.resources.cpu == 1.0
    with pytest.raises(LeaseError):
        manager.renew(ID, MINE, 10.2)
    manager.detach_job(ID)
    assert manager.free.resources.cpu == 4.0
    assert manager.leases == ()


def test_a_lease_is_spent_when_its_job_ends_but_still_confirmed() -> None:
    manager = offered()
    manager.attach_job(ID, MINE, 0.1)
    manager.detach_job(ID)
    assert manager.free.resources.cpu == 4.0
    assert manager.leased_requests == frozenset()
    assert manager.renew(ID, MINE, 5.0).remaining(5.0) == pytest.approx(5.1)
    with pytest.raises(LeaseError, match="is spent"):
        manager.attach_job(ID, MINE, 5.0)
    manager.sweep(10.2)
    assert manager.leases == ()


def test_a_kept_lease_accepts_another_job_but_never_two_at_once() -> None:
    manager = offered()
    manager.attach_job(ID, MINE, 0.1)
    with pytest.raises(LeaseError, match="runs on lease"):
        manager.attach_job(ID, MINE, 0.2)
    manager.detach_job(ID, keep=True)
    assert manager.attach_job(ID, MINE, 0.3).state is LeaseState.HELD


def test_an_offer_that_could_not_be_sent_is_cancelled() -> None:
    manager = offered()
    manager.cancel_offer(ID)
    assert manager.leases == ()
    manager = offered()
    manager.renew(ID, MINE, 0.1)
    manager.cancel_offer(ID)
    assert len(manager.leases) == 1


class LeaseMachine(RuleBasedStateMachine):
    """Random actions of schedulers, jobs and the clock; the machine is never over-committed."""

    ids = Bundle("ids")
    jobs = Bundle("jobs")

    @initialize(devices=st.booleans())
    def start(self, devices: bool) -> None:
        self.capacity = Capacity(
            Resources(cpu=8.0, memory=16.0, gpu=48.0), (Device(0, 24.0), Device(1, 24.0)) if devices else ()
        )
        self.manager = LeaseManager(self.capacity)
        self.now = 0.0
        self.running: dict[uuid.UUID, Resources] = {}
        self.count = 0

    @rule(target=ids, cpu=st.floats(0, 8), gpu=st.floats(0, 48), peer=st.sampled_from(PEERS), stale=st.booleans())
    def offer(self, cpu: float, gpu: float, peer: PeerId, stale: bool) -> object:
        source = self.capacity if stale else self.manager.free
        allocation = source.fit(Resources(cpu=cpu, gpu=gpu))
        if allocation is None:
            return multiple()
        self.count += 1
        made = uuid.UUID(int=self.count)
        try:
            self.manager.offer(made, peer, uuid.UUID(int=self.count), allocation, 1.0, self.now)
        except LeaseError:
            assert stale, "what is free can be offered"
            return multiple()
        return made

    @rule(lease=ids, peer=st.sampled_from(PEERS))
    def renew(self, lease: uuid.UUID, peer: PeerId) -> None:
        known = {entry.id: entry for entry in self.manager.leases}.get(lease)
        try:
            self.manager.renew(lease, peer, self.now)
        except LeaseError:
            return
        assert known is not None
        assert known.scheduler == peer

    @rule(target=jobs, lease=ids, peer=st.sampled_from(PEERS))
    def dispatch(self, lease: uuid.UUID, peer: PeerId) -> object:
        try:
            held = self.manager.attach_job(lease, peer, self.now)
        except LeaseError:
            return multiple()
        assert lease not in self.running
        self.running[lease] = held.allocation.resources
        return lease

    @rule(lease=consumes(jobs), keep=st.booleans())
    def finish(self, lease: uuid.UUID, keep: bool) -> None:
        self.running.pop(lease, None)
        self.manager.detach_job(lease, keep=keep)

    @rule(lease=ids, peer=st.sampled_from(PEERS))
    def release(self, lease: uuid.UUID, peer: PeerId) -> None:
        try:
            self.manager.release(lease, peer)
        except LeaseError:
            return

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for lease in self.manager.sweep(self.now):
            assert lease.has_job

    @invariant()
    def what_runs_fits_the_machine(self) -> None:
        if not hasattr(self, "manager"):
            return
        assert sum(resources.cpu for resources in self.running.values()) <= 8.0 + 1e-6
        assert sum(resources.gpu for resources in self.running.values()) <= 48.0 + 1e-6

    @invariant()
    def what_is_leased_fits_the_machine(self) -> None:
        if not hasattr(self, "manager"):
            return
        held = [lease.allocation for lease in self.manager.leases if lease.state is not LeaseState.SPENT]
        assert sum(allocation.resources.cpu for allocation in held) <= 8.0 + 1e-6
        devices = [device for allocation in held for device in allocation.devices]
        assert len(devices) == len(set(devices))
        assert set(self.running) <= {lease.id for lease in self.manager.leases if lease.has_job}


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
