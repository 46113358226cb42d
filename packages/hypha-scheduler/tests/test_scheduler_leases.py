"""Held leases: renewed in time and never assumed to last longer than at the worker."""

from __future__ import annotations

import uuid
from random import Random

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypha_net import rpc
from hypha_net.testing import MemoryNetwork
from hypha_proto.ids import PeerId
from hypha_proto.leases import RENEW_LEASE, LeaseRenewal, Renewed, RenewLease
from hypha_scheduler.allocation.leases import HeldLease, HeldLeases
from hypha_scheduler.allocation.renewal import renew_leases

pytestmark = pytest.mark.virtual_clock

PEER = PeerId.from_public_key(bytes(32))
IDS = st.sampled_from([uuid.UUID(int=n) for n in range(4)])


class LeaseMachine(RuleBasedStateMachine):
    """Random renewals and delays; a lease at the scheduler must never outlive the worker's."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.leases = HeldLeases()
        self.in_flight: dict[uuid.UUID, float] = {}
        self.worker_expires: dict[uuid.UUID, float] = {}

    @rule(lease=IDS, way=st.floats(0, 0.4))
    def take(self, lease: uuid.UUID, way: float) -> None:
        asked = self.now
        self.now += way
        self.worker_expires[lease] = self.now + 10  # the worker counts from its response
        self.leases.record_renewal(lease, PEER, asked)
        self.in_flight.pop(lease, None)

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for held in self.leases.expire(self.now):
            self.in_flight.pop(held.lease, None)

    @rule()
    def ask(self) -> None:
        for held in self.leases.begin_renewals(self.now):
            assert held.lease not in self.in_flight
            self.in_flight[held.lease] = self.now

    @rule(lease=IDS)
    def no_answer(self, lease: uuid.UUID) -> None:
        if self.in_flight.pop(lease, None) is not None:
            self.leases.schedule_retry(lease, self.now)

    @rule(lease=IDS)
    def gone(self, lease: uuid.UUID) -> None:
        self.in_flight.pop(lease, None)
        self.leases.drop(lease)

    @invariant()
    def never_outlives_the_workers_lease(self) -> None:
        for held in self.leases.held():
            assert held.expires <= self.worker_expires[held.lease]


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_lease_is_never_assumed_to_outlive_the_workers = LeaseMachine.TestCase


def test_renewal_is_due_after_a_third_of_the_life_and_retried_until_expiry() -> None:
    leases, lease = HeldLeases(Random(0)), uuid.UUID(int=1)
    leases.record_renewal(lease, PEER, asked_at=0.0, life=9.0)
    assert leases.begin_renewals(2.69) == ()
    assert [held.lease for held in leases.begin_renewals(3.31)] == [lease]
    assert leases.begin_renewals(3.4) == ()
    leases.schedule_retry(lease, 8.0)
    assert leases.begin_renewals(8.49) == ()
    assert [held.lease for held in leases.begin_renewals(8.5)] == [lease]
    assert [held.lease for held in leases.expire(9.0)] == [lease]
    assert lease not in leases


def test_renewals_of_leases_that_were_taken_together_spread_out() -> None:
    leases = HeldLeases(Random(0))
    for number in range(200):
        leases.record_renewal(uuid.UUID(int=number), PEER, asked_at=0.0, life=9.0)
    due = [held.due for held in leases.held()]
    assert 2.7 <= min(due) < 2.75
    assert 3.25 < max(due) <= 3.3


@pytest.mark.parametrize(("away", "kept"), [(6.0, True), (11.0, False)])
async def test_lease_survives_a_worker_unreachable_for_six_seconds(away: float, kept: bool) -> None:
    lease, lost = uuid.UUID(int=1), list[str]()
    network = MemoryNetwork()
    async with (
        network.endpoint("scheduler") as scheduler,
        network.endpoint("worker") as worker,
        anyio.create_task_group() as tasks,
    ):
        back = anyio.current_time() + 3.0 + away  # it becomes unreachable just before the first renewal

        async def renew(_peer: PeerId, request: RenewLease) -> LeaseRenewal:
            if anyio.current_time() < back:
                await anyio.sleep_forever()
            return Renewed(id=request.id, timeout_ms=10_000)

        def gone(_held: HeldLease, why: str) -> None:
            lost.append(why)

        rpc.serve(worker, RENEW_LEASE, renew)
        leases = HeldLeases()
        leases.record_renewal(lease, worker.peer_id, anyio.current_time())
        tasks.start_soon(renew_leases, scheduler, leases, gone)
        await anyio.sleep(60)
        assert (lease in leases) is kept
        assert lost == ([] if kept else ["its lease ran out before the worker answered a renewal"])
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("ended", [True, False])
async def test_lease_whose_worker_has_ended_is_lost_at_once(ended: bool) -> None:
    """A worker that only cannot be reached keeps it until it runs out."""
    lease, lost = uuid.UUID(int=1), list[tuple[float, str]]()
    network = MemoryNetwork()
    async with network.endpoint("scheduler") as scheduler, anyio.create_task_group() as tasks:
        async with network.endpoint("worker") as worker:
            leases = HeldLeases()
            leases.record_renewal(lease, worker.peer_id, anyio.current_time(), life=10.0)
            if not ended:
                network.partition(scheduler.peer_id, worker.peer_id)
        tasks.start_soon(renew_leases, scheduler, leases, lambda _, why: lost.append((anyio.current_time(), why)))
        leases.check(lease, began := anyio.current_time())
        await anyio.sleep(60)
        [(at, why)] = lost
        assert (at - began < 1.0, "its worker has ended" in why) == (ended, ended)
        tasks.cancel_scope.cancel()
