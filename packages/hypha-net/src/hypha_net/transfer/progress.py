"""Progress of one transfer: events, bytes for telemetry, and the abort of a transfer that is too slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

import anyio

from hypha_net import instrumentation
from hypha_net.bandwidth import Direction, TransferPacer, pacer_for
from hypha_net.endpoint import Endpoint
from hypha_net.events import Transferred
from hypha_net.transfer.framing import IDLE_TIMEOUT, TransferInterruptedError
from hypha_proto.ids import PeerId

EVENT_INTERVAL: Final = 1.0
"""Seconds between two events of a running transfer."""
MIN_BYTES_PER_TIMEOUT: Final = 16 << 10
"""Bytes within `IDLE_TIMEOUT` below which a transfer is aborted: sixty may share the smallest limit (`MIN_RATE`)."""

_MOVED: Final = instrumentation.Counter("hypha.transfer.io", "By", "Bytes of files moved between peers.")
_IO: Final[dict[Direction, instrumentation.Attributes]] = {
    "sent": {"network.io.direction": "transmit"},
    "received": {"network.io.direction": "receive"},
}


@dataclass(slots=True)
class TransferProgress:
    """Progress of one transfer, including repeated attempts."""

    endpoint: Endpoint
    peer: PeerId
    name: str
    direction: Direction
    size: int | None = None
    """Total number of bytes, once it is known."""
    done: int = 0
    """Bytes of the content transferred so far."""
    total_moved: int = 0
    """Bytes sent or received over all attempts, including those that were lost."""
    _emitted_at: float = float("-inf")
    _checked_at: float = 0.0
    _moved_at_check: int = 0

    @property
    def pacer(self) -> TransferPacer:
        """The bandwidth limit of this transfer."""
        return pacer_for(self.endpoint, self.peer, self.direction)

    def begin(self, done: int, size: int | None) -> None:
        """Start an attempt at byte `done`; the first one emits an event.

        A further attempt may begin after more bytes than were counted: part of a failed chunk had arrived, and counts
        now.
        """
        if self._emitted_at != float("-inf"):
            self.total_moved += max(0, done - self.done)
        self.done, self.size = done, size
        self._checked_at, self._moved_at_check = anyio.current_time(), self.total_moved
        if self._emitted_at == float("-inf"):
            self._emit("begun")

    def advance(self, amount: int) -> None:
        """Count `amount` more bytes.

        Raises:
            TransferInterruptedError: the transfer is too slow.
        """
        self.done += amount
        self.total_moved += amount
        _MOVED.add(amount, _IO[self.direction])
        now = anyio.current_time()
        if now - self._emitted_at >= EVENT_INTERVAL:
            self._emit("moving")
        if now - self._checked_at >= IDLE_TIMEOUT:
            self._check_rate(now)

    def _check_rate(self, now: float) -> None:
        moved, took = self.total_moved - self._moved_at_check, now - self._checked_at
        if moved < MIN_BYTES_PER_TIMEOUT and self.done != self.size:
            raise TransferInterruptedError(f"only {moved} bytes moved in {took:.0f} s")
        self._checked_at, self._moved_at_check = now, self.total_moved

    @contextmanager
    def report_outcome(self) -> Iterator[None]:
        """Emit an event for how the code inside ends."""
        try:
            yield
        except Exception as error:
            self._emit("failed", str(error) or type(error).__name__)
            raise
        except BaseException:
            self._emit("failed", "cancelled")
            raise
        self._emit("done")

    def _emit(self, state: Literal["begun", "moving", "done", "failed"], reason: str = "") -> None:
        self._emitted_at = anyio.current_time()
        self.endpoint.events.emit(
            Transferred(self.peer, self.name, self.direction, state, self.done, self.size, reason)
        )
