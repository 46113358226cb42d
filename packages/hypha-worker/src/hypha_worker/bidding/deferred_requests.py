"""Requests that fit the machine but not what is free of it at present.

Pure. `bidding.bidder` keeps them here until their deadline, and decides them again when a lease or an offer ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from hypha_proto.ids import PeerId
from hypha_proto.offers import REQUEST_BATCH_WINDOW
from hypha_worker.bidding.request_batch import ReceivedRequest, RequestBatch


class DeferredRequests(RequestBatch):
    """A bounded number of requests, shared evenly among schedulers as in a batch.

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
