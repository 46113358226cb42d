"""Events of a DiLoCo job: what is reported about rounds, as effects. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hypha_net import instrumentation
from hypha_scheduler.strategies.base import Effects, EmitEvent, PostMetric, WriteJournal
from hypha_scheduler.strategies.diloco.restore import round_record
from hypha_scheduler.strategies.diloco.rounds import Late, Left, Measured, RoundClosed
from hypha_scheduler.strategies.diloco.slices import Assignment

_SCHEDULER_METRICS: Final = frozenset({"samples", "batch_size", "utilisation"})
"""Metrics that the scheduler computes itself; reports of workers with these names are not posted."""
_ROUND_SECONDS: Final = instrumentation.Histogram("hypha.scheduler.round.duration", "s", "Duration of a job's rounds.")
_SAMPLES: Final = instrumentation.Counter("hypha.scheduler.samples", "{sample}", "Samples of closed rounds.")


def measured_effects(measured: Measured) -> Effects:
    """Report the metrics of a worker over a round."""
    effects: list[EmitEvent | PostMetric] = []
    for name, value in measured.values.items():
        fields = {"worker": str(measured.peer), "round": measured.round, "name": name, "value": value}
        effects.append(EmitEvent("metric", fields))
        if name not in _SCHEDULER_METRICS:
            effects.append(PostMetric(measured.peer, measured.round, name, value))
    return tuple(effects)


def late_event(late: Late) -> EmitEvent:
    """Report that a round continues without a late worker, which takes part again in the next."""
    return EmitEvent("worker_late", {"worker": str(late.peer), "round": late.round, "seconds": round(late.seconds, 4)})


def left_event(left: Left) -> EmitEvent:
    """Report that a draining worker has left after a round, in which its update counts."""
    return EmitEvent("worker_left", {"worker": str(left.peer), "round": left.round})


def round_closed_effects(closed: RoundClosed, update_bytes: int, used: Sequence[Assignment]) -> Effects:
    """Report a closed round.

    Args:
        closed: the round.
        update_bytes: size of its outer update, and of each worker's update.
        used: slices that were used up since the round before.
    """
    samples, members = sum(closed.samples.values()), len(closed.samples)
    event = EmitEvent(
        "round",
        {
            "round": closed.round,
            "samples": samples,
            "loss": closed.loss,
            "samples_per_second": round(samples / closed.seconds, 2) if closed.seconds > 0 else None,
            "seconds": round(closed.seconds, 4),
            "waits": {str(peer): round(wait, 4) for peer, wait in closed.waits.items()},
            "counts": {str(peer): count for peer, count in closed.batches.items()},
            "update_bytes": update_bytes * (2 * members + 1),  # from each member, and to each and the scheduler
        },
    )
    _ROUND_SECONDS.record(closed.seconds)
    _SAMPLES.add(samples)
    return (event, WriteJournal("round", round_record(closed, used)), *_posts(closed))


def _posts(closed: RoundClosed) -> list[PostMetric]:
    posts = []
    for peer, count in closed.samples.items():
        posts.append(PostMetric(peer, closed.round, "samples", count))
        if batches := closed.batches[peer]:
            posts.append(PostMetric(peer, closed.round, "batch_size", count / batches))
        if closed.seconds > 0:
            utilisation = max(0.0, 1.0 - closed.waits[peer] / closed.seconds)
            posts.append(PostMetric(peer, closed.round, "utilisation", utilisation))
    return posts
