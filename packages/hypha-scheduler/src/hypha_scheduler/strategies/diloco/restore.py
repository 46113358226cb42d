"""Journal records of a DiLoCo job, and the state that they restore. Pure.

Each closed round is one record. Samples of rounds that were not closed are not counted; their slices are used again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from hypha_proto.ids import PeerId
from hypha_scheduler.errors import JobFailedError
from hypha_scheduler.strategies.diloco.rounds import RoundClosed
from hypha_scheduler.strategies.diloco.slices import Assignment

ROUND: Final = "round"


@dataclass(slots=True)
class Restored:
    """State after the last closed round of an interrupted run."""

    closed: int = 0
    """Last closed round."""
    samples: Counter[PeerId] = field(default_factory=Counter)
    batches: Counter[PeerId] = field(default_factory=Counter)
    loss: float | None = None
    used_slices: list[Assignment] = field(default_factory=list)


def round_record(closed: RoundClosed, used: Sequence[Assignment]) -> Mapping[str, object]:
    """Return the fields of the record of a closed round."""
    return {
        "round": closed.round,
        "samples": sum(closed.samples.values()),
        "loss": closed.loss,
        "workers": {str(peer): [count, closed.batches[peer]] for peer, count in closed.samples.items()},
        "slices": [[found.epoch, found.index] for found in used],
    }


def restore(journal: Iterable[Mapping[str, Any]]) -> Restored:
    """Return the state after the records of a journal.

    Raises:
        JobFailedError: a record of a round is malformed or not the one that follows.
    """
    state, parse_peer = Restored(), cache(PeerId.parse)
    for record in journal:
        if record.get("record") != ROUND:
            continue
        try:
            _add_round(state, record, parse_peer)
        except (KeyError, TypeError, ValueError) as error:
            raise JobFailedError(f"journal: the record of round {state.closed + 1} is malformed: {error!r}") from None
    return state


def _add_round(state: Restored, record: Mapping[str, Any], parse_peer: Callable[[str], PeerId]) -> None:
    if record["round"] != state.closed + 1:
        raise ValueError(f"it is of round {record['round']}")
    for text, (samples, batches) in record["workers"].items():
        peer = parse_peer(text)
        state.samples[peer] += samples
        state.batches[peer] += batches
    state.used_slices += [Assignment(epoch, index) for epoch, index in record["slices"]]
    state.closed += 1
    state.loss = record["loss"]
