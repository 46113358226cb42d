"""Estimates of a connection's link: a frame size that fits its throughput, and its round-trip time.

The frame size bounds how long a small message waits behind a large one; the round-trip time decides whether a stream's
receive window may grow.
"""

from __future__ import annotations

from typing import Final

import trio

MIN_FRAME: Final = 16 << 10
MAX_FRAME: Final = 1 << 20
"""Bounds of the size of a data frame, in bytes."""
INITIAL_FRAME: Final = 64 << 10
"""Size of a data frame on a link of unknown throughput, in bytes."""
MAX_FRAME_SECONDS: Final = 0.01
"""Time that sending one frame should take at most."""
SAMPLE_SECONDS: Final = 0.1
SAMPLE_BYTES: Final = 8 << 20
"""The frame size is adjusted after either. Few frames say little: window updates come in large portions, and a busy
processor delays single frames."""
RATE_SECONDS: Final = 0.05
"""Period of a measured rate: long enough that bytes which waited for a busy process do not count as a fast link."""
MIN_PINGS: Final = 4
"""Pings after which the shortest round trip counts as the link's own, without delays of a busy process."""
PING_PAUSE: Final = 1.0
FIRST_PING_PAUSE: Final = 0.25
"""Seconds between measuring pings, and between the first `MIN_PINGS` of them."""


class AdaptiveFrameSize:
    """Frame size that the link sends within `MAX_FRAME_SECONDS`."""

    def __init__(self) -> None:
        self.bytes = INITIAL_FRAME
        """The size at present."""
        self._sent, self._seconds = 0, 0.0

    def add_sample(self, length: int, seconds: float) -> None:
        """Record that a frame of `length` bytes was sent in `seconds`."""
        self._sent += length
        self._seconds += seconds
        if self._sent < SAMPLE_BYTES and self._seconds < SAMPLE_SECONDS:
            return
        fitting = MAX_FRAME_SECONDS * self._sent / max(self._seconds, 1e-9)
        self._sent, self._seconds = 0, 0.0
        if self.bytes > fitting:
            self.bytes = max(MIN_FRAME, self.bytes // 2)
        elif self.bytes * 2 <= fitting:
            self.bytes = min(MAX_FRAME, self.bytes * 2)


class ReceiveRate:
    """Rate at which a connection receives, over the last period of at least `RATE_SECONDS` without a pause as long."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._began = self._last = float("-inf")
        self._received = 0

    def add(self, count: int, now: float) -> None:
        """Record that `count` bytes have arrived."""
        if now - self._last >= RATE_SECONDS:  # nothing was sent, which says nothing about the link
            self._began, self._received = now, 0
        self._last = now
        self._received += count
        if now - self._began >= RATE_SECONDS:
            self.bytes_per_second = self._received / (now - self._began)
            self._began, self._received = now, 0


class RttEstimator:
    """Round-trip time of the link: the shortest that a ping has taken."""

    def __init__(self) -> None:
        self._shortest = float("inf")
        self._samples = 0
        self._pinged_at = float("-inf")
        self._number = 0

    def seconds(self) -> float:
        """Return the round trip in seconds; 0 until there are `MIN_PINGS` samples."""
        return self._shortest if self._samples >= MIN_PINGS else 0.0

    @property
    def shortest(self) -> float | None:
        """The shortest round trip in seconds so far; None before the first reply."""
        return self._shortest if self._samples else None

    def next_ping(self) -> int | None:
        """Return the number of a ping to send now, never 0; None if it is too early for one."""
        now = trio.current_time()
        if now - self._pinged_at < (PING_PAUSE if self._samples >= MIN_PINGS else FIRST_PING_PAUSE):
            return None
        self._number, self._pinged_at = self._number % 0xFFFF + 1, now
        return self._number

    def add_reply(self, number: int) -> None:
        """Record the reply to a ping; replies to any but the last measuring one are ignored."""
        if number == self._number != 0:
            self._samples += 1
            self._shortest = min(self._shortest, trio.current_time() - self._pinged_at)
