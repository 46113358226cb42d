"""Round announcements: tells the parameter server the members of each round, again whenever a member is lost. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.commands import CommandAnswer, SetMembers
from hypha_proto.ids import PeerId
from hypha_proto.round_membership import Member
from hypha_scheduler.strategies.base import SendCommand, TaskRef
from hypha_scheduler.strategies.diloco.round_effects import AnnounceRound

_log = logging.getLogger(__name__)

TAG: Final = "round members"
UPDATES_TIMEOUT: Final = 300.0
"""Seconds that the parameter server waits for updates that workers have started to send."""


@dataclass(slots=True)
class RoundAnnouncer:
    """The announcements to one parameter server; the next one is sent when the one before is answered."""

    server: TaskRef | None
    """Task of the parameter server; None if it was lost while the scheduler was away."""
    term: int
    """Its term."""
    timeout: float | None = None
    """Seconds for a round's updates to arrive; `UPDATES_TIMEOUT` if None."""
    digest_of: Callable[[PeerId, int], str | None] = lambda peer, number: None
    """Returns the digest of a worker's update in a round; None if it was not stated."""
    _in_flight: AnnounceRound | None = None
    _latest: AnnounceRound | None = None
    """Announcement that waits for the response to the one in flight."""
    _accepted_round: int = 0
    """Last round whose members the parameter server has accepted."""
    _agreed: AnnounceRound | None = None
    """Last announcement that it has accepted."""
    _announced: list[AnnounceRound] = field(default_factory=list)
    """Announcements of the newest round, oldest first."""

    @property
    def tag(self) -> str:
        """Tag of its messages."""
        return f"{TAG} of term {self.term}"

    def restore(self, announced: Sequence[AnnounceRound]) -> None:
        """Go on after the announcements of a round in an earlier run, of which the parameter server may know any."""
        self._announced = list(announced)
        self._accepted_round = announced[-1].round

    def announce(self, members: AnnounceRound) -> tuple[SendCommand, ...]:
        """Announce the members of a round, now or after the response to an earlier announcement."""
        self._announced = [earlier for earlier in self._announced if earlier.round == members.round] + [members]
        if self.server is None:
            return ()
        if self._in_flight is not None:
            self._latest = members
            return ()
        self._in_flight = members
        command = SetMembers(
            round=members.round,
            members=tuple(
                Member(peer=peer, samples=samples, update=self.digest_of(peer, members.round))
                for peer, samples in members.members
            ),
            deadline_ms=int((members.seconds or self.timeout or UPDATES_TIMEOUT) * 1000),
        )
        about = {"hypha.round": members.round, "hypha.members": len(members.members)}
        return (SendCommand(self.server, command, self.tag, "name members", about),)

    def on_result(self, outcome: object, closed: int) -> tuple[str | None, tuple[SendCommand, ...]]:
        """Handle the response of the parameter server, or why there is none.

        Args:
            outcome: `CommandAnswer` or an error.
            closed: last closed round.

        Returns:
            why the parameter server has to be replaced, if it has, and the next announcement to send.
        """
        members, latest = self._in_flight, self._latest
        self._in_flight = self._latest = None
        if members is None:
            return None, ()
        failure = self._failure(members, outcome, closed)
        if latest is not None:  # which replaces it
            failure = None
        return failure, () if latest is None else self.announce(latest)

    def _failure(self, members: AnnounceRound, outcome: object, closed: int) -> str | None:
        if (why := _rejection(outcome)) is not None:
            if members.round <= self._accepted_round:  # it may be closed already; if not, its deadline applies
                _log.info(
                    "round %d: its members are settled, the parameter server changes none: %s", members.round, why
                )
                return None
            failure = f"round {members.round}: its members could not be sent to the parameter server: {why}"
            return failure if closed < members.round else None
        self._accepted_round, self._agreed = members.round, members
        return None

    @property
    def agreed(self) -> AnnounceRound | None:
        """The last announcement that the parameter server has accepted."""
        return self._agreed

    @property
    def is_settled(self) -> bool:
        """Whether every announcement was answered."""
        return self._in_flight is None

    def agreed_members(self, number: int, refused: Collection[PeerId], samples: int | None) -> tuple[PeerId, ...]:
        """Return whose updates the parameter server has averaged in a round.

        They are those that it has last agreed to, without the refused ones. If the response to a later announcement was
        lost, `samples`, the sum that it states, tells which announcement it followed; None if it states none.
        """
        agreed = [found for found in (self._agreed,) if found is not None and found.round == number]
        announced = [found for found in reversed(self._announced) if found.round == number]
        counted = [
            {peer: count for peer, count in found.members if peer not in refused} for found in (*agreed, *announced)
        ]
        exact = [members for members in counted if samples is not None and sum(members.values()) == samples]
        return tuple(next(iter((*exact, *counted)), {}))


def _rejection(outcome: object) -> str | None:
    """Return why the members were not accepted, or None."""
    if isinstance(outcome, CommandAnswer):
        return None if outcome.accepted else (outcome.reason or "it does not accept them")
    return str(outcome)
