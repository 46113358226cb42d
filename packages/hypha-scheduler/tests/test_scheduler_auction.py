"""Auction: no offer above the maximum price, most resources per token win, one lease per peer."""

from __future__ import annotations

import uuid

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypha_proto.ids import PeerId
from hypha_proto.offers import AggregateExecutor, TrainExecutor, WorkerOffer, WorkerSpec
from hypha_proto.resources import Resources, Timestamp
from hypha_scheduler.allocation.auction import DECISION_WINDOW, AcceptedOffer, Auction, RoleRequest, resource_score

TRAIN, AGGREGATE = uuid.UUID(int=1), uuid.UUID(int=2)
PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(8)]


def auction(train: int = 3) -> Auction:
    made = Auction(
        [
            RoleRequest(
                "train", WorkerSpec(resources=Resources(cpu=1), executor=(TrainExecutor(name="t"),)), 100, 120, train
            ),
            RoleRequest(
                "aggregate", WorkerSpec(resources=Resources(), executor=(AggregateExecutor(name="p"),)), 100, 120, 1
            ),
        ]
    )
    made.register_request(TRAIN, "train")
    made.register_request(AGGREGATE, "aggregate")
    return made


def offer(number: int, price: float = 100, request: uuid.UUID = TRAIN, cpu: float = 1.0) -> WorkerOffer:
    lease = uuid.UUID(int=1000 + number)
    return WorkerOffer(id=lease, request_id=request, price=price, resources=Resources(cpu=cpu), timeout=Timestamp.of(0))


class AuctionMachine(RuleBasedStateMachine):
    """Random offers, delays, decisions, confirmations and denials."""

    def __init__(self) -> None:
        super().__init__()
        self.auction = auction()
        self.now = 10.0
        self.offers = 0
        self.chosen: list[AcceptedOffer] = []

    @rule(
        peer=st.sampled_from(PEERS),
        price=st.floats(0, 200),
        cpu=st.floats(0, 4),
        request=st.sampled_from([TRAIN, AGGREGATE, uuid.UUID(int=99)]),
    )
    def offered(self, peer: PeerId, price: float, cpu: float, request: uuid.UUID) -> None:
        self.offers += 1
        good = self.auction.add_offer(peer, offer(self.offers, price, request, cpu), self.now)
        assert good == (price <= 120 and (request == AGGREGATE or (request == TRAIN and cpu >= 1 - 1e-9)))

    @rule(seconds=st.floats(0, 0.4))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def decide(self) -> None:
        missing = self.auction.missing()
        new = self.auction.decide(self.now)
        for bid in new:
            assert bid.price <= 120
            assert bid.expires > self.now
        for role in missing:
            assert sum(bid.role == role for bid in new) <= missing[role]
        self.chosen += new

    @rule(taken=st.booleans())
    def answer(self, taken: bool) -> None:
        if self.chosen:
            bid = self.chosen.pop()
            if taken:
                self.auction.confirm(bid.lease)
            else:
                self.auction.deny(bid.lease, self.now)

    @invariant()
    def one_lease_a_peer_and_never_too_many(self) -> None:
        taken = [*self.auction.held, *self.chosen]
        assert len({bid.peer for bid in taken}) == len(taken)
        assert all(missing >= 0 for missing in self.auction.missing().values())
        assert self.auction.complete == (not self.chosen and len(self.auction.held) == 4)


AuctionMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
test_any_order_of_offers_and_responses_keeps_the_invariants = AuctionMachine.TestCase


def test_ranking_by_resources_per_token_then_price_then_time() -> None:
    made = auction(train=2)
    for number, (price, cpu) in enumerate([(100, 1.0), (100, 4.0), (50, 2.0), (50, 2.0), (120.1, 99.0)]):
        made.add_offer(PEERS[number], offer(number, price, cpu=cpu), 1.0 + number / 100)
    assert [bid.peer for bid in made.decide(1.2)] == [PEERS[2], PEERS[3]]
    assert "more than the job pays" in made.rejections[PEERS[4]]
    assert "120" not in made.rejections[PEERS[4]].replace("120.1", "")
    assert resource_score(Resources(gpu=1, cpu=1, memory=10, storage=100)) == 28.0


def test_free_offer_ranks_first() -> None:
    made = auction(train=1)
    made.add_offer(PEERS[0], offer(0, 1.0, cpu=64.0), 1.0)
    made.add_offer(PEERS[1], offer(1, 0.0), 1.0)
    assert [bid.peer for bid in made.decide(1.2)] == [PEERS[1]]


def test_parameter_server_avoids_peers_needed_for_training() -> None:
    made = auction(train=2)
    for number in (0, 1):
        made.add_offer(PEERS[number], offer(number), 1.0)
    made.add_offer(PEERS[0], offer(10, 1.0, AGGREGATE), 1.0)
    made.add_offer(PEERS[2], offer(11, 100.0, AGGREGATE), 1.1)
    roles = {bid.peer: bid.role for bid in made.decide(1.2)}
    assert roles == {PEERS[0]: "train", PEERS[1]: "train", PEERS[2]: "aggregate"}


def test_decision_is_due_after_the_decision_window() -> None:
    made = auction(train=1)
    made.add_offer(PEERS[0], offer(0, 500), 1.0)
    assert made.decide_at() is None
    made.add_offer(PEERS[1], offer(1), 2.0)
    made.add_offer(PEERS[2], offer(2), 2.1)
    assert made.decide_at() == 2.0 + DECISION_WINDOW
    assert not made.all_offers_in([PEERS[1]], 2.1)
    made.add_offer(PEERS[1], offer(3, request=AGGREGATE), 2.1)
    assert made.all_offers_in([PEERS[1]], 2.1)


def test_expired_offer_is_not_selected() -> None:
    made = auction(train=1)
    made.add_offer(PEERS[0], offer(0), 1.0)
    assert made.decide(1.6) == ()
