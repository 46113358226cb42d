"""Backoff of peers that offered a lease and then did not grant it. Pure; the clock and randomness are passed in."""

from __future__ import annotations

from random import Random
from typing import Final

from hypha_proto.ids import PeerId

FIRST_PAUSE: Final = 1.0
"""Seconds for which a peer is left out after its first failure; doubled with each further one."""
LONGEST_PAUSE: Final = 60.0
_JITTER: Final = (0.75, 1.25)


class PeerBackoff:
    """Pauses by peer, whatever the role: honest peers recover quickly, cheats are left out for ever longer."""

    def __init__(self, random: Random) -> None:
        """Start without failures."""
        self._random = random
        self._failures: dict[PeerId, int] = {}
        self._until: dict[PeerId, float] = {}

    def record_failure(self, peer: PeerId, now: float) -> float:
        """Count a failure; return the pause in seconds that begins now."""
        count = self._failures.get(peer, 0)
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(count, 16)) * self._random.uniform(*_JITTER)
        self._failures[peer] = count + 1
        self._until[peer] = now + pause
        return pause

    def is_left_out(self, peer: PeerId, now: float) -> bool:
        """Return whether a pause of `peer` has not ended yet."""
        return now < self._until.get(peer, now)

    def failures(self, peer: PeerId) -> int:
        """Return how often `peer` failed."""
        return self._failures.get(peer, 0)
