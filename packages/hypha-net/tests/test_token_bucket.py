"""Token buckets by key: refill, and the bound on their number. `test_transfer` tests the rate of one bucket."""

from __future__ import annotations

from hypha_net.token_bucket import KeyedTokenBucket
from hypha_proto.ids import PeerId


def test_keyed_buckets_refill_with_time_and_are_bounded_in_number() -> None:
    now = [0.0]
    a, b, c = (PeerId.from_public_key(bytes([n]) * 32) for n in range(3))
    bucket = KeyedTokenBucket[PeerId](2, 3, 2, lambda: now[0])
    for _ in range(3):
        assert bucket.has_token(a)
        bucket.take(a)
    assert not bucket.has_token(a)
    assert bucket.has_token(b)
    now[0] = 0.5
    assert bucket.has_token(a)
    bucket.take(b)
    bucket.take(c)
    assert len(bucket) == 2
