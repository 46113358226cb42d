"""Shortage of workers in words and numbers: why how many peers are not suitable for a role. Pure.

The auction records why it rejected offers; `shortage_report` asks the workers and reports the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.leases import Rejection
from hypha_proto.resources import RESOURCE_UNITS, Resources
from hypha_proto.texts import shorten
from hypha_scheduler.allocation.auction import DENIED, EXCLUDED

BUSY: Final = "busy"
"""Code of a worker that has enough, but not of what is free of it."""
TAKEN: Final = "taken"
"""Code of a peer that already has another role of this job."""
_ORDER: Final = (
    "draining",
    "paused",
    "not-allowed",
    "executor",
    *RESOURCE_UNITS,
    "price",
    "quota",
    BUSY,
    DENIED,
    EXCLUDED,
    TAKEN,
)
"""Codes by how hard the reason is to remove: of several reasons of one peer, the first one counts."""
_WORDS: Final = {
    "not-allowed": "closed to this scheduler",
    "executor": "without the executor",
    "gpu": "with too little GPU memory",
    "cpu": "with too few cores",
    "memory": "with too little memory",
    "storage": "with too little storage",
    "price": "above the price",
    "quota": "at the limit for this scheduler",
    DENIED: "did not grant an offer",
    TAKEN: "in another role of this job",
}
"""Codes that are no words for people."""
_PERMANENT: Final = ("draining", "paused", "not-allowed", "executor", *RESOURCE_UNITS, "price", "quota")
"""Codes of reasons that stay when other schedulers give their leases back."""
_MAX_REASONS: Final = 8
"""Reasons of one peer that are read."""


@dataclass(frozen=True, slots=True)
class LeaseCount:
    """Leases of one role that a job holds and wants."""

    held: int
    wanted: int
    minimum: int
    """Number without which the job does not go on."""

    @property
    def needed(self) -> int:
        """Number of further leases without which the job does not go on."""
        return max(0, self.minimum - self.held)

    def __str__(self) -> str:
        return f"{self.held} of {self.wanted} held" + (f", {self.needed} more needed" if self.needed else "")


@dataclass(frozen=True, slots=True)
class Shortage:
    """Number of peers that are suitable for a role, and of those that are not, by reason."""

    role: str
    suitable: int
    known: int
    """Peers that answered or made an offer."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Peers that are not suitable, by the code of their most important reason."""
    largest: Mapping[str, float] = field(default_factory=dict)
    """Largest amount that one of them has of a resource of which it has too little."""
    wanted: Resources = field(default_factory=Resources)
    leases: LeaseCount | None = None
    """How many leases of the role there are."""

    def __str__(self) -> str:
        ranked = sorted(self.counts.items(), key=lambda entry: (entry[0] != BUSY, -entry[1], _position(entry[0])))
        causes = ", ".join(f"{count} {_WORDS.get(code, code)}{self._amount(code)}" for code, count in ranked)
        there = f"{self.leases}; " if self.leases is not None else ""
        return f"{there}{self.suitable} of {self.known} suitable" + (f": {causes}" if causes else "")

    def _amount(self, code: str) -> str:
        if code == BUSY:  # first, since these would let the job run
            return " until their leases end"
        if code not in self.largest:
            return ""
        return f" ({self.largest[code]:g} of {getattr(self.wanted, code):g} {RESOURCE_UNITS[code]})"


Answers = Mapping[tuple[PeerId, str], tuple[Rejection, ...]]
"""Reasons against an offer, by peer and role; none if the peer would make one."""


def count_reasons(role: str, wanted: Resources, answers: Answers, held: Mapping[PeerId, str]) -> Shortage:
    """Count the reasons against offers for `role`.

    Args:
        role: the role that lacks workers.
        wanted: the resources that it requires.
        answers: answers of workers, and why their offers were rejected.
        held: roles for which leases are held, by peer.
    """
    counts: Counter[str] = Counter()
    largest: dict[str, float] = {}
    peers = {*held, *(peer for peer, other in answers if other == role)}
    for peer in peers:
        rejection = _most_important(answers.get((peer, role), ())) if peer not in held else _taken(held[peer], role)
        if rejection is not None:
            counts[rejection.code] += 1
            if rejection.code in RESOURCE_UNITS and rejection.available is not None:
                largest[rejection.code] = max(largest.get(rejection.code, 0.0), rejection.available)
    return Shortage(role, len(peers) - counts.total(), len(peers), dict(counts), largest, wanted)


def _taken(held: str, role: str) -> Rejection | None:
    return None if held == role else Rejection(code=TAKEN, text="")


def _most_important(answer: Sequence[Rejection]) -> Rejection | None:
    """Return the reason by which a peer is counted; None if it would make an offer."""
    return min(answer[:_MAX_REASONS], key=lambda entry: _position(entry.code), default=None)


def may_become_suitable(answer: Sequence[Rejection]) -> bool:
    """Return whether a worker makes no offer because of leases that others may release, or for an unknown reason."""
    rejection = _most_important(answer)
    return rejection is not None and rejection.code not in _PERMANENT


def _position(code: str) -> int:
    return _ORDER.index(code) if code in _ORDER else len(_ORDER)


def describe_peers(answers: Answers, held: Mapping[PeerId, str]) -> list[str]:
    """Return a line for each peer with all its reasons."""
    texts: dict[PeerId, list[str]] = {}
    for (peer, role), answer in answers.items():
        reasons = (shorten(rejection.text, 200) for rejection in answer[:_MAX_REASONS])
        texts.setdefault(peer, []).extend(f"{role}: {reason}" for reason in reasons)
    for peer, role in held.items():
        texts[peer] = [f"taken for {role} already: each part of a job runs on a worker of its own"]
    return [f"{peer}: {'; '.join(found) or 'would make an offer now'}" for peer, found in sorted(texts.items())]


def hint_for_unlisted(role: str, bid: float) -> str:
    """Explain likely reasons of workers that were not found or did not answer."""
    return (
        f"workers that are not named here made no offer for {role}: the bid of {bid:g} may be under their price or "
        "floor (raise the bid), or they lack required resources"
    )
