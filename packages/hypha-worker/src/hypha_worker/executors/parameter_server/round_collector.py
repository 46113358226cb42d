"""Decides which updates belong to a round, and when the round is complete.

Pure: the clock is passed in, and files are only named. The scheduler announces the members of each round. A round is
complete when every member's update has arrived, or at its deadline with those that have. Where the digest of a member's
update is announced, too, only an update with this digest counts.

AdamW bounds each step by the learning rate, so the norm of an update grows at most in proportion to its samples. An
update is an outlier if its norm exceeds `FACTOR` times what the others in its round lead to expect, and `FACTOR` times
what the last rounds do: whole rounds may grow together, as while the learning rate warms up, and one worker may train
alone. Small updates are no outliers, since they do no harm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from hypha_proto.commands import SetMembers
from hypha_proto.ids import PeerId

FACTOR: Final = 10.0
"""How many times the expected norm an update may have."""
_ROUNDS: Final = 8
"""Number of last rounds that count."""


@dataclass(frozen=True, slots=True)
class UpdateNorm:
    """Euclidean norm of an update over a number of samples."""

    norm: float
    samples: float

    def over(self, samples: float) -> float:
        """Return the norm to expect of an update over `samples`, if this one is an example."""
        return self.norm * max(1.0, samples / max(1.0, self.samples))


def _expect(update: UpdateNorm, known: Iterable[UpdateNorm]) -> float | None:
    """Return the norm to expect of an update by others; None if none of them has changed anything."""
    norms = [other.over(update.samples) for other in known if other.norm > 0.0]
    return median(norms) if norms else None


MAX_ROUNDS_AHEAD: Final = 4
"""Largest number of rounds whose members may be announced before the current round is complete."""
_MAX_REFUSED: Final = 1024
"""Largest number of refusals that are kept; before the first round nothing else bounds them."""


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


@dataclass(frozen=True, slots=True)
class DroppedUpdate:
    """An update that had arrived before its round's members were announced, and does not count."""

    peer: PeerId
    path: Path
    reason: str


@dataclass(slots=True)
class _Membership:
    """Members of a round with their weights, and its deadline on the local clock."""

    weights: Mapping[PeerId, float]
    deadline: float
    digests: Mapping[PeerId, str | None]
    """Digests of the updates, where they are known."""


@dataclass(frozen=True, slots=True)
class _ArrivedUpdate:
    path: Path
    digest: str
    norm: float


