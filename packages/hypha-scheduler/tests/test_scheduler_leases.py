"""The lease ledger: renewed in time, never believed longer than the worker promised."""

from __future__ import annotations

import uuid

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypha_proto.ids import PeerId
from hypha_scheduler.leases import LeaseLedger

PEER = PeerId.from_public_key(bytes(32))
IDS = st.sampled_from([uuid.UUID(int=n) for n in range(4)])


class LeaseMachine(RuleBasedStateMachine):
    """A worker's view beside the scheduler's: the scheduler may never believe in a lease that the worker dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.ledger = LeaseLedger()
        self.in_flight: dict[uuid.UUID, float] = {}
        self.worker_expires: dict[uuid.UUID, float] = {}

    @rule(lease=IDS, way=st.floats(0, 0.4))
    def take(self, lease: uuid.UUID, way: float) -> None:
        asked = self.now
        self.now += way
        self.worker_expires[lease] = self.now + 10  # the worker counts from when it answers
        self.ledger.take(lease, PEER, asked)
        self.in_flight.pop(lease, None)

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for held in self.ledger.expire(self.now):
            self.in_flight.pop(held.lease, None)

    @rule()
    def ask(self) -> None:
        for held in self.ledger.begin_renewals(self.now):
            assert held.lease not in self.in_flight
            self.in_flight[held.lease] = self.now

    @rule(lease=IDS)
    def no_answer(self, lease: uuid.UUID) -> None:
        if self.in_flight.pop(lease, None) is not None:
            self.ledger.unanswered(lease, self.now)

    @rule(lease=IDS)
    def gone(self, lease: uuid.UUID) -> None:
        self.in_flight.pop(lease, None)
        self.ledger.drop(lease)

    @invariant()
    def never_believes_too_long(self) -> None:
        for held in self.ledger.held():
            assert held.expires <= self.worker_expires[held.lease]
        due = self.ledger.next_due()
        assert (due is None) == (len(self.ledger) == 0)


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_a_lease_is_never_believed_longer_than_the_worker_keeps_it = LeaseMachine.TestCase


def test_renewal_is_due_at_three_quarters_of_a_life_and_retried_until_its_end() -> None:
    ledger, lease = LeaseLedger(), uuid.UUID(int=1)
    ledger.take(lease, PEER, asked_at=0.0, life=10.0)
    assert ledger.begin_renewals(7.4) == ()
    assert [held.lease for held in ledger.begin_renewals(7.5)] == [lease]
    assert ledger.begin_renewals(7.6) == ()
    ledger.unanswered(lease, 8.0)
    assert ledger.next_due() == 8.5
    assert [held.lease for held in ledger.begin_renewals(8.5)] == [lease]
    assert [held.lease for held in ledger.expire(10.0)] == [lease]
    assert lease not in ledger
