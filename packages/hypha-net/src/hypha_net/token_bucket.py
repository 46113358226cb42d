"""Token buckets: the rate limiter of this package, for bytes of transfers and for gossip messages.

A `TokenBucket` can delay (`take` returns how long to wait; used for bytes) and refuse (`available`; used for gossip,
through `KeyedTokenBucket`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import anyio

K = TypeVar("K", bound=Hashable)


class TokenBucket:
    """A token bucket, full at first. Has no clock: times are passed in, in seconds, and must not decrease."""

    __slots__ = ("_tokens", "_updated_at", "burst", "rate")

    def __init__(self, rate: float, burst: float) -> None:
        """Refill with `rate` tokens a second, up to `burst` tokens."""
        self.rate = rate
        self.burst = burst
        self._tokens = burst
        self._updated_at = float("-inf")

    def available(self, now: float) -> float:
        """Return the tokens in the bucket at `now`; negative while earlier takers wait."""
        return min(self.burst, self._tokens + (now - self._updated_at) * self.rate)

    def take(self, amount: float, now: float) -> float:
        """Take `amount` tokens, in debt if need be; return the seconds after `now` at which they may be used.

        Takers are served in order. Over any span of time at most `burst` plus `rate` times the span become usable.
        """
        self._tokens = self.available(now) - amount
        self._updated_at = now
        return max(0.0, -self._tokens / self.rate)


class KeyedTokenBucket(Generic[K]):
    """A token bucket for each of at most `max_keys` keys; drops the least recently used one."""

    def __init__(
        self, rate: float, burst: float, max_keys: int, clock: Callable[[], float] = anyio.current_time
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._max_keys = max_keys
        self._clock = clock
        self._buckets: OrderedDict[K, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def has_token(self, key: K) -> bool:
        """Return whether `key` may take a token now; keeps nothing for a key that is not known."""
        bucket = self._buckets.get(key)
        return bucket is None or bucket.available(self._clock()) >= 1

    def take(self, key: K) -> None:
        """Take one token of `key`."""
        bucket = self._buckets.get(key)
        if bucket is None:
            while len(self._buckets) >= self._max_keys:
                self._buckets.popitem(last=False)
            bucket = self._buckets[key] = TokenBucket(self._rate, self._burst)
        self._buckets.move_to_end(key)
        bucket.take(1, self._clock())
