"""Round announcements: which responses of the parameter server fail a job, and that none overtakes another."""

from __future__ import annotations

import uuid

import pytest

from hypha_net.errors import RequestTimeoutError
from hypha_proto.commands import CommandAnswer
from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import Lease, TaskRef
from hypha_scheduler.strategies.diloco.round_announcer import RoundAnnouncer
from hypha_scheduler.strategies.diloco.rounds import AnnounceRound

A, B, C = (PeerId.from_public_key(bytes([n]) * 32) for n in range(3))
SERVER = TaskRef("aggregate", Lease(uuid.UUID(int=1), C, "aggregate", 1.0))
ACCEPTED = CommandAnswer(0, accepted=True)
REJECTED = CommandAnswer(0, accepted=False, reason="round 1 is over, round 2 runs")


@pytest.mark.parametrize(
    ("first", "fails"), [(ACCEPTED, False), (REJECTED, True), (RequestTimeoutError("no answer"), True)]
)
def test_rejected_change_of_an_accepted_round_does_not_fail_the_job(first: object, fails: bool) -> None:
    """Until the parameter server reports its outer step, a lost member makes the scheduler announce the round again."""
    announcer = RoundAnnouncer(SERVER, term=1)
    [sent] = announcer.announce(AnnounceRound(1, ((A, 4), (B, 4))))
    assert [member.peer for member in sent.command.members] == [A, B]
    failure, following = announcer.on_result(first, closed=0)
    assert (failure is not None, following) == (fails, ())
    if not fails:
        [again] = announcer.announce(AnnounceRound(1, ((A, 4),)))
        assert [member.peer for member in again.command.members] == [A]
        assert announcer.on_result(REJECTED, closed=0) == (None, ())


def test_an_announcement_waits_for_the_response_to_the_one_before() -> None:
    announcer = RoundAnnouncer(SERVER, term=1)
    assert len(announcer.announce(AnnounceRound(1, ((A, 4), (B, 4))))) == 1
    assert announcer.announce(AnnounceRound(1, ((A, 4),))) == ()
    assert announcer.announce(AnnounceRound(1, ((B, 4),))) == ()
    failure, [following] = announcer.on_result(REJECTED, closed=0)
    assert failure is None  # the later announcement replaces the one that was rejected
    assert [member.peer for member in following.command.members] == [B]
    assert announcer.on_result(ACCEPTED, closed=0) == (None, ())
