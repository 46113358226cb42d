"""The latest requests and what became of them, for the worker's owner; logs why requests get no offer."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_net.log_throttle import LogThrottle
from hypha_proto.leases import Rejection
from hypha_worker.bidding.arbiter import Arbiter
from hypha_worker.bidding.rejection import DRAINING, PAUSED
from hypha_worker.bidding.request_batch import ReceivedRequest
from hypha_worker.leasing.lease_manager import LeaseManager
from hypha_worker.leasing.terms import LeaseUsage

_log = logging.getLogger(__name__)

KEPT_REQUESTS: Final = 20
LOG_INTERVAL: Final = 3600.0
"""Seconds between two log lines about refusals of one kind."""
_TAKEN: Final = "other requests were chosen, or its scheduler has published it again"


@dataclass(frozen=True, slots=True)
class DecidedRequest:
    """A request that was decided."""

    decided_at: float
    """Seconds since the epoch, for display."""
    received: ReceivedRequest
    price: float | None
    """Price of the offer; None if there was none."""
    reasons: tuple[str, ...] = ()
    """Why there was none."""


@dataclass(slots=True)
class RequestHistory:
    """The last `KEPT_REQUESTS` requests of one worker."""

    clock: Callable[[], float] = anyio.current_time
    wall_clock: Callable[[], float] = time.time
    _decided: deque[DecidedRequest] = field(default_factory=lambda: deque(maxlen=KEPT_REQUESTS))
    _throttle: LogThrottle = field(init=False)

    def __post_init__(self) -> None:
        self._throttle = LogThrottle(self.clock, LOG_INTERVAL)

    @property
    def decided(self) -> tuple[DecidedRequest, ...]:
        """The requests, the latest last."""
        return tuple(self._decided)

    def note_offer(self, received: ReceivedRequest, price: float) -> None:
        """Keep a request that gets an offer."""
        self._decided.append(DecidedRequest(self.wall_clock(), received, price))

    def note_refusal(self, received: ReceivedRequest, reasons: Sequence[Rejection]) -> None:
        """Keep a request that gets none; log the first of each kind, then one in an hour with the number of others.

        Args:
            reasons: why; none if others were preferred to it.
        """
        texts = tuple(reason.text for reason in reasons) or (_TAKEN,)
        self._decided.append(DecidedRequest(self.wall_clock(), received, None, texts))
        kind = reasons[0].code if reasons else None
        text = "no offer to scheduler %s: %s"
        self._throttle.log(_log, logging.INFO, kind, text, received.scheduler, "; ".join(texts))


def explain_refusal(arbiter: Arbiter, leases: LeaseManager, received: ReceivedRequest) -> tuple[Rejection, ...]:
    """Return every reason against an offer for a request now; empty if one would be made."""
    usage = leases.usage.get(received.scheduler, LeaseUsage())
    reasons = arbiter.rejection_reasons(received.scheduler, received.request, leases.free, usage)
    if leases.is_paused:
        reasons = (PAUSED, *reasons)
    return (DRAINING, *reasons) if leases.is_closed else reasons
