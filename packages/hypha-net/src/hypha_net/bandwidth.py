"""How fast files may move: token buckets for all peers together and for each, up and down.

They bound the bytes of files. Requests, gossip and headers are not held back: a limited node answers as quickly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal
from weakref import WeakKeyDictionary

import anyio

if TYPE_CHECKING:
    from hypha_net.endpoint import Endpoint
    from hypha_proto.ids import PeerId

Direction = Literal["sent", "received"]

MIN_RATE: Final = 16 << 10
"""Bytes a second below which transfers would be taken for dead."""
BURST: Final = 0.1
"""Seconds' worth of bytes that may pass at once after a pause."""
MAX_PIECE: Final = 256 << 10
PEERS_REMEMBERED: Final = 4096


@dataclass(frozen=True, slots=True)
class BandwidthLimits:
    """Limits in bytes a second; none: no limit."""

    upload: int | None = None
    """To all peers together."""
    download: int | None = None
    """From all peers together."""
    peer_upload: int | None = None
    """To any one peer."""
    peer_download: int | None = None
    """From any one peer."""


class Bucket:
    """A token bucket, first come, first served. Knows no clock: times are passed in, and must not go backwards."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.burst = rate * BURST
        self._paid_until = float("-inf")

    def take(self, amount: int, now: float) -> float:
        """Take `amount` bytes at the time `now`; how many seconds later they may be used.

        Over any span of time no more than `burst` and `rate` times the span become usable.
        """
        start = max(self._paid_until, now - self.burst / self.rate)
        self._paid_until = start + amount / self.rate
        return max(0.0, self._paid_until - now)


class TransferPacer:
    """What one transfer may move. Transfers that share a bucket take turns piece by piece, so they share it evenly."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)
        slowest = min((bucket.rate for bucket in self._buckets), default=float("inf"))
        self.piece = int(min(MAX_PIECE, slowest * BURST / 2))
        """Most bytes to move between two calls of `wait`."""

    async def wait(self, amount: int) -> None:
        """Wait until `amount` bytes may move; at once where nothing is limited."""
        if self._buckets:
            now = anyio.current_time()
            await anyio.sleep(max(bucket.take(amount, now) for bucket in self._buckets))


class Limiter:
    """The buckets of one endpoint."""

    def __init__(self, rates: BandwidthLimits) -> None:
        self._all = {"sent": _bucket(rates.upload), "received": _bucket(rates.download)}
        self._rate_of_peer = {"sent": rates.peer_upload, "received": rates.peer_download}
        self._of_peer: OrderedDict[tuple[PeerId, Direction], Bucket] = OrderedDict()

    def pace(self, peer: PeerId, direction: Direction) -> TransferPacer:
        """The pace of a transfer with `peer` that begins now."""
        buckets = (self._all[direction], self._peer_bucket(peer, direction))
        return TransferPacer([bucket for bucket in buckets if bucket is not None])

    def _peer_bucket(self, peer: PeerId, direction: Direction) -> Bucket | None:
        rate = self._rate_of_peer[direction]
        if rate is None:
            return None
        bucket = self._of_peer.setdefault((peer, direction), Bucket(rate))
        self._of_peer.move_to_end((peer, direction))
        if len(self._of_peer) > PEERS_REMEMBERED:
            self._of_peer.popitem(last=False)
        return bucket


def _bucket(rate: int | None) -> Bucket | None:
    return None if rate is None else Bucket(rate)


_limiters: WeakKeyDictionary[Endpoint, Limiter] = WeakKeyDictionary()
_UNLIMITED: Final = TransferPacer(())


def limit_bandwidth(endpoint: Endpoint, rates: BandwidthLimits) -> None:
    """Bound the transfers of `endpoint` that begin from now on; a second call replaces the first."""
    _limiters[endpoint] = Limiter(rates)


def pace_of(endpoint: Endpoint, peer: PeerId, direction: Direction) -> TransferPacer:
    """The pace of a transfer between `endpoint` and `peer`."""
    limiter = _limiters.get(endpoint)
    return _UNLIMITED if limiter is None else limiter.pace(peer, direction)
