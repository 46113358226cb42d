"""Bandwidth limits of file transfers: token buckets for all peers together and for each peer, up and down.

They limit only the bytes of files; requests, gossip and headers are not delayed. `EndpointSettings.rates` has the
rates. `transfer` waits here before each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal
from weakref import WeakKeyDictionary

import anyio

from hypha_net.token_bucket import TokenBucket

if TYPE_CHECKING:
    from hypha_net.endpoint import Endpoint
    from hypha_proto.ids import PeerId

Direction = Literal["sent", "received"]

MIN_RATE: Final = 16 << 10
"""Bytes a second below which a transfer would be considered stalled; the lowest limit that can be configured."""
BURST: Final = 0.1
"""Capacity of each bucket, in seconds of its rate."""
MAX_CHUNK: Final = 1 << 20
"""Maximum number of bytes that an unlimited transfer passes to its stream at a time."""


@dataclass(frozen=True, slots=True)
class BandwidthLimits:
    """Limits in bytes a second; None means unlimited."""

    upload: int | None = None
    """To all peers together."""
    download: int | None = None
    """From all peers together."""
    peer_upload: int | None = None
    """To each peer."""
    peer_download: int | None = None
    """From each peer."""


class TransferPacer:
    """Delays one transfer. Transfers that share a bucket alternate chunk by chunk, so they share it evenly."""

    def __init__(self, buckets: Sequence[TokenBucket]) -> None:
        self._buckets = tuple(buckets)
        slowest = min((bucket.rate for bucket in self._buckets), default=float("inf"))
        self.chunk_size = int(min(MAX_CHUNK, slowest * BURST / 2))
        """Maximum number of bytes to move between two calls of `wait`."""

    async def wait(self, amount: int) -> None:
        """Wait until `amount` bytes may move; return at once if nothing is limited."""
        if self._buckets:
            now = anyio.current_time()
            await anyio.sleep(max(bucket.take(amount, now) for bucket in self._buckets))


class BandwidthLimiter:
    """The token buckets of one endpoint."""

    def __init__(self, limits: BandwidthLimits) -> None:
        self._shared = {"sent": _bucket(limits.upload), "received": _bucket(limits.download)}
        self._peer_rate = {"sent": limits.peer_upload, "received": limits.peer_download}
        self._of_peer: dict[tuple[PeerId, Direction], TokenBucket] = {}

    def pacer(self, peer: PeerId, direction: Direction) -> TransferPacer:
        """Return the pacer of a transfer with `peer` that begins now."""
        buckets = (self._shared[direction], self._peer_bucket(peer, direction))
        return TransferPacer([bucket for bucket in buckets if bucket is not None])

    def _peer_bucket(self, peer: PeerId, direction: Direction) -> TokenBucket | None:
        rate = self._peer_rate[direction]
        if rate is None:
            return None
        return self._of_peer.setdefault((peer, direction), TokenBucket(rate, rate * BURST))


def _bucket(rate: int | None) -> TokenBucket | None:
    return None if rate is None else TokenBucket(rate, rate * BURST)


_limiters: WeakKeyDictionary[Endpoint, BandwidthLimiter] = WeakKeyDictionary()
_UNLIMITED: Final = TransferPacer(())


def limit_bandwidth(endpoint: Endpoint, limits: BandwidthLimits) -> None:
    """Limit the transfers of `endpoint` that begin from now on; a second call replaces the first."""
    _limiters[endpoint] = BandwidthLimiter(limits)


def pacer_for(endpoint: Endpoint, peer: PeerId, direction: Direction) -> TransferPacer:
    """Return the pacer of a transfer between `endpoint` and `peer` that begins now."""
    limiter = _limiters.get(endpoint)
    return _UNLIMITED if limiter is None else limiter.pacer(peer, direction)
