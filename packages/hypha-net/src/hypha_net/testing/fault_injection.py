"""Fault injection on the links of the in-memory network: delay, jitter, loss, breaks and partitions, from one seed.

`MemoryNetwork` consults it for every message and every write.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypha_proto.ids import PeerId


@dataclass(slots=True)
class Faults:
    """Faults of a link; may be changed while the network runs."""

    delay: float = 0.0
    """Seconds that connecting, opening a stream, each write and each gossip delivery take.

    Over an open connection a request is sent as its stream is opened, so with its response it takes twice as long.
    """
    jitter: float = 0.0
    """Largest random extra delay in seconds; it reorders gossip messages, but not the bytes of a stream."""
    gossip_loss: float = 0.0
    """Probability that a gossip delivery is lost."""
    break_rate: float = 0.0
    """Probability that a write breaks the connection instead."""
    refuse_rate: float = 0.0
    """Probability that a dial fails although the peer is reachable."""


_Pair = frozenset[PeerId]


@dataclass(slots=True)
class Links:
    """All links of a network: with the `default` faults, unless a link has its own or is cut."""

    seed: int
    default: Faults
    _own: dict[_Pair, Faults] = field(default_factory=dict)
    _cut: set[_Pair] = field(default_factory=set)
    _islands: dict[PeerId, int] = field(default_factory=dict)
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(f"links/{self.seed}")

    def between(self, one: PeerId, other: PeerId) -> Faults:
        """Return the faults between two nodes."""
        return self._own.get(frozenset((one, other)), self.default) if self._own else self.default

    def set(self, one: PeerId, other: PeerId, faults: Faults | None) -> None:
        """Set the faults of one link; None restores the default."""
        if faults is None:
            self._own.pop(frozenset((one, other)), None)
        else:
            self._own[frozenset((one, other))] = faults

    def cut(self, one: PeerId, other: PeerId) -> None:
        """Block all traffic between two nodes."""
        self._cut.add(frozenset((one, other)))

    def restore(self, one: PeerId, other: PeerId) -> None:
        """Undo `cut`."""
        self._cut.discard(frozenset((one, other)))

    def divide(self, islands: Iterable[Iterable[PeerId]]) -> None:
        """Block all traffic between islands; all nodes that are not named form one more island."""
        self._islands = {peer: number for number, island in enumerate(islands, 1) for peer in island}

    def is_open(self, one: PeerId, other: PeerId) -> bool:
        """Return whether traffic passes between two nodes."""
        if self._cut and frozenset((one, other)) in self._cut:
            return False
        return not self._islands or self._islands.get(one, 0) == self._islands.get(other, 0)

    def occurs(self, probability: float) -> bool:
        """Draw whether an event of this probability occurs."""
        return probability > 0 and self._random.random() < probability

    def draw_delay(self, faults: Faults) -> float:
        """Draw a delay in seconds."""
        return faults.delay + self._random.random() * faults.jitter if faults.jitter else faults.delay
