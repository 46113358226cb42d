"""Which workers a job avoids, how long, and when it uses one all the same. Pure; the clock is passed in.

A peer at which attempts fail one after the other is excluded for a while. Work may avoid further peers, such as those
at which it failed itself. If it avoids all that the job holds, another is sought for `PATIENCE` seconds; then it starts
at any of them. Operators record how attempts end, and pass the avoided peers on in `auction.RoleRequest`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import Effects, EmitEvent

FIRST_EXCLUSION: Final = 60.0
"""Seconds for which a peer is excluded; doubled each time until an attempt succeeds there."""
LONGEST_EXCLUSION: Final = 960.0
PATIENCE: Final = 3.0
"""Seconds for which another worker is sought before work starts at one that it avoids."""
_ALONE: Final = 30.0
"""Seconds for which no other worker is sought again after none was found."""

_Place = tuple[str, PeerId]
"""Role and peer."""


@dataclass(slots=True)
class _WorkerSearch:
    """A search for another worker."""

    work: str
    """Name of the work that avoids all workers which are held."""
    avoided: frozenset[PeerId]
    ends: float | None = None
    """When the work may start at any; None while no other can be found, because all leases are held that may be."""


@dataclass(slots=True)
class Avoidance:
    """The workers that one job avoids, by role.

    Repeated failures of the same work count once, since the work may be at fault, unless another peer succeeded with
    it. When an exclusion ends, one more failure renews it.
    """

    limit: int
    """Failures in a row for which a peer is excluded."""
    _excluded: Counter[_Place] = field(default_factory=Counter)
    """How often each peer was excluded."""
    _why: dict[_Place, str] = field(default_factory=dict)
    """Why it was the last time."""
    _failed: defaultdict[_Place, Counter[str | None]] = field(default_factory=lambda: defaultdict(Counter))
    """Attempts that failed since the last success, by the name of what they were to do."""
    _reasons: dict[_Place, str] = field(default_factory=dict)
    _done: set[tuple[str, str]] = field(default_factory=set)
    """Role and name of what has succeeded."""
    _proven: set[_Place] = field(default_factory=set)
    _times: Counter[_Place] = field(default_factory=Counter)
    """Exclusions since the last success."""
    _until: dict[_Place, float] = field(default_factory=dict)
    _searches: dict[str, _WorkerSearch] = field(default_factory=dict)
    """By role."""
    _alone: dict[str, tuple[frozenset[PeerId], float]] = field(default_factory=dict)
    """Peers beside which none was found, by role, and how long no other is sought before they are used."""

    # ------------------------------------------------------------------------------------------------------ exclusions

    def record_failure(self, role: str, peer: PeerId, work: str | None, reason: str, now: float) -> Effects:
        """Count a failed attempt; return the event of an exclusion that begins by it.

        Without the name of its work each failure counts.
        """
        place = (role, peer)
        self._failed[place][work] += 1
        self._reasons[place] = reason
        return self._judge(place, now)

    def record_success(self, role: str, peer: PeerId, work: str, now: float) -> Effects:
        """Forget the failures of a peer; return events of exclusions of others that fail at the same work."""
        place = (role, peer)
        for left in (self._failed, self._reasons, self._times, self._until):
            left.pop(place, None)
        self._proven.add(place)
        self._done.add((role, work))
        others = [other for other, failed in self._failed.items() if other[0] == role and failed[work] > 1]
        return tuple(event for other in others for event in self._judge(other, now))

    def _judge(self, place: _Place, now: float) -> Effects:
        role, peer = place
        failed = self._failed[place]
        failures = sum(1 if work and (role, work) not in self._done else count for work, count in failed.items())
        if failures < self.limit or self.is_excluded(role, peer, now):
            return ()
        return self._exclude(place, failures, now)

    def exclude(self, role: str, peer: PeerId, reason: str, now: float) -> Effects:
        """Exclude a peer whatever has failed there; return the event, none if it is excluded already."""
        self._reasons[role, peer] = reason
        if self.is_excluded(role, peer, now):
            return ()
        return self._exclude((role, peer), self._failed[role, peer].total(), now)

    def _exclude(self, place: _Place, failures: int, now: float) -> Effects:
        role, peer = place
        seconds = min(LONGEST_EXCLUSION, FIRST_EXCLUSION * 2.0 ** min(self._times[place], 16))
        self._times[place] += 1
        self._until[place] = now + seconds
        self._excluded[place] += 1
        self._why[place] = self._reasons[place]
        fields = {"worker": str(peer), "role": role, "failures": failures, "seconds": seconds}
        return (EmitEvent("worker_excluded", {**fields, "reason": self._reasons[place]}),)

    def is_excluded(self, role: str, peer: PeerId, now: float) -> bool:
        """Return whether a peer is excluded now."""
        return now < self._until.get((role, peer), now)

    def is_proven(self, role: str, peer: PeerId) -> bool:
        """Return whether an attempt has succeeded at a peer."""
        return (role, peer) in self._proven

    def may_be_at_fault(self, role: str, failed_at: Iterable[PeerId], others: Iterable[PeerId]) -> bool:
        """Return whether failures of one work may be those of the peers at which it failed.

        They may if no attempt has ever succeeded at these, and one has at another that is held: that one gets it, then.
        """
        proven = {peer for other, peer in self._proven if other == role}
        return proven.isdisjoint(failed_at) and not proven.isdisjoint(others)

    def failed(self, role: str) -> frozenset[PeerId]:
        """Return the peers at which attempts have failed since the last success there."""
        return frozenset(peer for other, peer in self._reasons if other == role)

    def excluded(self, role: str, now: float) -> frozenset[PeerId]:
        """Return the peers that a role excludes now."""
        return frozenset(peer for (other, peer), until in self._until.items() if other == role and now < until)

    # --------------------------------------------------------------------------------------------------------- searches

    def seek_other(
        self, role: str, work: str, avoided: frozenset[PeerId], now: float, *, may_be_found: bool = True
    ) -> None:
        """Seek another worker for work that avoids all which are held; nothing changes if it is sought already.

        Without `may_be_found` the time begins later, as the job holds all the leases that it may.
        """
        search = self._searches.get(role)
        if search is None or search.work != work:
            search = self._searches[role] = _WorkerSearch(work, avoided)
        search.avoided = avoided
        if not may_be_found:
            search.ends = None
        elif search.ends is None:
            search.ends = now + PATIENCE
        elif search.ends <= now:
            self._alone[role] = (avoided, now + _ALONE)

    def stop_seeking(self, role: str) -> None:
        """Seek no other worker any more: what is held can be used."""
        self._searches.pop(role, None)

    def sought_for(self, role: str) -> str | None:
        """Return the work for which another worker is sought, or None."""
        search = self._searches.get(role)
        return None if search is None else search.work

    def note_found(self, role: str, peer: PeerId) -> None:
        """Note that a lease was found at a peer."""
        if peer not in self._alone.get(role, (frozenset(), 0.0))[0]:
            self._alone.pop(role, None)

    def gives_in(self, role: str, now: float) -> bool:
        """Return whether another worker was sought in vain: the work starts at one that it avoids."""
        search = self._searches.get(role)
        if search is None:
            return False
        if search.ends is not None and search.ends <= now:
            return True
        avoided, until = self._alone.get(role, (frozenset(), 0.0))
        return now < until and avoided <= search.avoided

    def give_in(self, now: float) -> bool:
        """Stop all searches in vain, as no other worker was found; return whether there are any."""
        waiting = [search for search in self._searches.values() if search.ends is None or search.ends > now]
        for search in waiting:
            search.ends = now
        return bool(waiting)

    def unwanted(self, role: str, now: float) -> frozenset[PeerId]:
        """Return the peers of which no lease is wanted: none if another was sought in vain."""
        if self.gives_in(role, now):
            return frozenset()
        search = self._searches.get(role)
        return self.excluded(role, now) | (frozenset() if search is None else search.avoided)

    def next_deadline(self, now: float) -> float | None:
        """Return when work may start at workers that it avoids, or an exclusion ends; None if neither is to come."""
        times = (*(search.ends for search in self._searches.values()), *self._until.values())
        return min((at for at in times if at is not None and at > now), default=None)

    # ---------------------------------------------------------------------------------------------------------- summary

    def summary(self) -> list[dict[str, object]]:
        """Return the excluded workers for ``result.json``, each once with how often it was excluded."""
        return [
            {"worker": str(peer), "role": role, "times": times, "reason": self._why[role, peer]}
            for (role, peer), times in self._excluded.items()
        ]
