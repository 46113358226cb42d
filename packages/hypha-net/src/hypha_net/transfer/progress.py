"""Tells how a transfer goes, by events for whoever follows and bytes for telemetry, and gives up one that trickles."""

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

EVERY: Final = 1.0
"""Seconds between two events of a file that moves."""
SLOWEST: Final = 16 << 10
"""Bytes within `IDLE_TIMEOUT` below which a transfer is given up: sixty may share the smallest limit (`MIN_RATE`)."""

_MOVED: Final = instrumentation.Counter("hypha.transfer.io", "By", "Bytes of files moved between peers.")
_IO: Final[dict[Direction, instrumentation.Attributes]] = {
    "sent": {"network.io.direction": "transmit"},
    "received": {"network.io.direction": "receive"},
}


@dataclass(slots=True)
class Progress:
    """One transfer, its repeated attempts included."""

    endpoint: Endpoint
    peer: PeerId
    name: str
    direction: Direction
    size: int | None = None
    """Bytes in all, as soon as that is known."""
    done: int = 0
    """Bytes that are through, of the file."""
    moved_in_all: int = 0
    """Bytes that this transfer cost, those that were lost on the way included."""
    _told_at: float = float("-inf")
    _looked_at: float = 0.0
    _moved_then: int = 0

    @property
    def pace(self) -> TransferPacer:
        """How fast this one may go."""
        return pacer_for(self.endpoint, self.peer, self.direction)

    def begin(self, done: int, size: int | None) -> None:
        """Bytes begin to move, from `done` on; told once, however often the transfer is taken up again."""
        self.done, self.size = done, size
        self._looked_at, self._moved_then = anyio.current_time(), self.moved_in_all
        if self._told_at == float("-inf"):
            self._tell("begun")

    def moved(self, amount: int) -> None:
        """`amount` bytes more are through.

        Raises:
            BrokenOffError: they are too few for the time they took.
        """
        self.done += amount
        self.moved_in_all += amount
        _MOVED.add(amount, _IO[self.direction])
        now = anyio.current_time()
        if now - self._told_at >= EVERY:
            self._tell("moving")
        if now - self._looked_at >= IDLE_TIMEOUT:
            self._look(now)

    def _look(self, now: float) -> None:
        moved, took = self.moved_in_all - self._moved_then, now - self._looked_at
        if moved < SLOWEST and self.done != self.size:
            raise TransferInterruptedError(f"only {moved} bytes moved in {took:.0f} s")
        self._looked_at, self._moved_then = now, self.moved_in_all

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell how what happens inside ends."""
        try:
            yield
        except Exception as error:
            self._tell("failed", str(error) or type(error).__name__)
            raise
        except BaseException:
            self._tell("failed", "cancelled")
            raise
        self._tell("done")

    def _tell(self, state: Literal["begun", "moving", "done", "failed"], reason: str = "") -> None:
        self._told_at = anyio.current_time()
        self.endpoint.events.emit(
            Transferred(self.peer, self.name, self.direction, state, self.done, self.size, reason)
        )
