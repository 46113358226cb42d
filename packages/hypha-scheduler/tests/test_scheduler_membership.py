"""Round announcements: which responses of the parameter server fail a job."""

from __future__ import annotations

import uuid

import anyio
import pytest

from hypha_net import rpc
from hypha_net.testing import MemoryNetwork
from hypha_proto.ids import PeerId
from hypha_proto.round_membership import ROUND_MEMBERS, MembersKnown, RoundMembers
from hypha_scheduler.strategies.diloco.round_announcer import RoundAnnouncer
from hypha_scheduler.strategies.diloco.rounds import AnnounceRound, Rounds, RoundSettings

A, B = (PeerId.from_public_key(bytes([n]) * 32) for n in range(2))


@pytest.mark.parametrize(("first_is_accepted", "failures"), [(True, 0), (False, 1)])
def test_rejected_change_of_an_accepted_round_does_not_fail_the_job(first_is_accepted: bool, failures: int) -> None:
    """Until the parameter server reports its outer step, a lost member makes the scheduler announce the round again."""
    received: list[RoundMembers] = []

    async def answer(_peer: PeerId, message: RoundMembers) -> MembersKnown:
        received.append(message)
        if first_is_accepted and len(received) == 1:
            return MembersKnown(accepted=True)
        return MembersKnown(accepted=False, reason="round 1 is over, round 2 runs")

    failed: list[str] = []

    async def main() -> None:
        network = MemoryNetwork()
        with anyio.fail_after(10):
            async with network.endpoint("scheduler") as scheduler, network.endpoint("server") as server:
                rpc.serve(server, ROUND_MEMBERS, answer)
                rounds = Rounds(RoundSettings(rounds=2, target=8, batch_size=4, min_members=1), [A, B], 0.0)
                announcer = RoundAnnouncer(scheduler, uuid.uuid4(), server.peer_id)
                await announcer.announce(AnnounceRound(1, ((A, 4), (B, 4))), rounds, failed.append)
                if first_is_accepted:
                    await announcer.announce(AnnounceRound(1, ((A, 4),)), rounds, failed.append)

    anyio.run(main, backend="trio")
    assert [len(message.members) for message in received] == ([2, 1] if first_is_accepted else [2])
    assert len(failed) == failures
