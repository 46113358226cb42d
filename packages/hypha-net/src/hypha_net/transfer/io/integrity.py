"""The check of the length and digest of incoming content, for `partial_file`."""

from __future__ import annotations

import hashlib

from blake3 import blake3

from hypha_net.errors import ContentMismatchError


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
