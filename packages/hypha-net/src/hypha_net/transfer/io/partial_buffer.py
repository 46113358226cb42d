"""Incomplete content in memory: hashed as it arrives, and like a `partial_file` visible only when it is complete.

It uses memory only for the received bytes, whatever size was announced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypha_net.errors import TransferError
from hypha_net.transfer.io.integrity import ContentVerifier
from hypha_net.transfer.io.partial_file import MIN_RESUMABLE


@dataclass(slots=True)
class PartialBuffer:
    """Incomplete buffer; see `IncomingContent`."""

    size: int
    """Total number of bytes."""
    digest: str
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
        return not self.is_complete and self.received >= MIN_RESUMABLE

    def is_start_of(self, size: int, digest: str) -> bool:
        """Return whether this is the beginning of content with the announced size and digest."""
        return (self.size, self.digest) == (size, digest)

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