@dataclass(slots=True)
class RoundCollector:
    """Collects the updates of one job, round by round.

    Attributes:
        senders: peers that may send updates, by the job's spec or the newest `SetWorkers`; members that the scheduler
            announces are added.
    """

    senders: set[PeerId]
    round: int | None = None
    """The current round; None until the members of the first round are announced."""
    workers: frozenset[PeerId] | None = None
    """The job's workers by the newest `SetWorkers`; None before the first one."""
    _members: dict[int, _Membership] = field(default_factory=dict)
    _updates: dict[tuple[int, PeerId], _ArrivedUpdate] = field(default_factory=dict)
    _refused: set[tuple[int, PeerId]] = field(default_factory=set)
    """Senders of which an update was refused, with its round."""
    _used: dict[PeerId, set[str]] = field(default_factory=dict)
    """Digests of the updates in earlier rounds, by sender."""
    _norms: deque[Collection[UpdateNorm]] = field(default_factory=lambda: deque(maxlen=_ROUNDS))
    """Norms of the updates that were averaged in the last rounds."""

    def set_workers(self, workers: Iterable[PeerId]) -> None:
        """Replace the job's workers."""
        self.workers = frozenset(workers)
        self.senders = set(self.workers)

    def set_members(self, message: SetMembers, now: float) -> tuple[str | None, list[Path]]:
        """Set the members of a round.

        Returns:
            Why that cannot be, None if it is done; and the files of peers that are not members any more, to be deleted.
        """
        number = message.round
        if (reason := self._reason_against(message)) is not None:
            return reason, []
        weights = {member.peer: float(member.samples) for member in message.members}
        digests = {member.peer: member.update for member in message.members}
        self._members[number] = _Membership(weights, now + message.deadline_ms / 1000, digests)
        self.senders |= weights.keys()
        if self.round is None:
            self.round = number
        return None, self._drop_nonmembers(number, weights.keys())

    def _reason_against(self, message: SetMembers) -> str | None:
        if self.round is not None and message.round < self.round:
            return f"round {message.round} is over, the current round is {self.round}"
        if self.round is not None and message.round >= self.round + MAX_ROUNDS_AHEAD:
            return f"round {message.round} is too far ahead of round {self.round}"
        if not message.members:
            return "a round needs at least one member"
        if len({member.peer for member in message.members}) < len(message.members):
            return "a member is listed twice"
        return None

    def drop_mismatched(self, round_number: int) -> list[DroppedUpdate]:
        """Drop the updates of a round that are not those that the announcement of its members names."""
        dropped = []
        for (number, peer), update in list(self._updates.items()):
            reason = self._mismatch(number, peer, update.digest) if number == round_number else None
            if reason is not None:
                dropped.append(DroppedUpdate(peer, self._updates.pop((number, peer)).path, reason))
        return dropped

    def admit(self, peer: PeerId, round_number: int, digest: str) -> None:
        """Check an update that `peer` is about to send.

        Args:
            peer: its sender.
            round_number: the round that it is for.
            digest: its digest.

        Raises:
            UpdateRefusedError: the update is not expected.
        """
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
        if (round_number, peer) in self._refused:
            raise UpdateRefusedError(f"an update of {peer} was refused in round {round_number} before")
        reason = self._mismatch(round_number, peer, digest) or self._replay(round_number, peer, digest)
        if reason is not None:
            raise UpdateRefusedError(reason)

    def refuse(self, peer: PeerId, round_number: int) -> Path | None:
        """Let nothing of a peer count in a round any more; return its file that had arrived, to be deleted.

        The scheduler goes on without the member when it hears of the refusal, and records the round so.
        """
        is_near = self.round is None or self.round <= round_number <= self.round + MAX_ROUNDS_AHEAD
        if is_near and len(self._refused) < _MAX_REFUSED:
            self._refused.add((round_number, peer))
        dropped = self._updates.pop((round_number, peer), None)
        return None if dropped is None else dropped.path

    def _mismatch(self, round_number: int, peer: PeerId, digest: str) -> str | None:
        """Return why an update is not the one that its worker has stated to the scheduler; None if it may be."""
        members = self._members.get(round_number)
        stated = None if members is None else members.digests.get(peer)
        if stated is None or stated == digest:
            return None
        return f"update: the digest {digest} is not {stated}, which its worker has stated for round {round_number}"

    def _replay(self, round_number: int, peer: PeerId, digest: str) -> str | None:
        """Return why an update is one that its sender has sent for another round; None if it is not."""
        waits = any(
            sender == peer and number != round_number and update.digest == digest
            for (number, sender), update in self._updates.items()
        )
        if not waits and digest not in self._used.get(peer, ()):
            return None
        return f"update: {peer} has sent {digest} for another round already: send the update of round {round_number}"

    def add(self, peer: PeerId, round_number: int, path: Path, digest: str, norm: float) -> Path | None:
        """Add an update that has arrived; return the file that it replaces, if a lost receipt made the peer send twice.

        Args:
            peer: its sender.
            round_number: the round that it is for.
            path: its file.
            digest: digest of the file.
            norm: Euclidean norm of the update.

        Raises:
            UpdateRefusedError: the round ended during the transfer, or its members were announced with another digest.
        """
        self.admit(peer, round_number, digest)
        replaced = self._updates.get((round_number, peer))
        self._updates[round_number, peer] = _ArrivedUpdate(path, digest, norm)
        return None if replaced is None else replaced.path

    def seconds_until_due(self, now: float) -> float | None:
        """Return the seconds until the current round is complete (0: now); None: not before another message."""
        members = self._current_membership()
        if members is None:
            return None
        if all((self.round, peer) in self._updates for peer in members.weights):
            return 0.0
        return max(0.0, members.deadline - now)

    @property
    def is_empty(self) -> bool:
        """Return whether no member's update of the current round has arrived."""
        return not self._arrived_norms()

    def find_outliers(self) -> dict[PeerId, str]:
        """Return which updates of the current round are too large to be averaged with the others, and why."""
        norms = self._arrived_norms()
        last = [known for round_norms in self._norms for known in round_norms]
        found = {}
        for peer, update in norms.items():
            others = [other for sender, other in norms.items() if sender != peer]
            expected = [norm for norm in (_expect(update, others), _expect(update, last)) if norm is not None]
            if expected and update.norm > FACTOR * max(expected):
                compared = " and ".join(f"{norm:.3g}" for norm in expected)
                found[peer] = (
                    f"its norm {update.norm:.3g} is over {FACTOR:g} times that of other updates, for which {compared} "
                    "is usual"
                )
        return found

    def _arrived_norms(self) -> dict[PeerId, UpdateNorm]:
        """Return the norms of the members' updates that have arrived for the current round."""
        members = self._current_membership()
        if self.round is None or members is None:
            return {}
        return {
            peer: UpdateNorm(self._updates[self.round, peer].norm, weight)
            for peer, weight in members.weights.items()
            if (self.round, peer) in self._updates
        }

    def drop_members(self) -> tuple[PeerId, ...]:
        """Forget the members of the current round, of which none has sent an update; return them."""
        members = None if self.round is None else self._members.pop(self.round, None)
        return () if members is None else tuple(members.weights)

    def close_round(self) -> CompleteRound:
        """End the current round with the updates that have arrived, and begin the next.

        Raises:
            EmptyRoundError: no member's update has arrived.
        """
        members = self._current_membership()
        if self.round is None or members is None:
            raise EmptyRoundError("no round has begun")
        number, norms = self.round, self._arrived_norms()
        if not norms:
            raise EmptyRoundError(
                f"no update of round {number} arrived from its {len(members.weights)} members in time"
            )
        updates = tuple((peer, self._use(number, peer), norm.samples) for peer, norm in norms.items())
        missing = tuple(peer for peer in members.weights if peer not in norms)
        self._norms.append(norms.values())
        self._members.pop(number, None)
        self._refused = {refused for refused in self._refused if refused[0] > number}
        self.round = number + 1
        return CompleteRound(number, updates, missing)

    def _use(self, number: int, peer: PeerId) -> Path:
        update = self._updates.pop((number, peer))
        self._used.setdefault(peer, set()).add(update.digest)
        return update.path

    def is_late(self, peer: PeerId, round_number: int) -> bool:
        """Return whether this is an update for a round that is over, or that continues without its sender.

        It is late, or is sent again because its receipt was lost. It does not count, but it is no error either: its
        sender receives the outer update as the members do, and continues.
        """
        if self.round is None or peer not in self.senders:
            return False
        membership = self._members.get(round_number)
        return round_number < self.round or (membership is not None and peer not in membership.weights)

    def _current_membership(self) -> _Membership | None:
        return None if self.round is None else self._members.get(self.round)

    def _drop_nonmembers(self, number: int, members: Iterable[PeerId]) -> list[Path]:
        keep = set(members)
        removed = [key for key in self._updates if key[0] == number and key[1] not in keep]
        return [self._updates.pop(key).path for key in removed]
