"""What a connection learns of its link: how much to send at a time, and how long an answer takes."""

from __future__ import annotations

from typing import Final

import trio

MAX_FRAME: Final = 256 << 10
MIN_FRAME: Final = 16 << 10
"""Bounds on what is sent of one stream at a time."""
SLOW_FRAME: Final = 0.01
"""Seconds that a frame should not take."""
PACED_SECONDS: Final = 0.1
PACED_BYTES: Final = 8 << 20
"""After so much of either the size of frames is thought over: credit comes in large portions, and what waits for the
processor waits long now and then, so the time of few frames says little about the link."""
FEW_PINGS: Final = 4
"""Round trips of which the shortest is taken for the link's own, without the waits of a busy process."""
ASK_AGAIN: Final = 1.0
ASK_AGAIN_AT_FIRST: Final = 0.25
"""Seconds between pings that measure, and between the first few of them."""


class AdaptiveFrameSize:
    """Frames as large as the link takes within `SLOW_FRAME`: a request waits until the one under way is out."""

    def __init__(self) -> None:
        self.bytes = MAX_FRAME // 4
        """How many bytes of one stream are sent at a time now."""
        self._sent, self._seconds = 0, 0.0

    def took(self, length: int, seconds: float) -> None:
        """A frame of `length` bytes was out after `seconds`."""
        self._sent += length
        self._seconds += seconds
        if self._sent < PACED_BYTES and self._seconds < PACED_SECONDS:
            return
        fitting = SLOW_FRAME * self._sent / max(self._seconds, 1e-9)
        self._sent, self._seconds = 0, 0.0
        if self.bytes > fitting:
            self.bytes = max(MIN_FRAME, self.bytes // 2)
        elif self.bytes * 2 <= fitting:
            self.bytes = min(MAX_FRAME, self.bytes * 2)


class RttEstimator:
    """How long pings take to come back."""

    def __init__(self) -> None:
        self._shortest = float("inf")
        self._known = 0
        self._asked_at = float("-inf")
        self._number = 0

    def seconds(self) -> float:
        """The shortest, in seconds; 0 until there have been `FEW_PINGS`."""
        return self._shortest if self._known >= FEW_PINGS else 0.0

    def next_number(self) -> int | None:
        """The number of a ping that is to be sent now, never 0; none where it is too early for one."""
        now = trio.current_time()
        if now - self._asked_at < (ASK_AGAIN if self._known >= FEW_PINGS else ASK_AGAIN_AT_FIRST):
            return None
        self._number, self._asked_at = self._number % 0xFFFF + 1, now
        return self._number

    def came_back(self, number: int) -> None:
        """An answer has come; those to other pings than the last that measures say nothing."""
        if number == self._number != 0:
            self._known += 1
            self._shortest = min(self._shortest, trio.current_time() - self._asked_at)
