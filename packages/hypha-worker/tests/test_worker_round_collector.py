"""Whose updates make a round, and when it is complete."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from hypha_proto.ids import PeerId
from hypha_proto.round_membership import Member, RoundMembers
from hypha_worker.executors.parameter_server.round_collector import EmptyRoundError, RoundCollector, UpdateRefusedError

A, B, C, STRANGER = (PeerId.from_public_key(bytes([n]) * 32) for n in range(4))


def members(number: int, samples: dict[PeerId, int], deadline_ms: int = 1000) -> RoundMembers:
    listed = tuple(Member(peer=peer, samples=count) for peer, count in samples.items())
    return RoundMembers(job_id=uuid.UUID(int=1), round=number, members=listed, deadline_ms=deadline_ms)


def deliver(collection: RoundCollector, peer: PeerId, number: int | None) -> Path:
    path = Path(f"{peer}-{number}")
    collection.add(peer, collection.admit(peer, number), path)
    return path


def test_a_round_closes_when_every_member_has_delivered() -> None:
    collection = RoundCollector({A, B, C}, named=True)
    assert collection.due(0.0) is None
    first = deliver(collection, A, 1)
    assert collection.name_members(members(1, {A: 40, B: 10}), 0.0)[0].accepted
    assert collection.due(0.4) == pytest.approx(0.6)
    second = deliver(collection, B, 1)
    assert collection.due(0.5) == 0.0
    done = collection.close()
    assert done.round == 1
    assert done.updates == ((A, first, 40.0), (B, second, 10.0))
    assert done.missing == ()
    assert collection.round == 2
    assert collection.due(0.6) is None


def test_members_that_are_late_are_left_out_at_the_deadline() -> None:
    collection = RoundCollector({A, B}, named=True)
    collection.name_members(members(1, {A: 40, B: 10}), 5.0)
    deliver(collection, A, 1)
    assert collection.due(5.9) == pytest.approx(0.1)
    assert collection.due(6.0) == 0.0
    done = collection.close()
    assert [peer for peer, _, _ in done.updates] == [A]
    assert done.missing == (B,)
    with pytest.raises(UpdateRefusedError, match="round 1 is over, round 2 runs"):
        deliver(collection, B, 1)
    assert collection.is_late(B, 1)
    assert collection.is_late(A, 1)
    assert not collection.is_late(C, 1)
    assert not collection.is_late(B, 2)
    assert not collection.is_late(B, None)


def test_a_sender_that_the_scheduler_no_longer_counted_on_is_late_however_long_ago() -> None:
    collection = RoundCollector({A, B}, named=True)
    for number in range(1, 9):
        collection.name_members(members(number, {A: 1}), 0.0)
        deliver(collection, A, number)
        collection.close()
    assert all(collection.is_late(B, number) for number in range(1, 9))
    assert not collection.is_late(B, 9)
    assert not collection.is_late(STRANGER, 1)
    collection.name_members(members(9, {A: 1}), 0.0)
    assert collection.is_late(B, 9)
    assert not collection.is_late(A, 9)
    assert not collection.is_late(STRANGER, 9)


def test_a_round_without_any_update_is_an_error_and_not_a_step() -> None:
    collection = RoundCollector({A, B}, named=True)
    collection.name_members(members(1, {A: 1, B: 1}), 0.0)
    with pytest.raises(EmptyRoundError, match="no update of round 1 arrived"):
        collection.close()


def test_a_later_message_replaces_the_members_of_a_round() -> None:
    collection = RoundCollector({A, B, C}, named=True)
    collection.name_members(members(1, {A: 4, B: 1, C: 2}), 0.0)
    deliver(collection, A, 1)
    lost = deliver(collection, C, 1)
    _, dropped = collection.name_members(members(1, {A: 4, B: 1}), 0.1)
    assert dropped == [lost]
    deliver(collection, B, 1)
    assert [weight for _, _, weight in collection.close().updates] == [4.0, 1.0]


def test_strangers_and_wrong_rounds_are_refused() -> None:
    collection = RoundCollector({A, B}, named=True)
    with pytest.raises(UpdateRefusedError, match="not a member of this job"):
        deliver(collection, STRANGER, 1)
    with pytest.raises(UpdateRefusedError, match="no round has begun"):
        deliver(collection, A, None)
    collection.name_members(members(3, {A: 1}), 0.0)
    for peer, number, why in (
        (B, 3, "not a member of round 3"),
        (A, 2, "round 2 is over"),
        (A, 9, "too far ahead"),
        (STRANGER, 4, "not a member of this job"),
    ):
        with pytest.raises(UpdateRefusedError, match=why):
            deliver(collection, peer, number)
    deliver(collection, A, None)
    assert collection.close().round == 3


def test_a_peer_that_was_named_later_may_send() -> None:
    collection = RoundCollector({A}, named=True)
    collection.name_members(members(1, {A: 1}), 0.0)
    collection.name_members(members(2, {A: 1, STRANGER: 1}), 0.0)
    deliver(collection, STRANGER, 2)
    deliver(collection, A, 1)
    assert collection.close().round == 1
    deliver(collection, A, 2)
    assert len(collection.close().updates) == 2


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (members(1, {A: 1}), "round 1 is over"),
        (members(9, {A: 1}), "too far ahead"),
        (members(2, {}), "at least one member"),
    ],
)
def test_members_of_a_round_that_cannot_be_are_refused(message: RoundMembers, reason: str) -> None:
    collection = RoundCollector({A}, named=True)
    collection.name_members(members(1, {A: 1}), 0.0)
    deliver(collection, A, 1)
    collection.close()
    answer, _ = collection.name_members(message, 0.0)
    assert not answer.accepted
    assert reason in answer.reason


def test_an_update_sent_again_replaces_the_first() -> None:
    collection = RoundCollector({A}, named=True)
    collection.name_members(members(1, {A: 1}), 0.0)
    collection.add(A, 1, Path("first"))
    assert collection.add(A, 1, Path("second")) == Path("first")
    assert collection.close().updates == ((A, Path("second"), 1.0),)


def test_without_named_members_every_sender_counts_once_and_there_is_no_deadline() -> None:
    collection = RoundCollector({A, B}, named=False)
    assert collection.round == 1
    assert not collection.name_members(members(1, {A: 1}), 0.0)[0].accepted
    for number in (1, 2):
        deliver(collection, A, None)
        assert collection.due(1e9) is None
        deliver(collection, B, None)
        assert collection.due(0.0) == 0.0
        done = collection.close()
        assert (done.round, [weight for _, _, weight in done.updates]) == (number, [1.0, 1.0])


class Rounds(RuleBasedStateMachine):
    """Members push, get lost, come late and lie; the scheduler names and renames; time passes."""

    everybody = (A, B, C, STRANGER)

    def __init__(self) -> None:
        super().__init__()
        self.collection = RoundCollector({A, B, C}, named=True)
        self.now = 0.0
        self.count = 0
        self.closed = 0
        self.used: set[Path] = set()
        self.latest: dict[int, dict[PeerId, int]] = {}

    @rule(
        ahead=st.integers(-1, 5),
        samples=st.dictionaries(st.sampled_from(everybody), st.integers(0, 9), max_size=4),
        deadline=st.integers(0, 3000),
    )
    def name(self, ahead: int, samples: dict[PeerId, int], deadline: int) -> None:
        number = max(1, (self.collection.round or 1) + ahead)
        answer, dropped = self.collection.name_members(members(number, samples, deadline), self.now)
        if answer.accepted:
            assert samples
            assert number > self.closed
            self.latest[number] = samples
            assert all(path not in self.used for path in dropped)

    @rule(peer=st.sampled_from(everybody), ahead=st.integers(-2, 6), bare=st.booleans())
    def push(self, peer: PeerId, ahead: int, bare: bool) -> None:
        number = None if bare else max(1, (self.collection.round or 1) + ahead)
        self.count += 1
        try:
            admitted = self.collection.admit(peer, number)
            self.collection.add(peer, admitted, Path(f"{admitted}/{peer}/{self.count}"))
        except UpdateRefusedError:
            return
        assert admitted > self.closed
        assert peer in self.latest.get(admitted, dict.fromkeys(self.everybody))

    @rule(seconds=st.floats(0, 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.collection.due(self.now) != 0.0:
            return
        try:
            done = self.collection.close()
        except EmptyRoundError:
            return
        assert done.round > self.closed
        self.closed = done.round
        named = self.latest[done.round]
        assert {peer for peer, _, _ in done.updates} | set(done.missing) == set(named)
        for peer, path, weight in done.updates:
            assert weight == named[peer]
            assert path not in self.used
            assert path.parts[:2] == (str(done.round), str(peer)), "another round's or peer's update was counted"
            self.used.add(path)


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
