"""Decides which updates belong to a round, and when the round is complete.

Pure: the clock is passed in, and files are only named. Called by `server`. A round is complete when every member's
update has arrived, or at its deadline with those that have. Older schedulers announce no members: then every permitted
sender counts with equal weight, and there is no deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.round_membership import MembersKnown, RoundMembers

MAX_ROUNDS_AHEAD: Final = 4
"""Largest number of rounds whose members may be announced before the current round is complete."""


class UpdateRefusedError(Exception):
    """An update is refused; the message says why."""


class EmptyRoundError(Exception):
    """The deadline of a round has passed without any update."""


@dataclass(frozen=True, slots=True)
class CompleteRound:
    """The input of an outer step."""

    round: int
    updates: tuple[tuple[PeerId, Path, float], ...]
    """Member, file and weight; the weights need not sum to one."""
    missing: tuple[PeerId, ...]
    """Members whose updates did not arrive in time."""


@dataclass(slots=True)
class _Membership:
    """Members of a round with their weights, and its deadline on the local clock."""

    weights: Mapping[PeerId, float]
    deadline: float | None


@dataclass(slots=True)
class RoundCollector:
    """Collects the updates of one job, round by round.

    Attributes:
        senders: peers that may send updates, by the job's spec; members that the scheduler announces are added.
        named: whether the scheduler announces each round's members.
    """

    senders: set[PeerId]
    members_announced: bool
    round: int | None = None
    """The current round; None until the members of the first round are announced."""
    _members: dict[int, _Membership] = field(default_factory=dict)
    _updates: dict[tuple[int, PeerId], Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.members_announced:
            self.round = 1

    def set_round_members(self, message: RoundMembers, now: float) -> tuple[MembersKnown, list[Path]]:
        """Set the members of a round; also return the files of peers that are not members any more, to be deleted."""
        number = message.round
        if not self.members_announced:
            return MembersKnown(accepted=False, reason="the job's spec does not enable announced members"), []
        if self.round is not None and number < self.round:
            return MembersKnown(accepted=False, reason=f"round {number} is over, the current round is {self.round}"), []
        if self.round is not None and number >= self.round + MAX_ROUNDS_AHEAD:
            return MembersKnown(accepted=False, reason=f"round {number} is too far ahead of round {self.round}"), []
        if not message.members:
            return MembersKnown(accepted=False, reason="a round needs at least one member"), []
        weights = {member.peer: float(member.samples) for member in message.members}
        if len(weights) < len(message.members):
            return MembersKnown(accepted=False, reason="a member is listed twice"), []
        self._members[number] = _Membership(weights, now + message.deadline_ms / 1000)
        self.senders |= weights.keys()
        if self.round is None:
            self.round = number
        return MembersKnown(accepted=True), self._drop_nonmembers(number, weights.keys())

    def admit(self, peer: PeerId, round_number: int | None) -> int:
        """Return the round of an update that `peer` is about to send; without a number, the current round.

        Raises:
            UpdateRefusedError: the update is not expected.
        """
        if round_number is None:
            if self.round is None:
                raise UpdateRefusedError("no round has begun, and the update does not name one")
            round_number = self.round
        members = self._members.get(round_number)
        if members is not None and peer not in members.weights:
            raise UpdateRefusedError(f"{peer} is not a member of round {round_number}")
        if peer not in self.senders:
            raise UpdateRefusedError(f"{peer} is not a member of this job")
        if self.round is not None and round_number < self.round:
            raise UpdateRefusedError(f"round {round_number} is over, the current round is {self.round}")
        # a correct member sends round r + 1 only after the outer update of round r
        if self.round is not None and round_number > self.round + (MAX_ROUNDS_AHEAD if members else 1):
            raise UpdateRefusedError(f"round {round_number} is too far ahead of round {self.round}")
        if self.round is None and any(sender == peer and number != round_number for number, sender in self._updates):
            raise UpdateRefusedError("an update of this peer for another round is already waiting")
        return round_number

    def add(self, peer: PeerId, round_number: int, path: Path) -> Path | None:
        """Add an update that has arrived; return the file that it replaces, if a lost receipt made the peer send twice.

        Raises:
            UpdateRefusedError: the round ended during the transfer.
        """
        self.admit(peer, round_number)
        replaced = self._updates.get((round_number, peer))
        self._updates[round_number, peer] = path
        return replaced

    def seconds_until_due(self, now: float) -> float | None:
        """Return the seconds until the current round is complete (0: now); None: not before another message."""
        if self.round is None:
            return None
        members = self._current_membership()
        if members is None:
            return None
        if all((self.round, peer) in self._updates for peer in members.weights):
            return 0.0
        return None if members.deadline is None else max(0.0, members.deadline - now)

    def close_round(self) -> CompleteRound:
        """End the current round with the updates that have arrived, and begin the next.

        Raises:
            EmptyRoundError: no member's update has arrived.
        """
        members = self._current_membership()
        if self.round is None or members is None:
            raise EmptyRoundError("no round has begun")
        number = self.round
        updates = tuple(
            (peer, self._updates.pop((number, peer)), weight)
            for peer, weight in members.weights.items()
            if (number, peer) in self._updates
        )
        if not updates:
            raise EmptyRoundError(
                f"no update of round {number} arrived from its {len(members.weights)} members in time"
            )
        missing = tuple(peer for peer in members.weights if peer not in {sender for sender, _, _ in updates})
        self._members.pop(number, None)
        self.round = number + 1
        return CompleteRound(number, updates, missing)

    def is_late(self, peer: PeerId, round_number: int | None) -> bool:
        """Return whether this is an update for a round that is over, or that continues without its sender.

        It is late, or is sent again because its receipt was lost. It does not count, but it is no error either: its
        sender receives the outer update as the members do, and continues.
        """
        if round_number is None or self.round is None or peer not in self.senders:
            return False
        membership = self._members.get(round_number)
        return round_number < self.round or (membership is not None and peer not in membership.weights)

    def _current_membership(self) -> _Membership | None:
        if not self.members_announced:
            return _Membership(dict.fromkeys(sorted(self.senders), 1.0), None)
        return None if self.round is None else self._members.get(self.round)

    def _drop_nonmembers(self, number: int, members: Iterable[PeerId]) -> list[Path]:
        keep = set(members)
        removed = [key for key in self._updates if key[0] == number and key[1] not in keep]
        return [self._updates.pop(key) for key in removed]
