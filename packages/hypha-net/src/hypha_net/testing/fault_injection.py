"""What lies between two nodes in memory: delay, jitter, loss, breaks and partitions, from one seeded generator.

Belongs to `MemoryNetwork`, which asks it about every message and every write.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypha_proto.ids import PeerId


@dataclass(slots=True)
class Faults:
    """What goes wrong on a link, changeable while the network runs."""

    delay: float = 0.0
    """Seconds that opening a stream, every write and every gossip delivery take."""
    jitter: float = 0.0
    """Up to so many seconds more, each time; gossip messages overtake each other by it, bytes of a stream do not."""
    gossip_loss: float = 0.0
    """Share of gossip deliveries that are lost."""
    break_rate: float = 0.0
    """Share of writes on which the connection breaks off instead."""
    refuse_rate: float = 0.0
    """Share of dials that fail although the peer is there."""


_Pair = frozenset[PeerId]


@dataclass(slots=True)
class Links:
    """Every link of a network: as `usual`, unless it was given faults of its own or is cut."""

    seed: int
    usual: Faults
    _own: dict[_Pair, Faults] = field(default_factory=dict)
    _cut: set[_Pair] = field(default_factory=set)
    _islands: dict[PeerId, int] = field(default_factory=dict)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(f"links/{self.seed}")

    def between(self, one: PeerId, other: PeerId) -> Faults:
        """The faults between two nodes."""
        return self._own.get(frozenset((one, other)), self.usual) if self._own else self.usual

    def set(self, one: PeerId, other: PeerId, faults: Faults | None) -> None:
        """Give a link faults of its own; none: as usual again."""
        if faults is None:
            self._own.pop(frozenset((one, other)), None)
        else:
            self._own[frozenset((one, other))] = faults

    def cut(self, one: PeerId, other: PeerId) -> None:
        """Let nothing pass between two nodes."""
        self._cut.add(frozenset((one, other)))

    def mend(self, one: PeerId, other: PeerId) -> None:
        """Undo `cut`."""
        self._cut.discard(frozenset((one, other)))

    def divide(self, islands: Iterable[Iterable[PeerId]]) -> None:
        """Let nothing pass between islands; who is named in none of them is on an island with all the others."""
        self._islands = {peer: number for number, island in enumerate(islands, 1) for peer in island}

    def passes(self, one: PeerId, other: PeerId) -> bool:
        """Whether anything gets from one node to the other."""
        if self._cut and frozenset((one, other)) in self._cut:
            return False
        return not self._islands or self._islands.get(one, 0) == self._islands.get(other, 0)

    def happens(self, share: float) -> bool:
        """Whether something of this probability happens now."""
        return share > 0 and self._random.random() < share

    def lag(self, faults: Faults) -> float:
        """Seconds that something takes now."""
        return faults.delay + self._random.random() * faults.jitter if faults.jitter else faults.delay
