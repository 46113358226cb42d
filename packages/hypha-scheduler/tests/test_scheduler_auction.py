"""Auction: no offer above the maximum price, most resources per token win, one lease per peer."""

from __future__ import annotations

import uuid
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hypha_proto.ids import PeerId
from hypha_proto.offers import ExecutorDescriptor, WorkerOffer, WorkerSpec
from hypha_proto.resources import Resources
from hypha_scheduler.allocation.auction import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    AcceptedOffer,
    Auction,
    AuctionTable,
    PeerBackoff,
    RoleRequest,
    resource_score,
)
from hypha_scheduler.allocation.shortage import count_reasons

TRAIN, AGGREGATE = uuid.UUID(int=1), uuid.UUID(int=2)
PEERS = [PeerId.from_public_key(bytes([n]) * 32) for n in range(8)]


def role_request(role: str = "train", count: int = 1, cpu: float = 1.0, **more: Any) -> RoleRequest:
    spec = WorkerSpec(resources=Resources(cpu=cpu), executor=(ExecutorDescriptor(role, "any"),))
    return RoleRequest(role, spec, 100, 120, count, **more)


def auction(train: int = 3, auction_settings: AuctionTable | None = None) -> Auction:
    requests = role_request(count=train), role_request("aggregate", cpu=0.0)
    made = Auction(requests, auction_settings or AuctionTable(), Random(0))
    made.register_request(TRAIN, "train")
    made.register_request(AGGREGATE, "aggregate")
    return made


@pytest.fixture
def made() -> Auction:
    """Return an auction for one worker that trains, and a parameter server."""
    return auction(train=1)


def offer(
    number: int,
    price: float = 100,
    request: uuid.UUID = TRAIN,
    cpu: float = 1.0,
    timeout_ms: int = 500,
) -> WorkerOffer:
    return WorkerOffer(
        id=uuid.UUID(int=1000 + number),
        request_id=request,
        price=price,
        resources=Resources(cpu=cpu),
        timeout_ms=timeout_ms,
    )


class AuctionMachine(RuleBasedStateMachine):
    """Random offers, delays, decisions, late, lost and denied leases, and sets that are given up."""

    def __init__(self) -> None:
        super().__init__()
        self.auction = auction()
        self.now = 10.0
        self.offers = 0
        self.ends: dict[uuid.UUID, float] = {}
        """When each worker drops its temporary lease, by its own count."""
        self.chosen: list[AcceptedOffer] = []

    @rule(
        peer=st.sampled_from(PEERS),
        price=st.floats(0, 200),
        cpu=st.floats(0, 4),
        request=st.sampled_from([TRAIN, AGGREGATE, uuid.UUID(int=99)]),
        timeout_ms=st.integers(0, 60_000),
        round_trip=st.floats(0, 1),
        repeats_id=st.booleans(),
    )
    def offered(
        self, peer: PeerId, price: float, cpu: float, request: uuid.UUID, timeout_ms: int, round_trip: float,
        repeats_id: bool,
    ) -> None:  # fmt: skip
        self.offers += not repeats_id
        made = offer(self.offers, price, request, cpu, timeout_ms)
        life = min(timeout_ms / 1000, 2.0)
        if self.auction.add_offer(peer, made, self.now, round_trip):
            assert price <= 120
            assert request == AGGREGATE or (request == TRAIN and cpu >= 1 - 1e-9)
            assert life >= round_trip - 1e-9
            self.ends[made.id] = max(self.ends.get(made.id, 0.0), self.now + life - round_trip / 2)

    @rule(seconds=st.floats(0, 0.4))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for late in self.auction.mark_late(self.now):
            assert late in self.auction.unanswered

    @rule()
    def decide(self) -> None:
        missing = self.auction.missing()
        new = self.auction.decide(self.now)
        for bid in new:
            assert bid.price <= 120
            assert self.now + bid.round_trip / 2 <= self.ends[bid.lease] + 1e-9  # when the renewal arrives there
        for role in missing:
            assert sum(bid.role == role for bid in new) <= missing[role]
        self.chosen += new

    @rule(taken=st.booleans(), last=st.booleans())
    def answer(self, taken: bool, last: bool) -> None:
        if self.chosen:
            bid = self.chosen.pop(-1 if last else 0)
            if taken:
                assert self.auction.confirm(bid.lease) == (bid in self.auction.held)
            else:
                self.auction.deny(bid.lease, self.now)

    @rule()
    def lose(self) -> None:
        for bid in self.auction.held[:1]:
            self.auction.lease_lost(bid.lease, self.now)

    @rule()
    def give_up(self) -> None:
        held = self.auction.held
        assert self.auction.give_up() == held
        assert self.auction.held == ()

    @invariant()
    def one_lease_a_peer_and_never_too_many(self) -> None:
        taken = [*self.auction.held, *self.chosen]
        assert len({bid.peer for bid in taken}) == len(taken)
        assert len({bid.lease for bid in taken}) == len(taken)
        held = [bid.role for bid in self.auction.held]
        assert held.count("train") <= 3
        assert held.count("aggregate") <= 1
        assert self.auction.complete == (len(held) == 4)

    @invariant()
    def decisions_are_due_within_the_window(self) -> None:
        at = self.auction.decide_at(self.now)
        assert at is None or at <= self.now + AuctionTable().decision_window


AuctionMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
test_any_order_of_offers_and_responses_keeps_the_invariants = AuctionMachine.TestCase


@settings(max_examples=60, deadline=None)
@given(cheats=st.integers(0, 7), count=st.integers(1, 3), pause=st.floats(0.0, 0.3))
def test_each_cheat_keeps_an_honest_offer_back_once(cheats: int, count: int, pause: float) -> None:
    made, now = auction(train=count), 10.0
    for decision in range(1, 100):
        for number, peer in enumerate(PEERS[:cheats]):
            made.add_offer(peer, offer(100 * decision + number, 0.0), now)
        made.add_offer(PEERS[7], offer(100 * decision + 99, 120.0), now)
        chosen = made.decide(now)
        if PEERS[7] in {bid.peer for bid in chosen}:
            break
        for bid in chosen:
            made.deny(bid.lease, now)
        now += pause
    assert decision <= cheats // count + 1


def test_ranking_by_resources_per_token_then_price_then_time() -> None:
    made = auction(train=2)
    for number, (price, cpu) in enumerate([(100, 1.0), (100, 4.0), (50, 2.0), (50, 2.0), (120.1, 99.0)]):
        made.add_offer(PEERS[number], offer(number, price, cpu=cpu), 1.0 + number / 100)
    assert [bid.peer for bid in made.decide(1.2)] == [PEERS[2], PEERS[3]]
    [rejection] = made.rejections[PEERS[4], "train"]
    assert "more than the job pays" in rejection.text
    assert "120" not in rejection.text.replace("120.1", "")
    assert resource_score(Resources(gpu=1, cpu=1, memory=10, storage=100), AuctionTable()) == 28.0


def test_free_offer_ranks_first(made: Auction) -> None:
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


def test_decision_is_due_after_the_decision_window(made: Auction) -> None:
    made.add_offer(PEERS[0], offer(0, 500), 1.0)
    assert made.decide_at(1.0) is None
    made.add_offer(PEERS[1], offer(1), 2.0)
    made.add_offer(PEERS[2], offer(2), 2.1)
    assert made.decide_at(2.1) == 2.0 + AuctionTable().decision_window
    assert not made.all_offers_in([PEERS[1]], 2.1)
    made.add_offer(PEERS[1], offer(3, request=AGGREGATE), 2.1)
    assert made.all_offers_in([PEERS[1]], 2.1)


@pytest.mark.parametrize("candidates", [None, []])
def test_without_known_candidates_better_offers_may_come(made: Auction, candidates: list[PeerId] | None) -> None:
    made.add_offer(PEERS[1], offer(1), 2.0)
    assert not made.all_offers_in(candidates, 2.1)


def test_a_further_offer_of_the_same_peer_does_not_restart_the_decision_window(made: Auction) -> None:
    made.add_offer(PEERS[1], offer(1), 2.0)
    made.add_offer(PEERS[1], offer(2), 2.2)
    assert made.decide_at(2.2) == 2.0 + AuctionTable().decision_window
    made.add_offer(PEERS[1], offer(3), 9.0)
    assert made.decide_at(9.0) == 9.0 + AuctionTable().decision_window


@pytest.mark.parametrize(
    ("timeout_ms", "round_trip", "seconds"),
    [(500, 0.0, 0.25), (500, 0.3, 0.175), (1100, 0.3, 0.25), (700, 0.5, 0.175), (60_000, 1.9, 0.075)],
)
def test_an_offer_is_decided_while_its_renewal_can_still_arrive(
    made: Auction, timeout_ms: int, round_trip: float, seconds: float
) -> None:
    assert made.add_offer(PEERS[0], offer(0, timeout_ms=timeout_ms), 1.0, round_trip)
    at = made.decide_at(1.0)
    assert at == pytest.approx(1.0 + seconds)
    assert made.decide(at) != ()


def test_an_offer_that_cannot_be_accepted_in_time_does_not_count(made: Auction) -> None:
    assert not made.add_offer(PEERS[0], offer(0), 1.0, round_trip=0.51)
    assert made.add_offer(PEERS[1], offer(1), 1.0, round_trip=0.3)
    assert made.decide_at(1.18) is not None
    assert made.decide_at(1.195) is None  # its renewal would take until 1.495 at best, and the lease ends at 1.5
    assert made.decide(1.195) == ()


def test_a_peer_is_not_blamed_for_an_offer_that_was_accepted_at_the_last_moment(made: Auction) -> None:
    """Unless it offered less than the usual life: then the short notice is its own."""
    for index, timeout_ms, blamed in ((0, 500, False), (1, 90, True)):
        assert made.add_offer(PEERS[index], offer(index, timeout_ms=timeout_ms), 1.0)
        [chosen] = made.decide(1.0 + timeout_ms / 1000 - 0.05)
        assert (made.deny(chosen.lease, 1.5) > 0) is blamed


