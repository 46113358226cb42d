"""Events of a DiLoCo job: what is reported about rounds and members, as effects. Pure."""

from __future__ import annotations

from typing import Final

from hypha_net import instrumentation
from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import Effects, EmitEvent, PostMetric
from hypha_scheduler.strategies.diloco.records import RefusedRecord
from hypha_scheduler.strategies.diloco.round_effects import Measured, RoundClosed

WEIGHTS_FETCHED: Final = "weights_fetched"
"""Metric of a worker whose weights had another digest than the scheduler's, and which has fetched them anew."""
_SCHEDULER_METRICS: Final = frozenset({"samples", "batch_size", "utilisation"})
"""Metrics that the scheduler computes itself; reports of workers with these names are not posted."""
_ROUND_SECONDS: Final = instrumentation.Histogram("hypha.scheduler.round.duration", "s", "Duration of a job's rounds.")
_FETCHED: Final = instrumentation.Counter(
    "hypha.scheduler.weights.fetched", "{fetch}", "Weights that workers have fetched because theirs were other ones."
)
_REFUSED: Final = instrumentation.Counter(
    "hypha.scheduler.updates.refused", "{update}", "Updates of workers that were refused before the mean."
)
_CHANGES: Final = instrumentation.Counter(
    "hypha.scheduler.member.changes", "{change}", "Changes of a job's members: joined, late, restarted, paused, …"
)
_SAMPLES: Final = instrumentation.Counter("hypha.scheduler.samples", "{sample}", "Samples of closed rounds.")


def measured_effects(measured: Measured) -> Effects:
    """Report the metrics of a worker over a round."""
    effects: list[EmitEvent | PostMetric] = []
    if WEIGHTS_FETCHED in measured.values:
        _FETCHED.add(1)
        effects.append(EmitEvent(WEIGHTS_FETCHED, {"worker": str(measured.peer), "round": measured.round}))
    for name, value in measured.values.items():
        fields = {"worker": str(measured.peer), "round": measured.round, "name": name, "value": value}
        effects.append(EmitEvent("metric", fields))
        if name not in _SCHEDULER_METRICS:
            effects.append(PostMetric(measured.peer, measured.round, name, value))
    return tuple(effects)


def member_event(name: str, reason: str, **fields: object) -> EmitEvent:
    """Report a change of the members of a job, or a pause of it."""
    _CHANGES.add(1, {"hypha.event": name})
    return EmitEvent(name, {**fields, "reason": reason})


def suspected_event(peer: PeerId, round_number: int, seconds: float) -> EmitEvent:
    """Report that a worker has been silent for longer than its own rhythm explains; the round still waits for it."""
    reason = f"silent for {seconds:.1f} s, longer than a few of its batches take"
    return _silence_event("worker_suspected", reason, peer, round_number, seconds)


def late_event(peer: PeerId, round_number: int, seconds: float) -> EmitEvent:
    """Report that a round continues without a late worker; no round waits for it until it reports again."""
    reason = f"the round continued without it after {seconds:.1f} s"
    return _silence_event("worker_late", reason, peer, round_number, seconds)


def _silence_event(name: str, reason: str, peer: PeerId, round_number: int, seconds: float) -> EmitEvent:
    return member_event(name, reason, worker=str(peer), round=round_number, seconds=round(seconds, 4))


def replaced_event(peer: PeerId, role: str, reason: str) -> EmitEvent:
    """Report that another peer is sought in place of a worker or of the parameter server."""
    return member_event("worker_replaced", reason, worker=str(peer), role=role)


def continued_event(seconds: float, reason: str) -> EmitEvent:
    """Report the end of a pause of `seconds`."""
    return member_event("continued", reason, seconds=round(seconds, 3))


def refused_event(refused: RefusedRecord, count: int) -> EmitEvent:
    """Report an update that does not count, the `count`-th of its worker."""
    _REFUSED.add(1)
    fields = {"round": refused.round, "worker": str(refused.worker), "reason": refused.reason, "count": count}
    return EmitEvent("update_refused", fields)


def round_closed_effects(closed: RoundClosed, update_bytes: int) -> Effects:
    """Report a closed round.

    Args:
        closed: the round.
        update_bytes: size of its outer update, and of each worker's update.
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
    return (event, *_posts(closed))


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
