"""Peers that have sent other content than they had announced. Pure.

Called by `content_holders`, which asks them last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from hypha_net import instrumentation
from hypha_net.content_directory import ContentHolder
from hypha_proto.ids import PeerId

MAX_COUNTED: Final = 1000
"""Peers whose bad content is counted."""
_BAD: Final = instrumentation.Counter(
    "hypha.worker.content.bad", "{file}", "Files whose holder sent other content than it had announced."
)


@dataclass(slots=True)
class HolderFaults:
    """How often each peer has sent other content than it had announced."""

    _counts: Counter[PeerId] = field(default_factory=Counter)

    def count(self, peer: PeerId) -> None:
        """Count a fault of a peer."""
        if peer in self._counts or len(self._counts) < MAX_COUNTED:
            self._counts[peer] += 1
        _BAD.add(1, {"hypha.peer.id": str(peer)})

    def without_faults(self, holders: Sequence[ContentHolder]) -> list[PeerId]:
        """Return the ids of the holders of which no fault was counted."""
        return [holder.peer for holder in holders if not self._counts[holder.peer]]

    def sorted(self, holders: Sequence[ContentHolder]) -> list[PeerId]:
        """Return the holders' ids, those with the fewest faults first."""
        return sorted((holder.peer for holder in holders), key=lambda peer: self._counts[peer])
