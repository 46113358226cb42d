"""Exclusion of workers on which attempts of a job fail one after the other. Pure; the clock is passed in.

Operators of strategies record how attempts end, and pass the excluded peers on in `auction.RoleRequest`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.ids import PeerId

FIRST_EXCLUSION: Final = 60.0
"""Seconds for which a peer is excluded; doubled each time until an attempt succeeds there."""
LONGEST_EXCLUSION: Final = 960.0

_Place = tuple[str, PeerId]
"""Role and peer."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A peer that a role excludes."""

    role: str
    peer: PeerId
    failures: int
    """Failures in a row that count against it."""
    reason: str
    """Of the last failure."""
    seconds: float

    def fields(self) -> dict[str, object]:
        """Return what an event says of it."""
        return {
            "worker": str(self.peer),
            "role": self.role,
            "failures": self.failures,
            "seconds": self.seconds,
            "reason": self.reason,
        }


@dataclass(slots=True)
class Exclusions:
    """Failures in a row by role and peer, and the peers that are excluded for them.

    Repeated failures of the same work count once, since the work may be at fault, unless another peer succeeded with
    it. When an exclusion ends, one more failure renews it.
    """

    limit: int
    """Failures in a row for which a peer is excluded."""
    history: list[Exclusion] = field(default_factory=list)
    _failed: defaultdict[_Place, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Attempts that failed since the last success, by the name of what they were to do."""
    _reasons: dict[_Place, str] = field(default_factory=dict)
    _done: set[tuple[str, str]] = field(default_factory=set)
    """Role and name of what has succeeded."""
    _proven: set[_Place] = field(default_factory=set)
    _times: Counter[_Place] = field(default_factory=Counter)
    """Exclusions since the last success."""
    _until: dict[_Place, float] = field(default_factory=dict)

    def record_failure(self, role: str, peer: PeerId, work: str, reason: str, now: float) -> tuple[Exclusion, ...]:
        """Count a failed attempt; return the exclusion that begins by it, if one does."""
        place = (role, peer)
        self._failed[place][work] += 1
        self._reasons[place] = reason
        return self._judge(place, now)

    def record_success(self, role: str, peer: PeerId, work: str, now: float) -> tuple[Exclusion, ...]:
        """Forget the failures of a peer; return exclusions of others that have failed at the same work repeatedly."""
        place = (role, peer)
        for left in (self._failed, self._reasons, self._times, self._until):
            left.pop(place, None)
        self._proven.add(place)
        self._done.add((role, work))
        others = [other for other, failed in self._failed.items() if other[0] == role and failed[work] > 1]
        return tuple(exclusion for other in others for exclusion in self._judge(other, now))

    def _judge(self, place: _Place, now: float) -> tuple[Exclusion, ...]:
        role, peer = place
        failed = self._failed[place]
        failures = sum(count if (role, work) in self._done else 1 for work, count in failed.items())
        if failures < self.limit or self.is_excluded(role, peer, now):
            return ()
        return self._exclude(place, failures, now)

    def exclude(self, role: str, peer: PeerId, reason: str, now: float) -> tuple[Exclusion, ...]:
        """Exclude a peer whatever has failed there; return the exclusion unless it is excluded already."""
        self._reasons[role, peer] = reason
        if self.is_excluded(role, peer, now):
            return ()
        return self._exclude((role, peer), self._failed[role, peer].total(), now)

    def _exclude(self, place: _Place, failures: int, now: float) -> tuple[Exclusion, ...]:
        role, peer = place
        seconds = min(LONGEST_EXCLUSION, FIRST_EXCLUSION * 2.0 ** min(self._times[place], 16))
        self._times[place] += 1
        self._until[place] = now + seconds
        exclusion = Exclusion(role, peer, failures, self._reasons[place], seconds)
        self.history.append(exclusion)
        return (exclusion,)

    def is_excluded(self, role: str, peer: PeerId, now: float) -> bool:
        """Return whether a peer is excluded now."""
        return now < self._until.get((role, peer), now)

    def is_proven(self, role: str, peer: PeerId) -> bool:
        """Return whether an attempt has succeeded at a peer."""
        return (role, peer) in self._proven

    def peers(self, role: str, now: float) -> frozenset[PeerId]:
        """Return the peers that a role excludes now."""
        return frozenset(peer for (other, peer), until in self._until.items() if other == role and now < until)

    def next_end(self, now: float) -> float | None:
        """Return when the next exclusion ends, or None."""
        return min((until for until in self._until.values() if until > now), default=None)

    def summary(self) -> list[dict[str, object]]:
        """Return the excluded workers for ``result.json``, each once with how often it was excluded."""
        times = Counter((exclusion.role, exclusion.peer) for exclusion in self.history)
        last = {(exclusion.role, exclusion.peer): exclusion for exclusion in self.history}
        return [
            {"worker": str(peer), "role": role, "times": times[role, peer], "reason": found.reason}
            for (role, peer), found in last.items()
        ]
