"""Whose updates make a round, and when it is complete. Pure: the clock is passed in, files are only named here.

A round is complete when every member's update is there, or at its deadline with those that are. A scheduler of the old
wire names no members: then every peer that may send counts once, and there is no deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.round_membership import MembersKnown, RoundMembers

MAX_ROUNDS_AHEAD: Final = 4
"""Rounds that may be named before the one that runs is over."""


class UpdateRefusedError(Exception):
    """An update cannot be taken; the message says why."""


class EmptyRoundError(Exception):
    """The deadline of a round has passed and nothing can be averaged."""


@dataclass(frozen=True, slots=True)
class CompleteRound:
    """What an outer step is made of."""

    round: int
    updates: tuple[tuple[PeerId, Path, float], ...]
    """Member, file and weight; the weights need not sum to one."""
    missing: tuple[PeerId, ...]
    """Members whose updates did not come in time."""


@dataclass(slots=True)
class _Membership:
    """Members of a round with their weights, and when waiting ends on the local clock."""

    weights: Mapping[PeerId, float]
    deadline: float | None


@dataclass(slots=True)
class RoundCollector:
    """The updates of one job, round after round.

    Attributes:
        senders: peers that may send updates by the job; members that the scheduler names join them.
        named: whether the scheduler names each round's members.
    """

    senders: set[PeerId]
    members_announced: bool
    round: int | None = None
    """The round that is being collected; none until the first is named or begun."""
    _members: dict[int, _Membership] = field(default_factory=dict)
    _updates: dict[tuple[int, PeerId], Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.members_announced:
            self.round = 1

    def set_round_members(self, message: RoundMembers, now: float) -> tuple[MembersKnown, list[Path]]:
        """Take the scheduler's word on who is in a round; also gives files of peers that are not, to be deleted."""
        number = message.round
        if not self.members_announced:
            return MembersKnown(accepted=False, reason="this job's spec does not say that members are named"), []
        if self.round is not None and number < self.round:
            return MembersKnown(accepted=False, reason=f"round {number} is over, round {self.round} runs"), []
        if self.round is not None and number >= self.round + MAX_ROUNDS_AHEAD:
            return MembersKnown(accepted=False, reason=f"round {number} is too far ahead of {self.round}"), []
        if not message.members:
            return MembersKnown(accepted=False, reason="a round needs at least one member"), []
        weights = {member.peer: float(member.samples) for member in message.members}
        if len(weights) < len(message.members):
            return MembersKnown(accepted=False, reason="a member is named twice"), []
        self._members[number] = _Membership(weights, now + message.deadline_ms / 1000)
        self.senders |= weights.keys()
        if self.round is None:
            self.round = number
        return MembersKnown(accepted=True), self._drop_nonmembers(number, weights.keys())

    def admit(self, peer: PeerId, round_number: int | None) -> int:
        """The round that an update which `peer` is about to send belongs to (none said: the one that runs).

        Raises:
            UpdateRefusedError: it is not wanted.
        """
        if round_number is None:
            if self.round is None:
                raise UpdateRefusedError("no round has begun, and the update does not say which it belongs to")
            round_number = self.round
        members = self._members.get(round_number)
        if members is not None and peer not in members.weights:
            raise UpdateRefusedError(f"{peer} is not a member of round {round_number}")
        if peer not in self.senders:
            raise UpdateRefusedError(f"{peer} is not a member of this job")
        if self.round is not None and round_number < self.round:
            raise UpdateRefusedError(f"round {round_number} is over, round {self.round} runs")
        # a member sends round r + 1 only after the outer update of r, so nothing honest is further ahead
        if self.round is not None and round_number > self.round + (MAX_ROUNDS_AHEAD if members else 1):
            raise UpdateRefusedError(f"round {round_number} is too far ahead of {self.round}")
        if self.round is None and any(sender == peer and number != round_number for number, sender in self._updates):
            raise UpdateRefusedError("another round's update of this peer waits for the round to begin")
        return round_number

    def add(self, peer: PeerId, round_number: int, path: Path) -> Path | None:
        """An update is there; gives the file of an earlier one that it replaces (sent again after a lost receipt).

        Raises:
            UpdateRefusedError: the round ended while it was on its way.
        """
        self.admit(peer, round_number)
        replaced = self._updates.get((round_number, peer))
        self._updates[round_number, peer] = path
        return replaced

    def seconds_until_due(self, now: float) -> float | None:
        """Seconds until the round that runs is to be closed (0: now), or none when only a message can close it."""
        if self.round is None:
            return None
        members = self._current_membership()
        if members is None:
            return None
        if all((self.round, peer) in self._updates for peer in members.weights):
            return 0.0
        return None if members.deadline is None else max(0.0, members.deadline - now)

    def close_round(self) -> CompleteRound:
        """End the round that runs with the updates that are there, and begin the next.

        Raises:
            EmptyRoundError: no member's update is there.
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
        """Whether this is a sender's update of a round that is over, or that goes on without it.

        It came too late, or comes again because its receipt was lost. It counts no more, but its sender did nothing
        wrong and goes on with the outer update that it gets all the same.
        """
        if round_number is None or self.round is None or peer not in self.senders:
            return False
        named = self._members.get(round_number)
        return round_number < self.round or (named is not None and peer not in named.weights)

    def _current_membership(self) -> _Membership | None:
        if not self.members_announced:
            return _Membership(dict.fromkeys(sorted(self.senders), 1.0), None)
        return None if self.round is None else self._members.get(self.round)

    def _drop_nonmembers(self, number: int, members: Iterable[PeerId]) -> list[Path]:
        keep = set(members)
        strangers = [key for key in self._updates if key[0] == number and key[1] not in keep]
        return [self._updates.pop(key) for key in strangers]