def test_offers_for_a_filled_role_are_unneeded_while_another_role_lacks_workers(made: Auction) -> None:
    assert made.add_offer(PEERS[0], offer(0), 1.0)
    [chosen] = made.decide(1.1)
    assert made.add_offer(PEERS[1], offer(1), 1.1)
    assert made.take_unneeded(1.1) == ()  # the lease of the first is not confirmed, the second may be needed
    assert made.confirm(chosen.lease)
    assert [each.peer for each in made.take_unneeded(1.2)] == [PEERS[1]]
    assert made.take_unneeded(1.2) == ()


def test_only_the_newest_offer_of_a_peer_and_role_counts() -> None:
    made = auction(train=2)
    for number, price in enumerate([50.0, 90.0]):
        made.add_offer(PEERS[0], offer(number, price), 1.0)
    assert [(bid.peer, bid.price) for bid in made.decide(1.0)] == [(PEERS[0], 90.0)]


def test_a_peer_has_an_offer_for_each_request_of_a_role_whose_leases_may_share_it() -> None:
    shared = role_request(count=3, distinct_peers=False)
    made = Auction((shared,), random=Random(0))
    requests = [TRAIN, uuid.UUID(int=3), uuid.UUID(int=4)]
    for request in requests:
        made.register_request(request, "train")
    for number, request in enumerate([*requests, TRAIN]):  # the last one takes the place of the first
        made.add_offer(PEERS[0], offer(number, 50.0 + number, request), 1.0)
    made.add_offer(PEERS[1], offer(9, 51.5), 1.0)
    assert [(bid.peer, bid.price) for bid in made.decide(1.0)] == [
        (PEERS[0], 51.0), (PEERS[1], 51.5), (PEERS[0], 52.0),
    ]  # fmt: skip
    made.deny(uuid.UUID(int=1001), 1.1)  # a peer that does not grant one lease is left out for all of them
    assert made.decide(1.1) == ()


def test_the_next_best_offer_is_due_at_once_after_a_denial_or_a_late_answer(made: Auction) -> None:
    for number in range(3):
        made.add_offer(PEERS[number], offer(number, 10.0 * number), 1.0)
    [first] = made.decide(1.25)
    assert made.decide_at(1.25) is None
    assert made.deny(first.lease, 1.26) > 0
    at = made.decide_at(1.26)
    assert at is not None
    assert at <= 1.26
    [second] = made.decide(1.26)
    late_at = made.next_late_at()
    assert late_at is not None
    assert made.mark_late(late_at) == (second,)
    [third] = made.decide(late_at)
    assert (first.peer, second.peer, third.peer) == tuple(PEERS[:3])
    assert made.confirm(third.lease)
    assert not made.confirm(second.lease)


def test_leases_granted_after_the_search_are_not_needed(made: Auction) -> None:
    made.add_offer(PEERS[0], offer(0), 1.0)
    [bid] = made.decide(1.1)
    made.close()
    assert not made.confirm(bid.lease)


def test_weights_are_settings() -> None:
    made = auction(train=1, auction_settings=AuctionTable(decision_window=0.1, cpu=0.0, memory=1.0))
    made.add_offer(PEERS[0], offer(0, 100, cpu=64), 1.0)
    made.add_offer(PEERS[1], offer(1, 50), 1.0)
    assert made.decide_at(1.0) == pytest.approx(1.1)
    assert [bid.peer for bid in made.decide(1.1)] == [PEERS[1]]


def test_pauses_of_a_peer_double_up_to_a_bound() -> None:
    backoff, pauses = PeerBackoff(Random(1)), []
    for _ in range(10):
        pauses.append(pause := backoff.record_failure(PEERS[0], 100.0))
        assert backoff.is_left_out(PEERS[0], 100.0 + 0.99 * pause)
        assert not backoff.is_left_out(PEERS[0], 100.0 + pause)
        assert not backoff.is_left_out(PEERS[1], 100.0)
    for number, pause in enumerate(pauses):
        assert 0.75 <= pause / min(LONGEST_PAUSE, FIRST_PAUSE * 2**number) <= 1.25
    assert len(set(pauses)) == 10


def test_offers_of_excluded_peers_are_ignored_with_a_reason_and_not_waited_for() -> None:
    request = role_request(excluded=frozenset(PEERS[:1]))
    made = Auction((request,), AuctionTable(), Random(0))
    made.register_request(TRAIN, "train")
    assert not made.add_offer(PEERS[0], offer(0, 1), 1.0)
    assert made.decide_at(1.0) is None
    [rejection] = made.rejections[PEERS[0], "train"]
    assert rejection.code == "excluded"
    assert count_reasons("train", request.spec.resources, made.rejections, {}).counts == {"excluded": 1}
    assert made.add_offer(PEERS[1], offer(1, 100), 1.0)
    assert made.all_offers_in(PEERS[:2], 1.0)
    assert [bid.peer for bid in made.decide(1.1)] == [PEERS[1]]
