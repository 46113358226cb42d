"""Round announcements: tells the parameter server the members of each round, again whenever a member is lost. Pure.

Called by `operator` for the effect `AnnounceRound` of `rounds`.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from typing import Final

from hypha_net.errors import UnsupportedProtocolError
from hypha_proto.ids import PeerId
from hypha_proto.round_membership import ROUND_MEMBERS, Member, MembersKnown, RoundMembers
from hypha_scheduler.strategies.base import SendMessage
from hypha_scheduler.strategies.diloco.rounds import AnnounceRound

_log = logging.getLogger(__name__)

TAG: Final = "round members"
UPDATES_TIMEOUT: Final = 300.0
"""Seconds that the parameter server waits for updates that workers have started to send."""


@dataclass(slots=True)
class RoundAnnouncer:
    """Scheduler side of the protocol ``/hypha-aggregate`` for one job; its messages never overtake each other."""

    job_id: uuid.UUID
    server: PeerId
    timeout: float | None = None
    """Seconds for a round's updates to arrive; `UPDATES_TIMEOUT` if None."""
    _in_flight: AnnounceRound | None = None
    _latest: AnnounceRound | None = None
    """Announcement that waits for the response to the one in flight."""
    _accepted_round: int = 0
    """Last round whose members the parameter server has accepted."""

    def announce(self, members: AnnounceRound) -> tuple[SendMessage, ...]:
        """Announce the members of a round, now or after the response to an earlier announcement."""
        if self._in_flight is not None:
            self._latest = members
            return ()
        self._in_flight = members
        message = RoundMembers(
            job_id=self.job_id,
            round=members.round,
            members=tuple(Member(peer=peer, samples=samples) for peer, samples in members.members),
            deadline_ms=int((self.timeout or UPDATES_TIMEOUT) * 1000),
        )
        about = {"hypha.round": members.round, "hypha.members": len(members.members)}
        return (SendMessage(self.server, ROUND_MEMBERS, message, TAG, span="name members", about=about),)

    def on_result(self, outcome: object, closed: int) -> tuple[str | None, tuple[SendMessage, ...]]:
        """Handle the response of the parameter server, or why there is none.

        Args:
            outcome: `MembersKnown` or an error.
            closed: last closed round.

        Returns:
            why the job fails, if it does, and the next announcement to send.
        """
        members, latest = self._in_flight, self._latest
        self._in_flight = self._latest = None
        if members is None:
            return None, ()
        failure = self._failure(members, outcome, closed) if latest is None else None  # a later one replaces it
        return failure, () if latest is None else self.announce(latest)

    def _failure(self, members: AnnounceRound, outcome: object, closed: int) -> str | None:
        if isinstance(outcome, UnsupportedProtocolError):
            _log.info("the parameter server %s does not take member lists, it aggregates all updates", self.server)
        elif (why := _rejection(outcome)) is not None:
            if members.round <= self._accepted_round:  # it may be closed already; if not, its deadline applies
                _log.warning("round %d: its members can no longer be changed: %s", members.round, why)
                return None
            failure = f"members could not be sent to parameter server {self.server}: {why}"
            return f"round {members.round}: {failure}" if closed < members.round else None
        self._accepted_round = members.round
        return None


def _rejection(outcome: object) -> str | None:
    """Return why the members were not accepted, or None."""
    if isinstance(outcome, MembersKnown):
        return None if outcome.accepted else (outcome.reason[:500] or "it does not accept them")
    return str(outcome)
