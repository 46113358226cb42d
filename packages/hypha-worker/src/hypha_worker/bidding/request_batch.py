"""Requests that a worker has received: those that are not decided yet, and those for which nothing is free at present.

Pure. `bidding.request_queue` decides them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypha_proto.ids import PeerId
from hypha_proto.offers import OFFER_WINDOW, REQUEST_BATCH_SIZE, REQUEST_BATCH_WINDOW, WorkerRequest


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request and when it was received."""

    scheduler: PeerId
    request: WorkerRequest
    received_at: float
    """Seconds of the local monotonic clock."""

    @property
    def key(self) -> tuple[PeerId, uuid.UUID]:
        """Its scheduler and its id, which anybody can copy."""
        return self.scheduler, self.request.id

    @property
    def deadline(self) -> float:
        """When offers are no longer accepted, on the local clock; at most `OFFER_WINDOW` after receipt."""
        return self.received_at + min(OFFER_WINDOW, self.request.timeout_ms / 1000)


@dataclass(slots=True)
class RequestBatch:
    """Requests that are decided together, so that the best of them wins and not the first.

    The places are shared evenly among schedulers: a full batch makes room for a scheduler with few requests by dropping
    the lowest bid of the one with the most. Each scheduler keeps its highest bids.
    """

    window: float = REQUEST_BATCH_WINDOW
    """Seconds from the first request to the decision; not earlier if it is full, or a flood would be alone."""
    size: int = REQUEST_BATCH_SIZE
    _pending: dict[PeerId, list[ReceivedRequest]] = field(default_factory=dict)
    _opened_at: float = 0.0
    _count: int = 0

    @property
    def pending(self) -> tuple[ReceivedRequest, ...]:
        """The requests in it."""
        return tuple(received for requests in self._pending.values() for received in requests)

    def add(self, received_request: ReceivedRequest) -> None:
        """Add a request; if the batch is full, drop the one that has the least claim to its place."""
        if not self._count:
            self._opened_at = received_request.received_at
        own = self._pending.get(received_request.scheduler, [])
        if any(known.request.id == received_request.request.id for known in own):
            return
        if self._count >= self.size and not self._make_room(received_request, len(own)):
            return
        self._pending.setdefault(received_request.scheduler, []).append(received_request)
        self._count += 1

    def seconds_until_due(self, now: float) -> float | None:
        """Return the seconds until the batch must be decided (0: now), or None while it is empty."""
        return max(0.0, self._opened_at + self.window - now) if self._count else None

    def drain(self) -> list[ReceivedRequest]:
        """Return all requests in the order of their arrival, and empty the batch."""
        drained = self.pending
        self._pending, self._count = {}, 0
        return sorted(drained, key=lambda received: received.received_at)

    def remove(self, received_request: ReceivedRequest) -> None:
        """Remove a request that is in it."""
        held = self._pending[received_request.scheduler]
        held.remove(received_request)
        if not held:
            del self._pending[received_request.scheduler]
        self._count -= 1

    def _make_room(self, received_request: ReceivedRequest, own: int) -> bool:
        """Drop a request for another one of a scheduler that has `own` places; return whether there is room now."""
        largest = max(map(len, self._pending.values()))
        if largest - own >= 2:
            candidates = [received for held in self._pending.values() if len(held) == largest for received in held]
        elif own:
            candidates = self._pending[received_request.scheduler]
        else:  # more schedulers than places
            candidates = [*self.pending]
        worst = min(candidates, key=lambda received: (received.request.bid, -received.received_at))
        if largest - own < 2 and received_request.request.bid <= worst.request.bid:
            return False
        self.remove(worst)
        return True


class DeferredRequests(RequestBatch):
    """Requests that fit the machine but not what is free of it, until their deadline; as many as in a batch.

    A search publishes what it still lacks again and again, under new ids. What a scheduler published before is
    therefore dropped when it publishes anew, so that no offer is made for what it has found meanwhile.
    """

    @property
    def next_deadline(self) -> float:
        """The earliest deadline of a request, on the local clock; infinite without requests."""
        return min((received.deadline for received in self.pending), default=float("inf"))

    def add(self, received_request: ReceivedRequest) -> None:
        """Keep a request, unless its scheduler has more than its share."""
        self.drop_superseded([received_request])
        super().add(received_request)

    def drop_superseded(self, newer: Iterable[ReceivedRequest]) -> None:
        """Drop the requests that are repeated or obsolete now that their schedulers have published `newer` ones."""
        for received_request in newer:
            for kept in self.pending:
                if _supersedes(received_request, kept):
                    self.remove(kept)

    def forget(self, scheduler: PeerId) -> None:
        """Drop the requests of a scheduler."""
        for received in self.pending:
            if received.scheduler == scheduler:
                self.remove(received)


def _supersedes(newer: ReceivedRequest, older: ReceivedRequest) -> bool:
    """Return whether a request replaces another one of its scheduler: it repeats it, or was published later."""
    if newer.scheduler != older.scheduler:
        return False
    repeats = newer.request.spec == older.request.spec and newer.received_at >= older.received_at
    return repeats or newer.received_at > older.received_at + REQUEST_BATCH_WINDOW
