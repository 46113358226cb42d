"""Journal records that a DiLoCo job writes, read by `restore`, the audit and the replay. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import to_builtins

from hypha_proto.contributions import Contribution
from hypha_proto.ids import PeerId
from hypha_scheduler.strategies.base import WriteJournal
from hypha_scheduler.strategies.diloco.contributions import MemberUpdate, Refused, UnusedUpdate
from hypha_scheduler.strategies.diloco.restore import ANNOUNCED, CONTRIBUTED, JOINED, LEFT, REFUSED, ROUND, TERM
from hypha_scheduler.strategies.diloco.result_model import Advance
from hypha_scheduler.strategies.diloco.sample_ledger import SampleSpan


def term_record(
    term: int,
    server: PeerId,
    workers: Iterable[PeerId] = (),
    members: Mapping[PeerId, int] | None = None,
    *,
    scheduled_for: int | None = None,
    continues: bool = False,
) -> WriteJournal:
    """Record the appointment of a parameter server, and the workers with which it begins.

    Args:
        term: its term.
        server: the parameter server.
        workers: the workers.
        members: member number of each worker; None for their positions.
        scheduled_for: number of workers that the learning-rate schedule is made for; None for that of `workers`.
        continues: whether it takes the place of another one while the workers train on.
    """
    listed = list(workers)
    fields: dict[str, object] = {"term": term, "server": str(server), "workers": [str(peer) for peer in listed]}
    if members is not None:
        fields["members"] = [members[peer] for peer in listed]
    if scheduled_for is not None:
        fields["scheduled_for"] = scheduled_for
    return WriteJournal(TERM, {**fields, "continues": True} if continues else fields)


def joined_record(worker: PeerId, member: int, number: int | None = None) -> WriteJournal:
    """Record the member number of a worker whose executor is to be started, or the round with which that begins."""
    return WriteJournal(JOINED, {"worker": str(worker), "member": member, "round": number})


def left_record(worker: PeerId, reason: str) -> WriteJournal:
    """Record that a worker was lost or released, or has left."""
    return WriteJournal(LEFT, {"worker": str(worker), "reason": reason})


def contributed_record(update: MemberUpdate) -> WriteJournal:
    """Record the update of a worker, before it is told that it may send it."""
    fields = {"worker": str(update.peer), "round": update.round, "samples": update.samples, "batches": update.batches}
    return WriteJournal(
        CONTRIBUTED,
        {**fields, "update": update.update, "ranges": _ranges(update.spans), "contribution": _stated(update.stated)},
    )


def refused_record(refused: Refused, *, dropped: bool) -> WriteJournal:
    """Record a refused update; with `dropped` its round goes on without the worker."""
    fields = {"worker": str(refused.peer), "round": refused.round, "reason": refused.reason}
    return WriteJournal(REFUSED, {**fields, "dropped": dropped})


def announced_record(number: int, term: int, members: Iterable[tuple[PeerId, int]]) -> WriteJournal:
    """Record the members of a round, before the parameter server is told."""
    listed = [[str(peer), samples] for peer, samples in members]
    return WriteJournal(ANNOUNCED, {"round": number, "term": term, "members": listed})


def round_record(
    number: int,
    term: int,
    updates: Sequence[MemberUpdate],
    unused: Sequence[UnusedUpdate],
    advance: Advance,
    loss: float | None,
) -> WriteJournal:
    """Record a round: which updates made it, and the weights before and after it."""
    return WriteJournal(
        ROUND,
        {
            "round": number,
            "term": term,
            "members": [_member(update) for update in updates],
            "unused": [
                {
                    "peer": str(update.peer),
                    "why": update.why,
                    "ranges": _ranges(update.spans),
                    "contribution": _stated(update.stated),
                }
                for update in unused
            ],
            "update": advance.update,
            "weights_before": advance.before,
            "weights": advance.weights,
            "loss": loss,
        },
    )


def _member(update: MemberUpdate) -> Mapping[str, object]:
    return {
        "peer": str(update.peer),
        "samples": update.samples,
        "batches": update.batches,
        "ranges": _ranges(update.spans),
        "contribution": _stated(update.stated),
        "update": update.update,
    }


def _ranges(spans: Iterable[SampleSpan]) -> list[list[int]]:
    return [[span.epoch, span.index, span.first, span.end] for span in spans]


def _stated(contribution: Contribution | None) -> Any:
    return None if contribution is None else to_builtins(contribution)
