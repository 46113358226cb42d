"""Content that gathers in memory, by the rules of a file (`arriving`): hashed as it comes, seen only when it is whole.

It takes the memory of what has come, never of what was announced. Of a push that broke off the incomplete buffer waits
a while for the peer to come back (`Waiting`); a pull keeps its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_net.errors import TransferError
from hypha_net.transfer.io.partial_file import KEEP_FROM, MAX_KEPT, Verification
from hypha_proto.ids import PeerId

KEPT_BYTES: Final = 64 << 20
"""Bytes of incomplete pushes that one endpoint keeps in memory; the oldest go first."""
KEPT_FOR: Final = 30.0
"""Seconds that they wait: the peer takes up again within ten, or twenty where its dials time out."""


@dataclass(slots=True)
class PartialBuffer:
    """An incomplete buffer; see `arriving.Arriving`."""

    size: int | None
    """Bytes in all, if they were announced."""
    digest: str | None
    data: bytearray = field(default_factory=bytearray)
    whole: bool = False
    """Whether `data` is all of it, and right."""
    _verification: Verification = field(init=False)

    def __post_init__(self) -> None:
        self._verification = Verification(self.size, self.digest)

    @property
    def received(self) -> int:
        """Bytes that are there."""
        return len(self.data)

    @property
    def worth_keeping(self) -> bool:
        """Whether a later transfer of the same content may go on from it."""
        resumable = self.size is not None and self.digest is not None and not self.whole
        return resumable and self.received >= KEEP_FROM

    def goes_on_with(self, size: int | None, digest: str | None) -> bool:
        """Whether it is the beginning of the content that was announced."""
        return digest is not None and (self.size, self.digest) == (size, digest)

    def catch_up(self) -> None:
        """What is there was hashed when it came."""

    def store(self, block: memoryview) -> None:
        """Append a block.

        Raises:
            TransferError: there is no memory for it.
        """
        try:
            self.data += block
        except MemoryError as error:
            raise TransferError(f"no memory for {self.received + len(block)} bytes") from error
        self._verification.add(block)

    def finish(self) -> str:
        """Check length and digest; the digest.

        Raises:
            TransferError: it is not what was announced; nothing of it is kept.
        """
        try:
            found = self._verification.verdict(self.received)
        except TransferError:
            self.data = bytearray()
            raise
        self.whole = True
        return found


class Waiting:
    """Incomplete buffers of pushes that broke off, of all peers; bounded in bytes, number and time."""

    def __init__(self) -> None:
        self._kept: dict[tuple[PeerId, str], tuple[PartialBuffer, float]] = {}  # oldest first, each with its end
        self._watched = False

    def take(self, peer: PeerId, digest: str) -> PartialBuffer | None:
        """What came of this content from `peer`; it waits no more."""
        gathering, _ = self._kept.pop((peer, digest), (None, 0.0))
        return gathering

    def keep(self, peer: PeerId, gathering: PartialBuffer) -> None:
        """Let a buffer wait; the oldest give way to it."""
        if gathering.digest is None or gathering.received > KEPT_BYTES:
            return
        self._kept.pop((peer, gathering.digest), None)
        self._kept[peer, gathering.digest] = gathering, anyio.current_time() + KEPT_FOR
        while self.number > MAX_KEPT or self.bytes > KEPT_BYTES:
            del self._kept[next(iter(self._kept))]

    @property
    def number(self) -> int:
        """Buffers that wait."""
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Bytes that wait."""
        return sum(gathering.received for gathering, _ in self._kept.values())

    async def expire(self) -> None:
        """Drop what has waited too long, until nothing waits; returns at once where another call does so already."""
        if self._watched:
            return
        self._watched = True
        try:
            while self._kept:
                key, (gathering, end) = next(iter(self._kept.items()))
                await anyio.sleep(max(0.0, end - anyio.current_time()))
                if self._kept.get(key, (None, 0.0))[0] is gathering:
                    del self._kept[key]
        finally:
            self._watched = False
