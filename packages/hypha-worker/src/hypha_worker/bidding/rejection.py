"""Reasons against an offer, each in words for the operator and as a code for programs.

Pure. Of other schedulers' leases a reason reveals only that they hold too much (``busy``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from hypha_proto.ids import PeerId
from hypha_proto.leases import Rejection
from hypha_proto.offers import ExecutorDescriptor, WorkerRequest
from hypha_proto.resources import Resources
from hypha_worker.bidding.policy import OfferSection
from hypha_worker.executor_health import ExecutorHealth
from hypha_worker.leasing.capacity import Capabilities, Capacity
from hypha_worker.leasing.terms import LeaseUsage, Quota

MAX_EXECUTORS: Final = 8
"""Missing executors that are named; a request may ask for thousands."""


DRAINING: Final = Rejection(code="draining", text="this worker drains: it makes no more offers")
PAUSED: Final = Rejection(code="paused", text="its owner has paused this worker: it makes no offers")


def policy_reasons(policy: OfferSection, scheduler: PeerId, bid: float) -> Iterator[Rejection]:
    """Yield reasons in the owner's choice of schedulers and prices."""
    if not policy.is_allowed(scheduler):
        text = f"scheduler {scheduler} is not among offer.schedulers of this worker"
        yield Rejection(code="not-allowed", text=text)
    if policy.offer_price(bid) is None:
        text = f"the bid of {bid:g} is below {policy.least_bid:g}, the least this worker accepts"
        yield Rejection(code="price", text=text, required=policy.least_bid, available=bid)


def quota_reasons(quota: Quota, usage: LeaseUsage) -> Iterator[Rejection]:
    """Yield the limits of `quota` that the scheduler has reached."""
    for limit in quota.reached(usage):
        text = f"this scheduler has {limit.used}, and offer.{limit.key} of this worker is {limit.limit}"
        yield Rejection(code="quota", text=text, required=limit.used + 1.0, available=float(limit.limit))


def executor_reasons(capabilities: Capabilities, wanted: tuple[ExecutorDescriptor, ...]) -> Iterator[Rejection]:
    """Yield the executors of a request that this worker lacks, at most `MAX_EXECUTORS`."""
    configured = ", ".join(sorted(map(str, capabilities.executors))) or "none"
    for executor in capabilities.missing_executors(wanted)[:MAX_EXECUTORS]:
        text = f"executor {executor!s} is not configured; configured: {configured}"
        yield Rejection(code="executor", text=text)


def start_reasons(
    health: Mapping[ExecutorDescriptor, ExecutorHealth], wanted: tuple[ExecutorDescriptor, ...]
) -> Iterator[Rejection]:
    """Yield the executors of a request that are out of bids because they fail at their start."""
    known = [found for executor in wanted[:MAX_EXECUTORS] if (found := health.get(executor)) is not None]
    for name in dict.fromkeys(each.executor for each in known if each.exclusion is not None):
        text = f"executor {name} is out of bids, because it fails at its start"
        yield Rejection(code="executor", text=text)


def resource_reasons(
    policy: OfferSection, capabilities: Capabilities, request: WorkerRequest, free: Capacity
) -> Iterator[Rejection]:
    """Yield the resources of which the machine has too little, or too little at present."""
    wanted, sharded = request.spec.resources, capabilities.is_sharded(request.spec.executor)
    total = capabilities.capacity.available(sharded=sharded)
    lacking = total.lacking(wanted)
    for name in lacking:
        required, available = getattr(wanted, name), getattr(total, name)
        text = f"{name}: {required:g} requested, this worker has {available:g}"
        if name not in capabilities.capacity.resources.lacking(wanted):
            text = _single_gpu_text(wanted, total, request.spec.executor)
        yield Rejection(code=name, text=text, required=required, available=available)
    leased = [name for name in free.available(sharded=sharded).lacking(wanted) if name not in lacking]
    defaults = capabilities.exhausted_defaults(wanted, free.resources)
    if policy.is_whole and not free.resources.covers(capabilities.capacity.resources):
        yield _busy("the machine is offered as a whole only, and a part of it is leased")
    elif leased:
        yield _busy(f"{', '.join(leased)}: this worker has enough, but too much of it is leased")
    elif not policy.is_whole and defaults:
        yield _busy(f"{', '.join(defaults)}: all of it is leased, and a job that asks for none gets a part here")


def _single_gpu_text(wanted: Resources, single: Resources, executors: Sequence[ExecutorDescriptor]) -> str:
    named = ", ".join(str(executor) for executor in executors[:MAX_EXECUTORS])
    return (
        f"gpu: {wanted.gpu:g} requested, and the largest GPU of this worker has {single.gpu:g}; it gives several to "
        f"executors with sharded = true only, which distribute a model over them, not to {named or 'others'}"
    )


def _busy(text: str) -> Rejection:
    return Rejection(code="busy", text=text)
