"""Incoming content, and the check of its length and digest.

`partial_file` and `partial_buffer` implement `IncomingContent`; `stream_copy` fills it.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

from blake3 import blake3

from hypha_net.errors import ContentMismatchError


class IncomingContent(Protocol):
    """Content that is being received, into a file or into memory. Its methods block; only one may run at a time."""

    @property
    def size(self) -> int:
        """Total number of bytes."""
        ...

    @property
    def received(self) -> int:
        """Number of bytes received so far."""
        ...

    def rehash_existing(self) -> None:
        """Hash what an earlier transfer left, so that more can be appended."""
        ...

    def append(self, block: memoryview) -> None:
        """Append a block; raise `TransferError` if there is no space for it."""
        ...

    def finish(self) -> str:
        """Verify length and digest, publish the content and return its digest.

        Raises:
            TransferError: it is not what was announced.
        """
        ...


class ContentVerifier:
    """Incremental check of content against the length and digest that were announced, if any."""

    def __init__(self, size: int | None, digest: str | None) -> None:
        self._size, self._digest = size, digest
        self._hasher = hashlib.sha256() if digest is not None and digest.startswith("sha256:") else blake3()

    def update(self, block: memoryview) -> None:
        """Hash the next block."""
        self._hasher.update(block)

    def verify(self, received: int) -> str:
        """Return the digest of all blocks, `received` bytes in total.

        Raises:
            ContentMismatchError: length or digest is not what was announced.
        """
        found = f"{self._hasher.name}:{self._hasher.hexdigest()}"
        if self._size is not None and received != self._size:
            raise ContentMismatchError(f"{received} bytes came of {self._size}")
        if self._digest is not None and found != self._digest:
            raise ContentMismatchError(f"the digest is {found} where {self._digest} was announced")
        return found
