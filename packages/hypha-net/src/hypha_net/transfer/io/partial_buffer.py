"""Incomplete content in memory, by the rules of `partial_file`: hashed as it arrives, visible only when it is complete.

It uses the memory of what was received, never of what was announced. The incomplete buffer of an interrupted push is
kept for a while, until the peer resumes (`SuspendedBuffers`); a pull keeps its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import anyio

from hypha_net.errors import TransferError
from hypha_net.transfer.io.integrity import ContentVerifier
from hypha_net.transfer.io.partial_file import MAX_SUSPENDED, MIN_RESUMABLE
from hypha_proto.ids import PeerId

MAX_SUSPENDED_BYTES: Final = 64 << 20
"""Bytes of interrupted pushes that one endpoint keeps in memory; the oldest are dropped first."""
SUSPENDED_TTL: Final = 30.0
"""Seconds for which they are kept: a peer resumes within ten, or twenty where its dials time out."""


@dataclass(slots=True)
class PartialBuffer:
    """Incomplete buffer; see `IncomingContent`."""

    size: int | None
    """Total number of bytes, if it was announced."""
    digest: str | None
    data: bytearray = field(default_factory=bytearray)
    is_complete: bool = False
    """Whether `data` is complete and verified."""
    _verifier: ContentVerifier = field(init=False)

    def __post_init__(self) -> None:
        self._verifier = ContentVerifier(self.size, self.digest)

    @property
    def received(self) -> int:
        """Number of bytes received so far."""
        return len(self.data)

    @property
    def is_resumable(self) -> bool:
        """Whether a later transfer of the same content may resume from it."""
        resumable = self.size is not None and self.digest is not None and not self.is_complete
        return resumable and self.received >= MIN_RESUMABLE

    def is_start_of(self, size: int | None, digest: str | None) -> bool:
        """Return whether this is the beginning of content with the announced size and digest."""
        return digest is not None and (self.size, self.digest) == (size, digest)

    def rehash_existing(self) -> None:
        """Do nothing: the content was hashed as it was received."""

    def append(self, block: memoryview) -> None:
        """Append a block.

        Raises:
            TransferError: there is no memory for it.
        """
        try:
            self.data += block
        except MemoryError as error:
            raise TransferError(f"no memory for {self.received + len(block)} bytes") from error
        self._verifier.update(block)

    def finish(self) -> str:
        """Verify length and digest and return the digest.

        Raises:
            TransferError: it is not what was announced; nothing of it is kept.
        """
        try:
            found = self._verifier.verify(self.received)
        except TransferError:
            self.data = bytearray()
            raise
        self.is_complete = True
        return found


class SuspendedBuffers:
    """Incomplete buffers of interrupted pushes, of all peers; bounded in bytes, number and time."""

    def __init__(self) -> None:
        self._kept: dict[tuple[PeerId, str], tuple[PartialBuffer, float]] = {}  # oldest first, with expiry times
        self._expiring = False

    def take(self, peer: PeerId, digest: str) -> PartialBuffer | None:
        """Remove and return the buffer of this content from `peer`, or None."""
        partial, _ = self._kept.pop((peer, digest), (None, 0.0))
        return partial

    def keep(self, peer: PeerId, partial: PartialBuffer) -> None:
        """Keep a buffer for its peer to resume; drop the oldest ones to make space."""
        if partial.digest is None or partial.received > MAX_SUSPENDED_BYTES:
            return
        self._kept.pop((peer, partial.digest), None)
        self._kept[peer, partial.digest] = partial, anyio.current_time() + SUSPENDED_TTL
        while self.number > MAX_SUSPENDED or self.bytes > MAX_SUSPENDED_BYTES:
            del self._kept[next(iter(self._kept))]

    @property
    def number(self) -> int:
        """Number of buffers kept."""
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Bytes kept."""
        return sum(partial.received for partial, _ in self._kept.values())

    async def expire(self) -> None:
        """Drop expired buffers until none is left; return at once if another call already does so."""
        if self._expiring:
            return
        self._expiring = True
        try:
            while self._kept:
                key, (partial, end) = next(iter(self._kept.items()))
                await anyio.sleep(max(0.0, end - anyio.current_time()))
                if self._kept.get(key, (None, 0.0))[0] is partial:
                    del self._kept[key]
        finally:
            self._expiring = False
