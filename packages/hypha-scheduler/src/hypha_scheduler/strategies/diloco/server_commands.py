"""Commands to the parameter server: the members of each round, and the job's workers, whenever they change. Pure.

One command of each kind is under way; when it is answered, the newest one follows.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.commands import CommandAnswer, SetMembers, SetWorkers
from hypha_proto.ids import PeerId
from hypha_proto.round_membership import Member
from hypha_scheduler.strategies.base import SendCommand, TaskRef
from hypha_scheduler.strategies.diloco.contributions import Contributions
from hypha_scheduler.strategies.diloco.round_effects import AnnounceRound

_log = logging.getLogger(__name__)

UPDATES_TIMEOUT: Final = 300.0
"""Seconds that the parameter server waits for updates that workers have started to send."""


@dataclass(slots=True)
class ServerCommands:
    """The commands to one parameter server."""

    server: TaskRef | None
    """Task of the parameter server; None if it was lost while the scheduler was away."""
    term: int
    """Its term."""
    contributions: Contributions
    known: frozenset[PeerId] = frozenset()
    """Workers that the parameter server knows. A worker begins with a round only once it is among them."""
    timeout: float | None = None
    """Seconds for a round's updates to arrive; `UPDATES_TIMEOUT` if None."""
    is_open: bool = False
    """Whether the parameter server's task has started, and workers are listed."""
    agreed: AnnounceRound | None = None
    """The last announcement that it has accepted."""
    in_flight: AnnounceRound | None = None
    """Announcement that is not answered; None if every one is."""
    _latest: AnnounceRound | None = None
    """Announcement that waits for the response to the one in flight."""
    _accepted_round: int = 0
    """Last round whose members the parameter server has accepted."""
    _announced: list[AnnounceRound] = field(default_factory=list)
    """Announcements of the newest round, oldest first."""
    _wanted: frozenset[PeerId] = frozenset()
    """Workers that it is to know."""
    _listed: frozenset[PeerId] | None = None
    """Those of the list in flight."""

    def __post_init__(self) -> None:
        self._wanted = self.known

    # --------------------------------------------------------------------------------------------------------- members

    @property
    def members_tag(self) -> str:
        """Tag of announcements."""
        return f"round members of term {self.term}"

    def restore(self, announced: Sequence[AnnounceRound]) -> None:
        """Go on after the announcements of a round in an earlier run, of which the parameter server may know any."""
        self._announced = list(announced)
        self._accepted_round = announced[-1].round

    def announce(self, members: AnnounceRound) -> tuple[SendCommand, ...]:
        """Announce the members of a round, now or after the response to an earlier announcement."""
        self._announced = [earlier for earlier in self._announced if earlier.round == members.round] + [members]
        if self.server is None:
            return ()
        if self.in_flight is not None:
            self._latest = members
            return ()
        self.in_flight = members
        updates = {peer: self.contributions.get(peer, members.round) for peer, _ in members.members}
        command = SetMembers(
            round=members.round,
            members=tuple(
                Member(peer=peer, samples=samples, update=None if (found := updates[peer]) is None else found.update)
                for peer, samples in members.members
            ),
            deadline_ms=int((members.seconds or self.timeout or UPDATES_TIMEOUT) * 1000),
        )
        about = {"hypha.round": members.round, "hypha.members": len(members.members)}
        return (SendCommand(self.server, command, self.members_tag, "name members", about),)

    def members_answered(self, outcome: object, closed: int) -> tuple[str | None, tuple[SendCommand, ...]]:
        """Handle the response to an announcement, or why there is none.

        Args:
            outcome: `CommandAnswer` or an error.
            closed: last closed round.

        Returns:
            why the parameter server has to be replaced, if it has, and the next announcement to send.
        """
        members, latest = self.in_flight, self._latest
        self.in_flight = self._latest = None
        if members is None:
            return None, ()
        failure = self._failure(members, outcome, closed)
        if latest is not None:  # which replaces it
            return None, self.announce(latest)
        return failure, ()

    def _failure(self, members: AnnounceRound, outcome: object, closed: int) -> str | None:
        if (why := _rejection(outcome)) is not None:
            if members.round <= self._accepted_round:  # it may be closed already; if not, its deadline applies
                _log.info(
                    "round %d: its members are settled, the parameter server changes none: %s", members.round, why
                )
                return None
            failure = f"round {members.round}: its members could not be sent to the parameter server: {why}"
            return failure if closed < members.round else None
        self._accepted_round, self.agreed = members.round, members
        return None

    def agreed_members(self, number: int, refused: Collection[PeerId], samples: int | None) -> tuple[PeerId, ...]:
        """Return whose updates the parameter server has averaged in a round.

        They are those that it has last agreed to, without the refused ones. If the response to a later announcement was
        lost, `samples`, the sum that it states, tells which announcement it followed; None if it states none.
        """
        agreed = [found for found in (self.agreed,) if found is not None and found.round == number]
        announced = [found for found in reversed(self._announced) if found.round == number]
        counted = [
            {peer: count for peer, count in found.members if peer not in refused} for found in (*agreed, *announced)
        ]
        exact = [members for members in counted if samples is not None and sum(members.values()) == samples]
        return tuple(next(iter((*exact, *counted)), {}))

    # --------------------------------------------------------------------------------------------------------- workers

    @property
    def workers_tag(self) -> str:
        """Tag of lists of workers."""
        return f"job workers of term {self.term}"

    def open(self) -> tuple[SendCommand, ...]:
        """List the workers from now on: the parameter server's task has started."""
        self.is_open = True
        return self.list_workers()

    def set_workers(self, workers: Iterable[PeerId]) -> tuple[SendCommand, ...]:
        """Tell the parameter server of the workers, now or after its response to an earlier list."""
        self._wanted = frozenset(workers)
        return self.list_workers()

    def list_workers(self) -> tuple[SendCommand, ...]:
        """Send the list again if the parameter server does not know it and none is under way."""
        if self.server is None or not self.is_open or self._listed is not None or self._wanted == self.known:
            return ()
        self._listed = self._wanted
        command = SetWorkers(workers=tuple(sorted(self._wanted)))
        about = {"hypha.workers": len(self._wanted)}
        return (SendCommand(self.server, command, self.workers_tag, "name workers", about),)

    def workers_answered(self, outcome: object) -> tuple[SendCommand, ...]:
        """Handle the response to a list, or why there is none; return the next one."""
        sent, self._listed = self._listed, None
        if sent is None:
            return ()
        if _rejection(outcome) is None:
            self.known = sent
            return self.list_workers()
        _log.warning("the parameter server of term %d was not told of the job's workers: %s", self.term, outcome)
        return ()


def _rejection(outcome: object) -> str | None:
    """Return why a command was not accepted, or None."""
    if isinstance(outcome, CommandAnswer):
        return None if outcome.accepted else (outcome.reason or "it does not accept them")
    return str(outcome)
